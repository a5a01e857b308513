"""A page of the documentation that is typed from start to end, as its reader does.

Blocks are typed in the order of the page:

- one that begins with `# NAME.ext` is written to that file, `# added to NAME.ext` to its end;
- ```sh blocks that begin with `# terminal N` are typed in that terminal, whose last command keeps
  running; what ran there before is ended by Ctrl-C. Other ```sh blocks are not typed here;
- in a block without a language `$ ` is typed, and the lines below are what has to be printed. A
  line `...` stands for any lines, within a line for anything. Commands that only look are typed
  again until they show that.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.surroundings import BLOCK
from support.waiting import wait_for

FILE = re.compile(r"# (added to )?([\w.]+\.(?:py|toml))\n")
TERMINAL = re.compile(r"# terminal (\d)\n")
LOOKS = re.compile(r"musterctl (changes|history|breaker$|sessions$|status)")
COMMAND_SECONDS = 60
# What is never the same twice.
CHANGING = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "TIME"),
    (re.compile(r"@([\w-]+)\.[0-9a-f-]+m?\b"), r"@\1.ID"),
    (re.compile(r"\b(\d+m )?[\d.]+s\b"), "DURATION"),
    (re.compile(r" +"), " "),
)


def files_of(text: str) -> dict[str, str]:
    """Return the files of a page as they are at its end."""
    files: dict[str, str] = {}
    for _, block in BLOCK.findall(text):
        if found := FILE.match(block):
            files[found[2]] = files.get(found[2], "") * bool(found[1]) + block
    return files


def steady(text: str) -> list[str]:
    """Return the lines of a text, without what is never the same twice."""
    for pattern, stand_in in CHANGING:
        text = pattern.sub(stand_in, text)
    return [line.strip() for line in text.splitlines()]


def fits(printed: str, expected: str) -> bool:
    """Tell whether something was printed as the page has it."""
    pattern = "".join(
        "(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in steady(expected)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in steady(printed))) is not None


class Walk:
    """Types a page in a folder; `texts` are replaced everywhere, such as a port."""

    def __init__(self, page: Path, folder: Path, texts: dict[str, str], **variables: str) -> None:
        text = page.read_text()
        for before, after in texts.items():
            assert before in text, before
            text = text.replace(before, after)
        self._blocks: list[tuple[str, str]] = BLOCK.findall(text)
        self._folder = folder
        self._terminals: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "HOME": str(folder), **variables}
        self.exit_codes: list[int] = []
        self.typed: list[str] = []

    def type_all(self) -> None:
        for kind, text in self._blocks:
            if found := FILE.match(text):
                with (self._folder / found[2]).open("a" if found[1] else "w") as file:
                    file.write(text)
            elif kind == "sh" and (terminal := TERMINAL.match(text)):
                self._type_in(terminal[1], text)
            elif not kind:
                for command, expected in _commands(text):
                    self._type(command, expected)

    def _type_in(self, terminal: str, text: str) -> None:
        """Type in a terminal of which the last command keeps running."""
        self._end(terminal)
        with (self._folder / f"terminal-{terminal}.log").open("ab") as log:
            self._terminals[terminal] = subprocess.Popen(
                ["bash", "-ec", text],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _type(self, command: str, expected: str) -> None:
        self.typed.append(command)
        done = self._run(command)
        if LOOKS.match(command) and not fits(done.stdout, expected):
            wait_for(f"{command}:\n{expected}", lambda: fits(self._run(command).stdout, expected))
        else:
            said = f"{done.stdout}{done.stderr}instead of\n{expected}{self.log()}"
            assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{said}"
            assert fits(done.stdout, expected), f"$ {command}\n{said}"

    def _run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("terminal-*.log")))

    def _end(self, terminal: str) -> None:
        """Press Ctrl-C."""
        process = self._terminals.pop(terminal, None)
        if process is not None:
            os.killpg(process.pid, signal.SIGINT)
            self.exit_codes.append(process.wait(COMMAND_SECONDS))

    def close(self) -> None:
        for terminal in sorted(self._terminals, reverse=True):
            self._end(terminal)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a block, and what it prints."""
    assert text.startswith("$ "), text
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected
