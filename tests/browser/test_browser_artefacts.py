"""Why a page failed: picture, HTML, console and trace of failed tasks, with both backends."""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from musterd.ipc.errors import ChallengePage, ConfigurationError
from musterd.ipc.wire.artefacts import Keep, artefacts_of
from musterd.ipc.wire.messages import Lease
from musterd.workers.authoring import settings
from musterd.workers.authoring.base import Context
from musterd.workers.browser import BrowserWorker, evidence, find_executable
from musterd.workers.browser.backend import CONSOLE_LINES_MAX
from musterd.workers.browser.errors import ScriptFailed
from musterd.workers.pages.http import SiteTimeout, SiteUnreachable

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

BACKENDS = ("playwright", "cdp")
PATIENCE_SECONDS = 120.0
PAGE = "<title>shop</title><h1>Sold out</h1><script>console.error('no stock', 7)</script>"
PAGES = {
    "/shop": PAGE + "<script>missing.call()</script>",
    "/spin": PAGE + "<script>setTimeout(() => { for (;;); }, 0)</script>",
    "/flood": PAGE + "<script>for (let i = 0; i < 20000; i++) console.log('line', i)</script>",
    "/challenge": "<title>Just a moment...</title><p>wait</p>",
}
NO_PRICE = "throw new Error('no price')"
PNG = b"\x89PNG\r\n\x1a\n"
WATCHED = b"\x90"  # rules of a schedule: all fields


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def whole() -> None:
            await test(**fixtures)

        asyncio.run(whole())

    return run


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
        body, length = PAGES.get(path, PAGE), len(PAGES.get(path, PAGE))
        if path == "/cut":
            length += 1000
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}"
        writer.write(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def working(backend: str, **options: Any) -> AsyncIterator[tuple[BrowserWorker, str]]:
    """Yield an open worker, and the address of the site."""
    async with contextlib.AsyncExitStack() as stack:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        stack.callback(server.close)
        worker = BrowserWorker()
        worker.options = {"backend": backend, **options}
        await worker.open()
        stack.push_async_callback(worker.close)
        yield worker, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a picture as much time as a busy machine needs."""
    monkeypatch.setattr(evidence, "EVIDENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(evidence, "TRACE_SECONDS", PATIENCE_SECONDS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep artefacts in this folder; afterwards nothing may be left in the temporary directory."""
    kept, temporary = tmp_path / "artefacts", tmp_path / "t"
    kept.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    given = settings.Settings(artefacts=Keep(str(kept), 100, 2**30, 10**18))
    monkeypatch.setattr(settings, "_settings", given)
    yield kept
    assert not list(temporary.iterdir())


def context(seconds: float = math.inf, *, session: bool = False, watch: bytes = b"") -> Context:
    lease = Lease(1, "t", "extract", b"", 1, 0, watch=watch)
    vault = SimpleNamespace(opened=session, used=False, redact=str)
    channel: Any = SimpleNamespace(vault=vault)
    return Context("t", 1, time.monotonic() + seconds, channel, lease)


def kept_of(ctx: Context, folder: Path) -> dict[str, bytes]:
    """End the attempt with a failure, as the runtime does; return what it has left."""
    ctx.keep_artefacts()
    found = artefacts_of(str(folder), "t")
    return {each.name.removeprefix("attempt-1."): Path(each.path).read_bytes() for each in found}


@pytest.mark.parametrize("backend", BACKENDS)
@in_loop
async def test_a_page_that_lacks_something_leaves_picture_html_and_console(backend, folder):
    async with working(backend) as (worker, site):
        ctx = context()
        with pytest.raises(SiteTimeout):
            await worker.extract(ctx, f"{site}/shop", {"a": "b"}, wait_for=".price", timeout=10)
        kept = kept_of(ctx, folder)
    assert sorted(kept) == ["console.txt", "page.html", "screenshot.png"]
    assert kept["screenshot.png"].startswith(PNG)
    assert b"<h1>Sold out</h1>" in kept["page.html"]
    assert b"error: no stock 7" in kept["console.txt"]
    assert b"missing is not defined" in kept["console.txt"]


@pytest.mark.one_backend
@pytest.mark.parametrize("backend", BACKENDS)
@in_loop
async def test_a_challenge_in_place_of_the_page_is_shown(backend, folder):
    async with working(backend) as (worker, site):
        ctx = context(watch=WATCHED)
        with pytest.raises(ChallengePage):
            await worker.extract(ctx, f"{site}/challenge", {"price": ".price"})
        kept = kept_of(ctx, folder)
    assert b"Just a moment" in kept["page.html"]
    assert kept["screenshot.png"].startswith(PNG)


@pytest.mark.one_backend
@pytest.mark.parametrize("backend", BACKENDS)
@in_loop
async def test_a_document_that_broke_off_is_shown_as_far_as_it_came(backend, folder):
    async with working(backend) as (worker, site):
        ctx = context()
        with pytest.raises(SiteUnreachable):
            await worker.render(ctx, f"{site}/cut")
        kept = kept_of(ctx, folder)
    assert kept["screenshot.png"].startswith(PNG)


@pytest.mark.parametrize("backend", BACKENDS)
@in_loop
async def test_a_page_that_spins_does_not_hold_its_failure_back(backend, folder, monkeypatch):
    monkeypatch.setattr(evidence, "EVIDENCE_SECONDS", 0.5)
    async with working(backend) as (worker, site):
        ctx = context()
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(SiteTimeout):
                await worker.render(ctx, f"{site}/spin", wait_for=".price", timeout=8)
        kept = kept_of(ctx, folder)
        assert b"error: no stock 7" in kept["console.txt"]
        # Its browser works, and the next page is a good one.
        assert (await worker.render(context(), f"{site}/shop"))["title"] == "shop"


@pytest.mark.one_backend
@pytest.mark.parametrize("backend", BACKENDS)
@in_loop
async def test_nothing_is_made_of_a_page_with_secrets_unless_asked_for(backend, folder):
    async with working(backend) as (worker, site):
        ctx = context(session=True)
        with pytest.raises(ScriptFailed):
            await worker.render(ctx, f"{site}/shop", script=NO_PRICE)
        assert kept_of(ctx, folder) == {}
    async with working(backend, artefacts="always") as (worker, site):
        ctx = context(session=True)
        with pytest.raises(ScriptFailed):
            await worker.render(ctx, f"{site}/shop", script=NO_PRICE)
        assert "screenshot.png" in kept_of(ctx, folder)


@pytest.mark.one_backend
@pytest.mark.parametrize("backend", BACKENDS)
@in_loop
async def test_a_page_that_talks_forever_is_not_listened_to(backend, folder):
    async with working(backend) as (worker, site):
        ctx = context()
        with pytest.raises(ScriptFailed):
            await worker.render(ctx, f"{site}/flood", script=NO_PRICE)
        lines = kept_of(ctx, folder)["console.txt"].splitlines()
    assert len(lines) == CONSOLE_LINES_MAX


@in_loop
async def test_a_trace_is_kept_where_it_is_asked_for(folder):
    async with working("playwright", trace=True) as (worker, site):
        ctx = context()
        assert (await worker.render(ctx, f"{site}/shop"))["status"] == 200
        ctx.drop_artefacts()
        ctx = context()
        with pytest.raises(ScriptFailed):
            await worker.render(ctx, f"{site}/shop", script=NO_PRICE)
        kept_of(ctx, folder)
    (trace,) = [each for each in artefacts_of(str(folder), "t") if each.name.endswith("zip")]
    with ZipFile(trace.path) as packed:
        assert any(name.endswith(".trace") for name in packed.namelist())


def test_a_trace_needs_playwright():
    with pytest.raises(ConfigurationError, match="trace needs"):
        BrowserWorker.check_options({"backend": "cdp", "trace": True})


@in_loop
async def test_evidence_leaves_time_to_close_the_page(folder):
    class Wedged:
        """A page that answers nothing."""

        console = SimpleNamespace(lines=["error: last words"])

        async def last_picture(self) -> bytes:
            await asyncio.sleep(PATIENCE_SECONDS)
            return b""

        async def last_html(self, _: int) -> str:
            await asyncio.sleep(PATIENCE_SECONDS)
            return ""

    page: Any = Wedged()
    ctx = context(-1)  # after the task's own timeout
    spent = await evidence.hold(ctx, page, asyncio.CancelledError(), "auto", trace=False)
    assert 0 < spent <= evidence.LATE_SECONDS
    assert kept_of(ctx, folder) == {"console.txt": b"error: last words\n"}
