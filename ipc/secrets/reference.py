"""Secret("NAME"): a secret in a task's arguments, by its name only.

On wires and on disk a Secret is a msgpack extension that no plain data can be mistaken for,
whatever a program passes on from strangers. In JSON and TOML people write {"$secret": "NAME"}. The
worker looks up the value right before the handler runs.
"""

import re
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.msgpack import Ext

SECRET_CODE = 83  # of the msgpack extension
SECRET_MARK = b"$secret:"  # begins the extension's data: found by a search, without decoding
JSON_KEY = "$secret"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")  # of a variable or a file, never a path


if TYPE_CHECKING:
    # A handler is annotated with the str that it gets, and a typed call gives a Secret for it. So
    # type checkers are told that a Secret is a str. It is none.
    _Base = str
else:
    _Base = object


class Secret(_Base):
    """Reference to a secret that the worker knows."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not is_secret_name(name):
            raise ValueError(
                "Secret(...): give the name of an environment variable or of a credential: "
                "letters, digits, _, . and -, at most 128, not a value and not a path"
            )
        self.name = name

    def __repr__(self) -> str:
        return f"Secret({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.name == self.name

    def __hash__(self) -> int:
        return hash((Secret, self.name))


def is_secret_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def encode_secret(value: Any) -> Ext:
    """Encode a Secret for the wire, as an encoder's hook; TypeError for anything else."""
    if isinstance(value, Secret):
        return Ext(SECRET_CODE, SECRET_MARK + value.name.encode())
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def secret_name(extension: Ext) -> str | None:
    """Return the name in an extension that is a secret; None for any other extension."""
    data = bytes(extension.data)
    if extension.code != SECRET_CODE or not data.startswith(SECRET_MARK):
        return None
    return data[len(SECRET_MARK) :].decode("utf-8", "replace")


def without_secrets(args: bytes) -> bytes:
    """Return encoded arguments with a text for each secret, as the handler will get one."""

    def text(code: int, data: memoryview) -> Any:
        return "" if code == SECRET_CODE else Ext(code, bytes(data))

    return msgspec.msgpack.encode(msgspec.msgpack.decode(args, ext_hook=text))


def from_json(value: Any) -> Any:
    """Return the data with a Secret for each {"$secret": "NAME"}; ValueError for a bad name."""
    if isinstance(value, dict):
        if value.keys() == {JSON_KEY}:
            return Secret(value[JSON_KEY])
        return {name: from_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value
