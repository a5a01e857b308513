"""Threads beside the loop: how one wakes the loop, and how its death ends the daemon.

The store, the log, the memory probe, the janitor and background calls run in threads. The loop
does not notice when a thread is gone: submits would wait for a commit that nobody makes. So
ThreadWatch notes each exception that ends a thread, and the loop checks it in every turn. The
threads themselves forgive what they can (a full disk, a process that is gone).
"""

import contextlib
import logging
import os
import sys
import threading
import traceback

from musterd.ipc.errors import MusterdError

log = logging.getLogger("musterd")


class Wakeup:
    """A descriptor that is readable from set() to clear(). Any thread may set it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # after close() the number may belong to another file

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):  # it was not set
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Release the descriptor; set() and clear() do nothing from now on."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class ThreadEnded(MusterdError):
    """A thread of the daemon ended, and the daemon has to end with it."""


class ThreadWatch:
    """Notes the first exception that ends a thread."""

    def __init__(self) -> None:
        self._former = threading.excepthook
        self._ended = ""
        self._error: MusterdError | None = None  # the exception, where its text says what to do

    def open(self) -> None:
        """Watch all threads from now on."""
        self._former = threading.excepthook
        threading.excepthook = self._note

    def close(self) -> None:
        threading.excepthook = self._former

    def problem(self) -> str:
        """Return which thread ended and why; "" while all is well."""
        return self._ended

    def check(self) -> None:
        """Raise what ended a thread: its own MusterdError, else ThreadEnded."""
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
        if name == "log" and sys.__stderr__ is not None:  # the log can write nothing any more
            sys.__stderr__.write(f"musterd: thread {name!r} ended: {trace}\n")
