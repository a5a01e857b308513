"""A real daemon in a directory of its own, and proof that it leaves nothing behind."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import pytest

from musterd import Client
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import FleetStatus, PoolStatus, WorkerStatus
from musterd.supervisor.ctl.connection import Connection, Unreachable
from support.waiting import WAIT_SECONDS, wait_for

LOG_SECONDS = 0.05  # a log without new lines for so long is complete: five times its writer's delay
LOG_SECONDS_MAX = 2.0
END_SECONDS = 60.0
GONE_SECONDS = 20.0
DAEMON = (sys.executable, "-m", "musterd.supervisor")
# Lines of tracebacks that are ours: those of handlers have none of them.
OUR_FRAME = re.compile(r'File "[^"]*/musterd/(?:supervisor|ipc|workers)/[^"]*", line \d+, in ')

Pools = dict[str, dict[str, Any]]


class Muster:
    """One daemon in a directory of its own; may be killed and started again."""

    def __init__(self, folder: Path, pools: Pools, **settings: Any) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.state = folder / "state"
        self.tasks_socket = str(self.runtime / "tasks.sock")
        self.control_socket = str(self.runtime / "control.sock")
        self.log_path = folder / "daemon.log"
        config: dict[str, Any] = {
            "supervisor": {"runtime_dir": str(self.runtime), "state_dir": str(self.state)},
            # Other programs on this machine must not make these fleets smaller.
            "memory": {"enabled": False},
            "pools": pools,
        }
        for key, value in settings.items():
            section, _, name = key.partition("__")
            config.setdefault(section, {})[name] = value
        self.config_path = folder / "config.json"
        self.config_path.write_bytes(msgspec.json.encode(config))
        self.process: subprocess.Popen[bytes] | None = None
        self.popen_options: dict[str, Any] = {}
        self._launcher: list[str] = []
        self.clients: list[Client] = []

    def start(self, *, wait: bool = True) -> "Muster":
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._launcher, *DAEMON, "run", "-c", str(self.config_path)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self.popen_options,
            )
        if wait:
            wait_for("the daemon is up", self._is_up)
        return self

    def limit_descriptors(self, limit: int) -> None:
        """Limit the descriptors of the daemon, from its next start on."""
        self._launcher = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"]

    def tune(self, module: str, **constants: object) -> None:
        """Give constants of the product other values in its processes, from the next start on.

        Meant for intervals that no configuration has: a test need not wait as long as people may.
        """
        lines = [
            f"import {module} as module",
            *(f"module.{k} = {v!r}" for k, v in constants.items()),
        ]
        with (self.folder / "sitecustomize.py").open("a") as file:
            file.write("\n".join(lines) + "\n")
        environment = self.popen_options.setdefault("env", {**os.environ})
        environment["PYTHONPATH"] = str(self.folder)

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(Unreachable):
            return self.status().state in ("running", "degraded")
        return False

    def answers(self) -> bool:
        """Whether the daemon answers on its control socket, in whatever state the fleet is."""
        with contextlib.suppress(Unreachable):
            self.status()
            return True
        return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        """Return the log of the daemon once its writer rests."""
        deadline = time.monotonic() + LOG_SECONDS_MAX
        size = -1
        while self.process is not None and self.process.poll() is None:
            before, size = size, self.log_path.stat().st_size
            if size == before or time.monotonic() > deadline:
                break
            time.sleep(LOG_SECONDS)
        return self.log_path.read_text(errors="replace")

    def ask(self, params: rpc.Params, timeout: float = WAIT_SECONDS) -> Any:
        with Connection(self.control_socket, timeout=timeout) as connection:
            return msgspec.json.decode(connection.request(params))

    def status(self) -> FleetStatus:
        with Connection(self.control_socket, timeout=WAIT_SECONDS) as connection:
            return msgspec.json.decode(connection.request(rpc.Status()), type=FleetStatus)

    def pool(self, name: str) -> PoolStatus:
        return next(pool for pool in self.status().pools if pool.name == name)

    def worker(self, name: str) -> WorkerStatus:
        return next(w for w in self.pool(name.partition("/")[0]).workers if w.name == name)

    def client(self, **options: Any) -> Client:
        client = Client(self.tasks_socket, **options)
        self.clients.append(client)
        return client

    def ctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run musterctl; what it prints with --json is checked against its schema."""
        done = subprocess.run(
            [sys.executable, "-m", "musterd.supervisor.ctl", "-s", self.control_socket, *arguments],
            capture_output=True,
            text=True,
            timeout=END_SECONDS,
            check=False,
        )
        if "--json" in arguments:
            from support import json_answers  # loads every command of musterctl

            json_answers.check(arguments, done.stdout)
        return done

    def stop(self) -> int:
        """Shut down in phases; return the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_SECONDS)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(END_SECONDS)

    def processes(self) -> list[psutil.Process]:
        """Return every process in this daemon's directory, whatever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd().startswith(str(self.folder)) or any(
                    str(self.folder) in word for word in process.cmdline()
                ):
                    found.append(process)
        return found

    def close(self) -> None:
        for client in self.clients:
            with contextlib.suppress(Exception):
                client.close(timeout=0.1)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_SECONDS)


class Musters(Protocol):
    """The type of the fixture `muster`: muster({...}, supervisor__drain_timeout="5s", ...)."""

    def __call__(
        self, pools: Pools, *, start: bool = ..., as_user: int | None = ..., **settings: Any
    ) -> Muster: ...


class Jobs(Protocol):
    """The type of the fixture `jobs`: a daemon whose pool `jobs` runs the usual tasks."""

    def __call__(
        self,
        size: int = ...,
        *,
        pool: dict[str, Any] | None = ...,
        start: bool = ...,
        **settings: Any,
    ) -> Muster: ...


def is_gone(process: psutil.Process) -> bool:
    """Tell whether a process that a killed daemon left behind has ended.

    A zombie has ended: its new parent (PID 1, or these tests once one has become a subreaper)
    may collect it late.
    """
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def short_folders() -> Iterator[Path]:
    """Make a directory with a path short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="md-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_end(muster: Muster) -> None:
    """Wait until no process of the daemon is left."""
    wait_for("no process is left", lambda: not muster.processes(), GONE_SECONDS)


@contextlib.contextmanager
def musters(short_folder: Path, node: pytest.Item) -> Iterator["Musters"]:
    """Make daemons; check afterwards that they left no process, socket or temporary file."""
    started: list[Muster] = []

    def make(
        pools: Pools,
        *,
        start: bool = True,
        as_user: int | None = None,
        **settings: Any,
    ) -> Muster:
        folder = Path(tempfile.mkdtemp(dir=short_folder))
        made = Muster(folder, pools, **settings)
        if as_user is not None:
            short_folder.chmod(0o755)
            os.chown(folder, as_user, as_user)
            made.popen_options = {
                "user": as_user,
                "group": as_user,
                "extra_groups": [],
                "env": {**os.environ, "HOME": str(folder)},
            }
        started.append(made)
        return made.start() if start else made

    yield make
    for each in started:
        each.close()
    for each in started:
        if getattr(node, "failed_call", False) and each.log_path.exists():
            print(each.log())
        wait_for_end(each)
        left = [path.name for path in each.runtime.glob("*.sock")]
        assert not left, f"sockets left behind: {left}"
        assert not list((each.state / "tmp").glob("*")), "temporary files left behind"


def slowest_turn(log: str) -> float:
    """Return the slowest turn of the loop in processor time, because this machine may be busy."""
    slow = [float(found) for found in re.findall(r"event=loop.slow .*?cpu=([\d.]+)", log)]
    return max(slow, default=0.0)
