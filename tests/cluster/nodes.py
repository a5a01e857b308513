"""Real daemons as nodes of one cluster, and what can be put between them and PostgreSQL."""

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from postgres import PORT, Cluster, Server

from support.daemon import Muster
from support.waiting import wait_for

PASSWORD = "hunter2"
LEASE = "5s"  # the shortest one

WORKER = """
import os, time
from musterd import task

def note(what):
    with open(os.environ["RUNS"], "a") as file:
        file.write(f"{what} {os.environ['NODE']}\\n")

@task
def double(ctx, x: int) -> int:
    return 2 * x

@task(timeout=300)
def work(ctx, n: int, seconds: float = 0.0, until: str = "") -> int:
    note(f"{n} begins")
    time.sleep(seconds)
    while until and not os.path.exists(until):
        time.sleep(0.01)
    note(f"{n} ends")
    return n
"""


class Nodes:
    """Makes nodes of one cluster; `runs` tells which node has run what."""

    def __init__(self, database: Cluster, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.runs_path = folder / "runs"
        self.runs_path.touch()
        self.all: list[Muster] = []

    def make(
        self,
        name: str,
        *,
        worker: str = WORKER,
        url: str = "",
        lease: str = LEASE,
        size: int = 2,
        home: str = "",
        pools: Sequence[str] = ("jobs",),
        pool: Mapping[str, object] | None = None,
        **settings: object,
    ) -> Muster:
        """Make a node that is not started yet. `home` is its directory, `pool` what pools have."""
        folder = self.folder / (home or name)
        folder.mkdir()
        (folder / "jobs.py").write_text(worker)
        file = folder / "url"
        file.write_text(url or self.url())
        file.chmod(0o600)
        env = {"PYTHONPATH": str(folder), "RUNS": str(self.runs_path), "NODE": name}
        each = {"worker": "jobs", "size": size, "env": env, **(pool or {})}
        made = dict.fromkeys(pools, each)
        cluster = {"url_file": str(file), "node": name, "lease": lease}
        given = {f"cluster__{key}": value for key, value in cluster.items()}
        node = Muster(folder, made, **given, **settings)
        self.all.append(node)
        return node

    def start(self, *names: str, **options: object) -> list[Muster]:
        nodes = [self.make(name, **options) for name in names]  # type: ignore[arg-type]
        for node in nodes:
            node.start(wait=False)
        for node in nodes:
            self.wait_for(node)
        return nodes

    def wait_for(self, node: Muster) -> None:
        """Wait until a node is up, and a member of the cluster."""
        wait_for("the daemon is up", node._is_up)
        name = _name(node)
        wait_for("it has joined", lambda: self.tenure(name))

    def tenure(self, name: str) -> int:
        rows = self.database.sql(
            f"SELECT tenure FROM {self.database.schema}.node WHERE name = %s AND tenure <> 0", name
        )
        return int(str(rows[0][0])) if rows else 0

    def url(self, host: str = "", port: int | str = PORT) -> str:
        at = host or self.database.server.folder
        return f"postgresql://u_daemon:{PASSWORD}@/{self.database.name}?host={at}&port={port}"

    def runs(self, what: str = "ends") -> list[tuple[int, str]]:
        """Return each run of a task: its number, and the node."""
        lines = [line.split() for line in self.runs_path.read_text().splitlines()]
        return [(int(number), node) for number, when, node in lines if when == what]

    def check(self, ended: int) -> None:
        """Check that each of so many tasks has one final state, and none is left."""
        schema = self.database.schema
        rows = self.database.sql(f"SELECT count(*), count(DISTINCT id) FROM {schema}.done")
        assert rows == [(ended, ended)]
        assert self.database.sql(f"SELECT id, state FROM {schema}.live") == []

    def close(self) -> None:
        for node in self.all:
            thaw(node)
            node.close()
        for node in self.all:
            wait_for("no process is left", lambda each=node: not each.processes())  # type: ignore[misc]
            assert PASSWORD not in node.log()


def _name(node: Muster) -> str:
    name: str = json.loads(node.config_path.read_text())["cluster"]["node"]
    return name


@contextlib.contextmanager
def nodes_of(server: Server, folder: Path, name: str) -> Iterator[Nodes]:
    """A cluster in a database of its own. Its nodes are gone afterwards."""
    database = prepared(server, name)
    nodes = Nodes(database, folder)
    try:
        yield nodes
    finally:
        nodes.close()
        database.close()


def prepared(server: Server, name: str) -> Cluster:
    cluster = Cluster(server, name)
    cluster.keep_real_epoch()
    known = cluster.sql("SELECT FROM pg_roles WHERE rolname = 'u_daemon'")
    if not known:
        cluster.sql(f"CREATE ROLE u_daemon LOGIN PASSWORD '{PASSWORD}'")
    cluster.sql("GRANT musterd_node TO u_daemon")
    return cluster


# -- what is done to a node -----------------------------------------------------------------------


def kill_all(node: Muster) -> None:
    """Kill every process of a node at once."""
    found = node.processes()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert node.process is not None
    node.process.wait(60)
    wait_for("they are gone", lambda: not [each for each in found if each.is_running()])


def freeze(node: Muster) -> list[psutil.Process]:
    """Stop every process of a node, as a machine that is suspended."""
    found = node.processes()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    return found


def thaw(node: Muster) -> None:
    for process in node.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGCONT)


# -- what is between a node and PostgreSQL --------------------------------------------------------


class Proxy:
    """A TCP proxy on loopback before the socket of a PostgreSQL: cut, silent or slow."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.delay_seconds = 0.0
        self._silent = threading.Event()
        self._cut = False
        self._open: set[socket.socket] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            if self._cut or self._closed:
                near.close()
                continue
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(str(self._server.folder / f".s.PGSQL.{PORT}"))
            except OSError:
                near.close()
                far.close()
                continue
            self._open |= {near, far}
            self._begin(self._carry, near, far)
            self._begin(self._carry, far, near)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                ready, _, _ = select.select([source], [], [], 0.2)
                if not ready or self._silent.is_set():
                    if self._silent.is_set():
                        time.sleep(0.02)
                    continue
                data = source.recv(1 << 16)
                if not data:
                    break
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        self._cut = True
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def be_silent(self) -> None:
        """Carry nothing, and say nothing of it."""
        self._silent.set()

    def heal(self) -> None:
        self._cut = False
        self._silent.clear()

    def close(self) -> None:
        self._closed = True
        self.cut()
        self._silent.clear()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(timeout=10)
        for each in self._open:
            each.close()


@contextlib.contextmanager
def proxy_to(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server)
    try:
        yield proxy
    finally:
        proxy.close()


def exit_code(node: Muster) -> int:
    """Wait for a daemon that ends by itself."""
    assert node.process is not None
    return node.process.wait(60)


def is_root() -> bool:
    return os.getuid() == 0
