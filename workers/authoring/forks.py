"""Forks of a worker's own code are no workers: only the leased process may speak.

A child that comes back from the handler (or from open(), healthy(), a hook, a clean-up) has a copy
of the whole runtime below it: the connection, the scoreboard, the lease. It would be a second
worker on the same connection. So the runtime checks whenever the worker's own code returns, and a
child ends right there: with 0 where that code returned, with the code of its sys.exit(), with 1
after any other error, which is logged. It runs no close() and no clean-ups, which are the worker's.

Children that never come back, such as those of multiprocessing, run to their own end.
"""

import contextlib
import logging
import os
import sys

log = logging.getLogger("musterd.worker")

EXIT_FAILED = 1

_child = False
_watching = False


def watch() -> None:
    """Take this process for the worker, and its forks from now on for none."""
    global _child, _watching
    _child = False
    if not _watching:  # a hook cannot be taken back
        os.register_at_fork(after_in_child=_forked)
        _watching = True


def _forked() -> None:
    global _child
    _child = True


def is_child() -> bool:
    """Tell whether a worker's own code forked this process."""
    return _child


def leave_if_child(error: BaseException | None = None) -> None:
    """End this process if it is such a fork. `error` is what the worker's code raised."""
    if _child:
        _leave(error)


def _leave(error: BaseException | None) -> None:
    code = 0
    try:
        if isinstance(error, SystemExit):
            if error.code is not None and not isinstance(error.code, int):
                log.error("%s", error.code)
                code = EXIT_FAILED
            else:
                code = error.code or 0
        elif error is not None:
            code = EXIT_FAILED
            log.error("process %d, which the worker forked, ended", os.getpid(), exc_info=error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
    finally:
        os._exit(code & 0xFF)
