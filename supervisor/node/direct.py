"""Entry point of the private gateway of a program without a daemon: see direct_loop.py.

ipc/client/direct.py starts it, with the control socket as its standard input. Its first message is
the Start. Signals are ignored: whoever stops a service signals all of its processes, and the
program may still have something to deliver. The gateway ends with its program.
"""

import os
import signal
import socket
from typing import NoReturn

from setproctitle import setproctitle

from musterd.ipc.wire.direct import (
    MESSAGE_BYTES_MAX,
    REASON_CHARS_MAX,
    Start,
    State,
    decode_start,
    encode,
    place,
)

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Ended(Exception):
    """The program has ended, or needs no gateway."""


def main() -> int:
    """Serve the program at the other end of standard input until it ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    setproctitle("musterd: direct")
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    message = control.recv(MESSAGE_BYTES_MAX)
    if not message:
        return 0
    start = decode_start(message)
    try:
        _serve(control, start)
    except Ended:
        return 0
    except Exception as error:
        why = f"the gateway to {place(start.url)} failed: {type(error).__name__}: {error}"
        _tell_last(control, State("away", why[:REASON_CHARS_MAX], os.getpid()))
        raise


def _serve(control: socket.socket, start: Start) -> NoReturn:
    watch = _watch(start.program)
    try:
        from musterd.supervisor.node.direct_loop import Direct
    except ImportError as error:
        why = f"{error.name or error} cannot be imported: pip install 'musterd[cluster]'"
        _tell_last(control, State("refused", why[:REASON_CHARS_MAX], os.getpid()))
        raise Ended from None
    Direct(control, watch, start).run()


def _watch(pid: int) -> int:
    """Return a descriptor that is readable when a process has ended; -1 if there can be none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise Ended from None
    except OSError:  # an old kernel, or not allowed: the control socket tells, unless it was forked
        return -1


def _tell_last(control: socket.socket, state: State) -> None:
    try:
        control.send(encode(state), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return  # the program has ended, or does not listen
