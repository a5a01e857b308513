"""Run the user's clean-up functions at the end of the daemon, each in a process of its own.

    python -m musterd.supervisor.processes.cleanup MODULE:FUNCTION PARENT    calls the function
    python -m musterd.supervisor.processes.cleanup --check MODULE:FUNCTION   only imports it

They run one after the other, in the order of the configuration. Together they have
`cleanup_timeout`; each may use an equal share of the time left, and is then killed with everything
it started. Their output goes to the log. They run in the daemon's session, so that the spawner
leaves their exit status to us, and in process groups of their own.
"""

import importlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from musterd.ipc.user_code import make_importable
from musterd.supervisor.log import log
from musterd.supervisor.processes import environment
from musterd.supervisor.processes.handles import follow_output, how_it_ended
from musterd.supervisor.system.linux import die_with_parent

# -P: the working directory is not first in sys.path
COMMAND = (sys.executable, "-P", "-m", "musterd.supervisor.processes.cleanup")
CHECK = "--check"
LINES_MAX = 1000  # lines of one function's output that are logged
LINE_BYTES_MAX = 2000


class CleanedUp(Struct, frozen=True):
    """The outcome of one function."""

    name: str
    problem: str  # "" if the function returned
    seconds: float


class Cleanups:
    """Runs the functions, in a thread; the loop may call kill()."""

    def __init__(self) -> None:
        self._group = 0  # of the process that runs now, 0 for none
        self._over = False
        self._lock = threading.Lock()  # kill() sees every process that was started

    def run(self, names: tuple[str, ...], within_ns: int) -> list[CleanedUp]:
        end = time.monotonic() + within_ns / 1e9
        done = []
        for number, name in enumerate(names):
            began = time.monotonic()
            share = max(0.0, (end - began) / (len(names) - number))
            problem = self._run(name, share)
            done.append(CleanedUp(name, problem, time.monotonic() - began))
        return done

    def kill(self) -> None:
        """End the function that runs; start no other."""
        with self._lock:
            self._over = True
            _kill_group(self._group)

    def _run(self, name: str, seconds: float) -> str:
        """Run one function; return what went wrong, or ""."""
        with self._lock:
            if self._over:
                return "there was no time left for it"
            try:
                process = _start(name)
            except OSError as error:
                return f"it cannot be started: {error}"
            self._group = process.pid
        with process:
            lines = _Lines(name)
            ended = follow_output(process, seconds, lines.take)
            lines.close()
            with self._lock:
                self._group = 0
            _kill_group(process.pid)  # before wait(): until then the number is not reused
            code = process.wait()
        if not ended:
            return f"it was killed after {seconds:.1f} s, its share of cleanup_timeout"
        return f"it {how_it_ended(code)}" if code else ""


def _start(name: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, name, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
        env=environment.of_daemon(),
    )


def _kill_group(group: int) -> None:
    if group:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return  # the group is empty


class _Lines:
    """The output of one function, as lines of the log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rest = b""
        self._count = 0

    def take(self, data: bytes) -> None:
        """Log complete lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_BYTES_MAX]
        for line in lines:
            self._log(line)

    def close(self) -> None:
        if self._rest:
            self._log(self._rest)
        if self._count > LINES_MAX:
            log.note("cleanup.output", function=self._name, left_out=self._count - LINES_MAX)

    def _log(self, line: bytes) -> None:
        self._count += 1
        if self._count <= LINES_MAX and line.strip():
            text = line[:LINE_BYTES_MAX].decode(errors="replace").rstrip()
            log.note("cleanup.output", function=self._name, line=text)


# -- in the process of its own ----------------------------------------------------------------


def load(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function  # type: ignore[no-any-return]


def main(arguments: list[str]) -> int:
    make_importable()
    if arguments[0] == CHECK:
        load(arguments[1])
        return 0
    name, parent = arguments
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1  # the daemon is gone already
    result = load(name)()
    if inspect.iscoroutine(result):
        import asyncio  # 3 MB, which the supervisor does without

        asyncio.run(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
