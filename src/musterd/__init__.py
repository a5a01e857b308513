"""musterd: keep a fleet of worker processes alive and feed them prioritized, durable tasks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from musterd.ipc.client.async_client import AsyncClient
    from musterd.ipc.client.async_submit import AsyncTaskHandle
    from musterd.ipc.client.calls import Call, call
    from musterd.ipc.client.handle import TaskStatus
    from musterd.ipc.client.schedules import Schedule
    from musterd.ipc.client.sync_client import Client
    from musterd.ipc.client.sync_submit import TaskHandle
    from musterd.ipc.errors import (
        ChallengePage,
        ConfigurationError,
        EmptyPage,
        HistoryUnavailable,
        InvalidResult,
        InvalidSchedule,
        InvalidTask,
        LockTimeout,
        LoggedOut,
        MusterdError,
        NotANumber,
        NotConnected,
        NothingFound,
        ProxyFailed,
        QueueFull,
        SessionError,
        ScheduleError,
        ShuttingDown,
        StateError,
        StillRunning,
        TaskCancelled,
        TaskExpired,
        TaskFailed,
        TaskMissing,
        UnknownSchedule,
        UnknownTask,
        WouldDeadlock,
    )
    from musterd.ipc.secrets.reference import Secret
    from musterd.workers.authoring.base import (
        Context,
        Permanent,
        Retry,
        TaskInterrupted,
        TaskTimeout,
        Worker,
        task,
    )
    from musterd.workers.authoring.closing import on_close

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncTaskHandle",
    "Call",
    "ChallengePage",
    "Client",
    "ConfigurationError",
    "Context",
    "EmptyPage",
    "HistoryUnavailable",
    "InvalidResult",
    "InvalidSchedule",
    "InvalidTask",
    "LockTimeout",
    "LoggedOut",
    "MusterdError",
    "NotANumber",
    "NotConnected",
    "NothingFound",
    "Permanent",
    "ProxyFailed",
    "QueueFull",
    "Retry",
    "Schedule",
    "ScheduleError",
    "Secret",
    "SessionError",
    "ShuttingDown",
    "StateError",
    "StillRunning",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskHandle",
    "TaskInterrupted",
    "TaskMissing",
    "TaskStatus",
    "TaskTimeout",
    "UnknownSchedule",
    "UnknownTask",
    "Worker",
    "WouldDeadlock",
    "__version__",
    "call",
    "on_close",
    "task",
]

_WORKERS = "musterd.workers.authoring.base"
_CALLS = "musterd.ipc.client.calls"
_HOMES = {
    "AsyncClient": "musterd.ipc.client.async_client",
    "AsyncTaskHandle": "musterd.ipc.client.async_submit",
    "Call": _CALLS,
    "Client": "musterd.ipc.client.sync_client",
    "Context": _WORKERS,
    "Permanent": _WORKERS,
    "Retry": _WORKERS,
    "Schedule": "musterd.ipc.client.schedules",
    "Secret": "musterd.ipc.secrets.reference",
    "TaskHandle": "musterd.ipc.client.sync_submit",
    "TaskInterrupted": _WORKERS,
    "TaskStatus": "musterd.ipc.client.handle",
    "TaskTimeout": _WORKERS,
    "Worker": _WORKERS,
    "call": _CALLS,
    "on_close": "musterd.workers.authoring.closing",
    "task": _WORKERS,
}


def __getattr__(name: str) -> Any:
    """Load a name on its first use: `musterctl` starts without what it does not need."""
    if name not in __all__:
        raise AttributeError(f"module 'musterd' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "musterd.ipc.errors")), name)
    globals()[name] = value
    return value
