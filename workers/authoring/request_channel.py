"""A running handler's requests to the supervisor: state, shared locks and progress.

Each worker process has one channel, or one per attempt where several run at once. Every request is
bound to the running lease: a context that outlives its task gets an error instead of speaking for
another one.
"""

import threading
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import (
    HandlerAnswer,
    Lease,
    LoadState,
    LockState,
    Progress,
    SaveState,
)
from musterd.workers.authoring import forks
from musterd.workers.authoring.base import Context, Worker
from musterd.workers.authoring.lock import SharedLock
from musterd.workers.authoring.state import OperationState
from musterd.workers.authoring.vault import Vault
from musterd.workers.texts import plain_text

if TYPE_CHECKING:
    from musterd.workers.authoring.session import Session

ASKS_MAX = 100  # answers that the coroutines of one handler may await at once
PROGRESS_CHARS_MAX = 500  # as on the wire (Progress.text)

Question = LoadState | SaveState | LockState


class Line(Protocol):
    """Carrier of a handler's messages to the supervisor, and of the answers."""

    @property
    def begun(self) -> int:
        """Lease that has begun and not ended, 0 for none."""

    @property
    def running(self) -> int:
        """Lease whose handler's code runs, 0 for none."""

    @property
    def is_async(self) -> bool:
        """Whether that handler is async."""

    @property
    def asks(self) -> int:
        """Number of answers that are awaited."""

    def send(self, frame: bytes) -> None: ...
    def ask(self, request: int, frame: bytes) -> HandlerAnswer: ...
    async def ask_async(self, request: int, frame: bytes) -> HandlerAnswer: ...
    def report(self, progress: Progress) -> None: ...


class RequestChannel:
    def __init__(
        self, line: Line, worker: Worker, vault: Vault, numbers: Iterator[int] | None = None
    ) -> None:
        self.worker = worker
        self.vault = vault
        self.clears = ""  # key of the state that a success of the running lease makes obsolete
        self.locked: set[str] = set()  # locks that the running lease has or waits for
        self._line = line
        self._numbers = numbers or count(1)  # of questions; shared by all channels of a worker

    def begin(self) -> None:
        """Start over for another lease."""
        self.clears = ""
        if self.locked:
            self.locked = set()  # the locks went back with their lease

    def state(self, lease: Lease) -> OperationState:
        return OperationState(self, lease)

    def lock(self, lease: Lease, name: str, timeout: float) -> SharedLock:
        return SharedLock(self, lease, name, timeout)

    def session(self, lease: Lease, context: Context, name: str | None) -> "Session":
        from musterd.workers.authoring.session import open_session

        return open_session(self, lease, context, name)

    def progress(self, lease: Lease, fraction: float, text: str) -> None:
        """Report progress without waiting, from any thread; do nothing after the lease's end."""
        if self._line.begun == lease.lease and not forks.is_child():
            text = plain_text(self.vault.redact(str(text)), PROGRESS_CHARS_MAX)
            self._line.report(Progress(lease.lease, fraction, text))

    # -- asking -------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the number of the next question."""
        return next(self._numbers)

    def ask(self, lease: Lease, call: str, question: Question) -> Any:
        """Ask and return the answer; `call` is what the handler called, for errors."""
        self.check(lease, call)
        return self._line.ask(question.request, encode(question))

    async def ask_async(self, lease: Lease, call: str, question: Question) -> Any:
        """Ask for an async handler."""
        self.check(lease, call, awaited=True)
        if self._line.asks >= ASKS_MAX:
            raise RuntimeError(f"{call}: {ASKS_MAX} others wait for an answer already")
        answer: HandlerAnswer = await self._line.ask_async(question.request, encode(question))
        return answer

    def tell(self, message: LockState) -> None:
        """Send a message that is not answered."""
        self._line.send(encode(message))

    def runs(self, lease: Lease) -> bool:
        return self._line.running == lease.lease and not forks.is_child()

    def check(self, lease: Lease, call: str, *, awaited: bool = False) -> None:
        """Raise RuntimeError if the handler cannot make this call here and now."""
        if forks.is_child():
            raise RuntimeError(
                f"{call} was called in a process that the handler forked: only the worker itself "
                "can speak for its task; hand the value to it"
            )
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{call} was called in thread {threading.current_thread().name!r}: "
                "call it in the handler itself, and hand the value to the thread"
            )
        if not self.runs(lease):
            raise RuntimeError(f"{call}: task {lease.id} is not running any more")
        if awaited and not self._line.is_async:
            raise RuntimeError(
                f"{call} is awaited in a handler that is not async: see docs/state.md"
            )
        if self._line.is_async and not awaited:
            raise RuntimeError(
                f"{call} would block the event loop of an async handler: "
                f"write {_awaited(call)} instead"
            )


def _awaited(call: str) -> str:
    if call in ("ctx.lock()", "ctx.session()"):
        return f"async with {call[:-1]}...)"
    owner, _, method = call.rpartition(".")
    return f"await {owner}.a{method}"
