"""The filter proxy of a page, addressed directly: by valid, forbidden and malformed requests."""

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from musterd.workers.browser import filter_proxy
from musterd.workers.browser.filter_proxy import FilterProxy
from musterd.workers.pages.addresses import AddressRules

HELLO = b"\x05\x01\x00"
DONE, FAILED, NOT_ALLOWED, UNREACHABLE, UNKNOWN_COMMAND = 0, 1, 2, 4, 7
PATIENCE_SECONDS = 30
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def told(story: Callable[[FilterProxy, int, int], Awaitable[None]], **rules: list[str]) -> None:
    """Run the story with a proxy, its port, and the port of a server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def run() -> None:
        proxy = FilterProxy(AddressRules(**rules))
        port = int((await proxy.start()).rpartition(":")[2])
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await story(proxy, port, server.sockets[0].getsockname()[1])
        finally:
            await proxy.close()
            server.close()
        assert not proxy._connections, "connections outlive the proxy"

    asyncio.run(run())


async def ask(port: int, host: bytes, to: int, *, command: int = 1) -> tuple[int, Streams]:
    """Ask for a connection by name; return the code of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = bytes((5, command, 0, 3, len(host))) + host + to.to_bytes(2, "big")
    writer.write(HELLO + request)
    assert await reader.readexactly(2) == b"\x05\x00"
    answer = await reader.readexactly(10)
    return answer[1], (reader, writer)


def test_what_is_allowed_is_connected_both_ways_until_both_ends_are_done() -> None:
    async def story(proxy: FilterProxy, port: int, echo: int) -> None:
        code, (reader, writer) = await ask(port, b"127.0.0.1", echo)
        assert code == DONE
        sent = os.urandom(3_000_000)
        writer.write(sent)
        writer.write_eof()  # the other direction goes on
        assert await reader.read(-1) == sent
        writer.close()

    told(story, deny=["link-local"])


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name has a private address beside a public one, which a second lookup could swap."""

    async def story(proxy: FilterProxy, port: int, echo: int) -> None:
        loop = asyncio.get_running_loop()
        lookups = []

        async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
            lookups.append(host)
            places = [("127.0.0.9", port), ("127.0.0.1", port)]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        opened = asyncio.open_connection

        async def open_connection(host: str, *more: Any, **named: Any) -> Any:
            assert host == "127.0.0.1", "connected to what was denied, or looked up once more"
            return await opened(host, *more, **named)

        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        code, (_, writer) = await ask(port, b"site.example", echo)
        assert code == DONE
        assert lookups == ["site.example"]
        writer.close()

    told(story, deny=["127.0.0.9/32"])


def test_what_is_denied_is_said() -> None:
    async def story(proxy: FilterProxy, port: int, echo: int) -> None:
        for name in (b"127.0.0.1", b"localhost", b"LOCALHOST"):
            code, (_, writer) = await ask(port, name, echo)
            assert code == NOT_ALLOWED
            writer.close()
        assert len(proxy.refusals) == 3
        assert all("denied by 'loopback'" in each for each in proxy.refusals)

    told(story, deny=["loopback"])


@pytest.mark.parametrize(
    "name", [b"a..b", b"x" * 255, b"\0", b"a\0b.example", b"\xff\xfe", b"%", b" "], ids=repr
)
def test_a_name_that_cannot_be_is_unreachable(name: bytes) -> None:
    async def story(proxy: FilterProxy, port: int, echo: int) -> None:
        code, (_, writer) = await ask(port, name, echo)
        assert code == UNREACHABLE
        writer.close()

    told(story, deny=["loopback"])


def test_nothing_but_connections_is_offered() -> None:
    async def story(proxy: FilterProxy, port: int, echo: int) -> None:
        for command in (2, 3):  # BIND, and UDP ASSOCIATE
            code, (_, writer) = await ask(port, b"127.0.0.1", echo, command=command)
            assert code == UNKNOWN_COMMAND
            writer.close()

    told(story, deny=["link-local"])


def test_garbage_and_crowds_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_proxy, "CONNECTIONS_MAX", 20)
    monkeypatch.setattr(filter_proxy, "HANDSHAKE_SECONDS", 0.5)
    chance = random.Random(15)

    async def story(proxy: FilterProxy, port: int, echo: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for reader, writer in silent:  # beyond the limit at once, the others after their timeout
            assert await reader.read() == b""
            writer.close()
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chance.randbytes(chance.randrange(1, 200)))
            writer.write_eof()
            await reader.read()
            writer.close()
        code, (_, writer) = await ask(port, b"127.0.0.1", echo)
        assert code == DONE
        writer.close()

    told(story, deny=["link-local"])
