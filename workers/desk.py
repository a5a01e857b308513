"""A running handler's line to the supervisor: its state, shared locks and progress go through here.

One desk per worker process. Everything is bound to the lease that runs: a context that outlives
its task is told so instead of speaking for another one.
"""

import threading
from typing import Any

from musterd.ipc.codec import encode
from musterd.ipc.messages import Lease, LoadState, LockState, Progress, SaveState
from musterd.workers.attention import Attention
from musterd.workers.base import Worker
from musterd.workers.lock import SharedLock
from musterd.workers.mailbox import Answer
from musterd.workers.state import OperationState
from musterd.workers.vault import Vault

ASKS_MAX = 100  # answers that the coroutines of one handler may await at once
PROGRESS_CHARS_MAX = 500  # as on the wire (Progress.text)

Question = LoadState | SaveState | LockState


class Desk:
    def __init__(self, attention: Attention, worker: Worker, vault: Vault) -> None:
        self.worker = worker
        self.vault = vault
        self.clears = ""  # the state that a success of the running lease makes superfluous
        self.locked: set[str] = set()  # what the running lease has locked or waits for
        self._attention = attention
        self._request = 0

    def begin(self) -> None:
        """Another lease runs."""
        self.clears = ""
        if self.locked:
            self.locked = set()  # given back with the lease that had them

    def state(self, lease: Lease) -> OperationState:
        return OperationState(self, lease)

    def lock(self, lease: Lease, name: str, timeout: float) -> SharedLock:
        return SharedLock(self, lease, name, timeout)

    def progress(self, lease: Lease, fraction: float, text: str) -> None:
        """Never waits, and may be called from any thread; too late, it does nothing."""
        if self._attention.mailbox.running == lease.lease:
            text = self.vault.redact(text)[:PROGRESS_CHARS_MAX]
            self._attention.report(Progress(lease.lease, fraction, text))

    # -- asking -------------------------------------------------------------------------------

    def number(self) -> int:
        """Of the next question."""
        self._request += 1
        return self._request

    def ask(self, lease: Lease, call: str, question: Question) -> Any:
        """The answer; `call` is what the handler called, for errors."""
        self.check(lease, call)
        return self._attention.ask(question.request, encode(question))

    async def ask_async(self, lease: Lease, call: str, question: Question) -> Any:
        """The same for an async handler."""
        self.check(lease, call, awaited=True)
        if len(self._attention.mailbox.asked) >= ASKS_MAX:
            raise RuntimeError(f"{call}: {ASKS_MAX} others wait for an answer already")
        answer: Answer = await self._attention.ask_async(question.request, encode(question))
        return answer

    def tell(self, message: LockState) -> None:
        """Something that is not answered."""
        self._attention.send(encode(message))

    def runs(self, lease: Lease) -> bool:
        return self._attention.running == lease.lease

    def check(self, lease: Lease, call: str, *, awaited: bool = False) -> None:
        """RuntimeError if that cannot be called here and now."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{call} was called in thread {threading.current_thread().name!r}: "
                "call it in the handler itself, and hand the value to the thread"
            )
        if not self.runs(lease):
            raise RuntimeError(f"{call}: task {lease.id} does not run any more")
        if awaited and not self._attention.is_async:
            raise RuntimeError(
                f"{call} is awaited in a handler that is not async: see docs/state.md"
            )
        if self._attention.is_async and not awaited:
            raise RuntimeError(
                f"{call} would block the event loop of an async handler: "
                f"write {_awaited(call)} instead"
            )


def _awaited(call: str) -> str:
    if "lock" in call:
        return "async with ctx.lock(...)"
    return f"await {call.replace('state.', 'state.a')}"
