"""Conversions between rpc.py and the core: parameters into tasks, refusals into errors."""

import signal

from msgspec import UNSET

from musterd.ipc.errors import InvalidTask
from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    NEVER_NS,
    UNKNOWN_TASK,
    Rejection,
    TaskSpec,
)
from musterd.ipc.wire.schedule_messages import UNKNOWN_SCHEDULE
from musterd.supervisor.api.rpc import FAILED, INVALID_PARAMS, NO_SUCH_NAME, RpcError, SubmitTask

SHOWN_MAX = 10**9  # the largest number shown in a message: one may have thousands of digits


def task_spec(params: SubmitTask) -> TaskSpec:
    """Return the task that these parameters describe; RpcError if they cannot be encoded."""
    from musterd.ipc.client.taskspec import encode_args, key_of, packed, priority_level
    from musterd.ipc.secrets.reference import from_json

    try:
        arguments = from_json(params.args)
        args = encode_args(params.name, arguments)
        priority = priority_level(params.priority)
        fallback = None
        if params.fallback is not UNSET:
            fallback = packed(f"the fallback of {params.name}", "fallback", params.fallback)
    except (InvalidTask, ValueError) as error:
        raise RpcError(INVALID_PARAMS, str(error)) from error
    key = params.key  # names in JSON are strings, so arguments always make a key
    if not key and (params.cache or params.debounce):
        key = key_of(params.name, arguments, params.session)
    return TaskSpec(
        id=params.id,
        name=params.name,
        args=args,
        priority=priority,
        target=params.target,
        timeout_ns=_nanoseconds(params.timeout),
        max_retries=params.max_retries,
        delay_ns=_nanoseconds(params.delay),
        expires_ns=_nanoseconds(params.expires),
        key=key,
        cache_ns=_age_ns(params.cache),
        debounce_ns=_age_ns(params.debounce),
        policy=params.policy,
        on_open=params.on_open or ("" if fallback is None else "fallback"),
        fallback=fallback,
        fallback_on=params.fallback_on,
        session=params.session,
    )


def _nanoseconds(seconds: float) -> int:
    """Return nanoseconds, at least 1: on the wire 0 means "not given"."""
    return max(1, round(seconds * 1e9)) if seconds else 0


def _age_ns(age: float | bool) -> int:
    if isinstance(age, bool):
        return AS_CONFIGURED if age else NEVER_NS
    return _nanoseconds(age)


def rejected(rejection: Rejection) -> RpcError:
    """Return the error that tells a caller why the core refused."""
    code = NO_SUCH_NAME if rejection.code in (UNKNOWN_TASK, UNKNOWN_SCHEDULE) else FAILED
    retry_after = rejection.retry_after_ns / 1e9
    data = {"rejected": rejection.code, "retry_after": retry_after}
    return RpcError(code, f"{rejection.code}: {rejection.message}", data)


def no_such_task(id_: str, *, clustered: bool = False) -> RpcError:
    """Return the error for an id that neither the fleet nor the store knows.

    On a node of a cluster, `data` says so: the task may be elsewhere.
    """
    if clustered:
        return RpcError(
            NO_SUCH_NAME,
            f"no such task on this node: {id_!r}: musterctl --cluster task asks the whole cluster",
            {"cluster": True},
        )
    return RpcError(
        NO_SUCH_NAME, f"no such task: {id_!r}: never accepted, or forgotten after keep_results"
    )


def signal_number(given: str | int) -> int:
    """Return the number of "HUP", "SIGHUP", "1" or 1; RpcError if there is no such signal."""
    number = given if isinstance(given, int) else _signal_in(given.upper())
    if number in signal.valid_signals():
        return int(number)
    shown = given[:40] if isinstance(given, str) else min(max(given, -SHOWN_MAX), SHOWN_MAX)
    raise RpcError(INVALID_PARAMS, f"no signal {shown!r}: give a name such as HUP or a number")


def _signal_in(text: str) -> int:
    """Return the number that a text names; 0, which is no signal, if it names none."""
    if text.isascii() and text.isdigit():
        digits = text.lstrip("0")
        return int(digits or "0") if len(digits) <= 3 else 0  # int() of 5,000 digits raises
    name = text if text.startswith("SIG") else f"SIG{text}"
    return int(signal.Signals.__members__.get(name, 0))
