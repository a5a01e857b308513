"""NetworkClient for handlers that are not async: equal requests, timeouts, retries and state.

The async client makes the requests, in an event loop with a thread of its own: the hard part is
written once. A task that is stopped while it waits here cancels its request.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from musterd.workers.toolkit.network import (
    ClientOptions,
    NetworkClient,
    RequestOptions,
    Response,
)
from musterd.workers.toolkit.state import HasState, Operation

T = TypeVar("T")

CLOSE_SECONDS = 5.0  # for connections to be closed; then they are left to the end of the process

# What a fork has of its parent's clients. A loop's epoll is shared with the parent: to close one of
# its connections here, or to let it be collected, would take that from the parent's loop.
_of_parents: list[tuple[asyncio.AbstractEventLoop, NetworkClient]] = []


class _Inner(NetworkClient):
    """Async client that passes retries on to the sync client."""

    def __init__(
        self, told: Callable[[int, Exception, float], object], **options: Unpack[ClientOptions]
    ) -> None:
        self._told = told
        super().__init__(**options)

    def on_retry(self, attempt: int, error: Exception, pause: float) -> object:
        return self._told(attempt, error, pause)


class SyncNetworkClient:
    """HTTP client: make it in Worker.open(), use it in any thread, close it in Worker.close().

    All arguments are those of NetworkClient.
    """

    def __init__(self, **options: Unpack[ClientOptions]) -> None:
        # One client for each loop: its connections belong to that loop.
        self._make = partial(_Inner, self.on_retry, **options)
        self._client = self._make()
        self.timeouts = self._client.timeouts
        self._sensitive = options.get("sensitive", frozenset())
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End requests under way and close the connections; the next request opens new ones."""
        with self._lock:
            self._leave_to_parent()
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
            if loop is None or thread is None:
                return
            client, self._client = self._client, self._make()
        ended = asyncio.run_coroutine_threadsafe(_end(client), loop)
        ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        thread.join(CLOSE_SECONDS)
        if not thread.is_alive():
            loop.close()
            ended.result()

    def on_retry(self, attempt: int, error: Exception, pause: float) -> object:
        """Hear of a retry before its pause, in the thread of the requests; for subclasses."""
        return None

    # -- requests -------------------------------------------------------------------------------

    def get(self, url: str, **options: Unpack[RequestOptions]) -> Response:
        """Make a GET request; see `request`."""
        return self.request("GET", url, **options)

    def post(self, url: str, **options: Unpack[RequestOptions]) -> Response:
        """Make a POST request; see `request`."""
        return self.request("POST", url, **options)

    def request(self, method: str, url: str, **options: Unpack[RequestOptions]) -> Response:
        """Make a request as NetworkClient.request does; return when the answer is there."""
        return self._run(lambda client: client.request(method, url, **options))

    def _run(self, work: Callable[[NetworkClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:  # no loop is closed between being found and being given the work
            loop = self._open()
            if threading.current_thread() is self._thread:
                raise RuntimeError("on_retry cannot make a request: it would wait for itself")
            future = asyncio.run_coroutine_threadsafe(work(self._client), loop)
        try:
            return future.result()
        except CancelledError:
            raise ConnectionError("the client was closed while the request was under way") from None
        finally:
            future.cancel()  # of a stopped task; a finished one is left as it is

    def _open(self) -> asyncio.AbstractEventLoop:
        """Return the loop of this process; the caller holds the lock."""
        self._leave_to_parent()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="network", daemon=True
            )
            self._thread.start()
        return self._loop

    def _leave_to_parent(self) -> None:
        """Begin anew in a fork, which has no threads of its parent but shares its connections."""
        if self._pid != os.getpid():
            if self._loop is not None:
                _of_parents.append((self._loop, self._client))
                self._client = self._make()
            self._pid, self._loop, self._thread = os.getpid(), None, None

    # -- operation state ------------------------------------------------------------------------

    def operation(self, ctx: HasState, name: str, /, **parameters: Any) -> Operation:
        """Return the state of a long operation; a `with` block clears it at a good end."""
        return self._client.operation(ctx, name, **parameters)

    def load_state(self, ctx: HasState, operation: str, /, **parameters: Any) -> Any | None:
        """Return what was saved for this operation and parameters; None if nothing was."""
        return self.operation(ctx, operation, **parameters).load()

    def save_state(self, ctx: HasState, operation: str, value: Any, /, **parameters: Any) -> None:
        """Keep the value durably, until it is saved again or cleared."""
        self.operation(ctx, operation, **parameters).save(value)

    def clear_state(self, ctx: HasState, operation: str, /, **parameters: Any) -> None:
        """Forget the state of this operation."""
        self.operation(ctx, operation, **parameters).clear()


async def _end(client: NetworkClient) -> None:
    """Cancel all requests in the loop before it stops, so that no caller waits forever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.close()
