"""Parse HTTP/1 answers as servers really send them, from bytes to events; without any I/O.

    parser = AnswerParser()
    parser.feed(data)  yields Head(...), b"some of the body", ..., End()
    parser.eof()       likewise: End(), or AnswerCut where the answer was not complete

Clients of the web are lenient, each in its own way, and servers rely on it: they send header names
with a trailing space, two equal lengths, bytes of Latin-1. This parser accepts what curl and
Chromium both accept, and refuses the rest with a reason: an answer that one of them reads
differently cannot be trusted. docs/fetching.md has the table.

    BadAnswer   the answer breaks HTTP; it will do so again
    AnswerCut   the connection ended before the answer did; another try may help
"""

import re
from collections.abc import Iterator
from enum import Enum, auto

from msgspec import Struct

from musterd.ipc.errors import MusterdError

HEAD_BYTES_MAX = 256 * 1024  # of all headers: Chromium's limit
HEADER_LINE_BYTES_MAX = 100 * 1024  # of one: curl's limit
CHUNK_LINE_BYTES_MAX = 16 * 1024  # a size with its extensions: Chromium's limit
TRAILER_LINE_BYTES_MAX = 4096  # curl's limit
LENGTH_MAX = 2**63 - 1  # both ignore a longer Content-Length
SHOWN_BYTES = 60  # of the site's bytes, in an error

_STATUS_LINE = re.compile(rb"HTTP/(1\.[01]|2(?:\.0)?) +([1-9]\d\d)(?!\d)(.*)", re.I | re.DOTALL)
_HEAD_END = re.compile(rb"\n\r?\n")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16}) *(?:;.*)?", re.DOTALL)
_BEGINS_WITH_NUMBER = re.compile(r"\+?(\d+)")
_FRAMING = frozenset({"content-length", "transfer-encoding"})
_READ_HERE = frozenset({"content-length", "transfer-encoding", "connection", "location"})
_NO_BODY = frozenset({204, 304})


class BadAnswer(MusterdError):
    """The answer breaks HTTP in a way that curl or Chromium does not accept."""


class AnswerCut(MusterdError):
    """The connection ended before the answer was complete."""


class Head(Struct, frozen=True):
    """Status line and headers; `headers` in their order, with their names as written."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    keep_alive: bool
    chunked: bool


class End(Struct, frozen=True):
    """The answer is complete. If `more` bytes follow it, the connection cannot be reused."""

    more: bool = False


class _At(Enum):
    HEAD = auto()
    LENGTH = auto()  # some bytes of the body are missing
    UNTIL_EOF = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()  # the line end behind a chunk's data
    TRAILERS = auto()
    DONE = auto()


Event = Head | bytes | End
Headers = list[tuple[str, str]]
Known = dict[str, list[str]]  # values by name, of the headers in _READ_HERE


class AnswerParser:
    """Reads one answer, and the interim ones (1xx) before it."""

    def __init__(self, has_body: bool = True) -> None:
        self._has_body = has_body  # False for HEAD
        self._at = _At.HEAD
        self._buffer = bytearray()
        self._searched = 0  # where the search for the end of the head goes on
        self._head_bytes = 0  # of all heads and trailers of this answer
        self._missing = 0
        self._claimed: int | None = None  # number that a malformed Content-Length begins with
        self._received = 0

    @property
    def begun(self) -> bool:
        """Whether any byte of the answer has arrived."""
        return self._at is not _At.HEAD or bool(self._buffer) or self._head_bytes > 0

    @property
    def until_eof(self) -> bool:
        """Whether only the end of the connection can end the answer."""
        return self._at is _At.UNTIL_EOF

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield what the bytes complete; exhaust the iterator. All bytes are taken."""
        if self._at is _At.UNTIL_EOF or (self._at is _At.LENGTH and len(data) < self._missing):
            yield from self._body(data)  # most of most answers: no copy
            return
        self._buffer += data
        before = -1
        while self._at is not _At.DONE and self._buffer and len(self._buffer) != before:
            before = len(self._buffer)
            yield from self._step()
        if self._at is _At.DONE and self._buffer:
            self._buffer.clear()
            yield End(more=True)

    def eof(self) -> Iterator[Event]:
        """Yield what an orderly end of the connection, the server's FIN, completes."""
        if self._at is _At.DONE:
            return
        if self._at is _At.UNTIL_EOF:
            if self._claimed is not None and self._claimed != self._received:
                raise BadAnswer(
                    f"Content-Length begins with {self._claimed} and the body has "
                    f"{self._received} bytes"
                )
            yield self._ended()
        elif self._at is _At.HEAD:
            raise AnswerCut("the connection was closed within the head of the answer")
        elif self._at is _At.LENGTH:
            raise AnswerCut(f"the connection was closed {self._missing} bytes before the end")
        else:
            raise AnswerCut("the connection was closed before the last chunk")

    def _step(self) -> Iterator[Event]:
        """Take one piece out of the buffer, if it is complete."""
        if self._at is _At.HEAD:
            yield from self._head()
        elif self._at is _At.CHUNK_SIZE:
            self._chunk_size()
        elif self._at is _At.CHUNK_END:
            self._chunk_end()
        elif self._at is _At.TRAILERS:
            yield from self._trailer()
        else:
            size = len(self._buffer)
            if self._at is not _At.UNTIL_EOF:
                size = min(size, self._missing)
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            yield from self._body(data)

    def _body(self, data: bytes) -> Iterator[Event]:
        self._received += len(data)
        if data:
            yield data
        if self._at is _At.UNTIL_EOF:
            return
        self._missing -= len(data)
        if not self._missing and self._at is _At.CHUNK_DATA:
            self._at = _At.CHUNK_END
        elif not self._missing:
            yield self._ended()

    def _ended(self) -> End:
        self._at = _At.DONE
        more = bool(self._buffer)
        self._buffer.clear()
        return End(more)

    # -- chunks ---------------------------------------------------------------------------------

    def _line(self, bytes_max: int, what: str) -> bytes | None:
        """Return one line without its end, LF or CRLF; None if it has not arrived yet."""
        end = self._buffer.find(b"\n", 0, bytes_max)
        if end < 0:
            if len(self._buffer) >= bytes_max:
                raise BadAnswer(f"{what} has over {bytes_max} bytes")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.removesuffix(b"\r")

    def _chunk_size(self) -> None:
        line = self._line(CHUNK_LINE_BYTES_MAX, "the line with the size of a chunk")
        if line is None:
            return
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise BadAnswer(f"the size of a chunk is no hexadecimal number: {_shown(line)}")
        self._missing = int(match.group(1), 16)
        self._at = _At.CHUNK_DATA if self._missing else _At.TRAILERS

    def _chunk_end(self) -> None:
        if self._buffer == b"\r":
            return
        size = 2 if self._buffer.startswith(b"\r\n") else 1
        if self._buffer[size - 1 : size] != b"\n":
            raise BadAnswer(f"no line end behind the data of a chunk: {_shown(self._buffer)}")
        del self._buffer[:size]
        self._at = _At.CHUNK_SIZE

    def _trailer(self) -> Iterator[Event]:
        line = self._line(TRAILER_LINE_BYTES_MAX, "a trailer")
        if line is None:
            return
        self._count_head(len(line))
        if not line:
            yield self._ended()
        elif b":" not in line:
            raise BadAnswer(f"a trailer has no colon: {_shown(line)}")

    # -- heads ----------------------------------------------------------------------------------

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            raise BadAnswer(f"the headers have over {HEAD_BYTES_MAX} bytes")

    def _head(self) -> Iterator[Event]:
        # Data that do not begin as an answer are refused at once: an empty line may never come.
        if self._buffer[:5].upper() != b"HTTP/"[: len(self._buffer)]:
            raise BadAnswer(f"it does not begin with HTTP/ but with {_shown(self._buffer)}")
        end = _HEAD_END.search(self._buffer, self._searched)
        if end is None:
            self._searched = max(0, len(self._buffer) - 2)  # the end may come byte by byte
            if self._head_bytes + len(self._buffer) > HEAD_BYTES_MAX:
                raise BadAnswer(f"the headers have over {HEAD_BYTES_MAX} bytes")
            return
        self._searched = 0
        self._count_head(end.end())
        lines = bytes(self._buffer[: end.start()]).split(b"\n")
        del self._buffer[: end.end()]
        version, status, reason = _status_line(lines[0])
        yield from self._begin_body(version, status, reason, *_headers(lines[1:]))

    def _begin_body(
        self, version: bytes, status: int, reason: str, headers: Headers, known: Known
    ) -> Iterator[Event]:
        if status < 200:
            if status == 101:
                raise BadAnswer("it switches the protocol (101), which nobody asked for")
            yield Head(status, reason, headers, True, False)
            return
        chunked = _is_chunked(known, version)
        length, self._claimed = (None, None) if chunked else _length(known)
        said = ",".join(known.get("connection", ())).lower()
        keep_alive = (version != b"1.0" or "keep-alive" in said) and "close" not in said
        # A server that sends both a length and chunks may have meant either: no further answer is
        # believed on this connection.
        keep_alive = keep_alive and not (chunked and "content-length" in known)
        if 300 <= status < 400 and len(set(known.get("location", ()))) > 1:
            raise BadAnswer("it redirects to two places at once")
        if "content-length" in known:  # callers see the length that counts, or none
            headers = [each for each in headers if each[0].lower() != "content-length"]
            if length is not None:
                headers.append(("Content-Length", str(length)))
        if not self._has_body or status in _NO_BODY or length == 0:
            self._at = _At.LENGTH
        elif chunked:
            self._at = _At.CHUNK_SIZE
        elif length is None:
            self._at, keep_alive = _At.UNTIL_EOF, False
        else:
            self._at, self._missing = _At.LENGTH, length
        yield Head(status, reason, headers, keep_alive, chunked)
        if self._at is _At.LENGTH and not self._missing:
            yield self._ended()


def _shown(data: bytes | bytearray) -> str:
    return repr(bytes(data[:SHOWN_BYTES])) + ("..." if len(data) > SHOWN_BYTES else "")


def _text(data: bytes) -> str:
    """Decode UTF-8, else Latin-1, which fits any bytes. A lone CR separates, as in the RFC."""
    data = data.strip(b" \t\r")
    if b"\r" in data:
        data = data.replace(b"\r", b" ")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _status_line(line: bytes) -> tuple[bytes, int, str]:
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise BadAnswer(f"the status line is {_shown(line)}")
    if b"\0" in line:
        raise BadAnswer("the status line has a NUL")
    return match.group(1), int(match.group(2)), _text(match.group(3))


def _headers(lines: list[bytes]) -> tuple[Headers, Known]:
    headers: Headers = []
    known: Known = {}
    for line in _unfolded(lines):
        if len(line) > HEADER_LINE_BYTES_MAX + line.endswith(b"\r"):
            raise BadAnswer(f"a header has over {HEADER_LINE_BYTES_MAX} bytes: {_shown(line)}")
        if b"\0" in line:
            raise BadAnswer(f"a header has a NUL: {_shown(line)}")
        name, colon, value = line.partition(b":")
        if not colon:
            raise BadAnswer(f"a header has no colon: {_shown(line)}")
        written = name.decode("latin-1")
        plain = written.rstrip(" \t")
        key = plain.lower()
        if key in _FRAMING and plain != written:
            raise BadAnswer(f"{plain} has a space before its colon")
        # Impossible names are left out, as browsers do: nobody can mean them.
        if _TOKEN.fullmatch(plain):
            text = _text(value)
            headers.append((plain, text))
            if key in _READ_HERE:
                known.setdefault(key, []).append(text)
    return headers, known


def _unfolded(lines: list[bytes]) -> list[bytes]:
    """Return the lines, each with its continuation lines."""
    whole: list[list[bytes]] = []
    for line in lines:
        if line[:1] not in (b" ", b"\t"):
            whole.append([line])
        elif whole:
            whole[-1].append(line.strip())
        else:
            raise BadAnswer(f"the first header line continues no header: {_shown(line)}")
    return [b" ".join(parts) if len(parts) > 1 else parts[0] for parts in whole]


def _is_chunked(known: Known, version: bytes) -> bool:
    written = known.get("transfer-encoding", ())
    codings = {each.strip().lower() for value in written for each in value.split(",")}
    codings -= {"identity", ""}
    if not codings:
        return False
    if codings != {"chunked"}:
        raise BadAnswer(f"Transfer-Encoding is {', '.join(written)[:SHOWN_BYTES]!r}")
    if version == b"1.0":
        raise BadAnswer("it is HTTP/1.0, which has no Transfer-Encoding")
    return True


def _length(known: Known) -> tuple[int | None, int | None]:
    """Return Content-Length, and the number that an unreadable one begins with."""
    written = known.get("content-length", ())
    lengths = {each.strip() for value in written for each in value.split(",")}
    if not lengths:
        return None, None
    if len(lengths) > 1:
        raise BadAnswer(f"Content-Length is both {' and '.join(sorted(lengths))[:SHOWN_BYTES]}")
    (length,) = lengths
    # Chromium takes an unreadable length for none, curl for the number it begins with: where the
    # two agree, the body is what both deliver.
    begins = _BEGINS_WITH_NUMBER.match(length)
    if begins is None or not length.isascii():
        raise BadAnswer(f"Content-Length is {length[:SHOWN_BYTES]!r}")
    number = int(begins.group(1)) if len(begins.group(1)) < 20 else LENGTH_MAX + 1
    if number > LENGTH_MAX:
        return None, None
    return (number, None) if length.isdigit() else (None, number)
