"""Between the loop and the log: a bounded buffer, and a thread of its own that writes.

A terminal stopped with Ctrl-S, a pipe nobody reads, a journald that is stopped and a full disk hold
up whoever writes there. That is this thread and never the loop: lines wait here up to a limit, and
those beyond it are counted. The count is a line of the log as soon as there can be one.

Both threads share the interpreter, and each time it changes hands the loop may have to wait for a
processor. So the writer comes rarely (PACE_SECONDS) and writes many lines at once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

LINES_MAX = 5000  # about ten seconds of a very talkative fleet
BYTES_MAX = 4 * 1024 * 1024
# What a record takes besides its texts: the object, its dict and the fields.
RECORD_BYTES = 500
# Of both limits, for what is no warning: the reason of a trouble comes through its noise.
ORDINARY_SHARE = 0.8
PACE_SECONDS = 0.01  # from the first line that waits to its writing
RETRY_SECONDS = 1.0  # after a line that could not be written: a full disk stays full for a while
CLOSE_SECONDS = 2.0  # for what is left at the end; whoever has stopped the log is not waited for

LEFT_OUT = "log.left_out"
LEFT_OUT_MESSAGE = "lines were left out: the log was not taken"


class Target(Protocol):
    """Where the lines go; it may block."""

    lines_at_once: int

    def take(self, records: list[logging.LogRecord]) -> None:
        """Write these, at most so many; OSError if they were not written."""

    def close(self) -> None: ...


class Outbox(logging.Handler):
    """Hands its records to `target` in a thread."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._change = threading.Condition()
        self._waiting: deque[tuple[logging.LogRecord, int]] = deque()
        self._bytes = 0  # of those that wait
        self._left_out = 0  # since the last line that said how many
        self._closing = False
        # Daemonic: one that is stuck in a write() must not keep the process.
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:  # its frames would be kept for as long as it waits
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        size = _size(record)
        share = 1.0 if record.levelno >= logging.WARNING else ORDINARY_SHARE
        with self._change:
            if (
                len(self._waiting) >= LINES_MAX * share
                or self._bytes + size > BYTES_MAX * share
                or self._closing
            ):
                self._left_out += 1
                return
            if not self._waiting:
                self._change.notify()
            if self._left_out:
                self._put(self._count(), RECORD_BYTES)
            self._put(record, size)

    def close(self) -> None:
        """What waits is written, if somebody takes it soon."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._writer.join(CLOSE_SECONDS)
        if not self._writer.is_alive():
            self._target.close()
        super().close()

    def _put(self, record: logging.LogRecord, size: int) -> None:
        self._waiting.append((record, size))
        self._bytes += size

    def _count(self) -> logging.LogRecord:
        """The line that says how many others are not there."""
        fields = {"EVENT": LEFT_OUT, "COUNT": self._left_out}
        self._left_out = 0
        return logging.makeLogRecord(
            {
                "name": "musterd",
                "levelno": logging.WARNING,
                "levelname": "WARNING",
                "msg": LEFT_OUT_MESSAGE,
                "fields": fields,
            }
        )

    # -- in the thread ------------------------------------------------------------------------

    def _write(self) -> None:
        while self._some_wait():
            if not self._closing:
                time.sleep(PACE_SECONDS)
            for batch in self._batches():
                try:
                    self._target.take(batch)
                except OSError:
                    self._leave_out(batch)
                    with self._change:
                        self._change.wait_for(lambda: self._closing, RETRY_SECONDS)
                except Exception:  # noqa: BLE001 - a line that cannot be written costs no other
                    self._write_each(batch)

    def _write_each(self, batch: list[logging.LogRecord]) -> None:
        for record in batch:
            try:
                self._target.take([record])
            except Exception:  # noqa: BLE001 - counted
                self._leave_out([record])

    def _leave_out(self, batch: list[logging.LogRecord]) -> None:
        with self._change:
            self._left_out += sum(map(_lines_of, batch))

    def _some_wait(self) -> bool:
        """When there is something to write; False at the end."""
        with self._change:
            while not self._waiting and not self._closing:
                if self._left_out:
                    self._put(self._count(), RECORD_BYTES)
                    return True
                self._change.wait()
            return bool(self._waiting)

    def _batches(self) -> Iterator[list[logging.LogRecord]]:
        """All that wait. They count as waiting until the next ones are asked for."""
        while True:
            with self._change:
                batch = list(islice(self._waiting, self._target.lines_at_once))
            if not batch:
                return
            yield [record for record, _ in batch]
            with self._change:
                for _, size in batch:
                    self._waiting.popleft()
                    self._bytes -= size


def _size(record: logging.LogRecord) -> int:
    fields: dict[str, Any] = getattr(record, "fields", {})
    texts = sum([len(value) for value in fields.values() if isinstance(value, str)])
    said = sum([len(each) for each in record.args or () if isinstance(each, str)])
    return RECORD_BYTES + texts + said + len(record.exc_text or "")


def _lines_of(record: logging.LogRecord) -> int:
    """How many lines are lost with this one: it may be the count of others."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return int(fields["COUNT"]) if fields.get("EVENT") == LEFT_OUT else 1
