"""musterctl in a terminal of 80 columns: no line wraps, and no word is cut.

The answers are those of `support.long_names`: many pools, long names, three scripts. The terminal
is pyte; musterctl is the real one, behind a real control.sock.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest
from wcwidth import wcwidth

from support import long_names
from support.terminal import SECONDS
from support.terminal import CtlTerminal as Terminal

LISTS = (
    ["status"],
    ["schedule"],
    ["breaker"],
    ["tasks"],
    ["dead"],
    ["changes"],
    ["changes", "--diff"],
    ["history", "kites"],
    ["sessions"],
    ["alerts"],
    ["memory"],
    ["events"],
    ["events", "--level", "debug"],
)
ids = pytest.mark.parametrize("words", LISTS, ids=" ".join)
CUTS = "-._/:@ "  # a shortened name is cut at one of these
BREAKS = "-./:@,;=&?_"  # a long word goes on in the next line behind one of these
# What a column without room is called below its row, short moments, and bars.
BELOW = re.compile(
    r"attempts?|crash(es)?|waiting|failed|busy|skipped|failures?|opened|times?|priority|ran"
    r"|sacrifice|\d\d-\d\d|\d\d:\d\d(:\d\d)?|[+|>-]|\[[#.|]+\]",
    re.IGNORECASE,
)


Answering = Callable[[str], str]


@pytest.fixture(scope="module")
def socket_path(answering: Answering) -> str:
    return answering("support.long_names")


class Ctl:
    """What musterctl writes; each command is run once for each kind of output."""

    def __init__(self, socket_path: str, home: Path) -> None:
        self._socket_path = socket_path
        self._home = home
        self._shown: dict[tuple[str, ...], bytes] = {}
        self._piped: dict[tuple[str, ...], str] = {}

    def terminal(self, *words: str, columns: int = 80) -> Terminal:
        return Terminal(self._home, "-s", self._socket_path, *words, columns=columns, rows=24)

    def shown(self, *words: str, columns: int = 80) -> bytes:
        """Return what a command writes to a terminal of so many columns."""
        key = (*words, str(columns))
        if key not in self._shown:
            terminal = self.terminal(*words, columns=columns)
            terminal.wait("it ends", lambda _: terminal.process.poll() is not None)
            terminal.read()
            terminal.close()
            self._shown[key] = terminal.written
        return self._shown[key]

    def piped(self, *words: str) -> str:
        """Return what a command writes where there is no terminal."""
        if words not in self._piped:
            self._piped[words] = subprocess.run(
                [sys.executable, "-m", "musterd.supervisor.ctl", "-s", self._socket_path, *words],
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
                env={**os.environ, "COLUMNS": "80"},
            ).stdout
        return self._piped[words]


@pytest.fixture(scope="module")
def ctl(socket_path: str, tmp_path_factory: pytest.TempPathFactory) -> Ctl:
    return Ctl(socket_path, tmp_path_factory.mktemp("home"))


def on_screen(written: bytes, columns: int) -> list[str]:
    """Return what a terminal with very many lines shows."""
    screen = pyte.Screen(columns, 1000)
    pyte.ByteStream(screen).feed(written)
    return [line.rstrip() for line in "\n".join(screen.display).rstrip().split("\n")]


@ids
def test_no_line_wraps_in_80_columns(ctl: Ctl, words: list[str]) -> None:
    written = ctl.shown(*words)
    lines = on_screen(written, 80)
    assert lines == on_screen(written, 1000), "a wider terminal would show the same lines"
    assert len(lines) > 1


@ids
def test_no_word_is_cut_in_80_columns(ctl: Ctl, words: list[str]) -> None:
    assert cut_words(on_screen(ctl.shown(*words), 80), ctl.piped(*words)) == []


def test_top_cuts_no_word_in_80_columns(ctl: Ctl) -> None:
    screen = ctl.terminal("top", "-d", "3600")
    try:
        lines = screen.wait("it is shown", lambda lines: lines[-1].startswith(" q  quit"))
        assert "PROBLEMS" in lines[0]
        worst = [line.split()[0] for line in lines if "FATAL" in line]
        assert worst[0] == "aurora-price-watch-parser-night", "the pool that does not run"
        wide = ctl.terminal("top", "-d", "3600", columns=600)
        wide.resize(600, 24)
        whole = " ".join(wide.wait("it is shown", lambda lines: lines[-1].startswith(" q  quit")))
        wide.close()
        whole += " QUEUED 104344"  # which a wide terminal has by priority
        table = [line for line in lines if line.startswith(("aurora", "browser", "POOL", "WORKER"))]
        assert len(table) > 4
        assert cut_words(table, whole) == []
        screen.press("q")
        assert screen.ended() == 0
    finally:
        screen.close()


def cut_words(lines: list[str], whole: str) -> list[str]:
    words = " ".join(lines).split()
    return [word for word in words if word != "…" and not is_sensible(word, whole)]


def is_sensible(word: str, whole: str) -> bool:
    """Whether a word is one of the whole text, a part of a long one, or a shortened name."""
    head, cut, tail = word.rstrip(";").partition("…")
    if not cut:
        return BELOW.fullmatch(head) is not None or any(
            _is_end(whole[: found.start()], head) and _is_end(head, whole[found.end() :])
            for found in re.finditer(re.escape(head), whole)
        )
    heads = re.finditer(re.escape(head), whole)
    tails = re.finditer(re.escape(tail), whole)
    return any(_is_cut(head, whole[found.end() :]) for found in heads) and any(
        not tail or tail[0] in CUTS or _is_cut(whole[: found.start()], tail) for found in tails
    )


def _is_cut(before: str, behind: str) -> bool:
    """Whether a name may be cut between these texts."""
    last, first = before[-1:], behind[:1]
    return (
        not before
        or last in CUTS
        or first in CUTS
        or _is_wide(last)
        or last == first == "x"  # a word of 300 letters
    )


def _is_end(before: str, behind: str) -> bool:
    """Whether a line may end between these texts."""
    last, first = before[-1:], behind[:1]
    return (
        not last
        or not first
        or last.isspace()
        or first.isspace()
        or first == ";"
        or last in BREAKS
        or _is_wide(last)
        or _is_wide(first)
        or last == first == "x"  # a word of 300 letters
    )


def _is_wide(char: str) -> bool:
    return bool(char) and wcwidth(char) == 2


@ids
def test_what_is_no_terminal_has_everything(ctl: Ctl, words: list[str]) -> None:
    whole = ctl.piped(*words)
    assert "…" not in whole
    known = {
        "status": long_names.POOLS,
        "schedule": long_names.SCHEDULES,
        "breaker": long_names.SITES,
        "tasks": [error.message for error in long_names.ERRORS],
        "dead": [*long_names.SITES, *(error.message for error in long_names.ERRORS)],
        "changes": [*long_names.SCHEDULES[2:], *long_names.SUMMARIES],
        "memory": long_names.POOLS,
        "alerts": ["tgram://(hidden 1a2b3c)/-100200300400500/?format=markdown&preview=no"],
        "sessions": ["account-of-the-aurora-shop-in-the-second-region"],
        "history": ["Großer roter Drachen mit zwei Leinen und einem Schwanz"],
        "events": [long_names.ERRORS[1].message, long_names.SITES[1], "x" * 200],
    }
    assert [name for name in known[words[0]] if name not in whole] == []


def test_events_begin_at_info(ctl: Ctl) -> None:
    assert "task.progress" not in ctl.piped("events")
    assert "task.progress" in ctl.piped("events", "--level", "debug")


@ids
def test_a_wider_terminal_has_everything_too(ctl: Ctl, words: list[str]) -> None:
    lines = on_screen(ctl.shown(*words, columns=600), 600)
    assert lines == [line.rstrip() for line in ctl.piped(*words).rstrip().split("\n")]
