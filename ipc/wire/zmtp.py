"""ZMTP 3.1, the wire of ZeroMQ, spoken over a Unix socket without libzmq.

Theory of operation. libzmq has a thread of its own for its sockets, so each message changes threads
on its way out and on its way in, which is most of what a round trip costs. Here the thread that
wants something does with one system call what there is to be sent or received: at the end of a
DEALER, which clients and workers have, and at that of a ROUTER (ipc/wire/router.py), which the
supervisor has. On the wire nothing is different (https://rfc.zeromq.org/spec/37/, mechanism NULL).
Each side says

    greeting   FF, 8 bytes, 7F | version 3 1 | "NULL", filled up to 20 bytes | 0 | 31 bytes
    a command  READY, with the type of its socket
    frames     +-------+--------------------+------+     flags  1  MORE: the message goes on
               | flags | size: one byte, or | body |            2  LONG: 8 bytes of size
               |       | 8, the highest     |      |            4  COMMAND
               |       | first              |      |
               +-------+--------------------+------+
    commands   | size | name | data |     READY has properties | size | name | size (4) | value |
                                          ERROR has a reason   | size | text |

A message of ours is one frame. One of several is not from us: its frames are dropped as they
arrive, and the owner counts it. A ROUTER says READY when it has seen a greeting that it accepts,
else ERROR, and closes. PING is answered, other commands mean nothing to either end. Memory is taken
for what has arrived, never for what a size announces, and all of it is in `held`.

`Reader` is pure: bytes in, messages out. A `Wire` has a socket and never blocks. Whatever is raised
out of either, and be it by a signal that struck there, has left it in the middle of something: the
connection has to be closed.
"""

import socket
import struct
from collections import deque
from contextlib import suppress
from itertools import islice

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.messages import WIRE_BYTES_MAX

CHUNK_BYTES = 64 * 1024  # taken at once: many messages, and still cheap to allocate
JOINED_BYTES_MAX = 16 * 1024  # a frame up to here is copied behind its header, a larger one never
BUFFERS_MAX = 64  # handed to the kernel in one call; it takes 1024
FRAMES_MAX = 64  # of one message: a REQ sends two, and a message without an end is an attack
COMMAND_BYTES_MAX = 64 * 1024  # a READY with all its properties; those of libzmq have a hundred
REASON_BYTES_MAX = 255  # of an ERROR
BUFFER_BYTES = 64  # that an object takes beside what is in it

Message = bytes | bytearray | None  # None: it had several frames

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
DEALER_PEERS: Kinds = (b"ROUTER", b"DEALER", b"REP")  # whom a DEALER may talk to
ROUTER_PEERS: Kinds = (b"DEALER", b"REQ", b"ROUTER")


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


# Both at once: what we say does not hang on what the other one says. Messages have to wait for its
# READY, though: libzmq closes the connection when they come with ours.
HANDSHAKE = _GREETING + _command(b"READY", _property(_SOCKET_TYPE, b"DEALER"))
ROUTER_GREETING = _GREETING
ROUTER_READY = _command(b"READY", _property(_SOCKET_TYPE, b"ROUTER"))


class Reader:
    """What the other end sends, cut into messages."""

    def __init__(
        self, peers: Kinds = DEALER_PEERS, message_bytes_max: int = WIRE_BYTES_MAX
    ) -> None:
        self.greets = False  # it speaks ZMTP 3 ...
        self.greeted = False  # ... and our mechanism
        self.ready = False  # its READY is here, too
        self.pong = b""  # answers its last PING; whoever sends it empties this
        self.missing = 0  # bytes of a frame that has begun to arrive
        self._peers = peers
        self._bytes_max = message_bytes_max
        self._rest = b""  # the beginning of a greeting or of a header
        self._body = bytearray()  # what has arrived of that frame
        self._flags = 0
        self._frames = 0  # of a message of several that have come and were dropped ...
        self._frames_bytes = 0  # ... and what they had
        self._error: ProtocolError | None = None  # to be raised

    @property
    def held(self) -> int:
        """Bytes that are kept here until the rest arrives."""
        return len(self._body) + len(self._rest)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete; ProtocolError if they are not ZMTP.

        What came before the error counts: if there is something, the next call raises.
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
                raise ProtocolError(f"a frame with the flags {flags:#04x}, which ZMTP has not")
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
        """Goes on with the frame that has begun; how much of the data that took."""
        taken = min(len(data), self.missing)
        self._body += data if taken == len(data) else data[:taken]
        self.missing -= taken
        if not self.missing:
            body, self._body = self._body, bytearray()
            self._take(self._flags, body, found)
        return taken

    def _check(self, flags: int, size: int) -> None:
        """Refuse a frame before it is waited for."""
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
        """Whether the greeting is complete. Wrong is told as soon as it is seen."""
        if data[0] != _SIGNATURE[0] or (len(data) > 9 and data[9] != _SIGNATURE[9]):
            raise ProtocolError(f"no ZeroMQ: it began with {data[:16]!r}")
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
            if name == b"PING":  # its data: how long it waits (2 bytes), and what it wants back
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
    """Of this property; b"" if it is not there."""
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

    Wherever it raises (OSError, ProtocolError), the connection is over and to be closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        handshake: bytes,
        peers: Kinds,
        *,
        answer: bytes = b"",  # to a greeting that is accepted
        message_bytes_max: int = WIRE_BYTES_MAX,
    ) -> None:
        self.ready = False  # messages may be sent
        self.drained = True  # the last receive() has left nothing behind
        self.unsent_bytes = 0  # in memory until the socket takes them; a frame counts as a whole
        self.sent_bytes = 0  # that the socket has taken, ever
        self.received_bytes = 0
        self._socket = sock
        self._reader = Reader(peers, message_bytes_max)
        self._answer = answer
        self._head_bytes = 0  # of the first buffer that are sent, and still in memory
        self._out: deque[bytes | memoryview] = deque()
        self._append(handshake)
        with suppress(BrokenPipeError):  # it hung up, but receive() may tell what it said
            self.flush()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """How much waits until the socket is writable, in buffers."""
        return len(self._out)

    @property
    def missing(self) -> int:
        """Bytes of a frame that has begun to arrive."""
        return self._reader.missing

    def receive(self, size: int = CHUNK_BYTES) -> list[Message]:
        """What has arrived, at most so much of it."""
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
            if not self._out:  # else there are other signs of life on their way
                self._reply(reader.pong)
            reader.pong = b""
        return messages

    def _reply(self, command: bytes) -> None:
        self._append(command)
        with suppress(BrokenPipeError, ConnectionResetError):  # the next receive() tells
            self.flush()

    def refuse(self, why: str) -> None:
        """Tell a peer that has not shaken hands that it will not be served, if it understands."""
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
        """Those of a message whose rest has not arrived."""
        return self._reader.held

    def put(self, message: bytes) -> None:
        """To be sent with the next flush()."""
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
        """Sends what the socket takes; whether that is all."""
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
        """Sends nothing more, which the other end sees; what it says can still be received."""
        self._forget()
        with suppress(OSError):  # it has hung up
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """What was not sent is dropped."""
        self._forget()
        self._socket.close()

    def _forget(self) -> None:
        self._out.clear()
        self.unsent_bytes = self._head_bytes = 0


class Connection(Wire):
    """The end of a DEALER, to a ROUTER that listens on a Unix path."""

    def __init__(self, path: str) -> None:
        """BlockingIOError if too many wait to be accepted there, as any OSError of connect()."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path)
            super().__init__(sock, HANDSHAKE, DEALER_PEERS)
        except BaseException:
            sock.close()
            raise
