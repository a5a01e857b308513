"""Secrets inside a worker: looked up right before a handler runs, and kept out of its messages.

ipc/secrets/access.py says where they are looked for, ipc/secrets/forms.py in which forms they are
found in texts. An attempt has its own secrets; messages are cleaned of those of earlier attempts as
well, because a thread or a connection may outlive its task. A worker whose tasks name no secrets
compares nothing.
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
    """A handler gives away a secret. The message has its name, not its value."""


class Vault:
    """Secrets of one attempt."""

    def __init__(self, vaults: "Vaults") -> None:
        self._vaults = vaults
        self._values: dict[str, str] = {}

    def clear(self) -> None:
        if self._values:
            self._values = {}

    def open(self, arguments: bytes) -> bytes:
        """Return the arguments with the values of secrets; MissingSecret if one is absent."""

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
        """Return the text without any value that the worker knows."""
        return self._vaults.redact(text)

    def check(self, what: str, data: bytes) -> None:
        """Raise Leak if the data hold the value of a secret of this attempt."""
        for name, value in self._values.items():
            if len(value) >= DATA_CHARS_MIN and self._vaults.written(name, value).is_in(data):
                raise Leak(
                    f"{what} contains the value of secret {name!r}, which must not be written "
                    "anywhere; leave it out"
                )


class Vaults:
    """Secrets that a worker has seen."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._known: dict[tuple[str, str], Written] = {}  # by name and value, the newest last
        # the values of _known, readable from any thread
        self._scrubbed: tuple[tuple[Written, bytes], ...] = ()

    def new(self) -> Vault:
        return Vault(self)

    def find(self, name: str) -> str:
        """Return the value and remember it; MissingSecret if it is absent."""
        value = self._access.find(name)
        self.written(name, value)
        return value

    def written(self, name: str, value: str) -> Written:
        """Return all forms of the value."""
        known = self._known.pop((name, value), None)
        if known is not None:
            self._known[name, value] = known
        else:
            known = self._known[name, value] = Written(value)
            while len(self._known) > KNOWN_MAX:
                del self._known[next(iter(self._known))]
            # a value before a part of it
            longest = sorted(self._known, key=lambda each: -len(each[1]))
            self._scrubbed = tuple(
                (self._known[each], f"***{each[0]}***".encode()) for each in longest
            )
        return known

    def redact(self, text: str) -> str:
        """Return the text without any of the known values."""
        return scrub(text, self._scrubbed) if self._scrubbed else text


def access_of(environ: "os._Environ[str]", pool: str) -> Access:
    """Return the access the supervisor granted; without its word nothing is allowed."""
    told = environ.get(SECRETS_VARIABLE)
    return Access(pool=pool) if told is None else msgspec.json.decode(told, type=Access)
