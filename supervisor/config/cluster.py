"""The keys of [cluster]: the PostgreSQL that several machines share, and this node of them.

The URL usually holds a password. It is given by reference, `url_file` or `url_secret`; a `url` in
the configuration is never shown, and one with a password is refused in a file that everybody can
read.
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from msgspec import field

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.alerts import (
    Address,
    SecretName,
    exposure_of,
    file_problem,
)
from musterd.supervisor.config.kinds import AbsolutePath, ArgumentNames, Choice, Duration, Label
from musterd.supervisor.config.section import Conflict, Section
from musterd.supervisor.text.units import SECOND_NS, format_duration

# A shorter lease ends in a pause of PostgreSQL; after a longer one nobody waits for a lost node.
LEASE_NS_MIN = 5 * SECOND_NS
LEASE_NS_MAX = 3600 * SECOND_NS
NODE_LENGTH_MAX = 200

_URL = re.compile(r"postgres(ql)?://\S+")
_PASSWORDS = {"password", "sslpassword"}  # parameters of a URL of PostgreSQL
_SOURCES = ("url", "url_file", "url_secret")


class DatabaseUrl(Address, frozen=True):
    """A URL of PostgreSQL, or "" for none; written as a mark that differs from URL to URL."""

    def read(self, value: object) -> str:
        text = super().read(value)
        if text and not _URL.fullmatch(text):
            raise ValueError(
                'is not a URL of PostgreSQL: give one such as "postgresql://USER@HOST/NAME"'
            )
        return text


class ClusterConfig(Section, frozen=True):
    url: Annotated[str, DatabaseUrl()] = ""
    url_file: Annotated[str, AbsolutePath()] = ""
    url_secret: Annotated[str, SecretName()] = ""
    node: Annotated[str, Label(NODE_LENGTH_MAX)] = ""
    lease_ns: Annotated[int, Duration(LEASE_NS_MIN)] = field(name="lease", default=30 * SECOND_NS)
    pools: Annotated[tuple[str, ...], ArgumentNames()] = ()
    fence: Annotated[str, Choice(("continue", "stop"))] = "continue"

    @property
    def wanted(self) -> bool:
        """Whether this machine is a node of a cluster."""
        return bool(self.url or self.url_file or self.url_secret)

    def shares(self, pool: str) -> bool:
        """Whether the tasks of a pool come from the cluster."""
        return self.wanted and (not self.pools or pool in self.pools)

    def conflicts(self) -> Iterator[Conflict]:
        given = [key for key in _SOURCES if getattr(self, key)]
        if len(given) > 1:
            yield (given[1],), f"is given beside {given[0]}: remove one of them"
        elif not given and self != ClusterConfig():
            yield (), "has no database: give url_file, url_secret or url"
        if self.lease_ns > LEASE_NS_MAX:
            yield ("lease",), f'is longer than "{format_duration(LEASE_NS_MAX)}": lower it'


def exposed(cluster: ClusterConfig, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield where others can read the password in the URL, and what to do."""
    if cluster.url and _has_password(cluster.url):
        yield from exposure_of(origins.get("cluster.url", ""))


def _has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # it cannot be read, and may be anything
        return True
    return bool(parts.password or _PASSWORDS & parse_qs(parts.query).keys())


def check(cluster: ClusterConfig) -> None:
    """Raise ConfigurationError for what cannot work on this machine."""
    if not cluster.wanted:
        return
    if importlib.util.find_spec("psycopg") is None:
        raise ConfigurationError(
            "key 'cluster': psycopg is not installed: pip install 'musterd[cluster]'"
        )
    if cluster.url_file and (problem := file_problem(cluster.url_file)):
        raise ConfigurationError(f"key 'cluster.url_file': value \"{cluster.url_file}\": {problem}")
