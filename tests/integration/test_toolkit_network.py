"""NetworkClient with real servers on loopback: timeouts, retries, breaker, and resumed work."""

import asyncio
import contextlib
import math
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS, BackoffPolicy, BreakerPolicy
from musterd.workers.authoring.base import Context
from musterd.workers.pages.http import (
    BadRequest,
    HttpError,
    PageTooLarge,
    PermanentHttpError,
    SiteTimeout,
    SiteUnreachable,
)
from musterd.workers.toolkit import BreakerOpen, MemoryState, NetworkClient, Timeouts, breaker
from musterd.workers.toolkit.network import ConnectTimeout, NoConnection

HOST = "127.0.0.1"
QUICK = BackoffPolicy(base_ns=MILLISECOND_NS, max_ns=5 * SECOND_NS, jitter=0)
SECONDS = 30.0  # more than any test here takes

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Ctx(Context):
    def __init__(self, state: MemoryState | None = None, deadline: float = math.inf) -> None:
        super().__init__("t1", deadline=deadline)
        self.state = state or MemoryState()


class Site:
    """Answers every path with the handler, and keeps the requests."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        return await self.handler(request)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Site]:
    site = Site(handler)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, HOST, 0)
    await listener.start()
    port = runner.addresses[0][1]
    site.url = f"http://{HOST}:{port}/"
    try:
        yield site
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def no_breakers() -> Iterator[None]:
    breaker.reset()
    yield
    breaker.reset()


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(SECONDS):
            return await main()

    return asyncio.run(bounded())


def failing(*statuses: int, headers: dict[str, str] | None = None) -> Handler:
    """Answer with these statuses one by one, then with 200."""
    left = list(statuses)

    async def handler(request: web.Request) -> web.Response:
        if left:
            return web.Response(status=left.pop(0), headers=headers)
        return web.Response(text="fine")

    return handler


# -- answers --------------------------------------------------------------------------------------


def test_an_answer_has_status_headers_text_and_json() -> None:
    async def handler(request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response(
            {
                "body": body.decode(),
                "type": request.content_type,
                "query": dict(request.query),
                "agent": request.headers.get("X-Agent", ""),
            }
        )

    async def main() -> None:
        async with serving(handler) as site, NetworkClient(headers={"X-Agent": "a"}) as client:
            got = await client.get(site.url + "x?a=1", params={"b": 2})
            assert (got.status, got.headers["content-type"]) == (
                200,
                "application/json; charset=utf-8",
            )
            assert got.json()["query"] == {"a": "1", "b": "2"}
            assert got.json()["agent"] == "a"
            posted = await client.post(site.url, json={"n": [1, None]})
            assert posted.json(dict)["body"] == '{"n":[1,null]}'
            assert posted.json()["type"] == "application/json"
            put = await client.request("put", site.url, body="grüße")
            assert put.json()["body"] == "grüße"
            assert '"type": "text/plain"' in put.text
            big = "x" * 3_000_000
            assert len((await client.post(site.url, body=big)).json()["body"]) == 3_000_000

    # aiohttp's server limits bodies to 1 MiB by default.
    original = web.Application

    def roomy(**options: Any) -> web.Application:
        return original(client_max_size=10**7, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web, "Application", roomy)
        run(main)


def test_a_body_over_the_limit_is_refused() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 100_001)

    async def main() -> None:
        async with serving(handler) as site, NetworkClient(bytes_max=100_000) as client:
            with pytest.raises(PageTooLarge, match="100000 bytes"):
                await client.get(site.url)
            assert len(site.asked) == 1

    run(main)


@pytest.mark.parametrize("url", ["ftp://x/", "http://", "nonsense"])
def test_a_url_that_cannot_be_fetched_is_a_bad_request(url: str) -> None:
    with pytest.raises(BadRequest):
        run(lambda: NetworkClient().get(url))


# -- retries --------------------------------------------------------------------------------------


def test_five_retries_are_the_default() -> None:
    async def main() -> None:
        told: list[tuple[int, int]] = []

        class Client(NetworkClient):
            def on_retry(self, attempt: int, error: Exception, pause: float) -> None:
                assert isinstance(error, HttpError)
                told.append((attempt, error.status))

        async with serving(failing(500, 502, 503, 504, 429)) as site:
            async with Client(backoff=QUICK) as client:
                assert (await client.get(site.url)).text == "fine"
            assert len(site.asked) == 6
        assert told == [(1, 500), (2, 502), (3, 503), (4, 504), (5, 429)]
        async with serving(failing(*[500] * 6)) as site, NetworkClient(backoff=QUICK) as client:
            with pytest.raises(HttpError, match="HTTP 500"):
                await client.get(site.url)

    run(main)


def test_what_the_server_refuses_for_good_is_not_retried() -> None:
    async def main() -> None:
        async with serving(failing(404)) as site, NetworkClient(backoff=QUICK) as client:
            with pytest.raises(PermanentHttpError, match="404"):
                await client.get(site.url)
            assert len(site.asked) == 1

    run(main)


def test_retry_after_is_waited_for() -> None:
    async def main() -> None:
        handler = failing(429, headers={"Retry-After": "1"})
        async with serving(handler) as site, NetworkClient(backoff=QUICK) as client:
            began = time.monotonic()
            await client.get(site.url)
            assert time.monotonic() - began >= 1
        handler = failing(503, headers={"Retry-After": "3600"})
        async with serving(handler) as site, NetworkClient(backoff=QUICK) as client:
            with pytest.raises(HttpError) as told:  # above max: the supervisor waits instead
                await client.get(site.url)
            assert told.value.retry_after == 3600
            assert len(site.asked) == 1

    run(main)


def test_a_post_is_only_repeated_where_it_was_surely_not_done() -> None:
    async def main() -> None:
        async with serving(failing(429, 500)) as site, NetworkClient(backoff=QUICK) as client:
            with pytest.raises(HttpError, match="500"):
                await client.post(site.url, json=1)
            assert len(site.asked) == 2
        async with serving(failing(500)) as site, NetworkClient(backoff=QUICK) as client:
            assert (await client.post(site.url, json=1, idempotent=True)).text == "fine"

    run(main)


def test_a_post_is_repeated_when_there_was_no_connection() -> None:
    async def main() -> None:
        tries = 0

        class Client(NetworkClient):
            def on_retry(self, attempt: int, error: Exception, pause: float) -> None:
                nonlocal tries
                tries += 1
                assert isinstance(error, NoConnection)

        with socket.create_server((HOST, 0)) as listener:
            port = listener.getsockname()[1]
        async with Client(backoff=QUICK, max_retries=2) as client:
            with pytest.raises(NoConnection, match="ConnectionRefusedError"):
                await client.post(f"http://{HOST}:{port}/", body=b"x")
        assert tries == 2

    run(main)


def test_a_lost_connection_is_retried_for_a_get_and_not_for_a_post() -> None:
    async def main() -> None:
        async def hang_up(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        client = NetworkClient(backoff=QUICK, max_retries=2)
        async with serving(hang_up) as site, client:
            with pytest.raises(SiteUnreachable, match="closed without an answer"):
                await client.post(site.url, json=1)
            assert len(site.asked) == 1
            with pytest.raises(SiteUnreachable):
                await client.get(site.url)
            assert len(site.asked) >= 4  # aiohttp repeats a GET on a reused connection by itself

    run(main)


def test_nothing_goes_beyond_the_deadline_of_the_task() -> None:
    async def main() -> None:
        slow = BackoffPolicy(base_ns=60 * SECOND_NS, jitter=0)
        async with serving(failing(500)) as site, NetworkClient(backoff=slow) as client:
            with pytest.raises(HttpError):
                await client.get(site.url, ctx=Ctx(deadline=time.monotonic() + 10))

        async def never(request: web.Request) -> web.Response:
            await asyncio.sleep(SECONDS)
            return web.Response()

        timeouts = Timeouts(read=SECONDS)
        async with serving(never) as site, NetworkClient(timeouts=timeouts) as client:
            with pytest.raises(SiteTimeout):
                await client.get(site.url, ctx=Ctx(deadline=time.monotonic() + 0.1))

    run(main)


# -- timeouts -------------------------------------------------------------------------------------


def test_the_default_timeouts() -> None:
    limits = NetworkClient().timeouts
    assert (limits.connect, limits.read, limits.write, limits.pool) == (2.0, 5.0, 2.0, 5.0)


def test_the_read_timeout_is_for_each_piece() -> None:
    async def main() -> None:
        async def drip(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(5):
                await response.write(b"x")
                await asyncio.sleep(0.1)
            if request.query:
                await asyncio.sleep(SECONDS)
            return response

        client = NetworkClient(timeouts=Timeouts(read=0.4), max_retries=0)
        async with serving(drip) as site, client:
            assert (await client.get(site.url)).body == b"xxxxx"
            with pytest.raises(SiteTimeout, match="nothing came"):
                await client.get(site.url + "?stall=1")

    run(main)


def test_the_total_timeout_ends_a_server_that_never_comes_to_an_end() -> None:
    async def main() -> None:
        async def drip(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await response.write(b"x")
                    await asyncio.sleep(0.01)
            return response

        client = NetworkClient(timeouts=Timeouts(total=0.3), max_retries=0)
        async with serving(drip) as site, client:
            with pytest.raises(SiteTimeout, match="too slow"):
                await client.get(site.url)

    run(main)


def test_the_write_timeout_ends_a_body_that_nobody_reads() -> None:
    async def main() -> None:
        connections = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            writer.transport.pause_reading()  # type: ignore[attr-defined]

        server = await asyncio.start_server(accept, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        # The read timeout does not help here: it begins when the body has been sent.
        client = NetworkClient(timeouts=Timeouts(write=0.2, read=0.1), max_retries=0)
        began = time.monotonic()
        async with client:
            with pytest.raises(SiteTimeout, match=r"took nothing of the body for 0\.2 s"):
                await client.post(f"http://{HOST}:{port}/", body=b"x" * 20_000_000)
        assert time.monotonic() - began >= 0.2
        for writer in connections:
            writer.transport.abort()
        server.close()
        await server.wait_closed()

    run(main)


def test_a_slow_but_steady_reader_is_not_cut_off() -> None:
    async def main() -> None:
        async def reader(request: web.Request) -> web.Response:
            total = 0
            async for chunk in request.content.iter_chunked(2**20):
                total += len(chunk)
                await asyncio.sleep(0.02)
            return web.Response(text=str(total))

        client = NetworkClient(timeouts=Timeouts(write=0.5, read=5), max_retries=0)
        async with serving(reader) as site, client:
            answer = await client.post(site.url, body=b"x" * 20_000_000)
            assert answer.text == "20000000"

    run(main)


def test_the_connect_timeout() -> None:
    async def main(address: tuple[str, int]) -> None:
        timeouts = Timeouts(connect=0.2, pool=SECONDS)
        async with NetworkClient(timeouts=timeouts, max_retries=0) as client:
            with pytest.raises(ConnectTimeout, match="no connection in time"):
                await client.get(f"http://{address[0]}:{address[1]}/")

    with socket.create_server((HOST, 0), backlog=0) as listener:
        address = listener.getsockname()
        filling = []
        # A full accept queue drops further handshakes, as a dead machine does.
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(address)
            filling.append(filler)
        try:
            run(lambda: main(address))
        finally:
            for filler in filling:
                filler.close()


def test_the_pool_timeout() -> None:
    async def main() -> None:
        end = asyncio.Event()

        async def hold(request: web.Request) -> web.Response:
            await end.wait()
            return web.Response(text="late")

        client = NetworkClient(timeouts=Timeouts(pool=0.2), max_retries=0, connections=1)
        async with serving(hold) as site, client:
            first = asyncio.create_task(client.get(site.url))
            while not site.asked:
                await asyncio.sleep(0.001)
            with pytest.raises(ConnectTimeout):
                await client.get(site.url)
            end.set()
            assert (await first).text == "late"

    run(main)


# -- protection -----------------------------------------------------------------------------------


def test_the_breaker_of_a_host_opens_and_others_are_let_be() -> None:
    async def main() -> None:
        async def broken(request: web.Request) -> web.Response:
            return web.Response(status=500)

        async with serving(broken) as bad, serving(failing()) as good:
            policy = BreakerPolicy(failures=2)
            began = time.monotonic()
            async with NetworkClient(backoff=QUICK, max_retries=3, breaker=policy) as client:
                for _ in range(2):
                    with pytest.raises(HttpError):
                        await client.get(bad.url)
                with pytest.raises(BreakerOpen) as told:
                    await client.get(bad.url)
                assert 300 - (time.monotonic() - began) <= told.value.retry_after <= 300
                assert len(bad.asked) == 8, "the tries of one request count once"
                await client.get(good.url)
            host = good.url.removeprefix("http://").rstrip("/")
            assert breaker.states()[f"NetworkClient {host}"].state == "closed"

    run(main)


def test_a_404_does_not_count_against_the_host() -> None:
    async def main() -> None:
        client = NetworkClient(breaker=BreakerPolicy(failures=1))
        async with serving(failing(*[404] * 5)) as site, client:
            for _ in range(5):
                with pytest.raises(PermanentHttpError):
                    await client.get(site.url)
            assert (await client.get(site.url)).text == "fine"

    run(main)


def test_per_host_limits_the_requests_at_once() -> None:
    async def main() -> None:
        inside = most = 0

        async def handler(request: web.Request) -> web.Response:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.005)
            inside -= 1
            return web.Response()

        async with serving(handler) as site, NetworkClient(per_host=2) as client:
            await asyncio.gather(*(client.get(site.url) for _ in range(12)))
        assert most == 2

    run(main)


def test_no_secret_is_in_any_error() -> None:
    async def main() -> None:
        async def handler(request: web.Request) -> web.Response:
            if "moved" in request.path:
                raise web.HTTPFound(request.path_qs)
            if "gone" in request.path:
                return web.Response(status=410)
            if "cut" in request.path:
                assert request.transport is not None
                request.transport.abort()
            await asyncio.sleep(SECONDS)
            return web.Response()

        # Two words, because tracebacks show the lines of this file.
        secret = "-".join(("open", "sesame"))
        client = NetworkClient(timeouts=Timeouts(read=0.1), max_retries=0)
        async with serving(handler) as site, client:
            base = site.url.replace("http://", f"http://user:{secret}@")
            for path in ("slow", "gone", "moved", "cut"):
                with pytest.raises(Exception, match=HOST) as told:
                    await client.get(f"{base}{path}", params={"api_key": secret, "page": 2})
                assert secret not in "".join(traceback.format_exception(told.value))
                assert "api_key=***&page=2" in str(told.value)
            with pytest.raises(BadRequest) as told:
                await client.get(f"ftp://{HOST}/?api_key={secret}")
            assert secret not in str(told.value)

    run(main)


# -- operation state ------------------------------------------------------------------------------


class Prices(NetworkClient):
    """Fetches all pages of a list; resumes where it was stopped."""

    async def fetch_all(self, ctx: Ctx, url: str, api_key: str) -> list[int]:
        async with self.operation(ctx, "prices", url=url, api_key=api_key) as work:
            done = await work.aload() or {"page": 0, "prices": []}
            while done["page"] < 5:
                page = done["page"] + 1
                params = {"page": page, "api_key": api_key}
                answer = await self.get(url, ctx=ctx, params=params)
                done = {"page": page, "prices": [*done["prices"], answer.json(int)]}
                await work.asave(done)
            return list(done["prices"])


def test_a_long_operation_goes_on_where_it_was_stopped() -> None:
    async def main() -> None:
        broken = True

        async def handler(request: web.Request) -> web.Response:
            page = int(request.query["page"])
            if page == 4 and broken:
                return web.Response(status=500)
            return web.json_response(page * 10)

        state = MemoryState()
        async with serving(handler) as site:
            async with Prices(backoff=QUICK, max_retries=1) as client:
                with pytest.raises(HttpError):
                    await client.fetch_all(Ctx(state), site.url, "s3cr3t-key")
            assert b"s3cr3t" not in b"".join(state.kept.values())
            assert "s3cr3t" not in str(list(state.kept))
            site.asked.clear()
            broken = False
            async with Prices() as client:  # another worker, after the restart
                assert await client.fetch_all(Ctx(state), site.url, "other-key") == [
                    *(10, 20, 30, 40, 50)
                ], "another key is another operation"
                assert len(site.asked) == 5
                site.asked.clear()
                assert await client.fetch_all(Ctx(state), site.url, "s3cr3t-key") == [
                    *(10, 20, 30, 40, 50)
                ]
            pages = [asked.partition("page=")[2][0] for asked in site.asked]
            assert pages == ["4", "5"], "what was done is not done again"
            assert state.kept == {}

    run(main)


def test_load_save_and_clear_by_name_and_parameters() -> None:
    async def main() -> None:
        client, ctx = NetworkClient(), Ctx()
        assert await client.load_state(ctx, "sync", shop="a", operation="x") is None
        await client.save_state(ctx, "sync", {"since": 7}, shop="a", operation="x")
        assert await client.load_state(ctx, "sync", operation="x", shop="a") == {"since": 7}
        assert await client.load_state(ctx, "sync", shop="b", operation="x") is None
        await client.clear_state(ctx, "sync", shop="a", operation="x")
        assert ctx.state.kept == {}

    run(main)
