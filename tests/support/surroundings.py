"""The surroundings of a daemon in a test: a process tree, a page of documentation, a bad disk."""

import os
import re
import select
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from support.daemon import Muster

GONE_SECONDS_MAX = 20.0


class Survivors:
    """A FIFO that a tree of processes holds open until its last process is gone."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fifo"
        os.mkfifo(self.path)
        self.path.chmod(0o666)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_until_up(self) -> None:
        assert select.select([self._fd], [], [], GONE_SECONDS_MAX)[0], "the tree is not up"
        assert os.read(self._fd, 1) == b"x"

    def are_there(self) -> bool:
        return not select.select([self._fd], [], [], 0)[0]

    def wait_until_gone(self) -> float:
        """Wait until the tree is gone; return how many seconds that took."""
        began = time.monotonic()
        assert select.select([self._fd], [], [], GONE_SECONDS_MAX)[0], "there are survivors"
        assert os.read(self._fd, 1) == b""
        return time.monotonic() - began

    def close(self) -> None:
        os.close(self._fd)


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w.]+\.(?:py|toml))\n")


class Document:
    """A page of the documentation, whose examples run in `folder`."""

    def __init__(self, path: Path, daemon: Muster) -> None:
        self.text = path.read_text()
        self.blocks: list[tuple[str, str]] = BLOCK.findall(self.text)
        self.daemon = daemon
        self.folder: Path = daemon.folder
        for _, text in self.blocks:
            if match := FILE_NAME.match(text):
                (self.folder / match[1]).write_text(text)

    def section(self, heading: str) -> str:
        """Return the text below a heading, up to the next heading of any level."""
        found, inside, code = [], False, False
        for line in self.text.splitlines(keepends=True):
            code ^= line.startswith("```")
            if line.startswith("#") and not code:
                inside = line.lstrip("#").strip() == heading
            elif inside:
                found.append(line)
        assert found, f"no section {heading!r}"
        return "".join(found)

    def commands(self, heading: str) -> str:
        """Return the shell commands below a heading."""
        return "".join(text for kind, text in BLOCK.findall(self.section(heading)) if kind == "sh")

    def start(self, config: str, **settings: Any) -> Muster:
        """Start the daemon with one of the page's configurations."""
        tables = tomllib.loads((self.folder / config).read_text())
        for key, value in settings.items():
            table, _, name = key.rpartition("__")
            inner = tables
            for part in filter(None, table.split("__")):
                inner = inner.setdefault(part, {})
            inner[name] = value
        own = {"runtime_dir": str(self.daemon.runtime), "state_dir": str(self.daemon.state)}
        tables["supervisor"] = tables.get("supervisor", {}) | own
        tables.setdefault("memory", {"enabled": False})
        self.daemon.config_path.write_bytes(msgspec.json.encode(tables))
        return self.daemon.start()

    def run(self, *words: str) -> str:
        """Run a program of the page, or a command, that has to succeed; return its output."""
        done = subprocess.run(
            words if len(words) > 1 else [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "MUSTERD_TASKS": self.daemon.tasks_socket,
                "MUSTERD_CONTROL": self.daemon.control_socket,
            },
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class BrokenDisk:
    """A disk that breaks when a test says so; its source is broken_disk.c."""

    def __init__(self, folder: Path, source: Path) -> None:
        self._switches = folder / "switches"
        self._switches.mkdir()
        self._library = folder / "broken.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source), "-ldl"]
        subprocess.run(command, check=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that uses this disk."""
        return {
            **os.environ,
            "LD_PRELOAD": str(self._library),
            "BROKEN_DISK": str(self._switches),
        }

    def turn_on(self, switch: str) -> None:
        (self._switches / switch).touch()

    def is_on(self, switch: str) -> bool:
        return (self._switches / switch).exists()

    def mend(self) -> None:
        for switch in self._switches.iterdir():
            switch.unlink()
