"""musterctl without a command: an interactive shell with completion and history.

Lines are split as a shell does. Ctrl-C ends the running command, not the shell; Ctrl-D, `quit` and
`exit` end the shell, with the exit code of the last command.
"""

import os
import readline
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from click.shell_completion import CompletionItem, ShellComplete

from musterd.supervisor.ctl.app import DONE, USAGE, Settings, cli
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.ctl.supervisorctl import LEAVE
from musterd.supervisor.text.shell_line import escape, read_line

PROMPT = "musterctl> "
HISTORY_FILE = "musterctl_history"
HISTORY_LINES_MAX = 1000


def run(settings: Settings, execute: Callable[[list[str]], int]) -> int:
    """Read and execute commands until the end of input; return the exit code of the last one."""
    before = _options_before(settings)
    readline.set_completer(_Completer(before))
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set show-all-if-ambiguous on")  # at the first Tab
    emit("Type a command without `musterctl`, `help` or `quit`. Tab completes.")
    history = History(os.environ)
    code = DONE
    while True:
        try:
            line = input(PROMPT)
            history.add(line)
            words = shlex.split(line, comments=True)
        except EOFError:
            emit("")
            return code
        except KeyboardInterrupt:
            emit("")
            continue
        except ValueError as error:  # unclosed quotation
            warn(f"{error}")
            code = USAGE
            continue
        if words[:1] == ["musterctl"]:  # the line was copied from somewhere
            words = words[1:]
        if not words:
            continue
        if words[0] in LEAVE:
            return code
        code = execute([*before, *words])


def _options_before(settings: Settings) -> list[str]:
    """Return the options given to musterctl itself: they apply to each command."""
    words = ["-s", settings.socket] if settings.socket else []
    words += ["--timeout", f"{settings.timeout:g}"] if settings.timeout else []
    words += ["--json"] if settings.json else []
    words += ["--cluster"] if settings.cluster else []
    words += [word for file in settings.config for word in ("-c", file)]
    words += ["--url", settings.url] if settings.url else []
    words += ["--url-file", settings.url_file] if settings.url_file else []
    return words + (["--no-block"] if settings.no_block else [])


class History:
    """Lines typed in all shells of this user; lines that begin with a space are not kept."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._path: Path | None = None
        readline.set_auto_history(False)
        readline.set_history_length(HISTORY_LINES_MAX)
        state = environ.get("XDG_STATE_HOME", "")
        if not state.startswith("/") and environ.get("HOME", "").startswith("/"):
            state = str(Path(environ["HOME"], ".local", "state"))
        if not state.startswith("/"):
            return
        self._path = Path(state, "musterd", HISTORY_FILE)
        with suppress(OSError):  # the first time, or not readable by us
            readline.read_history_file(self._path)

    def add(self, line: str) -> None:
        last = readline.get_history_item(readline.get_current_history_length())
        if line.strip() and not line.startswith(" ") and line != last:
            readline.add_history(line)
            self._save_last()

    def _save_last(self) -> None:
        """Append the last line at once: a terminal that closes leaves no time for it.

        Other shells may have appended meanwhile. A home that cannot be written is no error.
        """
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.append_history_file(1, self._path)


class _Completer:
    """Completions of a line, handed to readline one at a time."""

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
        """Return what readline puts in the place of `text`, a part of the word that is typed."""
        words, begun, quote = read_line(line + text)
        if words[:1] == ["help"]:
            words = words[1:]
        items = self._completion.get_completions([*self._before, *words], begun)
        found = [path for item in items for path in _values(item, begun)]
        if not words:
            found += [word for word in ("help", *LEAVE) if word.startswith(begun)]
        if quote:
            kept = len(begun) - len(text.removeprefix(quote))
            opening = quote if text.startswith(quote) else ""
            return [f"{opening}{word[kept:]}{quote} " for word in found]
        kept = len(escape(begun)) - len(text)
        return [f"{escape(word)[kept:]}{'' if word.endswith('/') else ' '}" for word in found]


def _values(item: "CompletionItem[Any]", begun: str) -> list[str]:
    """Return the value of an item; of files, those that begin so."""
    if item.type not in ("file", "dir"):
        return [str(item.value)]
    folder, _, name = begun.rpartition("/")
    try:
        entries = sorted(os.scandir(folder + "/" if folder or begun[:1] == "/" else "."), key=_name)
    except OSError:
        return []
    head = begun[: len(begun) - len(name)]
    return [
        head + entry.name + ("/" if entry.is_dir() else "")
        for entry in entries
        if entry.name.startswith(name) and (entry.is_dir() or item.type == "file")
    ]


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name
