"""The daemon's threads: one that ends by an exception ends the daemon, which says why.

The store writes and reads in threads, so do the log, the memory watch and the janitor; background
calls are threads too. A thread that is gone is not missed by the loop: submits would wait for a
commit that nobody makes. So whatever ends a thread is noted here, and the loop looks at it in each
turn. The threads themselves forgive what they can (a full disk, a process that is gone).
"""

import logging
import sys
import threading
import traceback

from musterd.ipc.errors import MusterdError

log = logging.getLogger("musterd")


class ThreadEnded(MusterdError):
    """A thread of the daemon ended, and the daemon has to end with it."""


class ThreadWatch:
    def __init__(self) -> None:
        self._former = threading.excepthook
        self._ended = ""
        self._error: MusterdError | None = None  # what it ended by, where that says what to do

    def open(self) -> None:
        """Note from now on how threads end."""
        self._former = threading.excepthook
        threading.excepthook = self._note

    def close(self) -> None:
        threading.excepthook = self._former

    def problem(self) -> str:
        """Which thread ended and why; "" while all is well."""
        return self._ended

    def check(self) -> None:
        """ThreadEnded if one has ended by an exception, or what it raised for people to read."""
        if self._error is not None:
            raise self._error
        if self._ended:
            raise ThreadEnded(f"{self._ended}. The daemon ends: start it again")

    def _note(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        what = "".join(traceback.format_exception_only(args.exc_type, args.exc_value)).strip()
        if isinstance(args.exc_value, MusterdError) and not self._ended:
            self._error = args.exc_value
        self._ended = self._ended or f"the thread {name!r} of the daemon ended: {what}"
        fields = {"EVENT": "daemon.thread", "REASON": what}
        if self._error is not None:
            log.critical("%s", self._error, extra={"fields": fields})
            return
        trace = "".join(
            traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        )
        log.critical("thread %r ended: %s", name, trace, extra={"fields": fields})
        if name == "log" and sys.__stderr__ is not None:  # nobody else would write it
            sys.__stderr__.write(f"musterd: thread {name!r} ended: {trace}\n")
