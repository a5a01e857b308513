"""Outcome of an attempt: its result as bytes, or its failure in words."""

import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from musterd.ipc.signatures import misfit
from musterd.ipc.wire.codec import find_fault, nests_too_deeply
from musterd.ipc.wire.messages import (
    CANCEL,
    ERROR,
    INVALID,
    NESTING_MAX,
    NOT_GIVEN,
    PERMANENT,
    RESULT_BYTES_MAX,
    STATUS_MAX,
    TIMEOUT,
    TYPE_CHARS_MAX,
    USUAL,
    Completion,
    Failure,
    Lease,
)
from musterd.workers.authoring.base import (
    Context,
    Permanent,
    Retry,
    TaskInterrupted,
    TaskOptions,
    TaskTimeout,
)
from musterd.workers.texts import plain_text, shown_whole

TRACEBACK_CHARS_MAX = 8 * 1024  # the last part is kept: it names the line that raised
MESSAGE_CHARS_MAX = 2 * 1024  # some exceptions carry a whole page
WAIT_SECONDS_MAX = 30 * 24 * 3600.0  # a month: a site's Retry-After beyond that is nonsense
WRITTEN_OUT_MAX = len("\\U0010ffff")  # longest escape of one character
KEY_CHARS_MAX = 40  # of the path to that part
CHAIN_LENGTH_MAX = 64  # causes of a cause; a chain can be made a ring by hand

UNWELL_STATUSES = frozenset((408, 425, 429))  # besides all from 500

# Code around a handler, and below what it calls: a traceback leaves out its lines.
_OURS = Path(__file__).absolute().parents[2]
_ROOMS = ("workers/runtime", "workers/authoring", "ipc/wire", "ipc/secrets")
RUNTIME_CODE = tuple(f"{_OURS / room}{os.sep}" for room in _ROOMS)


log = logging.getLogger("musterd.worker")


class Unserialisable(TypeError):
    """A handler returned a value that cannot be sent back."""


class FailedAttempt(NamedTuple):
    """Attempt whose handler raised."""

    lease: Lease
    options: TaskOptions
    context: Context
    error: BaseException


def _refuse(value: Any) -> Any:
    raise TypeError(f"value of type {_type_name(type(value))}")


_encode = msgspec.msgpack.Encoder(enc_hook=_refuse).encode


def encode_plain(called: str, value: Any) -> bytes:
    """Encode a value as msgpack; Unserialisable says what in it cannot be encoded, and where."""
    try:
        data = _encode(value)
    except RecursionError:
        raise Unserialisable(f"{called} is nested too deeply, or contains itself") from None
    except Exception as error:  # noqa: BLE001 - also whatever the properties of the value raise
        path, _, reason = find_fault(_encode, called, value, _parts)
        raise Unserialisable(f"{reason or error} at {path}") from None
    # The caller refuses values that are longer than a result may be.
    if NESTING_MAX < len(data) <= RESULT_BYTES_MAX and nests_too_deeply(data):
        raise Unserialisable(f"{called} is nested deeper than {NESTING_MAX} levels")
    return data


def encode_result(method: str, value: Any) -> bytes:
    """Encode a handler's value as msgpack; Unserialisable if that fails or is too long."""
    try:
        data = encode_plain("result", value)
    except Unserialisable as error:
        raise Unserialisable(
            f"the result of {method} cannot be serialised: {error}; "
            "return plain data (dict, list, str, numbers, bytes, None)"
        ) from None
    if len(data) > RESULT_BYTES_MAX:
        raise Unserialisable(
            f"the result of {method} has {len(data)} bytes, over the limit of {RESULT_BYTES_MAX}; "
            "write it to a file or a database and return its name"
        )
    return data


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            shown = shown_whole(key, KEY_CHARS_MAX)
            yield f"{path}[key {shown}]", key
            yield f"{path}[{shown}]", part
    elif isinstance(value, list | tuple):
        for position, part in enumerate(value):
            yield f"{path}[{position}]", part


# -- failures -----------------------------------------------------------------------------------


def invalid(signature: str, error: BaseException, redact: Callable[[str], str] = str) -> Failure:
    """Return the failure for arguments that do not fit the handler."""
    message = redact(misfit(signature, _text(error)))
    return Failure(INVALID, "musterd.InvalidTask", plain_text(message, MESSAGE_CHARS_MAX))


def unknown(method: str, known: list[str]) -> Failure:
    """Return the failure for a task that the worker does not have."""
    message = f"this worker has no task {method!r}; it has {', '.join(known)}"
    return Failure(INVALID, "musterd.InvalidTask", plain_text(message, MESSAGE_CHARS_MAX))


def cancelled(message: str) -> Failure:
    """Return the failure for a task that was cancelled before its handler began."""
    return Failure(CANCEL, _type_name(TaskInterrupted), message)


def unsendable(error: Exception) -> Failure:
    """Return the failure for a completion that cannot be encoded."""
    message = f"the outcome cannot be sent: {_text(error)}"
    return Failure(PERMANENT, _type_name(Unserialisable), plain_text(message, MESSAGE_CHARS_MAX))


def missing_secret(error: Exception) -> Failure:
    """Return the failure for a secret that is absent, or not for this pool."""
    message = plain_text(_text(error), MESSAGE_CHARS_MAX)
    return Failure(PERMANENT, f"musterd.{type(error).__name__}", message)


def failed(attempt: FailedAttempt, run_ns: int, redact: Callable[[str], str] = str) -> Completion:
    """Return the completion of a failed attempt; `redact` removes secrets.

    Whatever is wrong with the error itself, the attempt has a failure.
    """
    retry_delay_ns = NOT_GIVEN
    try:
        failure, retry_delay_ns = _failure(attempt, redact)
    except BaseException as broken:  # noqa: BLE001 - of a property, a metaclass, a __class__ ...
        kind = CANCEL if attempt.context.cancelled else ERROR
        message = f"the error cannot be shown: looking at it raised {_type_name(type(broken))}"
        failure = Failure(kind, _type_name(type(attempt.error)), message)
    login = attempt.context.login_outcome(failed=True)
    return Completion(attempt.lease.lease, run_ns, b"", failure, retry_delay_ns, login=login)


def _failure(attempt: FailedAttempt, redact: Callable[[str], str]) -> tuple[Failure, int]:
    """Return the failure, and the pause that the handler asked for."""
    error, retry_on = attempt.error, attempt.options.retry_on
    kind, cause, retry_delay_ns = ERROR, error, NOT_GIVEN
    if attempt.context.cancelled:
        kind = CANCEL
    elif isinstance(error, Retry):
        if error.after is not None:
            retry_delay_ns = _wait_ns(error.after)
    elif isinstance(error, Permanent | Unserialisable):
        kind = PERMANENT
    else:
        # A library may have wrapped the timeout into an error of its own: the cause counts.
        timeout = next((each for each in _chain(error) if isinstance(each, TaskTimeout)), None)
        if timeout is not None:
            kind, cause = TIMEOUT, timeout
        if retry_on is not None and not _may_help(cause, retry_on):
            kind = PERMANENT
    failure = Failure(
        kind=kind,
        type=_type_name(type(cause)),
        message=plain_text(redact(_text(cause)), MESSAGE_CHARS_MAX),
        traceback=_tail(redact(shown_traceback(error)), TRACEBACK_CHARS_MAX),
        status=_status(error),
        retry_after_ns=_wait_ns(_attribute(error, "retry_after")),
        unwell=kind != CANCEL and _site_unwell(error, cause, attempt.lease.counts),
    )
    return failure, retry_delay_ns


def _may_help(cause: BaseException, retry_on: tuple[type[BaseException], ...]) -> bool:
    """Tell whether `retry_on` names the error; TimeoutError stands for the task's timeout too."""
    if isinstance(cause, retry_on):
        return True
    return isinstance(cause, TaskTimeout) and issubclass(TimeoutError, retry_on)


def _site_unwell(
    error: BaseException, cause: BaseException, counts: tuple[str, ...] | None
) -> bool:
    """Tell whether the error says that the site is unwell, which a circuit breaker counts.

    Errors that the operator has named always count. Otherwise an exception may say so itself
    (`unwell`); otherwise the usual ones count, unless others were named instead.
    """
    if counts and any(_is_named(each, counts) for each in _shown_chain(error)):
        return True
    if isinstance(error, Permanent | Unserialisable):
        return False
    said = _attribute(error, "unwell")
    if isinstance(said, bool):
        return said
    return (counts is None or USUAL in counts) and _usual(error, cause)


def _usual(error: BaseException, cause: BaseException) -> bool:
    """Tell whether it is a lost connection, a timeout, or a status by which a site asks to be left
    alone. Libraries wrap these into errors of their own, so causes count as well."""
    if isinstance(cause, TaskTimeout | TimeoutError):
        return True
    for each in _shown_chain(error):
        status = _status(each)
        if status:
            return status in UNWELL_STATUSES or status >= 500
        if isinstance(each, ConnectionError | TimeoutError | socket.gaierror):
            return True
    return False


def _shown_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, as a traceback shows them."""
    each: BaseException | None = error
    for _ in range(CHAIN_LENGTH_MAX):
        if each is None:
            break
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _is_named(error: BaseException, names: tuple[str, ...]) -> bool:
    """Tell whether the error is one of these exceptions, "module:Error" each, or of a subclass."""
    own = {f"{kind.__module__}:{kind.__qualname__}" for kind in type(error).__mro__}
    for name in names:
        module, colon, path = name.partition(":")
        full = name if colon else f"builtins:{name}"
        if full in own:
            return True
        # Libraries export their exceptions from other modules than those that define them. An
        # exception of a module not imported yet cannot have been raised.
        found: Any = sys.modules.get(module) if colon else None
        for part in path.split("."):
            found = _attribute(found, part)
        if isinstance(found, type) and isinstance(error, found):
            return True
    return False


def forget(error: BaseException) -> None:
    """Cut the error off from its frames, so that nothing of the attempt outlives it.

    An exception kept as a global and raised again and again would otherwise grow each time.
    """
    try:
        for each in _chain(error):
            BaseException.with_traceback(each, None)  # past its own __setattr__: some are frozen
    except BaseException as broken:  # noqa: BLE001 - a property of somebody's exception
        log.debug("an error keeps its frames: looking at it raised %s", _type_name(type(broken)))


def last_words(error: BaseException) -> str:
    """Return an error in one line."""
    text = _text(error)
    return f"{_type_name(type(error))}: {text}" if text else _type_name(type(error))


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(chain) < CHAIN_LENGTH_MAX:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return chain


def shown_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without the runtime's frames."""
    shown = traceback.TracebackException.from_exception(error)
    waiting = [shown]
    for _ in range(CHAIN_LENGTH_MAX):
        if not waiting:
            break
        each = waiting.pop()
        each.stack[:] = [f for f in each.stack if not f.filename.startswith(RUNTIME_CODE)]
        waiting += [part for part in (each.__cause__, each.__context__) if part is not None]
        waiting += each.exceptions or ()
    return "".join(shown.format())


def _tail(text: str, chars_max: int) -> str:
    """Return the last part of a text, as it can be sent."""
    tail = text[-chars_max:]
    return plain_text(tail, WRITTEN_OUT_MAX * len(tail))[-chars_max:]


def _type_name(kind: type) -> str:
    module = kind.__module__
    name = kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
    return plain_text(name[-TYPE_CHARS_MAX:], TYPE_CHARS_MAX)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - the __str__ of somebody's exception
        return f"(its message cannot be shown: {type(broken).__name__})"


def _attribute(error: Any, name: str) -> Any:
    try:
        return getattr(error, name, 0)
    except BaseException:  # noqa: BLE001 - a property of somebody's exception
        return 0


def _status(error: BaseException) -> int:
    """Return the HTTP status an exception carries, in any of the usual places; 0 if none."""
    for holder in (error, _attribute(error, "response")):
        for name in ("status", "status_code"):
            status = _attribute(holder, name)
            if isinstance(status, int) and 0 < status <= STATUS_MAX:
                return int(status)
    return 0


def _wait_ns(seconds: Any) -> int:
    if not isinstance(seconds, int | float) or not seconds > 0:  # also for nan
        return 0
    return int(min(seconds, WAIT_SECONDS_MAX) * 1e9)
