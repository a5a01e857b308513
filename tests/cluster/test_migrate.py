"""The schema: its versions, and which databases are refused, each with a reason."""

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from postgres import OWNER, PORT, Cluster, Server, servers
from rig import Rig

from musterd.supervisor.cluster import checks
from musterd.supervisor.cluster.engine import EngineAway, EngineRefused
from musterd.supervisor.cluster.migrate import VERSION, migrate
from musterd.supervisor.cluster.postgres import PostgresEngine

STARTUP = 196608  # version 3.0 of the protocol


@pytest.fixture
def database(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an empty database."""
    name = "m" + str(abs(hash(request.node.name)))
    server.execute(f"CREATE DATABASE {name}")
    yield name
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def check(url: str, schema: str = "musterd") -> list[str]:
    engine = PostgresEngine(url, schema)
    try:
        return engine.check()
    finally:
        engine.close()


def test_a_migration_is_done_once(server: Server, database: str) -> None:
    url = server.url(database)
    assert migrate(url) == 0
    cluster = server.execute("SELECT cluster FROM musterd.meta", database=database)
    assert migrate(url) == VERSION
    assert server.execute("SELECT cluster FROM musterd.meta", database=database) == cluster
    check(url)


def test_migrations_at_the_same_time_wait_for_each_other(server: Server, database: str) -> None:
    url, found = server.url(database), list[int]()
    threads = [threading.Thread(target=lambda: found.append(migrate(url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, VERSION, VERSION, VERSION]


def test_a_migration_that_fails_leaves_nothing_behind(
    server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "musterd.supervisor.cluster.migrate._filled"
    monkeypatch.setattr(name, lambda text, _: "SELECT 1 / 0" if "claim_1" in text else "SELECT 1")
    with pytest.raises(psycopg.Error):
        migrate(server.url(database))
    monkeypatch.undo()
    assert migrate(server.url(database)) == 0


def test_two_clusters_share_a_database(server: Server, database: str) -> None:
    url = server.url(database)
    rigs = []
    for schema in ("one", "the other"):
        assert migrate(url, schema) == 0
        rigs.append(Rig(PostgresEngine(url, schema), lambda _: None, lambda _: None))
    one, other = rigs
    a, b = one.join(), other.join()
    [id_] = one.submit(one.task())
    assert other.claim(b) == []
    assert one.claim_one(a).id == id_
    for rig in rigs:
        assert isinstance(rig.engine, PostgresEngine)
        rig.engine.close()


def test_a_database_without_the_schema_is_refused(server: Server, database: str) -> None:
    with pytest.raises(EngineRefused, match="musterctl cluster migrate"):
        check(server.url(database))


def test_a_schema_that_is_not_ours_is_refused(server: Server, database: str) -> None:
    server.execute("CREATE SCHEMA musterd; CREATE TABLE musterd.meta ()", database=database)
    for call in (check, migrate):
        with pytest.raises(EngineRefused, match="'musterd' is not musterd's"):
            call(server.url(database))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("version = 0", "version 0 of its schema, this musterd needs 1: musterctl cluster migrate"),
        ("version = 99, minimum = 99", "too new.*version 99.*knows 1: upgrade musterd"),
    ],
)
def test_a_schema_of_another_version_is_refused(
    server: Server, database: str, change: str, words: str
) -> None:
    migrate(server.url(database))
    server.execute(f"UPDATE musterd.meta SET {change}", database=database)
    with pytest.raises(EngineRefused, match=words):
        check(server.url(database))


def test_a_newer_schema_that_still_serves_us_is_taken(server: Server, database: str) -> None:
    migrate(server.url(database))
    server.execute("UPDATE musterd.meta SET version = 99", database=database)
    check(server.url(database))
    assert migrate(server.url(database)) == 99


def test_a_user_without_rights_is_refused(server: Server, database: str) -> None:
    server.execute("CREATE ROLE powerless LOGIN")
    url = server.url(database, "powerless")
    with pytest.raises(EngineRefused, match=r"'powerless' may not create.*CREATEROLE"):
        migrate(url, "its_own")
    migrate(server.url(database))
    with pytest.raises(EngineRefused, match="GRANT musterd_node TO powerless"):
        check(url)
    server.execute("DROP ROLE powerless")


def test_a_server_that_commits_without_the_disk_is_refused(server: Server, database: str) -> None:
    migrate(server.url(database))
    server.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
    for call in (check, migrate):
        with pytest.raises(EngineRefused, match="synchronous_commit is off"):
            call(server.url(database))


def test_a_server_that_commits_without_the_disk_by_now_is_refused_again(
    server: Server, database: str
) -> None:
    migrate(server.url(database))
    engine = PostgresEngine(server.url(database))
    try:
        assert engine.check()
        engine.close()
        server.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
        with pytest.raises(EngineRefused, match="synchronous_commit is off"):
            engine.nodes()
        server.execute(f"ALTER DATABASE {database} SET synchronous_commit = on")
        assert engine.nodes() == []
    finally:
        engine.close()


def test_a_server_without_fsync_is_refused() -> None:
    with servers(fsync="off") as server, pytest.raises(EngineRefused, match="fsync is off"):
        migrate(server.url())


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_keep_every_text_is_refused(server: Server, encoding: str) -> None:
    name = f"ancient_{encoding.lower()}"
    server.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    said = (
        f"has the encoding {encoding}.* CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0"
    )
    for call in (check, migrate):
        with pytest.raises(EngineRefused, match=said):
            call(server.url(name))


def test_a_server_that_is_too_old_is_refused(
    server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SERVER_MIN", 990000)
    with pytest.raises(EngineRefused, match="too old: a cluster needs 99"):
        migrate(server.url(database))


def test_no_synchronous_standby_is_a_warning(server: Server, database: str) -> None:
    migrate(server.url(database))
    [warning] = check(server.url(database))
    assert "synchronous_standby_names" in warning
    assert "failover" in warning


def test_a_synchronous_standby_is_no_warning() -> None:
    with servers(synchronous_standby_names="'b'") as server:
        connection = checks.connect(server.url())  # only reads: the standby is not there
        assert checks.warnings(connection) == []
        connection.close()


def test_a_server_that_is_not_there_is_away_and_no_password_is_told() -> None:
    url = "postgresql://somebody:pa55word@127.0.0.1:1/x"
    with pytest.raises(EngineAway, match=r"127\.0\.0\.1:1/x does not answer") as caught:
        PostgresEngine(url).check()
    assert "pa55word" not in str(caught.value)
    with pytest.raises(EngineRefused) as refused:
        PostgresEngine("nonsense pa55word").check()
    assert "pa55word" not in str(refused.value)


def test_an_owner_that_does_not_see_the_transactions_of_others_is_told_of_it(
    server: Server, cluster: Cluster
) -> None:
    with checks.connect(server.url(cluster.name, OWNER)) as connection:
        [warning] = checks.owner_warnings(connection)
    assert f"GRANT pg_read_all_stats TO {OWNER}" in warning
    with checks.connect(cluster.url) as connection:
        assert checks.owner_warnings(connection) == []


# -- a proxy ------------------------------------------------------------------------------------


class Pooler:
    """A proxy that lends one connection of a server to its clients, a transaction at a time."""

    def __init__(self, server: Server, database: str) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(server.folder / f".s.PGSQL.{PORT}"))
        body = b"user\0postgres\0database\0" + database.encode() + b"\0\0"
        self._server.sendall(struct.pack("!ii", len(body) + 8, STARTUP) + body)
        self._answers = self._server.makefile("rb")
        self._greeting = [each for each in self._until_ready() if each[:1] not in b"KRZ"]
        self._lent = threading.Lock()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _until_ready(self) -> Iterator[bytes]:
        while True:
            head = self._answers.read(5)
            yield head + self._answers.read(struct.unpack("!i", head[1:])[0] - 4)
            if head[:1] == b"Z":
                return

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._talk, args=(client,)))
            self._threads[-1].start()

    def _talk(self, client: socket.socket) -> None:
        asks = client.makefile("rb")
        while True:  # until it gives up TLS and the like
            size, code = struct.unpack("!ii", asks.read(8))
            asks.read(size - 8)
            if code == STARTUP:
                break
            client.sendall(b"N")
        welcome = [b"R" + struct.pack("!ii", 8, 0), *self._greeting]
        welcome += [b"K" + struct.pack("!iii", 12, 4242, 1), b"Z" + struct.pack("!ic", 5, b"I")]
        client.sendall(b"".join(welcome))
        message = b""
        while head := asks.read(5):
            message += head + asks.read(struct.unpack("!i", head[1:])[0] - 4)
            if head[:1] == b"X":
                break
            if head[:1] in b"QS":
                with self._lent:
                    self._server.sendall(message)
                    client.sendall(b"".join(self._until_ready()))
                message = b""
        asks.close()
        client.close()

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join()
        self._answers.close()
        self._server.close()


@contextmanager
def poolers(server: Server, database: str) -> Iterator[str]:
    pooler = Pooler(server, database)
    try:
        yield f"postgresql://postgres@127.0.0.1:{pooler.port}/{database}"
    finally:
        pooler.close()


def test_a_proxy_that_pools_transactions_is_refused(server: Server, database: str) -> None:
    """Each time: what one client leaves behind on a connection of the server harms no other."""
    migrate(server.url(database))
    with poolers(server, database) as url:
        for use in (check, check, migrate, lambda url: PostgresEngine(url, alone=1 << 30).check()):
            with pytest.raises(EngineRefused, match=r"pools transactions.*session mode"):
                use(url)


def test_a_server_that_lets_nobody_in_is_told_from_one_that_is_away(
    server: Server, database: str
) -> None:
    url = f"postgresql://nobody:pa55word@/{database}?host={server.folder}&port={PORT}"
    with pytest.raises(EngineAway, match=r"refuses the connection.*does not exist") as caught:
        PostgresEngine(url).check()
    assert checks.is_barred(str(caught.value))
    assert "pa55word" not in str(caught.value)


# -- what is not paid for -------------------------------------------------------------------------


def test_a_daemon_without_a_cluster_loads_nothing_of_it() -> None:
    code = (
        "import sys, musterd.supervisor.__main__, musterd.supervisor.loop.daemon, musterd;"
        "print([m for m in sys.modules if m.startswith(('psycopg', 'musterd.supervisor.cluster'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().strip() == "[]"


def test_only_the_sidecar_musterctl_and_the_demo_name_the_room_of_the_cluster() -> None:
    root = Path(__file__).resolve().parents[2]
    naming = [
        path.relative_to(root)
        for part in ("supervisor", "workers", "ipc", "testing")
        for path in (root / part).rglob("*.py")
        if "supervisor.cluster" in path.read_text()
    ]
    assert {path.parts[:2] for path in naming} == {
        ("supervisor", "cluster"),
        ("supervisor", "ctl"),
        ("supervisor", "demo"),  # make demo-cluster
        ("supervisor", "node"),
    }


def test_a_command_for_the_daemon_loads_nothing_of_the_cluster() -> None:
    code = (
        "import sys, musterd.supervisor.ctl;"
        "ours = ('musterd.supervisor.cluster', 'musterd.supervisor.config', 'psycopg');"
        "print([m for m in sys.modules if m.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().strip() == "[]"


def test_a_daemon_loads_nothing_of_the_cluster() -> None:
    code = (
        "import sys, musterd.supervisor.__main__, musterd.supervisor.loop.daemon;"
        "ours = ('musterd.supervisor.cluster', 'musterd.supervisor.node', 'psycopg',"
        " 'musterd.ipc.wire.node_codec', 'musterd.supervisor.sockets.node');"
        "print([m for m in sys.modules if m.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().strip() == "[]"


def test_the_contract_and_the_model_need_no_psycopg(cluster: Cluster) -> None:
    code = (
        "import sys, musterd.supervisor.cluster.engine, musterd.supervisor.cluster.model_engine;"
        "print([m for m in sys.modules if m.startswith('psycopg')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().strip() == "[]"
