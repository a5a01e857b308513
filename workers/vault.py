"""Secrets inside a worker: looked up right before a handler runs, and kept out of what it says.

A secret is found in the environment variable of its name, else in the systemd credential of its
name, else in a file of its name in the pool's `secrets_dir`. Values live as long as the attempt.
"""

from typing import Any

import msgspec
from msgspec.msgpack import Ext

from musterd.ipc.secret import SECRET_CODE, secret_name
from musterd.ipc.secret_lookup import find_secret, written_forms
from musterd.workers.base import Permanent

DATA_CHARS_MIN = 8  # a result is refused, not only changed: so be sure

_encode = msgspec.msgpack.Encoder().encode


class Leak(Permanent):
    """A handler gives away a secret. Says which, not what it is."""


class Vault:
    """The secrets of the attempt that runs."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._forms: list[tuple[str, str]] = []  # (as it may be written, what to write instead)

    def clear(self) -> None:
        if self._values:
            self._values = {}
            self._forms = []

    def open(self, arguments: bytes) -> bytes:
        """The same arguments with values where secrets were named; MissingSecret."""

        def hook(code: int, data: memoryview) -> Any:
            name = secret_name(Ext(code, bytes(data))) if code == SECRET_CODE else None
            return Ext(code, bytes(data)) if name is None else self._value(name)

        return _encode(msgspec.msgpack.decode(arguments, ext_hook=hook))

    def _value(self, name: str) -> str:
        value = self._values.get(name)
        if value is None:
            value = self._values[name] = find_secret(name)
            self._forms += [(form, f"***{name}***") for form in written_forms(value)]
            self._forms.sort(key=lambda form: -len(form[0]))  # the whole before a part of it
        return value

    def redact(self, text: str) -> str:
        """The text without any value of a secret."""
        for form, instead in self._forms:
            if form in text:
                text = text.replace(form, instead)
        return text

    def check(self, what: str, data: bytes) -> None:
        """Leak if the value of a secret is in the data."""
        for name, value in self._values.items():
            if len(value) >= DATA_CHARS_MIN and value.encode() in data:
                raise Leak(
                    f"{what} contains the value of secret {name!r}, which is not to be written "
                    "anywhere; leave it out"
                )


class Vaults:
    """The secrets of all attempts that run, for what concerns all of them: the log."""

    def __init__(self) -> None:
        self._open: dict[Vault, None] = {}

    def new(self) -> Vault:
        vault = Vault()
        self._open[vault] = None
        return vault

    def close(self, vault: Vault) -> None:
        del self._open[vault]

    def redact(self, text: str) -> str:
        """The text without any value of a secret of theirs."""
        for vault in list(self._open):
            text = vault.redact(text)
        return text
