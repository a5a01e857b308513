"""musterctl's end of control.sock: one request, one answer, and errors that say what to do."""

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec
from msgspec import Raw, UnsetType

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api.envelope import decode_answer, encode_request
from musterd.supervisor.api.rpc import ANSWER_BYTES_MAX, LINE_BYTES_MAX, Params, RpcError

CONNECT_SECONDS = 10.0  # a daemon that does not even accept counts as unreachable
READ_BYTES = 256 * 1024
T = TypeVar("T")
_TIMEVAL = struct.Struct("@ll")


class Unreachable(MusterdError):
    """There is no daemon at this socket, or none that lets us in."""


class NoAnswer(MusterdError):
    """The daemon took the request, and its outcome is unknown."""


class TooLong(MusterdError):
    """The request does not fit into a line."""


class Connection:
    """A connection to the daemon; all waits end `timeout` seconds after it was made."""

    def __init__(self, path: str, timeout: float | None) -> None:
        self._path = path
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._input = bytearray()
        self._requests = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(CONNECT_SECONDS if timeout is None else timeout)
        except OSError as error:
            self._socket.close()
            raise Unreachable(
                f"cannot reach the daemon at {path}: {_reason(error)}: {_advice(error)}"
            ) from error

    def _connect(self, seconds: float) -> None:
        """Connect, and wait while the listen queue is full.

        A socket with a Python timeout does not block: a full queue would refuse it at once.
        """
        whole, part = divmod(max(1, int(seconds * 1e6)), 1_000_000)  # 0 would mean forever
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, part))
        try:
            self._socket.connect(self._path)
        except BlockingIOError as error:
            raise TimeoutError from error

    def close(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        """End the wait of another thread."""
        with suppress(OSError):  # the wait has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def send(self, params: Params) -> int:
        """Send a request without waiting for its answer; return its id."""
        self._requests += 1
        try:
            self._socket.sendall(encode_request(self._requests, params))
        except OSError as error:
            raise NoAnswer("the daemon has ended the connection") from error
        return self._requests

    def request(self, params: Params) -> Raw:
        """Return the daemon's result as JSON; RpcError if the daemon refuses."""
        self._requests += 1
        line = encode_request(self._requests, params)
        if len(line) > LINE_BYTES_MAX:
            raise TooLong(
                f"the request has {len(line)} bytes, over the limit of {LINE_BYTES_MAX}: "
                "submit large arguments with musterd.Client"
            )
        self._wait_at_most()
        try:
            self._socket.sendall(line)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon refused the caller: its reason is there to be read
        except TimeoutError as error:
            raise self._too_late() from error
        while True:
            answer = decode_answer(self._read_line())
            if answer.id not in (self._requests, None):
                continue
            if not isinstance(answer.error, UnsetType):
                raise RpcError(answer.error.code, answer.error.message, answer.error.data)
            if not isinstance(answer.result, UnsetType):
                return answer.result
            raise NoAnswer("the daemon's answer has neither result nor error: is it musterd?")

    def get(self, params: Params, kind: type[T]) -> T:
        """Return the daemon's result, decoded."""
        return msgspec.json.decode(self.request(params), type=kind)

    def stream(self) -> Iterator[bytes]:
        """Yield lines without a deadline, until the daemon ends the stream."""
        self._deadline = None
        while True:
            try:
                yield self._read_line()
            except NoAnswer:
                return

    def _read_line(self) -> bytes:
        searched = 0
        while (end := self._input.find(b"\n", searched)) < 0:
            searched = len(self._input)
            if searched > ANSWER_BYTES_MAX:
                raise NoAnswer(f"the answer is longer than {ANSWER_BYTES_MAX} bytes: ask for less")
            self._input += self._receive()
        line = bytes(self._input[:end])
        del self._input[: end + 1]
        return line

    def _receive(self) -> bytes:
        self._wait_at_most()
        try:
            received = self._socket.recv(READ_BYTES)
        except TimeoutError as error:
            raise self._too_late() from error
        except ConnectionResetError:
            received = b""
        if not received:
            raise NoAnswer(
                "the daemon closed the connection before it answered: see its log for the reason"
            )
        return received

    def _wait_at_most(self) -> None:
        if self._deadline is None:
            self._socket.settimeout(None)
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._too_late()
        self._socket.settimeout(left)

    def _too_late(self) -> NoAnswer:
        return NoAnswer(
            f"no answer from {self._path} within {self._timeout:g} seconds: the command may still "
            "take effect: wait longer with --timeout, or see the daemon's log"
        )


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it does not accept connections"
    return error.strerror or str(error)


def _advice(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"uid {os.geteuid()} may not open it: use sudo or join the daemon's control_group"
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
        return (
            "start it with `musterd run`, change into the folder of `musterd dev`, or name its "
            "socket with -s"
        )
    return "is this the daemon's control.sock, and is the daemon healthy?"
