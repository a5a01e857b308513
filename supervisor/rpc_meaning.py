"""What the parameters of rpc.py mean to the core, and what its refusals mean to a caller."""

import signal

import msgspec
from msgspec import UNSET

from musterd.ipc.errors import InvalidTask
from musterd.ipc.messages import UNKNOWN_TASK, Rejection, TaskSpec
from musterd.supervisor.rpc import FAILED, INVALID_PARAMS, NO_SUCH_NAME, RpcError, SubmitTask


def task_spec(params: SubmitTask) -> TaskSpec:
    """The task these parameters ask for; RpcError if its arguments cannot be carried."""
    from musterd.ipc.secret import from_json
    from musterd.ipc.taskspec import encode_args, key_of, priority_level

    try:
        arguments = from_json(params.args)
        args = encode_args(params.name, arguments)
        priority = priority_level(params.priority)
    except (InvalidTask, ValueError) as error:
        raise RpcError(INVALID_PARAMS, str(error)) from error
    key = params.key  # JSON has only texts as names, so the arguments always make a key
    if not key and (params.cache or params.debounce):
        key = key_of(params.name, arguments)
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
        cache_ns=_nanoseconds(params.cache),
        debounce_ns=_nanoseconds(params.debounce),
        policy=params.policy,
        on_open=params.on_open or ("fallback" if params.fallback is not UNSET else ""),
        fallback=msgspec.msgpack.encode(params.fallback) if params.fallback is not UNSET else None,
    )


def _nanoseconds(seconds: float) -> int:
    """0 means "not given" on the wire, so the shortest time that was given is 1."""
    return max(1, round(seconds * 1e9)) if seconds else 0


def rejected(rejection: Rejection) -> RpcError:
    """The error that tells a caller why the core did not take its task."""
    code = NO_SUCH_NAME if rejection.code == UNKNOWN_TASK else FAILED
    retry_after = rejection.retry_after_ns / 1e9
    data = {"rejected": rejection.code, "retry_after": retry_after}
    return RpcError(code, f"{rejection.code}: {rejection.message}", data)


def signal_number(given: str | int) -> int:
    """The number of "HUP", "SIGHUP", "1" or 1; RpcError if there is no such signal."""
    text = str(given).upper()
    if text.isascii() and text.isdigit():
        if int(text[:4]) in signal.valid_signals():
            return int(text)
    else:
        name = text if text.startswith("SIG") else f"SIG{text}"
        number = signal.Signals.__members__.get(name)
        if number is not None:
            return int(number)
    raise RpcError(
        INVALID_PARAMS, f"no signal {str(given)[:40]!r}: give a name such as HUP or a number"
    )
