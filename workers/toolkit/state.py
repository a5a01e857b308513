"""State of a long operation, kept through ctx.state so that a crash or a restart loses no step.

    async with operation(ctx, "sync prices", shop=shop, api_key=key) as work:
        done = await work.aload() or {"page": 0}
        for page in range(done["page"] + 1, last + 1):
            ...
            await work.asave({"page": page})

The block's end clears the state; after an error or a death the state stays, and the next run of the
operation goes on from it.

The key is the operation's name and a hash of its parameters in sorted order, so every set of
parameters has a state of its own. Of a parameter with a sensitive name (password, api_key, ...)
only a slow, salted hash goes into the key: two accounts never share a state, and nobody reads the
password out of the store or finds it by trying words at speed. Neither parameters nor their names
are saved. A value with a sensitive name in it, or with the value of a sensitive parameter anywhere
(a next-page URL, say), is refused.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from musterd.ipc.errors import StateError
from musterd.ipc.secrets.forms import Written
from musterd.ipc.secrets.names import SENSITIVE, is_sensitive

log = logging.getLogger("musterd.toolkit")

DIGEST_BYTES = 16
NAME_CHARS_MAX = 100  # with a hash or a task's id it is a key of at most 200
# about 50 ms: nothing for us, once; a lot for an attacker with a list of words
HASH_ROUNDS = 100_000
HASHES_KEPT = 128
# Shorter values occur in any text by chance.
FOUND_CHARS_MIN = 6


class StateStore(Protocol):
    """ctx.state: plain data under a key, durable when `save` returns."""

    def load(self, key: str | None = None) -> Any | None: ...
    def save(self, value: Any, key: str | None = None) -> None: ...
    def clear(self, key: str | None = None) -> None: ...
    async def aload(self, key: str | None = None) -> Any | None: ...
    async def asave(self, value: Any, key: str | None = None) -> None: ...
    async def aclear(self, key: str | None = None) -> None: ...


class MemoryState:
    """ctx.state in memory, for tests of your own handlers."""

    def __init__(self) -> None:
        self.kept: dict[str | None, bytes] = {}

    def load(self, key: str | None = None, default: Any = None) -> Any:
        """Return the value saved last, or `default`."""
        data = self.kept.get(key)
        return default if data is None else msgspec.msgpack.decode(data)

    def save(
        self, value: Any, key: str | None = None, ttl: float | None = None, *, keep: bool = False
    ) -> None:
        """Keep the value as long as this object lives, whatever `ttl` and `keep` say."""
        self.kept[key] = msgspec.msgpack.encode(value)

    def clear(self, key: str | None = None) -> None:
        """Forget the value."""
        self.kept.pop(key, None)

    async def aload(self, key: str | None = None, default: Any = None) -> Any:
        """Return the value saved last, or `default`."""
        return self.load(key, default)

    async def asave(
        self, value: Any, key: str | None = None, ttl: float | None = None, *, keep: bool = False
    ) -> None:
        """Keep the value as save() does."""
        self.save(value, key, ttl, keep=keep)

    async def aclear(self, key: str | None = None) -> None:
        """Forget the value."""
        self.clear(key)


class HasState(Protocol):
    """Context with state; musterd.Context is one."""

    @property
    def state(self) -> StateStore: ...


def state_of(ctx: Any | None, what: str) -> StateStore:
    """Return the state of a context; TypeError without one."""
    state: StateStore | None = getattr(ctx, "state", None)
    if state is None:
        raise TypeError(f"{what} needs the task's ctx among its arguments, to keep state in it")
    return state


class Operation:
    """State of one operation with its parameters. The `a...` methods are for async handlers."""

    def __init__(
        self,
        ctx: HasState,
        name: str,
        parameters: Mapping[str, Any],
        sensitive: frozenset[str] = frozenset(),
    ) -> None:
        self._store = state_of(ctx, f"operation {name!r}")
        self._name = name
        self._sensitive = sensitive | frozenset(SENSITIVE)
        self._secrets = {
            each: written
            for each, value in parameters.items()
            if is_sensitive(each, self._sensitive) and (written := _written(value)) is not None
        }
        self.key = operation_key(name, parameters, sensitive)

    def load(self) -> Any | None:
        """Return the value saved last; None if there is none."""
        return self._loaded(self._store.load(self.key))

    def save(self, value: Any) -> None:
        """Keep the value; on disk when save() returns. StateError if it has a secret in it."""
        self._check(value)
        self._store.save(value, self.key)
        log.debug("state of %s saved", self.key)

    def clear(self) -> None:
        """Forget the state, as the end of a `with` block does."""
        self._store.clear(self.key)
        log.debug("state of %s cleared", self.key)

    async def aload(self) -> Any | None:
        """Return the value saved last; None if there is none."""
        return self._loaded(await self._store.aload(self.key))

    async def asave(self, value: Any) -> None:
        """Keep the value as save() does."""
        self._check(value)
        await self._store.asave(value, self.key)
        log.debug("state of %s saved", self.key)

    async def aclear(self) -> None:
        """Forget the state."""
        await self._store.aclear(self.key)
        log.debug("state of %s cleared", self.key)

    def __enter__(self) -> "Operation":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.clear()

    async def __aenter__(self) -> "Operation":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            await self.aclear()

    def _loaded(self, value: Any | None) -> Any | None:
        if value is not None:
            log.info("state of %s restored", self.key)
        return value

    def _check(self, value: Any) -> None:
        """Raise StateError if something secret would be written."""
        try:
            # As it will be written, whatever classes it is made of.
            plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray), enc_hook=str)
        except RecursionError:
            raise StateError(
                f"the state of operation {self._name!r} is nested too deeply, or contains itself"
            ) from None
        for path, name in _names(plain):
            if is_sensitive(name, self._sensitive):
                raise StateError(
                    f"the state of operation {self._name!r} has {name!r} at {path}; "
                    "secrets are not written: leave it out and pass it as an argument again"
                )
        data = msgspec.msgpack.encode(plain) if self._secrets else b""
        for name, written in self._secrets.items():
            if written.is_in(data):
                raise StateError(
                    f"the state of operation {self._name!r} contains the value of its "
                    f"parameter {name!r}; secrets are not written: take it out of the text"
                )


def operation(ctx: HasState, name: str, /, **parameters: Any) -> Operation:
    """Return the state of operation `name` with these parameters."""
    return Operation(ctx, name, parameters)


# -- keys ---------------------------------------------------------------------------------------


def operation_key(
    name: str, parameters: Mapping[str, Any], sensitive: frozenset[str] = frozenset()
) -> str:
    """Return a key that is equal for equal names and parameters, in any order and process."""
    names = sensitive | frozenset(SENSITIVE)
    secret = {each for each in parameters if is_sensitive(each, names)}
    plain = {each: value for each, value in parameters.items() if each not in secret}
    salt = _encode(name, [name, sorted(plain.items())])
    hashed = [(each, _slow_hash(_encode(name, parameters[each]), salt)) for each in sorted(secret)]
    return f"{name[:NAME_CHARS_MAX]}:{_digest(msgspec.msgpack.encode([salt, hashed]))}"


def short_name(name: str) -> str:
    """Return the name, or its beginning and a hash where it is too long for a key."""
    if len(name) <= NAME_CHARS_MAX:
        return name
    digest = _digest(name.encode("utf-8", "surrogatepass"))
    return f"{name[: NAME_CHARS_MAX - len(digest) - 1]}:{digest}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


@lru_cache(maxsize=HASHES_KEPT)
def _slow_hash(secret: bytes, salt: bytes) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", secret, salt, HASH_ROUNDS, DIGEST_BYTES)


def _encode(name: str, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value, order="sorted")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateError(
            f"the parameters of operation {name!r} cannot be a key: {error}; "
            "give plain data (str, numbers, bytes, None, lists and dicts of them)"
        ) from None


# -- looking into values ------------------------------------------------------------------------


def _names(value: Any, path: str = "state") -> Iterator[tuple[str, str]]:
    """Yield every key of every mapping in the value that has a value, with its path."""
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(key, str) and part is not None:
                yield path, key
            yield from _names(part, f"{path}[{key!r:.40}]")
    elif isinstance(value, list | tuple):
        for position, part in enumerate(value):
            yield from _names(part, f"{path}[{position}]")


def _written(secret: Any) -> Written | None:
    """Return a secret in all its forms; None if it is too short to be looked for."""
    if isinstance(secret, bytes):
        secret = secret.decode("utf-8", "replace")
    if not isinstance(secret, str) or len(secret) < FOUND_CHARS_MIN:
        return None
    return Written(secret)
