"""The log never holds up its callers, and says what it left out."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.log import log, writer
from musterd.supervisor.log.writer import LEFT_OUT, LINES_MAX, ORDINARY_SHARE, Outbox

WAIT_SECONDS = 20.0


class Sink:
    """A sink that blocks while it is not open, and fails while it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.took_one = threading.Event()
        self.failing = False
        self.tries = 0
        self.records: list[logging.LogRecord] = []

    lines_at_once = 10

    def take(self, records: list[logging.LogRecord]) -> None:
        self.took_one.set()
        self.tries += 1
        assert self.open.wait(WAIT_SECONDS)
        if self.failing:
            raise OSError("no space left on device")
        self.records += records

    def close(self) -> None:
        pass

    def counted(self) -> list[int]:
        found = [getattr(record, "fields", {}) for record in self.records]
        return [fields["COUNT"] for fields in found if fields.get("EVENT") == LEFT_OUT]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def outbox(sink: Sink) -> Iterator[Outbox]:
    made = Outbox(sink)
    yield made
    sink.open.set()
    made.close()


def line(text: str, level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("musterd", level, "", 0, text, (), None)
    record.fields = fields
    return record


def stop(sink: Sink, outbox: Outbox) -> None:
    """Stop the sink as Ctrl-S does: one line is stuck in the write, the others wait."""
    sink.open.clear()
    sink.took_one.clear()
    outbox.handle(line("stuck"))
    assert sink.took_one.wait(WAIT_SECONDS)


def test_lines_come_out_in_their_order(sink: Sink, outbox: Outbox) -> None:
    for number in range(1000):
        outbox.handle(line(str(number)))
    outbox.close()
    assert [record.msg for record in sink.records] == [str(number) for number in range(1000)]


def test_a_sink_that_takes_nothing_holds_up_nobody_and_the_rest_is_counted(
    sink: Sink, outbox: Outbox, waiting: Callable[..., Any]
) -> None:
    stop(sink, outbox)
    for number in range(LINES_MAX * 2):
        outbox.handle(line(str(number)))
    sink.open.set()
    waiting("the count is told", sink.counted)
    assert sum(sink.counted()) + len(sink.records) - len(sink.counted()) == LINES_MAX * 2 + 1


def test_the_count_stands_where_the_lines_are_missing(sink: Sink, outbox: Outbox) -> None:
    stop(sink, outbox)
    room = int(LINES_MAX * ORDINARY_SHARE) - 1  # one line is stuck
    for number in range(room + 7):
        outbox.handle(line(str(number)))
    outbox.handle(line("a trouble", logging.WARNING))
    sink.open.set()
    outbox.close()
    told = [record.msg for record in sink.records]
    assert told[-3:] == [str(room - 1), writer.LEFT_OUT_MESSAGE, "a trouble"]
    assert sink.counted() == [7]


def test_long_lines_are_bounded_by_their_bytes(sink: Sink, outbox: Outbox) -> None:
    stop(sink, outbox)
    for _ in range(100):
        outbox.handle(line("x", REASON="y" * 100_000))
    sink.open.set()
    outbox.close()
    shown = [record for record in sink.records if record.msg == "x"]
    assert len(shown) * 100_000 <= writer.BYTES_MAX
    assert sum(sink.counted()) == 0 or sum(sink.counted()) + len(shown) == 100


def test_a_full_disk_is_waited_for_and_the_lost_lines_are_counted(
    sink: Sink, outbox: Outbox, waiting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    sink.failing = True
    for number in range(5):
        outbox.handle(line(str(number)))
    waiting("all were tried, and the count of them", lambda: sink.tries > 3)
    sink.failing = False
    waiting("the count is told", sink.counted)
    outbox.handle(line("after"))
    outbox.close()
    assert sum(sink.counted()) == 5
    assert sink.records[-1].msg == "after"


def test_the_end_does_not_wait_for_whoever_has_stopped_the_log(
    sink: Sink, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.05)
    stop(sink, outbox)
    outbox.close()
    assert not sink.records


def test_the_frames_of_an_error_are_not_kept(sink: Sink, outbox: Outbox) -> None:
    try:
        raise ValueError("what went wrong")
    except ValueError as error:
        record = line("failed")
        record.exc_info = (ValueError, error, error.__traceback__)
    outbox.handle(record)
    outbox.close()
    assert sink.records[0].exc_info is None
    assert "ValueError: what went wrong" in (sink.records[0].exc_text or "")


# -- storms -----------------------------------------------------------------------------------


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Collect the fields of what is logged, under limits that nobody has used yet."""
    monkeypatch.setattr(log, "_limits", log._Limits())
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.__dict__["fields"])

    handler = Keep()
    log.log.addHandler(handler)
    level = log.log.level
    log.log.setLevel(logging.INFO)
    yield found
    log.log.removeHandler(handler)
    log.log.setLevel(level)


def test_a_storm_of_one_kind_is_cut_and_counted_and_others_are_not(
    logged: list[dict[str, Any]],
) -> None:
    for _ in range(log.LINES_BURST * 3):
        log.write(Report("task.retry", task="a"))
    log.write(Report("worker.crashed", "error", worker="p/0"))
    log.tell_left_out()
    retries = [fields for fields in logged if fields["EVENT"] == "task.retry"]
    assert log.LINES_BURST <= len(retries) < log.LINES_BURST * 2
    assert [fields for fields in logged if fields["EVENT"] == "worker.crashed"]
    (told,) = [fields for fields in logged if fields["EVENT"] == "log.limited"]
    assert told["KIND"] == "task.retry"
    assert told["COUNT"] == log.LINES_BURST * 3 - len(retries)
    logged.clear()
    log.tell_left_out()
    assert not logged


def test_what_is_not_logged_at_this_level_uses_up_nothing(logged: list[dict[str, Any]]) -> None:
    for _ in range(log.LINES_BURST * 2):
        log.note("task.progress", "debug")
    log.tell_left_out()
    assert not logged


def test_standard_error_is_written_past_pythons_own_buffer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    journal_handler = Outbox(log.target("lines", "", {**os.environ, "JOURNAL_STREAM": ""}))
    journal_handler.handle(line("a line", EVENT="x"))
    journal_handler.close()
    assert capfd.readouterr().err.endswith("info a line event=x\n")
