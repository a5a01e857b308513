"""Readers of changes: each change is delivered once, over restarts of the daemon too.

The daemon answers a Follow with the newest change of each schedule, however old, and then sends
changes as they come. The first answer is the reader's starting point and no news. A later answer
(another connection, another daemon, a silence) brings the newest change of each schedule. Numbers
tell whether there may have been others before it: then the reader asks the schedule's history for
them, when it comes to that change, and delivers them first.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from msgspec import Struct

from musterd.ipc.client.history import KeptResult
from musterd.ipc.client.taskspec import checked_schedule, shown
from musterd.ipc.watching.difference import FieldChange, changed_fields, summary, unified_diff
from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import Change, Changes

UNREAD_MAX = 1_000  # changes kept for a slow reader; the oldest are dropped first
# Changes of a schedule that are recognised when a daemon tells them again after its death: those of
# its last second.
HEARD_MAX = 16

HandleT = TypeVar("HandleT")
Waited = TypeVar("Waited")
Found = TypeVar("Found")
Kept = TypeVar("Kept")
Entries = TypeVar("Entries")


class Unread(Struct):
    """A change for the user, and the last change before it that the reader knows."""

    change: Change
    after: Change | None = None  # None: nothing was missed in between
    told: list[Change] = []  # of those in between, told again by a daemon that was not sure


class Following:
    """State of one reader, without I/O."""

    def __init__(self, schedules: Iterable[str] = ()) -> None:
        self.unread: deque[Unread] = deque(maxlen=UNREAD_MAX)
        self.missed: deque[Change] = deque()  # found in history, to be delivered first
        given = list(schedules)
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"give the names of schedules, not {shown(name)}")
            checked_schedule(name)
        self._schedules = frozenset(given)  # empty: all of them
        self._begun = False  # the first answer has come
        self._newest: dict[str, Change] = {}  # schedule -> its newest change that we know
        self._heard: dict[str, deque[str]] = {}  # schedule -> tasks of its last changes
        self._connection = 0
        self._heard_in: dict[str, int] = {}  # schedule -> connection of its last change

    def doubt(self) -> None:
        """Note that changes may have been missed: there is another connection."""
        self._connection += 1

    def hear(self, message: Changes) -> None:
        if not self._begun:
            if message.newest:
                self._begun = True
                for change in message.changes:
                    self._note(change)
            return  # changes sent before our Follow were for another reader
        for change in message.changes:
            if not self._is_old(change, newest=message.newest):
                after = self._before(change, newest=message.newest)
                self._note(change)
                if not self._schedules or change.schedule in self._schedules:
                    self.unread.append(Unread(change, after))

    def _note(self, change: Change) -> None:
        self._newest[change.schedule] = change
        self._heard_in[change.schedule] = self._connection
        self._heard.setdefault(change.schedule, deque(maxlen=HEARD_MAX)).append(change.task)

    def _is_old(self, change: Change, *, newest: bool) -> bool:
        """Return whether a change was heard, or comes with a later one; then it waits for that."""
        if change.task in self._heard.get(change.schedule, ()):
            return True
        known = self._newest.get(change.schedule)
        if known is None or not change.number or not (change.again or newest):
            return False
        if change.number > known.number or change.at_ns > known.at_ns:
            return False
        for each in self.unread:
            if each.change is known and each.after is not None and _is_after(change, each.after):
                each.told = [*each.told, change][-UNREAD_MAX:]
        return True

    def _before(self, change: Change, *, newest: bool) -> Change | None:
        """Return the last change that we know, if others may have come before this one."""
        sure = self._heard_in.get(change.schedule, 0) == self._connection and not newest
        if sure or not change.number:
            return None
        known = self._newest.get(change.schedule, Change(change.schedule, ""))
        return known if change.number != known.number + 1 else None

    def any_unread(self) -> bool:
        return bool(self.missed or self.unread)

    def gap(self) -> Unread | None:
        """Return the next change, if the reader has to ask for those before it."""
        if self.missed or not self.unread or self.unread[0].after is None:
            return None
        return self.unread[0]

    def fill(self, gap: Unread, kept: Iterable[HistoryEntry]) -> None:
        """Take the changes before this one that history has kept."""
        last, after = gap.change, gap.after
        assert after is not None
        found = {
            each.number: Change(
                last.schedule, each.task, each.digest, each.at_ns, each.number, each.before
            )
            for each in kept
            if each.changed
        }
        found |= {each.number: each for each in gap.told}
        missed = [each for each in found.values() if _is_after(each, after)]
        self.missed.extend(
            sorted(
                (each for each in missed if each.number < last.number),
                key=lambda each: each.number,
            )
        )
        gap.after = None

    def first(self) -> Change:
        return self.missed[0] if self.missed else self.unread[0].change

    def read(self, change: Change) -> None:
        """Take a change that the user gets; many others may have pushed it out."""
        if self.missed and self.missed[0] is change:
            self.missed.popleft()
        elif self.unread and self.unread[0].change is change:
            self.unread.popleft()


def _is_after(change: Change, known: Change) -> bool:
    """Return whether a change came later: by its number or, where the schedule was deleted and put
    again and counts from 1, by its time."""
    return change.number > known.number or change.at_ns > known.at_ns


class ResultChange(Generic[HandleT]):
    """New result of a schedule; `task` is the run that returned it.

    `before` and `after` are the results, or the parts of them that are watched.
    """

    __slots__ = ("after", "again", "at", "before", "cut", "digest", "schedule", "task")

    def __init__(self, change: Change, task: HandleT, kept: list[KeptResult]) -> None:
        found = {each.number: each for each in kept}
        before, after = found.get(change.before), found.get(change.number)
        self.schedule = change.schedule
        self.task = task
        self.digest = change.digest  # SHA-256 of the result, or of the part that is watched
        self.at = change.at_ns / 1e9  # seconds of wall-clock time
        self.again = change.again  # the daemon was not sure that it had told this before it died
        self.before: Any = before.value if before is not None else None
        self.after: Any = after.value if after is not None else None
        # One of them is not kept, or only its beginning.
        self.cut = before is None or after is None or before.cut or after.cut

    @property
    def fields(self) -> dict[str, FieldChange]:
        """Fields that differ, if both results are dicts: name -> FieldChange(before, after)."""
        return changed_fields(self.before, self.after)

    @property
    def diff(self) -> str:
        """Unified diff of two texts; other results are compared as indented JSON."""
        return unified_diff(self.before, self.after)

    @property
    def summary(self) -> str:
        """What has changed, in one line."""
        return summary(self.before, self.after)

    def __repr__(self) -> str:
        return f"<change of {self.schedule}: {self.task!r}>"


class _Reader(Generic[Waited, Found, Kept, Entries]):
    def __init__(
        self,
        following: Following,
        wait: Callable[[], Waited],
        find: Callable[[str], Found],
        recall: Callable[[Change], Kept],
        *,
        look_back: Callable[[Change], Entries],
        stop: Callable[[], None],
    ) -> None:
        self._following = following
        self._wait = wait
        self._find = find
        self._recall = recall
        self._look_back = look_back
        self.close = stop


class ChangeReader(_Reader[None, HandleT, list[KeptResult], list[HistoryEntry]]):
    """Endless iterator that Client.changes() returns."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ResultChange[HandleT]:
        self._wait()
        following = self._following
        while (gap := following.gap()) is not None:
            following.fill(gap, self._look_back(gap.change))
        change = following.first()
        kept = self._recall(change)  # may take too long: then the change is still unread
        following.read(change)
        return ResultChange(change, self._find(change.task), kept)


class AsyncChangeReader(
    _Reader[
        Awaitable[None],
        Awaitable[HandleT],
        Awaitable[list[KeptResult]],
        Awaitable[list[HistoryEntry]],
    ]
):
    """Endless iterator that AsyncClient.changes() returns."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ResultChange[HandleT]:
        await self._wait()
        following = self._following
        while (gap := following.gap()) is not None:
            following.fill(gap, await self._look_back(gap.change))
        change = following.first()
        kept = await self._recall(change)
        following.read(change)
        return ResultChange(change, await self._find(change.task), kept)
