"""One system's turn: its folder and Redis, its client, and an end without leftovers."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from fleet import ROOT, BenchError
from memory import pss
from versus.redis_server import Redis
from versus.systems import System

ANSWER_SECONDS = 180.0
STOP_SECONDS = 20.0
GONE_SECONDS = 5.0
LOOK_SECONDS = 0.02
LOG_LINES_SHOWN = 20
FOLDER = "BENCH_FOLDER"  # in the environment of every process that a turn starts


class Turn:
    """`with Turn(system, place, fsync) as turn: turn.ask("start", workers=2)`"""

    def __init__(self, system: System, place: Path, fsync: str) -> None:
        self.system = system
        self.folder = Path(tempfile.mkdtemp(prefix=f"{system.key}-", dir=place))
        self.redis = Redis(self.folder / "redis", fsync) if system.redis else None
        self.hello: dict[str, Any] = {}
        self._client: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._pending = b""

    def __enter__(self) -> Self:
        try:
            if self.redis is not None:
                self.redis.start()
            self.begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def begin(self) -> None:
        """Start the client, also again after it was killed."""
        environment = {
            **os.environ,
            **self.system.environment,
            FOLDER: str(self.folder),
            "BENCH_REDIS": self.redis.url if self.redis is not None else "",
        }
        if self.system.venv:  # as if activated: some systems start programs by name
            programs = str(Path(self.system.python()).parent)
            environment["PATH"] = os.pathsep.join((programs, os.environ.get("PATH", os.defpath)))
        else:  # uses the benchmark's own modules
            environment["PYTHONPATH"] = str(ROOT / "bench")
        with (self.folder / "client.log").open("ab") as log:
            self._client = subprocess.Popen(
                [self.system.python(), str(self.system.path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=environment,
                start_new_session=True,  # an interrupted benchmark stops the client in order
            )
        self._pending = b""
        self.hello = self.ask("hello")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Return the answer to a request; BenchError says why there is none."""
        assert self._client is not None
        assert self._client.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the client is dead: the answer says so
            self._client.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._client.stdin.flush()
        line = self._line(time.monotonic() + ANSWER_SECONDS)
        if line is None:
            raise BenchError(f"{self.system.label}: no answer to {do!r}:\n{self.log()}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.system.label}: {do}: {answer['error']}\n{self.log()}")
        return answer["ok"]

    def _line(self, deadline: float) -> bytes | None:
        assert self._client is not None
        assert self._client.stdout is not None
        file = self._client.stdout.fileno()
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                return None
            data = os.read(file, 65536)
            if not data:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def log(self) -> str:
        """Return the last output of its processes."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))]
        return "\n".join("\n".join(texts).splitlines()[-LOG_LINES_SHOWN:])

    @property
    def client_pid(self) -> int:
        assert self._client is not None
        return self._client.pid

    def look(self) -> list[psutil.Process]:
        """Return its processes except client and Redis; orphans are included."""
        for known in [self.client_pid, *self._seen]:
            with contextlib.suppress(psutil.Error):
                process = self._seen.get(known) or psutil.Process(known)
                for child in process.children(recursive=True):
                    self._seen.setdefault(child.pid, child)
        for process in self._marked():
            self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if _lives(process)]

    def _marked(self) -> Iterator[psutil.Process]:
        """Return detached processes, found by the folder in their environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                folder = process.environ().get(FOLDER)
                if folder == str(self.folder) and process.pid != self.client_pid:
                    yield process

    def weigh(self) -> float:
        """Return the PSS of everything that runs: broker, main process, workers."""
        pids = [process.pid for process in self.look()]
        if self.redis is not None:
            pids.append(self.redis.pid)
        if self.hello["in_process"]:
            pids.append(self.client_pid)
        return sum(pss(pid) for pid in pids)

    def kill_client(self) -> None:
        assert self._client is not None
        self._client.kill()
        self._close()

    def _close(self) -> None:
        assert self._client is not None
        self._client.wait()
        for file in (self._client.stdin, self._client.stdout):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._client is not None:
                self._end_client()
        finally:
            if self.redis is not None:
                self.redis.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end_client(self) -> None:
        """Ask the client to end; kill whatever is left."""
        assert self._client is not None
        assert self._client.stdin is not None
        self.look()
        with contextlib.suppress(OSError, ValueError):
            self._client.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._client.wait(STOP_SECONDS)
        if self._client.poll() is None:
            self._client.kill()
        self._close()
        deadline = time.monotonic() + GONE_SECONDS
        while (left := self.look()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, LOOK_SECONDS)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
