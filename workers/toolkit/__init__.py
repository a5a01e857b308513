"""Tools for a worker's own code: retries, breakers, bulkheads, time-outs, threads, locks, HTTP.

The decorators wrap sync and async functions alike and can be combined in any order; all of it is
safe to use from several threads.
"""

from typing import TYPE_CHECKING, Any

from musterd.ipc.errors import LockTimeout, StateError
from musterd.workers.toolkit import executors, locks
from musterd.workers.toolkit.breaker import BreakerOpen, breaker
from musterd.workers.toolkit.bulkhead import BulkheadFull, bulkhead
from musterd.workers.toolkit.executors import ExecutorFull
from musterd.workers.toolkit.retry import retry
from musterd.workers.toolkit.state import MemoryState, operation
from musterd.workers.toolkit.timeout import CallTimeout, timeout

if TYPE_CHECKING:
    from musterd.workers.toolkit.network import NetworkClient, Response, Timeouts

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
    "Timeouts",
    "breaker",
    "bulkhead",
    "executors",
    "locks",
    "operation",
    "retry",
    "timeout",
]

_OF_NETWORK = ("NetworkClient", "Response", "Timeouts")


def __getattr__(name: str) -> Any:
    """Loads the HTTP client on its first use: aiohttp is not small."""
    if name not in _OF_NETWORK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from musterd.workers.toolkit import network

    return getattr(network, name)
