"""Pages and selectors that would take forever, and the process that reads them."""

import asyncio
import http.server
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from musterd import TaskFailed
from musterd.workers.authoring.base import Permanent
from musterd.workers.pages.extraction import PageTooDeep, compile_selectors, extract
from musterd.workers.pages.page_reader import (
    CHEAP_BYTES_MAX,
    CHEAP_SELECTORS_MAX,
    PageReader,
    PageTooCostly,
    ReaderLost,
    is_cheap,
)
from support.daemon import Musters

MANY = 100_000
FILLED = "<title>shop</title>" + "<p>tea</p>" * 20_000

COSTLY = {
    "elements in each other": ("<div>" * MANY, "title"),
    "lists in each other": ("<ul><li>" * MANY, "title"),
    "formatting that is never closed": ("".join(f"<b id={n}>" for n in range(MANY)), "title"),
    "attributes": ("<div " + " ".join(f"a{n}" for n in range(MANY)) + ">", "title"),
    "attributes, for XPath": (
        "<p " + " ".join(f"a{n}" for n in range(MANY)) + ">",
        "xpath://title",
    ),
    "a selector of many steps": ("<div>" * 600 + "<i>x", "span div div div i"),
    "a path in a path": ("<p>x" * 10_000, "xpath://p[count(//p[count(//p) > 1]) > 1]"),
}


def using(act: Callable[[PageReader], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        reader = PageReader()
        try:
            return await act(reader)
        finally:
            reader.close()

    return asyncio.run(scenario())


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children()}


@pytest.mark.parametrize("what", COSTLY)
def test_a_costly_page_fails_for_good_and_the_next_one_is_read(what: str) -> None:
    page, selector = COSTLY[what]

    async def act(reader: PageReader) -> None:
        with pytest.raises(PageTooCostly, match="select with fewer") as caught:
            await reader.extract(page, compile_selectors({"it": selector}))
        assert isinstance(caught.value, Permanent)
        found = await reader.extract(FILLED, compile_selectors({"it": "title"}))
        assert found == {"it": "shop"}

    using(act)


def test_many_options_are_read() -> None:
    page = "<select>" + "<option>x" * MANY + "</select>"

    async def act(reader: PageReader) -> Any:
        return await reader.extract(page, compile_selectors({"all": "[]option"}))

    assert using(act) == {"all": ["x"] * MANY}


def test_what_is_deeper_than_xpath_reads_is_told_and_not_left_out() -> None:
    deep = compile_selectors({"it": "xpath://h1"})
    assert extract("<div>" * 1000 + "<h1>x</h1>", deep) == {"it": "x"}
    with pytest.raises(PageTooDeep, match="select with CSS"):
        extract("<div>" * 3000 + "<h1>x</h1>", deep)

    async def act(reader: PageReader) -> None:
        with pytest.raises(PageTooDeep):
            await reader.extract("<div>" * 3000 + FILLED, deep)

    using(act)


def test_the_process_finds_the_same_as_the_worker() -> None:
    page = FILLED + "\ud800<h1>half an emoji</h1>"
    selectors = compile_selectors(
        {"css": "h1", "all": "[]p", "xpath": "xpath:count(//p)", "none": "h2", "empty": "[]h2"}
    )

    async def act(reader: PageReader) -> Any:
        before = children()
        found = await reader.extract(page, selectors)
        assert len(children() - before) == 1
        assert await reader.extract(page, selectors) == found  # in the same process
        assert len(children() - before) == 1
        return found

    before = children()
    assert using(act) == extract(page, selectors)
    assert children() == before


def test_a_cheap_page_needs_no_process() -> None:
    async def act(reader: PageReader) -> Any:
        before = children()
        found = await reader.extract("<h1>tea</h1>", compile_selectors({"it": "h1"}))
        assert children() == before
        return found

    assert using(act) == {"it": "tea"}


@pytest.mark.parametrize(
    ("selector", "cheap"),
    [
        *((each, True) for each in ("h1", ".price", "a.promo::attr(href)", "ul > li", "#a .b")),
        *((each, True) for each in ("a[href]", 'a[rel="x y"]', "*", "[]p::text")),
        *((each, True) for each in ("xpath://h1/text()", "xpath://a[@class='x']/@href")),
        *((each, False) for each in ("a b c", "a:has(b)", "a ~ b", "p:nth-child(2)", "a, b")),
        *((each, False) for each in ("xpath://a//b", "xpath:count(//p)", "xpath://p[1]")),
    ],
)
def test_only_what_is_surely_cheap_is_done_at_once(selector: str, cheap: bool) -> None:
    selectors = compile_selectors({"it": selector})
    assert is_cheap("<p>", selectors) is cheap
    assert not is_cheap("x" * (CHEAP_BYTES_MAX + 1), selectors)
    assert not is_cheap("<p>", selectors * (CHEAP_SELECTORS_MAX + 1))


def test_a_process_that_is_killed_is_no_fault_of_the_page() -> None:
    selectors = compile_selectors({"it": "title"})

    async def act(reader: PageReader) -> None:
        before = children()
        await reader.extract(FILLED, selectors)
        (process,) = children() - before
        os.kill(process, signal.SIGKILL)
        with pytest.raises(ReaderLost, match=r"\(-9\)"):
            await reader.extract(FILLED, selectors)
        assert await reader.extract(FILLED, selectors) == {"it": "shop"}

    using(act)


def test_a_task_that_is_cancelled_ends_its_reading() -> None:
    page, selector = COSTLY["elements in each other"]

    async def act(reader: PageReader) -> None:
        before = children()
        reading = asyncio.create_task(reader.extract(page, compile_selectors({"it": selector})))
        while not children() - before:
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert children() == before

    using(act)


def test_a_hostile_page_costs_its_task_and_no_worker(muster: Musters) -> None:
    """The reader runs in a real worker, with containment and signals."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = FILLED if self.path == "/shop" else "<div>" * MANY
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        pool = {"worker": "musterd.workers.parser:ParserWorker", "size": 1}
        daemon = muster({"parser": pool})
        client = daemon.client()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(TaskFailed, match="PageTooCostly") as caught:
            client.submit("parser.extract", {"url": f"{url}/deep"}, max_retries=3).result(90)
        assert "select with fewer" in str(caught.value)
        shop = client.submit("parser.extract", {"url": f"{url}/shop"}).result(60)
        assert shop == {"title": "shop"}
        assert daemon.pool("parser").lost == {}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
