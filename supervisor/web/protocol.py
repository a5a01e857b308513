"""HTTP/1.1 as uvicorn speaks it, with an end to whoever is slow.

uvicorn closes a connection that idles between two requests. What it does not have is a time for a
request that comes in drops, or never, and for an answer that nobody reads: a few hundred of those
would take every place there is.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # from the connection, or the first byte, to the end of the request
STALL_SECONDS = 10.0  # how long an answer may wait for a reader
KEEP_ALIVE_SECONDS = 15  # an idle connection: longer than the pause of most scrapers
# Beyond the first, a request is answered with 503; beyond the second, not even read.
ANSWERED_MAX = 64
CONNECTIONS_MAX = 256
HEADER_BYTES_MAX = 16 * 1024


class PatientProtocol(H11Protocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        self.flow.resume_writing()

    def _await_request(self) -> None:
        """A request that has begun to arrive has to be complete in time."""
        if self.transport.is_closing() or not self._is_receiving():
            self._stop_request_timer()
        elif self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _is_receiving(self) -> bool:
        state = self.conn.their_state
        idles = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        return state is h11.SEND_BODY or (state is h11.IDLE and not idles)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
