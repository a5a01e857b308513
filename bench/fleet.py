"""A daemon for a benchmark, in a temporary directory."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

from musterd import Client, MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import FATAL, RUNNING, FleetStatus, WorkerStatus
from musterd.supervisor.ctl.connection import Connection
from musterd.supervisor.system.linux import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
BENCH_WORKERS = "bench.workers"
PARSER_WORKER = "musterd.workers.parser:ParserWorker"

START_SECONDS = 60.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.02  # between polls of a daemon that starts
QUEUE_SIZE = 2_000_000  # nothing the benchmark submits is refused
SYNCS = 50
IN_MEMORY = frozenset(("tmpfs", "ramfs"))


class BenchError(MusterdError):
    """A measurement could not be made."""


def filesystem_of(path: Path) -> str:
    """Return the file system type of a path, such as "ext4"."""
    real = str(path.resolve())
    best = max(
        (
            part
            for part in psutil.disk_partitions(all=True)
            if real == part.mountpoint or real.startswith(part.mountpoint.rstrip("/") + "/")
        ),
        key=lambda part: len(part.mountpoint),
    )
    return best.fstype


def disk_directory() -> Path:
    """Return a temporary directory on a real disk: a commit to memory would be no commit."""
    candidates = (Path(tempfile.gettempdir()), Path("/var/tmp"), ROOT / "bench" / "results")
    for candidate in candidates:
        if candidate.is_dir() and filesystem_of(candidate) not in IN_MEMORY:
            return candidate
    raise BenchError(
        f"none of {', '.join(map(str, candidates))} is on a disk: set TMPDIR to a directory that is"
    )


def fsync_seconds(path: Path) -> float:
    """Return how long the disk takes to sync a page: the price of every commit."""
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            file.write(b"x" * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    path.unlink()
    return statistics.median(times)


def _python_path() -> str:
    """Return the environment in which workers find bench.workers."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _end_with_parent() -> None:
    """Have the daemon stop in order when the benchmark is killed."""
    die_with_parent(signal.SIGTERM)


class Fleet:
    """`with Fleet(folder, "full", {"parser": (PARSER_WORKER, 2)}) as fleet: ...`"""

    def __init__(
        self,
        folder: Path,
        durability: str,
        pools: dict[str, tuple[str, int]],
        options: Mapping[str, object] | None = None,  # of each pool
    ) -> None:
        self.folder = folder
        self._settings: dict[str, object] = {
            "supervisor.runtime_dir": folder / "run",
            "supervisor.state_dir": folder / "state",
            "supervisor.log_level": "warning",
            "store.durability": durability,
        }
        if "parser" not in pools:  # a default where no file has a pool
            self._settings["pools.parser.enabled"] = "false"
        for name, (worker, size) in pools.items():
            self._settings |= {
                f"pools.{name}.worker": worker,
                f"pools.{name}.size": size,
                f"pools.{name}.queue_size": QUEUE_SIZE,
            }
            self._settings |= {
                f"pools.{name}.{key}": value for key, value in (options or {}).items()
            }
        self._process: subprocess.Popen[bytes] | None = None

    def set(self, key: str, value: object) -> None:
        """Add a setting, before the daemon starts."""
        self._settings[key] = value

    def __enter__(self) -> Self:
        self.folder.mkdir(mode=0o700)
        self.start()
        return self

    def start(self, *, wait: bool = True) -> None:
        """Start the daemon in its existing folder, also again after it was killed."""
        config = self.folder / "bench.toml"
        config.write_text("# everything is given on the command line\n")
        command = [sys.executable, "-m", "musterd.supervisor", "run", "-c", str(config)]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": _python_path()},
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - a system call, and nothing else
            )
        if not wait:
            return
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except BenchError:
            if error is None:
                raise

    def stop(self) -> None:
        """Stop the daemon and wait until it has ended."""
        process = self._process
        assert process is not None
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise BenchError(
                f"the daemon did not stop within {STOP_SECONDS:g} s:\n{self.log()}"
            ) from None

    def wait(self) -> None:
        """Wait for the end of a daemon that was killed."""
        assert self._process is not None
        self._process.wait(STOP_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def client(self) -> Client:
        return Client(str(self.folder / "run" / "tasks.sock"))

    def connection(self) -> Connection:
        return Connection(str(self.folder / "run" / "control.sock"), ANSWER_SECONDS)

    def status(self) -> FleetStatus:
        with self.connection() as connection:
            return msgspec.json.decode(connection.request(rpc.Status()), type=FleetStatus)

    def worker(self, name: str) -> WorkerStatus:
        """Return the slot of this name, such as "parser/0"."""
        with self.connection() as connection:
            answer = connection.request(rpc.Status(names=[name]))
        return msgspec.json.decode(answer, type=FleetStatus).pools[0].workers[0]

    def forgive(self, name: str) -> None:
        """Reset the restart history of this slot: each crash counts as the first."""
        with self.connection() as connection:
            connection.request(rpc.Reset(names=[name]))

    def _wait_until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(MusterdError):
                status = self.status()
                if status.state == "running" and status.at_target:
                    return
                if any(pool.state == FATAL for pool in status.pools):
                    break
            time.sleep(LOOK_SECONDS)
        raise BenchError(f"the daemon did not start:\n{self.log()}")

    def wait_until_idle(self, pool: str) -> None:
        """Wait until every worker of the pool is idle."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            found = next(each for each in self.status().pools if each.name == pool)
            if all(worker.state == RUNNING and worker.pid for worker in found.workers):
                return  # a worker may be ready before its pid is known
            time.sleep(LOOK_SECONDS)
        raise BenchError(f"pool {pool} did not come to rest within {ANSWER_SECONDS:g} s")
