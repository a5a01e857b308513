"""NetworkClient for handlers that are not async: the same requests, time-outs, retries and state.

The requests are made by the async client, in an event loop that has a thread of its own: what is
hard about them is written once. A task that is stopped while it waits here cancels its request.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from musterd.ipc.resilience.policy import BackoffPolicy, BreakerPolicy
from musterd.workers.pages.connections import CONNECTIONS
from musterd.workers.pages.http import PAGE_BYTES_MAX
from musterd.workers.toolkit.network import NETWORK_RETRIES, NetworkClient, Response, Timeouts
from musterd.workers.toolkit.state import HasState, Operation

T = TypeVar("T")

CLOSE_SECONDS = 5.0  # for connections to be closed; then they are left to the end of the process

# What a fork has of its parent's clients. A loop's epoll is shared with the parent: to close one of
# its connections here, or to let it be collected, would take that from the parent's loop.
_of_parents: list[tuple[asyncio.AbstractEventLoop, NetworkClient]] = []


class _Inner(NetworkClient):
    """Tells the sync client of retries."""

    def __init__(self, told: Callable[[int, Exception, float], object], **options: Any) -> None:
        self._told = told
        super().__init__(**options)

    def on_retry(self, attempt: int, error: Exception, pause: float) -> object:
        return self._told(attempt, error, pause)


class SyncNetworkClient:
    """Make it in Worker.open(), use it in any thread, close it in Worker.close().

    All arguments are those of NetworkClient.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        max_retries: int = NETWORK_RETRIES,
        backoff: BackoffPolicy = BackoffPolicy(),  # noqa: B008 - frozen
        breaker: BreakerPolicy | None = None,
        per_host: int | None = None,
        connections: int = CONNECTIONS,
        bytes_max: int = PAGE_BYTES_MAX,
        sensitive: frozenset[str] = frozenset(),
    ) -> None:
        self.timeouts = timeouts
        self._sensitive = sensitive
        # One for each loop: its connections belong to that.
        self._make = partial(
            _Inner,
            self.on_retry,
            headers=headers,
            timeouts=timeouts,
            max_retries=max_retries,
            backoff=backoff,
            breaker=breaker,
            per_host=per_host,
            connections=connections,
            bytes_max=bytes_max,
            sensitive=sensitive,
        )
        self._client = self._make()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is under way and closes the connections; the next request opens new ones."""
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
        """Called before each pause, in the thread of the requests; for subclasses."""
        return None

    # -- requests -------------------------------------------------------------------------------

    def get(self, url: str, **options: Any) -> Response:
        """As `request`."""
        return self.request("GET", url, **options)

    def post(self, url: str, **options: Any) -> Response:
        """As `request`."""
        return self.request("POST", url, **options)

    def request(
        self,
        method: str,
        url: str,
        *,
        ctx: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | str | None = None,
        json: Any = msgspec.UNSET,
        idempotent: bool | None = None,
    ) -> Response:
        """As NetworkClient.request; returns when the answer is there."""
        return self._run(
            lambda client: client.request(
                method,
                url,
                ctx=ctx,
                params=params,
                headers=headers,
                body=body,
                json=json,
                idempotent=idempotent,
            )
        )

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
            future.cancel()  # of a task that was stopped; one that has ended is left as it is

    def _open(self) -> asyncio.AbstractEventLoop:
        """The loop of this process; the caller has the lock."""
        self._leave_to_parent()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="network", daemon=True
            )
            self._thread.start()
        return self._loop

    def _leave_to_parent(self) -> None:
        """In a fork, begin anew: it has no thread of its parent, and shares its connections."""
        if self._pid != os.getpid():
            if self._loop is not None:
                _of_parents.append((self._loop, self._client))
                self._client = self._make()
            self._pid, self._loop, self._thread = os.getpid(), None, None

    # -- operation state ------------------------------------------------------------------------

    def operation(self, ctx: HasState, name: str, /, **parameters: Any) -> Operation:
        """The state of a long operation; as a context manager it is cleared at a good end."""
        return Operation(ctx, name, parameters, self._sensitive)

    def load_state(self, ctx: HasState, operation: str, /, **parameters: Any) -> Any | None:
        """What was saved for this operation with these parameters; None if nothing was."""
        return self.operation(ctx, operation, **parameters).load()

    def save_state(self, ctx: HasState, operation: str, value: Any, /, **parameters: Any) -> None:
        """Keeps the value, durably, until it is saved again or cleared."""
        self.operation(ctx, operation, **parameters).save(value)

    def clear_state(self, ctx: HasState, operation: str, /, **parameters: Any) -> None:
        """Forgets it."""
        self.operation(ctx, operation, **parameters).clear()


async def _end(client: NetworkClient) -> None:
    """In its loop, before that stops: whoever waits for a request would else wait for ever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.close()
