"""The init of a worker: the parent of exactly one worker, which ends everything with it.

    supervisor (child subreaper)
      └─ init      PID 1 of its own namespace: waits for GO, forks the worker, then only reaps
           └─ worker   PID 2: has Python's usual signals and reaps its own children itself

A line to the supervisor, whose other end init and worker share, carries all messages:

    supervisor -> init     GO       you are my child by now: go on
    supervisor -> worker   Call     which worker you are; until then the process is a spare
    supervisor <- init     ALONE    the worker has ended, and nothing but this init is left

A worker is never PID 1: there an unhandled SIGTERM and even its own SIGKILL do nothing, and a
wait for -1 steals the exit statuses of `Popen` and asyncio.

With `pidns` the kernel kills everything left in the namespace when the init ends, and only then
shows the end of the init: an init that is gone has left nothing behind. An init without a child is
alone in its namespace, and says ALONE before it ends. With `reaper` there is no namespace; the init
is child subreaper and kills its descendants one by one before it ends, so the supervisor asks the
init (KILL_TREE) instead of killing it. `cgroup` is like `reaper`, with a control group of the
worker and its descendants that is killed as a whole.

This code runs in a fork of the fork server and imports nothing after the fork: pages stay shared.
"""

import contextlib
import faulthandler
import functools
import gc
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from setproctitle import setproctitle

from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.supervisor.processes import cgroups
from musterd.supervisor.processes.forkserver_messages import MESSAGE_BYTES_MAX, Call, decode_call
from musterd.supervisor.system.linux import (
    become_subreaper,
    descendants,
    die_with_parent,
    family,
    mount_own_proc,
)

GO, ALONE = b"G", b"A"
PIDNS, CGROUP, REAPER = "pidns", "cgroup", "reaper"

# Ends the worker and everything it started. A real-time signal, because the usual ones are
# forwarded, and far from those that the supervisor sends to workers (ipc/wire/signals.py).
KILL_TREE = signal.SIGRTMIN + 10
FORWARDED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}

# The end of a process takes a millisecond of a processor. After ALONE nobody waits for the end of
# the init, and the successor of the worker needs the processor now.
LINGER_SECONDS = 0.05
KILL_ROUND_SECONDS = 0.01  # between two searches for descendants that were forked meanwhile

EXIT_UNHANDLED = 1  # an exception came out of the worker's runtime
EXIT_NOT_STARTED = 75  # the init ended before it had a worker
_SIGNALLED = 128  # as shells report an end by signal

Work = Callable[[Callable[[], Call]], int]


class Launch(NamedTuple):
    """What the fork server gives to the init, which owns the descriptors."""

    pool: str
    containment: str  # PIDNS, CGROUP or REAPER
    group: str  # its control group, "" for none
    channel_fd: int  # the fork server's, for the worker to report its pid
    board_fd: int
    line_fd: int  # to the supervisor
    output_fd: int  # for all output of the init and the worker
    supervisor_fd: int  # a pidfd


def block_signals() -> None:
    """Block all signals, in the fork server: PID 1 never gets a signal it neither blocks nor
    handles, so an early one would be lost. Doing this before the fork keeps more pages shared."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def is_dead(pidfd: int) -> bool:
    """Tell whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def run_init(launch: Launch, work: Work) -> NoReturn:
    """Live as an init whose worker runs `work`. Signals are blocked already.

    `work` gets a function that waits until the worker is called.
    """
    code = EXIT_NOT_STARTED
    try:
        code = _init(launch, work)
    except BaseException:  # noqa: BLE001 - a fork must never return into the fork server's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _init(launch: Launch, work: Work) -> int:
    os.setsid()
    os.dup2(launch.output_fd, 1)
    os.dup2(launch.output_fd, 2)
    os.close(launch.output_fd)
    setproctitle(f"musterd: init {launch.pool}")
    board = Scoreboard.attach(launch.board_fd)
    if os.read(launch.line_fd, len(GO)) != GO:  # the supervisor is gone or changed its mind
        return EXIT_NOT_STARTED
    # GO says that the supervisor is our parent by now. If the supervisor dies before the next line
    # takes effect, no signal comes: hence the check of its pidfd (getppid() is 0 in here).
    die_with_parent(signal.SIGKILL if launch.containment == PIDNS else KILL_TREE)
    if is_dead(launch.supervisor_fd):
        return EXIT_NOT_STARTED
    if launch.containment == PIDNS:
        with contextlib.suppress(OSError):  # the fork server has tried this before and reported it
            mount_own_proc()
    else:
        become_subreaper()
    init_pid = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        board.say(f"an init of {launch.pool} cannot fork: {error}")
        return EXIT_NOT_STARTED
    if worker == 0:
        _run_worker(launch, board, init_pid, work)
    gc.disable()  # a collection would only make shared pages private
    for fd in (launch.channel_fd, launch.supervisor_fd, launch.board_fd):
        os.close(fd)
    status = _wait_for(worker)
    board.set_exit(status)
    if launch.containment != PIDNS:
        _kill_descendants(init_pid, Path(launch.group) if launch.group else None)
    if _is_alone():
        with contextlib.suppress(OSError):  # the supervisor is gone, or sees our end anyway
            os.write(launch.line_fd, ALONE)
            os.close(launch.line_fd)
            time.sleep(LINGER_SECONDS)
    return status if status >= 0 else _SIGNALLED - status


def _wait_for(worker: int) -> int:
    """Reap children and forward signals until the worker has ended; return its exit code."""
    awaited = {signal.SIGCHLD, KILL_TREE, *FORWARDED}
    while True:
        signum = signal.sigwait(awaited)
        if signum == KILL_TREE:
            os.kill(worker, signal.SIGKILL)
        elif signum != signal.SIGCHLD:
            os.kill(worker, signum)  # not reaped yet, so the pid is not reused
        else:
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                if pid == worker:
                    return os.waitstatus_to_exitcode(status)
                pid, status = os.waitpid(-1, os.WNOHANG)


def _is_alone() -> bool:
    """Reap what has ended; tell whether no child is left. Orphans become children of the init."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _kill_descendants(init_pid: int, group: Path | None) -> None:
    """Kill and reap all that is below this process or in the group, orphans included."""
    deadline = time.monotonic() + cgroups.KILL_SECONDS_MAX
    while time.monotonic() < deadline:
        if _is_alone() and (group is None or cgroups.is_empty(group)):
            return
        if group is not None:
            with contextlib.suppress(OSError):  # somebody removed the group: go on without it
                cgroups.kill(group)
        for pid in descendants(init_pid, family()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, KILL_ROUND_SECONDS)


def _run_worker(launch: Launch, board: Scoreboard, init_pid: int, work: Work) -> NoReturn:
    code = EXIT_UNHANDLED
    try:
        _prepare_worker(launch, init_pid)
        code = work(functools.partial(_wait_for_call, launch))
    except SystemExit as leave:
        code = _code_of(leave)
    except BaseException as error:  # noqa: BLE001 - a fork must never return into the init's code
        board.say(traceback.format_exception_only(error)[-1].strip())
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        os._exit(code & 0xFF)


def _prepare_worker(launch: Launch, init_pid: int) -> None:
    """Make this fork an ordinary process: own session, default signals.

    `random` seeds itself anew after each fork.
    """
    os.setsid()
    if launch.containment != PIDNS:  # in a namespace the kernel ends the worker with its init
        die_with_parent(signal.SIGKILL)
        if os.getppid() != init_pid:
            os._exit(EXIT_NOT_STARTED)
    if launch.group:
        cgroups.enter(Path(launch.group))
    # From the first moment on, as later: people ask what a worker does that does not come up.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.close(launch.supervisor_fd)
    setproctitle(f"musterd: spare {launch.pool}")


def _wait_for_call(launch: Launch) -> Call:
    """Wait to be told which worker this is; use its temporary directory. Exit if nobody calls."""
    frame = os.read(launch.line_fd, MESSAGE_BYTES_MAX)
    if not frame:  # the supervisor is gone or changed its mind
        os._exit(EXIT_NOT_STARTED)
    os.close(launch.line_fd)
    call = decode_call(frame)
    setproctitle(f"musterd: worker {launch.pool}/{call.index}")
    for variable in ("TMPDIR", "TMP", "TEMP"):
        os.environ[variable] = call.temp_dir
    tempfile.tempdir = call.temp_dir
    return call


def _code_of(leave: SystemExit) -> int:
    """Return the code that the interpreter would exit with."""
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code
    print(leave.code, file=sys.stderr)
    return EXIT_UNHANDLED
