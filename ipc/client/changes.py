"""Readers of changes: each change is delivered once, over restarts of the daemon too.

The daemon answers a Follow with the newest change of each schedule, however old, and then sends
changes as they come. The first answer is the reader's starting point and no news. A later answer
(another connection, another daemon, a silence) brings the newest missed change of each schedule.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, Self, TypeVar

from musterd.ipc.client.taskspec import shown
from musterd.ipc.wire.messages import Change, Changes

UNREAD_MAX = 1_000  # changes kept for a slow reader; the oldest are dropped first

HandleT = TypeVar("HandleT")
Waited = TypeVar("Waited")
Found = TypeVar("Found")


class Following:
    """State of one reader, without I/O."""

    def __init__(self, schedules: Iterable[str] = ()) -> None:
        self.unread: deque[Change] = deque(maxlen=UNREAD_MAX)
        given = list(schedules)
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"give the names of schedules, not {shown(name)}")
        self._schedules = frozenset(given)  # empty: all of them
        self._seen: dict[str, str] | None = None  # schedule -> task of its newest change

    def hear(self, message: Changes) -> None:
        if self._seen is None:
            if message.newest:
                self._seen = {change.schedule: change.task for change in message.changes}
            return  # changes sent before our Follow were for another reader
        for change in message.changes:
            if self._seen.get(change.schedule) != change.task:
                self._seen[change.schedule] = change.task
                if not self._schedules or change.schedule in self._schedules:
                    self.unread.append(change)

    def any_unread(self) -> bool:
        return bool(self.unread)


class ResultChange(Generic[HandleT]):
    """New result of a schedule; `task` is the run that returned it."""

    __slots__ = ("digest", "schedule", "task")

    def __init__(self, change: Change, task: HandleT) -> None:
        self.schedule = change.schedule
        self.task = task
        self.digest = change.digest  # SHA-256 of the result

    def __repr__(self) -> str:
        return f"<change of {self.schedule}: {self.task!r}>"


class _Reader(Generic[Waited, Found]):
    def __init__(
        self,
        following: Following,
        wait: Callable[[], Waited],
        find: Callable[[str], Found],
        stop: Callable[[], None],
    ) -> None:
        self._following = following
        self._wait = wait
        self._find = find
        self.close = stop


class ChangeReader(_Reader[None, HandleT]):
    """Endless iterator that Client.changes() returns."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ResultChange[HandleT]:
        self._wait()
        change = self._following.unread.popleft()
        return ResultChange(change, self._find(change.task))


class AsyncChangeReader(_Reader[Awaitable[None], Awaitable[HandleT]]):
    """Endless iterator that AsyncClient.changes() returns."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ResultChange[HandleT]:
        await self._wait()
        change = self._following.unread.popleft()
        return ResultChange(change, await self._find(change.task))
