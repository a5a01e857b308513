"""A PostgreSQL of one's own: Debian's, in a folder, on loopback, gone afterwards.

It is as durable as any other (fsync is on). As root it runs as the user `postgres`, because
PostgreSQL refuses root. It ends with the thread that starts it, unless a launcher becomes another
user. Whoever may enter the folder is its administrator, over a Unix socket;
everybody else needs a password.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg

from musterd.ipc.errors import MusterdError
from musterd.supervisor.system.linux import die_with_parent

BINARIES = Path("/usr/lib/postgresql")  # where Debian has them, by version
ACCOUNT = "postgres"
START_SECONDS = 60.0
STOP_SECONDS = 60.0
LOOK_SECONDS = 0.05
SETTINGS = {"max_connections": "100", "shared_buffers": "128MB", "listen_addresses": "127.0.0.1"}
ACCESS = "local all all trust\nhost all all all scram-sha-256\n"


class DatabaseError(MusterdError):
    """PostgreSQL is not there, or does not work."""


class Database:
    """A server. `launcher` is a command that starts it elsewhere, in a network namespace."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.port = _free_port()
        self._launcher = tuple(launcher)
        self._process: subprocess.Popen[bytes] | None = None
        self._user = ACCOUNT if os.geteuid() == 0 else None
        folder.mkdir(mode=0o700)
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._run("initdb", "-D", "data", "-U", ACCOUNT, "-E", "UTF8", "--locale=C", "-N")
        own = {"port": str(self.port), "unix_socket_directories": str(folder)}
        lines = [
            f"{key} = '{value}'\n" for key, value in {**SETTINGS, **(settings or {}), **own}.items()
        ]
        (folder / "data" / "postgresql.auto.conf").write_text("".join(lines))
        (folder / "data" / "pg_hba.conf").write_text(ACCESS)

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._launcher, *self._command("postgres", "-D", str(self.folder / "data"))],
                user=None if self._launcher else self._user,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it ends when its owner says so ...
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - or is killed; it is a system call
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise DatabaseError(f"PostgreSQL did not start:\n{self.log()}")
            time.sleep(LOOK_SECONDS)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it in order, or at once with SIGQUIT; it may be started again."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def url(self, name: str = "postgres") -> str:
        """Return the address for its administrator."""
        return f"postgresql://{ACCOUNT}@/{name}?host={self.folder}&port={self.port}"

    def execute(self, query: str, *, name: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement as the administrator; return its rows."""
        with psycopg.connect(self.url(name), autocommit=True) as connection:
            cursor = connection.execute(query)
            return cursor.fetchall() if cursor.description is not None else []

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, name: str, *arguments: str) -> None:
        command = self._command(name, *arguments)
        done = subprocess.run(
            command, user=self._user, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise DatabaseError(f"{name} failed:\n{done.stderr}")

    def _command(self, name: str, *arguments: str) -> list[str]:
        return [str(programs() / name), *arguments]


def programs() -> Path:
    """Return the folder of PostgreSQL's programs, of its newest version."""
    found = [each for each in BINARIES.glob("*/bin") if (each / "initdb").exists()]
    if not found:
        raise DatabaseError("PostgreSQL is not installed: apt-get install postgresql")
    return max(found, key=lambda each: int(each.parent.name))


def _end_with_parent() -> None:
    """Have PostgreSQL stop in order when the thread that starts it has ended.

    Called in the child after it has become another user, which would undo it.
    """
    die_with_parent(signal.SIGINT)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
