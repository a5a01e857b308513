"""musterctl top: the fleet on a full screen, live.

The terminal is restored on every way out (q, Ctrl-C, SIGTERM, SIGHUP, an exception) and while
Ctrl-Z suspends the command.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.control import Control
from rich.screen import Screen

from musterd.supervisor.ctl.app import DONE, Settings
from musterd.supervisor.ctl.output import emit, emit_json
from musterd.supervisor.ctl.table import paper
from musterd.supervisor.ctl.top_feed import Feed, Looker, Snapshot
from musterd.supervisor.ctl.top_screen import screen
from musterd.supervisor.ctl.top_view import View, press

PRINTED_COLUMNS = 120  # without a terminal
KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)  # an arrow key sends several characters
KEYS_QUIT = ("q", "Q", "\x04")


def run(settings: Settings, seconds: float) -> int:
    """Show the fleet until q is pressed; print once where standard output is no terminal."""
    looker = Looker(settings)
    try:
        first = looker.look()  # an unreachable daemon is reported as for every command
        if settings.json:
            emit_json(msgspec.json.encode(first))
        elif sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print_once(first)
        else:
            Top(looker, first, seconds).run()
    finally:
        looker.close()
    return DONE


def _print_once(snapshot: Snapshot) -> None:
    width = shutil.get_terminal_size((PRINTED_COLUMNS, 0)).columns
    console = Console(width=max(width, 80), no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(snapshot, View(), (console.width, 0)))
    emit("\n".join(line.rstrip() for line in captured.get().splitlines()))


class Top:
    def __init__(self, looker: Looker, first: Snapshot, seconds: float) -> None:
        self._console = Console(no_color=not paper().colour, highlight=False)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._feed = Feed(looker, seconds, self._wake)
        self._feed.newest = first
        self._view = View()
        self._keyboard = sys.stdin is not None and sys.stdin.isatty()
        self._leaving = False
        self._suspended = False

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe wakes the reader anyway
            os.write(self._wake_write, b"x")

    def run(self) -> None:
        try:
            with self._signals():
                self._feed.start()
                while not self._leaving:
                    with self._terminal():
                        while not (self._leaving or self._suspended):
                            self._draw()
                            self._listen()
                    if self._suspended:
                        self._suspended = False
                        os.kill(os.getpid(), signal.SIGSTOP)  # continues here after SIGCONT
        finally:
            self._feed.close()

    # -- the terminal -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals set a flag and wake the loop: restoring the terminal is never cut short."""

        def leave(_number: int, _frame: object) -> None:
            self._leaving = True

        def suspend(_number: int, _frame: object) -> None:
            self._suspended = True

        handlers = {
            signal.SIGINT: leave,
            signal.SIGTERM: leave,
            signal.SIGHUP: leave,
            signal.SIGTSTP: suspend,
            signal.SIGWINCH: lambda _number, _frame: None,  # only wakes the loop
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[None]:
        before = None
        if self._keyboard:
            before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        try:
            with self._console.screen():
                yield
        finally:
            if before is not None:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

    def _draw(self) -> None:
        size = self._console.size
        assert self._feed.newest is not None
        shown = screen(
            self._feed.newest,
            self._view,
            (size.width, size.height),
            self._feed.unreachable,
            self._feed.refusal,
        )
        self._console.control(Control.home())
        self._console.print(Screen(shown), end="")

    # -- the keyboard -------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait for a key, a snapshot or a signal."""
        sources: list[int] = [self._wake_read]
        if self._keyboard:
            sources.append(sys.stdin.fileno())
        ready, _, _ = select.select(sources, [], [])
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self._keyboard and sys.stdin.fileno() in ready:
            keys = os.read(sys.stdin.fileno(), 64).decode("utf-8", "replace")
            self._leaving |= not keys  # the terminal is gone
            for key in KEY.findall(keys):
                self._pressed(key)

    def _pressed(self, key: str) -> None:
        if key in KEYS_QUIT and not (self._view.typing or self._view.asked):
            self._leaving = True
            return
        assert self._feed.newest is not None
        self._feed.refusal = ""  # the user has read it
        self._view, wanted = press(self._view, key, self._feed.newest)
        if wanted is not None:
            self._feed.ask(wanted)
