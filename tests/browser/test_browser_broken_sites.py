"""A broken site ends a task at once, the same way with both backends and in the parser."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.workers.authoring.base import Context, Permanent
from musterd.workers.browser import BrowserWorker, find_executable
from musterd.workers.browser.lean_page import LeanPage
from musterd.workers.pages.http import BadRequest, PageTooLarge, PermanentHttpError, SiteUnreachable
from musterd.workers.parser import ParserWorker

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

PATIENCE_SECONDS = 45  # far below a task's limit of minutes, far above the time of an answer
GOOD = b"<!doctype html><title>good</title><p>well</p>" + b"<p>more</p>" * 500
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="300" height="2000"><path d="M0 0"/></svg>'
PNG_SIZE_AT = 16  # offset of width and height, four bytes each, in every PNG


def answer(head: str, body: bytes = b"", *, size: int | None = None) -> bytes:
    """Return an HTTP answer; `size` is its Content-Length, -1 for none."""
    said = len(body) if size is None else size
    length = [f"Content-Length: {said}"] if said >= 0 else []
    return "\r\n".join((f"HTTP/1.1 {head}", *length, "Connection: close", "", "")).encode() + body


def html(*headers: str) -> str:
    return "\r\n".join(("200 OK", "Content-Type: text/html", *headers))


CHUNKED = html("Transfer-Encoding: chunked")
CHUNK = b"%x\r\n%s\r\n" % (len(GOOD), GOOD)
ANSWERS = {
    "/good": answer(html(), GOOD),
    # Each of these breaks off within the document.
    "/short": answer(html(), GOOD, size=100_000),
    "/bad-chunk": answer(CHUNKED, CHUNK + b"ZZZ\r\n", size=-1),
    "/no-last-chunk": answer(CHUNKED, CHUNK, size=-1),
    "/reset": answer(html(), GOOD, size=100_000),
    "/no-gzip": answer(html("Content-Encoding: gzip"), GOOD),
    "/announced": answer(html(), size=1_000_000_000),
    "/leaves": answer(html(), b"<script>location = '/good'</script>", size=100_000),
    "/login": answer('401 Unauthorized\r\nWWW-Authenticate: Basic realm="kites"', b"who?"),
    "/login-empty": answer('401 Unauthorized\r\nWWW-Authenticate: Basic realm="kites"'),
    "/loop": answer("302 Found\r\nLocation: /loop"),
    "/to-file": answer("302 Found\r\nLocation: file:///etc/hostname"),
    "/no-content": answer("204 No Content", size=-1),
    "/download": answer("200 OK\r\nContent-Type: application/x-thing", b"thing"),
    "/svg": answer("200 OK\r\nContent-Type: image/svg+xml", SVG),
}
CUT = ("/short", "/bad-chunk", "/no-last-chunk", "/reset", "/no-gzip")
HELD_SECONDS = {"/reset": 0.2, "/leaves": 2.0, "/announced": 5.0}  # until the connection ends


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        writer.write(ANSWERS.get(path, answer("404 Not Found")))
        await writer.drain()
        await asyncio.sleep(HELD_SECONDS.get(path, 0))
        if path == "/reset":
            at_once = struct.pack("ii", 1, 0)
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # nobody wants the rest
    finally:
        writer.close()


@asynccontextmanager
async def site() -> AsyncIterator[str]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


Story = Callable[[Any, str], Awaitable[None]]


def told(kind: str, story: Story) -> None:
    """Run the story with a worker of this kind and the site."""

    async def run() -> None:
        worker = ParserWorker() if kind == "parser" else BrowserWorker()
        worker.pool, worker.options = kind, {} if kind == "parser" else {"backend": kind}
        await worker.open()
        try:
            async with site() as url, asyncio.timeout(PATIENCE_SECONDS):
                await story(worker, url)
        finally:
            await worker.close()

    asyncio.run(run())


@pytest.fixture(params=["playwright", "cdp"])
def backend(request: pytest.FixtureRequest, scratch: Path) -> str:
    return str(request.param)


@pytest.fixture(params=["parser", "playwright", "cdp"])
def kind(request: pytest.FixtureRequest, scratch: Path) -> str:
    return str(request.param)


def opened(worker: Any) -> Callable[..., Awaitable[Any]]:
    """Return the task that opens a page as it is."""
    return worker.fetch if isinstance(worker, ParserWorker) else worker.render  # type: ignore[no-any-return]


def test_a_document_that_breaks_off_ends_the_task_at_once(backend: str) -> None:
    async def story(worker: Any, url: str) -> None:
        first = worker._browser
        for path in CUT:
            with pytest.raises(SiteUnreachable, match=f"{path} broke off before its end: net::ERR"):
                await worker.render(Context("a"), url + path)
        page = await worker.render(Context("b"), f"{url}/good")
        assert page["title"] == "good"
        assert worker._browser is first, "it cost a browser"

    told(backend, story)


@pytest.mark.one_backend
def test_a_torso_is_no_page_also_where_nobody_waited_for_its_end(backend: str) -> None:
    async def story(worker: Any, url: str) -> None:
        early = {"wait_until": "commit", "wait_for": "#never"}
        with pytest.raises(SiteUnreachable, match="broke off"):
            await worker.render(Context("a"), f"{url}/short", **early)

    told(backend, story)


@pytest.mark.one_backend
def test_a_page_that_goes_elsewhere_before_it_is_complete_is_none_that_breaks_off(
    backend: str,
) -> None:
    async def story(worker: Any, url: str) -> None:
        page = await worker.render(Context("a"), f"{url}/leaves")
        assert (page["title"], page["url"]) == ("good", f"{url}/good")

    told(backend, story)


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("/login", PermanentHttpError, "HTTP 401"),
        ("/login-empty", PermanentHttpError, "HTTP 401"),
        ("/loop", BadRequest, "redirect"),
        ("/to-file", BadRequest, "redirects to an address that cannot be fetched"),
    ],
)
def test_what_is_permanent_is_so_in_every_kind_of_worker(
    kind: str, path: str, error: type[Exception], text: str
) -> None:
    async def story(worker: Any, url: str) -> None:
        with pytest.raises(error, match=text) as raised:
            await opened(worker)(Context("a"), url + path)
        assert isinstance(raised.value, Permanent)

    told(kind, story)


@pytest.mark.one_backend
def test_a_file_is_opened_by_no_worker(kind: str) -> None:
    async def story(worker: Any, _: str) -> None:
        with pytest.raises(BadRequest, match="the scheme 'file'"):
            await opened(worker)(Context("a"), "file:///etc/hostname")

    told(kind, story)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("/no-content", PermanentHttpError, "HTTP 204 without a page"),
        ("/download", BadRequest, "it is a download, not a page"),
    ],
)
def test_what_is_no_page_is_not_tried_again(
    backend: str, path: str, error: type[Exception], text: str
) -> None:
    async def story(worker: Any, url: str) -> None:
        with pytest.raises(error, match=text) as raised:
            await worker.render(Context("a"), url + path)
        assert isinstance(raised.value, Permanent)

    told(backend, story)


@pytest.mark.one_backend
def test_a_bare_picture_can_be_pictured_whole(backend: str) -> None:
    async def story(worker: Any, url: str) -> None:
        picture = await worker.screenshot(Context("a"), f"{url}/svg", full_page=True)
        assert struct.unpack_from(">II", picture, PNG_SIZE_AT)[1] == 2000

    told(backend, story)


@pytest.mark.one_backend
def test_a_page_that_is_announced_as_too_large_is_so(backend: str) -> None:
    async def story(worker: Any, url: str) -> None:
        with pytest.raises(PageTooLarge, match="1000000000 bytes or more"):
            await worker.render(Context("a"), f"{url}/announced")

    told(backend, story)


class Stopped:
    """A session whose navigation we stop before Chromium shows anything of the page."""

    page: LeanPage
    notified: str

    async def command(self, method: str, **_: Any) -> dict[str, Any]:
        response = {"status": 200, "url": "http://127.0.0.1/", "headers": {"Content-Length": "999"}}
        event = {"type": "Document", "requestId": "1", "loaderId": "1", "frameId": "main"}
        self.page._response({**event, "response": response})
        return {"loaderId": "1", "errorText": "net::ERR_ABORTED"}

    def notify(self, method: str) -> None:
        self.notified = method


def test_a_page_that_is_stopped_before_it_is_shown_is_too_large() -> None:
    """Chromium calls such a page aborted, an error that could be retried."""

    async def story() -> None:
        session: Any = Stopped()
        page = session.page = LeanPage(None, session, "context", "main")  # type: ignore[arg-type]
        page.characters_max = 100
        with pytest.raises(PageTooLarge, match="999 bytes or more"):
            await page.goto("http://127.0.0.1/")
        assert session.notified == "Page.stopLoading"

    asyncio.run(story())
