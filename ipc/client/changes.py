"""What a reader of changes has seen: each change once, over restarts of the daemon too.

The daemon answers a Follow with the newest change of each schedule, however old, and tells the
others as they come. The first answer is where a reader begins: it is not news. A later one (another
connection, another daemon, a silence) brings what was missed, of each schedule the newest.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, Self, TypeVar

from musterd.ipc.wire.messages import Change, Changes

UNREAD_MAX = 1_000  # changes kept for a reader that does not come for them; the oldest go first

HandleT = TypeVar("HandleT")
Waited = TypeVar("Waited")
Found = TypeVar("Found")


class Following:
    """One reader, as pure state."""

    def __init__(self, schedules: Iterable[str] = ()) -> None:
        self.unread: deque[Change] = deque(maxlen=UNREAD_MAX)
        self._schedules = frozenset(schedules)  # empty: all of them
        self._seen: dict[str, str] | None = None  # schedule -> task of its newest change

    def hear(self, message: Changes) -> None:
        if self._seen is None:
            if message.newest:
                self._seen = {change.schedule: change.task for change in message.changes}
            return  # what was told before our Follow was for somebody else
        for change in message.changes:
            if self._seen.get(change.schedule) != change.task:
                self._seen[change.schedule] = change.task
                if not self._schedules or change.schedule in self._schedules:
                    self.unread.append(change)

    def any_unread(self) -> bool:
        return bool(self.unread)


class ResultChange(Generic[HandleT]):
    """The result of a schedule is not the one before; `task` is the run that brought it."""

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
