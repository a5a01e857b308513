"""The parser worker with real servers on loopback."""

import asyncio
import gzip
import itertools
import time
import traceback
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import pytest
from aiohttp import web

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.demo.sample_site import PROMOS, WAKING, SampleSite
from musterd.workers.authoring.base import Context, Permanent
from musterd.workers.pages import http
from musterd.workers.pages.extraction import InvalidSelector
from musterd.workers.parser import ParserOptions, ParserWorker
from musterd.workers.runtime.run import load

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MEGABYTE = 1024 * 1024
HUSH = "a-key-" + "of-somebody"  # in two parts: a traceback shows lines of this file


def context(seconds: float = 30.0) -> Context:
    return Context("task", deadline=time.monotonic() + seconds)


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
async def sample_site() -> AsyncIterator[SampleSite]:
    site = SampleSite()
    await site.start()
    try:
        yield site
    finally:
        await site.stop()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Yield the address of a server that answers every request with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def fetch_from(handler: Handler, path: str = "/", seconds: float = 30.0, **args: Any) -> Any:
    options = args.pop("options", {})
    async with serving(handler) as url, opened(**options) as worker:
        return await worker.fetch(context(seconds), url + path, **args)


def answering(**response: Any) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(**response)

    return answer


def test_the_runtime_finds_the_tasks_and_checks_their_arguments() -> None:
    handlers = {each.method: each for each in load("musterd.workers.parser:ParserWorker").handlers}
    assert {name: each.options.target for name, each in handlers.items()} == {
        "fetch": "url",
        "extract": "url",
    }
    decode = handlers["fetch"].decode
    given = {"url": "http://shop.example/", "method": "POST", "body": "a=1", "max_bytes": 10}
    assert decode(msgspec.msgpack.encode(given)) == given | {"headers": None, "conditional": None}
    for wrong in (
        {"method": "STEAL"},
        {"headers": {"a": 1}},
        {"max_bytes": "much"},
        {"max_bytes": 0},
    ):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode(given | wrong))


def test_every_promo_of_the_sample_site_is_extracted_whatever_its_encoding() -> None:
    select = {"title": "h1", "price": "css:.price", "code": "xpath://code/text()", "terms": "[]li"}

    async def scenario() -> None:
        async with sample_site() as site, opened() as worker:
            links = await worker.extract(context(), site.url, {"links": "[]a.promo::attr(href)"})
            assert links == {"links": [promo.path for promo in PROMOS]}
            for promo in PROMOS:
                found = await worker.extract(context(), site.url + promo.path, select)
                assert found == {
                    "title": promo.title,
                    "price": promo.price,
                    "code": promo.code,
                    "terms": ["one per customer", "while stocks last"],
                }

    asyncio.run(scenario())


def test_fetch_tells_the_last_url_and_how_it_was_read() -> None:
    async def scenario() -> None:
        async with sample_site() as site, opened() as worker:
            began = time.monotonic()
            page = await worker.fetch(context(), site.url + "/moved")
            assert page["url"] == site.url + PROMOS[0].path
            assert (page["status"], page["encoding"]) == (200, "utf-8")
            assert page["headers"]["content-type"] == "text/html; charset=utf-8"
            assert PROMOS[0].title in page["text"]
            assert 0 < page["elapsed_seconds"] <= time.monotonic() - began
            assert {*page} == {*http.Page.__struct_fields__} - {"redirects"}

    asyncio.run(scenario())


def test_method_headers_body_and_user_agent_reach_the_site() -> None:
    async def echo(request: web.Request) -> web.Response:
        agent, mark = request.headers["User-Agent"], request.headers["X-Mark"]
        every = request.headers["X-Every"]
        return web.Response(text=f"{request.method} {agent} {mark} {every} {await request.text()}")

    page = asyncio.run(
        fetch_from(
            echo,
            method="POST",
            headers={"X-Mark": "m"},
            body="тело",
            options={"user_agent": "bot/1", "headers": {"X-Every": "e"}},
        )
    )
    assert page["text"] == "POST bot/1 m e тело"


def test_connections_are_reused_and_cookies_are_not() -> None:
    seen: list[tuple[Any, dict[str, str]]] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        seen.append((request.transport.get_extra_info("peername"), dict(request.cookies)))
        if request.path == "/":  # cookies have to survive the redirects of their own task
            raise web.HTTPFound("/in", headers={"Set-Cookie": "session=1; Path=/"})
        return web.Response(text="in")

    async def scenario() -> None:
        async with serving(handler) as url, opened() as worker:
            await worker.fetch(context(), url + "/")
            await worker.fetch(context(), url + "/in")

    asyncio.run(scenario())
    assert [cookies for _, cookies in seen] == [{}, {"session": "1"}, {}]
    assert len({peer for peer, _ in seen}) == 1


def test_tasks_side_by_side_keep_their_cookies_to_themselves() -> None:
    """With `concurrency`, several tasks run at once in one worker."""
    both = asyncio.Barrier(2)

    async def handler(request: web.Request) -> web.Response:
        user = request.query["user"]
        if request.path == "/":
            await both.wait()
            raise web.HTTPFound(f"/in?user={user}", headers={"Set-Cookie": f"{user}=1; Path=/"})
        await both.wait()
        return web.json_response(dict(request.cookies))

    async def scenario() -> list[Any]:
        async with serving(handler) as url, opened() as worker:
            fetches = [worker.fetch(context(), f"{url}/?user={user}") for user in ("a", "b")]
            return [page["text"] for page in await asyncio.gather(*fetches)]

    assert asyncio.run(scenario()) == ['{"a": "1"}', '{"b": "1"}']


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": -3}, {"max_bytes": 0}])
def test_a_limit_that_cannot_be_is_the_tasks_own_mistake(wrong: dict[str, Any]) -> None:
    """Otherwise the site would be blamed for a timeout, and left alone."""
    for handler in load("musterd.workers.browser:BrowserWorker").handlers:
        with pytest.raises(msgspec.ValidationError):
            handler.decode(msgspec.msgpack.encode({"url": "http://shop.example/"} | wrong))


def test_timeouts_are_left_to_the_configuration() -> None:
    """A timeout that a task declares overrides those of targets, classes and pools."""
    for worker in ("parser:ParserWorker", "browser:BrowserWorker"):
        for handler in load(f"musterd.workers.{worker}").handlers:
            assert handler.options.timeout_ns == 0, handler.method


@pytest.mark.parametrize(
    ("status", "permanent"),
    [(status, True) for status in (400, 403, 404, 410)]
    + [(status, False) for status in (408, 425, 429, 500, 502, 503)],
)
def test_http_errors_carry_their_status_and_say_whether_to_retry(
    status: int, permanent: bool
) -> None:
    with pytest.raises(http.HttpError) as caught:
        asyncio.run(fetch_from(answering(status=status, headers={"Retry-After": "7"})))
    error = caught.value
    assert (error.status, error.retry_after) == (status, 7.0)
    assert isinstance(error, Permanent) is permanent
    assert f"HTTP {status}" in str(error)
    assert error.url in str(error)


def test_a_retry_after_date_is_counted_by_the_site_own_clock() -> None:
    headers = {
        "Date": "Mon, 05 Jan 2015 10:00:00 GMT",
        "Retry-After": "Mon, 05 Jan 2015 10:00:42 GMT",
    }
    with pytest.raises(http.HttpError) as caught:
        asyncio.run(fetch_from(answering(status=503, headers=headers)))
    assert caught.value.retry_after == 42.0


def test_a_site_that_wakes_up_is_parsed_at_the_second_attempt() -> None:
    async def scenario() -> None:
        async with sample_site() as site, opened() as worker:
            with pytest.raises(http.HttpError) as caught:
                await worker.extract(context(), site.url + "/waking", {"code": ".code"})
            assert (caught.value.status, caught.value.retry_after) == (503, 1.0)
            found = await worker.extract(context(), site.url + "/waking", {"code": ".code"})
            assert found == {"code": WAKING.code}

    asyncio.run(scenario())


def test_the_session_survives_an_error_in_the_middle_of_a_body() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/good":
            return web.Response(text="good")
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"some")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def scenario() -> None:
        async with serving(handler) as url, opened() as worker:
            with pytest.raises(http.SiteUnreachable, match="996 bytes before the end"):
                await worker.fetch(context(), url + "/cut")
            assert (await worker.fetch(context(), url + "/good"))["text"] == "good"

    asyncio.run(scenario())


def test_a_declared_length_over_the_limit_is_refused_before_the_body() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "2000"})
        await response.prepare(request)
        await asyncio.sleep(30)  # the body never comes
        return response

    with pytest.raises(http.PageTooLarge, match=r"size limit of 1000 bytes.*2000"):
        asyncio.run(fetch_from(handler, max_bytes=1000))


@pytest.mark.parametrize("given", ["task", "options"])
def test_an_endless_body_is_cut_at_the_size_limit(given: str) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 10_000)
        except ConnectionResetError:
            return response

    args: dict[str, Any] = {"max_bytes": MEGABYTE}
    with pytest.raises(http.PageTooLarge, match=f"size limit of {MEGABYTE} bytes") as caught:
        asyncio.run(fetch_from(endless, **(args if given == "task" else {"options": args})))
    assert isinstance(caught.value, Permanent)


def test_a_body_of_exactly_the_limit_is_read() -> None:
    page = asyncio.run(fetch_from(answering(body=b"x" * 5000), max_bytes=5000))
    assert len(page["text"]) == 5000


def test_a_compressed_bomb_is_counted_decompressed_and_never_held() -> None:
    bomb = gzip.compress(bytes(100 * MEGABYTE))
    assert len(bomb) < MEGABYTE
    handler = answering(body=bomb, headers={"Content-Encoding": "gzip"})
    tracemalloc.start()
    try:
        with pytest.raises(http.PageTooLarge):
            asyncio.run(fetch_from(handler, max_bytes=MEGABYTE))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * MEGABYTE


def test_redirects_without_end_are_refused() -> None:
    hops = itertools.count()

    async def handler(_: web.Request) -> web.Response:
        raise web.HTTPFound(f"/{next(hops)}")

    with pytest.raises(http.BadRequest, match=f"more than {http.REDIRECTS_MAX} redirects"):
        asyncio.run(fetch_from(handler))
    assert next(hops) == http.REDIRECTS_MAX + 1


def test_a_redirect_to_another_scheme_is_refused() -> None:
    handler = answering(status=302, headers={"Location": "file:///etc/passwd"})
    with pytest.raises(http.BadRequest, match="redirects to an address that cannot be fetched"):
        asyncio.run(fetch_from(handler))


def test_a_silent_site_times_out_by_the_task_deadline_without_losing_the_session() -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/silent":
            await asyncio.sleep(30)
        return web.Response(text="good")

    async def scenario() -> None:
        async with serving(handler) as url, opened() as worker:
            with pytest.raises(http.SiteTimeout, match=r"no answer in time from .*/silent"):
                await worker.fetch(context(0.3), url + "/silent")
            assert (await worker.fetch(context(), url + "/good"))["text"] == "good"

    asyncio.run(scenario())


def test_a_site_that_stops_sending_times_out_by_the_read_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "READ_SECONDS", 0.3)
    with pytest.raises(http.SiteTimeout):
        asyncio.run(fetch_from(_stalling))


async def _stalling(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"some")
    await asyncio.sleep(30)
    return response


def test_nobody_listening_is_unreachable_and_credentials_are_not_told() -> None:
    async def scenario() -> None:
        async with serving(answering(text="")) as url:
            pass  # its port is free again
        async with opened() as worker:
            address = url.replace("http://", "http://user:secret@") + "/page"
            with pytest.raises(http.SiteUnreachable) as caught:
                await worker.fetch(context(), address)
            assert f"{url}/page" in str(caught.value)
            assert "secret" not in str(caught.value)

    asyncio.run(scenario())


def told_of(error: BaseException) -> str:
    """Return the text and the traceback of an error, causes included."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("status", [404, 503])
def test_an_http_error_does_not_tell_the_keys_of_an_address(status: int) -> None:
    path = f"/p?page=2&api_key={HUSH}&key={HUSH}&sig={HUSH}#{HUSH}"
    with pytest.raises(http.HttpError) as caught:
        asyncio.run(fetch_from(answering(status=status), path=path))
    assert HUSH not in told_of(caught.value) + caught.value.url
    assert "/p?page=2&api_key=***&key=***&sig=***" in str(caught.value)


@pytest.mark.parametrize("address", ["{url}/page", "{url}:bad/page", "ftp://host/page", "http:///"])
def test_no_error_on_the_way_tells_the_keys_of_an_address(address: str) -> None:
    async def scenario() -> None:
        async with serving(answering(text="")) as url:
            pass  # nobody listens on its port any more
        async with opened() as worker:
            with pytest.raises((http.SiteUnreachable, http.BadRequest)) as caught:
                await worker.fetch(context(), address.format(url=url) + f"?token={HUSH}")
            assert HUSH not in told_of(caught.value)

    asyncio.run(scenario())


def test_a_timeout_does_not_tell_the_keys_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_SECONDS", 0.3)
    with pytest.raises(http.SiteTimeout) as caught:
        asyncio.run(fetch_from(_stalling, path=f"/?key={HUSH}"))
    assert HUSH not in told_of(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        {"headers": {"X-Bad": "a\r\nX-Injected: 1"}},
        {"headers": {"X-Bad\n": "a"}},
        {"path": "\nhttp://other"},
    ],
)
def test_a_request_that_cannot_be_sent_is_permanent(args: dict[str, Any]) -> None:
    with pytest.raises(http.BadRequest):
        asyncio.run(fetch_from(answering(text=""), **args))


def test_a_bad_selector_costs_the_site_no_request() -> None:
    requests: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        requests.append(request.path)
        return web.Response(text="")

    async def scenario() -> None:
        async with serving(handler) as url, opened() as worker:
            with pytest.raises(InvalidSelector, match="title='h1\\['"):
                await worker.extract(context(), url, {"title": "h1["})

    asyncio.run(scenario())
    assert requests == []


def test_requests_go_through_the_configured_proxy() -> None:
    async def proxy(request: web.Request) -> web.Response:
        return web.Response(text=f"proxied {request.host}")

    async def scenario() -> None:
        async with serving(proxy) as url, opened(proxy=url) as worker:
            page = await worker.fetch(context(), "http://shop.example/page")
            assert page["text"] == "proxied shop.example"

    asyncio.run(scenario())


class RegionOptions(ParserOptions, frozen=True):
    region: Literal["eu", "us"] = "eu"


class RegionWorker(ParserWorker):
    options_type = RegionOptions


def test_a_subclass_may_have_options_of_its_own() -> None:
    async def open_with(region: str) -> str:
        worker = RegionWorker()
        worker.pool, worker.options = "parser", {"region": region, "max_bytes": 10}
        await worker.open()
        await worker.close()
        return str(worker.options["region"])

    assert asyncio.run(open_with("us")) == "us"
    with pytest.raises(ConfigurationError, match="region"):
        asyncio.run(open_with("moon"))


@pytest.mark.parametrize("options", [{"max_byte": 1}, {"max_bytes": "much"}])
def test_wrong_options_are_a_configuration_error_that_names_the_option(
    options: dict[str, Any],
) -> None:
    async def scenario() -> None:
        async with opened(**options):
            pass

    with pytest.raises(ConfigurationError, match=r"options: .*max_byte"):
        asyncio.run(scenario())
