"""The parser worker is polite and cheap: conditional requests, proxies, robots.txt, fetchers."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from musterd.ipc.errors import ChallengePage, ConfigurationError, EmptyPage, LoggedOut, ProxyFailed
from musterd.ipc.wire.messages import Fetching, Lease
from musterd.workers.authoring.base import Context, Permanent, Retry
from musterd.workers.metrics import metrics
from musterd.workers.pages import proxies, robots
from musterd.workers.pages.connections import AddressRefused
from musterd.workers.pages.http import (
    BadRequest,
    HttpError,
    Page,
    PageTooLarge,
    PermanentHttpError,
    Request,
    SiteTimeout,
)
from musterd.workers.pages.proxies import NoProxyLeft
from musterd.workers.pages.robots import RobotsDisallowed
from musterd.workers.parser import ParserWorker
from musterd.workers.toolkit import MemoryState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PRICE = {"price": ".price"}
WATCHED = msgspec.msgpack.encode([])
NOBODY = "http://127.0.0.1:9"  # the port of `discard`, where nobody listens


def context(
    state: MemoryState | None = None, *, watch: bytes = b"", session: str = "", **fetching: Any
) -> Context:
    """Return the context of a task whose target says this about fetching."""
    said = Fetching(**fetching) if fetching else None
    lease = Lease(1, "t", "extract", b"", 1, 0, session=session, watch=watch, fetching=said)
    ctx = Context("task", deadline=time.monotonic() + 60, lease=lease)
    ctx.state = state or MemoryState()
    return ctx


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
async def serving(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Yield the address of a server that answers every request with `handler`."""
    runner = web.ServerRunner(web.Server(handler), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Shop:
    """A page with a price and validators, by which it answers 304; requests are kept."""

    def __init__(self, price: str = "49.00", **headers: str) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.page = f"<p class=price>{price}</p><p>kites</p>"
        self.asked: list[web.BaseRequest] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(request)
        etag = self.headers.get("ETag", "")
        if etag and request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        return web.Response(text=self.page, content_type="text/html", headers=self.headers)

    @property
    def conditions(self) -> list[str | None]:
        return [each.headers.get("If-None-Match") for each in self.asked]


def not_modified() -> float:
    """Return how often an unchanged page was counted since the last call."""
    return sum(each.value for each in metrics.take() if each.name == "parser_not_modified")


# -- conditional requests -----------------------------------------------------------------------


def test_an_unchanged_page_costs_a_304_and_gives_the_same_result() -> None:
    async def run() -> None:
        shop, state = Shop(ETag='"a"'), MemoryState()
        async with serving(shop.answer) as url, opened() as worker:
            not_modified()
            first = await worker.extract(context(state, watch=WATCHED), url, PRICE)
            shop.page = ""  # what comes with a 304 is not read
            assert await worker.extract(context(state, watch=WATCHED), url, PRICE) == first
            assert not_modified() == 1
            shop.page, shop.headers["ETag"] = "<p class=price>39.00</p>", '"b"'
            changed = await worker.extract(context(state, watch=WATCHED), url, PRICE)
            assert changed == {"price": "39.00"}
            await worker.extract(context(state, watch=WATCHED), url, PRICE)
        assert shop.conditions == [None, '"a"', '"a"', '"b"']
        assert not_modified() == 1

    asyncio.run(run())


def test_fetch_gives_the_same_page_without_its_body_being_sent() -> None:
    async def run() -> None:
        shop, state = Shop(ETag='W/"a"'), MemoryState()
        async with serving(shop.answer) as url, opened(conditional=True) as worker:
            first = await worker.fetch(context(state), url)
            assert (first["status"], "price" in first["text"]) == (200, True)
            assert await worker.fetch(context(state), url) == first
        assert shop.conditions == [None, 'W/"a"']

    asyncio.run(run())


def test_what_a_session_shows_is_not_kept() -> None:
    assert context(session="acme").private
    assert not context().private


@pytest.mark.parametrize(
    ("options", "given", "task", "asks"),
    [
        ({}, {}, {"watch": WATCHED}, True),
        ({}, {}, {}, False),
        ({}, {"conditional": True}, {}, True),
        ({"conditional": True}, {}, {}, True),
        ({"conditional": False}, {}, {"watch": WATCHED}, False),
        ({"conditional": True}, {"conditional": False}, {"watch": WATCHED}, False),
        ({"conditional": True}, {"headers": {"If-None-Match": '"mine"'}}, {}, False),
    ],
)
def test_who_asks_whether_a_page_has_changed(
    options: dict[str, Any], given: dict[str, Any], task: dict[str, Any], asks: bool
) -> None:
    async def run() -> None:
        shop, state = Shop(ETag='"a"'), MemoryState()
        async with serving(shop.answer) as url, opened(**options) as worker:
            for _ in range(2):
                result = await worker.extract(context(state, **task), url, PRICE, **given)
                assert result == {"price": "49.00"}
        assert (shop.conditions[1] == '"a"') == asks

    asyncio.run(run())


def test_other_selectors_headers_and_addresses_are_asked_for_in_full() -> None:
    async def run() -> None:
        shop, state = Shop(ETag='"a"'), MemoryState()
        async with serving(shop.answer) as url, opened(conditional=True) as worker:
            await worker.extract(context(state), url, PRICE)
            assert await worker.extract(context(state), url, {"p": "[]p"}) == {
                "p": ["49.00", "kites"]
            }
            await worker.extract(context(state), url, PRICE, headers={"Accept-Language": "de"})
            await worker.extract(context(state), url + "/?page=2", PRICE)
        async with serving(shop.answer) as url, opened(conditional=True, user_agent="b") as worker:
            await worker.extract(context(state), url, PRICE)
        assert shop.conditions == [None] * 5

    asyncio.run(run())


def test_a_304_for_another_page_is_not_believed() -> None:
    """A redirect may lead elsewhere today, where another page happens to have the same ETag."""

    async def run() -> None:
        state, target = MemoryState(), ["/en"]

        async def answer(request: web.BaseRequest) -> web.Response:
            if request.path == "/":
                return web.Response(status=302, headers={"Location": target[0]})
            if request.headers.get("If-None-Match") == '"1"':
                return web.Response(status=304, headers={"ETag": '"1"'})
            text = f"<p class=price>{request.path}</p>"
            return web.Response(text=text, content_type="text/html", headers={"ETag": '"1"'})

        async with serving(answer) as url, opened(conditional=True) as worker:
            assert await worker.extract(context(state), url, PRICE) == {"price": "/en"}
            not_modified()
            assert await worker.extract(context(state), url, PRICE) == {"price": "/en"}
            assert not_modified() == 1
            target[0] = "/de"
            assert await worker.extract(context(state), url, PRICE) == {"price": "/de"}
            assert not_modified() == 0

    asyncio.run(run())


def test_a_304_that_nobody_asked_for_is_an_empty_page() -> None:
    async def run() -> None:
        async def answer(_: web.BaseRequest) -> web.Response:
            return web.Response(status=304)

        async with serving(answer) as url, opened() as worker:
            assert await worker.extract(context(), url, PRICE) == {"price": None}
            with pytest.raises(EmptyPage):
                await worker.extract(context(watch=WATCHED), url, PRICE)

    asyncio.run(run())


def test_a_result_without_a_value_is_not_kept() -> None:
    async def run() -> None:
        shop, state = Shop(ETag='"a"'), MemoryState()
        shop.page = "<p>soon</p>"
        async with serving(shop.answer) as url, opened(conditional=True) as worker:
            assert await worker.extract(context(state), url, PRICE) == {"price": None}
            await worker.extract(context(state), url, PRICE)
        assert shop.conditions == [None, None]

    asyncio.run(run())


# -- kinds of pages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("html", "error"),
    [
        ("<form><input type=password></form>", LoggedOut),
        ("<title>Just a moment...</title><p>wait</p>", ChallengePage),
        ("<body></body>", EmptyPage),
    ],
)
def test_a_watched_run_fails_by_what_the_page_is(html: str, error: type[Exception]) -> None:
    async def run() -> None:
        shop = Shop()
        shop.page = html
        async with serving(shop.answer) as url, opened() as worker:
            with pytest.raises(error):
                await worker.extract(context(watch=WATCHED), url, PRICE)
            assert await worker.extract(context(), url, PRICE) == {"price": None}

    asyncio.run(run())


# -- proxies ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a failed proxy out for the whole test, however slow the machine is."""
    monkeypatch.setattr(proxies, "PAUSE_SECONDS", proxies.PAUSE_SECONDS_MAX)


class Forward:
    """A proxy for plain HTTP and a tunnel; `status` refuses every request, if not 0."""

    def __init__(self, status: int = 0, **headers: str) -> None:
        self.status = status
        self.headers = headers
        self.served: list[str] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, url, _ = head.split("\r\n")[0].split(" ")
            self.served.append(f"{method} {url}")
            if self.status:
                extra = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
                answer = f"HTTP/1.1 {self.status} No\r\n{extra}Content-Length: 0\r\n\r\n"
            else:
                body = f"<p class=price>by proxy</p>{url}"
                answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}"
            writer.write(answer.encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass


Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(accept: Accept) -> AsyncIterator[str]:
    """Yield the address of a server; wait for its connections, which the clients have closed."""
    serving: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        await accept(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*serving)


@asynccontextmanager
async def forwarding(*served: Forward) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(listening(each.accept)) for each in served]


def test_proxies_of_a_target_take_turns_and_go_before_those_of_the_pool() -> None:
    async def run() -> None:
        three = [Forward(), Forward(), Forward()]
        async with (
            forwarding(*three) as (first, second, of_pool),
            opened(proxies=[of_pool]) as worker,
        ):
            for _ in range(4):
                ctx = context(proxies=(first, second))
                await worker.extract(ctx, "http://shop.example/kites", PRICE)
            await worker.extract(context(), "http://shop.example/kites", PRICE)
        assert [len(each.served) for each in three] == [2, 2, 1]
        assert three[0].served[0] == "GET http://shop.example/kites"

    asyncio.run(run())


@pytest.mark.parametrize(
    "dead",
    [
        Forward(407),
        Forward(502, **{"Proxy-Status": "squid; error=connection_refused"}),
        Forward(503, **{"X-Squid-Error": "ERR_CANNOT_FORWARD 0"}),
        None,
    ],
)
def test_a_dead_proxy_costs_no_task_and_is_left_out(dead: Forward | None) -> None:
    async def run() -> None:
        alive = Forward()
        async with forwarding(alive, dead or Forward()) as (good, bad), opened() as worker:
            for _ in range(6):
                ctx = context(proxies=(good, NOBODY if dead is None else bad))
                assert await worker.extract(ctx, "http://shop.example/", PRICE) == {
                    "price": "by proxy"
                }
        assert len(alive.served) == 6
        assert dead is None or len(dead.served) <= 1

    asyncio.run(run())


def test_a_tunnel_that_is_refused_is_the_proxys_failure_and_all_dead_is_said() -> None:
    async def run() -> None:
        refusing = Forward(502)
        async with forwarding(refusing) as (proxy,), opened() as worker:
            url = "https://shop.example/"
            with pytest.raises(ProxyFailed, match=r"did not connect to https://shop\.example/"):
                await worker.fetch(context(proxies=(proxy,)), url)
            with pytest.raises(NoProxyLeft, match=r"all 1 proxies for shop\.example") as raised:
                await worker.fetch(context(proxies=(proxy,)), url)
            assert raised.value.retry_after > 0
            with pytest.raises(ProxyFailed, match=r"other\.example"):  # left out for one site only
                await worker.fetch(context(proxies=(proxy,)), "https://other.example/")
        assert len(refusing.served) == 2

    asyncio.run(run())


def test_an_error_of_the_site_behind_a_proxy_is_the_sites() -> None:
    async def run() -> None:
        passing = Forward(502)  # nothing says that the proxy made it
        async with forwarding(passing) as (proxy,), opened() as worker:
            for _ in range(2):
                with pytest.raises(HttpError, match="HTTP 502"):
                    await worker.fetch(context(proxies=(proxy,)), "http://shop.example/")

    asyncio.run(run())


def test_a_proxy_that_accepts_and_never_connects_is_a_timeout_of_the_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("musterd.workers.pages.http.POOL_SECONDS", 0.5)

    async def run() -> None:
        async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.read()

        async with listening(silent) as proxy, opened() as worker:
            with pytest.raises(SiteTimeout):
                await worker.fetch(context(proxies=(proxy,)), "https://shop.example/")

    asyncio.run(run())


def test_address_rules_hold_behind_proxies_or_the_request_is_refused() -> None:
    async def run() -> None:
        proxy = Forward()
        async with forwarding(proxy) as (address,):
            async with opened(allow=["*.shop.example"]) as worker:
                by_name = address.replace("127.0.0.1", "localhost")  # which the rules do not allow
                ctx = context(proxies=(by_name,))
                await worker.extract(ctx, "http://www.shop.example/", PRICE)
                with pytest.raises(AddressRefused):
                    await worker.extract(ctx, "http://other.example/", PRICE)
            async with opened(deny=["private"]) as worker:
                with pytest.raises(AddressRefused, match="proxy that resolves names"):
                    await worker.extract(context(proxies=(address,)), "http://a.example/", PRICE)
        assert proxy.served == ["GET http://www.shop.example/"]

    asyncio.run(run())


def test_socks_is_for_browsers() -> None:
    async def run() -> None:
        async with opened() as worker:
            with pytest.raises(BadRequest, match="SOCKS"):
                await worker.fetch(
                    context(proxies=("socks5://a.example:1080",)), "http://b.example"
                )
            async with forwarding(Forward()) as (good,):  # a list for parsers and browsers
                mixed = [*(f"socks5://a.example:{port}" for port in range(1, 5)), good]
                for _ in mixed:
                    await worker.fetch(context(proxies=mixed), "http://b.example")

    asyncio.run(run())


# -- robots.txt ---------------------------------------------------------------------------------


class Rules:
    """A site with this robots.txt, or with an answer of this status in its place."""

    def __init__(self, text: str = "", status: int = 200) -> None:
        self.text = text
        self.status = status
        self.asked: list[str] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/robots.txt":
            return web.Response(text=self.text, status=self.status)
        return web.Response(text="<p class=price>49</p>", content_type="text/html")


def test_a_page_that_robots_txt_disallows_is_refused_for_good() -> None:
    async def run() -> None:
        site = Rules("User-agent: *\nDisallow: /\n\nUser-agent: musterd\nDisallow: /cart\n")
        async with serving(site.answer) as url, opened(robots=True) as worker:
            assert await worker.extract(context(), f"{url}/kites", PRICE) == {"price": "49"}
            with pytest.raises(RobotsDisallowed, match=r"/robots\.txt") as raised:
                await worker.fetch(context(), f"{url}/cart/1")
            assert isinstance(raised.value, Permanent)
            with pytest.raises(RobotsDisallowed):  # the name that the task goes by counts
                await worker.fetch(context(), f"{url}/kites", headers={"user-agent": "other"})
            await worker.fetch(context(robots=False), f"{url}/cart/1")
        assert site.asked == ["/robots.txt", "/kites", "/cart/1"]

    asyncio.run(run())


def test_a_target_may_ask_for_robots_txt_alone() -> None:
    async def run() -> None:
        site = Rules("User-agent: *\nDisallow: /\n")
        async with serving(site.answer) as url, opened() as worker:
            with pytest.raises(RobotsDisallowed):
                await worker.fetch(context(robots=True), url)
            await worker.fetch(context(), url)

    asyncio.run(run())


def test_a_site_without_robots_txt_allows_everything_and_one_that_fails_nothing() -> None:
    async def run() -> None:
        without, failing = Rules(status=404), Rules(status=503)
        async with opened(robots=True) as worker:
            async with serving(without.answer) as url:
                await worker.fetch(context(), url)
                await worker.fetch(context(), url)
            async with serving(failing.answer) as url:
                with pytest.raises(HttpError, match="503"):
                    await worker.fetch(context(), url)
        assert without.asked == ["/robots.txt", "/", "/"]
        assert failing.asked == ["/robots.txt"]

    asyncio.run(run())


def test_robots_txt_is_fetched_with_the_same_limits_and_rules() -> None:
    async def run() -> None:
        large, inner = Rules("#" * 600_000), Rules()

        async def lead(request: web.BaseRequest) -> web.Response:
            return web.Response(status=302, headers={"Location": f"{away}{request.path}"})

        async with (
            opened(robots=True, deny=["127.0.0.2"]) as worker,
            serving(inner.answer, "127.0.0.2") as away,
        ):
            async with serving(large.answer) as url:
                with pytest.raises(PageTooLarge):
                    await worker.fetch(context(), url)
            async with serving(lead) as url:
                with pytest.raises(AddressRefused):
                    await worker.fetch(context(), url)
        assert inner.asked == []

    asyncio.run(run())


def test_a_crawl_delay_is_kept_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks of one moment: the second waits, the third comes back later."""
    waits: list[float] = []
    frozen = time.time()

    class Unlocked(Context):
        def lock(self, name: str, timeout: Any = 0) -> Any:
            return contextlib.AsyncExitStack()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> None:
        site, state = Rules("User-agent: *\nCrawl-delay: 8\n"), MemoryState()
        async with serving(site.answer) as url, opened(robots=True) as worker:
            await worker.fetch(unlocked(MemoryState()), f"{url}/before")  # robots.txt is known
            clock = SimpleNamespace(time=lambda: frozen, monotonic=time.monotonic)
            monkeypatch.setattr(robots, "time", clock)
            monkeypatch.setattr(robots, "asyncio", SimpleNamespace(sleep=sleep))
            for ctx in (unlocked(state), unlocked(state)):
                await worker.fetch(ctx, url)
            with pytest.raises(Retry, match="8 s between two pages") as raised:
                await worker.fetch(unlocked(state), url)
        assert waits == [0, 8]
        assert raised.value.after == 16
        assert site.asked == ["/robots.txt", "/before", "/", "/"]

    def unlocked(state: MemoryState) -> Context:
        ctx = Unlocked("task", deadline=time.monotonic() + 60)
        ctx.state = state
        return ctx

    asyncio.run(run())


# -- other fetchers -----------------------------------------------------------------------------


@pytest.fixture
def fetcher(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with fetchers, as an operator may have one; `asked` are their requests."""
    module: Any = ModuleType("own_fetcher")
    module.asked = []

    async def get(request: Request, deadline: float) -> Page:
        module.asked.append(request)
        status = int(request.url.rpartition("/")[2] or 200)
        text = "<p class=price>by fetcher</p>"
        return Page(status, request.url, {"retry-after": "7"}, text, "utf-8", 0.1)

    async def endless(_: Request, __: float) -> Page:
        await asyncio.Event().wait()
        raise AssertionError

    module.get, module.endless, module.plain = get, endless, lambda *_: None
    monkeypatch.setitem(sys.modules, "own_fetcher", module)
    return module


def test_a_fetcher_of_the_configuration_gets_the_whole_request(fetcher: Any) -> None:
    async def run() -> None:
        options = {"fetcher": "own_fetcher:get", "headers": {"X-Shop": "1"}, "proxies": [NOBODY]}
        async with opened(**options) as worker:
            url = "http://shop.example/"
            assert await worker.extract(context(), url, PRICE) == {"price": "by fetcher"}
            (asked,) = fetcher.asked
            assert asked.headers == {"User-Agent": "musterd/0.1", "X-Shop": "1"}
            assert (asked.url, asked.proxy) == (url, NOBODY)
            with pytest.raises(PermanentHttpError, match="404"):
                await worker.fetch(context(), url + "404")
            with pytest.raises(HttpError) as raised:
                await worker.fetch(context(), url + "429")
            assert raised.value.retry_after == 7
            with pytest.raises(PageTooLarge):
                await worker.fetch(context(), url, max_bytes=10)
            with pytest.raises(BadRequest):
                await worker.fetch(context(), "file:///etc/passwd")

    asyncio.run(run())


def test_a_fetcher_has_to_keep_the_deadline(fetcher: Any) -> None:
    async def run() -> None:
        async with opened(fetcher="own_fetcher:endless") as worker:
            ctx = context()
            ctx.deadline = time.monotonic() + 0.2
            with pytest.raises(SiteTimeout):
                await worker.fetch(ctx, "http://shop.example/")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fetcher": "own_fetcher:none"}, "is no async function"),
        ({"fetcher": "own_fetcher:plain"}, "is no async function"),
        ({"fetcher": "no_such_module:get"}, "cannot be imported: ModuleNotFoundError"),
        ({"fetcher": "own_fetcher:get", "deny": ["private"]}, "nobody checks where it connects"),
        ({"proxies": [NOBODY], "proxy": NOBODY}, "both given"),
        ({"proxies": [NOBODY], "deny": ["private"]}, "the proxy that resolves names"),
        ({"proxies": ["http://bob:hush@proxy.example:1"]}, "entry 1 of `proxies` has a login"),
        ({"proxies": [NOBODY, "proxy.example"]}, "entry 2 of `proxies` is not scheme://host:port"),
    ],
)
def test_options_that_cannot_work_are_named(
    fetcher: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as raised:
        ParserWorker.check_options(options)
    assert "hush" not in str(raised.value)


def test_no_argument_of_a_task_names_a_fetcher() -> None:
    for task in (ParserWorker.fetch, ParserWorker.extract):
        assert "fetcher" not in task.__annotations__
