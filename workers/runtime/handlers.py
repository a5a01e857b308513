"""Tasks of a worker: find them, check their signatures, decode their arguments.

The slow part of a handler (its signature, its annotations) is examined once, at load; what is left
per task is one msgspec decode.
"""

import importlib
import inspect
import traceback
import typing
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.messages import TaskDeclaration
from musterd.workers.authoring.base import TaskOptions, Worker, definition_lines, task_options
from musterd.workers.authoring.outcome import last_words

CONTEXT_NAMES = ("ctx", "_ctx")
LIFE_CYCLE = ("open", "healthy", "close")
# What a Worker has of its own: a task of such a name would take its place.
RESERVED = (
    *LIFE_CYCLE,
    *("on_close", "encode_state", "decode_state", "check_options", "options", "pool", "index"),
)


class WorkerLoadError(ConfigurationError):
    """The pool's `worker` cannot be used; the message says why and what to do."""


class Handler(msgspec.Struct, frozen=True):
    """One task of a worker."""

    method: str
    function: Callable[..., Any]  # as defined: unbound where it is a method
    options: TaskOptions
    is_async: bool
    decode: Callable[[bytes], dict[str, Any]]  # raises what INVALID_ARGUMENTS lists
    signature: str  # "extract(url: str, select: dict[str, str])"

    @property
    def declaration(self) -> TaskDeclaration:
        options = self.options
        return TaskDeclaration(
            self.method,
            options.timeout_ns,
            options.max_retries,
            options.target,
            options.fallback_on,
            options.cache_ns,
            options.debounce_ns,
        )


# What decode() raises for arguments that do not fit: deep nesting is a RecursionError, a str that
# is not UTF-8 a UnicodeDecodeError.
INVALID_ARGUMENTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Loaded(msgspec.Struct, frozen=True):
    """Worker class, or module of functions, ready to run in any number of forks."""

    worker: str
    factory: type[Worker] | None  # None for a module of functions
    handlers: tuple[Handler, ...]

    @property
    def declarations(self) -> tuple[TaskDeclaration, ...]:
        return tuple(handler.declaration for handler in self.handlers)


def load(worker: str) -> Loaded:
    """Import "module:Class" or "module" and check all its tasks."""
    module_name, colon, class_name = worker.partition(":")
    words = [*module_name.split("."), *([class_name] if colon else [])]
    if not all(word.isidentifier() for word in words):
        raise WorkerLoadError(
            f"worker = {worker!r}: write 'package.module:Class' or 'package.module'"
        )
    module = _import(worker, module_name)
    owner: Any = module
    if colon:
        owner = getattr(module, class_name, None)
        if owner is None:
            raise WorkerLoadError(
                f"worker = {worker!r}: module {module_name} has no class {class_name!r}"
                f"{_classes_of(module)}"
            )
        if not (isinstance(owner, type) and issubclass(owner, Worker)):
            raise WorkerLoadError(
                f"worker = {worker!r}: {class_name} is not a subclass of musterd.Worker; "
                f"write class {class_name}(Worker)"
            )
        _check_constructor(worker, owner)
        _check_life_cycle(worker, owner)
    found = _find_handlers(worker, owner, bound=bool(colon))
    if not found:
        hint = "" if colon else _classes_of(module)
        raise WorkerLoadError(f"worker = {worker!r} has no tasks; put @task on its handlers{hint}")
    return Loaded(worker, owner if colon else None, tuple(found))


def check_concurrency(loaded: Loaded, concurrency: int) -> None:
    """Raise WorkerLoadError if the tasks cannot run side by side: each has to be async."""
    blocking = [handler.method for handler in loaded.handlers if not handler.is_async]
    if concurrency > 1 and blocking:
        raise WorkerLoadError(
            f"concurrency = {concurrency}: worker {loaded.worker!r} has tasks that are not async "
            f"({', '.join(blocking)}), and one that blocks would block the others; write them as "
            "`async def`, or leave concurrency at 1 and raise size"
        )


def _import(worker: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise WorkerLoadError(
                f"worker = {worker!r}: there is no module {error.name!r}; install it or put its "
                "directory into PYTHONPATH"
            ) from error
        raise _import_failed(worker, error) from error
    except (Exception, SystemExit) as error:  # a module can raise anything, and even exit
        raise _import_failed(worker, error) from error


def _import_failed(worker: str, error: BaseException) -> WorkerLoadError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return WorkerLoadError(
        f"worker = {worker!r}: its import failed with {last_words(error)} "
        f"({place.filename}, line {place.lineno}); try: python -c 'import "
        f"{worker.partition(':')[0]}'"
    )


def _classes_of(module: Any) -> str:
    names = [
        name
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, Worker) and each is not Worker
    ]
    if not names:
        return ""
    return f"; did you mean {' or '.join(f'{module.__name__}:{name}' for name in sorted(names))}?"


def _check_constructor(worker: str, factory: type[Worker]) -> None:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise WorkerLoadError(
            f"worker = {worker!r}: {factory.__name__}() is made without arguments, but its "
            f"__init__ has a {error}; take values from self.options in open()"
        ) from error


def _check_life_cycle(worker: str, factory: type[Worker]) -> None:
    """Check the methods that the runtime calls: none may be a task or a generator."""
    for name in RESERVED:
        function = inspect.getattr_static(factory, name, None)
        if task_options(function) is not None:
            raise WorkerLoadError(
                f"worker = {worker!r}: a task cannot be called {name!r}, which means something "
                f"else to every Worker ({', '.join(RESERVED)}); rename the task"
            )
        if name in LIFE_CYCLE and _is_generator(function):
            raise WorkerLoadError(
                f"worker = {worker!r}: {name}() contains `yield`, so calling it would run none of "
                "it; write a plain or an async method"
            )


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _find_handlers(worker: str, owner: Any, *, bound: bool) -> list[Handler]:
    found = []
    for name in sorted(dir(owner) if bound else vars(owner)):
        function = inspect.getattr_static(owner, name)
        if isinstance(function, staticmethod | classmethod):
            if task_options(function.__func__) is not None:
                raise WorkerLoadError(
                    f"worker = {worker!r}: task {name!r} is a {type(function).__name__}; "
                    "make it a plain method with self"
                )
            continue
        options = task_options(function) if inspect.isfunction(function) else None
        if options is None:
            continue
        lines = definition_lines(function)
        if len(lines) > 1:
            raise WorkerLoadError(
                f"worker = {worker!r}: two tasks are named {name!r} (lines "
                f"{' and '.join(map(str, lines))}), so only the last would run; rename one"
            )
        found.append(make_handler(name, function, options, bound=bound))
    return found


# -- one handler -------------------------------------------------------------------------------


def make_handler(
    method: str, function: Callable[..., Any], options: TaskOptions, *, bound: bool
) -> Handler:
    """Check the signature and return the handler; `bound`: the first parameter is `self`."""
    where = f"task {method!r} ({function.__module__}.{function.__qualname__})"
    if _is_generator(function):
        raise WorkerLoadError(
            f"{where}: it contains `yield`, so calling it would run none of it; return a list, or "
            "report progress with ctx.progress()"
        )
    parameters = list(inspect.signature(function).parameters.values())
    reserved = [parameter.name for parameter in parameters[: 2 if bound else 1]]
    if bound:
        parameters = parameters[1:]
    if not parameters or parameters[0].name not in CONTEXT_NAMES:
        raise WorkerLoadError(
            f"{where}: the first parameter{' after self' if bound else ''} must be ctx; "
            f"write def {method}({'self, ' if bound else ''}ctx, ...)"
        )
    arguments = parameters[1:]
    for parameter in arguments:
        if (
            parameter.kind is parameter.VAR_POSITIONAL
            or parameter.kind is parameter.POSITIONAL_ONLY
        ):
            raise WorkerLoadError(
                f"{where}: {parameter} is positional, but arguments are given by name; "
                "name each of them"
            )
    named = [each for each in arguments if each.kind is not each.VAR_KEYWORD]
    extra = len(named) < len(arguments)
    target = options.target
    if target and not extra and target not in [each.name for each in named]:
        raise WorkerLoadError(
            f"{where}: @task(target={target!r}) names no argument of it; "
            f"it has {', '.join(each.name for each in named) or 'none'}"
        )
    return Handler(
        method=method,
        function=function,
        options=options,
        is_async=inspect.iscoroutinefunction(function),
        decode=_decoder(where, function, named, reserved if extra else None),
        signature=f"{method}({', '.join(str(each) for each in arguments)})",
    )


def _decoder(
    where: str,
    function: Callable[..., Any],
    named: list[inspect.Parameter],
    reserved: list[str] | None,
) -> Callable[[bytes], dict[str, Any]]:
    """Return a decoder of keyword arguments; with `reserved`, it takes any other name too."""
    hints = _hints(where, function, named)
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
            "Arguments", fields, kw_only=True, forbid_unknown_fields=reserved is None
        )
        decode = msgspec.msgpack.Decoder(model).decode
    except (TypeError, ValueError) as error:
        raise WorkerLoadError(
            f"{where}: its annotations cannot be checked against: {error}; "
            "use plain types, dataclasses, TypedDicts or msgspec Structs"
        ) from error
    asdict = msgspec.structs.asdict
    if reserved is None:
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


def _hints(
    where: str, function: Callable[..., Any], named: list[inspect.Parameter]
) -> dict[str, Any]:
    """Return the types of the arguments only: `ctx` and the result may name types that only
    checkers import."""
    # After __wrapped__, as inspect.signature does: annotations are resolved where they stand.
    origin = inspect.unwrap(function)
    annotations = {
        each.name: each.annotation for each in named if each.annotation is not each.empty
    }
    try:
        return typing.get_type_hints(
            SimpleNamespace(__annotations__=annotations),
            globalns=origin.__globals__,
            include_extras=True,
        )
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise WorkerLoadError(
            f"{where}: its annotations cannot be read: {error}; "
            "import what they name at run time, not under TYPE_CHECKING"
        ) from error
