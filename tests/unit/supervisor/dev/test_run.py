"""How `musterd dev` reads the log of its daemon, and what its end means."""

import signal
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.dev import run
from musterd.supervisor.dev.project import Project
from musterd.supervisor.dev.run import EXIT_INTERNAL, Dev
from musterd.supervisor.dev.screen import Told


class Seen:
    """A screen that remembers what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, line: str) -> Told:
        self.lines.append(line)
        return Told()

    def say(self, text: str, _style: str = "") -> None:
        self.lines.append(text)


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch) -> tuple[Dev, Seen]:
    monkeypatch.setattr(run, "is_possible", lambda: False)
    screen: Any = Seen()
    project = Project(Path("/srv/bot"), (), (), Path("/srv/bot/.musterd/run"), "")
    return Dev(project, screen), screen


def test_lines_are_put_together_from_what_is_read(dev: tuple[Dev, Seen]) -> None:
    made, screen = dev
    for data in (b"one\ntw", b"o\n", b"\nthree \xff", b"\n"):
        made._take(data)
    assert screen.lines == ["one", "two", "three \ufffd"]


def test_a_line_without_end_takes_no_more_memory_than_any_line_needs(
    dev: tuple[Dev, Seen],
) -> None:
    made, screen = dev
    for _ in range(10):
        made._take(b"x" * run.LINE_BYTES_MAX)
    assert len(made._rest) == run.LINE_BYTES_MAX
    made._take(b"\n")
    assert [len(line) for line in screen.lines] == [run.LINE_BYTES_MAX]


def test_the_exit_code_is_the_daemons_and_a_killed_daemon_is_told(dev: tuple[Dev, Seen]) -> None:
    made, screen = dev
    assert [made._ended(code) for code in (0, 78, 69)] == [0, 78, 69]
    assert screen.lines == []
    assert made._ended(-signal.SIGKILL) == EXIT_INTERNAL
    assert screen.lines == ["the daemon was ended by signal 9"]


def test_a_daemon_that_ends_before_it_can_listen_has_done_as_told(dev: tuple[Dev, Seen]) -> None:
    made, screen = dev
    assert made._ended(-signal.SIGTERM) == EXIT_INTERNAL
    made._stop(signal.SIGINT, None)
    assert made._ended(-signal.SIGTERM) == 0
    made._stop(signal.SIGINT, None)
    made._stop(signal.SIGINT, None)
    made._stop(signal.SIGINT, None)  # a fourth has nothing new to say
    assert screen.lines == ["the daemon was ended by signal 15", *run.STOPS]
