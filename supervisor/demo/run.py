"""`musterd demo`: the main job on a sample site, from start to clean shutdown.

The demo starts a sample site on loopback and a daemon in a temporary directory, submits prioritized
parse tasks (and browser tasks where there is a browser), kills a worker with SIGKILL, and shows the
results and the phased shutdown. It returns 0 only if every task came back.

As root, the daemon runs as an unprivileged user where possible: Chromium's sandbox needs one.
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from musterd.ipc.client.sync_client import Client
from musterd.ipc.client.sync_submit import TaskHandle
from musterd.ipc.errors import MusterdError, TaskError
from musterd.ipc.wire.messages import PRIORITY_NAMES
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.config.http import WEB_NEEDS
from musterd.supervisor.ctl.connection import Connection
from musterd.supervisor.demo.sample_site import PROMOS
from musterd.supervisor.system.commands import typed

PARSERS = 3
BROWSERS = 1
RENDERS = 3
START_SECONDS = 60.0
TASK_SECONDS = 90.0
STOP_SECONDS = 30.0
FRAME_SECONDS = 0.05  # between updates of the display
KILL_AFTER = 1 / 3  # the share of finished tasks at which a worker is killed
RESULTS_SHOWN = 12
TITLE_WIDTH = 36  # a row fits in 80 columns
SELECT = {"title": "h1", "price": ".price", "code": ".code"}


class Item(Struct, frozen=True):
    """One submitted task."""

    handle: TaskHandle
    group: str  # its row in the display: the priority, or "browser"


class Recovery(Struct):
    """The killed worker, and its replacement."""

    name: str
    pid: int
    killed_at: float
    new_pid: int = 0
    seconds: float = 0.0


class Demo:
    def __init__(self, tasks: int, browser: bool | None, *, stay: bool = False) -> None:
        self.console = Console()
        self.tasks = tasks
        self.folder = Path(tempfile.mkdtemp(prefix="musterd-demo-"))
        self.account = _unprivileged()
        self.browser = _has_browser() if browser is None else browser
        self.web = all(importlib.util.find_spec(name) is not None for name in WEB_NEEDS)
        self.stay = stay
        self.recovery: Recovery | None = None

    # -- site and daemon ----------------------------------------------------------------------

    @contextlib.contextmanager
    def site(self) -> Iterator[str]:
        """Run the sample site; yield its address."""
        process = subprocess.Popen(
            [sys.executable, "-m", "musterd.supervisor.demo.sample_site", "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            _end(process)

    @contextlib.contextmanager
    def daemon(self) -> Iterator["subprocess.Popen[bytes]"]:
        runtime, state = self.folder / "run", self.folder / "state"
        settings = {
            "supervisor.runtime_dir": runtime,
            "supervisor.state_dir": state,
            "pools.parser.worker": "musterd.workers.parser:ParserWorker",
            "pools.parser.size": PARSERS,
        }
        if self.web:
            settings["http.listen"] = "127.0.0.1:0"
        if self.browser:
            settings |= {
                "pools.browser.worker": "musterd.workers.browser:BrowserWorker",
                "pools.browser.size": BROWSERS,
            }
        (self.folder / "demo.toml").write_text("# everything is given on the command line\n")
        command = [
            sys.executable,
            "-m",
            "musterd.supervisor",
            "run",
            "-c",
            str(self.folder / "demo.toml"),
        ]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        account: dict[str, Any] = {}
        environment = {**os.environ, "HOME": str(self.folder)}
        if self.account is not None:
            os.chown(self.folder, self.account.pw_uid, self.account.pw_gid)
            account = {
                "user": self.account.pw_uid,
                "group": self.account.pw_gid,
                "extra_groups": [],
            }
        with (self.folder / "daemon.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.folder,
                **account,
            )
        try:
            yield process
        finally:
            _end(process)

    @property
    def tasks_socket(self) -> str:
        return str(self.folder / "run" / "tasks.sock")

    @property
    def control_socket(self) -> str:
        return str(self.folder / "run" / "control.sock")

    def status(self) -> FleetStatus:
        with Connection(self.control_socket, timeout=5.0) as connection:
            return connection.get(rpc.Status(), FleetStatus)

    def wait_until_ready(self, process: "subprocess.Popen[bytes]") -> FleetStatus:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            with contextlib.suppress(MusterdError):
                status = self.status()
                if status.state in ("running", "degraded"):
                    return status
            time.sleep(FRAME_SECONDS)
        raise MusterdError(f"the daemon did not start:\n{self.log()}")

    def log(self) -> str:
        return (self.folder / "daemon.log").read_text(errors="replace")

    # -- tasks --------------------------------------------------------------------------------

    def run(self) -> int:
        say = self.console.print
        with self.site() as site, self.daemon() as daemon:
            say(f"[bold]sample site[/] with {len(PROMOS)} promo pages on {site}")
            began = time.monotonic()
            status = self.wait_until_ready(daemon)
            pools = ", ".join(f"{pool.name} x{pool.size}" for pool in status.pools)
            who = f" as user {self.account.pw_name}" if self.account is not None else ""
            say(
                f"[bold]musterd[/] is up{who} (pid {daemon.pid}) after "
                f"{time.monotonic() - began:.2f} s: {pools}; containment {status.containment}"
            )
            self.show_ways_in(daemon)
            with Client(self.tasks_socket) as client:
                items = self.submit(client, site)
                self.watch(items)
                came_back = self.show_results(items)
            self.show_recovery()
            if self.stay:
                _wait_for_enter()
            stopped = self.shut_down(daemon)
        good = came_back and stopped and self.recovery is not None and self.recovery.new_pid > 0
        say("[bold green]every task came back[/]" if good else "[bold red]the demo failed[/]")
        if not good:
            say(self.log(), markup=False)
        return 0 if good else 1

    def show_ways_in(self, daemon: "subprocess.Popen[bytes]") -> None:
        """Tell how to look at the fleet, by addresses and commands that work as they are."""
        address = self.dashboard(daemon) if self.web else "pip install 'musterd[web]'"
        command = typed("musterctl", "-s", self.control_socket, "status", cwd=Path.cwd())
        for line in (f"dashboard: {address}", command):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def dashboard(self, daemon: "subprocess.Popen[bytes]") -> str:
        """Return the address of the dashboard once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and daemon.poll() is None:
            web = self.status().web
            if web is not None and web.state == "up":
                return web.address
            time.sleep(FRAME_SECONDS)
        raise MusterdError(f"the dashboard did not start:\n{self.log()}")

    def submit(self, client: Client, site: str) -> list[Item]:
        """Submit parse tasks of all priorities, LOW first: the bars show higher ones overtake."""
        items = []
        for number in range(self.tasks):
            priority = PRIORITY_NAMES[3 - number * 4 // self.tasks]
            path = PROMOS[number % len(PROMOS)].path if number % 4 else "/slow?seconds=0.2"
            arguments = {"url": site + path, "select": SELECT}
            handle = client.submit("parser.extract", arguments, priority=priority, timeout=30)
            items.append(Item(handle, priority))
        for _ in range(RENDERS if self.browser else 0):
            wanted = {"url": f"{site}/js", "wait_for": "code"}
            handle = client.submit("browser.render", wanted, timeout=60)
            items.append(Item(handle, "browser"))
        client.flush()
        self.console.print(f"[bold]{len(items)} tasks[/] accepted and on disk")
        return items

    def watch(self, items: list[Item]) -> None:
        """Show progress until all tasks have ended; kill a worker meanwhile."""
        progress = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        groups = {
            name: [item.handle for item in items if item.group == name]
            for name in (*PRIORITY_NAMES, "browser")
        }
        rows = {
            name: progress.add_task(name, total=len(group))
            for name, group in groups.items()
            if group
        }
        deadline = time.monotonic() + TASK_SECONDS
        with Live(console=self.console, refresh_per_second=20, transient=True) as live:
            while time.monotonic() < deadline:
                for name, row in rows.items():
                    progress.update(row, completed=sum(each.done() for each in groups[name]))
                live.update(Group(progress, self.fleet_table()))
                done = sum(item.handle.done() for item in items)
                if self.recovery is None and done >= len(items) * KILL_AFTER:
                    self.kill_a_worker()
                if done == len(items):
                    break
                time.sleep(FRAME_SECONDS)
        self.console.print(progress)

    def fleet_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for head in ("worker", "state", "pid", "task", "done", "restarts"):
            table.add_column(head, style="dim" if head in ("pid", "restarts") else "")
        for pool in self.status().pools:
            for worker in pool.workers:
                colour = {"BUSY": "green", "RUNNING": "cyan"}.get(worker.state, "yellow")
                table.add_row(
                    worker.name,
                    f"[{colour}]{worker.state}[/]",
                    str(worker.pid or ""),
                    worker.method,
                    str(worker.tasks_done),
                    str(worker.restarts),
                )
        return table

    def kill_a_worker(self) -> None:
        """Kill a parser worker with SIGKILL, a busy one if possible, and time its replacement."""
        workers = next(pool.workers for pool in self.status().pools if pool.name == "parser")
        victim = min(workers, key=lambda worker: (worker.state != "BUSY", worker.name))
        self.recovery = recovery = Recovery(victim.name, victim.pid, time.monotonic())
        os.kill(victim.pid, signal.SIGKILL)
        deadline = recovery.killed_at + START_SECONDS
        while time.monotonic() < deadline:
            for pool in self.status().pools:
                for worker in pool.workers:
                    if (
                        worker.name == victim.name
                        and worker.pid not in (0, victim.pid)
                        and worker.state in ("RUNNING", "BUSY")
                    ):
                        recovery.new_pid = worker.pid
                        recovery.seconds = time.monotonic() - recovery.killed_at
                        return

    # -- results ------------------------------------------------------------------------------

    def show_results(self, items: list[Item]) -> bool:
        table = Table(title=f"results (some of {len(items)})", title_justify="left")
        for head in ("priority", "title", "price", "code"):
            table.add_column(head, no_wrap=True, max_width=TITLE_WIDTH if head == "title" else None)
        came_back = 0
        for number, item in enumerate(items):
            try:
                value = item.handle.result(timeout=5.0)
            except (TaskError, TimeoutError) as error:
                table.add_row(item.group, f"[red]{error}[/]")
                continue
            came_back += 1
            if number % (len(items) // RESULTS_SHOWN or 1) == 1 or item.group == "browser":
                cells = [str(value.get(key) or "") for key in SELECT]
                table.add_row(item.group, *cells)
        self.console.print(table)
        self.console.print(f"{came_back} of {len(items)} tasks came back")
        return came_back == len(items)

    def show_recovery(self) -> None:
        found = self.recovery
        if found is None or not found.new_pid:
            self.console.print("[red]the killed worker was not replaced[/]")
            return
        self.console.print(
            f"[bold]{found.name}[/] (pid {found.pid}) was killed with SIGKILL; its replacement "
            f"(pid {found.new_pid}) was ready after [bold]{found.seconds * 1000:.0f} ms[/]"
        )

    def shut_down(self, daemon: "subprocess.Popen[bytes]") -> bool:
        began = time.monotonic()
        daemon.send_signal(signal.SIGTERM)
        try:
            code = daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        phases = [
            line.partition("phase=")[2].split()[0]
            for line in self.log().splitlines()
            if "phase=" in line
        ]
        self.console.print(
            f"shutdown: {' > '.join(phases)}; exit code {code} after "
            f"{time.monotonic() - began:.2f} s"
        )
        return code == 0


def _end(process: "subprocess.Popen[Any]") -> None:
    if process.stdin is not None:
        process.stdin.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _unprivileged() -> pwd.struct_passwd | None:
    """Return the user to run the daemon as, if we are root and it can read this installation."""
    if os.geteuid() != 0:
        return None
    account = pwd.getpwnam("nobody")
    probe = [sys.executable, "-c", "import musterd, msgspec, zmq"]
    try:
        done = subprocess.run(
            probe,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
            capture_output=True,
            check=False,
            cwd="/",
        )
    except OSError:
        return None
    return account if done.returncode == 0 else None


def _has_browser() -> bool:
    found = any(
        shutil.which(name)
        for name in (
            "chromium-headless-shell",
            "chromium",
            "/usr/lib/chromium/chromium",
            "google-chrome",
        )
    )
    return found and importlib.util.find_spec("playwright") is not None


def _wait_for_enter() -> None:
    """Wait for Enter or Ctrl-C, or the end of standard input."""
    print("everything is up until you press Enter", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.readline()


def run_demo(tasks: int, browser: bool | None, *, stay: bool = False) -> int:
    demo = Demo(tasks, browser, stay=stay)
    try:
        return demo.run()
    except MusterdError as error:
        demo.console.print(f"[bold red]{error}[/]")
        return 1
    finally:
        shutil.rmtree(demo.folder, ignore_errors=True)
