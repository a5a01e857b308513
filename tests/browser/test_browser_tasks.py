"""The tasks of a browser worker and the life of its browser, the same with both backends."""

import asyncio
import base64
import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from musterd.ipc.errors import ConfigurationError
from musterd.workers.authoring.base import Context, task
from musterd.workers.browser import (
    BrowserDied,
    BrowserWorker,
    DriverDied,
    PageClosed,
    PageCrashed,
    ScriptFailed,
    find_executable,
    worker,
)
from musterd.workers.pages.extraction import InvalidSelector
from musterd.workers.pages.http import (
    BadRequest,
    HttpError,
    PageTooLarge,
    PermanentHttpError,
    SiteTimeout,
)

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PAGES = {
    "/late": "<title>late</title><body><script>setTimeout(() => {"
    "document.body.innerHTML = '<p class=\"late\">came <b>late</b></p>'}, 300)</script>",
    "/picture": "<title>picture</title><img src='/pixel.png'><p>text</p>",
    "/away": "<title>away</title><script>location.replace('/late')</script>",
    "/dialog": "<title>dialog</title><script>alert('hello'); document.title = 'after'</script>",
    "/popup": "<title>popup</title><script>window.open('/late')</script>",
    "/large": f"<title>large</title><p>{'x' * 300_000}</p>",
    "/spin": "<title>spin</title><script>setTimeout(() => {while (true) {}}, 50)</script>",
}


class OddSite:
    """Pages with oddities, and the requests for them."""

    def __init__(self) -> None:
        self.requested: list[str] = []
        self.echoed: dict[str, str] = {}
        self.url = ""

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requested.append(request.path)
        if request.path == "/echo":
            self.echoed = dict(request.headers)
            seen = {"headers": dict(request.headers), "cookies": dict(request.cookies)}
            return web.Response(text=f"<pre>{json.dumps(seen)}</pre>", content_type="text/html")
        if request.path == "/pixel.png":
            return web.Response(body=PIXEL, content_type="image/png")
        if request.path == "/never":
            await asyncio.sleep(60)
        if request.path == "/file":
            kept = {"Content-Disposition": "attachment; filename=a.bin"}
            return web.Response(body=b"x" * 1000, headers=kept)
        if request.path.startswith("/status/"):
            return web.Response(status=int(request.path.removeprefix("/status/")))
        text = PAGES.get(request.path, "")
        return web.Response(text=text, content_type="text/html", status=200 if text else 404)


class Opened:
    """A worker with its browser, the odd site, and their event loop."""

    def __init__(self, runner: asyncio.Runner, worker: BrowserWorker, **options: Any) -> None:
        self.run = runner.run
        self.site = OddSite()
        self.run(self.site.start())
        self.worker = worker
        self.worker.pool, self.worker.options = "browser", options
        self.lean = options["backend"] == "cdp"
        self._others = offspring()
        self.run(self.worker.open())

    def call(self, method: str, path: str, *, seconds: float = 30, **args: Any) -> Any:
        return self.run(self.start(method, path, seconds=seconds, **args))

    async def start(self, method: str, path: str, *, seconds: float = 30, **args: Any) -> Any:
        context = Context("task", deadline=time.monotonic() + seconds)
        return await getattr(self.worker, method)(context, f"{self.site.url}{path}", **args)

    def close(self) -> None:
        self.run(self.worker.close())
        self.run(self.site.stop())

    def tree(self) -> set[psutil.Process]:
        """Return the processes of the browser and its driver."""
        return offspring() - self._others

    def renderers(self) -> list[psutil.Process]:
        return [each for each in self.tree() if "--type=renderer" in command(each)]

    def chromium(self) -> psutil.Process:
        """Return the browser's main process: the oldest, as forks share its words for a moment."""
        mains = [
            each
            for each in self.tree()
            if "--remote-debugging-pipe" in command(each) and "--type=" not in command(each)
        ]
        return min(mains, key=lambda each: (each.create_time(), each.pid))

    def driver(self) -> psutil.Process:
        return next(each for each in self.tree() if "run-driver" in command(each))


def offspring() -> set[psutil.Process]:
    """Return all processes below this one; a site that other tests use may be among them."""
    return set(psutil.Process().children(recursive=True))


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has ended
        return ""


@pytest.fixture
def open_worker(scratch: Path) -> Iterator[Callable[..., Opened]]:
    opened: list[Opened] = []
    others = offspring()
    with asyncio.Runner() as runner:

        def open_it(worker: BrowserWorker | None = None, **options: Any) -> Opened:
            opened.append(Opened(runner, worker or BrowserWorker(), **options))
            return opened[-1]

        yield open_it
        processes = offspring() - others
        for each in opened:
            each.close()
        _, alive = psutil.wait_procs(processes, timeout=20)
        assert alive == []
        assert [each.name for each in scratch.iterdir() if not each.name.startswith(".")] == []


@pytest.fixture(params=["playwright", "cdp"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(open_worker: Callable[..., Opened], backend: str) -> Opened:
    return open_worker(backend=backend)


def test_values_are_extracted_when_what_is_waited_for_is_there(opened: Opened) -> None:
    select = {"css": ".late", "own": ".late::text", "xpath": "xpath://b", "none": "h6"}
    wanted = {"css": "came late", "own": "came", "xpath": "late", "none": None}
    assert opened.call("extract", "/late", select=select, wait_for=".late") == wanted
    assert opened.call("extract", "/late", select=select, wait_for="xpath://p/b") == wanted
    assert opened.call("extract", "/late") == {"title": "late"}
    with pytest.raises(SiteTimeout):
        opened.call("extract", "/late", wait_for="#never", timeout=1.5)
    with pytest.raises(BadRequest, match="wait_for = '###'"):
        opened.call("extract", "/late", wait_for="###")
    with pytest.raises(InvalidSelector):
        opened.call("extract", "/late", select={"x": "###"})


@pytest.mark.one_backend
def test_a_page_that_goes_elsewhere_is_followed(opened: Opened) -> None:
    page = opened.call("render", "/away", wait_for=".late")
    assert (page["title"], page["url"]) == ("late", f"{opened.site.url}/late")


@pytest.mark.one_backend
def test_a_picture_has_the_size_of_the_viewport(opened: Opened) -> None:
    picture = opened.call("screenshot", "/picture", viewport={"width": 320, "height": 200})
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (320, 200)
    script = "document.body.style.height = '900px'"
    small = {"width": 320, "height": 200}
    whole = opened.call("screenshot", "/picture", viewport=small, full_page=True, script=script)
    width, height = struct.unpack(">II", whole[16:24])
    assert width == 320
    assert height >= 900
    with pytest.raises(PageTooLarge):
        opened.call("screenshot", "/picture", max_bytes=10)


def test_headers_cookies_and_user_agent_reach_the_site_and_the_next_task_has_none(
    opened: Opened,
) -> None:
    def echo(**settings: Any) -> dict[str, Any]:
        answer = opened.call("extract", "/echo", select={"seen": "pre"}, **settings)
        return dict(json.loads(answer["seen"]))

    seen = echo(
        headers={"X-Promo": "yes"},
        cookies=[{"name": "session", "value": "abc"}],
        user_agent="Kites/1",
    )
    assert seen["headers"]["X-Promo"] == "yes"
    assert seen["headers"]["User-Agent"] == "Kites/1"
    assert seen["cookies"] == {"session": "abc"}
    fresh = echo()
    assert fresh["cookies"] == {}
    assert "X-Promo" not in fresh["headers"]


@pytest.mark.one_backend
def test_what_is_blocked_is_not_requested(opened: Opened) -> None:
    opened.call("render", "/picture", block=["image"])
    assert "/pixel.png" not in opened.site.requested
    opened.call("render", "/picture")
    assert "/pixel.png" in opened.site.requested


@pytest.mark.one_backend
def test_settings_hold_in_frames_of_other_sites_too(opened: Opened) -> None:
    other = opened.site.url.replace("127.0.0.1", "localhost")
    script = f"""
        for (const path of ["/picture", "/echo"]) {{
            const frame = document.createElement("iframe");
            frame.src = "{other}" + path;
            const loaded = new Promise(resolve => frame.onload = resolve);
            document.body.append(frame);
            await loaded;
        }}"""
    settings = {"block": ["image"], "headers": {"X-Promo": "yes"}, "user_agent": "Kites/1"}
    opened.call("render", "/large", script=script, **settings)
    assert "/pixel.png" not in opened.site.requested
    assert opened.site.echoed["X-Promo"] == "yes"
    assert opened.site.echoed["User-Agent"] == "Kites/1"


@pytest.mark.one_backend
@pytest.mark.parametrize(("status", "error"), [(404, PermanentHttpError), (503, HttpError)])
def test_an_error_of_the_site_without_a_page_is_told_by_its_status(
    opened: Opened, status: int, error: type[HttpError]
) -> None:
    with pytest.raises(HttpError, match=f"HTTP {status} without a page from") as raised:
        opened.call("render", f"/status/{status}")
    assert type(raised.value) is error


@pytest.mark.one_backend
def test_settings_hold_in_popups_too(opened: Opened) -> None:
    script = "const other = open('/echo'); await new Promise(seen => other.onload = seen)"
    settings = {"headers": {"X-Promo": "yes"}, "user_agent": "Kites/1"}
    opened.call("render", "/late", script=script, **settings)
    assert opened.site.echoed["X-Promo"] == "yes"
    assert opened.site.echoed["User-Agent"] == "Kites/1"


def test_a_script_runs_in_the_page_and_what_it_returns_comes_back(opened: Opened) -> None:
    script = "document.title = 'changed'; return {sum: await Promise.resolve(5)};"
    page = opened.call("render", "/late", script=script)
    assert (page["script"], page["title"]) == ({"sum": 5}, "changed")
    with pytest.raises(ScriptFailed, match="no such promo"):
        opened.call("render", "/late", script="throw new Error('no such promo')")


@pytest.mark.one_backend
def test_a_page_over_the_limit_is_refused(opened: Opened) -> None:
    with pytest.raises(PageTooLarge, match="over the limit of 100000"):
        opened.call("render", "/large", max_bytes=100_000)
    assert opened.call("render", "/large")["title"] == "large"


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "settings", [{"colour": 1}, {"viewport": {"width": 0}}, {"block": ["x"]}, {"proxy": "nowhere"}]
)
def test_a_setting_that_cannot_be_read_is_told_and_costs_no_browser(
    opened: Opened, settings: dict[str, Any]
) -> None:
    before = opened.chromium()
    with pytest.raises(BadRequest):
        opened.call("render", "/late", **settings)
    assert opened.call("render", "/late")["status"] == 200
    assert opened.chromium() == before


@pytest.mark.parametrize("user", ["", "kite:wind%40sea@"])
def test_a_proxy_is_used_for_the_page_that_names_it(opened: Opened, user: str) -> None:
    allowed = base64.b64encode(b"kite:wind@sea")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if user and b"Proxy-Authorization: Basic " + allowed not in asked:
            status = b'407 Who\r\nProxy-Authenticate: Basic realm="x"\r\nContent-Length: 0'
        else:
            status = b"200 OK\r\nContent-Type: text/html"
        body = b"<title>" + asked.partition(b"\r\n")[0] + b"</title>"
        head = b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n"
        writer.write(head + (b"" if b"407" in status else body))
        await writer.drain()
        writer.close()

    async def proxied() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            proxy = f"http://{user}127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await opened.start("render", "/late", proxy=proxy)

    assert opened.run(proxied())["title"] == f"GET {opened.site.url}/late HTTP/1.1"


@pytest.mark.one_backend
@pytest.mark.parametrize(("path", "title"), [("/dialog", "after"), ("/popup", "popup")])
def test_dialogs_and_popups_hold_nothing_up(opened: Opened, path: str, title: str) -> None:
    assert opened.call("render", path)["title"] == title
    assert opened.worker._browser is not None
    assert opened.worker._browser.pages == 0
    assert opened.call("render", "/late")["status"] == 200


@pytest.mark.one_backend
def test_a_download_and_a_spinning_page_fail_and_the_next_task_works(opened: Opened) -> None:
    with pytest.raises(Exception, match=r"cannot open .*/file"):
        opened.call("render", "/file")
    with pytest.raises(SiteTimeout):
        opened.call("render", "/spin", wait_for="#never", timeout=2)
    assert opened.call("render", "/late")["status"] == 200


# -- life of the browser -------------------------------------------------------------------------


async def during(opened: Opened, path: str, act: Callable[[], None]) -> Any:
    """Do something while a page waits for its site."""
    running = asyncio.ensure_future(opened.start("render", path))
    async with asyncio.timeout(30):
        while path not in opened.site.requested:
            await asyncio.sleep(0.02)
        act()
        return await running


def test_the_error_tells_what_died_and_the_next_task_works(opened: Opened) -> None:
    def kill_renderers() -> None:
        for each in opened.renderers():
            each.kill()

    cases: list[tuple[type[Exception], Callable[[], None]]] = [
        (PageCrashed, kill_renderers),
        (BrowserDied, lambda: opened.chromium().kill()),
    ]
    if not opened.lean:
        cases.append((DriverDied, lambda: opened.driver().kill()))
    for error, act in cases:
        opened.site.requested.clear()
        with pytest.raises(error):
            opened.run(during(opened, "/never", act))
        assert opened.call("render", "/late")["status"] == 200


@pytest.mark.one_backend
def test_a_page_that_closes_is_told_from_one_that_crashed(opened: Opened) -> None:
    async def closed() -> None:
        context = Context("task", deadline=time.monotonic() + 30)
        async with opened.worker.open_page(context) as page:
            await page.goto(f"{opened.site.url}/late")
            if opened.lean:
                await page.raw.command("Page.close")
            else:
                await page.raw.close()
            await page.evaluate("new Promise(() => {})")

    with pytest.raises(PageClosed):
        opened.run(closed())
    assert opened.call("render", "/late")["status"] == 200


@pytest.mark.parametrize("victim", ["chromium", "driver"])
def test_what_is_stuck_is_replaced_before_the_next_task(
    opened: Opened, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if victim == "driver" and opened.lean:
        pytest.skip("this backend has no driver")
    monkeypatch.setattr(worker, "PROBE_SECONDS", 5.0)  # the value without our conftest.py
    before = opened.tree()
    process: psutil.Process = getattr(opened, victim)()
    process.send_signal(signal.SIGSTOP)
    assert opened.call("render", "/late", seconds=60)["status"] == 200
    _, alive = psutil.wait_procs(before, timeout=20)
    assert alive == []


def test_a_browser_is_replaced_after_its_share_of_requests(
    open_worker: Callable[..., Opened], backend: str
) -> None:
    opened = open_worker(backend=backend, recycle_requests=2)
    seen = []
    for _ in range(4):
        opened.call("render", "/picture")
        seen.append(opened.chromium().pid)
    assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.one_backend
def test_a_browser_is_replaced_after_its_time_by_the_check_while_idle(
    open_worker: Callable[..., Opened], backend: str
) -> None:
    opened = open_worker(backend=backend, recycle_seconds=1e-6)
    before = opened.chromium()
    assert opened.run(opened.worker.healthy())
    assert opened.chromium() != before


class Shop(BrowserWorker):
    """A worker as users write one."""

    @task(timeout=30, target="url")
    async def words(self, ctx: Context, url: str) -> int:
        async with self.open_page(ctx, url, block=["image"]) as page:
            await page.goto(url)
            return int(await page.evaluate("document.body.innerText.split(/\\s+/).length"))


@pytest.mark.one_backend
def test_a_subclass_opens_pages_for_tasks_of_its_own(
    open_worker: Callable[..., Opened], backend: str
) -> None:
    opened = open_worker(Shop(), backend=backend)
    assert opened.call("words", "/picture") == 1
    assert "/pixel.png" not in opened.site.requested
    assert opened.worker._browser is not None
    assert opened.worker._browser.pages == 0


def test_our_own_ends_of_the_pipes_are_closed_with_the_browser(
    open_worker: Callable[..., Opened],
) -> None:
    opened = open_worker(backend="cdp", recycle_requests=1)
    opened.call("render", "/picture")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        opened.call("render", "/picture")
    assert len(os.listdir("/proc/self/fd")) <= before + 1
