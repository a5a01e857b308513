"""Output of processes: cut into lines, kept, logged within limits, never in anybody's way."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from musterd.ipc.wire.spoken import mark
from musterd.supervisor.log import worker_output as module
from musterd.supervisor.log.lines import (
    LAST_WORDS_CHARACTERS,
    LINE_BYTES_MAX,
    RING_BYTES_MAX,
    RING_LINES_MAX,
    Lines,
    Ring,
    last_words,
)
from musterd.supervisor.log.token_bucket import Allowance
from musterd.supervisor.log.worker_output import NEXT_WORKER, OutputChunk, Outputs, Source
from musterd.supervisor.text.printable import printable

# -- lines ------------------------------------------------------------------------------------


def test_lines_are_put_together_from_pieces() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ([b"one"], 0)
    assert lines.begun == b"tw"
    assert lines.feed(b"o\r\n\nthree") == ([b"two", b""], 0)
    assert lines.finish() == [b"three"]
    assert lines.finish() == []


def test_a_line_without_end_is_cut_and_says_by_how_much() -> None:
    lines = Lines()
    for _ in range(100):
        assert lines.feed(b"x" * 1000) == ([], 0)
    ((line,), left_out) = lines.feed(b"\nnext\n")[0][:1], 0
    assert (
        line == b"x" * LINE_BYTES_MAX + f" ... and {100_000 - LINE_BYTES_MAX} bytes more".encode()
    )
    assert left_out == 0
    assert lines.feed(b"short\n") == ([b"short"], 0)


def test_of_a_flood_the_last_lines_are_kept_and_the_others_counted() -> None:
    lines = Lines()
    lines.feed(b"begun before ")
    data = b"".join(b"%d\n" % number for number in range(RING_LINES_MAX + 50)) + b"rest"
    kept, left_out = lines.feed(data)
    assert len(kept) == RING_LINES_MAX
    assert kept[-1] == b"%d" % (RING_LINES_MAX + 49)
    assert left_out == 50
    assert lines.begun == b"rest"


def test_a_ring_is_bounded_by_lines_and_by_bytes() -> None:
    ring = Ring()
    ring.add(1.0, [b"%d" % number for number in range(RING_LINES_MAX + 10)])
    assert len(ring) == RING_LINES_MAX
    assert [said.text for said in ring.last(1)] == [str(RING_LINES_MAX + 9)]
    ring.add(2.0, [b"x" * 1000] * 100)
    assert len(ring) == RING_BYTES_MAX // 1000
    assert ring.last(0) == []


def test_last_words_are_short() -> None:
    assert last_words([b"", b"a\xff", b"b "]) == "a�\nb"
    words = last_words([b"y" * 4000, b"the end"])
    assert len(words) == LAST_WORDS_CHARACTERS + 3
    assert words.endswith("the end")


def test_what_could_move_the_cursor_is_written_out() -> None:
    assert printable("a\x1b[2Jb\tc", keep="\t") == r"a\x1b[2Jb" + "\tc"
    assert printable("Grüße, 世界") == "Grüße, 世界"


def test_an_allowance_is_used_up_and_grows_again() -> None:
    allowance = Allowance(10, burst=3)
    assert [allowance.take(1) for _ in range(5)] == [True, True, True, False, False]
    assert not allowance.take(50_000_000)
    assert allowance.take(110_000_000)
    assert not allowance.take(110_000_000)


# -- pipes ------------------------------------------------------------------------------------


class Heard:
    """Outputs that keep what they publish and log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.outputs = Outputs()
        self.chunks: list[OutputChunk] = []
        self.outputs.publish = lambda chunk, _at: self.chunks.append(chunk)
        self._caplog = caplog
        self.writers: dict[Source, int] = {}

    def open(self, name: str) -> Source:
        with self.outputs.open(name) as source:
            self.writers[source] = os.dup(source.write_fd)
        return source

    def turn(self) -> None:
        now_ns = time.monotonic_ns()
        self.outputs.tick(now_ns + module.PACE_NS)
        self.outputs.serve(now_ns)

    def logged(self) -> list[Any]:
        return [
            (record.levelname, record.getMessage(), getattr(record, "fields", {}))
            for record in self._caplog.records
        ]

    def close(self) -> None:
        self.outputs.close()
        for fd in self.writers.values():
            os.close(fd)


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[Heard]:
    caplog.set_level(logging.INFO, "musterd")
    made = Heard(caplog)
    yield made
    made.close()


def test_what_is_written_is_logged_published_and_kept(heard: Heard) -> None:
    source = heard.open("jobs/0")
    os.write(heard.writers[source], b"hello\nERROR it hurts \x1b[1m\nbeg")
    heard.turn()
    assert heard.logged() == [
        ("INFO", "hello", {"EVENT": "worker.output", "POOL": "jobs", "WORKER": "jobs/0"}),
        (
            "ERROR",
            r"it hurts \x1b[1m",
            {"EVENT": "worker.output", "POOL": "jobs", "WORKER": "jobs/0"},
        ),
    ]
    assert heard.chunks == [OutputChunk("jobs/0", ["hello", "ERROR it hurts \x1b[1m"])]
    assert [said.text for said in heard.outputs.tail("jobs/0", 2)] == [
        "ERROR it hurts \x1b[1m",
        "beg",
    ]
    assert heard.outputs.names == ["jobs/0"]
    assert heard.outputs.tail("jobs/1", 10) == []


def test_the_end_of_a_process_takes_in_all_it_has_said(heard: Heard) -> None:
    source = heard.open("jobs/0")
    os.write(heard.writers[source], b"a\nlast words")
    source.end()
    source.end()  # the second end does nothing
    assert heard.outputs.last_words("jobs/0") == "a\nlast words"
    new = heard.open("jobs/0")
    os.write(heard.writers[new], b"fresh\n")
    heard.turn()
    assert heard.outputs.last_words("jobs/0") == "a\nlast words", "the fresh one has not ended"
    texts = [said.text for said in heard.outputs.tail("jobs/0", 10)]
    assert texts == ["a", "last words", NEXT_WORKER.decode(), "fresh"]


def test_a_pipe_whose_writers_are_gone_is_closed(heard: Heard) -> None:
    source = heard.open("jobs/0")
    os.write(heard.writers[source], b"bye")
    os.close(heard.writers.pop(source))
    heard.turn()
    heard.turn()
    assert source.fd == -1
    assert heard.chunks == [OutputChunk("jobs/0", ["bye"])]


def test_a_process_that_could_not_be_made_leaves_no_descriptors(heard: Heard) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no fork"), heard.outputs.open("jobs/0"):
        raise OSError("no fork")
    assert len(os.listdir("/proc/self/fd")) == before


def test_between_two_turns_it_looks_away(heard: Heard, readable: Callable[[int], bool]) -> None:
    source = heard.open("jobs/0")
    assert not readable(heard.outputs.fileno())
    os.write(heard.writers[source], b"x\n" * 30_000)
    assert readable(heard.outputs.fileno())
    heard.outputs.serve(1000)
    os.write(heard.writers[source], b"more\n")
    assert not readable(heard.outputs.fileno()), "a flood would keep the loop awake"
    assert heard.outputs.next_deadline() == 1000 + module.PACE_NS
    heard.outputs.tick(1000 + module.PACE_NS)
    assert heard.outputs.next_deadline() is None
    assert readable(heard.outputs.fileno())


@pytest.fixture
def readable() -> Callable[[int], bool]:
    import select

    return lambda fd: bool(select.select([fd], [], [], 0)[0])


def test_a_turn_reads_few_pipes_and_all_have_their_turn(heard: Heard) -> None:
    names = [f"jobs/{number}" for number in range(3 * module.PIPES_PER_TURN)]
    for name in names:
        os.write(heard.writers[heard.open(name)], b"x" * 60_000 + b"\n")
    heard.turn()
    assert len(heard.chunks) == module.PIPES_PER_TURN
    heard.turn()
    heard.turn()
    assert sorted(chunk.worker for chunk in heard.chunks) == sorted(names)


def test_the_log_takes_so_much_and_says_how_much_it_left_out(heard: Heard) -> None:
    source = heard.open("jobs/0")
    quiet = heard.open("jobs/1")
    for _ in range(10):
        os.write(heard.writers[source], b"flood\n" * 1000)
        heard.turn()
    os.write(heard.writers[quiet], b"still heard\n")
    heard.turn()
    logged = [message for _, message, _ in heard.logged()]
    assert module.LOG_BURST <= logged.count("flood") < 2 * module.LOG_BURST
    assert logged[-1] == "still heard"
    heard.outputs.keep_house({"jobs/0", "jobs/1"})
    level, _, fields = heard.logged()[-1]
    assert level == "WARNING"
    assert fields["WORKER"] == "jobs/0"
    assert fields["COUNT"] == 10_000 - logged.count("flood")
    heard.outputs.keep_house({"jobs/0", "jobs/1"})
    assert heard.logged()[-1][2] == fields, "it is said once"


def test_who_is_gone_is_forgotten(heard: Heard) -> None:
    source = heard.open("jobs/7")
    os.write(heard.writers[source], b"x\n")
    heard.turn()
    heard.outputs.keep_house({"jobs/0"})
    assert heard.outputs.names == ["jobs/7"], "it may still speak"
    source.end()
    heard.outputs.keep_house({"jobs/0"})
    assert heard.outputs.names == []


def test_a_spare_outlives_the_pool_under_whose_name_it_is_heard(heard: Heard) -> None:
    heard.open("gone").end()  # the output of the fork server
    with heard.outputs.open("gone", known=False) as spare:
        writer = os.dup(spare.write_fd)
    heard.outputs.keep_house({"jobs/0"})
    os.write(writer, b"last\n")
    os.close(writer)
    spare.end()
    assert [said.text for said in heard.outputs.tail("gone", 9)] == ["last"]
    heard.outputs.keep_house({"jobs/0"})
    assert heard.outputs.names == []


# -- marks and levels -------------------------------------------------------------------------

MARK = mark("t1").encode()
LOGGED = mark("t1", "ERROR").encode()
FIELDS = {"EVENT": "worker.output", "POOL": "jobs", "WORKER": "jobs/0"}


@pytest.mark.parametrize(
    ("line", "level", "message", "task"),
    [
        (b"hello", "INFO", "hello", ""),
        (MARK + b"hello", "INFO", "hello", "t1"),
        (LOGGED + b"ERROR shop [t1] no price", "ERROR", "shop: no price", "t1"),
        (LOGGED + b"KeyError: 'price'", "ERROR", "KeyError: 'price'", "t1"),
        (MARK + b"INFO musterd.task [t2] of ctx.log", "INFO", "of ctx.log", "t2"),
        (b"WARNING shop [-] while it is imported", "WARNING", "shop: while it is imported", ""),
        (b"WARNING:shop:own format", "WARNING", "shop:own format", ""),
        (b"ERROR: no price", "ERROR", "no price", ""),
        (b"ERROR", "ERROR", "ERROR", ""),
        (b"ERRORS are found", "INFO", "ERRORS are found", ""),
        (MARK, "INFO", "", "t1"),
    ],
)
def test_a_line_has_its_task_and_its_level_once(
    heard: Heard, line: bytes, level: str, message: str, task: str
) -> None:
    source = heard.open("jobs/0")
    os.write(heard.writers[source], line + b"\n")
    heard.turn()
    fields = {**FIELDS, "TASK": task} if task else FIELDS
    assert heard.logged() == [(level, message, fields)]


def test_nobody_else_sees_a_mark(heard: Heard) -> None:
    source = heard.open("jobs/0")
    os.write(heard.writers[source], MARK + b"whole\n" + MARK + b"beg")
    heard.turn()
    assert heard.chunks == [OutputChunk("jobs/0", ["whole"])]
    assert [said.text for said in heard.outputs.tail("jobs/0", 2)] == ["whole", "beg"]
    source.end()
    assert heard.outputs.last_words("jobs/0") == "whole\nbeg"
