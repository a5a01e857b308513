"""The way from musterctl to the cluster's PostgreSQL, and errors that say what to do.

Where it is, the first that is given: --url, --url-file, --config, $MUSTERD_CLUSTER_URL, [cluster]
of the configuration that the daemon reads. The URL usually holds a password: it is never shown, and
one on the command line, where everybody can read it, is refused.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from musterd.ipc.errors import ConfigurationError, MusterdError
from musterd.supervisor.ctl.app import ANSWER_SECONDS, Settings

if TYPE_CHECKING:
    from musterd.supervisor.cluster.postgres import PostgresEngine

URL_VARIABLE = "MUSTERD_CLUSTER_URL"
INSTEAD = f"give --url-file FILE, --config FILE or ${URL_VARIABLE}"


class ClusterAway(MusterdError):
    """PostgreSQL does not answer."""


class ClusterUnusable(MusterdError):
    """No cluster is configured, or this database, user or musterd cannot be used for it."""


class ClusterRefused(MusterdError):
    """PostgreSQL refused the command."""


def needs_psycopg() -> None:
    """Raise ClusterUnusable if the extra is missing. Call this before its users are imported."""
    try:
        import psycopg  # noqa: F401 - only whether it can be imported
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        why = "psycopg is not installed" if missing else f"psycopg does not work: {error}"
        raise ClusterUnusable(f"{why}: pip install 'musterd[cluster]'") from None


def find_url(settings: Settings) -> str:
    """Return the URL of the cluster; ClusterUnusable says why there is none."""
    needs_psycopg()
    try:
        if settings.url:
            _refuse_password(settings.url)
            return settings.url
        if settings.url_file:
            return _of_file(settings.url_file)
        if not settings.config and os.environ.get(URL_VARIABLE, "").strip():
            return os.environ[URL_VARIABLE].strip()
        return configured_url(settings)
    except ConfigurationError as error:
        raise ClusterUnusable(str(error)) from None


def _refuse_password(url: str) -> None:
    from musterd.supervisor.cluster.checks import read_url
    from musterd.supervisor.cluster.engine import EngineRefused

    try:
        known = read_url(url)
    except EngineRefused as error:
        raise ClusterUnusable(f"--url: {error}") from None
    if known.get("password") or known.get("sslpassword"):
        raise ClusterUnusable(
            "--url has a password, which every user of this machine can read in the list of "
            f"processes: change it if others use this machine, and {INSTEAD}"
        )


def configured_url(settings: Settings) -> str:
    """Return the URL of [cluster] in the configuration, as the daemon finds it."""
    try:
        return _configured(settings)
    except ConfigurationError as error:
        raise ClusterUnusable(str(error)) from None


def _configured(settings: Settings) -> str:
    from pathlib import Path

    from musterd.supervisor.config.load import Invalid, load

    try:
        cluster = load([Path(each) for each in settings.config] or None).config.cluster
    except Invalid as error:
        # What is wrong elsewhere does not matter here.
        cluster = error.loaded.config.cluster
        if not cluster.wanted or "key 'cluster" in str(error):
            raise
    if not cluster.wanted:
        files = ", ".join(settings.config) or "the configuration"
        raise ClusterUnusable(f"there is no [cluster] in {files}: {INSTEAD}")
    try:
        return _of_keys(cluster.url, cluster.url_file, cluster.url_secret)
    except ConfigurationError as error:
        raise ClusterUnusable(f"{error}; or {INSTEAD}") from None


def _of_file(path: str) -> str:
    try:
        return _of_keys(url_file=path)
    except ConfigurationError as error:
        raise ClusterUnusable(str(error).replace("cluster.url_file", "--url-file", 1)) from None


def _of_keys(url: str = "", url_file: str = "", url_secret: str = "") -> str:
    from musterd.supervisor.settings.cluster_url import cluster_url

    return cluster_url(url, url_file, url_secret)


@contextmanager
def told() -> Iterator[None]:
    """Turn errors of the engine into those that musterctl has exit codes for."""
    import psycopg

    from musterd.supervisor.cluster.checks import is_barred
    from musterd.supervisor.cluster.engine import EngineAway, EngineError, EngineRefused

    try:
        yield
    except EngineAway as error:
        kind = ClusterUnusable if is_barred(str(error)) else ClusterAway
        raise kind(_line(error)) from None
    except EngineRefused as error:
        raise ClusterUnusable(_line(error)) from None
    except EngineError as error:
        if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
            raise ClusterUnusable(
                f"{_line(error)}: the user of the URL needs the role musterd_admin for this, or "
                "musterd_node to look: GRANT it, or name another user's URL with --url-file"
            ) from None
        raise ClusterRefused(_line(error)) from None
    except psycopg.Error as error:
        raise ClusterAway(f"PostgreSQL: {_line(error)}") from None


def _line(error: Exception) -> str:
    """Return the error of PostgreSQL, which may be several lines, as one."""
    return " ".join(str(error).split())


def _check(engine: "PostgresEngine", function: str, role: str) -> None:
    from musterd.supervisor.cluster.engine import EngineRefused

    try:
        engine.check(function, role)
    except EngineRefused as error:
        if role == "admin" and "may not call" in str(error):
            raise EngineRefused(f"{error}, or give an administrator's --url-file") from None
        raise


@contextmanager
def cluster_engine(
    settings: Settings, function: str = "nodes_1", role: str = "node", *, alone: int = 0
) -> "Iterator[PostgresEngine]":
    """Open the engine for a user that may call this function of the schema.

    `alone` is a number that one session has at a time, as for PostgresEngine.
    """
    url = find_url(settings)
    from musterd.supervisor.cluster.postgres import PostgresEngine

    patience = settings.timeout or ANSWER_SECONDS
    engine = PostgresEngine(url, alone=alone, patience_seconds=patience)
    with told():
        try:
            _check(engine, function, role)
            yield engine
        finally:
            engine.close()
