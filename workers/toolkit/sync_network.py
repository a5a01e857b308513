"""NetworkClient for handlers that are not async: equal requests, timeouts, retries and state.

The async client makes the requests, in an event loop with a thread of its own: the hard part is
written once. A task that is stopped while it waits here cancels its request.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
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
        self._client = _Inner(self.on_retry, **options)
        self.timeouts = self._client.timeouts
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is None or thread is None or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._client.close(), loop).result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_SECONDS)
        if not thread.is_alive():
            loop.close()

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
        return self._run(self._client.request(method, url, **options))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self._open()
            if threading.current_thread() is self._thread:
                raise RuntimeError("on_retry cannot make a request: it would wait for itself")
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except CancelledError:
            raise ConnectionError("the client was closed while the request was under way") from None
        finally:
            future.cancel()  # of a stopped task; a finished one is left as it is

    def _open(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # a fork has no thread of its parent
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="network", daemon=True
                )
                self._thread.start()
            return self._loop

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
