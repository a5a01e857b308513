"""Secrets do not come in as literals: `redact` names the arguments that may only hold a Secret.

The second look that the supervisor takes into arguments (the first is for the target): nothing is
built from them, nothing is changed. A search for the encoded name decides whether to look at all,
so tasks that have no such argument cost next to nothing.
"""

from typing import Any

import msgspec
from msgspec.msgpack import Ext

from musterd.ipc.errors import InvalidTask
from musterd.ipc.messages import INVALID_TASK, Rejection, TaskSpec
from musterd.ipc.secret import from_json, secret_name
from musterd.ipc.taskspec import encode_args
from musterd.supervisor.core import events

DEPTH_MAX = 64  # deeper arguments are refused if such a name is in them: nobody writes that


def problem_of(task: str, args: dict[str, Any], names: tuple[str, ...]) -> str:
    """What is wrong with arguments that somebody wrote into a file; "" for nothing."""
    try:
        data = encode_args(task, from_json(args))
    except (InvalidTask, ValueError) as error:
        return f"cannot be the arguments of a task: {error}"
    path = Redaction(names).literal_in(data)
    if not path:
        return ""
    return (
        f"has a value at {path}, which is named in supervisor.redact: "
        'write {"$secret" = "NAME"} there, and give the secret to the workers'
    )


class Redaction:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = frozenset(names)
        self._marks = [msgspec.msgpack.encode(name) for name in names]

    def refuse(self, event: events.TasksSubmitted) -> events.TasksSubmitted:
        """The same event; tasks with a literal where a secret belongs are among the rejected."""
        refused: dict[str, Rejection] = {}
        everything = b"".join([spec.args for spec in event.tasks])  # one search, not a thousand
        for mark in self._marks:
            if mark not in everything:
                continue
            for spec in [spec for spec in event.tasks if mark in spec.args]:
                found = self.literal_in(spec.args)
                if found:
                    refused[spec.id] = _rejection(spec, found)
        if not refused:
            return event
        return msgspec.structs.replace(
            event,
            tasks=[spec for spec in event.tasks if spec.id not in refused],
            rejected=[*event.rejected, *refused.values()],
        )

    def literal_in(self, args: bytes) -> str:
        """Where a value stands that should be a Secret; "" if there is none."""
        try:
            return self._search(msgspec.msgpack.decode(args), "", DEPTH_MAX)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
            return "(unreadable)"

    def _search(self, value: Any, path: str, depth: int) -> str:
        if isinstance(value, dict):
            parts = [(f"{path}.{key}" if path else str(key), key, value[key]) for key in value]
        elif isinstance(value, list):
            parts = [(f"{path}[{index}]", None, part) for index, part in enumerate(value)]
        else:
            return ""
        if not depth:
            return path
        for where, key, part in parts:
            found = where if key in self._names and _is_literal(part) else ""
            found = found or self._search(part, where, depth - 1)
            if found:
                return found
        return ""


def _is_literal(value: Any) -> bool:
    """Whether something is there that is not a Secret; nothing is no secret either."""
    if isinstance(value, Ext):
        return secret_name(value) is None
    return value is not None and value != ""


def _rejection(spec: TaskSpec, path: str) -> Rejection:
    return Rejection(
        spec.id,
        INVALID_TASK,
        f"argument '{path[:200]}' of '{spec.name}' is named in redact and must not hold a value: "
        'pass Secret("NAME"), which the worker looks up',
    )
