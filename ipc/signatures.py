"""Read the signature of a handler: which arguments it takes, and what it returns.

The worker that runs a handler and the client that submits to it check arguments by the same
decoder, so a client refuses what its worker would refuse. The slow part (signature, annotations) is
done once for each handler; what is left per task is one msgspec decode.

May import: ipc.errors.
"""

import difflib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Sequence
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

ARGUMENTS_CHARS_MAX = 60  # of a signature in a message; a longer one has its required names

# msgspec's messages, such as "Expected `object`, got `int` - at `$.offers[0]`".
_FAULT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<place>.*)`)?", re.DOTALL)
_WRONG_KIND = re.compile(r"Expected `(?P<wanted>[^`]*)`(?P<more>[^`]*?)(?:, got `?(?P<got>\w+)`?)?")
_WRONG_FIELD = re.compile(r"Object (?P<how>contains unknown|missing required) field `(?P<name>.*)`")
_ARGUMENTS = "the arguments"
_KINDS = {"object": "dict", "array": "list", "null": "None"}  # else as in Python


class SignatureError(ConfigurationError):
    """A handler cannot be used; the message says why and what to do."""


class Misfit(msgspec.ValidationError):
    """A value is not what a handler is annotated with; the message says where and why."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument  # whose value is to blame; "" if it is missing or there is none


class Signature(msgspec.Struct, frozen=True):
    """Arguments of a handler."""

    method: str
    text: str  # "extract(url, select, parser=...)"
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


def misfit_of(error: msgspec.ValidationError, whole: str, names: Sequence[str] = ()) -> Misfit:
    """Return msgspec's error in words of Python; `names` are those of the arguments."""
    found = _FAULT.fullmatch(str(error))
    assert found is not None, "it fits any text"
    what, place = found["what"], found["place"] or ""
    argument = re.split(r"[.\[]", place, maxsplit=1)[0]
    if wrong := _WRONG_FIELD.fullmatch(what):
        name, unknown = wrong["name"], wrong["how"] == "contains unknown"
        if place or whole != _ARGUMENTS:
            why = f"there is no field {name!r}" if unknown else f"the field {name!r} is missing"
            why = f"{place or whole}: {why}"
        else:
            why = no_argument(name, names) if unknown else f"the argument {name!r} is missing"
        return Misfit(why, argument)
    where = place or whole
    if found["key"]:
        where = f"a key of {where}"
    if wrong := _WRONG_KIND.fullmatch(what):
        why = f"{where} must be {_kinds(wrong['wanted'])}{wrong['more']}"
        why += f", not {_kinds(wrong['got'])}" if wrong["got"] else ""
        return Misfit(why, argument)
    return Misfit(f"{where}: {what}", argument)


def no_argument(name: str, names: Sequence[str]) -> str:
    """Say that a handler has no argument of this name, and which may be meant."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"there is no argument {name!r}" + (f": did you mean {near[0]!r}?" if near else "")


def _kinds(words: str) -> str:
    return " | ".join(_KINDS.get(word, word) for word in words.split(" | "))


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
        text=_text(method, arguments),
        names=tuple(each.name for each in named),
        required=tuple(each.name for each in named if each.default is each.empty),
        positional=tuple(each.name for each in named if each.kind is not each.KEYWORD_ONLY),
        open=is_open,
        decode=_decoder(described(method, function), function, named, reserved, is_open=is_open),
    )


def _text(method: str, arguments: Sequence[inspect.Parameter]) -> str:
    """Return a handler with its arguments as messages show them: optional ones as `name=...`."""
    required, shown = [], []
    for each in arguments:
        if each.kind is each.VAR_KEYWORD:
            shown.append(f"**{each.name}")
        elif each.default is each.empty:
            required.append(each.name)
            shown.append(each.name)
        else:
            shown.append(f"{each.name}=...")
    whole = ", ".join(shown)
    if len(whole) > ARGUMENTS_CHARS_MAX:
        whole = ", ".join([*required, "..."])
    return f"{method}({whole})"


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
    names = [each.name for each in named]

    def decode_named(raw: bytes) -> dict[str, Any]:
        try:
            return asdict(decode(raw))
        except msgspec.ValidationError as error:
            raise misfit_of(error, _ARGUMENTS, names) from None

    if not is_open:
        return decode_named

    decode_any = msgspec.msgpack.Decoder(dict[str, Any]).decode

    def decode_with_extra(raw: bytes) -> dict[str, Any]:
        try:
            arguments = decode_any(raw)
        except msgspec.ValidationError as error:
            raise misfit_of(error, _ARGUMENTS) from None
        for name in reserved:
            if name in arguments:
                raise Misfit(no_argument(name, names))
        return arguments | decode_named(raw)

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
        decode = msgspec.msgpack.Decoder(kind).decode
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"{where}: its result cannot be decoded as {inspect.formatannotation(kind)}: {error}; "
            "annotate it with plain types, dataclasses, TypedDicts or msgspec Structs, or submit "
            "it by its name, for plain data"
        ) from error

    def decode_result(raw: bytes) -> Any:
        try:
            return decode(raw)
        except msgspec.ValidationError as error:
            raise misfit_of(error, "the result") from None

    return decode_result


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
