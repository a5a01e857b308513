"""Write the log in a thread, from a bounded buffer, so that the loop never waits.

A terminal stopped with Ctrl-S, a pipe nobody reads, a stopped journald and a full disk block their
writer. That is this thread and never the loop: lines wait in the buffer up to a limit, and lines
beyond the limit are counted. The count is logged as soon as the log takes lines again.

Both threads share the interpreter, and each time it changes hands the loop may have to wait for a
processor. So the writer runs rarely (PACE_SECONDS) and writes many lines at once.
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
# The memory of a record besides its texts: the object, its dict and the fields.
RECORD_BYTES = 500
# The share of both limits for lines below warning: the cause of a problem gets through its noise.
ORDINARY_SHARE = 0.8
PACE_SECONDS = 0.01  # from the first waiting line to the write
RETRY_SECONDS = 1.0  # after a failed write: a full disk stays full for a while
CLOSE_SECONDS = 2.0  # for the last lines; a blocked log does not delay the end longer

LEFT_OUT = "log.left_out"
LEFT_OUT_MESSAGE = "log lines were dropped: the log could not be written"


class Target(Protocol):
    """The destination of the lines; it may block."""

    lines_at_once: int

    def take(self, records: list[logging.LogRecord]) -> None:
        """Write at most `lines_at_once` records; OSError if they were not written."""

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
        # Daemonic: a thread stuck in a write() must not keep the process alive.
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:  # its frames would be kept as long as the record waits
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
        """Write what waits, within CLOSE_SECONDS."""
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
        """Return the line that says how many lines were left out."""
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
        """Wait for something to write; return False at the end."""
        with self._change:
            while not self._waiting and not self._closing:
                if self._left_out:
                    self._put(self._count(), RECORD_BYTES)
                    return True
                self._change.wait()
            return bool(self._waiting)

    def _batches(self) -> Iterator[list[logging.LogRecord]]:
        """Yield all waiting records; each batch counts as waiting until the next one is taken."""
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
    trace = str(record.exc_text or getattr(record, "traceback", ""))
    return RECORD_BYTES + texts + said + len(trace)


def _lines_of(record: logging.LogRecord) -> int:
    """Return how many lines are lost with a record: it may be the count of others."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return int(fields["COUNT"]) if fields.get("EVENT") == LEFT_OUT else 1
