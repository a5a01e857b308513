"""A real daemon for each test that asks for one, and proof that nothing is left of it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import psutil
import pytest

from musterd import Client
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import FleetStatus, PoolStatus, WorkerStatus
from musterd.supervisor.ctl.connection import Connection, Unreachable

WAIT_SECONDS = 30.0
LOG_SECONDS = 0.05  # without a new line: five times what the writer of the log lets them wait
LOG_SECONDS_MAX = 2.0
DAEMON = (sys.executable, "-m", "musterd.supervisor")

# A suite that is run in the background has inherited "ignore Ctrl-C", and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes says more about what else this machine does than about us.
hypothesis.settings.register_profile("musterd", deadline=None)
hypothesis.settings.load_profile("musterd")


def wait_for(what: str, condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """The first true value of the condition; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    pytest.fail(f"not within {seconds} s: {what}")


class Muster:
    """One daemon in a directory of its own; may be killed and started again."""

    def __init__(self, folder: Path, pools: dict[str, dict[str, Any]], **settings: Any) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.state = folder / "state"
        self.tasks_socket = str(self.runtime / "tasks.sock")
        self.control_socket = str(self.runtime / "control.sock")
        self.log_path = folder / "daemon.log"
        config: dict[str, Any] = {
            "supervisor": {"runtime_dir": str(self.runtime), "state_dir": str(self.state)},
            # What else runs on this machine must not make these fleets smaller.
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
        """Of the daemon, from its next start on."""
        self._launcher = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"]

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(Unreachable):
            return self.status().state in ("running", "degraded")
        return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        """What it has written, with what its writer is about to."""
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
        return subprocess.run(
            [sys.executable, "-m", "musterd.supervisor.ctl", "-s", self.control_socket, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def stop(self) -> int:
        """Shut down in phases; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def processes(self) -> list[psutil.Process]:
        """Everything that lives in this daemon's directory, wherever it was re-parented to."""
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
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


@contextlib.contextmanager
def _short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="md-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A directory with a path short enough for Unix sockets."""
    with _short_folder() as folder:
        yield folder


@contextlib.contextmanager
def _musters(short_folder: Path, node: pytest.Item) -> Iterator[Callable[..., Muster]]:
    started: list[Muster] = []

    def make(
        pools: dict[str, dict[str, Any]],
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
        if getattr(node, "failed_call", False):
            print(each.log())
        wait_for("no process is left", lambda each=each: not each.processes(), 5.0)
        left = [path.name for path in each.runtime.glob("*.sock")]
        assert not left, f"sockets left behind: {left}"
        assert not list((each.state / "tmp").glob("*")), "temporary files left behind"


@pytest.fixture
def muster(short_folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Muster]]:
    """muster(pools={...}, supervisor__drain_timeout="5s", ...) -> a running daemon.

    Afterwards no process, socket or temporary file of it may be left.
    """
    with _musters(short_folder, request.node) as make:
        yield make


@pytest.fixture(scope="module")
def module_muster(request: pytest.FixtureRequest) -> Iterator[Callable[..., Muster]]:
    """The same for daemons that tests of a module share; each is closed by whoever made it."""
    with _short_folder() as folder, _musters(folder, request.node) as make:
        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        item.failed_call = True  # type: ignore[attr-defined]
    return report


@pytest.fixture(scope="session")
def waiting() -> Callable[..., Any]:
    return wait_for


@pytest.fixture(scope="session")
def gone() -> Callable[[psutil.Process], bool]:
    """gone(process), of what a killed daemon left: it runs no more. A zombie counts: who inherits
    it (PID 1, or these tests once one of them has become a subreaper) may not collect it soon."""

    def is_gone(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return is_gone
