"""What is looked at before a database is used: each refusal says what is wrong and what to do."""

import re
import select

import psycopg
from msgspec import Struct
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from musterd.supervisor.cluster.engine import EngineRefused, EngineUnreached

SERVER_MIN = 140000  # date_bin(), and multi-statement notifications that do not block
CONNECT_SECONDS = 10
ALONE_TRIES, ALONE_SECONDS = 50, 0.1  # for the end of a former session
POOLER_TRIES = 5  # a pooler that has several idle connections may give another one

Connection = psycopg.Connection[tuple[object, ...]]


class SchemaVersion(Struct, frozen=True):
    version: int
    minimum: int


def read_url(url: str) -> dict[str, str]:
    """Return the parts of a URL; EngineRefused, without the URL, if it cannot be read.

    A password with a bare `@` or `/` makes libpq take a part of it for the host, and show it.
    """
    try:
        known = {key: str(value) for key, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError:
        known = {"port": "unreadable"}
    odd = any("@" in known.get(key, "") for key in ("host", "hostaddr", "dbname"))
    if odd or not re.fullmatch(r"[\d,]*", known.get("port", "")):
        raise EngineRefused(
            "the URL of the cluster cannot be read: postgresql://USER@HOST/NAME; in a password "
            "@ / ? # are written as %40 %2F %3F %23"
        )
    return known


def connect(url: str) -> Connection:
    """Open a connection. No password is in the error."""
    read_url(url)
    try:
        return psycopg.connect(
            url,
            autocommit=True,
            prepare_threshold=0,
            connect_timeout=CONNECT_SECONDS,
            application_name="musterd",
        )
    except psycopg.OperationalError as error:
        raise EngineUnreached(f"PostgreSQL at {place(url)} does not answer: {error}") from None


def is_stale(connection: Connection) -> bool:
    """Whether the server has closed a connection on which nothing is under way."""
    try:
        while select.select([connection.fileno()], [], [], 0)[0]:
            connection.pgconn.consume_input()
    except (psycopg.Error, OSError, ValueError):
        return True
    return False


def be_alone(connection: Connection, number: int) -> None:
    """Be the only session with this number; end another one, and what it is doing.

    The call of a process that has died may still be under way in the server. A submit that comes
    late would begin a task anew that was sent again meanwhile, and has ended.
    """
    for _ in range(ALONE_TRIES):
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", (number,)).fetchone()
        if row is not None and row[0]:
            return
        connection.execute(
            "SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_database d "
            "ON d.oid = l.database AND d.datname = current_database() WHERE l.granted "
            "AND l.locktype = 'advisory' AND l.objsubid = 1 AND l.classid::bigint = %s "
            "AND l.objid::bigint = %s",
            (number >> 32, number & 0xFFFFFFFF),
        )
        connection.execute("SELECT pg_sleep(%s)", (ALONE_SECONDS,))
    connection.close()
    raise EngineUnreached("a former session of this node does not end")


def place(url: str) -> str:
    """Return where a database is, for people: host, port and name, never a user or password."""
    known = read_url(url)
    host = known.get("host", "localhost")
    if host.startswith("/"):
        host = "localhost"  # a folder of sockets
    return f"{host}:{known.get('port') or 5432}/{known.get('dbname', '')}"


def setting(connection: Connection, name: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


def server(connection: Connection) -> None:
    """Refuse a server that would lose what it has acknowledged, or that is too old."""
    number = connection.info.server_version
    if number < SERVER_MIN:
        raise EngineRefused(
            f"PostgreSQL {number // 10000} is too old: a cluster needs {SERVER_MIN // 10000} or "
            f"later"
        )
    if setting(connection, "fsync") == "off":
        raise EngineRefused(
            "fsync is off: PostgreSQL would lose acknowledged tasks when its machine fails; "
            "set fsync = on in postgresql.conf"
        )
    if setting(connection, "synchronous_commit") == "off":
        raise EngineRefused(
            "synchronous_commit is off: PostgreSQL would acknowledge tasks that are not on disk; "
            "set synchronous_commit = on for this role, this database or in postgresql.conf"
        )


def pooler(connection: Connection, url: str) -> None:
    """Refuse a proxy that gives each transaction another connection: notifications and prepared
    statements need one of their own."""
    if connection.info.backend_pid == _pid(connection):
        return  # nobody in between
    with connect(url) as other:
        for _ in range(POOLER_TRIES):
            if _pid(connection) == _pid(other):
                raise EngineRefused(
                    f"the proxy at {place(url)} pools transactions: two connections shared one "
                    f"server process; use its session mode (pgbouncer: pool_mode = session), or "
                    f"connect to PostgreSQL itself"
                )


def _pid(connection: Connection) -> object:
    # Not prepared: connections that share a server process would share its names, too.
    row = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
    assert row is not None
    return row[0]


def version(connection: Connection, schema: str) -> SchemaVersion | None:
    """Return the version of the schema, None if there is none; refuse one that is not ours."""
    found = connection.execute("SELECT to_regnamespace(quote_ident(%s))", (schema,)).fetchone()
    if found is None or found[0] is None:
        return None
    look = sql.SQL("SELECT version, minimum FROM {}.version_1()").format(sql.Identifier(schema))
    try:
        row = connection.execute(look).fetchone()
    except psycopg.errors.UndefinedFunction:
        raise EngineRefused(
            f"the schema '{schema}' is not musterd's: name another one, or another database"
        ) from None
    except psycopg.errors.InsufficientPrivilege:
        raise EngineRefused(
            f"'{connection.info.user}' may not use the cluster '{schema}': GRANT {schema}_node TO "
            f"{connection.info.user} (or {schema}_submit, {schema}_admin)"
        ) from None
    if row is None:
        raise EngineRefused(
            f"the schema '{schema}' has no version: its migration was never finished"
        )
    return SchemaVersion(int(str(row[0])), int(str(row[1])))


def usable(connection: Connection, schema: str, known: int) -> None:
    """Refuse a schema that this code cannot work with. `known` is the version that it knows."""
    found = version(connection, schema)
    if found is None:
        raise EngineRefused(f"there is no cluster '{schema}' here yet: musterctl cluster migrate")
    if found.version < known:
        raise EngineRefused(
            f"the cluster '{schema}' has version {found.version} of its schema, this musterd needs "
            f"{known}: musterctl cluster migrate"
        )
    if found.minimum > known:
        raise EngineRefused(
            f"the cluster '{schema}' is too new: its schema wants programs that know version "
            f"{found.minimum}, this musterd knows {known}: upgrade musterd"
        )


def may(connection: Connection, schema: str, function: str, role: str = "node") -> None:
    """Refuse a user that may not do what is asked of it, such as `claim_1` of a node."""
    allowed = connection.execute(
        "SELECT bool_or(has_function_privilege(p.oid, 'EXECUTE')) FROM pg_proc p "
        "JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = %s AND p.proname = %s",
        (schema, function),
    ).fetchone()
    if allowed is None or not allowed[0]:
        raise EngineRefused(
            f"'{connection.info.user}' may not call {schema}.{function}: GRANT {schema}_{role} TO "
            f"{connection.info.user}"
        )


def warnings(connection: Connection) -> list[str]:
    """Say what is allowed and yet less than users may expect."""
    if setting(connection, "synchronous_standby_names"):
        return []
    return [
        "no synchronous standby is configured (synchronous_standby_names is empty): tasks survive "
        "a restart of PostgreSQL, and are lost with its disk or by a failover to another server"
    ]
