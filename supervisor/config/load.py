"""Load the configuration: merge all sources, check them, show values with their origins.

Later wins: built-in defaults, the files with their drop-ins, the profile, the environment, --set.
`load` reports all problems in one ConfigurationError, one line each:

    FILE: key 'pools.parser.size': value "three" is not an integer: give a whole number such as 3
"""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config import alerts, bulk, cluster
from musterd.supervisor.config.kinds import Kind
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import (
    BUILT_IN_POOLS,
    BUILT_IN_PROFILES,
    INHERITED_KEYS,
    USUAL_POOLS,
    Config,
    SupervisorConfig,
    inherited,
)
from musterd.supervisor.config.secrets import shown_value
from musterd.supervisor.config.section import NAME, Conflict, Section
from musterd.supervisor.config.sources import (
    Key,
    Leaf,
    Table,
    Unusable,
    dotted,
    grow,
    merge,
    one_line,
    plain,
    read_environment,
    read_files,
    read_overrides,
    shown,
    toml_text,
)

DEFAULT_FILE = Path("/etc/musterd/musterd.toml")
BUILT_IN = "built-in"
NAME_SHOWN_MAX = 100  # of a section that somebody wants to add


S = TypeVar("S", bound=Section)


class Loaded(Struct, frozen=True):
    config: Config
    origins: dict[str, str]  # source of each value, by dotted key


class Invalid(ConfigurationError):
    """The configuration has problems, one line each; `loaded` is the part without problems."""

    def __init__(self, problems: list[str], loaded: Loaded) -> None:
        super().__init__("\n".join(dict.fromkeys(problems)))  # each once, in order
        self.loaded = loaded


def load(
    files: Sequence[Path] | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    default_file: Path = DEFAULT_FILE,
) -> Loaded:
    """Return the configuration from all sources; ConfigurationError lists all problems."""
    problems: list[str] = []
    slips: list[str] = []  # problems of files that could be read
    from_files = read_files(files or (), default_file, problems, slips)
    from_environment = read_environment(os.environ if environ is None else environ, problems)
    from_overrides = read_overrides(overrides, problems)
    unreadable = bool(problems)  # a missing key may stand in what could not be read
    problems += slips

    profiles = _take_profiles(from_files, problems)
    if "pools" not in from_files.entries:
        from_files = merge(grow({"pools": BUILT_IN_POOLS}, BUILT_IN), from_files)
    above = merge(from_environment, from_overrides)
    chosen = _choose_profile(profile, merge(from_files, above), profiles, problems)
    tree = from_files
    if chosen is not None:
        tree = merge(tree, _profile_table(chosen.value, tree, profiles))
        above = merge(above, Table(chosen.origin, {"supervisor": _profile_entry(chosen)}))
    tree = merge(tree, above)
    tree = merge(_usual_pools(tree), tree)
    tree = bulk.expand_schedules(bulk.fill_targets(tree), problems)

    for table in profiles.values():
        _Check(problems, whole=False).section(Config, table, ())
    check = _Check(problems, whole=not unreadable)
    config = check.section(Config, tree, ())
    if not isinstance(config, Config):
        check.conflicts(check.without_problems(tree, stand_ins=True), tree, ())
        config = check.without_problems(tree)
    for origin, name, problem in alerts.exposed(config.alerts, check.origins):
        check.say(origin, ("alerts", name, "url"), problem)
    for origin, problem in cluster.exposed(config.cluster, check.origins):
        check.say(origin, ("cluster", "url"), problem)
    if problems:
        raise Invalid(problems, Loaded(config, check.origins))
    origins = check.origins
    for name in config.pools:
        for own, source in INHERITED_KEYS.items():
            origins.setdefault(f"pools.{name}.{own}", origins[source])
    return Loaded(inherited(config), origins)


def load_part(cls: type[S], path: Path) -> tuple[S, list[str]]:
    """Return some sections of the configuration, as one file with its drop-ins has them.

    The other sections that it has are told, and not read. ConfigurationError lists all problems.
    """
    problems: list[str] = []
    tree = read_files([path], path, problems, problems)
    own = {field.encode_name for field in msgspec.structs.fields(cls)}
    known = {field.encode_name for field in msgspec.structs.fields(Config)} | {"profiles"}
    others = [name for name in tree.entries if name in known - own]
    entries = {name: node for name, node in tree.entries.items() if name not in others}
    tree = bulk.expand_schedules(Table(str(path), entries), problems)
    made = _Check(problems, whole=not problems).section(cls, tree, ())
    if problems or not isinstance(made, cls):
        raise ConfigurationError("\n".join(dict.fromkeys(problems)))
    return made, others


def load_entry(
    cls: type[S], name: str, values: Mapping[Any, Any], others: Callable[[S], Iterator[Conflict]]
) -> tuple[S | None, list[str]]:
    """Return one entry of a table of sections, checked as files are, and all its problems.

    `others` yields conflicts with other sections. None: there is no such section.
    """
    problems: list[str] = []
    noun = cls.__name__.removesuffix("Config").lower()
    origin = f"{noun} '{one_line(name)[:NAME_SHOWN_MAX]}'"
    if wrong := cls.name_problem(name):
        problems.append(f"{origin}: the name is {wrong}")
    try:
        node = grow(values, origin)
    except Unusable as error:
        return None, [*problems, f"{origin}: {error}"]
    check = _Check(problems, whole=True)
    made = check.section(cls, node, ())
    if not isinstance(made, cls):
        return None, problems
    for path, conflict in others(made):
        leaf, _ = _at(node, path)
        check.say(origin, path, check.with_value(path, leaf, conflict))
    return made, problems


def _usual_pools(tree: Table) -> Table:
    """Return the defaults of pools: the worker of a built-in name, and the number of workers at
    the start, within the bounds given."""
    found: dict[str, Leaf | Table] = {}
    pools = tree.table("pools")
    for name, pool in pools.entries.items() if pools is not None else ():
        if not isinstance(pool, Table):
            continue
        said = {key: plain(pool.entries[key]) for key in pool.entries.keys() & _SIZING}
        worker = said.get("worker", USUAL_POOLS.get(name, {}).get("worker"))
        size = USUAL_POOLS.get(name, {}).get("size", PoolConfig(worker="none").size)
        for usual in USUAL_POOLS.values():
            if usual["worker"] == worker:
                size = usual["size"]
        if isinstance(most := said.get("max"), int):
            size = min(size, most)
        if isinstance(least := said.get("min"), int):
            size = max(size, least)
        usual = {"size": size} if worker is None else {"worker": worker, "size": size}
        found[name] = Table(pool.origin, grow(usual, BUILT_IN).entries)
    return Table(tree.origin, {"pools": Table(pools.origin, found)} if pools is not None else {})


_SIZING = {"worker", "min", "max"}


# -- profiles ---------------------------------------------------------------------------------


def _take_profiles(tree: Table, problems: list[str]) -> dict[str, Table]:
    """Remove [profiles.NAME] from the tree; add the profile to the origin of its values."""
    node = tree.entries.pop("profiles", None)
    if node is None:
        return {}
    entries = node.entries if isinstance(node, Table) else {"profiles": node}
    profiles = {}
    for name, table in entries.items():
        if not isinstance(table, Table):
            problems.append(_problem(table.origin, ("profiles", name), "write [profiles.NAME]"))
        elif not NAME.fullmatch(name):
            give = "not a profile name: use lower-case letters, digits, - and _"
            problems.append(_problem(table.origin, ("profiles", name), give))
        else:
            profiles[name] = _relabelled(table, name)
            selects = (profiles[name].table("supervisor") or table).entries.get("profile")
            if selects is not None:
                problem = "a profile cannot choose a profile: remove it"
                problems.append(_problem(selects.origin, ("supervisor", "profile"), problem))
    return profiles


def _relabelled(table: Table, profile: str) -> Table:
    label = f"profile {profile} ({table.origin})"
    entries: dict[str, Leaf | Table] = {}
    for key, node in table.entries.items():
        if isinstance(node, Table):
            entries[key] = _relabelled(node, profile)
        else:
            entries[key] = Leaf(node.value, f"profile {profile} ({node.origin})")
    return Table(label, entries)


def _choose_profile(
    wanted: str | None, tree: Table, profiles: dict[str, Table], problems: list[str]
) -> Leaf | None:
    """Return the profile's name and origin; None if there is no such profile."""
    leaf: Leaf | Table = Leaf(SupervisorConfig().profile, BUILT_IN)
    if wanted is not None:
        leaf = Leaf(wanted, "--profile")
    elif section := tree.table("supervisor"):
        leaf = section.entries.get("profile", leaf)
    name = plain(leaf, as_text=True)
    if not isinstance(leaf, Leaf) or not isinstance(name, str):
        return None  # reported with all other wrong types
    known = sorted(BUILT_IN_PROFILES.keys() | profiles.keys())
    if name not in known:
        problem = f"value {shown(name)} is not a known profile: give one of {', '.join(known)}"
        problems.append(_problem(leaf.origin, ("supervisor", "profile"), problem))
        return None
    return Leaf(name, leaf.origin)


def _profile_entry(chosen: Leaf) -> Table:
    return Table(chosen.origin, {"profile": chosen})


def _profile_table(name: str, tree: Table, profiles: dict[str, Table]) -> Table:
    """Return the values of the profile, built-in and from files."""
    built_in = _relabelled(grow(BUILT_IN_PROFILES.get(name, {}), BUILT_IN), name)
    pools, existing = built_in.table("pools"), tree.table("pools")
    if pools is not None:
        names = existing.entries.keys() if existing else set()
        pools.entries = {pool: node for pool, node in pools.entries.items() if pool in names}
    return merge(built_in, profiles.get(name, Table(BUILT_IN)))


# -- checking ---------------------------------------------------------------------------------


def _problem(origin: str, path: Key, problem: str) -> str:
    return one_line(f"{origin}: key '{dotted(path)}': {problem}")


@cache
def _fields(cls: type[Section]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the keys of a section; finding them takes longer than checking their values."""
    return msgspec.structs.fields(cls)


def _kind(annotation: Any) -> Kind | None:
    """Return the kind of a key that holds a value; None for a section."""
    return next((mark for mark in get_args(annotation) if isinstance(mark, Kind)), None)


def _sections(annotation: Any) -> type[Section] | None:
    """Return the struct of a table of sections, `dict[str, Struct]`, with names of the user."""
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def _gathered(cls: type[Section], table: Table) -> Table:
    """Return the table with the sections beside its keys in a table of their own."""
    own = {field.encode_name for field in msgspec.structs.fields(cls)} - {cls.flattens}
    entries: dict[str, Leaf | Table] = {}
    named = Table(table.origin, {})
    for name, node in table.entries.items():
        (named.entries if isinstance(node, Table) and name not in own else entries)[name] = node
    return Table(table.origin, {**entries, cls.flattens: named})


def _at(table: Table, path: Key) -> tuple[Leaf | Table | None, str]:
    """Return the node at a path, and its origin or that of the nearest table above."""
    node: Leaf | Table | None = table
    origin = table.origin
    for part in path:
        node = node.entries.get(part) if isinstance(node, Table) else None
        origin = node.origin if node is not None else origin
    return node, origin


class _Check:
    """Turn a tree into structs; collect problems and origins."""

    def __init__(self, problems: list[str], *, whole: bool) -> None:
        self.problems = problems
        self.origins: dict[str, str] = {}
        self.made: dict[Key, Section] = {}  # by path
        self.whole = whole  # otherwise keys may be missing

    def section(self, cls: type[Section], node: Leaf | Table, path: Key) -> Section | None:
        """Return the struct of a table; None where it cannot be made."""
        if isinstance(node, Leaf):
            self.say(node.origin, path, f"value {_shown(path, node)} is not a table of keys")
            return None
        fields = _fields(cls)
        if cls.flattens:
            node = _gathered(cls, node)
        self.unknown(node, {field.encode_name for field in fields}, path)
        values = {}
        complete = True
        for field in fields:
            key = path if field.name == cls.flattens else (*path, field.encode_name)
            entry = node.entries.get(field.encode_name)
            kind, sections = _kind(field.type), _sections(field.type)
            found: Any = None
            if kind is None and sections is None:
                found = self.section(field.type, entry or Table(BUILT_IN), key)
            elif kind is None and sections is not None:
                found = self.named(sections, entry or Table(BUILT_IN), key)
            elif kind is not None and entry is not None:
                found = self.value(kind, entry, key)
            elif not field.required:
                if field.default is not None:
                    self.origins[dotted(key)] = BUILT_IN
                continue
            elif self.whole:
                self.say(node.origin, key, "is missing and has no default")
            complete = complete and found is not None
            values[field.name] = found
        if not complete:
            return None
        made = self.made[path] = cls(**values)
        self.conflicts(made, node, path)
        return made

    def conflicts(self, made: Section, node: Table, path: Key) -> None:
        """Report values that conflict."""
        for name, conflict in made.conflicts() if self.whole else ():
            leaf, origin = _at(node, name)
            self.say(origin, (*path, *name), self.with_value((*path, *name), leaf, conflict))

    def without_problems(self, tree: Table, *, stand_ins: bool = False) -> Config:
        """Return the configuration without the sections that have problems; `stand_ins` replaces
        named ones by placeholders, so that references to them stay valid."""
        found: dict[str, Any] = {}
        for field in msgspec.structs.fields(Config):
            sections = _sections(field.type)
            if sections is None:
                found[field.name] = self.made.get((field.encode_name,), field.type())
                continue
            table = tree.table(field.encode_name)
            names = table.entries if table is not None else ()
            entries = {name: self.made.get((field.encode_name, name)) for name in names}
            if stand_ins:
                entries = {name: made or _stand_in(sections) for name, made in entries.items()}
            found[field.name] = {name: made for name, made in entries.items() if made is not None}
        return Config(**found)

    def unknown(self, table: Table, known: set[str], path: Key) -> None:
        for key, node in table.entries.items():
            if key in known:
                continue
            near = difflib.get_close_matches(key, sorted(known), 1)
            if (*path, key) == ("profiles",):  # those in files were removed before
                problem = "profiles are made in files: write [profiles.NAME] there"
            elif near:
                problem = f"unknown key: did you mean '{near[0]}'?"
            else:
                problem = f"unknown key: known are {', '.join(sorted(known))}"
            self.say(node.origin, (*path, key), problem)

    def named(self, cls: type[Section], node: Leaf | Table, path: Key) -> dict[str, Section] | None:
        if isinstance(node, Leaf):
            self.say(node.origin, path, f"value {_shown(path, node)} is not a table of tables")
            return None
        if len(node.entries) > cls.entries_max:
            self.say(node.origin, path, f"more than {cls.entries_max} entries: remove some")
        found = {}
        for name, entry in node.entries.items():
            key = (*path, name)
            if wrong := cls.name_problem(name):
                self.say(entry.origin, key, wrong)
            found[name] = self.section(cls, entry, key)
        return {name: made for name, made in found.items() if made is not None}

    def value(self, kind: Kind, node: Leaf | Table, path: Key) -> Any:
        if isinstance(node, Table) and kind.holds_table:
            return self.values(kind, node, path)
        self.origins[dotted(path)] = node.origin
        if isinstance(node, Table):
            self.say(node.origin, path, "is a table: give it a single value")
        elif kind.holds_table:
            self.say(node.origin, path, f"value {_shown(path, node)} is not a table of values")
        else:
            return self.read(kind, node, path)
        return None

    def values(self, kind: Kind, table: Table, path: Key) -> dict[str, Any]:
        if not table.entries:
            self.origins[dotted(path)] = table.origin
        found = {}
        for name, node in table.entries.items():
            key = (*path, name)
            try:
                kind.check_name(name)
            except ValueError as error:
                self.say(node.origin, key, str(error))
            if isinstance(node, Table) and kind.nests:
                found[name] = self.values(kind, node, key)
            else:
                self.origins[dotted(key)] = node.origin
                found[name] = self.read(kind, node, key)
        return found

    def read(self, kind: Kind, node: Leaf | Table, path: Key) -> Any:
        try:
            return kind.read(plain(node, kind.takes_text))
        except ValueError as error:
            told = str(error) if kind.secret else self.with_value(path, node, str(error))
            self.say(node.origin, path, told)
            return None

    def with_value(self, path: Key, node: Leaf | Table | None, sentence: str) -> str:
        return f"value {_shown(path, node)} {sentence}" if isinstance(node, Leaf) else sentence

    def say(self, origin: str, path: Key, problem: str) -> None:
        self.problems.append(_problem(origin, path, problem))


def _stand_in(sections: type[Section]) -> Section | None:
    """Return a placeholder for a section with problems; None where nothing refers to it."""
    if sections is PoolConfig:
        return PoolConfig(worker="none", size=0)
    required = any(field.required for field in msgspec.structs.fields(sections))
    return None if required else sections()


def _shown(path: Key, leaf: Leaf) -> str:
    return shown_value(path, shown(leaf.value))


# -- showing ----------------------------------------------------------------------------------


def show(loaded: Loaded) -> str:
    """Return TOML that loads to the same configuration; each line ends with its origin."""
    lines: list[str] = []
    for path, table in _tables(loaded.config):
        lines += ["", f"[{dotted(path)}]"]
        for name, value in _flat(table):
            origin = loaded.origins[dotted((*path, *name))]
            lines.append(f"{dotted(name)} = {_toml(value)}  # {one_line(origin)}")
    lines += _profile_lines(loaded.config)
    return "\n".join(lines[1:]) + "\n"


def show_part(section: Section) -> str:
    """Return TOML that loads to the same sections, without what is built in."""
    lines: list[str] = []
    for path, said in _said(section):
        lines += ["", f"[{dotted(path)}]"]
        lines += [f"{dotted(key)} = {_toml(value)}" for key, value in said.items()]
    return "\n".join(lines[1:]) + "\n" if lines else ""


def flat_part(section: Section) -> dict[str, object]:
    """Return the keys of these sections that are not as built in; {} for an empty table."""
    keys: dict[str, object] = {}
    for path, said in _said(section):
        keys |= {dotted((*path, *key)): value for key, value in said.items()}
        if not said:
            keys[dotted(path)] = {}
    return keys


def _said(section: Section) -> Iterator[tuple[Key, dict[Key, object]]]:
    """Yield each table that somebody may have written, with what is not as built in."""
    built_in, written = _written(type(section)()), _written(section)
    for field in msgspec.structs.fields(type(section)):
        name, sections = field.encode_name, _sections(field.type)
        if sections is None:
            said = _unusual(written.get(name, {}), built_in.get(name, {}))
            if said:
                yield (name,), said
            continue
        for entry, table in written[name].items():
            yield (name, entry), _unusual(table, _defaults(sections))


def _unusual(table: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[Key, object]:
    return {key: value for key, value in _flat(table) if _at_path(usual, key) != value}


def _defaults(cls: type[Section]) -> dict[str, Any]:
    """Return what a table of these sections has where nothing is given."""
    needed = {each.name: "" for each in msgspec.structs.fields(cls) if each.required}
    written = _written(cls(**needed))
    return {key: value for key, value in written.items() if key not in needed}


def _at_path(table: Mapping[str, Any], path: Key) -> Any:
    found: Any = table
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def flat(config: Section) -> dict[str, object]:
    """Return every key that has a value, as a file would give it."""
    return {dotted(path): value for path, value in _flat(_written(config))}


def value_text(value: object) -> str:
    """Format a value as TOML."""
    return _toml(value)


def _tables(config: Config) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yield the table of each [header], also an empty table of sections."""
    written = _written(config)
    for field in msgspec.structs.fields(Config):
        table = written[field.encode_name]
        if _sections(field.type) and table:
            yield from (((field.encode_name, name), entry) for name, entry in table.items())
        else:
            yield (field.encode_name,), table


def _written(section: Section) -> dict[str, Any]:
    """Return the section as a file would give it, with every key."""
    written = {}
    for field in msgspec.structs.fields(type(section)):
        value, kind = getattr(section, field.name), _kind(field.type)
        if kind is not None and value is None:
            continue  # not given: inherited
        if kind is not None:
            written[field.encode_name] = kind.write(value)
        elif _sections(field.type):
            named = {name: _written(item) for name, item in value.items()}
            written |= named if field.name == section.flattens else {field.encode_name: named}
        elif inner := _written(value):  # an empty override is not written
            written[field.encode_name] = inner
    return written


def _flat(table: Mapping[str, Any], path: Key = ()) -> Iterator[tuple[Key, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, (*path, key))
        else:
            yield (*path, key), value


def _profile_lines(config: Config) -> list[str]:
    """Return lines that keep the profile, which files cannot override, from changing the above."""
    name = config.supervisor.profile
    settled = _written(config)
    lines = []
    for path, value in _flat(BUILT_IN_PROFILES.get(name, {})):
        found: Any = settled
        for part in path:
            found = found.get(part) if found is not None else None
        if found not in (None, value):
            lines.append(f"{dotted(path)} = {_toml(found)}")
    if name in BUILT_IN_PROFILES and not lines:
        return []
    return ["", f"[profiles.{name}]  # its values are in the lines above", *lines]


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return toml_text(value)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            items = ", ".join(f"{dotted((key,))} = {_toml(item)}" for key, item in value.items())
            return f"{{{items}}}"
        case _:
            return repr(value)
