"""Secrets inside a worker: looked up right before a handler runs, and kept out of what it says.

A secret is found in the environment variable of its name, else in the systemd credential of its
name, else in a file of its name in the pool's `secrets_dir`. Values live as long as the attempt.
"""

import base64
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
from msgspec.msgpack import Ext

from musterd.ipc.secret import SECRET_CODE, SECRETS_DIR_VARIABLE, is_secret_name, secret_name
from musterd.workers.base import Permanent

CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"  # set by systemd

SECRET_BYTES_MAX = 64 * 1024  # a key or a certificate; a larger file is not a secret
# Shorter values are found in any text by chance: replacing them would tell more than it hides.
TEXT_CHARS_MIN = 4
DATA_CHARS_MIN = 8  # a result is refused, not only changed: so be sure

_encode = msgspec.msgpack.Encoder().encode


class MissingSecret(Exception):
    """A secret that a task names is not there. Never says what a value is."""


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
            self._forms += [(form, f"***{name}***") for form in _written_forms(value)]
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


def find_secret(name: str) -> str:
    """The value of this secret; MissingSecret says where it was looked for."""
    if not is_secret_name(name):  # the name came with a task, and must not lead anywhere else
        raise MissingSecret(f"{name[:128]!r} cannot be the name of a secret")
    value = os.environ.get(name)
    if value:
        if not value.isascii():
            _check_text(name, value)
        return value
    looked = [f"the environment variable {name}"]
    for variable, called in (
        (CREDENTIALS_VARIABLE, "the systemd credential"),
        (SECRETS_DIR_VARIABLE, "the pool's secrets_dir"),
    ):
        folder = os.environ.get(variable)
        if folder:
            looked.append(called)
            value = _read(name, Path(folder, name))
            if value:
                return value
    raise MissingSecret(
        f"secret {name!r} is not there or empty: looked for in {', '.join(looked)}; "
        "set one of them for this pool's workers"
    )


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MissingSecret(f"secret {name!r}: its variable is not text in UTF-8") from None


def _read(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise MissingSecret(f"secret {name!r} cannot be read: {error.strerror}: {path}") from None
    if len(data) > SECRET_BYTES_MAX:
        raise MissingSecret(f"secret {name!r}: {path} has more than {SECRET_BYTES_MAX} bytes")
    try:
        return data.decode().rstrip("\r\n")  # editors and echo end files with a line break
    except UnicodeDecodeError:
        raise MissingSecret(f"secret {name!r}: {path} is not text in UTF-8") from None


def _written_forms(value: str) -> set[str]:
    """A secret as it may stand in a message, a URL or a header."""
    if len(value) < TEXT_CHARS_MIN:
        return set()
    plain = value.encode()
    return {
        value,
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        quote(plain, safe=""),
        quote(plain),
        quote_plus(plain),
        base64.b64encode(plain).decode(),
    }
