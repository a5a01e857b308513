"""Readers of changes: each change is delivered once, over restarts of the daemon too.

The daemon answers a Follow with the newest change of each schedule, however old, and then sends
changes as they come. The first answer is the reader's starting point and no news. A later answer
(another connection, another daemon, a silence) brings the newest missed change of each schedule.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from musterd.ipc.client.history import KeptResult
from musterd.ipc.client.taskspec import shown
from musterd.ipc.watching.difference import FieldChange, changed_fields, summary, unified_diff
from musterd.ipc.wire.messages import Change, Changes

UNREAD_MAX = 1_000  # changes kept for a slow reader; the oldest are dropped first
# Changes of a schedule that are recognised when a daemon tells them again after its death: those of
# its last second.
HEARD_MAX = 16

HandleT = TypeVar("HandleT")
Waited = TypeVar("Waited")
Found = TypeVar("Found")
Kept = TypeVar("Kept")


class Following:
    """State of one reader, without I/O."""

    def __init__(self, schedules: Iterable[str] = ()) -> None:
        self.unread: deque[Change] = deque(maxlen=UNREAD_MAX)
        given = list(schedules)
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"give the names of schedules, not {shown(name)}")
        self._schedules = frozenset(given)  # empty: all of them
        self._begun: dict[str, Change] = {}  # schedule -> its newest change when the reader began
        self._heard: dict[str, deque[str]] | None = None  # schedule -> tasks of its last changes

    def hear(self, message: Changes) -> None:
        if self._heard is None:
            if message.newest:
                self._begun = {change.schedule: change for change in message.changes}
                self._heard = {}
            return  # changes sent before our Follow were for another reader
        for change in message.changes:
            heard = self._heard.setdefault(change.schedule, deque(maxlen=HEARD_MAX))
            if change.task not in heard and not self._is_old(change):
                heard.append(change.task)
                if not self._schedules or change.schedule in self._schedules:
                    self.unread.append(change)

    def _is_old(self, change: Change) -> bool:
        """Return whether a change is the one with which the reader began, or is told again and was
        before it."""
        begun = self._begun.get(change.schedule)
        if begun is None:
            return False
        before = change.number <= begun.number and change.at_ns <= begun.at_ns
        return change.task == begun.task or (change.again and before)

    def any_unread(self) -> bool:
        return bool(self.unread)

    def read(self, change: Change) -> None:
        """Take a change that the user gets; many others may have pushed it out."""
        if self.unread and self.unread[0] is change:
            self.unread.popleft()


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


class _Reader(Generic[Waited, Found, Kept]):
    def __init__(
        self,
        following: Following,
        wait: Callable[[], Waited],
        find: Callable[[str], Found],
        recall: Callable[[Change], Kept],
        stop: Callable[[], None],
    ) -> None:
        self._following = following
        self._wait = wait
        self._find = find
        self._recall = recall
        self.close = stop


class ChangeReader(_Reader[None, HandleT, list[KeptResult]]):
    """Endless iterator that Client.changes() returns."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ResultChange[HandleT]:
        self._wait()
        change = self._following.unread[0]
        kept = self._recall(change)  # may take too long: then the change is still unread
        self._following.read(change)
        return ResultChange(change, self._find(change.task), kept)


class AsyncChangeReader(_Reader[Awaitable[None], Awaitable[HandleT], Awaitable[list[KeptResult]]]):
    """Endless iterator that AsyncClient.changes() returns."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ResultChange[HandleT]:
        await self._wait()
        change = self._following.unread[0]
        kept = await self._recall(change)
        self._following.read(change)
        return ResultChange(change, await self._find(change.task), kept)
