"""A PostgreSQL that is reached by TLS alone: certificates that fit, and those that do not."""

import shutil
import socket
import subprocess
from collections.abc import Iterator

import postgres
import pytest
from postgres import Cluster, Server, servers
from rig import Rig

from musterd.supervisor.cluster.engine import EngineAway
from musterd.supervisor.cluster.postgres import PostgresEngine
from support.waiting import wait_for

PASSWORD = "hunter2"
RULES = "local all all trust\nhostssl all u_tls 127.0.0.1/32 scram-sha-256\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port for a server, in place of the usual one of sockets that have files."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found: int = taken.getsockname()[1]
    monkeypatch.setattr(postgres, "PORT", found)
    return found


@pytest.fixture
def shut(port: int) -> Iterator[Cluster]:
    """A cluster whose server lets one user in, by TLS and password."""
    with servers(listen_addresses="'127.0.0.1'", port=str(port)) as server:
        for name in ("localhost", "elsewhere"):
            certificate(server, name)
        (server.folder / "data" / "pg_hba.conf").write_text(RULES)
        server.execute("ALTER SYSTEM SET ssl = on")
        for key, ending in (("ssl_cert_file", "crt"), ("ssl_key_file", "key")):
            path = server.folder / f"localhost.{ending}"
            server.execute(f"ALTER SYSTEM SET {key} = '{path}'")
        server.execute("SELECT pg_reload_conf()")
        wait_for("TLS is on", lambda: server.execute("SHOW ssl") == [("on",)])
        cluster = Cluster(server, "tls")
        cluster.sql(f"CREATE ROLE u_tls LOGIN PASSWORD '{PASSWORD}' IN ROLE musterd_node")
        yield cluster
        cluster.close()


def certificate(server: Server, name: str) -> None:
    """Make a certificate of this name that has signed itself, and its key."""
    made = server.folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    files = ["-keyout", str(made.with_suffix(".key")), "-out", str(made)]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    if server._user is not None:
        shutil.chown(made.with_suffix(".key"), server._user)


def url(cluster: Cluster, mode: str, root: str = "", host: str = "localhost") -> str:
    ca = f"&sslrootcert={cluster.server.folder / f'{root}.crt'}" if root else ""
    at = f"{host}:{postgres.PORT}/{cluster.name}"
    return f"postgresql://u_tls:{PASSWORD}@{at}?sslmode={mode}{ca}"


def test_a_node_works_by_tls(shut: Cluster) -> None:
    engine = PostgresEngine(url(shut, "verify-full", "localhost"))
    try:
        engine.check()
        rig = Rig(engine, lambda _: None, lambda _: None)
        a = rig.join()
        [id_] = rig.submit(rig.task())
        rig.drained(a)
        assert rig.ended(id_).id == id_
        query = "SELECT s.ssl FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) "
        assert shut.sql(query + "WHERE a.usename = 'u_tls'") == [(True,)]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("mode", "root", "host", "why"),
    [
        ("verify-full", "elsewhere", "localhost", "certificate verify failed"),
        ("verify-full", "localhost", "127.0.0.1", 'does not match host name "127.0.0.1"'),
        ("verify-full", "nowhere", "localhost", "root certificate file .* does not exist"),
        ("disable", "", "localhost", "no pg_hba.conf entry .* no encryption"),
    ],
    ids=["another authority", "another name", "no authority", "no TLS"],
)
def test_what_does_not_fit_is_said_without_the_password(
    shut: Cluster, mode: str, root: str, host: str, why: str
) -> None:
    engine = PostgresEngine(url(shut, mode, root, host))
    with pytest.raises(EngineAway, match=f"refuses the connection: .*{why}") as told:
        engine.check()
    assert PASSWORD not in str(told.value)


def test_a_server_without_tls_is_told_from_one_that_is_away(shut: Cluster) -> None:
    shut.server.execute("ALTER SYSTEM SET ssl = off")
    shut.server.execute("SELECT pg_reload_conf()")
    wait_for("TLS is off", lambda: shut.server.execute("SHOW ssl") == [("off",)])
    engine = PostgresEngine(url(shut, "verify-full", "localhost"))
    with pytest.raises(EngineAway, match=r"refuses the connection: .*does not support SSL"):
        engine.check()
