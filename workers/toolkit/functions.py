"""What the toolkit's decorators share: how they wrap a function, and what they ask of a call.

A decorator is written once, as a coroutine around the call. For an async function it is awaited. A
sync function's coroutine awaits nothing, so that it ends with its first step, in the caller's
thread; an exception that strikes there (a task's timeout) strikes as in any function.
"""

import functools
import inspect
import math
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

from musterd.ipc.signatures import CONTEXT_NAMES
from musterd.workers.authoring.base import Context, TaskTimeout

CAUSES_MAX = 16  # of an error; a chain can be made a ring by hand

P = ParamSpec("P")
R = TypeVar("R")

# Makes one call, given its arguments.
Around = Callable[[tuple[Any, ...], dict[str, Any]], Coroutine[Any, Any, Any]]


def is_async(what: str, function: object) -> bool:
    """Tell whether it is a coroutine function; TypeError if @what cannot wrap it at all."""
    if isinstance(function, staticmethod | classmethod):
        raise TypeError(f"@{what} belongs below @{type(function).__name__}, not above it")
    if not callable(function):
        raise TypeError(
            f"@{what} wraps functions, not {function!r}; write @{what}(...) with its arguments "
            "above the function"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"@{what} cannot wrap the generator {name_of(function)}: it would end before the first "
            "item is made; wrap what makes a single item"
        )
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - not whether, but what it is
    )


def wrapped(function: Callable[P, R], around: Around, *, awaits: bool) -> Callable[P, R]:
    """Return the function with `around` in its place, which calls it; `awaits`: it is async."""

    @functools.wraps(function)
    async def called_async(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await around(args, kwargs)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            around(args, kwargs).send(None)
        except StopIteration as end:
            return cast(R, end.value)
        except RuntimeError as error:
            if error.args == _STOPPED and isinstance(error.__cause__, StopIteration):
                raise error.__cause__ from None  # of the function: no coroutine lets it pass
            raise
        raise AssertionError("a coroutine around a sync function has waited")

    return cast(Callable[P, R], called_async) if awaits else called


_STOPPED = ("coroutine raised StopIteration",)


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def context_finder(
    function: Callable[..., Any],
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any | None]:
    """Return a function that finds a call's ctx: a Context among the arguments, else by name."""
    names = list(_parameters(function))
    position = next((names.index(each) for each in CONTEXT_NAMES if each in names), None)

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, Context):
                return each
        for name in CONTEXT_NAMES:
            if name in kwargs:
                return kwargs[name]
        return args[position] if position is not None and position < len(args) else None

    return find


def deadline_of(ctx: Any | None) -> float:
    """Return the deadline in seconds of time.monotonic(); math.inf without one."""
    deadline = getattr(ctx, "deadline", None)
    return float(deadline) if isinstance(deadline, int | float) else math.inf


def namer(
    what: str, name: str | Callable[..., str], function: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """Return a function that names a call: a constant, or `name` called with its arguments."""
    if isinstance(name, str):
        constant = name
        return lambda args, kwargs: constant
    if not callable(name):
        raise TypeError(f"{what}: give a str or a function that makes one, not {name!r}")
    ask = asker(what, name, function)
    return lambda args, kwargs: _checked(what, ask(args, kwargs))


def asker(
    what: str, compute: Callable[..., Any], function: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a function that calls `compute` with the arguments it asks for by name."""
    wanted = _parameters(compute)
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in wanted.values()):
        return lambda args, kwargs: compute(*args, **kwargs)
    signature = inspect.signature(function)
    unknown = [each for each in wanted if each not in signature.parameters]
    if unknown:
        raise TypeError(
            f"{what}: its function asks for {', '.join(unknown)}, but {name_of(function)} "
            f"has {', '.join(signature.parameters) or 'no arguments'}"
        )

    def ask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute(*(bound.arguments[each] for each in wanted))

    return ask


def _checked(what: str, name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{what}: its function returned {name!r}, which is not a str")
    return name


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return {}


# -- errors -------------------------------------------------------------------------------------


def retry_after_of(error: BaseException) -> float:
    """Return the seconds that an error asks to wait, 0 if none."""
    try:
        seconds = getattr(error, "retry_after", 0)
    except Exception:  # noqa: BLE001 - a property of somebody's exception
        return 0.0
    usable = isinstance(seconds, int | float) and 0 < seconds < math.inf
    return float(seconds) if usable else 0.0


def is_task_timeout(error: BaseException) -> bool:
    """Tell whether the task's own time is over, even if a library wrapped that error."""
    each: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if each is None:
            return False
        if isinstance(each, TaskTimeout):
            return True
        each = each.__cause__ or each.__context__
    return False


def seconds(what: str, value: float | timedelta, *, zero: bool = False) -> float:
    """Return the value if it is a sensible number of seconds."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if callable(value):
        name = what.partition(":")[0]
        raise TypeError(f"write @{name}(...) with its arguments above {name_of(value)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what}={value!r}: give seconds as a number, or a timedelta")
    if not 0 <= value < math.inf or (value == 0 and not zero):
        raise ValueError(
            f"{what}={value!r}: give seconds, {'0 or more' if zero else 'more than 0'}"
        )
    return float(value)


def count(what: str, value: int, *, least: int) -> int:
    """Return the value if it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what}={value!r}: give a whole number")
    if value < least:
        raise ValueError(f"{what}={value!r}: give {least} or more")
    return value
