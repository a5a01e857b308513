"""A terminal of a given size in which a command runs, as a person sees it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte
import pytest

SECONDS = 60.0
MUSTERCTL = (sys.executable, "-m", "musterd.supervisor.ctl")
LEAVES = b"\x1b[?1049l"  # the alternate screen
SHOWS_CURSOR = b"\x1b[?25h"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self._ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        # The command has to ask the terminal for its size, not pytest's environment.
        own = {key: os.environ[key] for key in os.environ if key not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            # A controlling terminal makes Ctrl-C and Ctrl-Z signals.
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env={**own, "TERM": "xterm-256color", **(environ or {})},
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read(self) -> None:
        while select.select([self._ours], [], [], 0.05)[0]:
            data = os.read(self._ours, 65536)
            self.written += data
            self._stream.feed(data)

    def lines(self) -> list[str]:
        """Return what is on the screen."""
        self.read()
        return [line.rstrip() for line in self._screen.display]

    def said(self) -> list[str]:
        """Return what the command has written, line by line, as it broke the lines itself."""
        self.read()
        text = ESCAPES.sub("", self.written.decode(errors="replace"))
        return [line.rstrip("\r") for line in text.split("\n")]

    def wait(self, what: str, condition: Callable[[list[str]], Any]) -> list[str]:
        """Return what is on the screen when the condition holds."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if condition(self.lines()):
                return self.lines()
        shown = "\n".join(self.lines())
        pytest.fail(f"not within {SECONDS} s: {what}\n{shown}")

    def exit_code(self) -> int:
        """Return the exit code of the command, which ends; its output is read meanwhile."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
        self.read()
        return self.process.wait(0.1)

    def hang_up(self) -> None:
        """Close the terminal, as its window is closed."""
        os.close(self.theirs)
        os.close(self._ours)
        self._ours = self.theirs = -1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._ours >= 0:
            self.hang_up()


class CtlTerminal(Terminal):
    """A terminal in which musterctl runs."""

    def __init__(self, home: Path, *arguments: str, columns: int = 80, rows: int = 24) -> None:
        environ = {"XDG_STATE_HOME": str(home)}
        super().__init__([*MUSTERCTL, *arguments], environ=environ, columns=columns, rows=rows)

    def ended(self) -> int:
        """Return the exit code, once the terminal is restored."""
        code = self.exit_code()
        assert self.written.rindex(LEAVES) > self.written.rindex(b"\x1b[?1049h"), "screen is left"
        assert self.written.rindex(SHOWS_CURSOR) > self.written.rindex(b"\x1b[?25l"), "no cursor"
        assert termios.tcgetattr(self.theirs) == self.before, "the keyboard is not as before"
        return code
