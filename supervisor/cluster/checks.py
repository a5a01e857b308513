"""What is looked at before a database is used: each refusal says what is wrong and what to do."""

import contextlib
import re
import select
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from musterd.supervisor.cluster.engine import EngineRefused, EngineUnreached

SERVER_MIN = 140000  # date_bin(), and multi-statement notifications that do not block
# A connection whose other end is gone without a word is found out in seconds; without these, the
# kernel waits for a quarter of an hour. What the URL says comes first.
CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "application_name": "musterd",
    "client_encoding": "UTF8",  # whatever PGCLIENTENCODING says
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
# The server answers, and lets nobody in before people have done something. libpq has no code for
# these; in other languages they look like a server that is away.
BARRED = re.compile(
    r"password authentication failed|no password supplied|does not exist|no pg_hba.conf entry"
    r"|is not permitted to log in|permission denied for database"
    r"|certificate verify failed|does not match host name|server does not support SSL"
)
ALONE_TRIES, ALONE_SECONDS = 50, 0.1  # for the end of a former session
KIND_BITS, LIFE_BITS = 4, 20  # of the number of a session
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
    """Open a connection that prepares no statements. No password is in the error."""
    read_url(url)
    try:
        given = conninfo_to_dict(url)
        return psycopg.connect(
            url,
            autocommit=True,
            prepare_threshold=None,
            **{key: value for key, value in CONNECTION.items() if key not in given},
        )
    except psycopg.OperationalError as error:
        does = "refuses the connection" if is_barred(str(error)) else "does not answer"
        raise EngineUnreached(f"PostgreSQL at {place(url)} {does}: {error}") from None


def is_barred(reason: str) -> bool:
    """Whether the server has refused a connection for a reason that stays."""
    return BARRED.search(reason) is not None


def is_stale(connection: Connection) -> bool:
    """Whether the server has said something on a connection on which nothing is under way.

    That is how it says that the connection ends; whatever else it may be, a new one does no harm.
    """
    try:
        return bool(select.select([connection.fileno()], [], [], 0)[0])
    except (psycopg.Error, OSError, ValueError):
        return True


def be_alone(connection: Connection, number: int) -> None:
    """End former sessions of this node, and what they are doing; be the only one of this number.

    The lowest KIND_BITS of a number tell what a session is for, the next LIFE_BITS the process.
    Former are the sessions of other processes of the node, and one of this process for the same
    purpose, whose connection was lost.

    The call of such a session may still be under way in the server. A submit that comes late would
    begin a task anew that was sent again meanwhile, and has ended; a late claim would hold tasks
    that nobody knows of; a late release would give back what was granted since.
    """
    own = "((l.classid::bigint << 32) | l.objid::bigint)"
    former = (
        "FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
        "AND d.datname = current_database() WHERE l.granted AND l.locktype = 'advisory' "
        f"AND l.objsubid = 1 AND l.pid <> pg_backend_pid() AND {own} >> %s = %s "
        f"AND ({own} = %s OR {own} >> %s <> %s)"
    )
    bits = LIFE_BITS + KIND_BITS
    which = (bits, number >> bits, number, KIND_BITS, number >> KIND_BITS)
    mine = False
    for _ in range(ALONE_TRIES):
        if not mine:
            row = connection.execute("SELECT pg_try_advisory_lock(%s)", (number,)).fetchone()
            mine = row is not None and bool(row[0])
        if mine and connection.execute(f"SELECT {former} LIMIT 1", which).fetchone() is None:
            return
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):  # of another user: wait
            connection.execute(f"SELECT pg_terminate_backend(l.pid) {former}", which)
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
    row = connection.execute(
        "SELECT current_setting('server_encoding'), current_setting('fsync'), "
        "current_setting('synchronous_commit')"
    ).fetchone()
    encoding, fsync, commit = row or ("", "", "")
    if encoding != "UTF8":
        raise EngineRefused(
            f"the database has the encoding {encoding}: a cluster needs UTF8; "
            f"CREATE DATABASE {connection.info.dbname} ENCODING 'UTF8' TEMPLATE template0"
        )
    if fsync == "off":
        raise EngineRefused(
            "fsync is off: PostgreSQL would lose acknowledged tasks when its machine fails; "
            "set fsync = on in postgresql.conf"
        )
    if commit == "off":
        raise EngineRefused(
            "synchronous_commit is off: PostgreSQL would acknowledge tasks that are not on disk; "
            "set synchronous_commit = on for this role, this database or in postgresql.conf"
        )


def pooler(connection: Connection, url: str) -> None:
    """Refuse a proxy that gives each transaction another connection: notifications and prepared
    statements need one of their own."""
    first = _pid(connection)
    if connection.info.backend_pid == first:
        return  # nobody in between
    with connect(url) as other:
        for _ in range(POOLER_TRIES):
            if _pid(other) == first or _pid(connection) != first:
                raise EngineRefused(
                    f"the proxy at {place(url)} pools transactions: two connections shared one "
                    f"server process; use its session mode (pgbouncer: pool_mode = session), or "
                    f"connect to PostgreSQL itself"
                )


def _pid(connection: Connection) -> object:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return row[0]


def version(connection: Connection, schema: str, role: str = "node") -> SchemaVersion | None:
    """Return the version of the schema, None if there is none; refuse one that is not ours.

    `role` is what the user should have: submit, node or admin.
    """
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
            f"'{connection.info.user}' may not use the cluster '{schema}': GRANT {schema}_{role} "
            f"TO {connection.info.user}"
        ) from None
    if row is None:
        raise EngineRefused(
            f"the schema '{schema}' has no version: its migration was never finished"
        )
    return SchemaVersion(int(str(row[0])), int(str(row[1])))


def usable(connection: Connection, schema: str, known: int, role: str = "node") -> None:
    """Refuse a schema that this code cannot work with. `known` is the version that it knows."""
    found = version(connection, schema, role)
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


def owner_warnings(connection: Connection) -> list[str]:
    """Say what the functions of the schema, which run as its owner, cannot see."""
    row = connection.execute(
        "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"
    ).fetchone()
    if row is not None and row[0]:
        return []
    user = connection.info.user
    return [
        f"'{user}' does not see the transactions of others, so nobody is told of one that keeps "
        f"PostgreSQL from cleaning up (cluster.vacuum_stalled): GRANT pg_read_all_stats TO {user}"
    ]
