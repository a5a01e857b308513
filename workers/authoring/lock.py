"""ctx.lock: a lock across all workers of the daemon.

    with ctx.lock("ledger", timeout=10): ...          async with in async handlers

The supervisor holds the lock for the task. The lock is released at the end of the block, and in any
case when the task ends, its worker dies or the daemon does.
"""

from typing import TYPE_CHECKING

from musterd.ipc.errors import LockTimeout, MusterdError
from musterd.ipc.wire.messages import Lease, LockAnswer, LockState
from musterd.workers.texts import is_plain, shown_whole

if TYPE_CHECKING:
    from musterd.workers.authoring.request_channel import RequestChannel

LOCK_SECONDS_MAX = 30 * 24 * 3600.0  # a month: more is a mistake in the unit
NAME_CHARS_MAX = 200  # as on the wire

_CALL = "ctx.lock()"


class SharedLock:
    """Lock of `ctx.lock()`, for `with` and `async with`; the end of the task gives it back, too."""

    def __init__(self, channel: "RequestChannel", lease: Lease, name: str, timeout: float) -> None:
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARS_MAX or not is_plain(name):
            raise ValueError(
                f"ctx.lock({shown_whole(name)}): a name is a text of 1 to {NAME_CHARS_MAX} "
                "characters, without halves of surrogate pairs"
            )
        channel.vault.check("the name of ctx.lock()", name.encode("utf-8", "surrogatepass"))
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not number or not 0 <= timeout <= LOCK_SECONDS_MAX:
            raise ValueError(
                f"ctx.lock(timeout={timeout!r}): give seconds, 0 to {LOCK_SECONDS_MAX:.0f}"
            )
        self._channel = channel
        self._lease = lease
        self._name = name
        self._timeout = timeout

    def __enter__(self) -> None:
        self._channel.check(self._lease, _CALL)
        question = self._claim()
        try:
            answer = self._channel.ask(self._lease, _CALL, question)
        except BaseException:
            self._give_back()  # the supervisor may have granted it at that very moment
            raise
        self._settle(answer)

    def __exit__(self, *error: object) -> None:
        self._give_back()

    async def __aenter__(self) -> None:
        self._channel.check(self._lease, _CALL, awaited=True)
        question = self._claim()
        try:
            answer = await self._channel.ask_async(self._lease, _CALL, question)
        except BaseException:
            self._give_back()
            raise
        self._settle(answer)

    async def __aexit__(self, *error: object) -> None:
        self._give_back()

    def _claim(self) -> LockState:
        if self._name in self._channel.locked:
            raise RuntimeError(
                f"lock {self._name!r} is held or waited for by this very task, which would wait "
                "for itself: leave the one block before entering the other"
            )
        self._channel.locked.add(self._name)
        timeout_ns = max(1, int(self._timeout * 1e9)) if self._timeout else 0
        return LockState(self._channel.number(), self._name, True, timeout_ns, self._lease.lease)

    def _settle(self, answer: LockAnswer) -> None:
        if answer.taken:
            return
        self._channel.locked.discard(self._name)
        if answer.error:
            raise MusterdError(f"lock {self._name!r} is refused: {answer.error}")
        raise LockTimeout(
            f"lock {self._name!r} was not free within {self._timeout:g} s: {answer.holder} has it",
            self._name,
            answer.holder,
        )

    def _give_back(self) -> None:
        if self._channel.runs(self._lease):  # else the lock was released with its lease
            self._channel.locked.discard(self._name)
            self._channel.tell(LockState(0, self._name, False, 0, self._lease.lease))
