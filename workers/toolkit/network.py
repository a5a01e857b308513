"""Base class for a worker's HTTP client: separate timeouts, retries, and operation state.

    class Shop(NetworkClient):
        async def prices(self, ctx, page: int) -> list[Price]:
            answer = await self.get("https://shop.example/prices", ctx=ctx, params={"page": page})
            return answer.json(list[Price])

Layers of a request, from outside to inside:

    breaker     one for each host, where asked for; the retries of one request count once
    retry       connection errors, timeouts, 5xx, 429 (408, 425); waits as Retry-After says
    bulkhead    one for each host, where asked for; a request that waits for a retry has no place
    send        with the timeouts

A server may have acted on a POST or PATCH although its answer was lost, so these are only retried
where it surely has not: no connection, or 429. `idempotent=True` says that acting twice does no
harm.

The timeouts, and their names in aiohttp:

    connect 2 s   TCP and TLS handshake (sock_connect)
    read    5 s   for the answer to begin, and between two pieces of it (sock_read)
    write   2 s   for each WRITE_BYTES of the body to be taken by the network. aiohttp has none: its
                  read timeout begins when the body is sent, so a server that does not read would
                  hold us forever. Ours is around each piece that is written.
    pool    5 s   until there is a connection in all: a free one, or name, TCP and TLS (connect)
    total 120 s   everything of one try; never beyond the task's deadline, if `ctx` is given
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypedDict, TypeVar, Unpack, overload

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from msgspec import Struct
from yarl import URL

from musterd.ipc.errors import LoggedOut
from musterd.ipc.resilience.policy import BackoffPolicy, BreakerPolicy, RetryPolicy
from musterd.workers.authoring.session import Session
from musterd.workers.pages.connections import CONNECTIONS, open_connector, open_session
from musterd.workers.pages.encodings import decode, sniff_encoding
from musterd.workers.pages.http import (
    CONNECT_SECONDS,
    PAGE_BYTES_MAX,
    POOL_SECONDS,
    READ_SECONDS,
    REDIRECTS_MAX,
    REQUEST_ERRORS,
    BadRequest,
    HttpError,
    PageTooLarge,
    SiteTimeout,
    SiteUnreachable,
    check_url,
    http_error,
    read_body,
    request_error,
    shown_url,
    told,
)
from musterd.workers.pages.session_cookies import cookies_of, jar_of, keep_changes
from musterd.workers.toolkit import functions
from musterd.workers.toolkit.breaker import breaker
from musterd.workers.toolkit.bulkhead import BulkheadFull, bulkhead
from musterd.workers.toolkit.functions import deadline_of
from musterd.workers.toolkit.retry import retry_with
from musterd.workers.toolkit.state import HasState, Operation

WRITE_SECONDS = 2.0
WRITE_BYTES = 64 * 1024  # asyncio buffers this much before it makes a writer wait
TOTAL_SECONDS = 120.0  # a server that sends one byte now and then must come to an end
NETWORK_RETRIES = 5
TOO_MANY_REQUESTS = 429
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})

T = TypeVar("T")


class ConnectTimeout(SiteTimeout):
    """No connection in time; nothing was sent."""


class NoConnection(SiteUnreachable):
    """No connection; nothing was sent."""


UNWELL = (HttpError, SiteTimeout, SiteUnreachable)


def _may_pass(error: Exception) -> bool:
    return isinstance(error, (*UNWELL, BulkheadFull))


def _was_not_done(error: Exception) -> bool:
    """Tell whether the server has surely not acted on the request."""
    if isinstance(error, HttpError):
        return error.status == TOO_MANY_REQUESTS
    return isinstance(error, ConnectTimeout | NoConnection | BulkheadFull)


class Timeouts(Struct, frozen=True):
    """Timeouts of a request, in seconds; a timedelta is converted."""

    connect: float = CONNECT_SECONDS
    read: float = READ_SECONDS
    write: float = WRITE_SECONDS
    pool: float = POOL_SECONDS
    total: float = TOTAL_SECONDS

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            given: Any = getattr(self, name)
            msgspec.structs.force_setattr(self, name, functions.seconds(f"Timeouts: {name}", given))


class Response(Struct, frozen=True):
    """Answer below 400, read to its end. `url` is the last one of the redirects."""

    status: int
    url: str
    headers: Mapping[str, str]  # names in any case
    body: bytes

    @property
    def text(self) -> str:
        """Body, decoded as a browser would."""
        return decode(self.body, sniff_encoding(self.body, self.headers.get("Content-Type", "")))

    @overload
    def json(self) -> Any: ...
    @overload
    def json(self, type: type[T]) -> T: ...
    def json(self, type: Any = Any) -> Any:
        """Decode the body as JSON, checked against a type if given (msgspec.ValidationError)."""
        return msgspec.json.decode(self.body, type=type)


class _Request(Struct, frozen=True):
    method: str
    url: URL
    headers: dict[str, str]
    body: bytes | None
    content_type: str
    idempotent: bool
    deadline: float  # of time.monotonic()
    session: Session | None


_Run = Callable[[_Request, Any], Coroutine[Any, Any, Response]]


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of NetworkClient and SyncNetworkClient."""

    headers: Mapping[str, str] | None
    timeouts: Timeouts
    max_retries: int
    backoff: BackoffPolicy
    breaker: BreakerPolicy | None
    per_host: int | None
    connections: int
    bytes_max: int
    sensitive: frozenset[str]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of request(), get() and post()."""

    ctx: Any
    params: Mapping[str, Any] | None
    headers: Mapping[str, str] | None
    body: bytes | str | None
    json: Any
    idempotent: bool | None
    session: Session | None


class NetworkClient:
    """HTTP client: make it in Worker.open(), use it in async tasks, close it in Worker.close().

    Each host has its own `breaker` and its own `per_host` limit of requests at once; `sensitive`
    names more parameters of operations that are never written.
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
        self._headers = dict(headers or {})
        self._connections = connections
        self._bytes_max = bytes_max
        self._sensitive = sensitive
        self._session: aiohttp.ClientSession | None = None
        policy = RetryPolicy(max_retries, backoff)
        self._run = self._layers(policy, _may_pass, breaker, per_host)
        self._run_once = self._layers(policy, _was_not_done, breaker, per_host)

    def _layers(
        self,
        policy: RetryPolicy,
        on: Callable[[Exception], bool],
        breaker_policy: BreakerPolicy | None,
        per_host: int | None,
    ) -> _Run:
        async def send(request: _Request, ctx: Any) -> Response:
            return await self._send(request)

        def host(request: _Request) -> str:
            return f"{type(self).__name__} {request.url.host}:{request.url.port}"

        run: _Run = send
        if per_host is not None:
            run = bulkhead(host, per_host, timeout=self.timeouts.pool)(run)
        run = retry_with(policy, on=on, on_retry=self.on_retry)(run)
        if breaker_policy is not None:
            run = breaker(host, on=UNWELL, policy=breaker_policy)(run)
        return run

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def on_retry(self, attempt: int, error: Exception, pause: float) -> object:
        """Hear of a retry before its pause; for subclasses."""
        return None

    # -- requests -------------------------------------------------------------------------------

    async def get(self, url: str, **options: Unpack[RequestOptions]) -> Response:
        """Make a GET request; see `request`."""
        return await self.request("GET", url, **options)

    async def post(self, url: str, **options: Unpack[RequestOptions]) -> Response:
        """Make a POST request; see `request`."""
        return await self.request("POST", url, **options)

    async def request(
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
        session: Session | None = None,
    ) -> Response:
        """Return the answer; HttpError, SiteTimeout, SiteUnreachable, BadRequest, PageTooLarge.

        With `ctx`, neither tries nor pauses go beyond the task's deadline. With a `session` of
        ctx.session(), its cookies are sent, those of the site are kept in it, and LoggedOut is
        raised where the answer means that.
        """
        check_url(url.partition("?")[0])  # its error names the URL, and keys are in the query
        if body is not None and json is not msgspec.UNSET:
            raise BadRequest("give body or json, not both")
        content_type = "application/octet-stream"
        if json is not msgspec.UNSET:
            body, content_type = msgspec.json.encode(json), "application/json"
        elif isinstance(body, str):
            body, content_type = body.encode(), "text/plain; charset=utf-8"
        method = method.upper()
        request = _Request(
            method,
            URL(url).update_query({name: str(value) for name, value in (params or {}).items()}),
            dict(headers or {}),
            body,
            content_type,
            method in IDEMPOTENT if idempotent is None else idempotent,
            deadline_of(ctx),
            session,
        )
        run = self._run if request.idempotent else self._run_once
        return await run(request, ctx)

    async def _send(self, request: _Request) -> Response:
        """Try once."""
        if self._session is None:
            connector = open_connector(limit=self._connections)
            self._session = open_session(connector, self._headers, owned=True)
        shown = shown_url(request.url)
        try:
            if request.session is not None:
                return await self._exchange_as(request.session, self._session, request)
            return await self._exchange(self._session, request)
        except aiohttp.ConnectionTimeoutError:
            raise ConnectTimeout(f"no connection in time to {shown}") from None
        except _WriteTimeout:
            limit = self.timeouts.write
            raise SiteTimeout(f"{shown} took nothing of the body for {limit:g} s") from None
        except TimeoutError as error:
            what = "nothing came" if isinstance(error, aiohttp.SocketTimeoutError) else "too slow"
            raise SiteTimeout(f"no answer in time from {shown}: {what}") from None
        except aiohttp.ClientConnectorError as error:
            raise NoConnection(f"cannot reach {shown}: {told(error)}") from None
        except REQUEST_ERRORS as error:
            raise request_error(error, shown) from None

    async def _exchange_as(
        self, user: Session, session: aiohttp.ClientSession, request: _Request
    ) -> Response:
        """Try once with the cookies of a session."""
        jar = jar_of(user.cookies)
        before = cookies_of(jar)
        assert session.connector is not None
        async with open_session(session.connector, self._headers, cookies=jar) as own:
            try:
                answer = await self._exchange(own, request)
            except HttpError as error:
                if user.is_logged_out("", error.status):
                    raise LoggedOut(f"the site asks for a login: {error}") from None
                raise
            finally:
                keep_changes(user, before, jar)
        if user.is_logged_out(answer.url):
            raise LoggedOut(f"{shown_url(request.url)} leads to {shown_url(URL(answer.url))}")
        return answer

    async def _exchange(self, session: aiohttp.ClientSession, request: _Request) -> Response:
        limits = self.timeouts
        total = min(limits.total, request.deadline - time.monotonic())
        body = None
        if request.body is not None:
            body = _Body(request.body, request.content_type, limits.write)
        async with session.request(
            request.method,
            request.url,
            headers=request.headers,
            data=body,
            max_redirects=REDIRECTS_MAX + 1,  # aiohttp refuses the last of so many
            timeout=aiohttp.ClientTimeout(
                total=max(total, 0.001),  # to aiohttp, 0 or less is no limit at all
                connect=limits.pool,
                sock_connect=limits.connect,
                sock_read=limits.read,
                ceil_threshold=math.inf,  # no rounding up to whole seconds
            ),
        ) as response:
            if response.status >= 400:
                raise http_error(response)
            return Response(
                response.status, str(response.url), response.headers, await self._read(response)
            )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the decompressed body, never holding more than the limit."""
        body = await read_body(response, self._bytes_max)
        if body is None:
            raise PageTooLarge(
                f"{shown_url(response.url)} is over the size limit of {self._bytes_max} bytes; "
                "give NetworkClient(bytes_max=...) if you need it"
            )
        return body

    # -- operation state ------------------------------------------------------------------------

    def operation(self, ctx: HasState, name: str, /, **parameters: Any) -> Operation:
        """Return the state of a long operation; a `with` block clears it at a good end."""
        return Operation(ctx, name, parameters, self._sensitive)

    async def load_state(self, ctx: HasState, operation: str, /, **parameters: Any) -> Any | None:
        """Return what was saved for this operation and parameters; None if nothing was."""
        return await self.operation(ctx, operation, **parameters).aload()

    async def save_state(
        self, ctx: HasState, operation: str, value: Any, /, **parameters: Any
    ) -> None:
        """Keep the value durably, until it is saved again or cleared."""
        await self.operation(ctx, operation, **parameters).asave(value)

    async def clear_state(self, ctx: HasState, operation: str, /, **parameters: Any) -> None:
        """Forget the state of this operation."""
        await self.operation(ctx, operation, **parameters).aclear()


# -- the write timeout --------------------------------------------------------------------------


class _WriteTimeout(TimeoutError):
    """A piece of the body was not taken in time."""


class _Body(Payload):
    """Body that is sent piece by piece, each within the write timeout."""

    def __init__(self, value: bytes, content_type: str, seconds: float) -> None:
        super().__init__(value, content_type=content_type)
        self._size = len(value)
        self._seconds = seconds
        self._autoclose = True

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        whole = memoryview(self._value)[:content_length]
        for start in range(0, len(whole), WRITE_BYTES):
            limit = asyncio.timeout(self._seconds)
            try:
                async with limit:
                    await writer.write(whole[start : start + WRITE_BYTES])
                    await writer.drain()
            except TimeoutError:
                if limit.expired():
                    raise _WriteTimeout from None
                raise
