"""Tasks of a worker: find them, and check that they can be run (ipc/signatures.py)."""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.signatures import (
    Signature,
    SignatureError,
    described,
    is_generator,
    place_of,
    read_signature,
)
from musterd.ipc.user_code import error_place
from musterd.ipc.wire.messages import ARGUMENTS_MAX, WORD_CHARS_MAX, Arguments, TaskDeclaration
from musterd.workers.authoring.base import TaskOptions, Worker, definition_lines, task_options
from musterd.workers.authoring.outcome import last_words

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
    arguments: Arguments | None = None

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
            place_of(self.function),
            self.arguments,
        )


def _arguments(signature: Signature) -> Arguments | None:
    """Return what a handler takes; None where that is more than a message may have."""
    names, required = signature.names, signature.required
    if len(names) > ARGUMENTS_MAX or max(map(len, names), default=0) > WORD_CHARS_MAX:
        return None
    return Arguments(names, required, signature.open)


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
    return look_at(worker, owner)


def look_at(worker: str, owner: type[Worker] | ModuleType) -> Loaded:
    """Check all tasks of a worker class or of a module; `worker` is its name, for messages."""
    factory = owner if isinstance(owner, type) else None
    if factory is not None:
        _check_constructor(worker, factory)
        _check_life_cycle(worker, factory)
    found = _find_handlers(worker, owner, bound=factory is not None)
    if not found:
        hint = "" if factory is not None else _classes_of(owner)
        raise WorkerLoadError(f"worker = {worker!r} has no tasks; put @task on its handlers{hint}")
    return Loaded(worker, factory, tuple(found))


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
    said = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else last_words(error)
    place = error_place(error)
    return WorkerLoadError(
        f"worker = {worker!r}: its import failed with {said}{f', at {place}' if place else ''}; "
        f"try: python -c 'import {worker.partition(':')[0]}'"
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
        if name in LIFE_CYCLE and is_generator(function):
            raise WorkerLoadError(
                f"worker = {worker!r}: {name}() contains `yield`, so calling it would run none of "
                "it; write a plain or an async method"
            )


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
    try:
        signature = read_signature(method, function, bound=bound)
    except SignatureError as error:
        raise WorkerLoadError(str(error)) from error
    target = options.target
    if target and not signature.open and target not in signature.names:
        raise WorkerLoadError(
            f"{described(method, function)}: @task(target={target!r}) names no argument of it; "
            f"it has {', '.join(signature.names) or 'none'}"
        )
    return Handler(
        method=method,
        function=function,
        options=options,
        is_async=inspect.iscoroutinefunction(function),
        decode=signature.decode,
        signature=signature.text,
        arguments=_arguments(signature),
    )
