"""Answers that break HTTP, as servers send them, and a server on loopback that sends them.

Every answer tries to deliver BODY. docs/fetching.md says how each client treats each answer;
http_verdicts.py reads and writes that table.
"""

import gzip
import socket
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import brotli

from musterd.workers.pages.codings import zstd

BODY = b"<!doctype html><title>shop</title><p>tea 12.50</p>"
TEXT = "tea 12.50"
SIZE = len(BODY)
KIND = b"Content-Type: text/html; charset=utf-8\r\n"
SIZED = KIND + b"Content-Length: %d\r\n" % SIZE
CHUNKED = KIND + b"Transfer-Encoding: chunked\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
TRUNCATED = 20  # bytes that a truncated answer lacks

Ending = Literal["keep", "close", "reset"]


@dataclass(frozen=True)
class Violation:
    """`ending` says how the connection ends after the answer."""

    name: str
    answer: bytes
    ending: Ending = "close"


def sized(name: str, extra: bytes, status: bytes = OK) -> Violation:
    """Make a page with its length and one more header."""
    return Violation(name, status + SIZED + extra + b"\r\n" + BODY, "keep")


def started(name: str, status: bytes) -> Violation:
    return Violation(name, status + SIZED + b"\r\n" + BODY, "keep")


def measured(name: str, length: bytes, body: bytes = BODY, ending: Ending = "close") -> Violation:
    """Make a page with these Content-Length headers."""
    return Violation(name, OK + KIND + length + b"\r\n" + body, ending)


def coded(
    name: str,
    body: bytes,
    coding: bytes = b"chunked",
    ending: Ending = "keep",
    version: bytes = b"1.1",
) -> Violation:
    """Make a page in a transfer coding."""
    head = b"HTTP/" + version + b" 200 OK\r\n" + KIND + b"Transfer-Encoding: " + coding
    return Violation(name, head + b"\r\n\r\n" + body, ending)


def answered(name: str, status: bytes, headers: bytes = b"", ending: Ending = "keep") -> Violation:
    """Make the page with another status."""
    return Violation(
        name, b"HTTP/1.1 " + status + b"\r\n" + headers + SIZED + b"\r\n" + BODY, ending
    )


def packed(name: str, coding: bytes, body: bytes) -> Violation:
    """Make a page in a content coding."""
    head = OK + KIND + b"Content-Encoding: " + coding + b"\r\n"
    return Violation(name, head + b"Content-Length: %d\r\n\r\n" % len(body) + body, "keep")


def moved(name: str, location: bytes, status: bytes = b"302 Found") -> Violation:
    """Make a redirect to /target, which answers with the page."""
    return Violation(
        name, b"HTTP/1.1 " + status + b"\r\n" + location + b"Content-Length: 0\r\n\r\n", "keep"
    )


def chunk(data: bytes, size: bytes | None = None, end: bytes = b"\r\n") -> bytes:
    return (b"%x" % len(data) if size is None else size) + end + data + end


def deflated(data: bytes, window: int) -> bytes:
    packer = zlib.compressobj(wbits=window)
    return packer.compress(data) + packer.flush()


HEX = b"%x" % SIZE
LAST = b"0\r\n\r\n"
GZIP = gzip.compress(BODY, mtime=0)
BROTLI = brotli.compress(BODY)
ZSTD = zstd.compress(BODY)
NOISE = bytes(range(256)) * 2

STATUS_LINES = [
    started("no reason and no space before it", b"HTTP/1.1 200\r\n"),
    started("two spaces in the status line", b"HTTP/1.1  200  OK\r\n"),
    started("tabs in the status line", b"HTTP/1.1\t200\tOK\r\n"),
    started("http/1.1 in lower case", b"http/1.1 200 OK\r\n"),
    started("version 1", b"HTTP/1 200 OK\r\n"),
    started("version 1.2", b"HTTP/1.2 200 OK\r\n"),
    started("version 1.10", b"HTTP/1.10 200 OK\r\n"),
    started("version 0.9", b"HTTP/0.9 200 OK\r\n"),
    started("version 2 without its frames", b"HTTP/2 200 OK\r\n"),
    started("version 2.0 without its frames", b"HTTP/2.0 200 OK\r\n"),
    started("version 3", b"HTTP/3 200 OK\r\n"),
    started("version 9.9", b"HTTP/9.9 200 OK\r\n"),
    started("no version", b"HTTP 200 OK\r\n"),
    started("no space after the version", b"HTTP/1.1200 OK\r\n"),
    started("no space after the status", b"HTTP/1.1 200OK\r\n"),
    started("HTTPS instead of HTTP", b"HTTPS/1.1 200 OK\r\n"),
    started("ICY instead of HTTP (SHOUTcast)", b"ICY 200 OK\r\n"),
    started("status of two digits", b"HTTP/1.1 20 OK\r\n"),
    started("status of four digits", b"HTTP/1.1 2000 OK\r\n"),
    started("status 099", b"HTTP/1.1 099 OK\r\n"),
    started("status 600", b"HTTP/1.1 600 OK\r\n"),
    started("status 999", b"HTTP/1.1 999 Denied\r\n"),
    started("status is a word", b"HTTP/1.1 OK\r\n"),
    started("status is negative", b"HTTP/1.1 -200 OK\r\n"),
    started("status with a plus", b"HTTP/1.1 +200 OK\r\n"),
    started("Latin-1 in the reason", b"HTTP/1.1 200 D\xe9j\xe0 vu\r\n"),
    started("NUL in the reason", b"HTTP/1.1 200 O\0K\r\n"),
    started("reason of 20,000 bytes", b"HTTP/1.1 200 " + b"x" * 20_000 + b"\r\n"),
    started("an empty line before the status line", b"\r\n" + OK),
    started("three bytes of junk before the status line", b"abc" + OK),
    started("a space before the status line", b" " + OK),
    started("a long line of junk before the status line", b"junk " * 20 + b"\r\n" + OK),
    started("the status line twice", OK + OK),
    Violation("no status line: headers at once", SIZED + b"\r\n" + BODY),
    Violation("no head at all (HTTP/0.9)", BODY),
]

LINES = [
    Violation("lines end with LF", (OK + SIZED + b"\r\n").replace(b"\r\n", b"\n") + BODY, "keep"),
    Violation("lines end with LF, some with CRLF", OK[:-2] + b"\n" + SIZED + b"\n" + BODY, "keep"),
    Violation("the empty line is LF", OK + SIZED + b"\n" + BODY, "keep"),
    Violation("lines end with CR", (OK + SIZED + b"\r\n").replace(b"\r\n", b"\r") + BODY),
    Violation("lines end with CR CR LF", (OK + SIZED + b"\r\n").replace(b"\r\n", b"\r\r\n") + BODY),
    Violation("closed before the empty line", OK + SIZED),
    Violation("closed within the status line", OK[:8]),
]

HEADERS = [
    sized("a space before the colon", b"X-Shop : tea\r\n"),
    Violation(
        "a space before the colon of Content-Length",
        OK + KIND + b"Content-Length : %d\r\n\r\n" % SIZE + BODY,
        "keep",
    ),
    sized("a line without a colon", b"nonsense\r\n"),
    sized("a header without a name", b": tea\r\n"),
    sized("a folded header", b"X-Shop: tea\r\n and more\r\n"),
    Violation(
        "a fold before the first header", OK + b" folded\r\n" + SIZED + b"\r\n" + BODY, "keep"
    ),
    sized("a line of spaces within the head", b"  \r\nX-Shop: tea\r\n"),
    sized("Latin-1 in a value", b"X-Shop: caf\xe9\r\n"),
    sized("UTF-8 in a value", "X-Shop: café\r\n".encode()),
    sized("bytes that are neither in a value", b"X-Shop: \xff\x80\x81\r\n"),
    sized("Latin-1 in Set-Cookie", b"Set-Cookie: a=caf\xe9\r\n"),
    sized("NUL in a value", b"X-Shop: a\0b\r\n"),
    sized("a control character in a value", b"X-Shop: a\x01b\r\n"),
    sized("a lone CR in a value", b"X-Shop: a\rb\r\n"),
    sized("a space within a name", b"X Shop: tea\r\n"),
    sized("Latin-1 in a name", b"X-Caf\xe9: tea\r\n"),
    sized("brackets in a name", b"X(Shop): tea\r\n"),
    sized("a control character in a name", b"X\x01Shop: tea\r\n"),
    sized("a header line of 9,000 bytes", b"X-Shop: " + b"t" * 9_000 + b"\r\n"),
    sized("a header line of 90,000 bytes", b"X-Shop: " + b"t" * 90_000 + b"\r\n"),
    sized("a header line of 250,000 bytes", b"X-Shop: " + b"t" * 250_000 + b"\r\n"),
    sized("a header line of 300,000 bytes", b"X-Shop: " + b"t" * 300_000 + b"\r\n"),
    sized("200 headers", b"".join(b"X-Shop-%d: tea\r\n" % n for n in range(200))),
    sized("2,000 headers", b"".join(b"X-Shop-%d: tea\r\n" % n for n in range(2_000))),
    sized("6,000 headers", b"".join(b"X-%d: tea\r\n" % n for n in range(6_000))),
    sized("a head of 1 MB", b"X-Shop: tea and more tea\r\n" * 40_000),
]

LENGTHS = [
    measured("Content-Length twice, the same", b"Content-Length: %d\r\n" % SIZE * 2, ending="keep"),
    measured(
        "Content-Length twice, not the same", b"Content-Length: %d\r\nContent-Length: 7\r\n" % SIZE
    ),
    measured(
        "Content-Length as a list, the same",
        b"Content-Length: %d, %d\r\n" % (SIZE, SIZE),
        ending="keep",
    ),
    measured("Content-Length as a list, not the same", b"Content-Length: %d, 7\r\n" % SIZE),
    measured("Content-Length is negative", b"Content-Length: -1\r\n"),
    measured("Content-Length with a plus", b"Content-Length: +%d\r\n" % SIZE),
    measured("Content-Length with letters behind", b"Content-Length: %dabc\r\n" % SIZE),
    measured("Content-Length with a unit", b"Content-Length: %d bytes\r\n" % SIZE),
    measured("Content-Length with a fraction", b"Content-Length: %d.0\r\n" % SIZE),
    measured("Content-Length is a word", b"Content-Length: abc\r\n"),
    measured("Content-Length is empty", b"Content-Length:\r\n"),
    measured("Content-Length is quoted", b'Content-Length: "%d"\r\n' % SIZE),
    measured("Content-Length is hexadecimal", b"Content-Length: 0x%x\r\n" % SIZE),
    measured("Content-Length over 64 bits", b"Content-Length: 99999999999999999999\r\n"),
    measured("Content-Length is longer than the body", b"Content-Length: %d\r\n" % (SIZE + 9)),
    measured(
        "Content-Length is longer, and a reset",
        b"Content-Length: %d\r\n" % (SIZE + 9),
        ending="reset",
    ),
    measured(
        "Content-Length is shorter than the body", b"Content-Length: %d\r\n" % SIZE, BODY + NOISE
    ),
    measured("neither length nor close, and a reset", b"", ending="reset"),
    Violation(
        "Content-Length and chunked",
        OK + CHUNKED + b"Content-Length: 5\r\n\r\n" + chunk(BODY) + LAST,
        "keep",
    ),
    Violation(
        "chunked and Content-Length, in this order",
        OK
        + KIND
        + b"Content-Length: 500\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(BODY)
        + LAST,
        "keep",
    ),
]

CHUNKS = [
    coded("closed after the last but one chunk", chunk(BODY), ending="close"),
    coded("closed within a chunk", chunk(BODY)[:-TRUNCATED], ending="close"),
    coded("closed after 0 and a line end", chunk(BODY) + b"0\r\n", ending="close"),
    coded("closed after 0", chunk(BODY) + b"0", ending="close"),
    coded("lines of chunks end with LF", chunk(BODY, end=b"\n") + b"0\n\n"),
    coded("zeros before the size", chunk(BODY, b"0000000000000000000" + HEX) + LAST),
    coded("a space after the size", chunk(BODY, HEX + b"  ") + LAST),
    coded("a tab after the size", chunk(BODY, HEX + b"\t") + LAST),
    coded("a space before the size", chunk(BODY, b" " + HEX) + LAST),
    coded("an extension that is none", chunk(BODY, HEX + b';;="') + LAST),
    coded("words behind the size", chunk(BODY, HEX + b" tea") + LAST),
    coded("the size with 0x", chunk(BODY, b"0x" + HEX) + LAST, ending="close"),
    coded("the size is negative", chunk(BODY, b"-" + HEX) + LAST, ending="close"),
    coded("the size with a plus", chunk(BODY, b"+" + HEX) + LAST, ending="close"),
    coded("the size is a word", chunk(BODY, b"tea") + LAST, ending="close"),
    coded("the size is empty", chunk(BODY, b"") + LAST, ending="close"),
    coded("the size has over 64 bits", chunk(BODY, b"f" * 17) + LAST, ending="close"),
    coded("no line end after the data", HEX + b"\r\n" + BODY + LAST, ending="close"),
    coded("data longer than the size", HEX + b"\r\n" + BODY + b"zz\r\n" + LAST, ending="close"),
    coded("bytes after the last chunk", chunk(BODY) + LAST + NOISE, ending="close"),
    coded("trailers that are none", chunk(BODY) + b"0\r\nnonsense\r\n\r\n"),
    coded("a trailer of 9,000 bytes", chunk(BODY) + b"0\r\nX-Shop: " + b"t" * 9_000 + b"\r\n\r\n"),
    coded("an extension of 9,000 bytes", chunk(BODY, HEX + b";" + b"t" * 9_000) + LAST),
    coded("Chunked in capitals", chunk(BODY) + LAST, b"CHUNKED"),
    coded("chunked twice", chunk(BODY) + LAST, b"chunked, chunked"),
    coded("chunked with a parameter", chunk(BODY) + LAST, b"chunked;q=1"),
    coded("identity, chunked", chunk(BODY) + LAST, b"identity, chunked"),
    coded("identity and closed", BODY, b"identity", "close"),
    coded("xchunked and closed", BODY, b"xchunked", "close"),
    coded("said to be chunked and is not", BODY, ending="close"),
    coded("chunked in HTTP/1.0", chunk(BODY) + LAST, ending="close", version=b"1.0"),
    coded("gzip, chunked as a transfer coding", chunk(GZIP) + LAST, b"gzip, chunked"),
    coded("gzip as a transfer coding", GZIP, b"gzip", "close"),
    Violation(
        "Transfer-Encoding twice",
        OK + KIND + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + chunk(BODY) + LAST,
        "keep",
    ),
]

CODINGS = [
    packed("x-gzip", b"x-gzip", GZIP),
    packed("GZIP in capitals", b"GZIP", GZIP),
    packed("gzip, gzip, and it is", b"gzip, gzip", gzip.compress(GZIP, mtime=0)),
    packed("gzip, gzip, and it is once", b"gzip, gzip", GZIP),
    packed("identity, gzip", b"identity, gzip", GZIP),
    packed("deflate with its head", b"deflate", deflated(BODY, 15)),
    packed("deflate without its head", b"deflate", deflated(BODY, -15)),
    packed("gzip that is plain", b"gzip", BODY),
    packed("gzip that is deflate", b"gzip", deflated(BODY, 15)),
    packed(
        "gzip of several parts",
        b"gzip",
        gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0),
    ),
    packed("gzip cut off", b"gzip", GZIP[:-TRUNCATED]),
    packed("gzip without its checksum", b"gzip", GZIP[:-8]),
    packed("gzip with a wrong checksum", b"gzip", GZIP[:-8] + b"\0\0\0\0" + GZIP[-4:]),
    packed("gzip and junk behind", b"gzip", GZIP + b"junk and more of it"),
    packed("gzip and zeros behind", b"gzip", GZIP + bytes(512)),
    packed("gzip of nothing at all", b"gzip", b""),
    packed("br that is plain", b"br", BODY),
    packed("br cut off", b"br", BROTLI[:-9]),
    packed("br and junk behind", b"br", BROTLI + b"junk and more of it"),
    packed("zstd that is plain", b"zstd", BODY),
    packed("zstd cut off", b"zstd", ZSTD[:-9]),
    packed("zstd of several frames", b"zstd", zstd.compress(BODY[:9]) + zstd.compress(BODY[9:])),
    packed("zstd and junk behind", b"zstd", ZSTD + b"junk and more of it"),
    packed("zstd, br, gzip, and it is", b"zstd, br, gzip", gzip.compress(brotli.compress(ZSTD))),
    packed("identity", b"identity", BODY),
    packed("none as a coding", b"none", BODY),
    packed("utf-8 as a coding", b"utf-8", BODY),
    packed("an empty coding", b"", BODY),
    packed("an unknown coding", b"tea", BODY),
    packed("compress", b"compress", BODY),
]

STATUSES = [
    answered("204 with a body", b"204 No Content", ending="close"),
    answered("205 with a body", b"205 Reset Content", ending="close"),
    answered(
        "206 that nobody asked for", b"206 Partial Content", b"Content-Range: bytes 0-49/900\r\n"
    ),
    answered("304 that nobody asked for", b"304 Not Modified", ending="close"),
    started("100 before the answer", b"HTTP/1.1 100 Continue\r\n\r\n" + OK),
    started(
        "103 with headers before the answer",
        b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n" + OK,
    ),
    started("20 times 100 before the answer", b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + OK),
    started(
        "101 that nobody asked for",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: tea\r\nConnection: Upgrade\r\n\r\n" + OK,
    ),
    started("199 before the answer", b"HTTP/1.1 199 Wait\r\n\r\n" + OK),
    answered("302 without a Location, with a page", b"302 Found"),
    answered("302 with an empty Location, with a page", b"302 Found", b"Location:\r\n"),
    answered("300 with a page", b"300 Multiple Choices"),
    answered("305 with a page", b"305 Use Proxy", b"Location: /target\r\n"),
    sized("200 with a Location", b"Location: /target\r\n"),
    moved("Location with spaces around it", b"Location:    /target  \r\n"),
    moved("Location with a space in it", b"Location: /target?a b\r\n"),
    moved("Location in Latin-1", b"Location: /target?caf\xe9\r\n"),
    moved("Location in UTF-8", "Location: /target?café\r\n".encode()),
    moved("Location without a path", b"Location: ?target\r\n"),
    moved("Location with one slash after its scheme", b"Location: http:/target\r\n"),
    moved("Location with backslashes", b"Location: \\target\r\n"),
    moved("Location twice, the same", b"Location: /target\r\n" * 2),
    moved("Location twice, not the same", b"Location: /target\r\nLocation: /other\r\n"),
    Violation("nothing at all", b""),
    Violation("nothing at all, and a reset", b"", "reset"),
    Violation("binary noise", NOISE),
    Violation(
        "two answers at once", OK + SIZED + b"\r\n" + BODY + OK + SIZED + b"\r\n" + BODY, "keep"
    ),
]

GROUPS = {
    "The status line": STATUS_LINES,
    "Line ends": LINES,
    "Headers": HEADERS,
    "Content-Length": LENGTHS,
    "Transfer codings": CHUNKS,
    "Content codings": CODINGS,
    "Statuses and redirects": STATUSES,
}
VIOLATIONS = [each for group in GROUPS.values() for each in group]
PAGE = OK + SIZED + b"\r\n" + BODY


class ViolationServer:
    """Answers /N with violation number N, and any path that contains `target` with the page."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def url(self, violation: Violation) -> str:
        return f"http://127.0.0.1:{self.port}/{VIOLATIONS.index(violation)}"

    def close(self) -> None:
        # shutdown() wakes a thread that waits in accept() or recv().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        serving: list[threading.Thread] = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            self._open.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()
            serving.append(thread)
        for thread in serving:
            thread.join(10)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):  # a peer may have disconnected
                while self._answer(connection):
                    pass
        finally:
            self._open.discard(connection)

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; return False once the connection has ended."""
        request = b""
        while b"\r\n\r\n" not in request:
            data = connection.recv(65536)
            if not data:
                return False
            request += data
        path = request.split(b" ", 2)[1]
        number = path.strip(b"/")
        if b"target" in path:
            answer, ending = PAGE, "keep"
        elif number.isdigit():
            answer, ending = VIOLATIONS[int(number)].answer, VIOLATIONS[int(number)].ending
        else:
            answer, ending = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "keep"
        connection.sendall(answer)
        if ending == "reset":
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return ending == "keep"
