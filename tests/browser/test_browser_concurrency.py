"""Several pages at once in one browser: `concurrency`, with both backends."""

import asyncio
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.workers.authoring.base import Context
from musterd.workers.browser import BrowserWorker, find_executable

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

BACKENDS = ("playwright", "cdp")
TOGETHER = 3
PATIENCE_SECONDS = 45
PAGE = """<!doctype html><title>?</title><script>
document.title = "seen: " + document.cookie + (localStorage.getItem("who") || "");
document.cookie = "who=" + location.search; localStorage.setItem("who", location.search);
</script>"""


class Meeting(BaseHTTPRequestHandler):
    """Answers once TOGETHER requests have come."""

    barrier = threading.Barrier(TOGETHER)

    def do_GET(self) -> None:
        try:
            self.barrier.wait(PATIENCE_SECONDS)
            status = 200
        except threading.BrokenBarrierError:
            status = 503
        body = PAGE.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def meeting() -> Iterator[str]:
    """Yield the address of a site that serves pages only to that many visitors at once."""
    Meeting.barrier = threading.Barrier(TOGETHER)
    with ThreadingHTTPServer(("127.0.0.1", 0), Meeting) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_rendered_side_by_side_and_know_nothing_of_each_other(
    muster, unprivileged, meeting, backend
):
    pool = {
        "worker": "musterd.workers.browser:BrowserWorker",
        "size": 1,
        "concurrency": TOGETHER,
        # Pages that wait for each other must not be on both sides of a replacement.
        "options": {"backend": backend, "recycle_requests": TOGETHER},
    }
    daemon = muster({"browser": pool}, as_user=unprivileged.uid if os.geteuid() == 0 else None)
    with daemon.client() as client:
        handles = [
            client.submit("browser.render", {"url": f"{meeting}/?{n}", "block": []}, max_retries=0)
            for n in range(3 * TOGETHER)
        ]
        pages = [handle.result(90) for handle in handles]
    assert [page["status"] for page in pages] == [200] * len(pages)
    assert {page["title"] for page in pages} == {"seen:"}
    assert "launching the browser again" in daemon.log(), "it is replaced all the same"
    assert daemon.pool("browser").lost == {}


@pytest.mark.one_backend
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_used_up_browser_is_replaced_when_its_last_page_is_closed(
    backend: str, scratch: Path, sample_site: str
) -> None:
    async def story() -> None:
        worker = BrowserWorker()
        worker.pool = "browser"
        worker.options = {"backend": backend, "recycle_requests": 1}
        await worker.open()
        first = worker._browser
        try:
            async with worker.open_page(Context("a")):
                other = asyncio.create_task(worker.render(Context("b"), f"{sample_site}/"))
                async with asyncio.timeout(PATIENCE_SECONDS), worker.open_page(Context("a")):
                    pass  # a task that has a page already does not wait
                await asyncio.sleep(0.2)
                assert not other.done()
                assert worker._browser is first, "nobody's page is taken away"
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert (await other)["status"] == 200
            assert worker._browser is not first
        finally:
            await worker.close()

    asyncio.run(story())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_browser_that_died_is_replaced_once_for_all_that_need_another(
    backend: str, scratch: Path, sample_site: str
) -> None:
    async def story() -> None:
        worker = BrowserWorker()
        worker.pool = "browser"
        worker.options = {"backend": backend}
        await worker.open()
        launches = 0
        launch = worker._launch

        async def counted() -> None:
            nonlocal launches
            launches += 1
            await launch()

        worker._launch = counted  # type: ignore[method-assign]
        assert worker._browser is not None
        await worker._browser.close(force=True)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                pages = await asyncio.gather(
                    *(worker.render(Context(f"t{n}"), f"{sample_site}/") for n in range(3))
                )
            assert [page["status"] for page in pages] == [200] * 3
            assert launches == 1
        finally:
            await worker.close()

    asyncio.run(story())
