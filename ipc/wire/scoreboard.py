"""Scoreboard: a page of shared memory per worker, with what it runs, since when, and how it ended.

The supervisor makes the page (a sealed memfd) and hands it down at the fork. The worker writes its
work, the worker's init writes how the worker ended, and the supervisor reads, also after the worker
is dead. No message and no lock is involved.

    int64 fields     sequence lease since beat begun done | exited exit_status | words_length
                     | unsent | checking | rows
    from WORDS_AT    last words, UTF-8
    from ROWS_AT     of a worker that runs several tasks at once, a pair of int64 for each:
                     lease since

The worker is the only writer of the first six fields. The sequence is odd during a write, so a
reader that sees an odd or a changed number looks again. A worker that is killed or suspended during
a write leaves the sequence odd, so the reader gives up after READ_TRIES_MAX. The copy it then has
is still usable thanks to the order of the stores: begin() sets `lease` last and end() clears it
first, so a visible lease has begun and has its own start beside it, and only the counters may be
one behind.

In a row, the start is written first and the lease last, and the lease is cleared first: a lease
that is read before and after its start belongs to it. A row is kept until the result is sent.
"""

import fcntl
import mmap
import os
import struct
from typing import NamedTuple

from musterd.ipc.wire.messages import CONCURRENCY_MAX

PAGE_BYTES = 4096
WORDS_AT = 1024
WORDS_BYTES_MAX = 1024  # an exception's type and message; the traceback is in the log
ROWS_AT = WORDS_AT + WORDS_BYTES_MAX
ROW_BYTES = 16
READ_TRIES_MAX = 100  # a write takes less than a microsecond: this is ages for a running writer
EXIT_UNHEALTHY = 3  # exit code after healthy() said no, which the board confirms

_SEQUENCE, _LEASE, _SINCE, _BEAT, _BEGUN, _DONE = range(6)
_EXITED, _EXIT_STATUS, _WORDS_LENGTH, _UNSENT, _CHECKING, _ROWS = range(6, 12)
_TASK_FIELDS = struct.Struct("5q")  # lease to done


class Reading(NamedTuple):
    """Consistent copy of a board."""

    lease: int  # 0 when nothing runs
    since_ns: int  # when that lease began, or the last sign of life when idle
    begun: int
    done: int
    exit_status: int | None  # 0..255, or -N when ended by signal N; None while alive
    last_words: str
    unsent: int = 0  # the lease that ended last, while its result is not sent yet
    unhealthy: bool = False  # ended because healthy() said no
    beside: tuple[tuple[int, int], ...] = ()  # other running leases with their starts


class Pulse(NamedTuple):
    """What tells whether a worker is alive."""

    lease: int  # 0 when nothing runs
    since_ns: int  # when that lease began, or the last sign of life when idle
    checking_ns: int  # since when healthy() runs, 0 when it does not
    beside: tuple[tuple[int, int], ...] = ()  # other running leases with their starts


class Scoreboard:
    """Mapped page: `create()` makes it in the supervisor, `attach()` maps it in the worker."""

    __slots__ = (
        *("_begun", "_done", "_fields", "_map", "_rows", "_sequence", "_task_fields", "_words"),
        "fd",
    )

    def __init__(self, fd: int, *, owned: bool) -> None:
        self.fd = fd if owned else -1
        self._map = mmap.mmap(fd, PAGE_BYTES)
        page = memoryview(self._map)
        self._fields = page[:WORDS_AT].cast("q")
        self._task_fields = self._fields[_LEASE : _DONE + 1]
        self._words = page[WORDS_AT : WORDS_AT + WORDS_BYTES_MAX]
        self._rows = page[ROWS_AT : ROWS_AT + CONCURRENCY_MAX * ROW_BYTES].cast("q")
        page.release()
        self._sequence = self._fields[_SEQUENCE]
        self._begun = self._fields[_BEGUN]
        self._done = self._fields[_DONE]

    @classmethod
    def create(cls) -> "Scoreboard":
        """Return a fresh board; the worker gets `fd`, and close() closes it."""
        fd = os.memfd_create("musterd-scoreboard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            # If a worker could truncate its board, the supervisor's next look would be a SIGBUS.
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            return cls(fd, owned=True)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> "Scoreboard":
        """Map a board that was handed down; `fd` stays the caller's."""
        return cls(fd, owned=False)

    # -- the worker ---------------------------------------------------------------------------

    def begin(self, lease: int, now_ns: int) -> None:
        """Note that the handler of this lease begins."""
        fields = self._fields
        self._begun += 1
        sequence = self._sequence + 2
        self._sequence = sequence
        fields[_SEQUENCE] = sequence - 1
        fields[_SINCE] = now_ns
        fields[_BEGUN] = self._begun
        fields[_LEASE] = lease
        fields[_SEQUENCE] = sequence

    def end(self, now_ns: int) -> None:
        """Note that the handler that began last has ended."""
        fields = self._fields
        self._done += 1
        sequence = self._sequence + 2
        self._sequence = sequence
        fields[_UNSENT] = fields[_LEASE]
        fields[_SEQUENCE] = sequence - 1
        fields[_LEASE] = 0
        fields[_BEAT] = now_ns
        fields[_DONE] = self._done
        fields[_SEQUENCE] = sequence

    def widen(self, rows: int) -> None:
        """Prepare for several tasks at once, each in a row of its own."""
        self._fields[_ROWS] = rows

    def begin_row(self, row: int, lease: int, now_ns: int) -> None:
        """Note that the handler of this lease begins, beside others."""
        self._rows[2 * row + 1] = now_ns
        self._rows[2 * row] = lease

    def end_row(self, row: int, now_ns: int) -> None:
        """Note that the result of the lease in this row is on its way."""
        self._fields[_BEAT] = now_ns
        self._rows[2 * row] = 0

    def sent(self) -> None:
        """Note that all results are on their way: a later death is not the fault of their tasks."""
        self._fields[_UNSENT] = 0

    def beat(self, now_ns: int) -> None:
        """Stamp an idle worker's sign of life: a single store needs no sequence."""
        self._fields[_BEAT] = now_ns

    def check(self, now_ns: int) -> None:
        """Note that healthy() runs; a worker that ends in it was not well."""
        self._fields[_CHECKING] = now_ns

    def checked(self, now_ns: int) -> None:
        """Note that healthy() said yes."""
        self._fields[_BEAT] = now_ns  # first: without it the worker would look quiet for so long
        self._fields[_CHECKING] = 0

    def say(self, words: str) -> None:
        """Leave last words for the supervisor, such as the error of open()."""
        # Cut after the start, which says what went wrong. Half a character at the cut is dropped.
        data = words.encode("utf-8", "replace")[:WORDS_BYTES_MAX]
        data = data.decode("utf-8", "ignore").encode()
        self._fields[_WORDS_LENGTH] = 0
        self._words[: len(data)] = data
        self._fields[_WORDS_LENGTH] = len(data)

    # -- its init -----------------------------------------------------------------------------

    def set_exit(self, exit_status: int) -> None:
        """Note how the worker ended: 0..255, or -N for signal N. The flag comes last."""
        self._fields[_EXIT_STATUS] = exit_status
        self._fields[_EXITED] = 1

    # -- the supervisor -----------------------------------------------------------------------

    def _copy(self) -> tuple[int, ...]:
        """Return lease to done, of one moment if possible."""
        fields = self._fields
        for _ in range(READ_TRIES_MAX):
            before = fields[_SEQUENCE]
            copy = self._task_fields.tobytes()  # one memcpy: a busy writer leaves little time
            if before == fields[_SEQUENCE] and not before & 1:
                break
        return _TASK_FIELDS.unpack(copy)

    def _running(self) -> list[tuple[int, int]]:
        """Return the leases of the rows, the oldest first."""
        rows, found = self._rows, []
        for row in range(min(max(self._fields[_ROWS], 0), CONCURRENCY_MAX)):
            for _ in range(READ_TRIES_MAX):
                lease, since = rows[2 * row], rows[2 * row + 1]
                if lease == rows[2 * row]:
                    break
            if lease:
                found.append((lease, since))
        return sorted(found, key=lambda each: each[1])

    def pulse(self) -> Pulse:
        """Return the part that is read again and again."""
        checking = self._fields[_CHECKING]  # read first, because it is cleared last
        if running := self._running():
            return Pulse(*running[0], checking, tuple(running[1:]))
        lease, since, beat, _, _ = self._copy()
        return Pulse(lease, since if lease else max(beat, since), checking)

    def read(self) -> Reading:
        """Return everything the board says now."""
        fields = self._fields
        lease, since, beat, begun, done = self._copy()
        running = self._running()
        if running:
            lease, since = running[0]
        exit_status = fields[_EXIT_STATUS] if fields[_EXITED] else None
        length = min(max(fields[_WORDS_LENGTH], 0), WORDS_BYTES_MAX)
        return Reading(
            lease=lease,
            since_ns=since if lease else max(beat, since),
            begun=begun,
            done=done,
            exit_status=exit_status,
            last_words=bytes(self._words[:length]).decode("utf-8", "replace"),
            unsent=fields[_UNSENT],
            unhealthy=exit_status == EXIT_UNHEALTHY and fields[_CHECKING] != 0,
            beside=tuple(running[1:]),
        )

    def close(self) -> None:
        """Unmap the page, and close `fd` if this side made it. May be called twice."""
        self._task_fields.release()
        self._fields.release()
        self._words.release()
        self._rows.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
