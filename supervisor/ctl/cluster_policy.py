"""What `musterctl cluster apply|show` do: targets, classes, retries and schedules of all nodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from musterd.ipc.wire.node_messages import POLICY_BYTES_MAX
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    Engine,
    PolicyChanged,
    PolicyView,
)
from musterd.supervisor.config.load import flat_part, load_part, show_part, value_text
from musterd.supervisor.config.secrets import shown_value
from musterd.supervisor.config.shared import SharedConfig
from musterd.supervisor.ctl.app import DONE, Settings
from musterd.supervisor.ctl.cluster_link import ClusterRefused, cluster_engine
from musterd.supervisor.ctl.output import emit, emit_json, warn
from musterd.supervisor.settings.shared_policy import shared_config, shared_policy
from musterd.supervisor.text.printable import printable

NAMES_SHOWN_MAX = 10  # of schedules without a task


class SharedChange(Struct, frozen=True):
    """A key that was changed; a value is "" where the key is not set."""

    key: str
    old: str
    new: str


class ApplyResult(Struct, frozen=True, kw_only=True):
    """Answer to `musterctl cluster apply`."""

    version: int
    changes: list[SharedChange] = []
    ignored: list[str] = []  # sections and keys of the file that each machine has for itself
    warnings: list[str] = []


class ShowResult(Struct, frozen=True, kw_only=True):
    """Answer to `musterctl cluster show`: the keys as a file would have them."""

    version: int  # 0: nothing is applied
    keys: dict[str, Any] = {}


# -- apply ------------------------------------------------------------------------------------


def apply(settings: Settings, file: str) -> int:
    """Apply a file to the cluster, and say what changed."""
    config, others = load_part(SharedConfig, Path(file))
    policy = shared_policy(config)
    size = len(msgspec.json.encode(policy))
    if size > POLICY_BYTES_MAX:
        raise ClusterRefused(
            f"{file} makes a policy of {size} bytes, over the limit of {POLICY_BYTES_MAX}: pass "
            "smaller arguments to the schedules"
        )
    with cluster_engine(settings, "apply_1", "admin") as engine:
        result = applied(engine, policy, [*others, *_of_machines(config)])
    if settings.json:
        emit_json(msgspec.json.encode(result))
    else:
        emit(printable(apply_text(result), keep="\n"))
    for warning in result.warnings:
        warn(warning)
    return DONE


def applied(engine: Engine, policy: ClusterPolicy, ignored: list[str]) -> ApplyResult:
    """Apply a policy after the one that is there; ClusterRefused if somebody else was faster."""
    before = engine.policy()
    version = before.version
    if not version or before.policy != policy:
        try:
            version = engine.apply(policy, before.version)
        except PolicyChanged:
            raise ClusterRefused(
                "somebody else has just applied another policy, and nothing was changed: look at "
                "it with musterctl cluster show, then apply again"
            ) from None
    return ApplyResult(
        version=version,
        changes=list(_changes(before.policy, policy)),
        ignored=ignored,
        warnings=list(_warnings(engine, policy)),
    )


def _of_machines(config: SharedConfig) -> Iterator[str]:
    """Yield the keys of shared sections that pools have for themselves."""
    if config.cache.ttl_ns != type(config.cache)().ttl_ns:
        yield "cache.ttl"
    if config.debounce.window_ns != type(config.debounce)().window_ns:
        yield "debounce.window"


def _changes(old: ClusterPolicy, new: ClusterPolicy) -> Iterator[SharedChange]:
    before, after = _keys(old), _keys(new)
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            yield SharedChange(key, before.get(key, ""), after.get(key, ""))


def _keys(policy: ClusterPolicy) -> dict[str, str]:
    """Return what is written for a policy, as text; of one that cannot be read nothing."""
    try:
        written = flat_part(shared_config(policy))
    except ValueError:
        return {}
    return {key: shown_value(key.split("."), value_text(each)) for key, each in written.items()}


def _warnings(engine: Engine, policy: ClusterPolicy) -> Iterator[str]:
    tasks = {
        f"{pool.name}.{task.method}"
        for node in engine.nodes()
        for pool in node.pools
        for task in pool.tasks
    }
    config = shared_config(policy)
    lone = [name for name, each in config.schedule.items() if each.task not in tasks]
    if lone:
        names = ", ".join(lone[:NAMES_SHOWN_MAX])
        more = f" and {len(lone) - NAMES_SHOWN_MAX} more" if len(lone) > NAMES_SHOWN_MAX else ""
        yield (
            f"schedule {names}{more}: no node has such a task yet: the runs begin when one has, "
            "see musterctl cluster nodes"
        )


def apply_text(result: ApplyResult) -> str:
    """Format the answer of `apply`."""
    lines = []
    for change in result.changes:
        values = " -> ".join(value or "(not set)" for value in (change.old, change.new))
        lines.append(f"{change.key}: {values}")
    if result.changes:
        lines.append(f"version {result.version} is applied: nodes have it within seconds")
    else:
        lines.append(f"version {result.version} is applied: no changes")
    if result.ignored:
        lines.append(f"left to each machine: {', '.join(result.ignored)}")
    return "\n".join(lines)


# -- show -------------------------------------------------------------------------------------


def show(settings: Settings) -> int:
    """Show what is applied, as a file for `apply`."""
    with cluster_engine(settings, "policy_1") as engine:
        found = engine.policy()
    try:
        if settings.json:
            keys = flat_part(shared_config(found.policy))
            emit_json(msgspec.json.encode(ShowResult(version=found.version, keys=keys)))
        else:
            emit(printable(show_text(found), keep="\n"))
    except ValueError as error:
        raise ClusterRefused(f"policy {found.version}: {error}: upgrade musterd here") from None
    return DONE


def show_text(found: PolicyView) -> str:
    """Format the answer of `show`."""
    if not found.version:
        return (
            "# nothing is applied yet: each node has its own limits, and no schedule of the "
            "cluster runs.\n# musterctl cluster apply FILE"
        )
    written = show_part(shared_config(found.policy)).rstrip("\n")
    return f"# policy {found.version} of the cluster\n\n{written}".rstrip("\n")
