"""A real PostgreSQL for the tests: Debian's, in a temporary folder, on a socket of its own.

As root it runs as the user `postgres`: PostgreSQL refuses root.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import psycopg
from rig import Rig

from musterd.supervisor.cluster.engine import ClusterPolicy
from musterd.supervisor.cluster.migrate import SCHEMA, migrate
from musterd.supervisor.cluster.postgres import PostgresEngine
from support.daemon import is_gone
from support.waiting import wait_for

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: int(each.parent.name))
OWNER = "u_owner"  # of the schemas
PORT = 5432  # of the socket's name: nothing listens on it
SETTINGS = {
    "listen_addresses": "''",
    "deadlock_timeout": "100ms",  # a deadlock is an error of ours: it is soon found and logged
    "log_lock_waits": "off",
    "max_connections": "60",
    "shared_buffers": "64MB",
}
# Time and lives of the server, as the tests want them.
CLOCK = """
CREATE TABLE {schema}.test (by interval NOT NULL, epoch int NOT NULL);
INSERT INTO {schema}.test VALUES ('0', 1);
CREATE OR REPLACE FUNCTION {schema}.clock() RETURNS timestamptz LANGUAGE sql AS
  'SELECT clock_timestamp() + (SELECT t.by FROM {schema}.test t)';
CREATE OR REPLACE FUNCTION {schema}.epoch() RETURNS text LANGUAGE sql AS
  'SELECT t.epoch::text FROM {schema}.test t';
CREATE OR REPLACE FUNCTION {schema}.long_ms() RETURNS bigint LANGUAGE sql IMMUTABLE AS
  'SELECT 9000';
"""


class Server:
    """A PostgreSQL. `log` is what it wrote."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._user = "postgres" if os.getuid() == 0 else None
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = {**SETTINGS, **settings, "unix_socket_directories": f"'{folder}'"}
        if self._user is not None:
            shutil.chown(folder, self._user)
        options = ("-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync")
        self._run("initdb", "-D", str(self._data), *options)
        config = self._data / "postgresql.auto.conf"
        config.write_text("".join(f"{key} = {value}\n" for key, value in self._settings.items()))

    def _command(self, name: str, *arguments: str) -> list[str]:
        assert BINARIES, "PostgreSQL is not installed: make test-setup"
        return [str(BINARIES[-1] / name), *arguments]

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(name, *arguments),
            user=self._user,
            cwd=self.folder,
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", str(self._data)),
                user=self._user,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        wait_for("PostgreSQL answers", self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: fast, or as a crash with SIGQUIT."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None

    def kill(self) -> None:
        """Kill all processes of the server."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        found = [server, *server.children(recursive=True)]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(timeout=60)
        self._process = None
        wait_for("all of it is gone", lambda: all(map(is_gone, found)))

    def kill_one(self) -> bool:
        """Kill a process that serves a session of ours: the others end, and the server recovers.

        Return whether there was one.
        """
        end = "all server processes terminated"
        before = self.log.count(end)
        sessions = "SELECT pid FROM pg_stat_activity WHERE application_name = 'musterd' LIMIT 1"
        pids = [int(str(pid)) for [pid] in self.execute(sessions)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_for("all others have ended", lambda: self.log.count(end) > before)
        wait_for("PostgreSQL answers", self._answers)
        return bool(pids)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"host={self.folder} port={PORT} dbname={database} user={user}"

    def execute(
        self, query: str, *parameters: object, database: str = "postgres"
    ) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(query, parameters or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description is not None else []


@contextmanager
def servers(folder: Path | None = None, **settings: str) -> Iterator[Server]:
    """A running server, which is gone afterwards. `folder`: where to make its folder."""
    folder = Path(tempfile.mkdtemp(prefix="musterd-pg-", dir=folder))
    server = Server(folder, settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


class Cluster:
    """A database with the schema, and engines on it. `reset` makes it as new.

    Its owner is no superuser, as docs/cluster.md has it: functions run with the owner's rights.
    """

    def __init__(self, server: Server, name: str, schema: str = SCHEMA, options: str = "") -> None:
        """`options` are those of CREATE DATABASE."""
        self.server = server
        self.name = name
        self.schema = schema
        self._engines: list[PostgresEngine] = []
        if not server.execute("SELECT FROM pg_roles WHERE rolname = %s", OWNER):
            server.execute(f"CREATE ROLE {OWNER} LOGIN CREATEROLE")
        server.execute(f'CREATE DATABASE "{name}" OWNER {OWNER} {options}')
        owner = server.url(name, OWNER)
        migrate(owner, schema)
        self._epoch, self._clock = (
            str(self.sql("SELECT pg_get_functiondef(%s::regproc)", f"{schema}.{each}")[0][0])
            for each in ("epoch", "clock")
        )
        with psycopg.connect(owner) as connection:
            connection.execute(CLOCK.format(schema=schema))  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return self.server.url(self.name)

    def sql(self, query: str, *parameters: object) -> list[tuple[object, ...]]:
        return self.server.execute(query, *parameters, database=self.name)

    def keep_real_epoch(self) -> None:
        """Let restarts and crashes of the server be told as they are."""
        self.sql(self._epoch)

    def keep_real_time(self) -> None:
        self.sql(self._clock)

    def engine(self, user: str = "postgres") -> PostgresEngine:
        engine = PostgresEngine(self.server.url(self.name, user), self.schema)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self._engines.clear()

    def reset(self) -> None:
        """Forget all but the schema."""
        self.close()
        tables = self.sql(
            "SELECT string_agg(format('%%I.%%I', schemaname, tablename), ', ') FROM pg_tables "
            "WHERE schemaname = %s AND tablename NOT IN ('meta', 'test')",
            self.schema,
        )
        sequences = self.sql(
            "SELECT string_agg(format('%%I.%%I', schemaname, sequencename), ', ') "
            "FROM pg_sequences WHERE schemaname = %s AND sequencename ~ '^(cursor|turns)_'",
            self.schema,
        )
        statements = [f"TRUNCATE {tables[0][0]} RESTART IDENTITY"]
        if sequences[0][0]:
            statements.append(f"DROP SEQUENCE {sequences[0][0]}")
        # Nobody has looked at all lanes and sites of late.
        statements += [
            f"ALTER SEQUENCE {self.schema}.{name} RESTART"
            for name in ("repaired", "shut_seen", "tidied")
        ]
        statements.append(f"UPDATE {self.schema}.test SET by = '0'")
        self.sql("; ".join(statements))
        doc = msgspec.json.encode(ClusterPolicy())
        self.sql(f"SELECT {self.schema}.apply_1(%s::bytea, -1)", doc)

    def pass_ns(self, by_ns: int) -> None:
        self.sql(f"UPDATE {self.schema}.test SET by = by + make_interval(secs => %s)", by_ns / 1e9)

    def restart(self, lost: Sequence[str]) -> None:
        """Be a server that has crashed: the transactions of these claims are undone."""
        self.sql(f"UPDATE {self.schema}.test SET epoch = epoch + 1")
        self.sql(f"UPDATE {self.schema}.lane SET head = 0")
        self.sql(
            f"UPDATE {self.schema}.live SET state = 0, tenure = NULL, claim = NULL, held = NULL, "
            f"attempt = attempt - 1 WHERE id = ANY (%s)",
            list(lost),
        )

    def rig(self) -> Rig:
        return Rig(self.engine(), self.pass_ns, self.restart)
