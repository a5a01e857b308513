"""Content that is too large or impossible costs one attempt, and no memory of the worker."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.workers.authoring.base import Context
from musterd.workers.browser import BrowserWorker, find_executable
from musterd.workers.pages.http import BadRequest, PageTooLarge

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

BACKENDS = ("playwright", "cdp")
BODY_BYTES = 200 * 1024 * 1024
PIECE = b"<p>" + b"x" * (64 * 1024 - 7) + b"</p>"
LIMIT = 1_000_000
PATIENCE_SECONDS = 45


class Endless(BaseHTTPRequestHandler):
    """/announced has a Content-Length, /chunked has none; both send until the peer disconnects."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if self.path == "/small":
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"<p>hi</p>")
            return
        chunked = self.path == "/chunked"
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(BODY_BYTES))
        self.end_headers()
        self.close_connection = True
        try:
            while type(self).sent < BODY_BYTES:
                head = f"{len(PIECE):x}\r\n".encode() if chunked else b""
                self.wfile.write(head + PIECE + (b"\r\n" if chunked else b""))
                type(self).sent += len(PIECE)
        except OSError:
            pass  # nobody wants the rest

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def endless() -> Iterator[str]:
    Endless.sent = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def call(backend: str, method: str, url: str, **args: Any) -> Any:
    """Run one task, then another one in the same browser."""

    async def story() -> Any:
        worker = BrowserWorker()
        worker.pool, worker.options = "browser", {"backend": backend}
        await worker.open()
        first = worker._browser
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                try:
                    return await getattr(worker, method)(Context("a"), url, **args)
                finally:
                    site = url.rpartition("/")[0]
                    assert "hi" in (await worker.render(Context("b"), f"{site}/small"))["html"]
                    assert worker._browser is first
        finally:
            await worker.close()

    return asyncio.run(story())


@pytest.mark.parametrize("method", ["render", "extract"])
@pytest.mark.parametrize(
    ("backend", "path"),
    [("playwright", "announced"), ("cdp", "announced"), ("cdp", "chunked")],
)
def test_a_body_far_over_the_limit_is_not_loaded(
    endless: str, scratch: Path, backend: str, path: str, method: str
) -> None:
    with pytest.raises(PageTooLarge, match="over the limit of 1000000 characters"):
        call(backend, method, f"{endless}/{path}", max_bytes=LIMIT)
    assert Endless.sent < BODY_BYTES, "all of it was loaded"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_script_returns_is_limited_too(endless: str, scratch: Path, backend: str) -> None:
    with pytest.raises(PageTooLarge, match="the script returned 2000002 characters"):
        call(
            backend, "render", f"{endless}/small", script="return 'x'.repeat(2e6)", max_bytes=LIMIT
        )
    page = call(
        backend, "render", f"{endless}/small", script="return {a: [1, null]}", max_bytes=LIMIT
    )
    assert page["script"] == {"a": [1, None]}


@pytest.mark.one_backend
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_nobody_wants_of_a_script_stays_in_the_page(
    endless: str, scratch: Path, backend: str
) -> None:
    script = "document.title = 'done'; return 'x'.repeat(2e7)"
    found = call(backend, "extract", f"{endless}/small", select={"t": "title"}, script=script)
    assert found == {"t": "done"}


@pytest.mark.one_backend
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "cookie",
    [
        {"name": "a;b", "value": "topsecret"},
        {"name": "__Host-a", "value": "topsecret"},
    ],
    ids=["name", "prefix"],
)
def test_a_cookie_that_cannot_be_is_the_tasks_own_mistake(
    endless: str, scratch: Path, backend: str, cookie: dict[str, str]
) -> None:
    with pytest.raises(BadRequest, match="cannot be set") as raised:
        call(backend, "render", f"{endless}/small", cookies=[cookie])
    assert repr(cookie["name"]) in str(raised.value)
    assert "topsecret" not in str(raised.value)
