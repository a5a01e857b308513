"""Slow clients, and one client too many, lose their connections; the others are served."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from musterd.supervisor.web import protocol
from musterd.supervisor.web.security import BODY_BYTES_MAX

SECONDS_MAX = 20.0
LARGE = 8 * 1024 * 1024  # more than sockets buffer


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, then answer; answer /large with LARGE bytes."""
    while (await receive()).get("more_body"):
        pass
    body = b"x" * LARGE if scope["path"] == "/large" else b"hello"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application,
        http=protocol.PatientProtocol,
        lifespan="off",
        ws="none",
        log_config=None,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=0,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


Story = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def told(*stories: Story) -> None:
    """Run each story on a connection of its own, one after the other."""

    async def run() -> None:
        async with serving() as port, asyncio.timeout(SECONDS_MAX):
            for story in stories:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    await story(reader, writer)
                finally:
                    writer.close()

    asyncio.run(run())


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")


async def ended(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await reader.read(1) == b""
    return True


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.3)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost:",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf",
    ],
)
def test_a_request_that_does_not_come_to_its_end_is_given_up(begun: bytes) -> None:
    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        assert await ended(reader)

    told(story, ask)


@pytest.mark.usefixtures("hasty")
def test_a_drop_now_and_then_does_not_help() -> None:
    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\n")
        ending = asyncio.create_task(ended(reader))
        while not ending.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"X: y\r\n")
                await writer.drain()
            await asyncio.sleep(0.05)
        assert await ending

    told(story, ask)


@pytest.mark.usefixtures("hasty")
def test_the_second_request_of_a_connection_has_to_be_as_quick() -> None:
    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader, writer)
        await ask(reader, writer)
        writer.write(b"GET / HT")
        assert await ended(reader)

    told(story)


@pytest.mark.usefixtures("hasty")
def test_a_connection_that_rests_between_two_requests_stays() -> None:
    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader, writer)
        with pytest.raises(TimeoutError):  # longer than a request may take
            await asyncio.wait_for(reader.read(1), 0.8)
        await ask(reader, writer)

    told(story)


@pytest.mark.usefixtures("hasty")
def test_an_answer_that_nobody_reads_is_given_up_and_one_that_is_read_is_not() -> None:
    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert len(await reader.readexactly(LARGE)) == LARGE

    async def unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport: Any = writer.transport
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        transport.pause_reading()
        await asyncio.sleep(1.0)  # three times what an answer is given
        transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(LARGE)

    told(read, unread, ask)


def test_one_connection_too_many_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CONNECTIONS_MAX", 2)

    async def run() -> None:
        async with (
            serving() as port,
            asyncio.timeout(SECONDS_MAX),
            contextlib.AsyncExitStack() as s,
        ):
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                s.callback(writer.close)
                await ask(reader, writer)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            s.callback(writer.close)
            assert await ended(reader)

    asyncio.run(run())


def _request(size: int, *, pieces: int = 1) -> list[bytes]:
    """Return a request whose line and headers have `size` bytes, cut into pieces."""
    start, end = b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"\r\n\r\n"
    whole = start + b"x" * (size - len(start) - len(end)) + end
    step = -(-len(whole) // pieces)
    return [whole[at : at + step] for at in range(0, len(whole), step)]


@pytest.mark.parametrize(
    ("size", "pieces", "status"),
    [
        (protocol.HEADER_BYTES_MAX, 1, b"200"),
        (protocol.HEADER_BYTES_MAX, 7, b"200"),
        (protocol.HEADER_BYTES_MAX + 1, 1, b"431"),
        (protocol.HEADER_BYTES_MAX + 1, 7, b"431"),
        (protocol.HEADER_BYTES_MAX * 3, 1, b"431"),
    ],
)
def test_headers_over_the_limit_are_refused_however_they_arrive(
    size: int, pieces: int, status: bytes
) -> None:
    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in _request(size, pieces=pieces):
            writer.write(piece)
            await asyncio.sleep(0)
        answer = await reader.readline()
        assert answer.split()[1] == status

    told(story, ask)


def test_headers_that_never_end_are_refused_at_the_limit() -> None:
    async def story(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in _request(protocol.HEADER_BYTES_MAX * 2, pieces=7)[:5]:
            writer.write(piece)
            await asyncio.sleep(0)
        assert (await reader.readline()).split()[1:2] == [b"431"]

    told(story, ask)


def test_the_limits_that_are_documented_are_those_in_force() -> None:
    page = (Path(__file__).parents[4] / "docs" / "monitoring.md").read_text()
    limits = " ".join(page.partition("\nLimits: ")[2].split())
    assert limits.startswith(f"{protocol.ANSWERED_MAX} connections;")
    assert f"beyond {protocol.CONNECTIONS_MAX} connections nothing" in limits
    assert f"{protocol.HEADER_BYTES_MAX / 1024:g} KiB of headers (then 431)" in limits
    assert f"{BODY_BYTES_MAX / 1024:g} KiB of body" in limits
    assert f"{protocol.REQUEST_SECONDS:g} seconds for a request to arrive" in limits
    assert f"{protocol.STALL_SECONDS:g} for an answer to be read" in limits
