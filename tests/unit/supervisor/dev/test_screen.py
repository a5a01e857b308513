"""The daemon's log as `musterd dev` shows it: in short lines, and no line too long."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.dev import screen as module
from musterd.supervisor.dev.screen import Screen, Told

FOLDER = Path("/srv/my bot")
AT = "2026-11-18T20:43:20.518+00:00"
COLOURS = re.compile(r"\033\[[\d;]*m")


class Out:
    """Standard output: a pipe that may claim to be a terminal of 80 columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
        self._terminal = terminal
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        monkeypatch.setattr(module.sys, "stdout", self)
        size = os.terminal_size((80, 24))
        monkeypatch.setattr(module.shutil, "get_terminal_size", lambda: size)

    def isatty(self) -> bool:
        return self._terminal

    def fileno(self) -> int:
        return self._write

    def text(self) -> str:
        return os.read(self._read, 65536).decode()

    def leave(self) -> None:
        """Close the end that is read."""
        os.close(self._read)
        self._read = -1

    def close(self) -> None:
        for fd in (self._read, self._write):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def out_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Out]]:
    made: list[Out] = []

    def make(*, terminal: bool = False) -> Out:
        made.append(Out(monkeypatch, terminal=terminal))
        return made[-1]

    yield make
    for each in made:
        each.close()


def line(event: str, message: str, level: str = "info", **fields: Any) -> str:
    return json.dumps({"at": AT, "level": level, "message": message, "event": event, **fields})


def test_the_stacks_of_a_hung_worker_are_those_of_the_project(out_of: Callable[..., Out]) -> None:
    out = out_of()
    screen = Screen({}, FOLDER)
    ours = module.PACKAGE / "workers" / "runtime" / "run.py"
    for said in (
        "Current thread 0x00007f77b3a98040 (most recent call first):",
        f'  File "{FOLDER}/bot.py", line 16 in stuck',
        f'  File "{ours}", line 404 in _completion',
        '  File "<frozen runpy>", line 198 in _run_module_as_main',
        f'  File "{ours}", line 404, in of_a_traceback',
    ):
        screen.log(line("worker.output", said, worker="bot/0"))
    assert [each.partition(" | ")[2] for each in out.text().splitlines()] == [
        "Current thread 0x00007f77b3a98040 (most recent call first):",
        '  File "bot.py", line 16 in stuck',
        f'  File "{ours}", line 404, in of_a_traceback',
    ]


def test_a_crash_does_not_say_again_what_the_worker_said_last(out_of: Callable[..., Out]) -> None:
    out = out_of()
    crash = line("worker.crashed", "worker crashed", worker="bot/0", output="name?", cause="exit")
    Screen({}, FOLDER).log(crash)
    text = out.text()
    assert "cause=exit" in text
    assert "name?" not in text


def test_a_line_says_first_what_it_is_about(out_of: Callable[..., Out]) -> None:
    out = out_of()
    screen = Screen({}, FOLDER)
    told = screen.log(
        line(
            "task.succeeded",
            "task has succeeded",
            task="1a1f0666b8e4c319",
            name="bot.hello",
            pool="bot",
            attempt=1,
            worker="bot/0",
            seconds="0.250",
            waited="0.000",
        )
    )
    assert told == Told("task.succeeded", "bot", "")
    time, rest = out.text().split(" ", 1)
    assert re.fullmatch(r"\d\d:\d\d:20", time)
    assert rest == "task has succeeded  bot.hello  bot/0  0.250 s  1a1f0666b8e4c319\n"


def test_unusual_fields_are_named(out_of: Callable[..., Out]) -> None:
    out = out_of()
    Screen({}, FOLDER).log(line("task.retry", "task will be retried", name="b.c", attempt=2))
    assert out.text()[9:] == "task will be retried  b.c  attempt=2\n"


def test_lines_are_broken_at_words_and_coloured_on_a_terminal(out_of: Callable[..., Out]) -> None:
    out = out_of(terminal=True)
    reason = (
        "its import failed with SyntaxError: '(' was never closed, at /srv/my bot/bot.py:6; " * 2
    )
    Screen({}, FOLDER).log(
        line("pool.fatal", "pool cannot start", "error", pool="b", reason=reason)
    )
    text = out.text()
    shown = COLOURS.sub("", text).splitlines()
    assert len(shown) > 2
    assert all(len(each) <= 80 for each in shown)
    assert all(each.startswith(" " * 9) for each in shown[1:])
    assert "at bot.py:6;" in " ".join(each.strip() for each in shown)
    assert all(each.startswith("\033[31m") for each in text.splitlines())


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_refused(out_of: Callable[..., Out], environ: dict[str, str]) -> None:
    out = out_of(terminal=True)
    screen = Screen(environ, FOLDER)
    screen.log(line("x", "hello", "error"))
    screen.say("words", module.BOLD)
    assert "\033" not in out.text()


def test_what_workers_say_keeps_its_columns_and_moves_no_cursor(out_of: Callable[..., Out]) -> None:
    out = out_of()
    screen = Screen({}, FOLDER)
    said = '  File "/srv/my bot/bot.py", line 6 \033[2J'
    screen.log(line("worker.output", said, pool="bot", worker="bot/0"))
    screen.log(line("worker.output", "x", pool="bot"))
    assert [each[9:] for each in out.text().splitlines()] == [
        'bot/0 |   File "bot.py", line 6 \\x1b[2J',
        "bot | x",
    ]


def test_what_is_no_log_is_shown_as_it_is(out_of: Callable[..., Out]) -> None:
    out = out_of()
    assert Screen({}, FOLDER).log("musterd: another musterd runs") == Told()
    assert out.text() == "musterd: another musterd runs\n"


def test_a_terminal_that_is_gone_is_no_error(out_of: Callable[..., Out]) -> None:
    out = out_of()
    out.leave()
    Screen({}, FOLDER).say("nobody hears this")


def test_a_signal_in_the_middle_of_a_line_may_say_something(
    out_of: Callable[..., Out], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = out_of()
    screen = Screen({}, FOLDER)
    write = os.write
    strikes = iter([True])

    def struck(fd: int, data: bytes) -> int:
        if next(strikes, False):
            screen.say("stopping")
        return write(fd, data)

    monkeypatch.setattr(module.os, "write", struck)
    screen.say("a line")
    assert out.text() == "stopping\na line\n"
