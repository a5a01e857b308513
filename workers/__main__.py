"""`python -m musterd.workers --given QUESTION`: check whether a worker can load something.

    MODULE[:CLASS]                 a worker, with its options, and whether its tasks can do what
    concurrency=4=MODULE[:CLASS]   schedules ask of them; with a number, whether it can run so many
                                   tasks at once
    backoff=MODULE:FUNCTION        a strategy of retries
    exception=MODULE:ERROR         an exception that a breaker is to count
    function=MODULE:FUNCTION       the login of a session

Standard input has the details (Given). Exit code 0: yes. Else the last line on standard output is a
JSON object: what is wrong, by subject; "" is the worker or function itself.

`musterd check-config` runs this in a process of its own, because importing is running code.

May import: ipc.errors, ipc.secrets, ipc.signatures, ipc.user_code, workers.authoring,
workers.runtime.
"""

import importlib
import sys
from typing import Any

import msgspec
from msgspec import Struct

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.secrets.reference import without_secrets
from musterd.ipc.signatures import INVALID_ARGUMENTS
from musterd.ipc.user_code import make_importable
from musterd.workers.authoring.outcome import invalid, last_words, unknown
from musterd.workers.runtime.handlers import Loaded
from musterd.workers.runtime.retrying import load_backoff
from musterd.workers.runtime.run import check_concurrency, load

BACKOFF = "backoff="
CONCURRENCY = "concurrency="
EXCEPTION = "exception="
FUNCTION = "function="
GIVEN = "--given"
USAGE = 2


class Given(Struct, frozen=True):
    options: dict[str, Any] = {}
    schedules: list[tuple[str, str, bytes]] = []  # name, method, arguments


def main(words: list[str]) -> int:
    if len(words) != 2 or words[0] != GIVEN:
        print(__doc__, file=sys.stderr)
        return USAGE
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Given)
    make_importable()
    problems: dict[str, str] = {}
    try:
        problems = _answer(words[1], given)
    except ConfigurationError as error:  # one of ours, which says what to do
        problems[""] = str(error)
    except BaseException as error:  # noqa: BLE001 - whatever the import does is the answer
        problems[""] = last_words(error)
    if problems:
        print(msgspec.json.encode(problems).decode(), flush=True)
    return 1 if problems else 0


def _answer(question: str, given: Given) -> dict[str, str]:
    if question.startswith(BACKOFF):
        load_backoff(question.removeprefix(BACKOFF))
        return {}
    if question.startswith(EXCEPTION):
        _load_exception(question.removeprefix(EXCEPTION))
        return {}
    if question.startswith(FUNCTION):
        _load_function(question.removeprefix(FUNCTION))
        return {}
    number, _, worker = question.removeprefix(CONCURRENCY).rpartition("=")
    loaded = load(worker)
    problems: dict[str, str] = {}
    try:
        check_concurrency(loaded, int(number or 1))
        if loaded.factory is not None:
            loaded.factory.check_options(given.options)
    except ConfigurationError as error:
        problems[""] = str(error)
    for schedule, method, args in given.schedules:
        problems |= _of_schedule(loaded, schedule, method, args)
    return problems


def _of_schedule(loaded: Loaded, schedule: str, method: str, args: bytes) -> dict[str, str]:
    handlers = {handler.method: handler for handler in loaded.handlers}
    handler = handlers.get(method)
    if handler is None:
        return {f"{schedule}.task": unknown(method, list(handlers)).message}
    try:
        handler.decode(without_secrets(args))
    except INVALID_ARGUMENTS as error:
        return {f"{schedule}.args": invalid(handler.signature, error).message}
    return {}


def _load_exception(name: str) -> None:
    module_name, _, path = name.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise ConfigurationError(f"module {module_name} has no exception {path!r}: correct it")


def _load_function(name: str) -> None:
    module_name, _, function = name.partition(":")
    found = getattr(importlib.import_module(module_name), function, None)
    if not callable(found):
        raise ConfigurationError(f"module {module_name} has no function {function!r}: correct it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
