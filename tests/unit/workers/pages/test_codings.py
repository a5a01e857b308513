"""Content codings, decoded piece by piece."""

import gzip
import itertools
import zlib

import brotli
import pytest

from musterd.workers.pages.codings import (
    CODINGS_MAX,
    PIECE_BYTES,
    BadCoding,
    CodingCut,
    content_decoder,
    zstd,
)

TEXT = b"tea and more tea, " * 5000
BARE = zlib.compressobj(wbits=-15)
PACKED = {
    "gzip": gzip.compress(TEXT),
    "x-gzip": gzip.compress(TEXT[:7]) + gzip.compress(TEXT[7:]),
    "deflate": zlib.compress(TEXT),
    "Deflate ": BARE.compress(TEXT) + BARE.flush(),
    "br": brotli.compress(TEXT),
    "zstd": zstd.compress(TEXT[:7]) + zstd.compress(TEXT[7:]),
    "gzip, gzip": gzip.compress(gzip.compress(TEXT)),
    "zstd, br, deflate": zlib.compress(brotli.compress(zstd.compress(TEXT))),
}


def decoded(coding: str, data: bytes, step: int) -> bytes:
    decoder = content_decoder(coding)
    assert decoder is not None
    found = b"".join(
        piece for at in range(0, len(data), step) for piece in decoder.decode(data[at : at + step])
    )
    decoder.finish()
    return found


@pytest.mark.parametrize("coding", PACKED)
@pytest.mark.parametrize("step", [1, 5, 10**6])
def test_a_coding_is_undone_however_its_data_come(coding: str, step: int) -> None:
    assert decoded(coding, PACKED[coding], step) == TEXT


@pytest.mark.parametrize("coding", PACKED)
def test_data_that_end_early_are_cut(coding: str) -> None:
    with pytest.raises(CodingCut, match="ends before"):
        decoded(coding, PACKED[coding][:-9], 100)


@pytest.mark.parametrize("coding", PACKED)
def test_data_that_are_something_else_are_bad(coding: str) -> None:
    with pytest.raises(BadCoding, match=r"is not|behind"):
        decoded(coding, b"<p>not packed at all</p>" * 9, 10**6)


@pytest.mark.parametrize("coding", ["", "identity", "None", " IDENTITY "])
def test_some_codings_are_none(coding: str) -> None:
    assert content_decoder(coding) is None


def test_what_is_unknown_is_named() -> None:
    with pytest.raises(BadCoding, match="'tea, gzip' is none of gzip, deflate, br, zstd"):
        content_decoder("tea, gzip")
    with pytest.raises(BadCoding, match=f"at most {CODINGS_MAX}"):
        content_decoder(", ".join(["gzip"] * (CODINGS_MAX + 1)))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_a_bomb_comes_in_pieces_and_only_as_many_as_are_asked_for(coding: str) -> None:
    zeros = bytes(50_000_000)
    bomb = {
        "gzip": lambda: gzip.compress(zeros),
        "deflate": lambda: zlib.compress(zeros),
        "br": lambda: brotli.compress(zeros, quality=1),
        "zstd": lambda: zstd.compress(zeros),
        "gzip, gzip": lambda: gzip.compress(gzip.compress(zeros)),
    }[coding]()
    decoder = content_decoder(coding)
    assert decoder is not None
    pieces = list(itertools.islice(decoder.decode(bomb), 3))
    assert len(pieces) == 3
    assert all(len(piece) <= 4 * PIECE_BYTES for piece in pieces)
