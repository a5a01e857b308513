"""Decode content codings (gzip, deflate, br, zstd) piece by piece.

    decoder = content_decoder("gzip")
    for piece in decoder.decode(data): ...    # pieces of PIECE_BYTES; stop when there are too many
    decoder.finish()                          # CodingCut where the end is missing

Decoding is lazy: a bomb is never held in memory, because a caller that counts the pieces just
stops. Which codings a Content-Encoding may name, and how malformed data are treated, follows curl
and Chromium: see docs/fetching.md.
"""

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import brotli

from musterd.ipc.errors import MusterdError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ACCEPTED = "gzip, deflate, br, zstd"  # what requests say that they accept
CODINGS_MAX = 5  # one upon the other, as in curl
PIECE_BYTES = 64 * 1024
ZSTD_WINDOW_LOG_MAX = 23  # 8 MiB: all that RFC 9659 grants the web
_PLAIN = frozenset({"", "identity", "none"})


class BadCoding(MusterdError):
    """The body is not what Content-Encoding says."""


class CodingCut(MusterdError):
    """The body ends before its coding does."""


class Decoder(Protocol):
    """Decodes one coding, or several."""

    def decode(self, data: bytes) -> Iterator[bytes]: ...
    def finish(self) -> None: ...


def content_decoder(written: str) -> Decoder | None:
    """Return the decoder of this Content-Encoding; None where there is nothing to decode."""
    names = [each.strip().lower() for each in written.split(",")]
    if len(names) == 1 and names[0] in _PLAIN:
        return None
    if len(names) > CODINGS_MAX:
        raise BadCoding(f"Content-Encoding names {len(names)} codings; at most {CODINGS_MAX}")
    unknown = [each for each in names if each not in _DECODERS]
    if unknown:
        raise BadCoding(f"Content-Encoding {written[:60]!r} is none of {ACCEPTED}")
    decoders = [_DECODERS[each]() for each in reversed(names)]
    return decoders[0] if len(decoders) == 1 else _Chain(decoders)


class _Chain:
    """Several codings; the one that was applied last is decoded first."""

    def __init__(self, decoders: list[Decoder]) -> None:
        self._decoders = decoders

    def decode(self, data: bytes) -> Iterator[bytes]:
        return self._through(self._decoders, data)

    def _through(self, decoders: list[Decoder], data: bytes) -> Iterator[bytes]:
        if not decoders:
            yield data
            return
        for piece in decoders[0].decode(data):
            yield from self._through(decoders[1:], piece)

    def finish(self) -> None:
        for each in self._decoders:
            each.finish()


class _Deflate:
    """Zlib stream, or its bare data, which some servers send instead."""

    name = "deflate"

    def __init__(self) -> None:
        self._stream: Any = None  # zlib's class has no public name

    def _open(self, data: bytes) -> Any:
        # The head of a zlib stream: method 8, and its first two bytes are a multiple of 31.
        headed = data[0] & 0x0F == 8 and (len(data) < 2 or (data[0] << 8 | data[1]) % 31 == 0)
        return zlib.decompressobj(zlib.MAX_WBITS if headed else -zlib.MAX_WBITS)

    def decode(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None:
                self._stream = self._open(data)
            elif self._stream.eof:
                self._behind(data)
            found = self._decompress(data)
            # zlib may have taken all data and still owe the end of a long repetition.
            while len(found) == PIECE_BYTES:
                yield found
                found = self._decompress(self._stream.unconsumed_tail)
            if found:
                yield found
            data = self._stream.unused_data

    def _decompress(self, data: bytes) -> bytes:
        try:
            found: bytes = self._stream.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise BadCoding(f"the body is not {self.name}: {error}") from None
        return found

    def _behind(self, data: bytes) -> None:
        raise BadCoding(f"there are bytes behind the end of {self.name}")

    def finish(self) -> None:
        if self._stream is not None and not self._stream.eof:
            raise CodingCut(f"the body ends before its {self.name} does")


class _Gzip(_Deflate):
    """Gzip file of one member or several."""

    name = "gzip"
    _checksum = 0
    _size = 0

    def _open(self, data: bytes) -> Any:
        self._checksum = self._size = 0
        return zlib.decompressobj(zlib.MAX_WBITS + 16)

    def _decompress(self, data: bytes) -> bytes:
        found = super()._decompress(data)
        self._checksum = zlib.crc32(found, self._checksum)
        self._size += len(found)
        return found

    def _behind(self, data: bytes) -> None:
        if data[:1] != b"\x1f":
            super()._behind(data)
        self._stream = self._open(data)  # another member

    def finish(self) -> None:
        if self._stream is not None and not self._stream.eof:
            # Some servers leave out the checksum and the size at the end. Given the right ones, a
            # stream that lacks nothing else comes to its end.
            trailer = self._checksum.to_bytes(4, "little") + (self._size % 2**32).to_bytes(
                4, "little"
            )
            with suppress(zlib.error):
                self._stream.decompress(trailer)
        super().finish()


class _Brotli:
    def __init__(self) -> None:
        self._stream = brotli.Decompressor()
        self._begun = False

    def decode(self, data: bytes) -> Iterator[bytes]:
        self._begun = True
        try:
            while True:
                found = self._stream.process(data, output_buffer_limit=PIECE_BYTES)
                if found:
                    yield found
                data = b""
                if self._stream.is_finished() or self._stream.can_accept_more_data():
                    return
        except brotli.error as error:
            raise BadCoding(f"the body is not br: {error}") from None

    def finish(self) -> None:
        if self._begun and not self._stream.is_finished():
            raise CodingCut("the body ends before its br does")


class _Zstd:
    """One frame or several."""

    def __init__(self) -> None:
        self._stream = self._open()
        self._begun = False

    def _open(self) -> Any:
        options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
        return zstd.ZstdDecompressor(options=options)

    def decode(self, data: bytes) -> Iterator[bytes]:
        self._begun = True
        try:
            while True:
                if self._stream.eof:
                    if not data:
                        return
                    self._stream = self._open()
                found = self._stream.decompress(data, max_length=PIECE_BYTES)
                if found:
                    yield found
                data = self._stream.unused_data if self._stream.eof else b""
                if not self._stream.eof and self._stream.needs_input:
                    return
        except zstd.ZstdError as error:
            raise BadCoding(f"the body is not zstd: {error}") from None

    def finish(self) -> None:
        if self._begun and not self._stream.eof:
            raise CodingCut("the body ends before its zstd does")


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": _Gzip,
    "x-gzip": _Gzip,
    "deflate": _Deflate,
    "br": _Brotli,
    "zstd": _Zstd,
}
