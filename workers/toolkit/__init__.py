"""Tools for a worker's own code: retries, breakers, caches, timeouts, threads, locks, HTTP.

The decorators wrap sync and async functions alike and can be combined in any order; all tools are
safe to use from several threads.

May import: ipc.errors, ipc.resilience, ipc.secrets, ipc.signatures, workers.authoring,
workers.metrics, workers.pages.
Not for: what the supervisor does itself: retries, breakers and timeouts of tasks.
"""

import importlib
from typing import TYPE_CHECKING, Any

from musterd.ipc.errors import LockTimeout, StateError
from musterd.workers.toolkit import executors, locks
from musterd.workers.toolkit.breaker import BreakerOpen, breaker
from musterd.workers.toolkit.bulkhead import BulkheadFull, bulkhead
from musterd.workers.toolkit.cached import cached
from musterd.workers.toolkit.executors import ExecutorFull
from musterd.workers.toolkit.loading import loading
from musterd.workers.toolkit.retry import retry
from musterd.workers.toolkit.state import MemoryState, operation
from musterd.workers.toolkit.timeout import CallTimeout, timeout

if TYPE_CHECKING:
    from musterd.workers.toolkit.network import NetworkClient, Response, Timeouts
    from musterd.workers.toolkit.sync_network import SyncNetworkClient

__all__ = [
    "BreakerOpen",
    "BulkheadFull",
    "CallTimeout",
    "ExecutorFull",
    "LockTimeout",
    "MemoryState",
    "NetworkClient",
    "Response",
    "StateError",
    "SyncNetworkClient",
    "Timeouts",
    "breaker",
    "bulkhead",
    "cached",
    "executors",
    "loading",
    "locks",
    "operation",
    "retry",
    "timeout",
]

_OF_NETWORK = {
    **dict.fromkeys(("NetworkClient", "Response", "Timeouts"), "network"),
    "SyncNetworkClient": "sync_network",
}


def __getattr__(name: str) -> Any:
    """Load the HTTP client on its first use: aiohttp is not small."""
    if name not in _OF_NETWORK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"musterd.workers.toolkit.{_OF_NETWORK[name]}")
    return getattr(module, name)
