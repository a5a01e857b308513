"""The two connections to the daemon: one for events, one for requests.

Nothing here blocks: a daemon that hangs neither reads nor answers, and must be noticed.
"""

import errno
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Raw, UnsetType

from musterd.supervisor.api import envelope, rpc

READ_BYTES = 256 * 1024


class Gone(Exception):
    """The daemon is unreachable, or has closed the connection."""


class Line:
    """One connection."""

    def __init__(
        self, path: str, selector: selectors.BaseSelector, on_line: Callable[[bytes], None]
    ) -> None:
        self._selector = selector
        self._on_line = on_line
        self._input = b""
        self._output = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self.gone = False
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            self.gone = True
            why = "too many callers wait" if error.errno == errno.EAGAIN else error.strerror
            raise Gone(f"{path}: {why}") from None
        selector.register(self._socket, selectors.EVENT_READ, self._ready)

    def send(self, line: bytes) -> None:
        self._output += line
        self._flush()

    def _flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._output = self._output[self._socket.send(self._output) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._output else 0)
        self._selector.modify(self._socket, events, self._ready)

    def _ready(self) -> None:
        if self._output:
            self._flush()
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            if not self.gone:  # an earlier line may have closed it
                self._on_line(line)
        if len(self._input) > rpc.ANSWER_BYTES_MAX:
            self.close()

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            self._selector.unregister(self._socket)
            self._socket.close()


class Asking:
    """Requests and their answers."""

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        self._line = Line(path, selector, self._heard)
        self._number = 0
        self._waiting: dict[int, Callable[[Raw], None]] = {}

    @property
    def gone(self) -> bool:
        return self._line.gone

    @property
    def idle(self) -> bool:
        return not self._waiting

    @property
    def waiting(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._waiting)

    def ask(self, params: rpc.Params, then: Callable[[Raw], None]) -> None:
        """Send a request; `then` gets the result. An error counts as no answer."""
        self._number += 1
        self._waiting[self._number] = then
        self._line.send(envelope.encode_request(self._number, params))

    def _heard(self, line: bytes) -> None:
        try:
            answer = envelope.decode_answer(line)
        except rpc.RpcError:
            self.close()
            return
        if not isinstance(answer.id, int):
            self.close()  # the daemon refused us
            return
        then = self._waiting.pop(answer.id, None)
        if then is not None and not isinstance(answer.result, UnsetType):
            then(answer.result)

    def close(self) -> None:
        self._line.close()


class Following:
    """The stream of events, preceded by those that the daemon keeps."""

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        params: rpc.Events,
        on_event: Callable[[dict[str, Any], bool], None],
        on_begun: Callable[[], None],
    ) -> None:
        """Follow events; `on_event` also gets whether the event is older than the connection."""
        self._on_event = on_event
        self._on_begun = on_begun
        self._begun = False
        self._line = Line(path, selector, self._heard)
        self._line.send(envelope.encode_request(1, params))

    @property
    def gone(self) -> bool:
        return self._line.gone

    def _heard(self, line: bytes) -> None:
        try:
            if self._begun:
                self._on_event(msgspec.json.decode(line, type=dict[str, Any]), False)
                return
            answer = envelope.decode_answer(line)
        except (rpc.RpcError, msgspec.DecodeError, UnicodeDecodeError):
            self.close()
            return
        if isinstance(answer.result, UnsetType):
            self.close()
            return
        self._begun = True
        for event in msgspec.json.decode(answer.result, type=dict[str, Any])["recent"]:
            self._on_event(event, True)
        self._on_begun()

    def close(self) -> None:
        self._line.close()
