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
HIDDEN_MAX = 50  # values of one session, the longest: a site has few that let anybody in
SESSIONS_HIDDEN_MAX = 4  # the last ones that the worker used

_encode = msgspec.msgpack.Encoder().encode


class Leak(Permanent):
    """A handler gives away a secret. The message has its name, not its value."""


class Vault:
    """Secrets of one attempt."""

    def __init__(self, vaults: "Vaults") -> None:
        self._vaults = vaults
        self._values: dict[str, str] = {}
        self.opened = False  # the arguments have secrets
        self._unshown: tuple[str, list[Written]] = ("", [])  # of a session, with its name

    @property
    def used(self) -> bool:
        """Whether the attempt has seen the value of a secret."""
        return bool(self._values)

    def clear(self) -> None:
        self.opened = False
        if self._values:
            self._values = {}
        if self._unshown[0]:
            self._unshown = ("", [])

    def hide(self, whose: str, texts: list[str], unshown: list[str]) -> None:
        """Keep these texts out of messages, and `unshown` out of results as well."""
        self._vaults.hide(whose, texts)
        self._unshown = (whose, [Written(text) for text in unshown[:HIDDEN_MAX]])

    def open(self, arguments: bytes) -> bytes:
        """Return the arguments with the values of secrets; MissingSecret if one is absent."""

        def hook(code: int, data: memoryview) -> Any:
            name = secret_name(Ext(code, bytes(data))) if code == SECRET_CODE else None
            if name is None:
                return Ext(code, bytes(data))
            self.opened = True
            return self.value(name)

        return _encode(msgspec.msgpack.decode(arguments, ext_hook=hook))

    def value(self, name: str) -> str:
        """Return the value of this secret; MissingSecret if it is absent."""
        value = self._values.get(name)
        if value is None:
            value = self._values[name] = self._vaults.find(name)
        return value

    def redact(self, text: str) -> str:
        """Return the text without any value that the worker knows."""
        return self._vaults.redact(text)

    def check(self, what: str, data: bytes) -> None:
        """Raise Leak if the data hold the value of a secret or a session of this attempt."""
        whose, unshown = self._unshown
        if any(each.is_in(data) for each in unshown):
            raise Leak(
                f"{what} contains a cookie of {whose}, which must not be written anywhere; "
                "leave it out"
            )
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
        self._hidden: dict[str, list[Written]] = {}  # by session
        # the values of _known and _hidden, readable from any thread
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
            self._scrub()
        return known

    def hide(self, whose: str, texts: list[str]) -> None:
        """Remember the values of a session, the longest first, in place of earlier ones."""
        longest = sorted(texts, key=lambda text: -len(text))[:HIDDEN_MAX]
        self._hidden.pop(whose, None)
        self._hidden[whose] = [Written(text) for text in longest]
        while len(self._hidden) > SESSIONS_HIDDEN_MAX:
            del self._hidden[next(iter(self._hidden))]
        self._scrub()

    def _scrub(self) -> None:
        # a value before a part of it
        longest = sorted(self._known, key=lambda each: -len(each[1]))
        secrets = [(self._known[each], f"***{each[0]}***".encode()) for each in longest]
        sessions = [
            (each, f"***{whose}***".encode())
            for whose, hidden in self._hidden.items()
            for each in hidden
        ]
        self._scrubbed = (*secrets, *sessions)

    def redact(self, text: str) -> str:
        """Return the text without any of the known values."""
        return scrub(text, self._scrubbed) if self._scrubbed else text


def access_of(environ: "os._Environ[str]", pool: str) -> Access:
    """Return the access the supervisor granted; without its word nothing is allowed."""
    told = environ.get(SECRETS_VARIABLE)
    return Access(pool=pool) if told is None else msgspec.json.decode(told, type=Access)
