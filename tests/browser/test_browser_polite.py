"""Proxies in turn, robots.txt and kinds of pages, with both backends."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.ipc.errors import ChallengePage, ConfigurationError, LoggedOut, ProxyFailed
from musterd.ipc.wire.messages import Fetching, Lease
from musterd.workers.authoring.base import Context
from musterd.workers.browser import BrowserWorker, find_executable
from musterd.workers.pages import proxies
from musterd.workers.pages.http import BadRequest
from musterd.workers.pages.proxies import NoProxyLeft
from musterd.workers.pages.robots import RobotsDisallowed

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

PATIENCE_SECONDS = 90
NOBODY = "http://127.0.0.1:9"  # the port of `discard`, where nobody listens
PRICE = {"price": ".price"}
PAGES = {
    "/robots.txt": "User-agent: *\nDisallow: /cart\n",
    "/login": "<form><input type=password></form>",
    "/challenge": "<title>Just a moment...</title><p>wait</p>",
}


class Site:
    """A site, and a proxy for plain HTTP; `status` is its answer to everything, if not 0."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.asked: list[str] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, url, _ = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)
            path = url.decode().removeprefix("http://shop.example")
            self.asked.append(f"{method.decode()} {path}")
            body = PAGES.get(path, "<p class=price>49.00</p>")
            head = f"{self.status or 200} Said\r\nContent-Type: text/html"
            if self.status == 407:
                head += '\r\nProxy-Authenticate: Basic realm="proxy"'
            text = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write((text + body).encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def pages(self) -> list[str]:
        return [each for each in self.asked if "favicon" not in each]


@asynccontextmanager
async def listening(*sites: Site) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for each in sites:
            server = await asyncio.start_server(each.accept, "127.0.0.1", 0)
            stack.callback(server.close)
            addresses.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield addresses


def context(watch: bytes = b"", **fetching: Any) -> Context:
    lease = Lease(1, "t", "extract", b"", 1, 0, watch=watch, fetching=Fetching(**fetching))
    return Context("task", deadline=math.inf, lease=lease)


def told(backend: str, story: Callable[[BrowserWorker], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        worker = BrowserWorker()
        worker.pool, worker.options = "browser", {"backend": backend, **options}
        await worker.open()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await story(worker)
        finally:
            await worker.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a failed proxy out for the whole test, however slow the machine is."""
    monkeypatch.setattr(proxies, "PAUSE_SECONDS", proxies.PAUSE_SECONDS_MAX)


@pytest.fixture(params=["playwright", "cdp"])
def backend(request: pytest.FixtureRequest, scratch: Path) -> str:
    return str(request.param)


def test_a_dead_proxy_fails_once_and_the_next_page_goes_by_another(backend: str) -> None:
    proxy, url = Site(), "http://shop.example/kites"

    async def story(worker: BrowserWorker) -> None:
        async with listening(proxy) as (alive,):
            outcomes = []
            for _ in range(3):
                try:
                    await worker.extract(context(proxies=(NOBODY, alive)), url, PRICE)
                    outcomes.append("")
                except ProxyFailed as error:
                    outcomes.append(str(error))
            assert outcomes.count("") == 2
            assert "ERR_PROXY_CONNECTION_FAILED" in "".join(outcomes)
            with pytest.raises(NoProxyLeft, match="all 1 proxies"):
                await worker.extract(context(proxies=(NOBODY,)), url, PRICE)
        assert proxy.pages() == ["GET /kites"] * 2

    told(backend, story)


@pytest.mark.one_backend
def test_a_proxy_that_refuses_is_the_proxys_failure(backend: str) -> None:
    async def story(worker: BrowserWorker) -> None:
        async with listening(Site(407), Site(502)) as (login, refusing):
            for proxy, url, everywhere in (
                (login, "http://shop.example/", True),
                (refusing, "https://shop.example/", False),
            ):
                with pytest.raises(ProxyFailed, match="the proxy") as raised:
                    await worker.render(context(proxies=(proxy,)), url)
                assert raised.value.everywhere == everywhere

    told(backend, story)


@pytest.mark.one_backend
def test_a_proxy_of_the_task_goes_before_those_of_its_target(backend: str) -> None:
    async def story(worker: BrowserWorker) -> None:
        own = Site()
        async with listening(own) as (alive,):
            ctx = context(proxies=(NOBODY,))
            await worker.render(ctx, "http://shop.example/", proxy=alive)
        assert own.pages() == ["GET /"]

    told(backend, story)


@pytest.mark.one_backend
def test_rules_and_proxies_of_a_target_exclude_each_other(backend: str) -> None:
    async def story(worker: BrowserWorker) -> None:
        with pytest.raises(BadRequest, match="a proxy cannot be used together with allow and deny"):
            await worker.render(context(proxies=(NOBODY,)), "http://shop.example/")

    told(backend, story, deny=["private"])
    with pytest.raises(ConfigurationError, match="a proxy cannot be used together"):
        BrowserWorker.check_options({"proxies": [NOBODY], "deny": ["private"]})


@pytest.mark.one_backend
def test_pages_that_are_not_for_programs_are_not_opened(backend: str) -> None:
    site = Site()

    async def story(worker: BrowserWorker) -> None:
        async with listening(site) as (url,):
            await worker.render(context(), f"{url}/kites")
            with pytest.raises(RobotsDisallowed):
                await worker.render(context(), f"{url}/cart")
            await worker.render(context(robots=False), f"{url}/cart")

    told(backend, story, robots=True)
    assert site.pages() == ["GET /robots.txt", "GET /kites", "GET /cart"]


def test_a_watched_run_fails_by_what_the_page_is(backend: str) -> None:
    async def story(worker: BrowserWorker) -> None:
        watch = msgspec.msgpack.encode([])
        async with listening(Site(), Site(403)) as (url, blocking):
            assert await worker.extract(context(), f"{url}/login", PRICE) == {"price": None}
            assert await worker.extract(context(watch), url, PRICE) == {"price": "49.00"}
            with pytest.raises(LoggedOut):
                await worker.extract(context(watch), f"{url}/login", PRICE)
            with pytest.raises(ChallengePage, match="Cloudflare"):
                await worker.extract(context(watch), f"{blocking}/challenge", PRICE)

    told(backend, story)
