"""What `musterctl cluster migrate|nodes|drain|forget` do."""

import msgspec
from msgspec import Struct
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from musterd.supervisor.api.rpc import NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import NodeList, NodeStatus
from musterd.supervisor.cluster import checks
from musterd.supervisor.cluster import migrate as migration
from musterd.supervisor.cluster.engine import NodeView
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.ctl.app import DONE, FAILED, Settings
from musterd.supervisor.ctl.cluster_link import (
    ClusterUnusable,
    cluster_engine,
    configured_url,
    find_url,
    told,
)
from musterd.supervisor.ctl.cluster_view import (
    ALIVE,
    DRAINING,
    drained,
    node_status,
    node_table,
)
from musterd.supervisor.ctl.output import emit, emit_json, warn
from musterd.supervisor.ctl.table import paper
from musterd.supervisor.text.printable import printable


class MigrationResult(Struct, frozen=True, kw_only=True):
    """Answer to `musterctl cluster migrate`."""

    schema: str
    before: int  # version; 0: there was none
    version: int
    roles: list[str] = []  # that were made
    grants: list[str] = []  # to type in PostgreSQL, before a daemon can use the cluster
    warnings: list[str] = []


# -- migrate ----------------------------------------------------------------------------------


def migrate(settings: Settings) -> int:
    """Bring the database to our version, and say what is left to do."""
    url = find_url(settings)
    with told():
        done = migration.run(url)
        with checks.connect(url) as connection:
            checks.usable(connection, migration.SCHEMA, migration.VERSION)
            result = MigrationResult(
                schema=migration.SCHEMA,
                before=done.before,
                version=done.version,
                roles=list(done.roles),
                grants=_grants(connection, _daemon_user(settings)),
                warnings=[*checks.warnings(connection), *checks.owner_warnings(connection)],
            )
    if settings.json:
        emit_json(msgspec.json.encode(result))
    else:
        emit(migrated(result, checks.place(url)))
    for warning in result.warnings:
        warn(warning)
    return DONE


def _daemon_user(settings: Settings) -> str:
    """Return the user in the URL of the configuration; "" if there is none."""
    try:
        return str(conninfo_to_dict(configured_url(settings)).get("user") or "")
    except ClusterUnusable:
        return ""


def _grants(connection: checks.Connection, user: str) -> list[str]:
    """Return what gives the daemon's user its role, unless that has it."""
    node = migration.role(migration.SCHEMA, "node")
    if user:
        known = connection.execute(
            "SELECT pg_has_role(r.oid, %s, 'MEMBER') FROM pg_roles r WHERE r.rolname = %s",
            (node, user),
        ).fetchone()
        if known is not None and known[0]:
            return []
        give = sql.SQL("GRANT {} TO {};").format(sql.Identifier(node), sql.Identifier(user))
        return [give.as_string(connection)]
    return [f"GRANT {node} TO NAME;"]


def migrated(result: MigrationResult, place: str) -> str:
    """Format the answer of `migrate`."""
    where = f"cluster '{result.schema}' at {place}"
    if result.before == 0:
        lines = [f"{where}: created, version {result.version}"]
    elif result.before < result.version:
        lines = [f"{where}: version {result.before} became {result.version}"]
    else:
        lines = [f"{where}: version {result.version}, nothing to do"]
    if result.roles:
        lines.append(f"roles made: {', '.join(result.roles)}")
    if result.grants:
        lines.append("type this in PostgreSQL, for the user in the URL of the nodes:")
        lines += [f"    {grant}" for grant in result.grants]
    if result.before == 0:
        lines.append(
            f"people who drain, forget, apply, purge or set breakers need {result.schema}_admin"
        )
    return printable("\n".join(lines), keep="\n")


# -- nodes ------------------------------------------------------------------------------------


def nodes(settings: Settings) -> int:
    """List the nodes."""
    with cluster_engine(settings, "nodes_1") as engine:
        found = [node_status(node) for node in engine.nodes()]
    if settings.json:
        emit_json(msgspec.json.encode(NodeList(nodes=found)))
    elif found:
        emit(node_table(found, paper()))
    else:
        emit("no node has joined yet: start a daemon with [cluster] in its configuration")
    return DONE


def drain(settings: Settings, name: str, *, undo: bool) -> int:
    """Let a node claim nothing more, or again."""
    with cluster_engine(settings, "drain_1", "admin") as engine:
        known = engine.drain(name, draining=not undo)
        node = _newest(engine, name)
    if not known or node is None:
        raise _no_such_node(name)
    if settings.json:
        emit_json(msgspec.json.encode(node_status(node)))
    else:
        emit(printable(drained(node_status(node), undo=undo)))
    return DONE


def forget(settings: Settings, name: str, *, force: bool) -> int:
    """Forget a node; a live one only by force."""
    with cluster_engine(settings, "forget_1", "admin") as engine:
        node = _newest(engine, name)
        if node is None:
            raise _no_such_node(name)
        forgotten = engine.forget(name, force=force)
        left = _newest(engine, name)
    if left is not None and node_status(left).state in (ALIVE, DRAINING):
        running = f"{left.claims} tasks that it runs" if left.claims else "what it runs"
        also = "; others of that name were forgotten" if forgotten else ""
        warn(
            f"{name} is alive{also}: stop its daemon, or forget it with --force: {running} "
            "would then run again elsewhere, and its results do not count"
        )
        return FAILED
    status: NodeStatus = node_status(node)
    if settings.json:
        emit_json(msgspec.json.encode(status))
    else:
        back = f"; {node.claims} tasks went back" if node.claims else ""
        emit(printable(f"{name}: forgotten{back}"))
    return DONE


def _newest(engine: PostgresEngine, name: str) -> NodeView | None:
    """Return the node of a name; of several the one that joined last."""
    found = [each for each in engine.nodes() if each.name == name]
    return max(found, key=lambda each: (each.alive, each.tenure), default=None)


def _no_such_node(name: str) -> RpcError:
    return RpcError(NO_SUCH_NAME, f"no such node: {name!r}: see musterctl cluster nodes")
