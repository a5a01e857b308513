"""HTTP/1.1 as uvicorn speaks it, with limits for slow clients.

uvicorn closes connections that idle between two requests. It has no deadline for a request that
arrives in drops, or never, nor for an answer that nobody reads: a few hundred of those would take
every connection. Nor does it make room: idle connections would keep out new ones. Where there are
too many, each new connection closes one that waits for its client: the longest waiting one of the
address that has most. And uvicorn has no limit for headers that arrive in one piece: h11 counts
only incomplete ones.
"""

import asyncio
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # from the connection, or the first byte, to the end of the request
STALL_SECONDS = 10.0  # how long an answer may wait for its reader
KEEP_ALIVE_SECONDS = 15  # of an idle connection: longer than the interval of most scrapers
# Beyond the first limit, a connection that waits for its client is closed, and where there is none
# a request is answered with 503; beyond the second, connections are closed unread.
ANSWERED_MAX = 64
CONNECTIONS_MAX = 256
HEADER_BYTES_MAX = 16 * 1024  # the request line and all headers
_TOO_LARGE = 431


class _BoundedConnection(h11.Connection):
    """Refuse a request whose headers are too long, however they arrive."""

    refusal = 400  # status of the error raised by next_event()

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.refusal = error.error_status_hint
            raise
        if isinstance(event, h11.Request) and _header_bytes(event) > HEADER_BYTES_MAX:
            self.refusal = _TOO_LARGE
            raise h11.RemoteProtocolError("headers too long", error_status_hint=_TOO_LARGE)
        return event


def _header_bytes(request: h11.Request) -> int:
    """Return the size of headers on the wire without padding: each has ": " and CRLF."""
    line = len(request.method) + len(request.target) + len(" ") * 2 + len("HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + 4 for name, value in request.headers) + 2


class PatientProtocol(H11Protocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._bounded = _BoundedConnection(h11.SERVER, HEADER_BYTES_MAX)
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._last_moved = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._make_room()
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        else:
            self._await_request()

    def _make_room(self) -> None:
        """Close a connection that waits for its client, where this one is one too many."""
        all_ = (each for each in self.connections if isinstance(each, PatientProtocol))
        there = [each for each in all_ if not each.transport.is_closing()]
        if len(there) < ANSWERED_MAX:
            return
        idle = [each for each in there if each is not self and each._waits_for_its_client()]
        if idle:
            counts = Counter(each._address() for each in idle)
            first = min(idle, key=lambda each: (-counts[each._address()], each._last_moved))
            first.transport.abort()
            self.connections.discard(first)  # uvicorn would count it until the next turn

    def _waits_for_its_client(self) -> bool:
        """Return whether no complete request is unanswered, or the client reads no answer."""
        if self._stall_timer is not None:
            return True
        state = self.conn.their_state
        answers = self.cycle is not None and not self.cycle.response_complete
        return not answers or state is h11.SEND_BODY

    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def send_400_response(self, msg: str) -> None:
        if self._bounded.refusal != _TOO_LARGE:
            super().send_400_response(msg)
            return
        text = f"more than {HEADER_BYTES_MAX} bytes of headers\n".encode()
        headers = [("content-type", "text/plain"), ("content-length", str(len(text)))]
        response = h11.Response(status_code=_TOO_LARGE, headers=[*headers, ("connection", "close")])
        for event in (response, h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self._last_moved = self.loop.time()
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
        """Start the deadline of a request that has begun to arrive."""
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
