"""The fork server: a process per pool that imports the worker class once and forks workers.

    python -m musterd.supervisor.processes.forkserver FD    (one end of a SOCK_SEQPACKET pair)

    supervisor -> fork server   ForkServerSetup + [pidfd of the supervisor]      first, once
                                ForkRequest + [scoreboard, line, output pipe]    any number
    supervisor <- fork server   ForkServerUp or ForkServerDown                   first, once
                                Forked or ForkFailed                             one per request
    supervisor <- worker        WorkerPid                        its credentials carry the pid

For each request the fork server forks an intermediate process, which enters new namespaces, forks
the init (init.py) and ends. That end makes the init a child of the supervisor; the fork server
waits for it and then reports the init. The fork server does not know which worker the process will
be: the supervisor tells the process over its line, at once or when a worker is needed.

The fork server has one thread and makes no ZeroMQ context, because neither survives a fork. If the
import of the worker class starts threads, the fork server starts over without importing the class,
and each worker imports it after its fork: slower, with no shared memory, but safe.
"""

import contextlib
import functools
import gc
import importlib
import io
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct
from setproctitle import setproctitle

from musterd.ipc.errors import MusterdError, SpawnError
from musterd.ipc.user_code import (
    Source,
    error_place,
    make_importable,
    sources,
    users_traceback,
)
from musterd.ipc.wire.messages import TaskDeclaration
from musterd.supervisor.processes import marks
from musterd.supervisor.processes.containment import choose
from musterd.supervisor.processes.forkserver_messages import (
    MESSAGE_BYTES_MAX,
    Call,
    Forked,
    ForkFailed,
    ForkRequest,
    ForkServerDown,
    ForkServerSetup,
    ForkServerUp,
    WorkerPid,
    decode_request,
    decode_setup,
    encode,
)
from musterd.supervisor.processes.init import (
    EXIT_NOT_STARTED,
    PIDNS,
    Launch,
    block_signals,
    is_dead,
    run_init,
)
from musterd.supervisor.system.linux import die_with_parent, unshare_processes

# -P: the working directory is not first in sys.path
COMMAND = (sys.executable, "-P", "-m", "musterd.supervisor.processes.forkserver")

FDS_MAX = 3
REASON_CHARACTERS_MAX = 2000  # of a failed import; the whole traceback is on stderr


class _Restart(Struct, array_like=True, frozen=True):
    """What a fork server that starts over passes on to itself."""

    setup: ForkServerSetup
    supervisor_fd: int
    declarations: tuple[TaskDeclaration, ...]
    threads: tuple[str, ...]
    sources: tuple[Source, ...]


class _Down(Exception):
    """The fork server cannot serve; the text is for the operator."""


class _ForkServer:
    def __init__(
        self, channel: socket.socket, setup: ForkServerSetup, supervisor_fd: int, loaded: Any
    ) -> None:
        self._channel = channel
        self._setup = setup
        self._supervisor_fd = supervisor_fd
        self._loaded = loaded  # None: each worker imports for itself
        self._runtime = importlib.import_module(setup.runtime)
        self._containment, self._why, self._user = choose(setup)

    def serve(
        self,
        declarations: tuple[TaskDeclaration, ...],
        threads: tuple[str, ...],
        imported: tuple[Source, ...],
    ) -> None:
        """Report readiness and fork on request until the supervisor closes its end."""
        up = encode(ForkServerUp(declarations, self._containment, self._why, threads, imported))
        if len(up) > MESSAGE_BYTES_MAX:  # thousands of tasks have to be known, the files need not
            up = encode(ForkServerUp(declarations, self._containment, self._why, threads))
        sys.stdout.flush()  # else each fork would write the buffer again
        gc.collect()
        gc.freeze()  # collections in workers do not touch what was imported here: it stays shared
        block_signals()  # for the inits; SIGKILL or the end of the channel ends a fork server
        self._channel.send(up)
        while True:
            frame, fds = _receive(self._channel)
            if not frame:
                return
            try:
                answer = self._fork(decode_request(frame), *fds)
            finally:
                for fd in fds:
                    os.close(fd)
            self._channel.send(answer)

    def _fork(self, request: ForkRequest, board_fd: int, line_fd: int, output_fd: int) -> bytes:
        """Fork; return the message for the supervisor, as the intermediate process wrote it."""
        report_read, report_write = os.pipe()
        try:
            intermediate = os.fork()
        except OSError as error:
            os.close(report_write)
            os.close(report_read)
            return encode(ForkFailed(request.launch, f"the fork server cannot fork: {error}"))
        if intermediate == 0:
            os.close(report_read)
            self._intermediate(request, board_fd, line_fd, output_fd, report_write)
        os.close(report_write)
        _, status = os.waitpid(intermediate, 0)
        answer = os.read(report_read, MESSAGE_BYTES_MAX)
        os.close(report_read)
        code = os.waitstatus_to_exitcode(status)
        return answer or encode(
            ForkFailed(request.launch, f"the intermediate process ended with {code} and no report")
        )

    def _intermediate(
        self, request: ForkRequest, board_fd: int, line_fd: int, output_fd: int, report_fd: int
    ) -> NoReturn:
        try:
            with contextlib.suppress(OSError):  # the fork server has tried this and reported it
                marks.put_on(request.mark)
            if self._containment == PIDNS:
                unshare_processes(user=self._user)
            init_pid = os.fork()
            if init_pid == 0:
                os.close(report_fd)
                launch = Launch(
                    pool=self._setup.pool,
                    containment=self._containment,
                    group=request.group,
                    channel_fd=self._channel.fileno(),
                    board_fd=board_fd,
                    line_fd=line_fd,
                    output_fd=output_fd,
                    supervisor_fd=self._supervisor_fd,
                )
                run_init(launch, lambda called: self._work(request.launch, board_fd, called))
            os.write(report_fd, encode(Forked(request.launch, init_pid)))
        except OSError as error:
            reason = f"cannot make the worker's namespace: {error}"
            os.write(report_fd, encode(ForkFailed(request.launch, reason)))
        finally:
            os._exit(0)

    def _work(self, launch: int, board_fd: int, called: Callable[[], Call]) -> int:
        """Run the worker, in its process; `called` waits until the supervisor says which one."""
        try:
            self._channel.send(encode(WorkerPid(launch)))
        except (BrokenPipeError, ConnectionResetError):  # the supervisor died meanwhile
            return EXIT_NOT_STARTED
        self._channel.close()
        runtime, loaded = self._runtime, self._loaded
        if loaded is None:
            called = functools.cache(called)
            called()  # first: a spare that imports would share none of that memory
            loaded = runtime.load(self._setup.worker)
        code: int = runtime.run(
            loaded,
            pool=self._setup.pool,
            called=called,
            socket=self._setup.socket,
            board_fd=board_fd,
            options=self._setup.options,
            health_seconds=self._setup.worker_settings.health_seconds,
            beat_seconds=self._setup.worker_settings.beat_seconds,
            concurrency=self._setup.worker_settings.concurrency,
            threads=self._setup.worker_settings.threads,
            cache_seconds=self._setup.worker_settings.cache_seconds,
            cache_entries=self._setup.worker_settings.cache_entries,
            sessions=self._setup.worker_settings.sessions,
            artefacts=self._setup.worker_settings.artefacts,
        )
        return code


# -- start ------------------------------------------------------------------------------------


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    frame, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, FDS_MAX, socket.MSG_CMSG_CLOEXEC)
    return frame, fds


def _load(setup: ForkServerSetup) -> Any:
    """Import the worker class; turn whatever the import raises into a reason to show."""
    try:
        runtime = importlib.import_module(setup.runtime)
        loaded = runtime.load(setup.worker)
        if setup.worker_settings.concurrency > 1:
            runtime.check_concurrency(loaded, setup.worker_settings.concurrency)
        return loaded
    except BaseException as error:  # user code: a SystemExit is a failed import as well
        if (said := _said(error)) is not None:
            print(users_traceback(said), file=sys.stderr, end="")
        raise _Down(_reason(error, setup)) from error


def _said(error: BaseException) -> BaseException | None:
    """Return the error of users' code, whose traceback helps; None where it is one of ours."""
    return error.__cause__ if isinstance(error, MusterdError) else error


def _reason(error: BaseException, setup: ForkServerSetup) -> str:
    """Return the type, the message and the innermost line that is neither ours nor importlib's."""
    if isinstance(error, MusterdError):
        return str(error)[:REASON_CHARACTERS_MAX]  # the text says what, where and what to do
    runtime = str(sys.modules[setup.runtime].__file__) if setup.runtime in sys.modules else ""
    text = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
    text = f"cannot load {setup.worker!r}: {text}"
    where = error_place(error, frozenset({runtime}))
    return (f"{text}, at {where}" if where else text)[:REASON_CHARACTERS_MAX]


def _threads() -> tuple[str, ...]:
    """Return the names of all threads but this one, including those Python does not know."""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if thread is not main]
    known = {str(thread.native_id) for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        if task not in known:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                names.append(Path("/proc/self/task", task, "comm").read_text().strip())
    return tuple(names)


def _reset_signals() -> None:
    """Restore the default dispositions, whatever the supervisor or the import has set."""
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signum in (signal.SIGPIPE, signal.SIGXFSZ):
            continue  # Python ignores these: errors instead of signals
        if signal.getsignal(signum) not in (signal.SIG_DFL, None):
            signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _start_over(channel: socket.socket, restart: _Restart) -> NoReturn:
    """Become a fork server without the worker class; keep pid and channel."""
    memory = os.memfd_create("musterd-fork-server", 0)
    os.write(memory, encode(restart))
    os.lseek(memory, 0, os.SEEK_SET)
    os.set_inheritable(channel.fileno(), True)
    os.set_inheritable(restart.supervisor_fd, True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(COMMAND[0], [*COMMAND, str(channel.fileno()), str(memory)])


def _resume(channel: socket.socket, memory: int) -> None:
    with open(memory, "rb") as file:
        restart = msgspec.msgpack.decode(file.read(), type=_Restart)
    os.set_inheritable(restart.supervisor_fd, False)
    _prepare(restart.setup)
    fork_server = _ForkServer(channel, restart.setup, restart.supervisor_fd, None)
    fork_server.serve(restart.declarations, restart.threads, restart.sources)


def _begin(channel: socket.socket) -> None:
    frame, fds = _receive(channel)
    if not frame:
        return
    setup = decode_setup(frame)
    (supervisor_fd,) = fds
    if is_dead(supervisor_fd):
        return
    _prepare(setup)
    loaded = _load(setup)
    declarations = tuple(loaded.declarations)
    if threads := _threads():
        _start_over(channel, _Restart(setup, supervisor_fd, declarations, threads, sources()))
    _reset_signals()
    _ForkServer(channel, setup, supervisor_fd, loaded).serve(declarations, (), sources())


def _prepare(setup: ForkServerSetup) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # into a pipe it would write in blocks
        sys.stdout.reconfigure(line_buffering=True)
    setproctitle(f"musterd: fork server {setup.pool}")
    with contextlib.suppress(OSError):  # containment.py reports it
        marks.put_on(setup.mark)
    if setup.open_files:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (setup.open_files, hard))
    make_importable(setup.worker)


def main(arguments: list[str]) -> int:
    """Serve until the supervisor is gone. A second argument: this process has started over."""
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    die_with_parent(signal.SIGKILL)  # even in the middle of an import that hangs
    _reset_signals()
    try:
        if len(arguments) > 1:
            _resume(channel, int(arguments[1]))
        else:
            _begin(channel)
    except (_Down, SpawnError) as down:
        reason = str(down).encode(errors="backslashreplace").decode()  # a path need not be text
        channel.send(encode(ForkServerDown(reason, sources())))
        return 1
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the supervisor is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
