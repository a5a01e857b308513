"""The shared page: both sides see equal values, and a reader never sees half of a write."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from musterd.ipc.wire import scoreboard
from musterd.ipc.wire.messages import CONCURRENCY_MAX
from musterd.ipc.wire.scoreboard import WORDS_BYTES_MAX, Reading, Scoreboard

DEADLINE_SECONDS = 20.0


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    before = len(os.listdir("/proc/self/fd"))
    board = Scoreboard.create()
    yield board
    board.close()
    board.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def worker(board: Scoreboard) -> Iterator[Scoreboard]:
    worker = Scoreboard.attach(board.fd)
    yield worker
    worker.close()


def test_a_fresh_board_says_that_nothing_happened(board: Scoreboard) -> None:
    assert board.read() == Reading(0, 0, 0, 0, None, "")


def test_the_running_lease_is_seen_with_its_start(board: Scoreboard, worker: Scoreboard) -> None:
    worker.begin(7, 1_000)
    assert board.read() == Reading(7, 1_000, 1, 0, None, "")
    worker.end(1_500)
    assert board.read() == Reading(0, 1_500, 1, 1, None, "", unsent=7)
    worker.begin(2**62, 2_000)
    assert board.read() == Reading(2**62, 2_000, 2, 1, None, "", unsent=7)


def test_an_idle_worker_is_as_alive_as_its_last_beat(board: Scoreboard, worker: Scoreboard) -> None:
    worker.beat(3_000)
    assert board.read().since_ns == 3_000
    worker.begin(1, 4_000)
    worker.beat(5_000)
    assert board.read().since_ns == 4_000, "a busy worker is judged by its start"


@pytest.mark.parametrize("status", [0, 7, 255, -signal.SIGKILL])
def test_exit_status_is_told_from_none(board: Scoreboard, worker: Scoreboard, status: int) -> None:
    worker.begin(9, 1)
    worker.set_exit(status)
    assert board.read() == Reading(9, 1, 1, 0, status, "")


def test_last_words_are_kept_and_the_latest_count(board: Scoreboard, worker: Scoreboard) -> None:
    worker.say("ValueError: a rather long first message")
    worker.say("naïve \ud800 words")
    assert board.read().last_words == "naïve ? words"


def test_long_last_words_are_cut_between_characters(board: Scoreboard, worker: Scoreboard) -> None:
    worker.say("x" + "ä" * WORDS_BYTES_MAX)
    words = board.read().last_words
    assert words == "x" + "ä" * ((WORDS_BYTES_MAX - 1) // 2)


def test_attaching_again_goes_on_counting(board: Scoreboard, worker: Scoreboard) -> None:
    worker.begin(1, 1)
    worker.end(2)
    again = Scoreboard.attach(board.fd)
    again.begin(2, 3)
    again.close()
    assert board.read() == Reading(2, 3, 2, 1, None, "", unsent=1)


def test_a_worker_killed_in_the_middle_of_a_write_leaves_a_readable_board(
    board: Scoreboard, worker: Scoreboard
) -> None:
    worker.begin(5, 100)
    worker._fields[scoreboard._SEQUENCE] += 1  # the first step of begin() and end()
    assert board.read() == Reading(5, 100, 1, 0, None, "")


def test_nonsense_on_the_board_does_no_harm(board: Scoreboard, worker: Scoreboard) -> None:
    worker._words[:3] = b"a\xff\xfe"
    worker._fields[scoreboard._WORDS_LENGTH] = 2**40
    assert board.read().last_words.startswith("a��")
    worker._fields[scoreboard._WORDS_LENGTH] = -1
    assert board.read().last_words == ""


def test_a_worker_cannot_truncate_its_board(board: Scoreboard) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(board.fd, 0)


def test_readings_are_consistent_while_another_process_writes(board: Scoreboard) -> None:
    writer = os.fork()
    if writer == 0:
        try:
            mine = Scoreboard.attach(board.fd)
            number = 0
            while True:
                number += 1
                mine.begin(number, number * 1_000)
                mine.end(number * 1_000 + 1)
        finally:
            os._exit(1)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        busy = idle = 0
        while busy < 500 or idle < 500:
            assert time.monotonic() < deadline, "too few readings"
            lease, since_ns, begun, done, *_ = board.read()
            if lease:
                busy += 1
                assert (since_ns, begun, done) == (lease * 1_000, lease, lease - 1)
            elif begun:
                idle += 1
                # A writer suspended during a write may look as if it were between two tasks.
                assert begun - done in (0, 1)
                assert since_ns - begun * 1_000 in (0, 1, 1_000)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


def test_a_result_that_is_not_sent_yet_is_remembered(board: Scoreboard, worker: Scoreboard) -> None:
    worker.begin(4, 1)
    worker.end(2)
    assert board.read().unsent == 4
    worker.sent()
    assert board.read().unsent == 0


# -- several tasks at once ----------------------------------------------------------------------


def test_of_several_that_run_the_oldest_comes_first(board: Scoreboard, worker: Scoreboard) -> None:
    worker.widen(3)
    worker.begin_row(2, 7, 1_000)
    worker.begin_row(0, 9, 3_000)
    worker.begin_row(1, 8, 2_000)
    reading = board.read()
    assert (reading.lease, reading.since_ns) == (7, 1_000)
    assert reading.beside == ((8, 2_000), (9, 3_000))
    assert board.pulse() == (7, 1_000, 0, ((8, 2_000), (9, 3_000)))
    worker.end_row(2, 4_000)
    assert board.pulse() == (8, 2_000, 0, ((9, 3_000),))
    worker.end_row(1, 5_000)
    worker.end_row(0, 6_000)
    assert board.pulse() == (0, 6_000, 0, ())
    assert board.read().beside == ()


def test_a_board_holds_as_many_rows_as_a_worker_may_run(
    board: Scoreboard, worker: Scoreboard
) -> None:
    worker.widen(CONCURRENCY_MAX)
    for row in range(CONCURRENCY_MAX):
        worker.begin_row(row, row + 1, row + 1)
    worker.say("x" * WORDS_BYTES_MAX)
    reading = board.read()
    assert (reading.lease, len(reading.beside)) == (1, CONCURRENCY_MAX - 1)
    assert reading.last_words == "x" * WORDS_BYTES_MAX
