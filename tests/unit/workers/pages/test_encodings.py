"""Encodings of pages."""

import sys
from pathlib import Path

import pytest
import webencodings
from webencodings.labels import LABELS

from musterd.workers.pages.encodings import HEAD_BYTES_MAX, PRESCAN_BYTES, decode, sniff_encoding

# html5lib's own tests, fetched by the Makefile.
HTML5LIB = Path(sys.prefix) / "html5lib-tests" / "encoding"


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ("Чай".encode("cp1251"), "text/html; charset=windows-1251", "cp1251"),
        ("Чай".encode("cp1251"), 'text/html; CHARSET="Windows-1251"', "cp1251"),
        ("Чай".encode("utf-16"), "text/html", "utf-16-le"),
        ("Чай".encode("utf-16-le"), "text/html; charset=utf-16", "utf-16-le"),
        ("\ufeffЧай".encode("utf-16-be"), "text/html; charset=koi8-r", "utf-16-be"),
        ("\ufeffЧай".encode(), "text/html; charset=windows-1251", "utf-8"),
        (b"<html><meta charset=koi8-r>\xfe\xc1\xca", "text/html", "koi8-r"),
        (
            b'<meta http-equiv="Content-Type" content="text/html; charset=koi8-r">\xfe',
            "",
            "koi8-r",
        ),
        (b'<?xml version="1.0" encoding="koi8-r"?>', "application/xml", "koi8-r"),
        (b"<meta charset=utf-16>", "text/html", "utf-8"),
        (b'{"a": "<meta charset=koi8-r>"}', "application/json", "utf-8"),
        (b"<meta charset=zlib>", "text/html; charset=rot13", "utf-8"),
        (b"<p>", "text/html; charset=iso-8859-1", "cp1252"),
        (b" " * 2000 + b"<meta charset=koi8-r>", "text/html", "koi8-r"),
        (b"", "", "utf-8"),
    ],
)
def test_the_encoding_is_found_as_a_browser_would(
    body: bytes, content_type: str, expected: str
) -> None:
    assert sniff_encoding(body, content_type) == expected


def test_decoding_drops_the_bom_and_replaces_what_does_not_fit() -> None:
    assert decode("Чай".encode("utf-16"), "utf-16-le") == "Чай"
    assert decode(b"\xef\xbb\xbfa\xffb", "utf-8") == "a\ufffdb"


@pytest.mark.parametrize("label", LABELS)
def test_every_label_of_the_standard_is_known(label: str) -> None:
    encoding = sniff_encoding(b"", f"text/html; charset={label}")
    known = webencodings.lookup(label)
    assert known is not None
    expected = "gb18030" if known.name == "gbk" else known.codec_info.name
    assert encoding == expected
    assert isinstance(decode(b"tea \xe9\xe8", encoding), str)


def test_the_standard_has_so_many_labels() -> None:
    assert len(LABELS) == 228


HEAD = b"<!doctype html><html><head><!-- x --><script>if (1 <p) {'<div>'}</script>"
LATE = b"<style>" + b"a " * PRESCAN_BYTES + b"</style><meta name=a content=b>"
META = b"<meta charset=koi8-r>"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (b"<!-- <meta charset=koi8-r> -->", "utf-8"),
        (b"<!-- <b>before</b> <meta charset=koi8-r> -->", "utf-8"),
        (b"<!--> <meta charset=koi8-r>", "koi8-r"),
        (b"<!-- " + META, "utf-8"),
        (b"<p title='<meta charset=koi8-r>'>", "utf-8"),
        (b"<metacharset=koi8-r>", "utf-8"),
        (b"<meta name=charset content=koi8-r>", "utf-8"),
        (b"<meta content='text/html; charset=koi8-r'>", "utf-8"),
        (b"<meta content='text/html; charset=koi8-r' http-equiv=CONTENT-TYPE>", "koi8-r"),
        (b"<meta charset=tea><meta charset=koi8-r>", "koi8-r"),
        (b"<meta charset='koi8-r", "utf-8"),
        (HEAD + LATE + META, "koi8-r"),
        (HEAD + LATE + b"<script>'" + META + b"'</script>", "utf-8"),
        (HEAD + LATE + b"<!-- " + META + b" -->", "utf-8"),
        (HEAD + LATE + b"<!-- <meta name=a> " + META + b" -->", "utf-8"),
        (HEAD + LATE + b"</head>" + META, "utf-8"),
        (HEAD + LATE + b"<p>" + META, "utf-8"),
        (b"<p>" + LATE + META, "utf-8"),
        (HEAD + b" " * HEAD_BYTES_MAX + META, "utf-8"),
    ],
)
def test_a_meta_counts_where_browsers_see_it(page: bytes, expected: str) -> None:
    assert sniff_encoding(page, "text/html") == expected


@pytest.mark.skipif(not HTML5LIB.is_dir(), reason="needs html5lib's tests (make test fetches them)")
@pytest.mark.parametrize("name", ["tests1.dat", "tests2.dat", "test-yahoo-jp.dat"])
def test_html5lib_finds_the_same(name: str) -> None:
    """Expect UTF-8 where a page names no encoding and its test expects windows-1252."""
    wrong, cases = [], (HTML5LIB / name).read_bytes().split(b"#data\n")[1:]
    for case in cases:
        page, _, encoding = case.partition(b"\n#encoding\n")
        if b"document.write" in page:
            continue  # a case for programs that run scripts
        label = encoding.strip().split(b"\n")[0].decode()
        known = webencodings.lookup(label)
        assert known is not None
        expected = {known.codec_info.name} | ({"utf-8"} if known.name == "windows-1252" else set())
        if sniff_encoding(page, "text/html") not in expected:
            wrong.append((page[:100], label))
    assert cases
    assert wrong == []
