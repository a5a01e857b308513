"""Refuse secrets as literals: arguments named in `redact` may only hold a Secret.

The supervisor reads arguments twice: for the target, and here, together with the value of a
`fallback`. It decodes them without building objects and changes nothing. Names are compared by word
(ipc/secrets/names.py). A search for the last word of each name decides whether to decode at all:
tasks without such an argument cost next to nothing.
"""

import re
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from musterd.ipc.client.taskspec import encode_args
from musterd.ipc.errors import InvalidTask
from musterd.ipc.secrets.names import is_sensitive, last_word, words_of
from musterd.ipc.secrets.reference import JSON_KEY, from_json, secret_name
from musterd.ipc.wire.messages import INVALID_TASK, Rejection, TaskSpec
from musterd.supervisor.core.model import events
from musterd.supervisor.text.printable import printable

PATH_CHARS_MAX = 200
DEPTH_MAX = 64  # deeper arguments that contain such a name are refused: nobody writes them


def problem_of(task: str, args: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return what is wrong with arguments given in a file; "" for nothing."""
    try:
        data = encode_args(task, from_json(args))
    except (InvalidTask, ValueError) as error:
        return f"are not valid arguments of a task: {error}"
    path = _redaction(names).literal_in(data)
    if not path:
        return ""
    return (
        f"has a value at {path}, which is named in supervisor.redact: "
        'write {"$secret" = "NAME"} there, and give the secret to the workers'
    )


def refuse(event: events.TasksSubmitted, found: dict[str, str]) -> events.TasksSubmitted:
    """Return the event with these tasks among the rejected; `found` says why, by their ids."""
    if not found:
        return event
    return msgspec.structs.replace(
        event,
        tasks=[spec for spec in event.tasks if spec.id not in found],
        rejected=[
            *event.rejected,
            *[Rejection(id_, INVALID_TASK, why) for id_, why in found.items()],
        ],
    )


class Redaction:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = frozenset(names)
        words = {last_word(name) for name in names}
        # A word that contains another one is found with it.
        self._marks = [
            word.encode()
            for word in sorted(words)
            if not any(other in word for other in words - {word})
        ]
        self._blind = not all(word.isascii() for word in words)  # lower() knows ASCII only
        ways = ("[^a-z0-9]{0,8}".join(map(re.escape, words_of(name))) for name in names)
        self._written = re.compile("|".join(way for way in ways if way).encode())

    def refuse(self, event: events.TasksSubmitted) -> events.TasksSubmitted:
        """Return the event with tasks that hold a literal secret among the rejected."""
        return refuse(event, self.problems(event.tasks))

    def problems(self, specs: list[TaskSpec]) -> dict[str, str]:
        """Return what is wrong with the tasks that hold a literal secret, by their ids."""
        if not self._names or not self._may_be_named(specs):
            return {}
        places = {spec.id: (spec, self._found(spec)) for spec in specs}
        return {id_: _problem(spec, where) for id_, (spec, where) in places.items() if where}

    def _may_be_named(self, specs: list[TaskSpec]) -> bool:
        """Search all tasks at once, not one by one."""
        everything = b"".join(
            [each.args if each.fallback is None else each.args + each.fallback for each in specs]
        ).lower()
        for mark in self._marks:
            if mark in everything:
                return True
        return self._blind

    def _found(self, spec: TaskSpec) -> str:
        """Name the argument, or the part of the fallback, with a literal secret; "" for none."""
        if self._may_hold(spec.args) and (path := self.literal_in(spec.args)):
            return f"argument '{path[:PATH_CHARS_MAX]}'"
        brought = spec.fallback
        if brought is not None and self._may_hold(brought) and (path := self.literal_in(brought)):
            return f"'{path[:PATH_CHARS_MAX]}' in the fallback"
        return ""

    def _may_hold(self, data: bytes) -> bool:
        return self._blind or self._written.search(data.lower()) is not None

    def literal_in(self, args: bytes) -> str:
        """Return the path of a value that should be a Secret; "" if there is none."""
        try:
            return self._search(msgspec.msgpack.decode(args), "", DEPTH_MAX)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
            return "(unreadable)"

    def _search(self, value: Any, path: str, depth: int) -> str:
        if isinstance(value, dict):
            parts = [
                (f"{path}.{_text(key)}" if path else _text(key), key, part)
                for key, part in value.items()
            ]
        elif isinstance(value, list):
            parts = [(f"{path}[{index}]", None, part) for index, part in enumerate(value)]
        else:
            return ""
        if not depth:
            return path
        for where, key, part in parts:
            named = key not in (None, JSON_KEY) and is_sensitive(_text(key), self._names)
            found = where if named and _is_literal(part) else ""
            found = found or self._search(part, where, depth - 1)
            if found:
                return found
        return ""


@lru_cache(maxsize=4)
def _redaction(names: tuple[str, ...]) -> Redaction:
    """Return the Redaction of these names: a file may have thousands of schedules."""
    return Redaction(names)


def _is_literal(value: Any) -> bool:
    """Return whether a value is neither empty nor a Secret."""
    if isinstance(value, Ext):
        return secret_name(value) is None
    return value is not None and value != ""


def _text(key: Any) -> str:
    """Return a key as text; msgpack keys may be bytes."""
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)


def _problem(spec: TaskSpec, where: str) -> str:
    return (
        f"{printable(where)} of '{spec.name}' is named in redact and must not hold a value: "
        'pass Secret("NAME"), which the worker looks up'
    )
