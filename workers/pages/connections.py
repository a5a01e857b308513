"""Connections of an HTTP client: lenient parsing as in curl and Chromium, and address rules.

    connector = open_connector(rules)                  kept for a worker's life
    session = open_session(connector, headers, rules)  one per task: its cookies
    async for piece in body_of(response): ...          the body without its content coding

aiohttp keeps the pool, TLS, proxies, cookies and redirects; its own parser of answers, which
refuses much that the web sends, is replaced by `answers.AnswerParser`. Only `_Protocol` and
`_Connector` rely on more of aiohttp than it documents.
"""

import socket
from collections.abc import AsyncIterator, Set
from typing import Any

import aiohttp
from aiohttp import hdrs
from aiohttp.abc import ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from aiohttp.http_writer import HttpVersion11
from aiohttp.resolver import ThreadedResolver
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from musterd.workers.authoring.base import Permanent
from musterd.workers.pages.addresses import AddressRules
from musterd.workers.pages.answers import AnswerCut, AnswerParser, BadAnswer, End, Head
from musterd.workers.pages.codings import ACCEPTED, content_decoder

CONNECTIONS = 100  # at once, to all hosts; further requests wait, at most the pool timeout
CHUNK_BYTES = 64 * 1024


class AddressRefused(Permanent):
    """The operator's rules forbid this host or its address."""


class BodyBroken(aiohttp.ClientPayloadError):
    """The body of an answer broke; `cut` if only its end is missing."""

    def __init__(self, reason: str, cut: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cut = cut


# -- what may be connected to -------------------------------------------------------------------


class _CheckedResolver(ThreadedResolver):
    """Resolves names to the addresses that the rules allow.

    aiohttp connects to the addresses of its resolver and asks nobody else, so the checked address
    is the address of the connection.
    """

    def __init__(self, rules: AddressRules, proxy_hosts: Set[str]) -> None:
        super().__init__()
        self._rules = rules
        self._proxy_hosts = proxy_hosts  # the operator's own: the rules are for sites

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the allowed addresses; AddressRefused if there is none."""
        found = await super().resolve(host, port, family)
        if host in self._proxy_hosts:
            return found
        refused = {each["host"]: self._rules.check(host, each["host"]) for each in found}
        allowed = [each for each in found if refused[each["host"]] is None]
        if found and not allowed:
            raise AddressRefused(_refusal(next(filter(None, refused.values()))))
        return allowed


def _refusal(reason: str) -> str:
    return f"not allowed by the pool's options `allow` and `deny`: {reason}"


def check_host(rules: AddressRules, host: str | None) -> None:
    """Raise AddressRefused where the name, or an address in its place, decides alone."""
    reason = rules.check(host or "")
    if reason is not None:
        raise AddressRefused(_refusal(reason))


def open_connector(
    rules: AddressRules | None = None,
    limit: int = CONNECTIONS,
    proxy_hosts: Set[str] = frozenset(),
) -> aiohttp.TCPConnector:
    """Return connections for sessions to share; the caller closes them.

    `proxy_hosts` are not subject to the rules; the caller may add more of them later.
    """
    if not rules:
        return _Connector(limit=limit)
    return _Connector(limit=limit, resolver=_CheckedResolver(rules, proxy_hosts))


def open_session(
    connector: aiohttp.BaseConnector,
    headers: dict[str, str],
    rules: AddressRules | None = None,
    cookies: aiohttp.abc.AbstractCookieJar | None = None,
    owned: bool = False,
) -> aiohttp.ClientSession:
    """Return a session, which the caller closes; an `owned` connector is closed with it."""

    async def check(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        assert rules is not None
        check_host(rules, request.url.host)  # of each redirect, too
        return await handler(request)

    return aiohttp.ClientSession(
        connector=connector,
        connector_owner=owned,
        headers={hdrs.ACCEPT_ENCODING: ACCEPTED} | headers,
        cookie_jar=cookies,
        auto_decompress=False,
        middlewares=(check,) if rules else (),
    )


# -- bodies -------------------------------------------------------------------------------------


async def body_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body in pieces, without its Content-Encoding.

    Raises BodyBroken, BadCoding or CodingCut; a caller that counts the pieces may stop at any time.
    """
    written = ", ".join(response.headers.getall(hdrs.CONTENT_ENCODING, ()))
    decoder = content_decoder(written)
    async for data in response.content.iter_chunked(CHUNK_BYTES):
        if decoder is None:
            yield data
        else:
            for piece in decoder.decode(data):
                yield piece
    if decoder is not None:
        decoder.finish()


# -- our parser in aiohttp ----------------------------------------------------------------------


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = lambda: _Protocol(self._loop)  # type: ignore[assignment]


class _Protocol(ResponseHandler):
    """aiohttp's protocol with our parser."""

    reset: BaseException | None = None  # why the connection was lost, where it was not closed

    def set_response_params(
        self,
        *,
        timer: Any = None,
        skip_payload: bool = False,
        read_bufsize: int = 2**16,
        **params: Any,
    ) -> None:
        """Begin one answer. Data that came before the request are read by our parser, too."""
        early, self._tail = self._tail, b""
        super().set_response_params(
            timer=timer, skip_payload=skip_payload, read_bufsize=read_bufsize, **params
        )
        self._parser = _Feeder(self, timer, skip_payload, read_bufsize)  # type: ignore[assignment]
        if early:
            self.data_received(early)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Keep the reason: a body that a reset has ended is not complete."""
        self.reset = exc
        super().connection_lost(exc)

    def abandon(self) -> None:
        """Take no further answer from this connection."""
        self.force_close()
        if self.transport is not None:
            self.transport.close()


class _Feeder:
    """Replaces aiohttp's parser: feeds what AnswerParser finds into aiohttp's streams."""

    def __init__(self, protocol: _Protocol, timer: Any, skip_payload: bool, size: int) -> None:
        self._protocol = protocol
        self._parser = AnswerParser(has_body=not skip_payload)
        self._timer = timer
        self._size = size
        self._payload: StreamReader | None = None

    def pause_reading(self) -> None:
        """Do nothing: the transport is paused, and the data already here are few."""

    def feed_data(
        self, data: bytes
    ) -> tuple[list[tuple[RawResponseMessage, StreamReader]], bool, bytes]:
        """Return what aiohttp's parser does: (messages, protocol switched, left-over data)."""
        messages: list[tuple[RawResponseMessage, StreamReader]] = []
        body: list[bytes] = []
        try:
            for event in self._parser.feed(data):
                if isinstance(event, bytes):
                    body.append(event)
                elif isinstance(event, Head):
                    messages.append(self._begin(event))
                else:
                    self._flush(body)
                    self._end(event)
            self._flush(body)
        except BadAnswer as error:
            if self._payload is None:
                raise HttpProcessingError(code=0, message=str(error)) from None
            self._break(str(error), cut=False)
        return messages, False, b""

    def feed_eof(self) -> str | None:
        """End the connection; return what to report where no answer came."""
        if self._payload is None:
            how = "within the answer" if self._parser.begun else "without an answer"
            return f"the connection was closed {how}"
        reset = self._protocol.reset
        if reset is not None and self._parser.until_eof:
            self._break(f"the connection was lost within the body: {reset}", cut=True)
            return None
        try:
            for event in self._parser.eof():
                assert isinstance(event, End)
                self._end(event)
        except AnswerCut as error:
            self._break(str(error), cut=True)
        except BadAnswer as error:
            self._break(str(error), cut=False)
        return None

    def _begin(self, head: Head) -> tuple[RawResponseMessage, StreamReader]:
        payload: StreamReader = EMPTY_PAYLOAD
        if head.status >= 200:
            payload = StreamReader(
                self._protocol, self._size, timer=self._timer, loop=self._protocol._loop
            )
            self._payload = payload
        message = RawResponseMessage(
            HttpVersion11,
            head.status,
            head.reason,
            CIMultiDictProxy(CIMultiDict(head.headers)),
            (),
            not head.keep_alive,
            None,
            False,
            head.chunked,
        )
        return message, payload

    def _flush(self, body: list[bytes]) -> None:
        if body:
            assert self._payload is not None
            self._payload.feed_data(body[0] if len(body) == 1 else b"".join(body))
            body.clear()

    def _end(self, end: End) -> None:
        assert self._payload is not None
        if end.more:
            # before the end is reported, which gives the connection back
            self._protocol.force_close()
        if not self._payload.is_eof():
            self._payload.feed_eof()
        elif end.more:
            self._protocol.abandon()  # it may wait in the pool already

    def _break(self, reason: str, cut: bool) -> None:
        assert self._payload is not None
        if not self._payload.is_eof():
            self._payload.set_exception(BodyBroken(reason, cut))
        self._protocol.abandon()
