"""The durable store: one SQLite file and three threads.

The writer commits; the reader answers people and clients; the pager reads queued tasks back.

The end of a task moves it from `live` to `finished` in one transaction, so a task is always in
exactly one of them. The writer takes everything that waits into one transaction (group commit), and
publishes the group's highest ticket after the commit. A group that cannot be written is kept and
tried again; meanwhile nothing completes, and new tasks can be withdrawn from the group.
"""

import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from musterd.supervisor.core.model.actions import Persist
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.store.file import (
    STOP,
    LostStore,
    connect,
    connect_writer,
    forget_copy,
    is_corruption,
    is_full,
    remedy,
    rewrite,
    save,
    saved_name,
    set_aside,
    suspect,
    take,
)
from musterd.supervisor.store.identity import Identity, Loss, is_at
from musterd.supervisor.store.interface import (
    RECOVERED_AT_ONCE,
    Found,
    Purge,
    Query,
    ReadQueued,
    StoreError,
    Unanswered,
    WallTime,
    Withdraw,
    log_fields,
)
from musterd.supervisor.store.queries import Reader, answer, newest_wall_ns, unfinished_rows
from musterd.supervisor.store.reserve import Reserve
from musterd.supervisor.store.rows import Group, recovered_task
from musterd.supervisor.store.writer import SLICE_ROWS, Purging, Writer
from musterd.supervisor.system.threads import Wakeup

PATIENCE_SECONDS = 0.0005  # how long a patient page waits for the next one
RETRY_SECONDS = 1.0  # after a failed commit or read; a full disk is not emptied faster than that
LOOK_SECONDS = 1.0  # between two checks of the files while nothing is written
READ_TRIES = 3  # then the request fails: one broken page must not block all others
READS_WAITING_MAX = 20_000  # requests for the reader; about a second of work
PURGES_WAITING_MAX = 100  # people ask for them; a disk that fails keeps them all
TRIMS_WAITING_MAX = 2  # the one at work and the newest: the newest replaces those between
TRIM_PACE = 2  # results forgotten for each new one, while there are too many
KEEP_NS_MAX = 2**62  # a time of day plus this is still an integer of SQLite

# Errors that pass: those of the disk, and a lack of memory, which SQLite reports too. Any other
# exception is our own mistake and would come again: the thread ends, and the daemon with it.
FORGIVEN = (sqlite3.Error, MemoryError)
WRITER, FILES = "writer", "files"  # problems that keep the store from writing

log = logging.getLogger("musterd")


class SqliteStore:
    """`durability`: "full" (on disk before completed() says so) or "normal" (a moment later).

    The core bounds the pages that wait to be written or read: tasks that wait for a commit count
    for `queue_size`, results for leases, and the disk queue reads a page at a time.
    """

    immediate = False

    def __init__(
        self,
        path: Path,
        durability: str,
        on_corrupt: str = STOP,
        wall_ns: WallTime = time.time_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._synchronous = {"full": "FULL", "normal": "NORMAL"}[durability]
        self._path = path
        self._lock_fd = take(path, on_corrupt)
        with ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            connection = undo.enter_context(closing(connect_writer(path, self._synchronous)))
            self._reader = undo.enter_context(closing(Reader("reader", path, READ_TRIES)))
            # The queue waits for what the pager reads: that is never dropped.
            self._pager = undo.enter_context(closing(Reader("pager", path, None)))
            with self._reading():
                self._writer = Writer(connection, path, wall_ns)
            self._identity = Identity(path)
            undo.pop_all()
        self._anew_fd: int | None = None  # of a file that was written anew, until it is in use
        self._reserve = Reserve(path)
        self._reserve.keep()
        self._wakeup = Wakeup()
        self._closing = threading.Event()
        self._closed = False
        self._problems: dict[str, str] = {}  # by the name of a thread, or FILES
        self._ticket: int | None = None  # the highest that is durable
        self._told: int | None = None  # the highest that completed() returned
        self._last: int | None = None  # the highest that write() was given
        self._writes: queue.SimpleQueue[Persist | None] = queue.SimpleQueue()  # None only wakes
        self._withdrawals: deque[tuple[Withdraw, object]] = (
            deque()
        )  # the core asks for one at a time
        self._purges: deque[Purging] = deque()
        self._trims: deque[tuple[int | None, int]] = deque(maxlen=TRIMS_WAITING_MAX)
        self._answers: deque[Found] = deque()  # one for each query that was taken
        self._threads = [
            threading.Thread(target=self._guard, args=(loop, name), name=f"store-{name}")
            for name, loop in (
                (WRITER, self._write_loop),
                (self._reader.name, partial(self._read_loop, self._reader)),
                (self._pager.name, partial(self._read_loop, self._pager)),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- for the loop's thread ----------------------------------------------------------------

    @property
    def commits(self) -> int:
        return self._writer.commits

    @property
    def ended(self) -> int:
        return self._writer.ended

    @property
    def commit_times(self) -> Histogram:
        return self._writer.times

    @property
    def size_bytes(self) -> int:
        return self._writer.size_bytes

    @property
    def conflicts(self) -> int:
        return self._writer.conflicts

    def recover(self, now_ns: int, wall_ns: int) -> Iterator[list[Recovered]]:
        with self._at_start() as connection:
            rows = unfinished_rows(connection)
            while page := list(islice(rows, RECOVERED_AT_ONCE)):
                tasks = [recovered_task(row, now_ns, wall_ns) for row in page]
                yield [task for task in tasks if task is not None]

    def unfinished(self) -> int:
        with self._at_start() as connection:
            ((count,),) = connection.execute("SELECT count(*) FROM live")
        return int(count) + self._writer.on_batches

    def last_seq(self) -> int:
        with self._at_start() as connection:
            ((seq,),) = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'live'")
        return int(seq)

    def facts(self, kind: str) -> list[tuple[str, bytes]]:
        with self._at_start() as connection:
            return connection.execute(
                "SELECT key, value FROM facts"
                " WHERE kind = ? AND (expires_at = 0 OR expires_at > ?) ORDER BY key",
                (kind, self._wall_ns()),
            ).fetchall()

    @contextmanager
    def _at_start(self) -> Iterator[sqlite3.Connection]:
        with self._reading(), closing(connect(self._path)) as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn an error of SQLite into a StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            self._note_corruption(error)
            raise StoreError(
                f"the store {self._path} cannot be read: {error}."
                " Check the disk; a corrupt file is found and set aside at the next start."
            ) from error

    def write(self, persist: Persist) -> None:
        assert not self._closed
        self._last = persist.ticket
        self._writes.put(persist)

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def completed(self) -> int | None:
        self._wakeup.clear()  # first: a ticket published after this sets it again
        ticket = self._ticket
        if ticket == self._told:
            return None
        self._told = ticket
        return ticket

    def ask(self, query: Query[Any], token: object) -> bool:
        assert not self._closed
        match query:
            case Withdraw():
                self._withdrawals.append((query, token))
                self._writes.put(None)
            case Purge():
                if len(self._purges) >= PURGES_WAITING_MAX:
                    return False
                self._purges.append(Purging(query, token))
                self._writes.put(None)
            case ReadQueued():
                self._pager.requests.put((token, query))
            case _:
                if self._reader.requests.qsize() >= READS_WAITING_MAX:
                    return False
                self._reader.requests.put((token, query))
        return True

    def found(self) -> list[Found]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def problem(self) -> str | None:
        return "; ".join(list(self._problems.values())) or None

    def write_problem(self) -> str | None:
        return self._problems.get(FILES) or self._problems.get(WRITER)

    def newest_wall_ns(self) -> int:
        with self._at_start() as connection:
            return newest_wall_ns(connection)

    def trim(self, keep_ns: int | None, keep_max: int) -> None:
        keep_ns = None if keep_ns is None else min(keep_ns, KEEP_NS_MAX)
        self._trims.append((keep_ns, keep_max))
        self._writes.put(None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._writes.put(None)
        self._reader.requests.put(None)
        self._pager.requests.put(None)
        for thread in self._threads:
            thread.join()
        self._reader.close()
        self._pager.close()
        self._reserve.give_up()
        self._writer.close()  # last: SQLite moves the log into the file and removes the log
        self._identity.close()
        os.close(self._lock_fd)
        if self._anew_fd is not None:
            os.close(self._anew_fd)
        self._wakeup.close()
        if self._ticket != self._last:
            raise StoreError(
                f"the store {self._path} was closed without the latest changes: {self.problem()}."
                " The tasks they concern will run again."
            )

    # -- for all threads ----------------------------------------------------------------------

    def _guard(self, loop: Callable[[], None], name: str) -> None:
        try:
            loop()
        except BaseException as error:
            what = str(error) if isinstance(error, StoreError) else repr(error)
            self._problems[name] = f"the store's {name} ended: {what}; the daemon ends"
            self._problems.pop(FILES, None)
            self._wakeup.set()
            raise

    def _failed(self, name: str, error: Exception) -> None:
        what = str(error) or type(error).__name__
        reason = (
            f"the store {self._path} cannot be used by its {name}: {what}: {remedy(error)};"
            " the daemon tries again every second"
        )
        if self._problems.get(name) != reason:
            log.error("store fails, trying again", extra=log_fields("store.failed", reason))
            self._note_corruption(error)
        self._problems[name] = reason
        self._wakeup.set()

    def _note_corruption(self, error: Exception) -> None:
        if is_corruption(error):
            with suppress(OSError):  # the disk itself may be broken
                suspect(self._path)

    def _works(self, name: str) -> None:
        if self._problems.pop(name, None):
            log.info("store works again", extra=log_fields("store.recovered"))
            self._wakeup.set()

    def _publish(self, token: object, found: object) -> None:
        self._answers.append((token, found))
        self._wakeup.set()

    # -- the writer's thread ------------------------------------------------------------------

    def _write_loop(self) -> None:
        while not (self._closing.is_set() and self._writes.empty()):
            group = self._next_group()
            self._withdraw_from(group)
            if group.ticket is not None:
                if not self._write_group(group):
                    return
                self._ticket = group.ticket
                self._wakeup.set()
            elif not self._closing.is_set():
                self._files_are_ours()
            if not self._closing.is_set():
                self._tidy_up(len(group.finished))

    def _next_group(self) -> Group:
        """Take everything that waits; wait for more only if there is no other work."""
        group = Group()
        failing = WRITER in self._problems
        busy = self._trims or self._purges
        with suppress(queue.Empty):
            persist = self._writes.get(
                block=failing or not busy, timeout=RETRY_SECONDS if failing else LOOK_SECONDS
            )
            wall_ns = self._wall_ns()
            while True:
                if persist is not None:
                    group.take(persist, wall_ns, self._writer.withdrawn)
                    if group.full():
                        break
                if persist is not None and group.patient and self._writes.empty():
                    group.patient = False  # once is enough
                    persist = self._writes.get(timeout=PATIENCE_SECONDS)
                else:
                    persist = self._writes.get_nowait()
        return group

    def _write_group(self, group: Group) -> bool:
        """Try until the group is written; return False if that fails while the store closes."""
        while True:
            last_try = self._closing.is_set()
            # An empty group would succeed and prove nothing: the problem would seem to be over.
            probe = group.empty() and WRITER in self._problems
            work = self._writer.probe if probe else lambda: self._writer.commit(group)
            # Check before the write too: a write to the end of a file that was cut hides the cut.
            if self._files_are_ours() and self._attempt(work):
                return self._kept(group)
            if last_try:
                return False
            self._closing.wait(RETRY_SECONDS)
            self._withdraw_from(group)

    def _kept(self, group: Group) -> bool:
        """Wait until the written file is where the next start looks; False as _write_group()."""
        while not self._files_are_ours():
            if self._closing.wait(RETRY_SECONDS):
                return self._files_are_ours()
            self._withdraw_from(group)
        return True

    def _files_are_ours(self) -> bool:
        """Tell whether the files are those we opened. Write lost files anew, or raise LostStore."""
        if self._anew_fd is not None:
            if is_at(self._anew_fd, self._path):
                return self._write_anew()
            os.close(self._anew_fd)
            self._anew_fd = None
        lost = self._identity.look()
        if lost is None:
            return self._are_back() if FILES in self._problems else True
        reason = f"the store {self._path} is lost: {lost.reason}"
        if FILES not in self._problems:
            log.error(
                "the store's files are not where they were", extra=log_fields("store.lost", reason)
            )
        self._problems[FILES] = reason
        self._wakeup.set()
        match lost.kind:
            case Loss.MISSING:
                return self._write_anew()
            case Loss.AWAY:
                self._problems[FILES] = (
                    f"{reason}: put it back; the daemon tries again every second"
                )
                return False
            case _:
                raise self._loss(lost.kind, reason)

    def _are_back(self) -> bool:
        """Go on with files that somebody has put back."""
        try:
            forget_copy(self._path)
        except OSError as error:
            reason = f"{self._path} is back, but an older copy beside it cannot be removed: {error}"
            self._problems[FILES] = f"the store {reason}: {remedy(error)}; the daemon tries again"
            return False
        self._works(FILES)
        return True

    def _write_anew(self) -> bool:
        """Write the file anew and use it; if only the second step fails, try only that again."""
        self._reserve.give_up()  # for room; the next commit takes a new one
        try:
            if self._anew_fd is None:
                self._anew_fd = rewrite(self._writer.connection, self._path)
            self._go_on_with(self._anew_fd)
        except (*FORGIVEN, OSError) as error:
            reason = f"{self._path} is lost and cannot be written anew: {error}"
            self._problems[FILES] = f"the store {reason}: {remedy(error)}; the daemon tries again"
            self._wakeup.set()
            return False
        self._reader.stale = self._pager.stale = True
        log.warning(
            "the store was written anew: nothing is lost",
            extra=log_fields("store.rewritten", self._path),
        )
        self._works(FILES)
        return True

    def _go_on_with(self, lock_fd: int) -> None:
        """Use the file that was written anew."""
        with ExitStack() as undo:
            connection = undo.enter_context(closing(connect_writer(self._path, self._synchronous)))
            connection.execute("SELECT count(*) FROM live").fetchone()  # makes the log
            identity = Identity(self._path)
            undo.pop_all()
        self._writer.move(connection)
        self._identity.close()
        os.close(self._lock_fd)
        self._identity, self._lock_fd, self._anew_fd = identity, lock_fd, None

    def _loss(self, kind: Loss, reason: str) -> LostStore:
        """Return the error that ends the daemon and says what to do."""
        with suppress(OSError):  # the disk itself may be broken
            suspect(self._path)
        if kind is Loss.TRUNCATED:
            return LostStore(
                f"{reason}. The daemon ends, for it cannot know what is missing: restore a copy"
                " as docs/operations.md says, or start it to have the rest checked and set aside."
            )
        copy = saved_name(self._path, "saved")
        try:
            os.close(save(self._writer.connection, copy))
        except (*FORGIVEN, OSError) as error:
            saved = f"What the daemon knew could not be saved as {copy.name}: {error}"
        else:
            saved = f"What the daemon knew is saved as {copy.name}"
        with suppress(OSError):  # SQLite would take the old log for the log of the new file
            set_aside(self._path, self._identity.still_there())
        return LostStore(
            f"{reason}. {saved}. Start the daemon to go on with what is there now, or after you"
            " have put the saved one in its place."
        )

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Do the work; return whether that succeeded."""
        try:
            work()
        except FORGIVEN as error:
            self._writer.roll_back()
            self._failed(WRITER, error)
            return is_full(error) and self._reserve.give_up() and self._attempt(work)
        if self._reserve.keep():
            self._works(WRITER)
        return True

    def _withdraw_from(self, group: Group) -> None:
        while self._withdrawals:
            withdraw, token = self._withdrawals.popleft()
            self._publish(token, self._writer.withdraw(withdraw, group))

    def _tidy_up(self, ended: int) -> None:
        """Do one small transaction of work that is not urgent; or probe whether a problem is over.

        `ended` is the number of tasks that have just ended.
        """
        if self._purges:
            purging = self._purges[0]
            if self._attempt(lambda: self._writer.purge_slice(purging)) and purging.done:
                self._purges.popleft()
                self._publish(purging.token, purging.answer())
        elif self._trims:
            self._trim_some(max(SLICE_ROWS, TRIM_PACE * ended))
        elif WRITER in self._problems:
            self._attempt(self._writer.probe)

    def _trim_some(self, rows: int) -> None:
        """Trim one slice, until one finds nothing; after a failure the next trim() tries again."""
        while len(self._trims) > 1:
            self._trims.popleft()
        deleted = 0

        def work() -> None:
            nonlocal deleted
            deleted = self._writer.trim_slice(*self._trims[0], rows)

        if not self._attempt(work) or not deleted:
            self._trims.popleft()  # a trim() meanwhile leaves its own behind this one

    # -- the threads of the reader and of the pager --------------------------------------------

    def _read_loop(self, reader: Reader) -> None:
        while not self._closing.is_set():
            request = reader.requests.get()
            if request is not None:
                self._answer(reader, *request)

    def _answer(self, reader: Reader, token: object, query: Query[Any]) -> None:
        """Publish the answer, or Unanswered: that is better than a wrong "no such task"."""
        tries = 0
        while tries != reader.tries_max:
            try:
                found = answer(reader.connection, query, self._wall_ns())
            except FORGIVEN as error:
                self._failed(reader.name, error)
                if self._closing.wait(RETRY_SECONDS):
                    return
                tries += 1
            else:
                self._works(reader.name)
                self._publish(token, found)
                return
        self._publish(token, Unanswered())
