"""musterctl debug: the terminal of the debugger of a task that waits at a breakpoint.

One thread reads what the daemon sends, the main thread shows it, reads lines and sends them. The
end of the task or of the daemon ends a prompt too: the reading thread wakes the main thread by a
signal, because nothing else ends input().
"""

import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import click
import msgspec
from msgspec import UnsetType

from musterd.ipc.wire.debugger_messages import DEBUGGER_CHARS_MAX
from musterd.supervisor.api import rpc
from musterd.supervisor.api.debugging import DebugBegun, DebugResult, DebugText
from musterd.supervisor.api.envelope import Answer, decode_answer
from musterd.supervisor.api.rpc import RpcError
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, FAILED, Settings, any_names, command, connect
from musterd.supervisor.ctl.connection import Connection, NoAnswer
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.ctl.table import paper
from musterd.supervisor.text.printable import printable

WAKE = signal.SIGUSR1
HELP = (
    "Timeouts stand meanwhile. c goes on to the next breakpoint() of the attempt, q or Ctrl-D "
    "leaves and lets the task go on, Ctrl-C stops the code, h helps."
)


class _Over(Exception):
    """It is over, while a line was being typed."""


@command("debug", any_names)
def debug(settings: Settings, names: tuple[str, ...]) -> int:
    """Debug a task that waits at a breakpoint, with pdb."""
    if settings.json:
        raise click.UsageError("debug talks to people: it has no --json")
    with connect(settings) as connection:
        assert isinstance(connection, Connection)
        return _Terminal(connection).run(rpc.Debug(names=list(names)))


class _Terminal:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Lines of the daemon; an error where there are no more.
        self._heard: queue.SimpleQueue[bytes | NoAnswer] = queue.SimpleQueue()
        self._typing = False  # input() waits
        self._ended = False  # nothing more will be heard
        self._asked = 0  # id of the request whose answer is the end

    def run(self, params: rpc.Debug) -> int:
        self._asked = self._connection.send(params)
        threading.Thread(target=self._listen, name="daemon", daemon=True).start()
        before = signal.signal(WAKE, self._wake)
        try:
            with _no_completion():
                return self._talk()
        finally:
            signal.signal(WAKE, before)
            self._connection.interrupt()

    def _listen(self) -> None:
        """Read what the daemon sends, in a thread of its own."""
        with suppress(OSError):
            for line in self._connection.stream():
                self._ended = decode_answer(line).id == self._asked
                self._heard.put(line)
                if self._ended:
                    break
        if not self._ended:
            self._ended = True
            self._heard.put(NoAnswer("the daemon has ended the connection: see musterctl status"))
        main = threading.main_thread().ident
        if self._typing and main is not None:
            signal.pthread_kill(main, WAKE)

    def _wake(self, _number: int, _frame: FrameType | None) -> None:
        if self._typing:
            raise _Over

    def _talk(self) -> int:
        pressed = False  # Ctrl-C, and no prompt has come since
        while True:
            try:
                heard = self._heard.get()
            except KeyboardInterrupt:
                if pressed:
                    emit("\nleft: the task goes on")
                    return DONE
                pressed = True
                emit("\nstopping the code ... (Ctrl-C again: leave, and let the task go on)")
                self._connection.send(rpc.DebugInterrupt())
                continue
            if isinstance(heard, NoAnswer):
                warn(str(heard))
                return FAILED
            answer = decode_answer(heard)
            if answer.id == self._asked:
                return _over(answer)
            if answer.id is None:
                prompt = _show(heard)
                if prompt is not None:
                    pressed = False
                    self._type(prompt)

    def _type(self, prompt: str) -> None:
        """Read a line and send it; Ctrl-C drops what was typed, Ctrl-D leaves."""
        line: str | None = None
        while True:
            try:
                self._typing = True
                if self._ended:
                    raise _Over
                line = input(printable(prompt))
                self._typing = False
                break
            except KeyboardInterrupt:
                self._typing = False
                emit("")
            except EOFError:
                self._typing = False
                emit("")
                break
            except _Over:
                self._typing = False
                emit("")
                return
        if line is not None and len(line) > DEBUGGER_CHARS_MAX:
            warn(f"a line has at most {DEBUGGER_CHARS_MAX} characters: it was not sent")
            line = ""
        with suppress(NoAnswer, OSError):  # then the thread hears of the end
            self._connection.send(rpc.DebugLine(line))


def _show(heard: bytes) -> str | None:
    """Show a line of the dialogue; return the prompt, if it asks for a line."""
    fields = msgspec.json.decode(heard, type=dict[str, Any])
    if "debugging" in fields:
        begun = msgspec.convert(fields, DebugBegun)
        task = f"task {begun.task} ({begun.name}, attempt {begun.attempt})"
        on = paper()
        emit(show.prose(printable(f"{begun.debugging}: {task} at {begun.where}"), on))
        emit(show.prose(HELP, on))
        return None
    said = msgspec.convert(fields, DebugText)
    text = printable(said.text, keep="\n\t")
    if text:
        emit(text.removesuffix("\n"))
    return said.prompt


def _over(answer: Answer) -> int:
    if not isinstance(answer.error, UnsetType):
        raise RpcError(answer.error.code, answer.error.message, answer.error.data)
    assert not isinstance(answer.result, UnsetType)
    result = msgspec.json.decode(answer.result, type=DebugResult)
    emit(printable(f"{result.name}: {result.reason}"))
    return DONE


@contextmanager
def _no_completion() -> Iterator[None]:
    """Keep the words of musterctl's own shell out of the debugger."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    import readline  # for people who type

    before = readline.get_completer()
    readline.set_completer(lambda _text, _number: None)
    try:
        yield
    finally:
        readline.set_completer(before)
