"""ZMTP 3.1, the wire protocol of ZeroMQ, over a Unix socket without libzmq.

Theory of operation. libzmq runs its sockets in a thread of its own, so each message changes threads
on its way out and on its way in, which is most of the cost of a round trip. Here the calling thread
sends or receives with one system call: at the end of a DEALER, which clients and workers have, and
at that of a ROUTER (ipc/wire/router.py), which the supervisor has. The bytes on the wire are those
of libzmq (https://rfc.zeromq.org/spec/37/, mechanism NULL). Each side sends

    greeting   FF, 8 bytes, 7F | version 3 1 | "NULL", filled up to 20 bytes | 0 | 31 bytes
    a command  READY, with the type of its socket
    frames     +-------+--------------------+------+     flags  1  MORE: the message goes on
               | flags | size: one byte, or | body |            2  LONG: 8 bytes of size
               |       | 8, the highest     |      |            4  COMMAND
               |       | first              |      |
               +-------+--------------------+------+
    commands   | size | name | data |     READY has properties | size | name | size (4) | value |
                                          ERROR has a reason   | size | text |

Our messages have one frame. The frames of a longer message, which is not ours, are dropped as they
arrive, and the owner counts the message. A ROUTER answers an acceptable greeting with READY, any
other with ERROR, and closes. PING is answered; other commands mean nothing to either end. Memory is
taken for what has arrived, never for an announced size, and all of it is in `held`.

`Reader` is pure: bytes in, messages out. A `Wire` has a socket and never blocks. Any exception out
of either, even one raised by a signal handler, leaves it in the middle of something: the connection
has to be closed.
"""

import socket
import struct
from collections import deque
from contextlib import suppress
from itertools import islice

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.messages import WIRE_BYTES_MAX

CHUNK_BYTES = 64 * 1024  # read at once: many messages, and still cheap to allocate
JOINED_BYTES_MAX = 16 * 1024  # a frame up to here is copied behind its header, a larger one never
BUFFERS_MAX = 64  # given to the kernel in one call; it takes 1024
FRAMES_MAX = 64  # of one message: a REQ sends two, and an endless message is an attack
COMMAND_BYTES_MAX = 64 * 1024  # a READY with all its properties; those of libzmq have a hundred
REASON_BYTES_MAX = 255  # of an ERROR
BUFFER_BYTES = 64  # of an object beside its content

Message = bytes | bytearray | None  # None: a message of several frames

_MORE, _LONG, _COMMAND = 1, 2, 4
_FLAGS_MAX = _MORE | _LONG | _COMMAND  # the other bits are reserved
_LONG_HEADER = struct.Struct(">BQ")
_SHORT_HEADERS = tuple(bytes((0, size)) for size in range(256))

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = (_SIGNATURE + b"\x03\x01" + _MECHANISM).ljust(64, b"\0")
_VERSION_AT, _MECHANISM_AT, _MECHANISM_END = 10, 12, 32
_SOCKET_TYPE = b"Socket-Type"

Kinds = tuple[bytes, ...]
DEALER_PEERS: Kinds = (b"ROUTER", b"DEALER", b"REP")  # types of sockets that a DEALER may talk to
ROUTER_PEERS: Kinds = (b"DEALER", b"REQ", b"ROUTER")


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


# Greeting and READY at once: neither depends on the peer. Messages have to wait for the peer's
# READY: libzmq closes the connection if they come with ours.
HANDSHAKE = _GREETING + _command(b"READY", _property(_SOCKET_TYPE, b"DEALER"))
ROUTER_GREETING = _GREETING
ROUTER_READY = _command(b"READY", _property(_SOCKET_TYPE, b"ROUTER"))


class Reader:
    """Cuts what the peer sends into messages."""

    def __init__(
        self, peers: Kinds = DEALER_PEERS, message_bytes_max: int = WIRE_BYTES_MAX
    ) -> None:
        self.greets = False  # the peer speaks ZMTP 3 ...
        self.greeted = False  # ... and our mechanism
        self.ready = False  # the peer's READY has arrived
        self.pong = b""  # answers the last PING; the sender empties it
        self.missing = 0  # bytes of a frame that has begun to arrive
        self._peers = peers
        self._bytes_max = message_bytes_max
        self._rest = b""  # the beginning of a greeting or of a header
        self._body = bytearray()  # what has arrived of that frame
        self._flags = 0
        self._frames = 0  # dropped frames of a message of several ...
        self._frames_bytes = 0  # ... and their bytes
        self._error: ProtocolError | None = None  # raised by the next feed()

    @property
    def held(self) -> int:
        """Bytes kept until the rest arrives."""
        return len(self._body) + len(self._rest)

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete; ProtocolError if they are not ZMTP.

        Messages before the error count: if there are any, the next call raises.
        """
        if self._error is not None:
            raise self._error
        found: list[Message] = []
        try:
            self._cut(data, found)
        except ProtocolError as error:
            if not found:
                raise
            self._error = error
        return found

    def _cut(self, data: bytes, found: list[Message]) -> None:
        at = 0
        if self.missing:
            at = self._fill(data, found)
        elif self._rest:
            data, self._rest = self._rest + data, b""
        if not self.greeted:
            if not self._greet(data):
                return
            at = len(_GREETING)
        end = len(data)
        while end - at >= 2:
            flags, size, body = data[at], data[at + 1], at + 2
            if flags > _FLAGS_MAX:
                raise ProtocolError(
                    f"a frame with the flags {flags:#04x}, which ZMTP does not have"
                )
            if flags & _LONG:
                body = at + 9
                if body > end:
                    break
                size = int.from_bytes(data[at + 1 : body], "big")
                if size > self._bytes_max:
                    raise ProtocolError(f"a frame of {size} bytes, over {self._bytes_max}")
            after = body + size
            if after > end:
                self._check(flags, size)
                self._flags, self.missing = flags, after - end
                self._body += data[body:]
                return
            self._take(flags, data[body:after], found)
            at = after
        if at < end:
            self._rest = data[at:]

    def _fill(self, data: bytes, found: list[Message]) -> int:
        """Continue the frame that has begun; return how many bytes of the data that took."""
        taken = min(len(data), self.missing)
        self._body += data if taken == len(data) else data[:taken]
        self.missing -= taken
        if not self.missing:
            body, self._body = self._body, bytearray()
            self._take(self._flags, body, found)
        return taken

    def _check(self, flags: int, size: int) -> None:
        """Refuse a frame before waiting for it."""
        if flags & _COMMAND:
            if size > COMMAND_BYTES_MAX:
                raise ProtocolError(f"a command of {size} bytes, over {COMMAND_BYTES_MAX}")
        elif not self.ready:
            raise ProtocolError("a message before READY")

    def _take(self, flags: int, body: bytes | bytearray, found: list[Message]) -> None:
        if flags & _COMMAND:
            self._check(flags, len(body))
            self._obey(bytes(body))
        elif not self.ready:
            raise ProtocolError("a message before READY")
        elif flags & _MORE:
            self._frames += 1
            self._frames_bytes += len(body)
            if self._frames >= FRAMES_MAX or self._frames_bytes > self._bytes_max:
                raise ProtocolError(
                    f"a message of {self._frames} frames with {self._frames_bytes} bytes that "
                    f"goes on: at most {FRAMES_MAX} and {self._bytes_max}"
                )
        elif self._frames:
            self._frames = self._frames_bytes = 0
            found.append(None)
        else:
            found.append(body)

    def _greet(self, data: bytes) -> bool:
        """Return whether the greeting is complete; raise at the first wrong byte."""
        if data[0] != _SIGNATURE[0] or (len(data) > 9 and data[9] != _SIGNATURE[9]):
            raise ProtocolError(f"not ZeroMQ: it began with {data[:16]!r}")
        if len(data) > _VERSION_AT and data[_VERSION_AT] < 3:
            raise ProtocolError(f"ZMTP of version {data[_VERSION_AT]} instead of 3")
        if len(data) < len(_GREETING):
            self._rest = data
            return False
        self.greets = True
        mechanism = data[_MECHANISM_AT:_MECHANISM_END]
        if mechanism != _MECHANISM:
            name = mechanism.rstrip(b"\0").decode("latin-1")
            raise ProtocolError(f"it wants the mechanism {name!r} instead of 'NULL'")
        self.greeted = True
        return True

    def _obey(self, body: bytes) -> None:
        name_end = 1 + body[0] if body else 0
        name, data = body[1:name_end], body[name_end:]
        if self.ready:
            # its data: how long the peer waits (2 bytes), and what it wants back
            if name == b"PING":
                self.pong = _command(b"PONG", data[2:18])
        elif name == b"READY":
            kind = _value(data, _SOCKET_TYPE)
            if kind not in self._peers:
                wanted = self._peers[0].decode()
                raise ProtocolError(f"a socket of the type {kind!r} instead of {wanted}")
            self.ready = True
        elif name == b"ERROR":
            raise ProtocolError(f"it refuses the connection: {data[1:].decode('latin-1')!r}")
        else:
            raise ProtocolError(f"the command {name!r} before READY")


def _value(properties: bytes, wanted: bytes) -> bytes:
    """Return the value of this property; b"" if it is absent."""
    at, end = 0, len(properties)
    while at < end:
        name_end = at + 1 + properties[at]
        value_at = name_end + 4
        after = value_at + int.from_bytes(properties[name_end:value_at], "big")
        if max(value_at, after) > end:
            raise ProtocolError("a READY whose properties do not fit into it")
        if properties[at + 1 : name_end].lower() == wanted.lower():
            return properties[value_at:after]
        at = after
    return b""


class Wire:
    """One end of a connection. Never blocks.

    After an exception (OSError, ProtocolError) the connection is over and has to be closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        handshake: bytes,
        peers: Kinds,
        *,
        answer: bytes = b"",  # sent when the greeting is accepted
        message_bytes_max: int = WIRE_BYTES_MAX,
    ) -> None:
        self.ready = False  # messages may be sent
        self.drained = True  # the last receive() has left nothing behind
        self.unsent_bytes = 0  # in memory until the socket takes them; a frame counts as a whole
        self.sent_bytes = 0  # bytes that the socket has taken so far
        self.received_bytes = 0
        self._socket = sock
        self._reader = Reader(peers, message_bytes_max)
        self._answer = answer
        self._head_bytes = 0  # sent bytes of the first buffer, which is still in memory
        self._out: deque[bytes | memoryview] = deque()
        self._append(handshake)
        with suppress(BrokenPipeError):  # the peer hung up, but receive() may return its last words
            self.flush()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Number of buffers that wait until the socket is writable."""
        return len(self._out)

    @property
    def missing(self) -> int:
        """Bytes still to come of a frame that has begun to arrive."""
        return self._reader.missing

    def receive(self, size: int = CHUNK_BYTES) -> list[Message]:
        """Receive at most `size` bytes; return the completed messages."""
        try:
            chunk = self._socket.recv(size)
        except BlockingIOError:
            self.drained = True
            return []
        if not chunk:
            raise ConnectionResetError("the other end has closed the connection")
        self.drained = len(chunk) < size
        self.received_bytes += len(chunk)
        reader = self._reader
        messages = reader.feed(chunk)
        self.ready = reader.ready
        if self._answer and reader.greeted:
            self._reply(self._answer)
            self._answer = b""
        if reader.pong:
            if not self._out:  # else other signs of life are on their way
                self._reply(reader.pong)
            reader.pong = b""
        return messages

    def _reply(self, command: bytes) -> None:
        self._append(command)
        with suppress(BrokenPipeError, ConnectionResetError):  # the next receive() raises
            self.flush()

    def refuse(self, why: str) -> None:
        """Tell a peer that has not shaken hands why it is not served, if it understands."""
        if self._reader.greets and not self.ready:
            reason = why.encode("ascii", "replace")[:REASON_BYTES_MAX]
            self._append(_command(b"ERROR", bytes((len(reason),)) + reason))
            with suppress(OSError):
                self.flush()

    @property
    def held(self) -> int:
        """Bytes in memory for this connection, in both directions."""
        return self._reader.held + self.unsent_bytes

    @property
    def half_read(self) -> int:
        """Bytes in memory of a message whose rest has not arrived."""
        return self._reader.held

    def put(self, message: bytes) -> None:
        """Queue a message for the next flush()."""
        size = len(message)
        header = _SHORT_HEADERS[size] if size < 256 else _LONG_HEADER.pack(_LONG, size)
        if size <= JOINED_BYTES_MAX:
            self._append(header + message)
        else:
            self._append(header)
            self._append(message)

    def _append(self, buffer: bytes) -> None:
        self._out.append(buffer)
        self.unsent_bytes += len(buffer) + BUFFER_BYTES

    def flush(self) -> bool:
        """Send what the socket takes; return whether that is all."""
        out = self._out
        while out:
            try:
                if len(out) == 1:
                    sent = self._socket.send(out[0], socket.MSG_NOSIGNAL)
                else:
                    buffers = islice(out, BUFFERS_MAX)
                    sent = self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self.sent_bytes += sent
            while out and sent >= len(out[0]):
                size = len(out.popleft())
                sent -= size
                self.unsent_bytes -= size + self._head_bytes + BUFFER_BYTES
                self._head_bytes = 0
            if sent:
                out[0] = memoryview(out[0])[sent:]
                self._head_bytes += sent
        return True

    def fall_silent(self) -> None:
        """Send nothing more, which the peer sees; its messages can still be received."""
        self._forget()
        with suppress(OSError):  # the peer has hung up
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection and drop what was not sent."""
        self._forget()
        self._socket.close()

    def _forget(self) -> None:
        self._out.clear()
        self.unsent_bytes = self._head_bytes = 0


class Connection(Wire):
    """DEALER end of a connection, to a ROUTER that listens on a Unix path."""

    def __init__(self, to: str | socket.socket) -> None:
        """Connect to a path, or take a connected socket; BlockingIOError if the backlog there is
        full, else any OSError of connect()."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) if isinstance(to, str) else to
        try:
            sock.setblocking(False)
            if isinstance(to, str):
                sock.connect(to)
            super().__init__(sock, HANDSHAKE, DEALER_PEERS)
        except BaseException:
            sock.close()
            raise
