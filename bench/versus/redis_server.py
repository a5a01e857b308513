"""A Redis server for the benchmark: on loopback, in a temporary folder, killed and restarted.

Every write goes to its append-only file. `everysec`, which Redis recommends and has by default,
syncs that file once a second: a kill loses nothing, a power failure up to a second. `always` syncs
before each answer.
"""

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

from fleet import BenchError
from versus.systems import VENVS

FSYNCS = ("everysec", "always")
START_SECONDS = 10.0
STOP_SECONDS = 10.0
LOOK_SECONDS = 0.01


def program() -> str:
    """Return Debian's program, which `make bench-peers` puts beside the peers; else any other."""
    own = VENVS / "redis-server"
    found = str(own) if own.exists() else shutil.which("redis-server")
    if found is None:
        raise BenchError("there is no redis-server: make bench-peers installs it")
    return found


def version() -> str:
    """Return the version, such as "7.0.15"."""
    told = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True)
    return next(word[2:] for word in told.stdout.split() if word.startswith("v="))


class Redis:
    """A server that can be killed and started again on the same port and file."""

    def __init__(self, folder: Path, fsync: str) -> None:
        self._folder = folder
        self._fsync = fsync
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(program(), "--bind", "127.0.0.1", "--port", str(self._port)),
                    *("--dir", str(self._folder), "--daemonize", "no", "--save", ""),
                    *("--appendonly", "yes", "--appendfsync", self._fsync),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupted benchmark stops the server in order
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                said = (self._folder / "log").read_text(errors="replace")
                self.stop()
                raise BenchError(f"Redis did not start:\n{said}")
            time.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection,
        ):
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
