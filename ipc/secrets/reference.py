"""Secret("NAME"): a secret in a task's arguments, by its name only.

On wires and on disk it is a msgpack extension that no plain data can be mistaken for, whatever a
program passes on from strangers. Where people write JSON or TOML it is {"$secret": "NAME"}. Its
value is looked up in the worker, right before the handler runs.
"""

import re
from typing import Any

from msgspec.msgpack import Ext

SECRET_CODE = 83  # of the msgpack extension
SECRET_MARK = b"$secret:"  # begins its data: found by a search, without decoding
JSON_KEY = "$secret"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")  # of a variable or of a file, never a path


class Secret:
    """A reference to a secret that the worker knows."""

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
    """The hook of an encoder: a Secret as it travels; TypeError for anything else."""
    if isinstance(value, Secret):
        return Ext(SECRET_CODE, SECRET_MARK + value.name.encode())
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def secret_name(extension: Ext) -> str | None:
    """The name in an extension that is a secret; None for any other extension."""
    data = bytes(extension.data)
    if extension.code != SECRET_CODE or not data.startswith(SECRET_MARK):
        return None
    return data[len(SECRET_MARK) :].decode("utf-8", "replace")


def from_json(value: Any) -> Any:
    """The same data, with a Secret where {"$secret": "NAME"} was written; ValueError as Secret."""
    if isinstance(value, dict):
        if value.keys() == {JSON_KEY}:
            return Secret(value[JSON_KEY])
        return {name: from_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value
