"""The client of the DevTools protocol; the test holds the other end of its pipes."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from musterd.workers.browser import cdp
from musterd.workers.browser.errors import BrowserDied, BrowserError, BrowserStuck, PageCrashed


class Peer:
    """The browser's ends of the pipes."""

    def __init__(self, connection: cdp.Connection, commands: int, answers: int) -> None:
        self.connection = connection
        self.commands = commands
        self.answers = answers

    def read(self) -> list[dict[str, Any]]:
        """Return the commands written so far, at least one."""
        return [json.loads(part) for part in os.read(self.commands, 65536).split(b"\0") if part]

    def write(self, data: bytes) -> None:
        os.write(self.answers, data)

    def answer(self, **message: Any) -> None:
        self.write(json.dumps(message).encode() + b"\0")

    def hang_up(self) -> None:
        os.close(self.answers)
        self.answers = -1


def with_peer(work: Callable[[Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        commands, ours_out = os.pipe()
        ours_in, answers = os.pipe()
        peer = Peer(await cdp.Connection.open(ours_out, ours_in), commands, answers)
        try:
            async with asyncio.timeout(30):
                await work(peer)
        finally:
            peer.connection.end(BrowserDied("the test is over"))
            await asyncio.sleep(0)  # the transports close in the next turn of the loop
            for end in {peer.commands, peer.answers} - {-1}:
                os.close(end)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"half \ud83d", "half \N{REPLACEMENT CHARACTER}"),
        (rb"\udC00\uD83D\u0041", "\N{REPLACEMENT CHARACTER}" * 2 + "A"),
        (rb"\ud83d\ude00 \ud83d", "\N{GRINNING FACE} \N{REPLACEMENT CHARACTER}"),
        (rb"\\ud83d \udc00", "\\ud83d \N{REPLACEMENT CHARACTER}"),
        (rb"\ud83d\\ude00", "\N{REPLACEMENT CHARACTER}\\ude00"),
    ],
)
def test_halves_of_characters_are_replaced(sent: bytes, read: str) -> None:
    """Pages say such things, and the browser is shared by many pages."""

    async def work(peer: Peer) -> None:
        answer = asyncio.ensure_future(peer.connection.browser.command("One"))
        await asyncio.sleep(0)
        peer.write(b'{"id": 1, "result": {"a": "' + sent + b'"}}\0')
        assert await answer == {"a": read}

    with_peer(work)


def test_what_a_page_says_at_length_is_dropped_as_it_comes() -> None:
    """Pages may log hundreds of megabytes, of which nobody wants more than a line."""

    async def work(peer: Peer) -> None:
        heard: list[dict[str, Any]] = []
        peer.connection.session("S").on("Runtime.consoleAPICalled", heard.append)
        answer = asyncio.ensure_future(peer.connection.browser.command("One"))
        await asyncio.sleep(0)
        for size in (cdp.SAID_BYTES_MAX // 2, 2 * cdp.SAID_BYTES_MAX):
            said = b'{"method":"Runtime.consoleAPICalled","params":{"a":"' + b"x" * size
            for start in range(0, len(said), 65536):
                peer.connection.data_received(said[start : start + 65536])
                assert peer.connection.held_bytes <= cdp.SAID_BYTES_MAX + 65536
            peer.connection.data_received(b'"},"sessionId":"S"}')
            peer.connection.data_received(b"\0")
        peer.connection.data_received(said + b'"}}\0{"id": 1, "result": {"a": 1}}\0')
        assert await answer == {"a": 1}
        assert [len(each["a"]) for each in heard] == [cdp.SAID_BYTES_MAX // 2]

    with_peer(work)


def test_answers_find_their_commands_in_any_order_and_in_pieces() -> None:
    async def work(peer: Peer) -> None:
        browser = peer.connection.browser
        one = asyncio.ensure_future(browser.command("One", number=1))
        two = asyncio.ensure_future(peer.connection.session("S").command("Two"))
        await asyncio.sleep(0)
        first, second = peer.read()
        assert first == {"id": 1, "method": "One", "params": {"number": 1}}
        assert second == {"id": 2, "method": "Two", "params": {}, "sessionId": "S"}
        peer.write(b'{"id": 2, "sessionId": "S", "res')
        await asyncio.sleep(0.01)
        peer.write(b'ult": {"a": 2}}\0{"id": 1, "result": {"a": 1}}\0')
        assert await one == {"a": 1}
        assert await two == {"a": 2}

    with_peer(work)


def test_events_reach_the_handler_of_their_session_alone() -> None:
    async def work(peer: Peer) -> None:
        got = asyncio.get_running_loop().create_future()
        peer.connection.session("A").on("Page.moved", lambda _: got.set_exception(AssertionError()))
        peer.connection.session("B").on("Page.moved", got.set_result)
        peer.answer(method="Page.moved", sessionId="unknown", params={})
        peer.answer(method="Page.other", sessionId="B", params={})
        peer.answer(method="Page.moved", sessionId="B", params={"to": 1})
        assert await got == {"to": 1}

    with_peer(work)


def test_an_error_and_a_deadline_end_a_command_and_a_late_answer_is_dropped() -> None:
    async def work(peer: Peer) -> None:
        browser = peer.connection.browser
        with pytest.raises(BrowserStuck, match=r"no answer to Slow within 0\.01 s"):
            await browser.command("Slow", seconds=0.01)
        peer.answer(id=1, result={"late": True})
        failing = asyncio.ensure_future(browser.command("Fail"))
        await asyncio.sleep(0)
        peer.answer(id=2, error={"code": -32000, "message": "no such page"})
        with pytest.raises(cdp.CommandFailed, match="Fail: no such page"):
            await failing

    with_peer(work)


def test_the_end_of_a_session_fails_its_own_commands_alone() -> None:
    async def work(peer: Peer) -> None:
        page = peer.connection.session("S")
        lost = asyncio.ensure_future(page.command("Page.navigate", seconds=None))
        kept = asyncio.ensure_future(peer.connection.browser.command("Kept"))
        await asyncio.sleep(0)
        page.end(PageCrashed("gone"))
        with pytest.raises(PageCrashed):
            await lost
        with pytest.raises(PageCrashed):
            await page.command("More")
        peer.answer(id=2, result={})
        assert await kept == {}

    with_peer(work)


@pytest.mark.parametrize(
    ("sent", "error"),
    [(None, BrowserDied), (b"no json\0", BrowserError), (b"x" * 2000, BrowserError)],
    ids=["end of file", "garbage", "too long"],
)
def test_what_ends_the_connection_fails_every_command(
    sent: bytes | None, error: type[BrowserError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdp, "MESSAGE_BYTES_MAX", 1000)

    async def work(peer: Peer) -> None:
        waiting = [
            asyncio.ensure_future(session.command("Wait", seconds=None))
            for session in (peer.connection.browser, peer.connection.session("S"))
        ]
        await asyncio.sleep(0)
        if sent is None:
            peer.hang_up()
        else:
            peer.write(sent)
        for each in waiting:
            with pytest.raises(error):
                await each
        with pytest.raises(error):
            await peer.connection.browser.command("More")

    with_peer(work)


def test_a_browser_that_reads_nothing_does_not_fill_our_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cdp, "UNSENT_BYTES_MAX", 100_000)

    async def work(peer: Peer) -> None:
        peer.connection.notify("Fill", {"text": "x" * 1_000_000})
        with pytest.raises(BrowserStuck, match="does not read"):
            peer.connection.notify("Fill", {})

    with_peer(work)
