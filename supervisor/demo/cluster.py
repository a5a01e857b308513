"""`make demo-cluster`: three nodes and one PostgreSQL on this machine, and everything goes wrong.

Each node is a daemon with its own directories, and its own network where root allows. Three
programs submit tasks for sites with limits, one at each node. Meanwhile one node is killed with
SIGKILL and started again, one is stopped for longer than its lease, and PostgreSQL is restarted.
The demo returns 0 only if every task ended exactly once, as the database has it, no site ever had
more than its limit, and no process is left.
"""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click
import msgspec
import psutil
from msgspec import Struct, field
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from musterd.ipc.client.sync_client import Client
from musterd.ipc.client.sync_submit import TaskHandle
from musterd.ipc.errors import MusterdError, TaskError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.cluster.engine import EngineError
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.ctl.connection import Connection
from musterd.supervisor.demo.database import ACCOUNT, Database
from musterd.supervisor.demo.networks import Networks, Unavailable

NAMES = ("north", "east", "south")
WORKERS = 4  # of each node
SITES = 20
SITE_PLACES = 2  # tasks of one site at once, over all nodes
WORK_SECONDS = 25.0  # at least: the sites' rates are such that everything has time to go wrong
BUSY = 0.6  # share of the workers that this takes
LEASE_SECONDS = 5
KILL_AT, STOP_AT, RESTART_AT = 0.15, 0.35, 0.6  # shares of the tasks, each after the one before
AWAY_SECONDS = LEASE_SECONDS + 1.5  # of the killed node
STOPPED_SECONDS = LEASE_SECONDS + 3.0
START_SECONDS = 60.0
TASK_SECONDS = 300.0
STOP_SECONDS = 30.0
LEFT_SECONDS = 10.0
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FRAME_SECONDS = 0.1
BAR_WIDTH = 34
SAID = re.compile(r"\bcluster\.(\w+)[: ]")  # in the log
TOLD = ("away", "back", "fenced", "lease_over", "node_lost", "refused", "unreachable")
WORKER = """
import os
import time
from pathlib import Path

from musterd import task


@task(timeout=30)
def visit(ctx, seconds: float) -> str:
    with Path(__file__).with_name("runs").open("a") as file:
        file.write(f"{ctx.task_id}\\n")
    time.sleep(seconds)
    return os.environ["DEMO_NODE"]
"""
DATABASE = "tasks"
ROLE = "demo"
CHECK = """
SELECT (SELECT count(*) FROM musterd.live), count(*), count(DISTINCT id),
  count(*) FILTER (WHERE state = 4) FROM musterd.done
"""


class Node(Struct, eq=False):
    """One machine of the cluster, as far as one machine can show it."""

    name: str
    folder: Path
    launcher: list[str]
    process: "subprocess.Popen[bytes] | None" = None
    state: str = "starts"
    until: float = 0.0  # when the incident is over
    holds: int = 0  # tasks that it has claimed
    done: int = 0
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def tasks_socket(self) -> str:
        return str(self.folder / "run" / "tasks.sock")

    def start(self) -> None:
        command = [sys.executable, "-m", "musterd.supervisor", "run", "-c"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.launcher, *command, str(self.folder / "musterd.json")],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which ends the nodes
            )
        self.state = "starts"

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.is_up():
            if self.process is None or self.process.poll() is not None:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(FRAME_SECONDS)
        else:
            return
        raise MusterdError(f"the node {self.name} did not start:\n{self.log()}")

    def is_up(self) -> bool:
        with contextlib.suppress(MusterdError):
            with Connection(str(self.folder / "run" / "control.sock"), timeout=5.0) as connection:
                up = connection.get(rpc.Status(), FleetStatus).state in ("running", "degraded")
            if up:
                self.state = "runs"
            return up
        return False

    def look(self) -> list[psutil.Process]:
        """Return its processes that live; all that were ever seen are remembered."""
        with contextlib.suppress(psutil.Error):
            if self.process is not None and self.process.poll() is None:
                own = psutil.Process(self.process.pid)
                for each in (own, *own.children(recursive=True)):
                    self.seen[each.pid] = each
        return [each for each in self.seen.values() if _lives(each)]

    def kill(self) -> None:
        assert self.process is not None
        self.look()
        self.process.kill()
        self.process.wait()
        self.state, self.until = "killed", time.monotonic() + AWAY_SECONDS

    def freeze(self) -> None:
        """Stop everything, the daemon first, so that it starts nothing more."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        _signal(self.look(), signal.SIGSTOP)
        self.state, self.until = "stopped", time.monotonic() + STOPPED_SECONDS

    def thaw(self) -> None:
        if self.state == "stopped":
            _signal(self.look(), signal.SIGCONT)
            self.state = "runs"

    def terminate(self) -> None:
        """Begin to end, also where the node is stopped."""
        self.thaw()
        if self.process is not None and self.process.poll() is None and self.state != "ends":
            self.process.terminate()
            self.state = "ends"

    def stop(self) -> int | None:
        """End the node in order; return its exit code, None if it had to be killed."""
        process = self.process
        if process is None:
            return 0
        self.terminate()
        if process.poll() is None:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return None
        return process.returncode

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def runs(self) -> int:
        path = self.folder / "runs"
        return len(path.read_text().split()) if path.exists() else 0


class Demo:
    def __init__(self, tasks: int, *, networks: bool) -> None:
        self.tasks = tasks
        self.console = Console(highlight=False)
        self.folder = Path(tempfile.mkdtemp(prefix="musterd-cluster-"))
        self.folder.chmod(0o711)  # PostgreSQL, another user, has a folder in it
        self.nodes: list[Node] = []
        self._networks = networks
        self._owner = self.folder / "owner.url"
        self._most = 0  # of one site at once
        self._database_state = "runs"
        self._began = time.monotonic()

    # -- setting up ---------------------------------------------------------------------------

    def run(self) -> int:
        good = False
        try:
            with contextlib.ExitStack() as stack:
                good = self._run(stack)
        finally:
            left = self._end_what_is_left()
            shutil.rmtree(self.folder, ignore_errors=True)
        good = good and not left
        verdict = "[bold green]every task ended exactly once, and nothing is left[/]"
        self._say(verdict if good else "[bold red]the demo failed[/]")
        return 0 if good else 1

    def _run(self, stack: contextlib.ExitStack) -> bool:
        networks = self._make_networks(stack)
        database = self._make_database(stack, networks)
        self._make_nodes(stack, networks, database)
        with contextlib.ExitStack() as programs:
            clients = [programs.enter_context(_client(node)) for node in self.nodes]
            handles = self._submit(clients)
            ended = self._watch(handles, database)
        counted = self._check(database)
        self._tell_logs()
        return self._stop_all() and ended and counted

    def _make_networks(self, stack: contextlib.ExitStack) -> Networks | None:
        if not self._networks:
            return None
        if os.geteuid() != 0:
            self._say("the nodes share the network of this machine: only root may make others")
            return None
        try:
            networks = Networks(len(NAMES))
        except Unavailable as error:
            self._say(f"the nodes share the network of this machine: {error}")
            return None
        stack.callback(networks.close)
        return networks

    def _make_database(self, stack: contextlib.ExitStack, networks: Networks | None) -> Database:
        settings, launcher = {}, []
        if networks is not None:
            account = pwd.getpwnam(ACCOUNT)
            settings = {"listen_addresses": "*"}  # of the hub, where nobody else is
            launcher = networks.hub(account.pw_uid, account.pw_gid)
        database = Database(self.folder / "database", settings, launcher)
        stack.callback(database.stop)
        database.start()
        database.execute(f"CREATE DATABASE {DATABASE}")
        self._owner.touch(mode=0o600)
        self._owner.write_text(database.url(DATABASE))
        self._musterctl("cluster", "migrate")
        (row,) = database.execute("SHOW server_version")
        place = f"127.0.0.1:{database.port}" if networks is None else "a network of its own"
        self._say(f"[bold]PostgreSQL {str(row[0]).split()[0]}[/] runs on {place}, fsync on")
        rate = self.tasks / SITES / WORK_SECONDS
        limits = f'rate = "{rate:.2f}/s"\nburst = 2\nmax_concurrent = {SITE_PLACES}\n'
        policy = self.folder / "policy.toml"
        policy.write_text("".join(f"[targets.site-{n}]\n{limits}" for n in range(SITES)))
        self._musterctl("cluster", "apply", str(policy))
        self._say(
            f"{SITES} sites, each at most {SITE_PLACES} tasks at once and {rate:.1f} a second, "
            f"over all nodes"
        )
        return database

    def _musterctl(self, *words: str) -> None:
        command = [sys.executable, "-m", "musterd.supervisor.ctl", "--url-file", str(self._owner)]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MusterdError(f"musterctl {' '.join(words)}: {done.stderr or done.stdout}")

    def _make_nodes(
        self, stack: contextlib.ExitStack, networks: Networks | None, database: Database
    ) -> None:
        password = secrets.token_hex(16)
        database.execute(
            f"CREATE ROLE {ROLE} LOGIN PASSWORD '{password}' IN ROLE musterd_node", name=DATABASE
        )
        for number, name in enumerate(NAMES, start=1):
            host = "127.0.0.1" if networks is None else networks.hub_address(number)
            url = f"postgresql://{ROLE}:{password}@{host}:{database.port}/{DATABASE}"
            launcher = [] if networks is None else networks.node(number)
            node = Node(name, self.folder / name, launcher)
            _configure(node, url)
            self.nodes.append(node)
            stack.callback(node.stop)
            node.start()
        stack.callback(self._terminate)  # all at once, before each is waited for
        for node in self.nodes:
            node.wait_until_up()
        where = "each in a network of its own" if networks is not None else "on loopback"
        self._say(f"[bold]nodes[/] {', '.join(NAMES)} with {WORKERS} workers each, {where}")

    def _submit(self, clients: list[Client]) -> list[TaskHandle]:
        """Submit a third of the tasks at each node; each takes half to one and a half `usual`."""
        usual = BUSY * WORKERS * len(NAMES) * WORK_SECONDS / self.tasks
        handles: list[TaskHandle] = []
        for number, client in enumerate(clients):
            mine = range(number, self.tasks, len(clients))
            handles += client.submit_many(
                [
                    (
                        "visits.visit",
                        {"seconds": usual * (0.5 + n % 11 / 10)},
                        {"target": f"site-{n % SITES}"},
                    )
                    for n in mine
                ]
            )
        for client in clients:
            client.flush(START_SECONDS)
        self._say(f"[bold]{len(handles)} tasks[/] accepted and on disk")
        return handles

    # -- what goes wrong ----------------------------------------------------------------------

    def _go_wrong(self, database: Database) -> Iterator[None]:
        """Let one thing after the other go wrong, a step at each call."""
        _, killed, stopped = range(3)
        node = self.nodes[killed]
        while self._share < KILL_AT or not node.holds:
            yield
        self._say(f"[red]{node.name} is killed with SIGKILL[/]; it had {node.holds} tasks")
        node.kill()
        while time.monotonic() < node.until:
            yield
        node.start()
        while not node.is_up():
            yield
        self._say(f"{node.name} is started again")
        node = self.nodes[stopped]
        while self._share < STOP_AT or not node.holds:
            yield
        lasts = f"for {STOPPED_SECONDS:g} s; the lease is {LEASE_SECONDS} s"
        self._say(f"[red]{node.name} is stopped[/] with {node.holds} tasks, {lasts}")
        node.freeze()
        while time.monotonic() < node.until:
            yield
        node.thaw()
        self._say(f"{node.name} goes on; what it had is no longer its own")
        while self._share < RESTART_AT:
            yield
        self._say("[red]PostgreSQL is restarted[/]")
        self._database_state = "restarts"
        yield
        database.stop()
        database.start()
        self._database_state = "runs"

    @property
    def _share(self) -> float:
        return sum(node.done for node in self.nodes) / self.tasks

    # -- watching -----------------------------------------------------------------------------

    def _watch(self, handles: list[TaskHandle], database: Database) -> bool:
        """Show progress until all tasks have ended and everything has gone wrong."""
        incidents, calm = self._go_wrong(database), False
        pending, failed = dict.fromkeys(handles), 0
        by_name = {node.name: node for node in self.nodes}
        engine = PostgresEngine(database.url(DATABASE))
        self._began = time.monotonic()
        with Live(console=self.console, refresh_per_second=10, transient=True) as live:
            while (pending or not calm) and time.monotonic() < self._began + TASK_SECONDS:
                for handle in [each for each in pending if each.done()]:
                    del pending[handle]
                    try:
                        by_name[handle.result()].done += 1
                    except TaskError as error:
                        failed += 1
                        self._say(f"[red]{error}[/]")
                self._look_at(engine)
                live.update(self._picture())
                calm = calm or next(incidents, self) is self
                time.sleep(FRAME_SECONDS)
        engine.close()
        self.console.print(self._picture())
        if pending or not calm:
            self._say(f"[red]{len(pending)} tasks did not end in {TASK_SECONDS:g} s[/]")
        within = self._most <= SITE_PLACES
        colour = "" if within else "[red]"
        self._say(
            f"{colour}a site had at most {self._most} tasks at once, {SITE_PLACES} are allowed"
        )
        return calm and within and not pending and not failed

    def _look_at(self, engine: PostgresEngine) -> None:
        try:
            held = {view.name: view.claims for view in engine.nodes()}
            inside = [view.inside for view in engine.sites()]
        except EngineError:
            return  # PostgreSQL is restarted
        for node in self.nodes:
            node.holds = held.get(node.name, 0)
            node.look()
        self._most = max([self._most, *inside])

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for head, justify in (("node", "left"), ("state", "left"), ("has", "right")):
            table.add_column(head, justify=justify)  # type: ignore[arg-type]
        table.add_column("done", justify="right", min_width=5)
        table.add_column("")
        for node in self.nodes:
            colour = "green" if node.state == "runs" else "red"
            left = node.until - time.monotonic()
            rest = (
                f", {left:.0f} s more" if node.state in ("killed", "stopped") and left > 0 else ""
            )
            bar = ProgressBar(self.tasks, node.done, width=BAR_WIDTH)
            state = Text(f"{node.state}{rest}".ljust(17), colour)
            table.add_row(node.name, state, str(node.holds), str(node.done), bar)
        done = sum(node.done for node in self.nodes)
        whole = ProgressBar(self.tasks, done, width=BAR_WIDTH)
        colour = "green" if self._database_state == "runs" else "red"
        count = f"{done}/{self.tasks}"
        table.add_row("all", Text(f"PostgreSQL {self._database_state}", colour), "", count, whole)
        return Group(table, Text(f"{time.monotonic() - self._began:.0f} s", "dim"))

    def _say(self, line: str) -> None:
        self.console.print(line)

    # -- the end ------------------------------------------------------------------------------

    def _check(self, database: Database) -> bool:
        """Count ends in the database: there is one for each task."""
        ((alive, ends, ids, succeeded),) = database.execute(CHECK, name=DATABASE)
        runs = sum(node.runs() for node in self.nodes)
        self._say(
            f"in the database: {ends} ends of {ids} tasks, {succeeded} succeeded, {alive} are alive"
        )
        self._say(
            f"{self.tasks} tasks ran {runs} times: what a node had when it was lost ran again"
        )
        return (alive, ends, ids, succeeded) == (0, self.tasks, self.tasks, self.tasks)

    def _tell_logs(self) -> None:
        """Show what the nodes logged about it."""
        for node in self.nodes:
            kinds = [match[1] for match in SAID.finditer(node.log()) if match[1] in TOLD]
            counts = {kind: kinds.count(kind) for kind in kinds}
            said = ", ".join(f"{kind} {count}x" for kind, count in counts.items())
            self._say(f"[dim]logged by {node.name}: {said or 'nothing'}[/]")

    def _terminate(self) -> None:
        for node in self.nodes:
            node.terminate()

    def _stop_all(self) -> bool:
        self._terminate()
        codes = [node.stop() for node in self.nodes]
        self._say(f"the nodes left in order: exit codes {', '.join(map(str, codes))}")
        return codes == [0] * len(codes)

    def _end_what_is_left(self) -> list[psutil.Process]:
        """End processes that should have ended, and return them; also those of a start that Ctrl-C
        interrupted."""
        left = {each.pid: each for each in psutil.Process().children(recursive=True)}
        left |= {each.pid: each for node in self.nodes for each in node.look()}
        found = list(left.values())
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal(found, number)
            psutil.wait_procs(found, LEFT_SECONDS)
        return found


def _client(node: Node) -> Client:
    return Client(node.tasks_socket, connect_timeout=START_SECONDS)


def _configure(node: Node, url: str) -> None:
    node.folder.mkdir(mode=0o700)
    secret = node.folder / "url"
    secret.touch(mode=0o600)
    secret.write_text(url)
    (node.folder / "visits.py").write_text(WORKER)
    environment = {"PYTHONPATH": str(node.folder), "DEMO_NODE": node.name}
    pool = {"worker": "visits", "size": WORKERS, "env": environment}
    settings = {
        "supervisor": {
            "runtime_dir": str(node.folder / "run"),
            "state_dir": str(node.folder / "state"),
        },
        "cluster": {"url_file": str(secret), "node": node.name, "lease": f"{LEASE_SECONDS}s"},
        "pools": {"visits": pool},
    }
    (node.folder / "musterd.json").write_bytes(msgspec.json.encode(settings))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    """Give up; what was started is then ended, and not interrupted any more."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tasks", default=2000, show_default=True, type=click.IntRange(100), help="Tasks.")
@click.option("--networks/--no-networks", default=True, help="A network for each node (as root).")
def main(tasks: int, networks: bool) -> None:
    """Show a cluster of three nodes on this machine, and what it survives."""
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)
    demo = Demo(tasks, networks=networks)
    try:
        sys.exit(demo.run())
    except MusterdError as error:
        demo.console.print(f"[bold red]{error}[/]")
        sys.exit(1)
    except KeyboardInterrupt:
        demo.console.print("interrupted; everything was ended")
        sys.exit(130)


if __name__ == "__main__":
    main()
