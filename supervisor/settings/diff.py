"""Differences between two configurations, and what each means for a running daemon.

at once    holds from the reload on, and touches no worker
rolls      the pool's workers are replaced, one at a time
scales     workers are started or stopped
added      the pool starts           removed    the pool drains and goes
restart    cannot change while the daemon runs: the old value stays in force
"""

from typing import Any

from msgspec import Struct, structs

from musterd.supervisor.config.load import Loaded, flat, value_text
from musterd.supervisor.config.schema import Config
from musterd.supervisor.config.secrets import shown_value
from musterd.supervisor.config.section import Section
from musterd.supervisor.settings.policy import build_of

AT_ONCE, ROLLS, SCALES, RESTART = "at once", "rolls", "scales", "restart"
ADDED, REMOVED = "added", "removed"
BUILT_IN = "built-in"

# Everything else needs a restart: the daemon uses it once, when it starts.
_CHANGEABLE_SECTIONS = frozenset(
    {
        *("retry", "breaker", "classes", "target_defaults", "targets", "cache", "memory"),
        *("debounce", "executors", "monitor", "http", "events", "pools", "schedule", "alerts"),
        *("debug", "sessions"),
    }
)
_CHANGEABLE_KEYS = frozenset(
    {
        "supervisor.log_level",
        "supervisor.log_tasks",
        "supervisor.drain_timeout",
        "supervisor.stop_timeout",
        "supervisor.cleanup_timeout",
        "supervisor.cleanup",
        "supervisor.profile",
        "supervisor.redact",
        "supervisor.workers_max",
        "store.keep_results",
        "store.keep_results_max",
    }
)
_SIZES = frozenset({"size", "min", "max"})


class Change(Struct, frozen=True):
    """One key with its values; "" where a configuration does not have the key."""

    key: str
    old: str
    new: str
    effect: str


class PoolChange(Struct, frozen=True):
    name: str
    effect: str


class Difference(Struct, frozen=True):
    changes: list[Change]
    pools: list[PoolChange]
    in_force: Config  # the new one, with the old values of what needs a restart

    @property
    def restart(self) -> list[str]:
        return [change.key for change in self.changes if change.effect == RESTART]


def compare(old: Loaded, new: Loaded) -> Difference:
    pools = _pools(old.config, new.config)
    effects = {pool.name: pool.effect for pool in pools}
    before, after = flat(old.config), flat(new.config)
    changes = []
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) == after.get(key) and (key in before) == (key in after):
            continue
        if "." not in key:
            continue  # an empty section: the keys that it had are told
        # Of a table that is new or gone, only keys that somebody has written are worth a line.
        origin = (new if key in after else old).origins.get(key, "")
        if origin == BUILT_IN and (key in before) != (key in after):
            continue
        changes.append(
            Change(
                key,
                _shown(key, before, old.config),
                _shown(key, after, new.config),
                _effect(key, effects, old.config, new.config),
            )
        )
    return Difference(changes, pools, _in_force(old.config, new.config, changes))


def _pools(old: Config, new: Config) -> list[PoolChange]:
    changed = []
    for name in dict.fromkeys((*old.pools, *new.pools)):
        before, after = old.pools.get(name), new.pools.get(name)
        was_there = before is not None and before.enabled
        is_there = after is not None and after.enabled
        if not (was_there or is_there):
            continue
        rolls = was_there and is_there and _build(old, name) != _build(new, name)
        if before == after and not rolls:
            continue
        if not was_there or before is None:
            effect = ADDED
        elif not is_there or after is None:
            effect = REMOVED
        elif rolls:
            effect = ROLLS
        elif any(getattr(before, key) != getattr(after, key) for key in _SIZES):
            effect = SCALES
        else:
            effect = AT_ONCE
        changed.append(PoolChange(name, effect))
    return changed


def _effect(key: str, pools: dict[str, str], old: Config, new: Config) -> str:
    section, _, rest = key.partition(".")
    if section == "pools":
        name, _, field = rest.partition(".")
        effect = pools.get(name, AT_ONCE)  # a disabled pool has no effect
        if effect in (ADDED, REMOVED):
            return effect
        if field in _SIZES:
            return SCALES
        # A key that workers are made of changes the build.
        return ROLLS if effect == ROLLS and _makes_build(name, field, old, new) else AT_ONCE
    changeable = section in _CHANGEABLE_SECTIONS or key in _CHANGEABLE_KEYS
    return AT_ONCE if changeable else RESTART


def _makes_build(name: str, field: str, old: Config, new: Config) -> bool:
    """Whether this key alone would replace the workers."""
    top = field.partition(".")[0]
    before, after = old.pools[name], new.pools[name]
    fields = {each.encode_name: each.name for each in structs.fields(type(before))}
    attribute = fields[top]
    mixed = structs.replace(before, **{attribute: getattr(after, attribute)})
    return build_of(name, mixed, old) != build_of(name, before, old)


def _build(config: Config, name: str) -> str:
    return build_of(name, config.pools[name], config)


def _in_force(old: Config, new: Config, changes: list[Change]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for change in changes:
        if change.effect != RESTART:
            continue
        name, _, key = change.key.partition(".")
        section = getattr(old, name)
        if not isinstance(section, Section):
            whole[name] = section
            continue
        fields = {each.encode_name: each.name for each in structs.fields(type(section))}
        attribute = fields[key.partition(".")[0]]
        sections.setdefault(name, {})[attribute] = getattr(section, attribute)
    kept = {name: structs.replace(getattr(new, name), **keys) for name, keys in sections.items()}
    return structs.replace(new, **kept, **whole)


def _shown(key: str, values: dict[str, object], config: Config) -> str:
    if key not in values:
        return ""
    return shown_value(key.split("."), value_text(values[key]), config.supervisor.redact)
