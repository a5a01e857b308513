"""SOCKS5 proxy on loopback that lets one page connect only where its pool's rules allow.

Theory of operation. Chromium resolves names and connects by itself, for redirects, frames, scripts
and pictures alike, so no check of requested addresses can keep it from a private one. A page of a
pool with rules therefore has this proxy as its only way out. Chromium hands names over unresolved;
the proxy resolves them, checks each address, and connects to the very address it has checked. Every
page has a proxy of its own, which ends with it: so every refusal belongs to that page, and no
connection outlives the page.

    -> 05 n methods                  <- 05 00               (no authentication)
    -> 05 01 00 kind host port       <- 05 code 00 01 0.0.0.0:0
       kind: 01 IPv4, 03 length and name, 04 IPv6
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from musterd.workers.pages.addresses import AddressRules

HANDSHAKE_SECONDS = 10.0  # Chromium takes a millisecond
CONNECT_SECONDS = 5.0  # for one address
CONNECTIONS_MAX = 256  # of one page; Chromium itself opens at most 256 in all
REFUSALS_MAX = 20  # kept of a page: one is reported, the others are its parts
CHUNK_BYTES = 64 * 1024
# Against WebRTC: peer connections would go around the proxy by UDP.
NO_DIRECT_UDP = (
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # its older name
)
REFUSED = "net::ERR_SOCKS_CONNECTION_FAILED"  # Chromium's error for every answer but DONE

_VERSION, _CONNECT, _NO_AUTHENTICATION = 5, 1, 0
_IPV4, _NAME, _IPV6 = 1, 3, 4
_DONE, _FAILED, _NOT_ALLOWED, _UNREACHABLE, _UNKNOWN_COMMAND = 0, 1, 2, 4, 7


class FilterProxy:
    """Proxy that listens from start() to close()."""

    def __init__(self, rules: AddressRules) -> None:
        self.refusals: list[str] = []  # reasons, for the task's error
        self._rules = rules
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; return the address to give to Chromium."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return f"socks5://127.0.0.1:{port}"

    async def close(self) -> None:
        """End every connection."""
        if self._server is not None:
            self._server.close()
        for each in self._connections:
            each.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with _closing(writer):
            if len(self._connections) >= CONNECTIONS_MAX:
                return
            self._connections.add(task)
            try:
                # The client is always Chromium, which hangs up as it likes.
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                    await self._serve(reader, writer)
            except asyncio.CancelledError:
                pass  # the page is closed, and nobody waits for this task
            finally:
                self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            wanted = await _handshake(reader, writer)
        if wanted is None:
            return
        there = await self._connect(*wanted, writer)
        if there is None:
            return
        their_reader, their_writer = there
        with _closing(their_writer):
            await _answer(writer, _DONE)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, their_writer))
                group.create_task(_pump(their_reader, writer))

    async def _connect(
        self, host: str, port: int, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the first allowed address and answer."""
        if reason := self._rules.check(host):
            await self._refuse(reason, writer)
            return None
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # not known, or no possible name
            await _answer(writer, _UNREACHABLE)
            return None
        refused = ""
        for _, _, _, _, place in found:
            address = str(place[0])
            if reason := self._rules.check(host, address):
                refused = refused or reason
                continue
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    return await asyncio.open_connection(address, port, limit=CHUNK_BYTES)
        if refused:
            await self._refuse(refused, writer)
        else:
            await _answer(writer, _FAILED)
        return None

    async def _refuse(self, reason: str, writer: asyncio.StreamWriter) -> None:
        if len(self.refusals) < REFUSALS_MAX:
            self.refusals.append(reason)
        await _answer(writer, _NOT_ALLOWED)


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[str, int] | None:
    """Return the wanted host and port; None if this is no SOCKS5, or no connect request."""
    version, methods = await reader.readexactly(2)
    if version != _VERSION or _NO_AUTHENTICATION not in await reader.readexactly(methods):
        return None
    writer.write(bytes((_VERSION, _NO_AUTHENTICATION)))
    _, command, _, kind = await reader.readexactly(4)
    if kind == _NAME:
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode("latin-1")
    elif kind in (_IPV4, _IPV6):
        host = str(ipaddress.ip_address(await reader.readexactly(4 if kind == _IPV4 else 16)))
    else:
        return None
    port = int.from_bytes(await reader.readexactly(2), "big")
    if command != _CONNECT:
        await _answer(writer, _UNKNOWN_COMMAND)
        return None
    return host, port


async def _answer(writer: asyncio.StreamWriter, code: int) -> None:
    writer.write(bytes((_VERSION, code, 0, _IPV4, 0, 0, 0, 0, 0, 0)))
    await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of one side, and pass the end on to the other."""
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
    except OSError:  # reset by one side: the other side is closed as well
        writer.transport.abort()


@contextlib.contextmanager
def _closing(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        writer.close()
