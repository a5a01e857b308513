"""Client of the Chrome DevTools Protocol over `--remote-debugging-pipe`.

Chromium reads commands on its descriptor 3 and writes answers and events on its descriptor 4: JSON,
each message ended by a NUL byte.

    -> {"id": 7, "sessionId": "S", "method": "Page.navigate", "params": {...}} NUL
    <- {"id": 7, "sessionId": "S", "result": {...}} NUL      or "error": {"code", "message"}
    <- {"sessionId": "S", "method": "Page.loadEventFired", "params": {...}} NUL

A session is one attached page; messages without a session are for the browser itself. A command
ends by its answer, by its deadline, or because its session or the whole connection has ended: it
never waits forever unless it was asked to.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import msgspec

from musterd.workers.browser.errors import BrowserDied, BrowserError, BrowserStuck

COMMAND_SECONDS = 10.0  # commands that do not depend on a site take milliseconds
MESSAGE_BYTES_MAX = 256 * 1024 * 1024  # Chromium's own limit of one message
# What a page says, of which a line is kept at most: longer messages are dropped as they come.
SAID_BYTES_MAX = 1024 * 1024
SAID = (
    b'{"method":"Runtime.consoleAPICalled"',
    b'{"method":"Runtime.exceptionThrown"',
    b'{"method":"Log.entryAdded"',
)
UNSENT_BYTES_MAX = 16 * 1024 * 1024  # a browser that reads nothing must not fill our memory
END = b"\0"

# What follows a backslash in JSON: a pair of surrogates, half of a pair, or anything else.
_ESCAPED = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F]..)|.)", re.DOTALL
)
REPLACEMENT = rb"\ufffd"

log = logging.getLogger(__name__)
Handler = Callable[[dict[str, Any]], None]


def _without_halves(escaped: "re.Match[bytes]") -> bytes:
    """Replace half of a character, which a page may have anywhere: UTF-8 cannot carry it."""
    return REPLACEMENT if escaped["half"] else escaped[0]


class ProtocolFailure(msgspec.Struct, frozen=True):
    """`error` of an answer."""

    message: str = ""
    code: int = 0
    data: Any = None


class Incoming(msgspec.Struct, frozen=True, rename={"session": "sessionId"}):
    """Answer (with an id) or event (with a method)."""

    id: int = 0
    method: str = ""
    session: str = ""
    params: dict[str, Any] = {}
    result: dict[str, Any] = {}
    error: ProtocolFailure | None = None


class CommandFailed(BrowserError):
    """Chromium answered a command with an error."""


class Session:
    """One attached target: its commands and its events."""

    def __init__(self, connection: "Connection", name: str) -> None:
        self._connection = connection
        self.name = name
        self.handlers: dict[str, Handler] = {}
        self.ended: BrowserError | None = None
        self.on_end: Callable[[], None] | None = None

    def on(self, event: str, handler: Handler) -> None:
        """Call `handler` with the parameters of each such event; it must not block."""
        self.handlers[event] = handler

    async def command(
        self, method: str, *, seconds: float | None = COMMAND_SECONDS, **params: Any
    ) -> dict[str, Any]:
        """Return Chromium's answer; `seconds=None` waits until it comes or the session ends."""
        return await self._connection.command(method, params, self.name, seconds)

    def notify(self, method: str, **params: Any) -> None:
        """Send a command whose answer nobody waits for."""
        self._connection.notify(method, params, self.name)

    def end(self, reason: BrowserError) -> None:
        """Fail all present and future commands of this session."""
        if self.ended is None:
            self.ended = reason
            self._connection.fail(self.name, reason)
            if self.on_end is not None:
                self.on_end()


class Connection(asyncio.Protocol):
    """The two pipes to one browser. The first reason to end is the one that counts."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer known to hold no END
        self._drops = False  # what comes, until the next END
        self._decode = msgspec.json.Decoder(Incoming).decode
        self._encode = msgspec.json.Encoder().encode
        self._last = 0
        self._waiting: dict[int, tuple[str, str, asyncio.Future[dict[str, Any]]]] = {}
        self._sessions: dict[str, Session] = {}
        self._reader: asyncio.BaseTransport | None = None
        self._writer: asyncio.WriteTransport | None = None
        self.browser = self.session("")
        self.ended: asyncio.Future[BrowserError] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, commands: int, answers: int) -> "Connection":
        """Take over our ends of the pipes: `commands` to write to, `answers` to read from."""
        loop = asyncio.get_running_loop()
        connection = cls()
        write_end = os.fdopen(commands, "wb", buffering=0)
        read_end = os.fdopen(answers, "rb", buffering=0)
        connection._writer, _ = await loop.connect_write_pipe(
            lambda: _WriteEnd(connection), write_end
        )
        connection._reader, _ = await loop.connect_read_pipe(lambda: connection, read_end)
        return connection

    def session(self, name: str) -> Session:
        """Return the session of this name, as Target.attachToTarget gave it."""
        session = self._sessions[name] = Session(self, name)
        return session

    def forget(self, session: Session) -> None:
        """Drop events of this session from now on."""
        self._sessions.pop(session.name, None)

    async def command(
        self, method: str, params: dict[str, Any], session: str = "", seconds: float | None = None
    ) -> dict[str, Any]:
        known = self._sessions.get(session)
        if known is not None and known.ended is not None:
            raise known.ended
        number = self._send(method, params, session)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (session, method, answer)
        try:
            async with asyncio.timeout(seconds) as clock:
                return await answer
        except TimeoutError:
            if clock.expired():
                raise BrowserStuck(f"no answer to {method} within {seconds:g} s") from None
            raise
        finally:
            self._waiting.pop(number, None)  # a late answer finds nobody

    def notify(self, method: str, params: dict[str, Any], session: str = "") -> None:
        if not self.ended.done():
            self._send(method, params, session)

    def fail(self, session: str, reason: BrowserError) -> None:
        """End every command that waits for an answer of this session."""
        for name, _, answer in list(self._waiting.values()):
            if name == session and not answer.done():
                answer.set_exception(reason)

    def end(self, reason: BrowserError) -> None:
        """Close both pipes; commands that wait for an answer fail with the reason."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        for transport in (self._reader, self._writer):
            if transport is None or transport.is_closing():
                continue
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()  # drop what is unsent
            else:
                transport.close()
        for session in list(self._sessions.values()):
            session.end(reason)
        self._buffer.clear()

    def _send(self, method: str, params: dict[str, Any], session: str) -> int:
        if self.ended.done():
            raise self.ended.result()
        assert self._writer is not None
        if self._writer.get_write_buffer_size() > UNSENT_BYTES_MAX:
            raise BrowserStuck(f"{method}: the browser does not read its commands any more")
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._writer.write(self._encode(message) + END)
        return self._last

    # -- what the event loop calls -------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Return how much of a message has come."""
        return len(self._buffer)

    def data_received(self, data: bytes) -> None:
        if self._drops:
            _, end, data = data.partition(END)
            if not end:
                return
            self._drops = False
        self._buffer += data
        while (at := self._buffer.find(END, self._searched)) >= 0:
            message = bytes(self._buffer[:at])
            del self._buffer[: at + 1]
            self._searched = 0
            self._receive(message)
        self._searched = len(self._buffer)
        if self._searched > SAID_BYTES_MAX and self._buffer.startswith(SAID):
            self._buffer.clear()
            self._searched, self._drops = 0, True
        if self._searched > MESSAGE_BYTES_MAX:
            self.end(BrowserError(f"the browser sent a message over {MESSAGE_BYTES_MAX} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        self.end(BrowserDied(f"the browser closed its pipe{f' ({error})' if error else ''}"))

    def _receive(self, data: bytes) -> None:
        if len(data) > SAID_BYTES_MAX and data.startswith(SAID):
            return
        try:
            try:
                message = self._decode(data)
            except msgspec.DecodeError:
                message = self._decode(_ESCAPED.sub(_without_halves, data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.end(BrowserError(f"the browser sent an invalid message: {error}"))
            return
        if message.id:
            self._answered(message)
            return
        session = self._sessions.get(message.session)
        handler = session.handlers.get(message.method) if session is not None else None
        if handler is not None:
            handler(message.params)

    def _answered(self, message: Incoming) -> None:
        _, method, answer = self._waiting.get(message.id, ("", "", None))
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(message.result)
        else:
            answer.set_exception(CommandFailed(f"{method}: {message.error.message}"))


class _WriteEnd(asyncio.BaseProtocol):
    """Notices the browser's end when writing fails."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)
