"""`make demo-cluster`: it keeps its word, fits a terminal, and leaves nothing behind."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.waiting import wait_for

SECONDS_MAX = 300
COLUMNS = 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MARK = "MUSTERD_TEST_DEMO"  # in the environment of everything that the demo starts


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Make a directory with a path short enough for Unix sockets; PostgreSQL may go through it."""
    with tempfile.TemporaryDirectory(prefix="md-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


class Demo:
    """The demo in a terminal of 80 columns."""

    def __init__(self, scratch: Path, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        self._terminal = ours
        self._text = bytearray()
        self.scratch = scratch
        self.process = subprocess.Popen(
            [sys.executable, "-m", "musterd.supervisor.demo.cluster", *arguments],
            env={
                **os.environ,
                "TMPDIR": str(scratch),
                MARK: str(scratch),
                "COLUMNS": str(COLUMNS),
                "LINES": "24",
                "TERM": "xterm",
            },
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is closed with its last user
            while data := os.read(self._terminal, 65536):
                self._text += data

    @property
    def text(self) -> str:
        """What it printed, without colours and movements of the cursor."""
        return CONTROL.sub("", self._text.decode(errors="replace"))

    def end(self) -> int:
        code = self.process.wait(SECONDS_MAX)
        self._reader.join(30)
        os.close(self._terminal)
        return code

    def left(self) -> list[psutil.Process]:
        """Return processes that the demo has left behind."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == str(self.scratch):
                    found.append(process)
        return found


@pytest.mark.parametrize("moment", ["PostgreSQL", "nodes", "accepted"])
def test_ctrl_c_ends_everything(scratch: Path, moment: str) -> None:
    demo = Demo(scratch, "--tasks", "100")
    wait_for(f"it says {moment}", lambda: moment in demo.text or demo.process.poll() is not None)
    assert demo.left()
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo.text
    assert "interrupted; everything was ended" in demo.text
    assert demo.left() == []
    assert list(scratch.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("networks", ["--networks", "--no-networks"])
def test_every_task_ends_exactly_once(scratch: Path, networks: str) -> None:
    demo = Demo(scratch, "--tasks", "300", networks)
    assert demo.end() == 0, demo.text
    for line in (
        "east is killed with SIGKILL",
        "east is started again",
        "south is stopped with",
        "south goes on",
        "PostgreSQL is restarted",
        "in the database: 300 ends of 300 tasks, 300 succeeded, 0 are alive",
        "every task ended exactly once, and nothing is left",
    ):
        assert line in demo.text, demo.text
    assert max(map(len, demo.text.splitlines())) <= COLUMNS
    assert demo.left() == []
    assert list(scratch.iterdir()) == []
