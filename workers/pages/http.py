"""One HTTP request with every limit a crawler needs, and its text decoded as a browser would.

    fetch(session, request, deadline) -> Page       in a session of `connections.open_session`

What can go wrong, and whether another attempt may help:

    HttpError            429, 408, 425, 5xx            yes, after `retry_after` seconds
    PermanentHttpError   every other 4xx               no
    SiteTimeout          connect, read or deadline     yes
    SiteUnreachable      DNS, refused, reset, TLS, cut yes
    BadResponse          the answer breaks HTTP        no
    BadRequest           url, scheme, header, redirect no
    AddressRefused       by the pool's allow and deny  no
    ProxyFailed          a proxy, not the site         yes, by another proxy
    PageTooLarge         over the size limit           no

Answers are accepted where curl and Chromium both accept them: see `answers` and docs/fetching.md.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs
from msgspec import Struct
from yarl import URL

from musterd.ipc.errors import MusterdError, ProxyFailed
from musterd.ipc.secrets.names import SENSITIVE, is_sensitive
from musterd.workers.authoring.base import Permanent
from musterd.workers.pages.codings import BadCoding, CodingCut
from musterd.workers.pages.connections import BodyBroken, body_of
from musterd.workers.pages.encodings import decode, sniff_encoding

CONNECT_SECONDS = 2.0  # a TCP handshake that takes longer means a site in trouble
READ_SECONDS = 5.0  # between two pieces of an answer
POOL_SECONDS = 5.0  # for a connection in all: waiting for a free one, the name, the handshake
REDIRECTS_MAX = 10
PAGE_BYTES_MAX = 10 * 1024 * 1024  # decompressed; larger ones are downloads, not pages
RETRY_AFTER_SECONDS_MAX = 24 * 3600.0  # a site must not park our tasks for years
CHALLENGE_SHOWN = 200  # characters of WWW-Authenticate in an error
# Sensitive names in the query of an address: ?key=... and ?sig=... let in anybody who has them.
SENSITIVE_IN_QUERY = frozenset((*SENSITIVE, "key", "sig", "signature"))
HIDDEN = "***"
BEGINNING_BYTES = 1024  # of a body, in a Head
BEGINNING_SECONDS = 1.0  # for that of an error, which nobody else reads
SCHEMES = ("http", "https")
UNAUTHORIZED = 401
RETRYABLE_4XX = frozenset({408, 425, 429})
PROXY_LOGIN = 407
GATEWAY_STATUSES = frozenset({502, 503, 504})
PROXY_SAYS = ("Proxy-Status", "X-Squid-Error")  # headers of errors that a proxy made itself

Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class HttpError(MusterdError):
    """The site answered with an error that may pass."""

    def __init__(
        self,
        status: int,
        url: str,
        retry_after: float = 0.0,
        reason: str = "",
        challenge: str = "",
    ) -> None:
        pause = f"; come back in {retry_after:g} s" if retry_after else ""
        wants = f"; it wants {challenge[:CHALLENGE_SHOWN]}" if challenge else ""
        super().__init__(f"HTTP {status} {reason}".rstrip() + f" from {url}{pause}{wants}")
        self.challenge = challenge
        self.status = status
        self.url = url
        self.retry_after = retry_after


class PermanentHttpError(HttpError, Permanent):
    """The site refuses this request, and will refuse it again."""


class SiteTimeout(MusterdError, TimeoutError):
    """The site did not answer in time."""


class SiteUnreachable(MusterdError, ConnectionError):
    """No answer came from the site."""


class BadResponse(Permanent):
    """The site's answer breaks HTTP in a way that curl or Chromium does not accept."""


class BadRequest(Permanent):
    """This request cannot be made."""


class PageTooLarge(Permanent):
    """The page is over the size limit."""


class Request(Struct, frozen=True):
    url: str
    method: Method = "GET"
    headers: dict[str, str] = {}
    body: str = ""
    bytes_max: int = PAGE_BYTES_MAX
    proxy: str | None = None


class Page(Struct, frozen=True):
    """Answer below 400. `url` is the last one of the redirects."""

    status: int
    url: str
    headers: dict[str, str]  # names in lower case; repeated ones joined by ", "
    text: str
    encoding: str
    elapsed_seconds: float
    redirects: int = 0


class Head(Struct, frozen=True):
    """What a site answered, before anybody understood it."""

    status: int
    reason: str
    url: str
    headers: list[tuple[str, str]]
    beginning: bytes = b""  # of the body


Seen = Callable[[Head], None]  # told the head of an answer that fails the request


def check_url(url: str) -> None:
    """Raise BadRequest unless `url` is a whole http or https address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # raises if it is no port number
    except ValueError as error:
        raise BadRequest(f"cannot read the URL {shown_url(url)!r}: {error}") from None
    if parts.scheme not in SCHEMES:
        raise BadRequest(
            f"cannot fetch {shown_url(url)!r}: the scheme {parts.scheme!r} is not one of "
            f"{', '.join(SCHEMES)}"
        )
    if not host:
        raise BadRequest(f"cannot fetch {shown_url(url)!r}: it names no host")


async def fetch(
    session: aiohttp.ClientSession, request: Request, deadline: float, seen: Seen | None = None
) -> Page:
    """Make the request, follow its redirects and read the page, all before the deadline.

    The deadline is in seconds of time.monotonic(), math.inf for none. `seen` is told the head of an
    answer that fails.
    """
    check_url(request.url)
    shown = shown_url(request.url)
    try:
        return await _request(session, request, deadline, seen)
    except TimeoutError as error:
        if isinstance(error, aiohttp.ConnectionTimeoutError) and request.proxy:
            await _check_proxy(request.proxy, deadline)
        raise SiteTimeout(f"no answer in time from {shown}: {told(error)}") from None
    except REQUEST_ERRORS as error:
        raise request_error(error, shown) from None


async def _request(
    session: aiohttp.ClientSession, request: Request, deadline: float, seen: Seen | None
) -> Page:
    begun = time.monotonic()
    timeout = aiohttp.ClientTimeout(
        # To aiohttp, 0 or less is no limit at all.
        total=None if deadline == math.inf else max(deadline - begun, 0.001),
        connect=POOL_SECONDS,
        sock_connect=CONNECT_SECONDS,
        sock_read=READ_SECONDS,
    )
    async with session.request(
        request.method,
        request.url,
        headers=request.headers,
        data=request.body or None,
        proxy=request.proxy,
        max_redirects=REDIRECTS_MAX + 1,  # aiohttp refuses the last of so many
        timeout=timeout,
    ) as response:
        if seen is not None:
            seen(_head(response))  # whatever comes next
        if response.status >= 400:
            if seen is not None:
                seen(_head(response, await _first_bytes(response)))
            if request.proxy and _of_proxy(response):
                status = f"HTTP {response.status} {response.reason or ''}".rstrip()
                raise _proxy_error(response.status, f"{shown_url(request.proxy)} answered {status}")
            raise http_error(response)
        body = await _read(response, request)
        encoding = sniff_encoding(body, response.headers.get(hdrs.CONTENT_TYPE, ""))
        return Page(
            status=response.status,
            url=str(response.url),
            headers=_joined(response),
            text=decode(body, encoding),
            encoding=encoding,
            elapsed_seconds=time.monotonic() - begun,
            redirects=len(response.history),
        )


def _head(response: aiohttp.ClientResponse, beginning: bytes = b"") -> Head:
    reason, headers = response.reason or "", list(response.headers.items())
    return Head(response.status, reason, str(response.url), headers, beginning)


async def _first_bytes(response: aiohttp.ClientResponse) -> bytes:
    """Return the first bytes of an error's body, as far as they come."""
    body = bytearray()
    with suppress(TimeoutError, aiohttp.ClientError, OSError, BadCoding, CodingCut):
        async with asyncio.timeout(BEGINNING_SECONDS):
            async for piece in body_of(response):
                body += piece
                if len(body) >= BEGINNING_BYTES:
                    break
    return bytes(body[:BEGINNING_BYTES])


def _of_proxy(response: aiohttp.ClientResponse) -> bool:
    """Tell whether an error is the proxy's own, and not passed on from the site.

    407 always is. Of a gateway error it is known only where the proxy says so.
    """
    if response.status == PROXY_LOGIN:
        return True
    says = any(name in response.headers for name in PROXY_SAYS)
    return response.status in GATEWAY_STATUSES and says


def _proxy_error(status: int, what: str) -> ProxyFailed:
    """Return the error of a proxy that answers; only a refused login concerns all sites."""
    return ProxyFailed(f"the proxy {what}", everywhere=status == PROXY_LOGIN)


async def _check_proxy(proxy: str, deadline: float) -> None:
    """Raise ProxyFailed where nobody accepts connections at the proxy's address."""
    parts = urlsplit(proxy)
    seconds = min(CONNECT_SECONDS, max(deadline - time.monotonic(), 0.1))
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.close()
    except OSError as error:  # TimeoutError is one
        why = error.strerror or type(error).__name__
        raise ProxyFailed(f"no connection to the proxy {shown_url(proxy)}: {why}") from None


async def _read(response: aiohttp.ClientResponse, request: Request) -> bytes:
    # A body that is too long as sent does not get shorter when decompressed.
    declared = response.content_length or 0
    if request.method != "HEAD" and declared > request.bytes_max:
        raise _too_large(request, f"its Content-Length is {declared}")
    body = await read_body(response, request.bytes_max)
    if body is None:
        raise _too_large(request, "it goes on")
    return body


async def read_body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes | None:
    """Return the decompressed body, None if it is over the limit; never hold more than that."""
    body = bytearray()
    async for piece in body_of(response):
        body += piece
        if len(body) > bytes_max:
            return None
    return bytes(body)


def _too_large(request: Request, how: str) -> PageTooLarge:
    return PageTooLarge(
        f"{shown_url(request.url)} is over the size limit of "
        f"{request.bytes_max} bytes ({how}); raise max_bytes if you need it"
    )


# What a request raises beside timeouts. ValueError: aiohttp will not send a header, a method or a
# proxy.
REQUEST_ERRORS = (aiohttp.ClientError, OSError, BadCoding, CodingCut, ValueError)


def request_error(error: Exception, shown: str) -> Exception:
    """Return our error for one of REQUEST_ERRORS.

    The texts and tracebacks of aiohttp's errors have the whole URL in them, with the keys of its
    query. Therefore callers raise this `from None`.
    """
    if isinstance(error, aiohttp.TooManyRedirects):
        return BadRequest(f"more than {REDIRECTS_MAX} redirects from {shown}")
    if isinstance(error, aiohttp.RedirectClientError):
        where = f"{shown} redirects to an address that cannot be fetched"
        return BadRequest(f"{where}: {told(error)}")
    if isinstance(error, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
        return BadRequest(f"cannot fetch {shown}: {told(error)}")
    if isinstance(error, (aiohttp.ClientError, OSError, BadCoding, CodingCut)):
        return _site_error(error, shown)
    return BadRequest(f"cannot send this request to {shown}: {error}")


def _site_error(error: Exception, shown: str) -> Exception:
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        where = f"{error.host}:{error.port}"
        return ProxyFailed(f"no connection to the proxy {where}: {told(error)}")
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return _proxy_error(error.status, f"did not connect to {shown}: HTTP {error.status}")
    if isinstance(error, BadCoding) or (isinstance(error, BodyBroken) and not error.cut):
        return BadResponse(f"the answer of {shown} is refused: {error}")
    if isinstance(error, aiohttp.ClientResponseError):  # only our parser's: statuses raise none
        return BadResponse(f"the answer of {shown} is refused: {error.message}")
    if isinstance(error, (BodyBroken, CodingCut)):
        return SiteUnreachable(f"the answer of {shown} was cut off: {error}")
    return SiteUnreachable(f"cannot fetch {shown}: {told(error)}")


def http_error(response: aiohttp.ClientResponse) -> HttpError:
    """Return the error of an answer of 400 or more."""
    pause = retry_after_seconds(response.headers.get(hdrs.RETRY_AFTER, ""), _site_clock(response))
    challenge = ", ".join(response.headers.getall(hdrs.WWW_AUTHENTICATE, ()))
    shown = shown_url(response.url)
    return status_error(response.status, shown, pause, response.reason or "", challenge)


def status_error(
    status: int, url: str, retry_after: float = 0.0, reason: str = "", challenge: str = ""
) -> HttpError:
    """Return the error of a status; `url` may be shown, `challenge` is WWW-Authenticate."""
    permanent = status < 500 and status not in RETRYABLE_4XX
    kind = PermanentHttpError if permanent else HttpError
    return kind(status, url, retry_after, reason, challenge if status == UNAUTHORIZED else "")


def retry_after_seconds(value: str, now: float) -> float:
    """Return the seconds of a Retry-After header (a number or a date); 0 without any."""
    value = value.strip()
    if re.fullmatch(r"\d{1,12}", value, re.ASCII):
        seconds = float(value)
    else:
        at = _timestamp(value)
        seconds = 0.0 if at is None else at - now
    return min(max(seconds, 0.0), RETRY_AFTER_SECONDS_MAX)


def _site_clock(response: aiohttp.ClientResponse) -> float:
    """Return the site's own time, so that its clock and ours need not agree."""
    at = _timestamp(response.headers.get(hdrs.DATE, ""))
    return time.time() if at is None else at


def _timestamp(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _joined(response: aiohttp.ClientResponse) -> dict[str, str]:
    joined: dict[str, list[str]] = {}
    for name, value in response.headers.items():
        joined.setdefault(name.lower(), []).append(value)
    return {name: ", ".join(values) for name, values in joined.items()}


def told(error: Exception) -> str:
    """Return the reason without aiohttp's texts, which have the URL in them."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return str(error.message)
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    text = getattr(cause, "strerror", None) or getattr(cause, "verify_message", None)
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


# -- addresses in logs and errors ----------------------------------------------------------------


def shown_url(url: URL | str) -> str:
    """Return an address fit for logs: no credentials, no values of sensitive parameters.

    Of an unreadable address only the part before the query is shown.
    """
    try:
        known = URL(url)
        query = [
            (name, HIDDEN if is_sensitive(name, SENSITIVE_IN_QUERY) else value)
            for name, value in known.query.items()
        ]
        anonymous = known.with_user(None) if known.host else known
        return str(anonymous.with_query(query).with_fragment(None))
    except ValueError:
        return _beginning(str(url))


def _beginning(url: str) -> str:
    """Return the part before the query, without credentials."""
    plain = url.partition("#")[0].partition("?")[0]
    scheme, slashes, rest = plain.partition("//")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"
