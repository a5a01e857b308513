"""What musterctl prints with --json is what docs/musterctl.schema.json says, in every test."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from musterd.supervisor.ctl import json_schema

FILE = Path(__file__).parents[2] / "docs" / "musterctl.schema.json"
LINES = frozenset(json_schema.LINES)
_USUAL_ACTION = {"breaker": "list", "schedule": "list", "sessions": "list", "alerts": "list"}
_IN_BULK = {"--pool", "--target", "--state", "--error", "--key", "--schedule", "--since", "--all"}
_USUAL_ACTION["clock"] = "show"


@cache
def schema() -> dict[str, Any]:
    """Return the schema, which here allows no key that it does not have."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    for component in found["$defs"].values():
        component["additionalProperties"] = False
    return found


@cache
def _validator(command: str) -> Draft202012Validator:
    return Draft202012Validator({**schema()["properties"][command], "$defs": schema()["$defs"]})


def check(words: tuple[str, ...], printed: str) -> str:
    """Check what a command printed; return the command as the schema has it.

    Nothing is printed where the command line is wrong, or an answer has no lines.
    """
    if "debug" in words:  # it talks to people
        return "debug"
    command = command_of(words)
    if not printed.strip():
        return command
    answers = [json.loads(printed)] if command not in LINES else _lines(printed)
    for answer in answers:
        kind = "error" if isinstance(answer, dict) and set(answer) == {"error"} else command
        wrong = [
            f"{each.json_path}: {each.message}" for each in _validator(kind).iter_errors(answer)
        ]
        assert not wrong, (words, kind, wrong)
    return command


def _lines(printed: str) -> list[Any]:
    """Return one answer for each line, or the error that is printed in their place."""
    try:
        return [json.loads(line) for line in printed.splitlines()]
    except json.JSONDecodeError:
        return [json.loads(printed)]


def command_of(words: tuple[str, ...]) -> str:
    """Return the command that is typed, with its action, among options and names."""
    plain = [word for word in words if not word.startswith("-")]
    commands = schema()["properties"]
    firsts = {command.split()[0] for command in commands}
    at = next(at for at, word in enumerate(plain) if word in firsts)
    first, rest = plain[at], [*plain[at + 1 :], ""]
    if first == "tail" and {"-f", "--follow"} & set(words):
        return "tail --follow"
    if first == "status" and {"-w", "--watch"} & set(words):
        return "status --watch"
    options = {word.partition("=")[0] for word in words} & _IN_BULK
    if f"{first} --target" in commands and options - ({"--all"} if first == "purge" else set()):
        return f"{first} --target"
    if first in commands:
        return first
    action = rest[0] if f"{first} {rest[0]}" in commands else _USUAL_ACTION[first]
    return f"{first} {action}"
