"""Fetching behaves as in curl and Chromium, and only goes where the operator's rules allow."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import brotli
import msgspec
import pytest
from aiohttp import web

from musterd.ipc.errors import ConfigurationError
from musterd.workers.authoring.base import Context, Permanent
from musterd.workers.pages import http
from musterd.workers.pages.codings import zstd
from musterd.workers.pages.connections import AddressRefused
from musterd.workers.parser import ParserWorker
from musterd.workers.toolkit import NetworkClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[ParserWorker]:
    worker = ParserWorker()
    worker.pool, worker.index, worker.options = "parser", 0, options
    await worker.open()
    try:
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """Yield the port of a server that answers every request with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def page(_: web.Request) -> web.Response:
    return web.Response(text="page")


def fetched(handler: Handler, url: str = "http://127.0.0.1:{port}/", **options: Any) -> Any:
    async def scenario() -> Any:
        async with serving(handler) as port, opened(**options) as worker:
            return await worker.fetch(Context("task"), url.format(port=port))

    return asyncio.run(scenario())


# -- headers, codings, redirects, challenges ----------------------------------------------------


def test_long_and_many_headers_are_told() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        headers = {f"X-{n}": "tea" for n in range(500)}
        return web.Response(text="page", headers=headers | {"X-Long": "t" * 60_000})

    found = fetched(handler)
    assert (found["text"], found["headers"]["x-499"]) == ("page", "tea")
    assert len(found["headers"]["x-long"]) == 60_000


def test_latin_1_in_a_header_is_told_and_can_be_sent_as_a_result() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(  # type: ignore[attr-defined]
            b"HTTP/1.1 200 D\xe9j\xe0 vu\r\nX-Shop: caf\xe9\r\nContent-Length: 4\r\n\r\npage"
        )
        request.transport.close()
        await asyncio.sleep(30)
        return web.Response()

    found = fetched(handler)
    assert (found["text"], found["headers"]["x-shop"]) == ("page", "café")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("br", brotli.compress),
        ("zstd", zstd.compress),
        ("x-gzip", gzip.compress),
        ("gzip, gzip", lambda data: gzip.compress(gzip.compress(data))),
    ],
)
def test_a_coding_is_asked_for_and_undone(coding: str, pack: Callable[[bytes], bytes]) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "gzip, deflate, br, zstd"
        return web.Response(body=pack(b"tea"), headers={"Content-Encoding": coding})

    assert fetched(handler)["text"] == "tea"

    async def scenario() -> str:
        async with serving(handler) as port, NetworkClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}/")).text

    assert asyncio.run(scenario()) == "tea"


def test_as_many_redirects_as_the_limit_says_are_followed() -> None:
    async def handler(request: web.Request) -> web.Response:
        left = int(request.path.strip("/"))
        if left:
            raise web.HTTPFound(f"/{left - 1}")
        return web.Response(text="there")

    assert http.REDIRECTS_MAX == 10
    assert fetched(handler, "http://127.0.0.1:{port}/10")["text"] == "there"
    with pytest.raises(http.BadRequest, match="more than 10 redirects"):
        fetched(handler, "http://127.0.0.1:{port}/11")

    async def scenario() -> str:
        async with serving(handler) as port, NetworkClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}/10")).text

    assert asyncio.run(scenario()) == "there"


def test_a_site_that_wants_a_login_tells_which() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="shop"'})

    with pytest.raises(http.PermanentHttpError, match='it wants Basic realm="shop"') as caught:
        fetched(handler)
    assert caught.value.challenge == 'Basic realm="shop"'


def test_the_status_of_an_error_is_told_even_if_its_page_is_broken() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(  # type: ignore[attr-defined]
            b"HTTP/1.1 404 Gone\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"
        )
        request.transport.close()
        await asyncio.sleep(30)
        return web.Response()

    with pytest.raises(http.PermanentHttpError, match="HTTP 404 Gone"):
        fetched(handler)


# -- allowed addresses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:{port}/", "127.0.0.1 is denied by 'private'"),
        ("http://localhost:{port}/", "which is denied by 'private'"),
        ("http://[::ffff:127.0.0.1]:{port}/", "denied by 'private'"),
        ("http://169.254.169.254/latest/", "169.254.169.254 is denied by 'private'"),
    ],
)
def test_an_address_that_is_denied_is_never_connected_to(url: str, told: str) -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    with pytest.raises(AddressRefused, match="not allowed by the pool's options") as caught:
        fetched(handler, url, deny=["private"])
    assert told in str(caught.value)
    assert isinstance(caught.value, Permanent)
    assert asked == []


@pytest.mark.parametrize("target", ["http://127.0.0.1:{port}/in", "http://localhost:{port}/in"])
def test_a_redirect_to_what_is_denied_is_not_followed(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's name is allowed, and it redirects to a neighbour."""
    asked: list[str] = []
    resolve_as(monkeypatch, {"shop.example": ["127.0.0.1"]})

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        port = request.url.port
        raise web.HTTPFound(target.format(port=port))

    with pytest.raises(AddressRefused):
        fetched(handler, "http://shop.example:{port}/", allow=["shop.example"])
    assert asked == ["/"]


def resolve_as(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> list[str]:
    """Make each lookup of a name return its next addresses; return the list of lookups."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host in names:
            asked.append(host)
            addresses = names[host]
            host = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_the_address_that_is_checked_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that is public at the check and private a moment later gains nothing."""
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.3)
    asked = resolve_as(monkeypatch, {"evil.example": ["203.0.113.9", "127.0.0.1"]})
    reached: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    with pytest.raises((http.SiteTimeout, http.SiteUnreachable)):
        fetched(handler, "http://evil.example:{port}/", deny=["loopback"])
    assert (asked, reached) == (["evil.example"], [])


def test_what_is_allowed_is_fetched() -> None:
    for rules in ({"allow": ["localhost"]}, {"allow": ["127.0.0.0/8"]}, {"deny": ["link-local"]}):
        assert fetched(page, "http://localhost:{port}/", **rules)["text"] == "page"
    with pytest.raises(AddressRefused, match=r"other\.example is not among the allowed"):
        fetched(page, "http://other.example/", allow=["localhost"])


def test_rules_for_names_hold_through_a_proxy_and_not_for_the_proxy_itself() -> None:
    async def scenario() -> None:
        async with serving(page) as port:
            proxy = f"http://localhost:{port}"
            async with opened(proxy=proxy, allow=["*.example"]) as worker:
                found = await worker.fetch(Context("task"), "http://shop.example/")
                assert found["text"] == "page"
                with pytest.raises(AddressRefused):
                    await worker.fetch(Context("task"), "http://shop.test/")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"deny": ["privat"]}, "write 'private'"),
        ({"allow": ["10.0.0.1/8"]}, "host bits"),
        ({"deny": "private"}, "Expected `array`"),
        ({"deny": ["private"], "proxy": "http://proxy.example"}, "have the proxy refuse them"),
    ],
)
def test_rules_that_cannot_be_kept_are_an_error_of_the_configuration(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ParserWorker.check_options(options)
