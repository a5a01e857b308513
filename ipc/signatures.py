"""Read the signature of a handler: which arguments it takes, and what it returns.

The worker that runs a handler and the client that submits to it check arguments by the same
decoder, so a client refuses what its worker would refuse. The slow part (signature, annotations) is
done once for each handler; what is left per task is one msgspec decode.

May import: ipc.errors.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec

from musterd.ipc.errors import ConfigurationError

TASK_ATTRIBUTE = "__musterd_task__"  # of a function that @task has marked
CONTEXT_NAMES = ("ctx", "_ctx")
PLACE_CHARS_MAX = 500  # of "module:function"; what is longer is cut

# What decode() raises for arguments that do not fit: deep nesting is a RecursionError, a str that
# is not UTF-8 a UnicodeDecodeError.
INVALID_ARGUMENTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_PLACE_OF_FAULT = re.compile(r" - at `\$\.(\w+)")  # the argument that msgspec's message names


class SignatureError(ConfigurationError):
    """A handler cannot be used; the message says why and what to do."""


class Signature(msgspec.Struct, frozen=True):
    """Arguments of a handler."""

    method: str
    text: str  # "extract(url: str, select: dict[str, str])"
    names: tuple[str, ...]  # without self, ctx and **others
    required: tuple[str, ...]  # those without a default
    positional: tuple[str, ...]  # those that Python lets a caller give without a name
    open: bool  # any other name is an argument, too: **others
    decode: Callable[[bytes], dict[str, Any]]  # raises what INVALID_ARGUMENTS lists


def is_task(function: object) -> bool:
    """Tell whether @task has marked a function."""
    return hasattr(function, TASK_ATTRIBUTE)


def place_of(function: Callable[..., Any], module: str = "") -> str:
    """Return where a function is defined, "module:qualified.name", alike in all processes."""
    return f"{module or function.__module__}:{function.__qualname__}"[:PLACE_CHARS_MAX]


def is_method(function: Callable[..., Any]) -> bool:
    """Tell whether a handler has `self` before ctx: a method, and no function of a module."""
    first = next(iter(inspect.signature(function).parameters), "")
    return first not in CONTEXT_NAMES


def is_generator(function: object) -> bool:
    """Tell whether a call of the function would run none of it."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def misfit(signature: str, why: str) -> str:
    """Say that arguments do not fit a handler."""
    return f"the arguments do not fit {signature}: {why}"


def argument_at_fault(error: BaseException) -> str:
    """Return the argument whose value a decoder has refused; "" if no value is to blame."""
    found = _PLACE_OF_FAULT.search(str(error))
    return found[1] if found is not None else ""


def read_signature(method: str, function: Callable[..., Any], *, bound: bool) -> Signature:
    """Check the signature of a handler; `bound`: its first parameter is `self`.

    SignatureError if it cannot be a handler.
    """
    if is_generator(function):
        raise SignatureError(
            f"{described(method, function)}: it contains `yield`, so calling it would run none of "
            "it; return a list, or report progress with ctx.progress()"
        )
    parameters = list(inspect.signature(function).parameters.values())
    reserved = [parameter.name for parameter in parameters[: 2 if bound else 1]]
    if bound:
        parameters = parameters[1:]
    if not parameters or parameters[0].name not in CONTEXT_NAMES:
        raise SignatureError(
            f"{described(method, function)}: the first parameter{' after self' if bound else ''} "
            f"must be ctx; write def {method}({'self, ' if bound else ''}ctx, ...)"
        )
    arguments = parameters[1:]
    for parameter in arguments:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise SignatureError(
                f"{described(method, function)}: {parameter} is positional, but arguments are "
                "given by name; name each of them"
            )
    named = [each for each in arguments if each.kind is not each.VAR_KEYWORD]
    is_open = len(named) < len(arguments)
    return Signature(
        method=method,
        text=f"{method}({', '.join(str(each) for each in arguments)})",
        names=tuple(each.name for each in named),
        required=tuple(each.name for each in named if each.default is each.empty),
        positional=tuple(each.name for each in named if each.kind is not each.KEYWORD_ONLY),
        open=is_open,
        decode=_decoder(described(method, function), function, named, reserved, is_open=is_open),
    )


def described(method: str, function: Callable[..., Any]) -> str:
    """Return a handler as messages name it."""
    return f"task {method!r} ({function.__module__}.{function.__qualname__})"


def _decoder(
    where: str,
    function: Callable[..., Any],
    named: list[inspect.Parameter],
    reserved: list[str],
    *,
    is_open: bool,
) -> Callable[[bytes], dict[str, Any]]:
    """Return a decoder of keyword arguments; an open one takes any name that is not reserved."""
    hints = _hints(where, function, {each.name: each.annotation for each in named})
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in named:
        kind = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            # A factory, so that the handler gets the very object of its signature, as in Python.
            same = partial(_itself, parameter.default)
            fields.append((parameter.name, kind, msgspec.field(default_factory=same)))
    try:
        model = msgspec.defstruct(
            "Arguments", fields, kw_only=True, forbid_unknown_fields=not is_open
        )
        decode = msgspec.msgpack.Decoder(model).decode
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"{where}: its annotations cannot be checked against: {error}; "
            "use plain types, dataclasses, TypedDicts or msgspec Structs"
        ) from error
    asdict = msgspec.structs.asdict
    if not is_open:
        return lambda raw: asdict(decode(raw))

    decode_any = msgspec.msgpack.Decoder(dict[str, Any]).decode

    def decode_with_extra(raw: bytes) -> dict[str, Any]:
        arguments = decode_any(raw)
        for name in reserved:
            if name in arguments:
                raise msgspec.ValidationError(f"`{name}` is not an argument")
        return arguments | asdict(decode(raw))

    return decode_with_extra


def _itself(value: Any) -> Any:
    return value


def result_decoder(method: str, function: Callable[..., Any]) -> Callable[[bytes], Any] | None:
    """Return a decoder of what a handler returns, after its annotation; None if it has none.

    SignatureError if the annotation cannot be read, or is of no type that can be decoded.
    """
    annotation = inspect.signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return None
    where = described(method, function)
    kind = _hints(where, function, {"return": annotation})["return"]
    if kind is Any:
        return None
    try:
        return msgspec.msgpack.Decoder(kind).decode
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"{where}: its result cannot be decoded as {inspect.formatannotation(kind)}: {error}; "
            "annotate it with plain types, dataclasses, TypedDicts or msgspec Structs, or submit "
            "it by its name, for plain data"
        ) from error


def _hints(where: str, function: Callable[..., Any], annotations: dict[str, Any]) -> dict[str, Any]:
    """Return the types of these annotations only: others may name what only checkers import."""
    # After __wrapped__, as inspect.signature does: annotations are resolved where they stand.
    origin = inspect.unwrap(function)
    given = {
        name: each for name, each in annotations.items() if each is not inspect.Parameter.empty
    }
    try:
        return typing.get_type_hints(
            SimpleNamespace(__annotations__=given),
            globalns=origin.__globals__,
            include_extras=True,
        )
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise SignatureError(
            f"{where}: its annotations cannot be read: {error}; "
            "import what they name at run time, not under TYPE_CHECKING"
        ) from error


def by_name(
    signature: Signature, positional: Iterable[Any], named: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments by their names, as Python binds them; TypeError if it could not."""
    arguments = dict(named)
    given = list(positional)
    if len(given) > len(signature.positional):
        raise TypeError(
            f"it takes {len(signature.positional)} arguments without a name, not {len(given)}"
        )
    for name, value in zip(signature.positional, given, strict=False):
        if name in arguments:
            raise TypeError(f"it got two values for {name!r}")
        arguments[name] = value
    return arguments
