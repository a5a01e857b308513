"""Tell the supervisor which tasks a handler waits for, and the handler when that is in vain.

Only waits of the handler itself count, not those of its threads or other coroutines: they may wait
while the handler goes on. An async handler that runs beside others is known by its context.
"""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from musterd.ipc.errors import WouldDeadlock
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import WaitAnswer, Waiting
from musterd.workers.authoring import forks
from musterd.workers.authoring.request_channel import Line
from musterd.workers.runtime.mailbox import Mailbox


class Speaker(NamedTuple):
    """One attempt that runs beside others."""

    line: Line
    task: "asyncio.Task[Any] | None"


current: ContextVar[Speaker | None] = ContextVar("musterd_attempt", default=None)


class Waiter:
    def __init__(
        self,
        mailbox: Mailbox,
        numbers: Callable[[], int],
        line: Line | None,
        own_task: Callable[[], "asyncio.Task[Any] | None"],
    ) -> None:
        """Take the `line` of the one running attempt, and its asyncio task (`own_task`) if it has
        one; where several run at once, each is the `current` one of its context."""
        self._mailbox = mailbox
        self._numbers = numbers
        self._line = line
        self._own_task = own_task

    def begin(self, ids: list[str], wake: Callable[[], None]) -> "HandlerWait | None":
        """Begin a wait for ipc.wire.waits; return None if the handler itself does not wait."""
        if forks.is_child() or threading.current_thread() is not threading.main_thread():
            return None
        speaker = Speaker(self._line, self._own_task()) if self._line is not None else current.get()
        if speaker is None or not speaker.line.running or _running_task() is not speaker.task:
            return None
        wait = HandlerWait(self._mailbox, speaker.line, self._numbers(), wake)
        wait.begin(ids)
        return wait


def _running_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


class HandlerWait:
    def __init__(self, mailbox: Mailbox, line: Line, number: int, wake: Callable[[], None]) -> None:
        self.error: WouldDeadlock | None = None
        self._mailbox = mailbox
        self._line = line
        self._lease = line.running
        self._number = number
        self._wake = wake

    def begin(self, ids: list[str]) -> None:
        self._mailbox.asked[self._number] = self._refused
        self._line.send(encode(Waiting(self._number, self._lease, ids)))

    def _refused(self, answer: Any) -> None:
        assert isinstance(answer, WaitAnswer)
        self.error = WouldDeadlock(answer.reason, answer.ids)
        self._wake()

    def end(self) -> None:
        self._mailbox.asked.pop(self._number, None)
        if self._line.running == self._lease and not forks.is_child():
            self._line.send(encode(Waiting(self._number, self._lease, [])))
