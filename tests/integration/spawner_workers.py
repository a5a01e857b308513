"""Provide a small worker runtime for tests of the spawner, and a supervisor to be killed.

A worker's name says what it does: "idle", "exit:7", "signal:15", "raise:text", "words:text",
"busy:LEASE", "tree:FIFO", "tree-exit:FIFO", "import:MODULE", "thread".
"""

import importlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from musterd.ipc.wire.messages import TaskDeclaration
from musterd.ipc.wire.scoreboard import Scoreboard

TREE_SIZE = 6  # processes in a tree, the worker included


class Loaded(NamedTuple):
    name: str
    declarations: tuple[TaskDeclaration, ...]


def load(worker: str) -> Loaded:
    kind, _, value = worker.partition(":")
    if kind == "import":
        importlib.import_module(value)
    if kind == "thread":
        threading.Thread(target=time.sleep, args=(3600,), name="restless", daemon=True).start()
    return Loaded(worker, (TaskDeclaration("noop", timeout_ns=5),))


def run(
    loaded: Loaded,
    *,
    pool: str,
    called: Callable[[], Any],
    socket: str,
    board_fd: int,
    options: bytes,
    **worker_settings: float,
) -> int:
    kind, _, value = loaded.name.partition(":")
    board = Scoreboard.attach(board_fd)
    call = called()
    if options:
        _report(Path(options.decode()), pool, call.index, call.token, socket)
    match kind:
        case "exit":
            return int(value)
        case "signal":
            os.kill(os.getpid(), int(value))
        case "raise":
            raise ValueError(value)
        case "words":
            board.say(value)
            return 3
        case "busy":
            board.begin(int(value), time.monotonic_ns())
        case "tree" | "tree-exit":
            _grow(value)
            if kind == "tree-exit":
                return 0
    while True:
        signal.pause()


def _report(folder: Path, pool: str, index: int, token: str, socket: str) -> None:
    seen = {
        "pool": pool,
        "index": index,
        "token": token,
        "socket": socket,
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "proc_self": os.readlink("/proc/self"),
        "uid": os.getuid(),
        "session": os.getsid(0),
        "temp_dir": tempfile.gettempdir(),
        "TMPDIR": os.environ["TMPDIR"],
        "GREETING": os.environ.get("GREETING"),
        "stdin": os.readlink("/proc/self/fd/0"),
        "title": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "random": random.random(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "threads": [thread.name for thread in threading.enumerate()],
        "sigterm_default": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "fds": sorted(
            os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        ),
    }
    draft = folder / f".{token}"
    draft.write_text(json.dumps(seen))
    draft.rename(folder / f"{pool}-{index}.json")


def _grow(fifo: str) -> None:
    """Start the kinds of process that often survive their supervisor. All of them hold the FIFO
    open; one byte in the FIFO says that all are running."""
    fifo_fd = os.open(fifo, os.O_WRONLY)
    settled_read, settled_fd = os.pipe()
    script = f"import os, time; os.write({settled_fd}, b'x'); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", script], pass_fds=[fifo_fd, settled_fd])
    for session, orphan, deaf, stopped in (
        (False, False, False, False),
        (True, False, True, False),
        (True, True, True, False),
        (True, True, False, True),
    ):
        if os.fork() == 0:
            _settle(settled_fd, session, orphan, deaf, stopped)
    settled = 0
    while settled < TREE_SIZE - 1:
        settled += len(os.read(settled_read, TREE_SIZE))
    os.write(fifo_fd, b"x")


def _settle(settled_fd: int, session: bool, orphan: bool, deaf: bool, stopped: bool) -> NoReturn:
    if session:
        os.setsid()
    if orphan and os.fork():
        os._exit(0)
    if deaf:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
    os.write(settled_fd, b"x")
    if stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(3600)


def host(temp_root: str, containment: str, worker: str) -> NoReturn:
    """Run a supervisor with one worker; print its events until it is killed."""
    from musterd.supervisor.processes.spawner import Spawner

    spawner = Spawner("unused.sock", Path(temp_root), containment, runtime="spawner_workers")
    spawner.start_fork_server("parser", worker, b"", {})
    poll = select.poll()
    poll.register(spawner, select.POLLIN)
    while True:
        for event in spawner.events():
            print(event, flush=True)
            if type(event).__name__ == "ForkServerReady":
                print(*spawner.containment()["parser"], flush=True)
                spawner.spawn(1, "parser", 0)
        poll.poll(1000)


if __name__ == "__main__":
    host(*sys.argv[1:])
