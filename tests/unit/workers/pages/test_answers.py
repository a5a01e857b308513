"""HTTP/1 answers, from bytes to events."""

from pathlib import Path

import pytest

from musterd.workers.pages.answers import (
    CHUNK_LINE_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADER_LINE_BYTES_MAX,
    TRAILER_LINE_BYTES_MAX,
    AnswerCut,
    AnswerParser,
    BadAnswer,
    End,
    Event,
    Head,
)
from musterd.workers.pages.http import (
    CONNECT_SECONDS,
    PAGE_BYTES_MAX,
    POOL_SECONDS,
    READ_SECONDS,
    REDIRECTS_MAX,
)
from musterd.workers.pages.page_reader import CPU_SECONDS_MAX

OK = b"HTTP/1.1 200 OK\r\n"


def parsed(
    answer: bytes, *, step: int = 0, eof: bool = False, has_body: bool = True
) -> list[Event]:
    """Return all events of an answer, fed in pieces of `step` bytes, with its body as one."""
    parser = AnswerParser(has_body)
    pieces = [answer[at : at + step] for at in range(0, len(answer), step)] if step else [answer]
    events = [event for piece in pieces for event in parser.feed(piece)]
    if eof:
        events += parser.eof()
    body = b"".join(event for event in events if isinstance(event, bytes))
    rest: list[Event] = [event for event in events if not isinstance(event, bytes)]
    return [*rest, body]


ANSWERS = [
    OK + b"Content-Length: 3\r\n\r\ntea",
    OK + b"Content-Length: 3\r\n\r\ntea" + b"more",
    OK + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\ntea\r\n2\n!!\n0\r\nX: y\r\n\r\n",
    b"HTTP/1.1 103 Early\nLink: a\n\n" + OK + b"Content-Length: 0\r\n\r\n",
    OK + b"X-A: 1\r\n 2\r\nContent-Length: 1\r\n\r\nx",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_it_does_not_matter_how_an_answer_is_cut_into_packets(answer: bytes, step: int) -> None:
    whole, cut = parsed(answer), parsed(answer, step=step)
    assert whole[-1] == cut[-1]
    assert [event for event in whole if isinstance(event, Head)] == [
        event for event in cut if isinstance(event, Head)
    ]
    assert any(isinstance(event, End) for event in cut)


@pytest.mark.parametrize("end", range(1, 60))
def test_an_answer_that_ends_early_is_cut(end: int) -> None:
    answer = ANSWERS[2]
    with pytest.raises(AnswerCut):
        parsed(answer[:end], eof=True)


def test_bytes_behind_an_answer_are_told_and_never_taken_for_the_next() -> None:
    *_, end, body = parsed(ANSWERS[1])
    assert (end, body) == (End(more=True), b"tea")
    parser = AnswerParser()
    assert [*parser.feed(ANSWERS[0])][-1] == End()
    assert list(parser.feed(OK)) == [End(more=True)]


def test_a_body_without_a_length_lasts_until_the_connection_ends() -> None:
    head, end, body = parsed(OK + b"\r\ntea", eof=True)
    assert isinstance(head, Head)
    assert (head.keep_alive, end, body) == (False, End(), b"tea")


@pytest.mark.parametrize(("status", "has_body"), [(b"204", True), (b"304", True), (b"200", False)])
def test_some_answers_have_no_body_whatever_their_headers_say(
    status: bytes, has_body: bool
) -> None:
    answer = b"HTTP/1.1 " + status + b" x\r\nContent-Length: 7\r\n\r\n"
    assert parsed(answer, has_body=has_body)[1:] == [End(), b""]


def test_text_of_headers_is_utf_8_or_latin_1() -> None:
    head = parsed(OK + b"A: caf\xc3\xa9\r\nB: caf\xe9\r\nC: a\rb\r\n\r\n")[0]
    assert isinstance(head, Head)
    assert head.headers == [("A", "café"), ("B", "café"), ("C", "a b")]


def test_callers_see_the_one_length_that_counts() -> None:
    head = parsed(OK + b"Content-Length: 3, 3\r\nContent-Length: 3\r\n\r\ntea")[0]
    assert isinstance(head, Head)
    assert head.headers == [("Content-Length", "3")]
    head = parsed(OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")[0]
    assert isinstance(head, Head)
    assert head.headers == [("Transfer-Encoding", "chunked")]
    assert not head.keep_alive


def padded(prefix: bytes, size: int, suffix: bytes) -> bytes:
    """Return exactly `size` bytes, filled up between prefix and suffix."""
    return prefix + b"x" * (size - len(prefix) - len(suffix)) + suffix


@pytest.mark.parametrize("over", [0, 1])
def test_the_limits_are_those_that_are_documented(over: int) -> None:
    line = padded(b"A: ", HEADER_LINE_BYTES_MAX + over, b"")
    head = OK + (b"B: " + b"x" * 60_000 + b"\r\n") * 4
    head = padded(head + b"C: ", HEAD_BYTES_MAX + over, b"\r\n\r\n")
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    size = padded(b"1;", CHUNK_LINE_BYTES_MAX + over, b"\r\n")
    trailer = padded(b"A: ", TRAILER_LINE_BYTES_MAX + over, b"\r\n")
    for answer in (
        OK + line + b"\r\nContent-Length: 0\r\n\r\n",
        head,
        chunked + size + b"x\r\n0\r\n\r\n",
        chunked + b"0\r\n" + trailer + b"\r\n",
    ):
        if over:
            with pytest.raises(BadAnswer, match=r"over \d+ bytes"):
                parsed(answer, eof=True)
        else:
            assert isinstance(parsed(answer, eof=True)[0], Head)


def test_the_documentation_tells_these_limits() -> None:
    limits = (Path(__file__).parents[4] / "docs" / "fetching.md").read_text()
    for what, size in {
        "all headers of an answer": HEAD_BYTES_MAX,
        "one header line": HEADER_LINE_BYTES_MAX,
        "the line with the size of a chunk": CHUNK_LINE_BYTES_MAX,
        "a trailer": TRAILER_LINE_BYTES_MAX,
    }.items():
        assert f"| {what} | {size // 1024} KiB" in limits
    assert "10 MiB by default | `PageTooLarge`" in limits
    assert PAGE_BYTES_MAX == 10 * 2**20
    assert f"| redirects | {REDIRECTS_MAX} |" in limits
    assert f"| {CPU_SECONDS_MAX} s of CPU time |" in limits
    assert f"| {CONNECT_SECONDS:g} s; {POOL_SECONDS:g} s; {READ_SECONDS:g} s |" in limits


def test_a_head_without_an_end_is_refused_at_its_limit() -> None:
    parser = AnswerParser()
    assert list(parser.feed(OK)) == []
    endless = (event for _ in range(HEAD_BYTES_MAX) for event in parser.feed(b"X: tea\r\n"))
    with pytest.raises(BadAnswer, match="over"):
        next(endless)


def test_interim_answers_are_counted_against_the_same_limit() -> None:
    parser = AnswerParser()
    interim = b"HTTP/1.1 100 C\r\n\r\n"
    endless = (event for _ in range(HEAD_BYTES_MAX) for event in parser.feed(interim))
    assert isinstance(next(endless), Head)
    with pytest.raises(BadAnswer, match="over"):
        list(endless)


def test_what_is_shown_of_a_bad_answer_is_short_and_printable() -> None:
    with pytest.raises(BadAnswer) as caught:
        parsed(b"\x1b[31m" + b"x" * 1000)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
