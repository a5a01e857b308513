"""Daemons for a benchmark that are nodes of a cluster, and the PostgreSQL that they share.

Everything is on loopback, over TCP, and durable: fsync is on. PostgreSQL has more shared memory and
a longer log between checkpoints than by default, as its manual advises; nothing else is changed.
"""

import secrets
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from fleet import Fleet

from musterd.supervisor.cluster.migrate import migrate
from musterd.supervisor.demo.database import Database

SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "4GB"}
LEASE = "30s"


class Server:
    """`with Server(folder) as server: url = server.cluster()`"""

    def __init__(self, folder: Path) -> None:
        self._database = Database(folder, SETTINGS)
        self._password = secrets.token_hex(16)
        self._numbers = count(1)

    def __enter__(self) -> Self:
        self._database.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._database.stop()

    @property
    def version(self) -> str:
        ((found,),) = self._database.execute("SHOW server_version")
        return str(found).split()[0]

    def empty(self) -> str:
        """Make a database, and a role that owns it; return its address."""
        name = f"bench{next(self._numbers)}"
        self._database.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{self._password}'")
        self._database.execute(f"CREATE DATABASE {name} OWNER {name}")
        port = self._database.port
        return f"postgresql://{name}:{self._password}@127.0.0.1:{port}/{name}"

    def cluster(self) -> str:
        """Make a database with the schema of a cluster; return its address, for nodes."""
        url = self.empty()
        name = name_of(url)
        migrate(self._database.url(name))
        self._database.execute(f"GRANT musterd_node TO {name}", name=name)
        return url

    def admin(self, url: str) -> str:
        """Return the address of the same database for its administrator."""
        return self._database.url(name_of(url))

    def drop(self, url: str) -> None:
        self._database.execute(f"DROP DATABASE {name_of(url)} WITH (FORCE)")

    def execute(self, url: str, query: str) -> list[tuple[object, ...]]:
        return self._database.execute(query, name=name_of(url))


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


def node(
    folder: Path, name: str, url: str, pools: dict[str, tuple[str, int]], lease: str = LEASE
) -> Fleet:
    """Return a daemon that is not started yet; its address of the database is in a file."""
    fleet = Fleet(folder, "full", pools)
    secret = folder.with_suffix(".url")
    secret.touch(mode=0o600)
    secret.write_text(url)
    fleet.set("cluster.url_file", secret)
    fleet.set("cluster.node", name)
    fleet.set("cluster.lease", lease)
    return fleet
