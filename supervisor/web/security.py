"""Checks before every answer: Host, Origin, size of the body, rates; headers for browsers.

**Host.** A foreign page can point its name to 127.0.0.1 and reach us from its visitor's browser
(DNS rebinding). It cannot choose the Host header: only an address, "localhost" or a name of
`http.hosts` is answered. Browsers do not use Unix sockets, and always send a Host header: a request
without one, which HTTP/1.0 allows, is a load balancer's check and gets the health.

**Origin.** A request that a browser makes for another page carries that page's origin or says
"cross-site": it is refused. This protects reading; actions need the token, which no browser adds.
"""

import ipaddress
import time
from collections import OrderedDict

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from musterd.supervisor.log.token_bucket import Allowance

HEALTH_PATHS = frozenset(("/healthz", "/readyz"))  # answered without a Host header
BODY_BYTES_MAX = 64 * 1024  # more than any request needs

# Forbid caching, sniffing and framing; a page that needs more says so in its own answer.
HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=()",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}

CALLERS_MAX = 256  # addresses that are remembered

_encode = msgspec.json.Encoder().encode


def answer(status: int, value: object) -> Response:
    """Return a response with a value as JSON."""
    return Response(_encode(value) + b"\n", status, media_type="application/json")


class Rates:
    """A token bucket per caller, for requests that cost more than a look."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._callers: OrderedDict[str, Allowance] = OrderedDict()

    def take(self, caller: str) -> bool:
        allowance = self._callers.get(caller)
        if allowance is None:
            allowance = self._callers[caller] = Allowance(self._per_second, self._burst)
            if len(self._callers) > CALLERS_MAX:
                self._callers.popitem(last=False)
        self._callers.move_to_end(caller)
        return allowance.take(time.monotonic_ns())


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, hosts: tuple[str, ...], any_host: bool) -> None:
        self._app = app
        self._hosts = frozenset({"localhost", *hosts})
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._any_host and not self._is_ours(headers.get("host"), scope["path"]):
            await answer(
                421,
                {"error": "unknown host name: use the address, or add the name to http.hosts"},
            )(scope, receive, with_headers(send))
        elif _is_foreign(headers):
            await answer(403, {"error": "requested by a page of another origin"})(
                scope, receive, with_headers(send)
            )
        elif _length(headers) > BODY_BYTES_MAX:
            await answer(413, {"error": f"more than {BODY_BYTES_MAX} bytes"})(
                scope, receive, with_headers(send)
            )
        else:
            await self._app(scope, _limited(receive), with_headers(send))

    def _is_ours(self, host: str | None, path: str) -> bool:
        if host is None:
            return path in HEALTH_PATHS
        name = host_name(host)
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """Return a Host header in lower case, without port and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_foreign(headers: Headers) -> bool:
    """Return whether a browser asks for a foreign page. Following a link is harmless."""
    origin = headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
        return True
    site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
    return site in ("cross-site", "same-site") and mode != "navigate"


def _length(headers: Headers) -> int:
    told = headers.get("content-length", "0")
    return int(told) if told.isdecimal() else 0


def _limited(receive: Receive) -> Receive:
    """Cut off a body without a length: its reader sees a client that left."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        return {"type": "http.disconnect"} if received > BODY_BYTES_MAX else message

    return limited


def with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            extra = [(name, value) for name, value in HEADERS.items() if name not in given]
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return sending
