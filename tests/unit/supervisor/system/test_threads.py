"""Threads of the daemon: which errors they survive, and how the end of one is told."""

import logging
import os
import select
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model.actions import NewRecord, Persist
from musterd.supervisor.log.writer import Outbox
from musterd.supervisor.memory.probe import Probe
from musterd.supervisor.processes.tempdirs import Janitor
from musterd.supervisor.store import sqlite
from musterd.supervisor.store.interface import FindTasks
from musterd.supervisor.store.sqlite import SqliteStore
from musterd.supervisor.store.writer import Writer
from musterd.supervisor.system.threads import ThreadEnded, ThreadWatch, Wakeup
from support.waiting import wait_for

DEADLINE_SECONDS = 30.0
DEEPER_THAN_PYTHON = 3000  # Python allows a thousand calls within each other


@pytest.fixture
def watch() -> Iterator[ThreadWatch]:
    watch = ThreadWatch()
    watch.open()
    yield watch
    watch.close()


def test_a_thread_that_ends_by_an_exception_is_told_with_its_name(watch: ThreadWatch) -> None:
    def work() -> None:
        raise OverflowError("too large")

    watch.check()
    thread = threading.Thread(target=work, name="store-writer")
    thread.start()
    thread.join()
    assert (
        watch.problem() == "the thread 'store-writer' of the daemon ended: OverflowError: too large"
    )
    with pytest.raises(ThreadEnded, match=r"store-writer.*too large"):
        watch.check()


def test_after_the_daemon_it_is_as_before() -> None:
    before = threading.excepthook
    watch = ThreadWatch()
    watch.open()
    watch.close()
    assert threading.excepthook is before


# -- the store --------------------------------------------------------------------------------


def page(ticket: int) -> Persist:
    spec = TaskSpec(f"id-{ticket}", "noop.run", b"")
    return Persist(ticket, [NewRecord(ticket, spec, 1, "noop")], [], [])


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Let the writer's first commit fail with the error; return a counter of its tries."""
    commit, tries = Writer.commit, [0]

    def first_fails(self: Writer, group: Any) -> None:
        tries[0] += 1
        if tries[0] == 1:
            raise error
        commit(self, group)

    monkeypatch.setattr(Writer, "commit", first_fails)
    return tries


def test_the_writer_goes_on_after_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: ThreadWatch
) -> None:
    monkeypatch.setattr(sqlite, "RETRY_SECONDS", 0.01)
    failing(monkeypatch, MemoryError())
    store = SqliteStore(tmp_path / "store.db", "full")
    try:
        store.write(page(1))
        wait_for("it is written after all", lambda: store.completed() == 1)
        wait_for("it works again", lambda: store.problem() is None)
    finally:
        store.close()
    assert watch.problem() == ""


def test_a_writer_that_ends_is_told_and_refuses_for_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: ThreadWatch
) -> None:
    failing(monkeypatch, OverflowError("int too large"))
    store = SqliteStore(tmp_path / "store.db", "full")
    store.write(page(1))
    wait_for("it is noted", watch.problem)
    assert "store-writer" in watch.problem()
    problem = store.write_problem() or ""
    assert "int too large" in problem
    assert "the daemon ends" in problem
    assert "make room" not in problem
    with pytest.raises(sqlite.StoreError, match="without the latest changes"):
        store.close()


def test_the_reader_goes_on_after_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: ThreadWatch
) -> None:
    monkeypatch.setattr(sqlite, "RETRY_SECONDS", 0.01)
    answer, tries = sqlite.answer, []

    def first_fails(*args: Any) -> Any:
        tries.append(args)
        if len(tries) == 1:
            raise MemoryError
        return answer(*args)

    monkeypatch.setattr(sqlite, "answer", first_fails)
    store = SqliteStore(tmp_path / "store.db", "full")
    try:
        store.ask(FindTasks(["id-1"]), "token")
        wait_for("it is answered after all", lambda: store.found() == [("token", [])])
    finally:
        store.close()
    assert watch.problem() == ""


# -- the others -------------------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """Make more directories within each other than Python allows calls; pytest would recurse."""
    deep = tmp_path / "deep"
    deep.mkdir()
    fd = os.open(deep, os.O_RDONLY)
    for _ in range(DEEPER_THAN_PYTHON):
        os.mkdir("a", dir_fd=fd)
        below = os.open("a", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    yield deep
    subprocess.run(["rm", "-rf", deep], check=True)


def test_the_janitor_removes_what_is_deeper_than_python_can_call_itself(
    tmp_path: Path, deep: Path, watch: ThreadWatch
) -> None:
    janitor = Janitor()
    janitor.remove(deep)
    wait_for("it is removed", lambda: not deep.exists())
    (tmp_path / "next").mkdir()
    janitor.remove(tmp_path / "next")
    janitor.close()
    assert not (tmp_path / "next").exists()
    assert watch.problem() == ""


class Sink:
    lines_at_once = 10

    def __init__(self) -> None:
        self.lines: list[str] = []

    def take(self, records: list[logging.LogRecord]) -> None:
        self.lines += [record.getMessage().encode().decode() for record in records]

    def close(self) -> None:
        pass


def test_a_line_that_cannot_be_written_costs_the_log_no_other(watch: ThreadWatch) -> None:
    sink = Sink()
    outbox = Outbox(sink)
    for text in ("before", "half a \ud83d face", "after"):
        outbox.emit(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))
    outbox.close()
    assert {"before", "after"} <= set(sink.lines)
    assert watch.problem() == ""


def test_the_memory_watch_goes_on_after_figures_it_does_not_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: ThreadWatch
) -> None:
    probe = Probe(0.01, tmp_path, environ={})
    probe.start()
    good = probe._sources.read

    def bad() -> Any:
        raise ValueError("MemAvailable: many kB")

    monkeypatch.setattr(probe._sources, "read", bad)
    wait_for("it has looked", lambda: "memory" in probe._unseen)
    monkeypatch.setattr(probe._sources, "read", good)
    probe.take()
    wait_for("it looks again", probe.take)
    probe.close()
    assert watch.problem() == ""


def is_readable(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup], [], [], 0)[0])


def test_a_wakeup_is_readable_from_set_to_clear() -> None:
    wakeup = Wakeup()
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.set()
    wakeup.set()
    assert is_readable(wakeup)
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.close()


def test_a_closed_wakeup_does_not_touch_the_next_owner_of_its_number() -> None:
    wakeup = Wakeup()
    number = wakeup.fileno()
    other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    wakeup.close()
    os.dup2(other, number)
    wakeup.set()
    wakeup.close()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(number)
    os.close(number)
    os.close(other)
