"""Write for the person at the terminal: the daemon's log in short lines, and words of our own.

The daemon logs JSON. Of each line the time, the message and what it is about are shown first, the
other fields dimmed after them. Lines are broken at words, as wide as the terminal is.
"""

import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from musterd.supervisor.text.printable import printable

WIDTH_MIN = 40  # a narrower terminal breaks the lines itself
INDENT = " " * len("12:00:00 ")
# Lines of ours in the stacks of a worker that hangs, as faulthandler writes them.
PACKAGE = Path(__file__).parents[2]
_OURS = re.compile(rf'  File "(?:{re.escape(str(PACKAGE))}/.*|<frozen \w+>)", line \d+ in \S+$')

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
_LEVELS = {"debug": DIM, "warning": YELLOW, "error": RED, "critical": f"{RED};{BOLD}"}
# What a line is about: shown without the names of the fields.
_ABOUT = ("name", "worker", "pool", "schedule", "phase", "reason", "seconds", "task")
# Fields that say what the others, the terminal or its user say already.
_NEEDLESS = frozenset(
    {
        *("at", "level", "message", "event", "traceback"),
        *("version", "pid", "runtime_dir", "state_dir", "waited"),
        "output",  # what a crashed worker has said last was shown when it said it
    }
)
# Our own words tell these better.
_HIDDEN = frozenset({"config.reloaded", "config.refused", "pool.rolling"})
_GOOD = frozenset({"pool.rolled", "daemon.ready"})
_USUAL = {"attempt": 1, "needs_restart": "none", "changes": "none", "tasks": 0}


class Told(Struct, frozen=True):
    """What a line of the log was about."""

    event: str = ""
    pool: str = ""
    reason: str = ""


class Screen:
    """Standard output, which is a terminal or is not."""

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        """Paths are shown as they are seen from the folder."""
        folders = (str(folder), os.path.realpath(folder))
        self._above = tuple(f"{each.rstrip(os.sep)}{os.sep}" for each in dict.fromkeys(folders))
        terminal = sys.stdout.isatty()
        plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        self._terminal = terminal
        self._coloured = terminal and not plain
        self._lock = threading.RLock()  # a signal may have us say something in the middle of a line

    def paint(self, text: str, style: str) -> str:
        return f"\033[{style}m{text}\033[0m" if self._coloured and style and text else text

    def say(self, text: str, style: str = "") -> None:
        """Write words of our own, each line broken on its own."""
        self._write([self.paint(line, style) for line in self._lines(self._near(text))])

    def show(self, text: str) -> None:
        """Write lines as they are."""
        self._write(text.split("\n"))

    def log(self, line: str) -> Told:
        """Write a line of the daemon's log; return what it was about."""
        try:
            told = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:  # said before the log was set up, such as a wrong configuration
            self._write([self.paint(each, RED) for each in self._lines(printable(line))])
            return Told()
        about = Told(*(str(told.get(name, "")) for name in Told.__struct_fields__))
        told = {key: self._near(each) for key, each in told.items()}
        if about.event == "worker.output":
            if not _OURS.match(str(told["message"])):
                self._write(self._output(told))
        elif about.event not in _HIDDEN:
            self._write(self._report(told))
        return about

    def _near(self, value: Any) -> Any:
        if isinstance(value, str):
            for above in self._above:
                value = value.replace(above, "")
        return value

    # -- lines of the log -------------------------------------------------------------------------

    def _output(self, told: dict[str, Any]) -> list[str]:
        """Return what a worker has said, as it is: it may be code in a traceback."""
        speaker = str(told.get("worker") or told.get("pool", ""))
        said = self.paint(printable(str(told["message"]), keep="\t"), _level(told))
        return [f"{_time(told)} {self.paint(f'{speaker} |', CYAN)} {said}"]

    def _report(self, told: dict[str, Any]) -> list[str]:
        about = {key: str(told[key]) for key in _ABOUT if told.get(key) not in (None, "")}
        if "worker" in about:
            about.pop("pool", None)
        if "seconds" in about:
            about["seconds"] += " s"
        rest = " ".join(
            f"{key}={value}"
            for key, value in told.items()
            if key not in _NEEDLESS and key not in _ABOUT and value != _USUAL.get(key)
        )
        message = str(told.get("message", ""))
        lines = self._lines(printable("  ".join([_time(told), message, *about.values(), rest])))
        lines[0] = lines[0].replace("  ", " ", 1)
        style = GREEN if told.get("event") in _GOOD else _level(told)
        if style:
            painted = [self.paint(line, style) for line in lines]
        else:
            painted = [line.replace(message, self.paint(message, BOLD), 1) for line in lines[:1]]
            painted += [self.paint(line, DIM) for line in lines[1:]]
        if traceback := told.get("traceback"):
            painted += [f"{INDENT}{printable(line, keep=chr(9))}" for line in traceback.split("\n")]
        return painted

    # -- the terminal -----------------------------------------------------------------------------

    def _lines(self, text: str) -> list[str]:
        lines: list[str] = []
        for line in text.rstrip().split("\n"):
            lines += self._broken(line) or [""]
        return lines

    def _broken(self, line: str) -> list[str]:
        if not self._terminal:
            return [line]
        width = max(shutil.get_terminal_size().columns, WIDTH_MIN)
        return textwrap.wrap(
            line,
            width,
            subsequent_indent=INDENT,
            break_long_words=False,  # a path or an address is to be copied whole
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )

    def _write(self, lines: list[str]) -> None:
        data = "".join(f"{line.rstrip()}\n" for line in lines).encode(errors="backslashreplace")
        with self._lock:
            try:
                while data:
                    data = data[os.write(sys.stdout.fileno(), data) :]
            except OSError:
                return  # the terminal is gone: what follows is the end


def _time(told: dict[str, Any]) -> str:
    try:
        return datetime.fromisoformat(str(told["at"])).astimezone().strftime("%H:%M:%S")
    except (KeyError, ValueError):
        return "--:--:--"


def _level(told: dict[str, Any]) -> str:
    return _LEVELS.get(str(told.get("level", "")), "")
