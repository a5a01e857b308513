"""Secrets inside a worker: looked up right before a handler runs, and kept out of what it says.

Where they are looked for is said in ipc/secrets/access.py, in which forms they are found in what a
handler says in ipc/secrets/forms.py. An attempt has its own secrets; what the worker says is
cleaned of those of earlier attempts as well, because a thread or a connection may outlive its task.
A worker whose tasks name no secrets compares nothing.
"""

import os
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from musterd.ipc.secrets.access import Access
from musterd.ipc.secrets.forms import Written, scrub
from musterd.ipc.secrets.reference import SECRET_CODE, secret_name
from musterd.ipc.wire.environment import SECRETS_VARIABLE
from musterd.workers.authoring.base import Permanent

DATA_CHARS_MIN = 8  # a result is refused, not only changed: so be sure
# Values that a worker has seen; each text is searched for all of them. More than a pool has.
KNOWN_MAX = 100

_encode = msgspec.msgpack.Encoder().encode


class Leak(Permanent):
    """A handler gives away a secret. Says which, not what it is."""


class Vault:
    """The secrets of one attempt."""

    def __init__(self, vaults: "Vaults") -> None:
        self._vaults = vaults
        self._values: dict[str, str] = {}

    def clear(self) -> None:
        if self._values:
            self._values = {}

    def open(self, arguments: bytes) -> bytes:
        """The same arguments with values where secrets were named; MissingSecret."""

        def hook(code: int, data: memoryview) -> Any:
            name = secret_name(Ext(code, bytes(data))) if code == SECRET_CODE else None
            return Ext(code, bytes(data)) if name is None else self._value(name)

        return _encode(msgspec.msgpack.decode(arguments, ext_hook=hook))

    def _value(self, name: str) -> str:
        value = self._values.get(name)
        if value is None:
            value = self._values[name] = self._vaults.find(name)
        return value

    def redact(self, text: str) -> str:
        """The text without any value that the worker knows."""
        return self._vaults.redact(text)

    def check(self, what: str, data: bytes) -> None:
        """Leak if the value of a secret of this attempt is in the data."""
        for name, value in self._values.items():
            if len(value) >= DATA_CHARS_MIN and self._vaults.written(name, value).is_in(data):
                raise Leak(
                    f"{what} contains the value of secret {name!r}, which is not to be written "
                    "anywhere; leave it out"
                )


class Vaults:
    """The secrets that a worker has seen."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._known: dict[tuple[str, str], Written] = {}  # by name and value, the newest last
        self._scrubbed: tuple[tuple[Written, bytes], ...] = ()  # the same, for any thread

    def new(self) -> Vault:
        return Vault(self)

    def find(self, name: str) -> str:
        """The value, which is known from now on; MissingSecret."""
        value = self._access.find(name)
        self.written(name, value)
        return value

    def written(self, name: str, value: str) -> Written:
        """How it may be written."""
        known = self._known.pop((name, value), None)
        if known is not None:
            self._known[name, value] = known
        else:
            known = self._known[name, value] = Written(value)
            while len(self._known) > KNOWN_MAX:
                del self._known[next(iter(self._known))]
            longest = sorted(self._known, key=lambda each: -len(each[1]))  # then a part of it
            self._scrubbed = tuple(
                (self._known[each], f"***{each[0]}***".encode()) for each in longest
            )
        return known

    def redact(self, text: str) -> str:
        """The text without any of their values."""
        return scrub(text, self._scrubbed) if self._scrubbed else text


def access_of(environ: "os._Environ[str]", pool: str) -> Access:
    """What the supervisor has told; nothing is allowed where it has told nothing."""
    told = environ.get(SECRETS_VARIABLE)
    return Access(pool=pool) if told is None else msgspec.json.decode(told, type=Access)
