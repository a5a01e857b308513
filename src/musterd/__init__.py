"""musterd: keep a fleet of worker processes alive and feed them prioritized, durable tasks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from musterd.ipc.client import AsyncClient, Client
    from musterd.ipc.errors import (
        InvalidTask,
        MusterdError,
        NotConnected,
        QueueFull,
        ShuttingDown,
        TaskCancelled,
        TaskExpired,
        TaskFailed,
        UnknownTask,
    )
    from musterd.workers.base import Context, Permanent, Retry, Worker, task

__version__ = "0.1.0"

# Resolved on first use: `musterctl` and `musterd` start without loading what they do not need.
_HOME = {
    "AsyncClient": "musterd.ipc.client",
    "Client": "musterd.ipc.client",
    "Context": "musterd.workers.base",
    "InvalidTask": "musterd.ipc.errors",
    "MusterdError": "musterd.ipc.errors",
    "NotConnected": "musterd.ipc.errors",
    "Permanent": "musterd.workers.base",
    "QueueFull": "musterd.ipc.errors",
    "Retry": "musterd.workers.base",
    "ShuttingDown": "musterd.ipc.errors",
    "TaskCancelled": "musterd.ipc.errors",
    "TaskExpired": "musterd.ipc.errors",
    "TaskFailed": "musterd.ipc.errors",
    "UnknownTask": "musterd.ipc.errors",
    "Worker": "musterd.workers.base",
    "task": "musterd.workers.base",
}

__all__ = [*sorted(_HOME), "__version__"]  # noqa: PLE0604, RUF022 - names, from the table above


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'musterd' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
