"""One page of shared memory per worker: what it runs, since when, and how it ended.

The supervisor makes the page (a sealed memfd) and hands it down at the fork; the worker writes
what it does, its init writes how it ended, and the supervisor reads, also after the worker is
dead. No message and no lock is involved.

    int64 fields     sequence lease since beat begun done | exited exit_status | words_length
                     | unsent | checking | rows
    from WORDS_AT    last words, UTF-8
    from ROWS_AT     of a worker that runs several tasks at once, a pair of int64 for each:
                     lease since

The worker is the only writer of the first six. The sequence is odd while it writes, so a reader
that sees an odd or a changed number looks again. A worker that is killed or suspended in the
middle of a write leaves it odd, so the reader gives up after READ_TRIES_MAX; what it then has is
still usable because the order of the stores is chosen for it: `lease` is set last by begin() and
cleared first by end(), so a lease that is seen has begun and has its own start beside it, and
only the counters may be one behind.

Of a row the start is written first and the lease last, and the lease is cleared first: a lease that
is read before and after its start belongs to it. A row is kept until the result has been sent.
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
READ_TRIES_MAX = 100  # a write takes less than a microsecond: this is ages, while it runs
EXIT_UNHEALTHY = 3  # of a worker that ends because its healthy() said no, which its board confirms

_SEQUENCE, _LEASE, _SINCE, _BEAT, _BEGUN, _DONE = range(6)
_EXITED, _EXIT_STATUS, _WORDS_LENGTH, _UNSENT, _CHECKING, _ROWS = range(6, 12)
_TASK_FIELDS = struct.Struct("5q")  # lease to done


class Reading(NamedTuple):
    """A consistent look at a board."""

    lease: int  # 0 when nothing runs
    since_ns: int  # when that lease began, or the last sign of life when idle
    begun: int
    done: int
    exit_status: int | None  # 0..255, or -N when ended by signal N; None while it lives
    last_words: str
    unsent: int = 0  # the lease that ended last, while its result is not sent yet
    unhealthy: bool = False  # it ended because its healthy() said no
    beside: tuple[tuple[int, int], ...] = ()  # what else runs, and since when


class Pulse(NamedTuple):
    """What tells whether a worker lives."""

    lease: int  # 0 when nothing runs
    since_ns: int  # when that lease began, or the last sign of life when idle
    checking_ns: int  # since when it asks its healthy(), 0 when it does not
    beside: tuple[tuple[int, int], ...] = ()  # what else runs, and since when


class Scoreboard:
    """A mapped page. Made by `create()` in the supervisor, by `attach()` in the worker."""

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
        """A fresh board; `fd` is to be handed to the worker and is closed by close()."""
        fd = os.memfd_create("musterd-scoreboard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            # A worker that truncates its board would make the supervisor's next look a SIGBUS.
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            return cls(fd, owned=True)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> "Scoreboard":
        """Maps a board that was handed down; `fd` stays the caller's."""
        return cls(fd, owned=False)

    # -- the worker ---------------------------------------------------------------------------

    def begin(self, lease: int, now_ns: int) -> None:
        """The handler of this lease begins."""
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
        """The handler that began last has ended."""
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
        """Several tasks will run at once, each in a row of its own."""
        self._fields[_ROWS] = rows

    def begin_row(self, row: int, lease: int, now_ns: int) -> None:
        """The handler of this lease begins, beside others."""
        self._rows[2 * row + 1] = now_ns
        self._rows[2 * row] = lease

    def end_row(self, row: int, now_ns: int) -> None:
        """The result of the lease in this row is on its way."""
        self._fields[_BEAT] = now_ns
        self._rows[2 * row] = 0

    def sent(self) -> None:
        """The results of all that has ended are on their way: what dies now is not their fault."""
        self._fields[_UNSENT] = 0

    def beat(self, now_ns: int) -> None:
        """An idle worker's sign of life: a single store needs no sequence."""
        self._fields[_BEAT] = now_ns

    def check(self, now_ns: int) -> None:
        """healthy() is being asked; a worker that ends in it was not well."""
        self._fields[_CHECKING] = now_ns

    def checked(self, now_ns: int) -> None:
        """healthy() said yes."""
        self._fields[_BEAT] = now_ns  # first: without it the worker would look quiet for so long
        self._fields[_CHECKING] = 0

    def say(self, words: str) -> None:
        """Leaves last words for the supervisor, such as the error of open()."""
        # Cut after the start: what went wrong stands there. A character cut in half is dropped.
        data = words.encode("utf-8", "replace")[:WORDS_BYTES_MAX]
        data = data.decode("utf-8", "ignore").encode()
        self._fields[_WORDS_LENGTH] = 0
        self._words[: len(data)] = data
        self._fields[_WORDS_LENGTH] = len(data)

    # -- its init -----------------------------------------------------------------------------

    def set_exit(self, exit_status: int) -> None:
        """How the worker ended: 0..255, or -N for signal N. The flag comes last."""
        self._fields[_EXIT_STATUS] = exit_status
        self._fields[_EXITED] = 1

    # -- the supervisor -----------------------------------------------------------------------

    def _copy(self) -> tuple[int, ...]:
        """Lease to done, as they were at one moment if that can be had."""
        fields = self._fields
        for _ in range(READ_TRIES_MAX):
            before = fields[_SEQUENCE]
            copy = self._task_fields.tobytes()  # one memcpy: a busy writer leaves little time
            if before == fields[_SEQUENCE] and not before & 1:
                break
        return _TASK_FIELDS.unpack(copy)

    def _running(self) -> list[tuple[int, int]]:
        """What the rows say, the oldest first."""
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
        """The part that is looked at again and again."""
        checking = self._fields[_CHECKING]  # first, as it is cleared last
        if running := self._running():
            return Pulse(*running[0], checking, tuple(running[1:]))
        lease, since, beat, _, _ = self._copy()
        return Pulse(lease, since if lease else max(beat, since), checking)

    def read(self) -> Reading:
        """What the board says now."""
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
        """Unmaps the page, and closes `fd` if this side made it. May be called twice."""
        self._task_fields.release()
        self._fields.release()
        self._words.release()
        self._rows.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
