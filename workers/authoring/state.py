"""ctx.state: progress of a long operation, kept over crashes and restarts.

    done = ctx.state.load(default=0)          async: await ctx.state.aload(...)
    for page in range(done, pages):
        ...
        ctx.state.save(page + 1)              on disk when it returns

A state without a key is the operation's own: its key is made of the task's name and arguments, so
that another attempt, another worker and a later task with the same arguments find it again. It is
cleared when the task succeeds. A state with a key belongs to all users of that key in the pool, and
stays until its time is over.
"""

import hashlib
import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec

from musterd.ipc.errors import StateError
from musterd.ipc.wire.messages import STATE_BYTES_MAX, Lease, LoadState, SaveState, StateAnswer
from musterd.workers.authoring import outcome
from musterd.workers.texts import is_plain, shown_whole

if TYPE_CHECKING:
    from musterd.workers.authoring.request_channel import RequestChannel

STATE_SECONDS = 7 * 24 * 3600.0  # how long a state is kept that nobody loads again
STATE_SECONDS_MAX = 100 * 365 * 24 * 3600.0  # more is a mistake in the unit
KEY_CHARS_MAX = 200  # as on the wire
DIGEST_BYTES = 16
NAME_CHARS_MAX = 120  # of an own key: the digest tells longer ones apart

log = logging.getLogger("musterd.task")


class Unfit(StateError, outcome.Unserialisable):
    """This state can never be kept, however often it is tried."""


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """Stored form: the value, and whether it stays when the task succeeds."""

    keep: bool
    value: Any


_decode = msgspec.msgpack.Decoder(_Kept).decode
# The msgpack of _Kept up to the value: an array of two, the first of them true or false.
_HEADS = {False: b"\x92\xc2", True: b"\x92\xc3"}


class OperationState:
    """State of `ctx.state`: of this operation (the task's name and arguments), or of a key of the
    pool. The methods with an `a` are for async handlers."""

    def __init__(self, channel: "RequestChannel", lease: Lease) -> None:
        self._channel = channel
        self._lease = lease
        self._own = ""

    def load(self, key: str | None = None, default: Any = None) -> Any:
        """Return the value saved last, or `default`."""
        question = LoadState(self._channel.number(), self._key(key), self._lease.lease)
        answer = self._channel.ask(self._lease, "ctx.state.load()", question)
        return self._loaded(question, answer, default)

    def save(
        self, value: Any, key: str | None = None, ttl: float | None = None, *, keep: bool = False
    ) -> None:
        """Keep the value for `ttl` seconds (a week); on disk when save() returns.

        `keep` leaves the operation's own state in place when the task succeeds.
        """
        question = self._to_save(value, key, ttl, keep)
        answer = self._channel.ask(self._lease, "ctx.state.save()", question)
        self._saved(question, answer, keep)

    def clear(self, key: str | None = None) -> None:
        """Forget the state."""
        question = self._to_clear(key)
        answer = self._channel.ask(self._lease, "ctx.state.clear()", question)
        self._saved(question, answer, False)

    async def aload(self, key: str | None = None, default: Any = None) -> Any:
        """Return the value saved last, or `default`."""
        question = LoadState(self._channel.number(), self._key(key), self._lease.lease)
        answer = await self._channel.ask_async(self._lease, "ctx.state.aload()", question)
        return self._loaded(question, answer, default)

    async def asave(
        self, value: Any, key: str | None = None, ttl: float | None = None, *, keep: bool = False
    ) -> None:
        """Keep the value as save() does."""
        question = self._to_save(value, key, ttl, keep)
        answer = await self._channel.ask_async(self._lease, "ctx.state.asave()", question)
        self._saved(question, answer, keep)

    async def aclear(self, key: str | None = None) -> None:
        """Forget the state."""
        question = self._to_clear(key)
        answer = await self._channel.ask_async(self._lease, "ctx.state.aclear()", question)
        self._saved(question, answer, False)

    # -- keys ---------------------------------------------------------------------------------

    def _key(self, key: str | None) -> str:
        pool = self._channel.worker.pool
        if key is None:
            if not self._own:
                self._own = own_key(f"{pool}.{self._lease.method}", self._lease.args)
            return self._own
        full = f"{pool}/{key}"
        if not isinstance(key, str) or not key or len(full) > KEY_CHARS_MAX or not is_plain(full):
            raise Unfit(
                f"ctx.state: a key is a text of 1 to {KEY_CHARS_MAX - len(pool) - 1} characters, "
                f"without halves of surrogate pairs, not {shown_whole(key)}"
            )
        self._channel.vault.check("a key of ctx.state", full.encode("utf-8", "surrogatepass"))
        return full

    # -- values -------------------------------------------------------------------------------

    def _to_save(self, value: Any, key: str | None, ttl: float | None, keep: bool) -> SaveState:
        full = self._key(key)
        plain = self._channel.worker.encode_state(value)
        try:
            data = _HEADS[keep] + outcome.encode_plain("state", plain)
        except outcome.Unserialisable as error:
            raise Unfit(
                f"the state {full} cannot be serialised: {error}; save plain data "
                "(dict, list, str, numbers, bytes, None) or write the worker's encode_state()"
            ) from None
        if len(data) > STATE_BYTES_MAX:
            raise Unfit(
                f"the state {full} has {len(data)} bytes, over the limit of {STATE_BYTES_MAX}; "
                "write the data to a file or a database and save its name"
            )
        self._channel.vault.check(f"the state {full}", data)
        number = self._channel.number()
        return SaveState(number, full, data, _nanoseconds(ttl), self._lease.lease)

    def _to_clear(self, key: str | None) -> SaveState:
        return SaveState(self._channel.number(), self._key(key), None, lease=self._lease.lease)

    def _saved(self, question: SaveState, answer: StateAnswer, keep: bool) -> None:
        _check(question.key, answer)
        if question.key == self._own:
            self._channel.clears = "" if keep or question.value is None else question.key
        if question.value is None:
            self._log("state cleared", question.key, 0)
        else:
            self._log("state saved", question.key, len(question.value))

    def _loaded(self, question: LoadState, answer: StateAnswer, default: Any) -> Any:
        _check(question.key, answer)
        if answer.value is None:
            return default
        try:
            kept = _decode(answer.value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StateError(
                f"the state {question.key} cannot be read: {error}; clear it to start over"
            ) from error
        if question.key == self._own and not kept.keep:
            self._channel.clears = question.key
        self._log("state restored", question.key, len(answer.value))
        return self._channel.worker.decode_state(kept.value)

    def _log(self, what: str, key: str, size: int) -> None:
        """Log sizes, never values."""
        extra = {"MUSTERD_TASK": self._lease.id, "MUSTERD_ATTEMPT": self._lease.attempt}
        log.debug("%s: %s, %d bytes", what, key, size, extra=extra)


def own_key(name: str, arguments: bytes) -> str:
    """Return the key of an operation without one: equal for equal arguments, in any order.

    Arguments have only the name of a secret, so its value is in no key.
    """
    plain = msgspec.msgpack.decode(arguments)
    canonical = msgspec.msgpack.encode([name, plain], order="sorted")
    digest = hashlib.blake2b(canonical, digest_size=DIGEST_BYTES).hexdigest()
    return f"{name[:NAME_CHARS_MAX]}:{digest}"


def _check(key: str, answer: StateAnswer) -> None:
    if answer.error:
        raise StateError(f"the state {key}: {answer.error}")


def _nanoseconds(ttl: float | None) -> int:
    """Return the time to live for the wire, where 0 means forever."""
    if ttl is None:
        ttl = STATE_SECONDS
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl > 0:
        raise ValueError(f"ctx.state.save(ttl={ttl!r}): give seconds, more than 0")
    if ttl == math.inf:
        return 0
    if ttl > STATE_SECONDS_MAX:
        raise ValueError(f"ctx.state.save(ttl={ttl!r}): at most {STATE_SECONDS_MAX:.0f}")
    return max(1, int(ttl * 1e9))
