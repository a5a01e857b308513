"""musterctl without a command: a shell that takes one command after the other.

Lines are split as a shell does. Ctrl-C ends the command that runs, not the shell; Ctrl-D, `quit`
and `exit` end it, with the exit code of the last command.
"""

import readline
import shlex
from collections.abc import Callable

from click.shell_completion import ShellComplete

from musterd.supervisor.ctl.app import DONE, USAGE, Settings, cli
from musterd.supervisor.ctl.output import emit, warn

PROMPT = "musterctl> "
LEAVE = ("quit", "exit")


def run(settings: Settings, execute: Callable[[list[str]], int]) -> int:
    """Reads and executes commands until the end of input; the exit code of the last one."""
    before = _said_before(settings)
    readline.set_completer(_Completer(before))
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set show-all-if-ambiguous on")  # at the first Tab
    emit("Commands of musterctl, without its name; help, quit. Tab completes.")
    code = DONE
    while True:
        try:
            words = shlex.split(input(PROMPT), comments=True)
        except EOFError:
            emit("")
            return code
        except KeyboardInterrupt:
            emit("")
            continue
        except ValueError as error:  # a quotation that is not closed
            warn(f"{error}")
            code = USAGE
            continue
        if not words:
            continue
        if words[0] in LEAVE:
            return code
        code = execute([*before, *_meant(words)])


def _said_before(settings: Settings) -> list[str]:
    """The options that musterctl itself was given: they hold for each command."""
    words = ["-s", settings.socket] if settings.socket else []
    words += ["--timeout", f"{settings.timeout:g}"] if settings.timeout else []
    words += ["--json"] if settings.json else []
    return words + (["--no-block"] if settings.no_block else [])


def _meant(words: list[str]) -> list[str]:
    """`help [COMMAND]` is what people type first."""
    return [*words[1:2], "--help"] if words[0] == "help" else words


class _Completer:
    """The completions of a line, as readline asks for them: one after the other."""

    def __init__(self, before: list[str]) -> None:
        self._before = before
        self._completion = ShellComplete(cli, {}, "musterctl", "")
        self._found: list[str] = []

    def __call__(self, text: str, number: int) -> str | None:
        if number == 0:
            line = readline.get_line_buffer()[: readline.get_begidx()]
            self._found = self._completions(line, text)
        return self._found[number] if number < len(self._found) else None

    def _completions(self, line: str, text: str) -> list[str]:
        try:
            words = shlex.split(line)
        except ValueError:  # within a quotation
            return []
        if words[:1] == ["help"]:
            words = words[1:]
        items = self._completion.get_completions([*self._before, *words], text)
        found = [str(item.value) for item in items]
        if not words:
            found += [word for word in ("help", *LEAVE) if word.startswith(text)]
        return [f"{word} " for word in found]
