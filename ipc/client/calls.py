"""Typed calls: a handler with its arguments, checked before anything is sent.

    musterd.submit(Promos.check, shop="aurora", price=14.9)
    musterd.submit(call(Promos.check, shop="aurora", price=14.9), priority="high")

All keyword arguments beside a handler are its own, whatever they are called. Options of the submit
stand beside a call, as they stand beside a name and its arguments.

The daemon runs what its configuration names: a pool, and in it a class or a module. A function does
not know its pools, so a client asks the daemon for the tasks that a function is, once for each
function and connection (Names).
"""

import inspect
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    Unpack,
    overload,
)

from msgspec import Struct

from musterd.ipc.client.record import Make
from musterd.ipc.client.session import Session
from musterd.ipc.client.taskspec import (
    EncodedArgs,
    SpecOptions,
    encode_args,
    make_spec,
    packed,
    shown,
)
from musterd.ipc.errors import InvalidTask, NotConnected, UnknownTask
from musterd.ipc.secrets.reference import SECRET_MARK, without_secrets
from musterd.ipc.signatures import (
    INVALID_ARGUMENTS,
    Misfit,
    Signature,
    SignatureError,
    by_name,
    is_method,
    is_task,
    misfit,
    no_argument,
    place_of,
    read_signature,
    result_decoder,
)
from musterd.ipc.wire.messages import TaskSpec
from musterd.ipc.wire.resolving import Resolve, Resolved

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The type of `ctx` tells a function of a module from a method.
    from musterd.workers.authoring.base import Context

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

P = ParamSpec("P")
R = TypeVar("R")
Fallback = TypeVar("Fallback")

if TYPE_CHECKING:
    # Handlers without self and ctx; an async handler stands for what it is awaited for.
    AsyncHandler = (
        Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]
        | Callable[Concatenate[Any, Context, P], Coroutine[Any, Any, R]]
    )
    Handler = Callable[Concatenate[Context, P], R] | Callable[Concatenate[Any, Context, P], R]

HANDLERS_MAX = 1024  # whose signatures are kept: a program has few
FUNCTIONS_MAX = 1024  # whose tasks a client remembers
LOADING_SECONDS = 0.05  # between two questions, while pools load their workers

Decode = Callable[[bytes], Any]


class CallOptions(SpecOptions, total=False):
    """Options of a submit of a call, beside `fallback`."""

    pool: str  # which pool, where several run the handler; then no daemon is asked for it


_OPTIONS = {*CallOptions.__annotations__, "fallback", "wait", "on_done"}


class _Known(Struct, frozen=True):
    """What is known of a handler."""

    place: str
    signature: Signature
    returns: Decode | None  # None: the result stays as it comes


class Call(Generic[R_co]):
    """Handler with its arguments, as `call()` makes it."""

    __slots__ = ("_arguments", "_handler", "_options", "_pool")

    def __init__(
        self, handler: _Known, arguments: EncodedArgs, pool: str, options: dict[str, Any]
    ) -> None:
        self._handler = handler
        self._arguments = arguments
        self._pool = pool  # "": that is to be found out
        self._options = options

    @property
    def place(self) -> str:
        """Where the handler is defined: "module:Class.method"."""
        return self._handler.place

    def __repr__(self) -> str:
        given = [f"{name}={shown(value)}" for name, value in self._arguments.items()]
        given += [f"{name}={shown(value)}" for name, value in self._options.items()]
        return f"<Call {self._handler.place} {' '.join(given)}".rstrip() + ">"

    @overload
    def options(
        self,
        *,
        fallback: Fallback,
        wait: bool = False,
        on_done: Callable[[Any], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> "Call[R_co | Fallback]": ...
    @overload
    def options(
        self,
        *,
        wait: bool = False,
        on_done: Callable[[Any], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> "Call[R_co]": ...
    def options(self, **options: Any) -> "Call[Any]":
        """Return the call with options of its submit, for `submit_many()` and `map()`.

        They are those of `submit()`, and `pool`.
        """
        pool = _checked_pool(options.pop("pool", self._pool))
        return Call(self._handler, self._arguments, pool, {**self._options, **options})


@overload
def call(handler: "AsyncHandler[P, R]", /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
@overload
def call(handler: "Handler[P, R]", /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
def call(handler: Any, /, *args: Any, **kwargs: Any) -> Call[Any]:
    """Return a call of a handler: `call(Promos.check, shop="aurora", price=14.9)`.

    InvalidTask if the handler does not take these arguments. A method of a worker's instance, as in
    a handler `call(self.check, ...)`, is run by the pool of that worker.
    """
    return make_call(handler, args, kwargs)


def make_call(handler: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Call[Any]:
    """Return a checked call; InvalidTask says what is wrong."""
    pool = ""
    if isinstance(handler, MethodType):
        pool = getattr(handler.__self__, "pool", "")
        handler = handler.__func__
    if not inspect.isfunction(handler) or not is_task(handler):
        raise InvalidTask(
            f"{shown(handler)} is no task: put @task on it, or give the name of a task, "
            '"POOL.METHOD"'
        )
    known = _known(handler)
    signature = known.signature
    try:
        given = by_name(signature, args, dict(kwargs))
    except TypeError as error:
        raise InvalidTask(f"{known.place}: {misfit(signature.text, str(error))}") from error
    data = encode_args(known.place, given)
    _check(known, given, data)
    return Call(known, EncodedArgs(given, data), pool if isinstance(pool, str) else "", {})


@lru_cache(HANDLERS_MAX)
def _known(function: Callable[..., Any]) -> _Known:
    name = function.__name__
    try:
        signature = read_signature(name, function, bound=is_method(function))
        returns = result_decoder(name, function)
    except SignatureError as error:
        raise InvalidTask(str(error)) from error
    return _Known(called_place(function), signature, returns)


def called_place(function: Callable[..., Any]) -> str:
    """Return where a handler is defined, as the daemon knows it: Call.place."""
    return place_of(function, _module_of(function))


def _module_of(function: Callable[..., Any]) -> str:
    """Return the module of a function as the daemon knows it, also in the program's main file."""
    if function.__module__ != "__main__":
        return function.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)  # of `python -m`
    if spec is not None:
        return str(spec.name)
    return Path(getattr(main, "__file__", None) or "__main__").stem


def _check(known: _Known, given: dict[str, Any], data: bytes) -> None:
    """Raise InvalidTask where the worker would; what it would find in a secret is left to it."""
    signature = known.signature
    why = _misnamed(known, given)
    try:
        if not why:
            signature.decode(without_secrets(data) if SECRET_MARK in data else data)
            return
    except INVALID_ARGUMENTS as error:
        secret = SECRET_MARK in data and _holds_secret(given.get(_at_fault(error)))
        why = _fault_beside_secrets(signature, given) if secret else str(error)
        if not why:
            return
    raise InvalidTask(f"{known.place}: {misfit(signature.text, why)}")


def _at_fault(error: BaseException) -> str:
    """Return the argument whose value was refused; "" if no value is to blame."""
    return error.argument if isinstance(error, Misfit) else ""


def _misnamed(known: _Known, given: dict[str, Any]) -> str:
    """Say which argument is missing, or is none of the handler's; the latter may be an option."""
    signature = known.signature
    for name in given:
        if name not in signature.names and not signature.open:
            why = no_argument(name, signature.names)
            if name in _OPTIONS:
                _, _, function = known.place.partition(":")
                why += f"; options stand beside a call: submit(call({function}, ...), {name}=...)"
            return why
    for name in signature.required:
        if name not in given:
            return f"the argument {name!r} is missing"
    return ""


def _fault_beside_secrets(signature: Signature, given: dict[str, Any]) -> str:
    """Say what is wrong with the arguments that hold no secret."""
    plain = {name: value for name, value in given.items() if not _holds_secret(value)}
    try:
        signature.decode(packed("the arguments", "args", plain))
    except INVALID_ARGUMENTS as error:
        return str(error) if _at_fault(error) else ""  # else one of the others is missing
    return ""


def _holds_secret(value: Any) -> bool:
    return SECRET_MARK in packed("an argument", "args", value)


def _checked_pool(pool: object) -> str:
    if not isinstance(pool, str):
        raise InvalidTask(f"pool must be the name of a pool, not {shown(pool)}")
    return pool


def asking_for(call: Call[Any]) -> Make:
    """Return what makes the question for the tasks of a call's function."""
    place = call.place

    def make(number: int, _: bool) -> Resolve:
        return Resolve(number, place)

    return make


class Made(NamedTuple):
    """What a submit makes of a call."""

    spec: TaskSpec
    wait: bool
    on_done: Any
    returns: Decode | None


def made(call: Call[Any], name: str, options: Mapping[str, Any]) -> Made:
    """Make the task of a call; options of the submit count before those of the call."""
    merged = {**call._options, **options}
    merged.pop("pool", None)
    wait, on_done = bool(merged.pop("wait", False)), merged.pop("on_done", None)
    spec = make_spec(name, call._arguments, **merged)
    return Made(spec, wait, on_done, call._handler.returns)


class Names:
    """Tasks of functions, as the daemon has told.

    They are asked for again over another connection, whose daemon may have other pools, and when a
    task was refused because it is unknown: pools may have been renamed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stand: tuple[str, int] = ("", 0)
        self._names: dict[str, str] = {}

    def find(self, call: Call[Any], pool: object) -> str:
        """Return the name of a call's task; "" if the daemon has to be asked."""
        if pool is not None and _checked_pool(pool):
            return f"{pool}.{call._handler.signature.method}"
        if call._pool:
            return f"{call._pool}.{call._handler.signature.method}"
        self._catch_up()
        return self._names.get(call.place, "")

    def _catch_up(self) -> None:
        stand = (self._session.epoch, self._session.unknown_tasks)
        if stand != self._stand:
            self._stand, self._names = stand, {}

    def unknown(self, call: Call[Any], seconds: float) -> NotConnected:
        """Return the error for a daemon that does not answer."""
        return NotConnected(
            f"which pool runs {call.place} is not known: the daemon did not answer within "
            f"{seconds:g} s; with a pool, as in submit(call(...), pool=...), nothing is asked"
        )

    def learn(self, call: Call[Any], told: Resolved) -> str:
        """Return the name of the only task that the function is; raise if there is no such one."""
        place = call.place
        if len(told.tasks) == 1:
            self._catch_up()
            if len(self._names) >= FUNCTIONS_MAX:
                self._names.clear()
            self._names[place] = told.tasks[0]
            return told.tasks[0]
        if not told.tasks:
            raise _nobody_runs(place, told)
        pools = sorted({name.partition(".")[0] for name in told.tasks})
        if len(pools) < len(told.tasks):
            raise InvalidTask(
                f"{place} is several tasks ({', '.join(told.tasks)}): give the name of one"
            )
        raise InvalidTask(
            f"{place} is a task of several pools ({', '.join(pools)}): say which one, as in "
            f"submit(call({place.partition(':')[2]}, ...), pool={pools[0]!r})"
        )


def _nobody_runs(place: str, told: Resolved) -> Exception:
    if told.error:
        return NotConnected(f"which pool runs {place} is not known: {told.error}")
    module, _, function = place.partition(":")
    owner = function.rpartition(".")[0]
    worker = f"{module}:{owner}" if owner else module
    about = [f"pools: {', '.join(told.pools) or 'none'}"]
    if told.failed:
        about.append(f"{', '.join(told.failed)} cannot load its worker, see musterctl status")
    if told.loading:
        about.append(f"{', '.join(told.loading)} has not loaded its worker yet")
    return UnknownTask(
        f"no pool runs {place} ({'; '.join(about)}): give one the worker {worker!r}, and "
        "musterctl reload; or submit the task by its name"
    )
