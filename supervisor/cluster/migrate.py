"""The schema in PostgreSQL: versions, and how a database gets the next one.

Each version is a folder `schema/NNNN` of SQL files, run in the order of their names, in one
transaction and under a lock. A version only adds (new tables, columns and functions; functions
have their version in their names), so that older nodes go on; what nobody uses any more is taken
away by a later version, which then raises `meta.minimum`.
"""

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from zlib import crc32

import msgspec
import psycopg
from msgspec import Struct
from psycopg import sql

from musterd.supervisor.cluster import checks
from musterd.supervisor.cluster.engine import ClusterPolicy, EngineRefused

SCHEMA = "musterd"  # where a cluster lives, unless its URL says otherwise
VERSION = 1  # that this code knows
LOCK = 7300  # class of advisory locks: this one for migrations, the next ones for functions
ROLES = ("submit", "node", "admin")

Connection = psycopg.Connection[tuple[object, ...]]


class Migration(Struct, frozen=True):
    """What a migration did."""

    before: int  # version of the schema; 0: there was none
    version: int
    roles: tuple[str, ...] = ()  # that it made


def migrate(url: str, schema: str = SCHEMA) -> int:
    """Bring the database to our version; return the version it had (0: none)."""
    return run(url, schema).before


def run(url: str, schema: str = SCHEMA) -> Migration:
    """Bring the database to our version; return what was done."""
    made: tuple[str, ...] = ()
    connection = checks.connect(url)
    with connection:
        checks.pooler(connection, url)
        checks.server(connection)
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s, 0)", (locks(schema),))
            found = checks.version(connection, schema)
            if found is None:
                made = _create(connection, schema)
            before = found.version if found is not None else 0
            for number in range(before + 1, VERSION + 1):
                _run(connection, schema, number)
    return Migration(before, max(before, VERSION), made)


def locks(schema: str) -> int:
    """Return the first class of the advisory locks of a cluster: others of a database have their
    own."""
    return LOCK if schema == SCHEMA else LOCK + 10 * (1 + crc32(schema.encode()) % 100_000_000)


def role(schema: str, name: str) -> str:
    """Return the role of PostgreSQL: its name begins with the schema's, for other clusters."""
    return f"{schema}_{name}"


def _create(connection: Connection, schema: str) -> tuple[str, ...]:
    """Create the schema and the roles that the server does not have; return these."""
    made = []
    try:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        for name in ROLES:
            known = "SELECT FROM pg_roles WHERE rolname = %s"
            if connection.execute(known, (role(schema, name),)).fetchone() is None:
                create = sql.SQL("CREATE ROLE {} NOLOGIN")
                connection.execute(create.format(sql.Identifier(role(schema, name))))
                made.append(role(schema, name))
    except psycopg.errors.InsufficientPrivilege as error:
        user = connection.info.user
        roles = ", ".join(role(schema, name) for name in ROLES)
        raise EngineRefused(
            f"'{user}' may not create the schema '{schema}' with its roles ({roles}): "
            f"{error.diag.message_primary}; migrate as a user with CREATEROLE that may create "
            f"schemas in this database"
        ) from None
    return tuple(made)


def _run(connection: Connection, schema: str, number: int) -> None:
    path = sql.SQL("SET LOCAL search_path = {}, pg_temp").format(sql.Identifier(schema))
    connection.execute(path)
    for text in _texts(number):
        connection.execute(_filled(text, schema), prepare=False)
    if number == 1:
        doc = msgspec.json.encode(ClusterPolicy())
        connection.execute("INSERT INTO meta (version, minimum) VALUES (1, 1)")
        connection.execute("SELECT apply_1(%s, -1)", (doc,))
    else:
        connection.execute("UPDATE meta SET version = %s", (number,))


def _texts(number: int) -> list[str]:
    folder: Traversable = files("musterd.supervisor.cluster") / "schema" / f"{number:04d}"
    names = sorted(each.name for each in folder.iterdir() if each.name.endswith(".sql"))
    return [(folder / name).read_text(encoding="utf-8") for name in names]


def _filled(text: str, schema: str) -> sql.SQL:
    """Put the names of schema and roles into a file, as identifiers and as strings; and locks."""
    text = text.replace("@schema_name@", _quoted(schema, "'"))
    text = text.replace("@schema@", _quoted(schema, '"'))
    text = re.sub(r"@lock_(\d)@", lambda found: str(locks(schema) + int(found[1])), text)
    for name in ROLES:
        text = text.replace(f"@{name}_name@", _quoted(role(schema, name), "'"))
        text = text.replace(f"@{name}_role@", _quoted(role(schema, name), '"'))
    return sql.SQL(text)


def _quoted(name: str, mark: str) -> str:
    return mark + name.replace(mark, mark * 2) + mark
