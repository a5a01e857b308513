"""A real daemon for tests, in a directory of its own."""

import os
import select
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from musterd.ipc.client.async_client import AsyncClient
from musterd.ipc.client.sync_client import Client
from musterd.ipc.errors import ConfigurationError, MusterdError
from musterd.ipc.wire.paths import (
    SOCKET_PATH_BYTES_MAX,
    TASKS_VARIABLE,
    control_socket,
    tasks_socket,
)
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BACKOFF, FATAL, FleetStatus
from musterd.supervisor.config.load import load
from musterd.supervisor.config.sources import ENVIRONMENT_PREFIX, plain, read_files
from musterd.supervisor.ctl.connection import Connection, Unreachable
from musterd.testing import keeper as keeper_module
from musterd.testing.settings import Given, files_of, name_of

START_SECONDS = 60.0  # on a very busy machine
END_SECONDS = 60.0
DRAIN_SECONDS = 2.0  # for what runs at the end of the tests
LOOK_SECONDS = 0.02
ANSWER_SECONDS = 10.0
LOG_LINES_SHOWN = 40

# Sections by which a daemon reaches, or is reached by, others: not in a test, unless it asks.
OUTWARD = ("alerts", "cluster", "events", "http", "schedule")
# Keys of [supervisor] that belong to the machine where the configuration is used.
OF_THE_MACHINE = ("control_group", "log_file", "tasks_group", "view_group")


class DaemonFailed(MusterdError):
    """The daemon of the tests did not start, or does not answer; the message has its log."""


class LocalDaemon:
    """A daemon that runs for tests; see start_daemon()."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.config = folder / "musterd.json"
        self.tasks_socket = str(tasks_socket(folder / "run"))
        self.control_socket = str(control_socket(folder / "run"))
        self.pid = 0  # 0: it does not run
        self._clients: list[Client] = []
        command = [sys.executable, "-m", "musterd.supervisor", "run", "-c", str(self.config)]
        keeper = [sys.executable, "-P", keeper_module.__file__, str(folder), str(os.getpid())]
        self._keeper = subprocess.Popen(
            [*keeper, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**_environment(), **env, "PYTHONPATH": _python_path(env)},
            bufsize=0,  # so that select() tells of each line
            start_new_session=True,
        )

    def __repr__(self) -> str:
        return f"<LocalDaemon {self.folder}>"

    # -- clients ------------------------------------------------------------------------------

    def client(self, **options: Any) -> Client:
        """Return a new Client of this daemon; it is closed with the daemon, if not before."""
        client = Client(self.tasks_socket, **options)
        self._clients.append(client)
        return client

    def async_client(self, **options: Any) -> AsyncClient:
        """Return a new AsyncClient of this daemon, for `async with`."""
        return AsyncClient(self.tasks_socket, **options)

    def ctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run musterctl with these arguments; look at its returncode, stdout and stderr."""
        command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", self.control_socket]
        return subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=END_SECONDS,
            check=False,
        )

    def status(self) -> FleetStatus:
        """Return what `musterctl status` shows."""
        with Connection(self.control_socket, timeout=ANSWER_SECONDS) as connection:
            return connection.get(rpc.Status(), FleetStatus)

    @property
    def log(self) -> str:
        """What the daemon and its workers have written so far."""
        with suppress(FileNotFoundError):
            return (self.folder / keeper_module.LOG_FILE).read_text(errors="replace")
        return ""

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemon, at first or again; return when its workers are ready."""
        if self.pid:
            return
        self._say("start")
        self.pid = int(self._hear("started", START_SECONDS))
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            if time.monotonic() > deadline:
                raise DaemonFailed(self._with_log("the daemon did not get ready"))
            time.sleep(LOOK_SECONDS)

    def _is_up(self) -> bool:
        code = self._hear("exited", 0, wanted=False)
        if code:
            self.pid = 0
            raise DaemonFailed(self._with_log(f"the daemon has ended with exit code {code}"))
        try:
            status = self.status()
        except Unreachable:
            return False
        for pool in status.pools:
            if pool.state == FATAL:
                raise DaemonFailed(self._with_log(f"pool {pool.name} is FATAL: {pool.reason}"))
            for worker in pool.workers:
                if worker.state in (BACKOFF, FATAL):  # its second try is at once, and may do
                    raise DaemonFailed(self._with_log(f"{worker.name} fails: {worker.reason}"))
        return status.state == "running"

    def stop(self) -> int:
        """Shut the daemon down in its phases; return its exit code. start() starts it again."""
        return self._end(f"stop {DRAIN_SECONDS}") if self.pid else 0

    def kill(self) -> None:
        """Kill the daemon as `kill -9` does. start() starts it again, with what it had on disk."""
        if self.pid:
            self._end("kill")

    def _end(self, how: str) -> int:
        self._say(how)
        code = int(self._hear("exited", END_SECONDS))
        self.pid = 0
        return code

    def close(self) -> None:
        """End the daemon and remove its directory."""
        for client in self._clients:
            with suppress(MusterdError, TimeoutError):
                client.close(timeout=0.1)
        try:
            with suppress(DaemonFailed, BrokenPipeError):
                self.stop()
        finally:
            assert self._keeper.stdin is not None
            assert self._keeper.stdout is not None
            with suppress(BrokenPipeError):
                self._keeper.stdin.close()
            self._keeper.wait(END_SECONDS)
            self._keeper.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)  # if the keeper was killed

    # -- the keeper ---------------------------------------------------------------------------

    def _say(self, order: str) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{order}\n".encode())

    def _hear(self, word: str, seconds: float, *, wanted: bool = True) -> str:
        """Return what follows this word in the keeper's next line; "" if there is none in time."""
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], seconds)
        line = self._keeper.stdout.readline().decode().split() if ready else []
        if not line and not wanted:
            return ""
        if len(line) != 2 or line[0] != word:
            said = " ".join(line) or f"nothing within {seconds:g} s"
            raise DaemonFailed(
                self._with_log(f"expected {word!r} of the daemon's keeper, which said: {said}")
            )
        return line[1]

    def _with_log(self, what: str) -> str:
        lines = self.log.splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join([f"{what}; the end of its log:", *lines]) if lines else what


@contextmanager
def start_daemon(
    config: Given = None,
    *,
    pools: Mapping[str, Mapping[str, Any]] | None = None,
    secrets: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
) -> Iterator[LocalDaemon]:
    """Run a daemon in a directory of its own; end it after the block, and remove the directory.

    `config` is a configuration as the daemon has it: a file, several, or a table. `pools` is laid
    over its pools; a `worker` may be the class itself. `secrets` are given to all pools, `env` to
    the daemon. Of the configuration the sections alerts, cluster, events, http and schedule are
    left out, by which the daemon reaches others, unless `keep` names them. While the daemon is
    there, Client() without an address finds it.
    """
    unknown = set(keep) - set(OUTWARD)
    if unknown:
        raise ConfigurationError(f"keep={sorted(unknown)}: there are {', '.join(OUTWARD)}")
    with ExitStack() as undo:
        folder = _make_folder()
        daemon: LocalDaemon | None = None
        try:
            tree = _tree(config, folder, pools or {}, secrets or {}, keep)
            (folder / "musterd.json").write_bytes(msgspec.json.encode(tree))
            load([folder / "musterd.json"], environ={})
            daemon = LocalDaemon(folder, env or {})
        finally:
            if daemon is None:
                shutil.rmtree(folder, ignore_errors=True)
        undo.callback(daemon.close)
        daemon.start()
        undo.callback(_set_variable, TASKS_VARIABLE, os.environ.get(TASKS_VARIABLE))
        os.environ[TASKS_VARIABLE] = daemon.tasks_socket
        yield daemon


def _make_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="musterd-test-")
    longest = len(os.fsencode(f"{folder}/run/control.sock"))
    if longest > SOCKET_PATH_BYTES_MAX:  # $TMPDIR is too deep for sockets
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="musterd-test-", dir="/tmp")
    return Path(folder)


def _tree(
    config: Given,
    folder: Path,
    pools: Mapping[str, Mapping[str, Any]],
    secrets: Mapping[str, str],
    keep: Sequence[str],
) -> dict[str, Any]:
    """Return the configuration as a table: what was given, in the directory of the tests."""
    files = files_of(config, folder)
    tree: dict[str, Any] = {}
    if files:
        load(files, environ={})  # says what is wrong, and where
        tree = plain(read_files(files, files[0], []))
    for section in OUTWARD:
        if section not in keep:
            tree.pop(section, None)
    supervisor = tree.setdefault("supervisor", {})
    for key in OF_THE_MACHINE:
        supervisor.pop(key, None)
    supervisor |= {"runtime_dir": str(folder / "run"), "state_dir": str(folder / "state")}
    # Other programs on this machine must not make this fleet smaller.
    tree["memory"] = {**tree.get("memory", {}), "enabled": False}
    own = tree.get("pools", {})
    own = _laid_over(own, {name: _plain_pool(pool) for name, pool in pools.items()})
    if secrets:
        own = _laid_over(own, {name: {"env": dict(secrets)} for name in own})
    if own:
        tree["pools"] = own
    return tree


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return a table with the values of `above`, and where it has none those of `below`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        merged[key] = _laid_over(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _plain_pool(pool: Mapping[str, Any]) -> dict[str, Any]:
    worker = pool.get("worker")
    if isinstance(worker, type | ModuleType):
        return {**pool, "worker": name_of(worker)}
    return dict(pool)


def _environment() -> dict[str, str]:
    """Return the environment of the tests, without what is laid over configurations."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(ENVIRONMENT_PREFIX) and "__" in name)
    }


def _python_path(env: Mapping[str, str]) -> str:
    """Return where this process finds modules: the workers are to find the same."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {str(Path(sysconfig.get_path("stdlib"), "lib-dynload")), *site.getsitepackages()}
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    paths = [each or os.getcwd() for each in sys.path if each not in own]
    return os.pathsep.join(
        dict.fromkeys(each for each in [*given, *paths] if each and os.path.isdir(each))
    )


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
