"""Read configuration from files, environment and command line; each value keeps its origin.

Every source becomes a Table; `merge` lays one table over another, key by key. Names and values of
keys are checked elsewhere. Problems are collected as lines, not raised: users see all at once.
"""

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from msgspec import Struct

from musterd.supervisor.config.kinds import NESTING_MAX

ENVIRONMENT_PREFIX = "MUSTERD_"
# Far above any configuration written by people; a wrong path cannot fill the memory.
FILE_BYTES_MAX = 1024 * 1024
# Of tables in YAML, all together: merges of merges grow faster than any file.
MERGED_MAX = 1_000_000
# A problem is one line on a terminal: longer values are cut.
SHOWN_LENGTH_MAX = 80

_TOO_MANY_PARTS = f"the key has more than {NESTING_MAX} parts: shorten it"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

Key = tuple[str, ...]  # the parts of a dotted key


class Unusable(ValueError):
    """A source cannot be used; the message says why and what to do."""


class Leaf(Struct, frozen=True):
    value: Any
    origin: str
    text: str | None = None  # the text given, where the source has nothing but text


class Table(Struct):
    origin: str  # the first source that names it
    entries: dict[str, "Leaf | Table"] = {}

    def table(self, key: str) -> "Table | None":
        """Return the table under this key, or None."""
        node = self.entries.get(key)
        return node if isinstance(node, Table) else None


def merge(below: Table, above: Table) -> Table:
    """Return a new configuration: the values of `above`, and where it has none those of `below`.

    A value in the place of a section stays for the check to find: a section above it, from a
    variable or the profile, would hide a mistake.
    """
    hidden: dict[str, Leaf | Table] = {
        key: node
        for key, node in below.entries.items()
        if isinstance(node, Leaf) and isinstance(above.entries.get(key), Table)
    }
    return Table(below.origin, _laid_over(below, above).entries | hidden)


def _laid_over(below: Table, above: Table) -> Table:
    entries = dict(below.entries)
    for key, node in above.entries.items():
        old = entries.get(key)
        both = isinstance(node, Table) and isinstance(old, Table)
        entries[key] = _laid_over(old, node) if both else node  # type: ignore[arg-type]  # see both
    return Table(below.origin, entries)


def grow(value: Mapping[Any, Any], origin: str, depth: int = NESTING_MAX) -> Table:
    """Return the table of a parsed document; Unusable if it is not one."""
    if depth == 0:
        raise Unusable(f"tables are nested deeper than {NESTING_MAX} levels: flatten them")
    entries: dict[str, Leaf | Table] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise Unusable(f"the name {shown(key)} is not text: put it in quotes")
        entries[key] = (
            grow(item, origin, depth - 1) if isinstance(item, dict) else Leaf(item, origin)
        )
    return Table(origin, entries)


def plain(node: Leaf | Table, as_text: bool = False) -> Any:
    """Return the values without origins; `as_text` prefers the text given."""
    if isinstance(node, Table):
        return {key: plain(item, as_text) for key, item in node.entries.items()}
    if as_text and node.text is not None and not isinstance(node.value, str):
        return node.text
    return node.value


def dotted(path: Key) -> str:
    """Format a key as TOML."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else toml_text(part) for part in path)


def toml_text(text: str) -> str:
    """Format a TOML string; the escapes of JSON are those of TOML, except DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def shown(value: object) -> str:
    """Format a value for a problem: one line, not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a cycle
        text = f"of type {type(value).__name__}"
    text = one_line(text)
    return text if len(text) <= SHOWN_LENGTH_MAX else text[: SHOWN_LENGTH_MAX - 3] + "..."


def one_line(text: str) -> str:
    """Escape everything that does not belong on a line."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


# -- files ------------------------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unusable(f"the key {shown(twice)} is given twice in the same table: keep one")
    return table


def _read_toml(text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last_line = text.count("\n") + 1
        problem = str(error).replace("(at end of document)", f"(at line {last_line}, the end)")
        raise Unusable(f"not valid TOML: {problem}") from None


def _read_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Unusable(
            f"not valid JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
        ) from None


def _read_yaml(text: str) -> object:
    documents = read_documents(text)
    if len(documents) > 1:
        raise Unusable("not valid YAML: it has several documents, and one is read")
    return {} if documents in ([], [None]) else documents[0]  # nothing but comments


def read_documents(text: str) -> list[Any]:
    """Return the documents of YAML text; Unusable if it cannot be read."""
    try:
        import yaml
    except ImportError:
        raise Unusable(
            "YAML needs the package PyYAML: install musterd[yaml], or write TOML or JSON"
        ) from None

    class Loader(yaml.SafeLoader):
        """Refuse equal keys, of which PyYAML silently keeps the last, and merges without end."""

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self.checked: set[yaml.MappingNode] = set()
            self.depth = self.merged = 0

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Take in what a table merges (`<<`); this is called for that, too, before it grows."""
            if node not in self.checked:  # what it takes in may have keys of its own
                self.checked.add(node)
                keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                _unique([(key, None) for key in keys if key != "<<"])
            self.depth += 1
            super().flatten_mapping(node)
            self.depth -= 1
            if self.depth:  # what merges it is about to take this many
                self.merged += len(node.value)
            if self.merged > MERGED_MAX:
                raise Unusable(f"merges more than {MERGED_MAX} keys (<<): write them out")

    try:
        return list(yaml.load_all(text, Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise Unusable(f"not valid YAML: {error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise Unusable(f"not valid YAML: {error}") from None


# Lists of tables with names, [[schedule]]: kept as tables by name, so that other files, profiles
# and --set can change one of them.
NAMED_LISTS = ("schedule", "alerts")


def _by_name(document: dict[Any, Any], slips: list[str]) -> dict[Any, Any]:
    """Return the document with its named lists as tables; add their problems to `slips`."""
    found = dict(document)
    for key in NAMED_LISTS:
        if isinstance(document.get(key), list):
            found[key] = _named(key, document[key], slips)
    profiles = document.get("profiles")
    if isinstance(profiles, dict):
        found["profiles"] = {
            name: _by_name(table, slips) if isinstance(table, dict) else table
            for name, table in profiles.items()
        }
    return found


def _named(key: str, entries: list[Any], slips: list[str]) -> dict[str, Any]:
    """Return the entries by name. One without a name, or with a name in use, is called
    `entry-NUMBER`: its other problems are reported too."""
    tables: dict[str, Any] = {}
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            slips.append(f"key '{key}': entry {number} is not a table: write [[{key}]]")
            continue
        name: Any = entry.get("name")
        problem = ""
        if not isinstance(name, str) or not name:
            problem = f'entry {number} has no name: give it name = "..."'
        elif name in tables:
            problem = f"the name {shown(name)} is given twice: change one"
        if problem:
            slips.append(f"key '{key}': {problem}")
            name = f"entry-{number}"
        tables[name] = {field: value for field, value in entry.items() if field != "name"}
    return tables


READERS: dict[str, Callable[[str], object]] = {
    ".toml": _read_toml,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_json,
}


def read_file(path: Path, slips: list[str] | None = None) -> Table:
    """Return the table of a file; Unusable if there is none. With `slips`, missing names are only
    noted there."""
    reader = READERS.get(path.suffix)
    if reader is None:
        raise Unusable(f"unknown file extension: use {', '.join(READERS)}")
    try:
        document = reader(read_text(path))
    except RecursionError:
        raise Unusable("nested too deeply: flatten it") from None
    except Unusable:
        raise
    except ValueError as error:  # from the parsers: month 13, a number of 5000 digits
        raise Unusable(f"holds a value that cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise Unusable("is not a table of sections: write [section] and key = value")
    found: list[str] = []
    table = grow(_by_name(document, found), str(path))
    if slips is None and found:
        raise Unusable(found[0])
    if slips is not None:
        slips += [one_line(f"{path}: {slip}") for slip in found]
    return table


def read_text(path: Path) -> str:
    """Return what a file has; Unusable if it cannot be read."""
    return decoded(read_bytes(path))


def decoded(content: bytes) -> str:
    """Return UTF-8 text; Unusable if it is none."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Unusable(f"not UTF-8 text (at line {line}): save it as UTF-8") from None


def read_bytes(path: Path, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Return what a file has; Unusable if it cannot be read, or is longer."""
    try:
        return _content(path, bytes_max)
    except FileNotFoundError:
        raise Unusable("no such file: check the name, or create it") from None
    except OSError as error:
        raise Unusable(f"cannot be read: {error.strerror}") from None


def _content(path: Path, bytes_max: int) -> bytes:
    # Without blocking: opening a pipe would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Unusable("is not a regular file: give the name of a file")
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise Unusable(f"is larger than {bytes_max} bytes: is it the right file?")
    return content


def drop_ins(path: Path) -> list[Path]:
    """Return the files of `foo.d` beside `foo.toml`, in name order; OSError if unreadable."""
    folder = path.with_suffix(".d")
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    return [
        folder / name
        for name in names
        if Path(name).suffix in READERS and not name.startswith(".")  # files of editors
    ]


def read_files(
    files: Sequence[Path], default: Path, problems: list[str], slips: list[str] | None = None
) -> Table:
    """Merge all files and their drop-ins; without files the default one, if it exists."""
    merged = Table("built-in")
    for main in files or [default]:
        paths = [main] if files or os.path.lexists(main) else []
        try:
            paths += drop_ins(main)
        except OSError as error:
            problems.append(f"{main.with_suffix('.d')}: cannot be listed: {error.strerror}")
        for path in paths:
            try:
                merged = merge(merged, read_file(path, slips))
            except Unusable as error:
                problems.append(one_line(f"{path}: {error}"))
    return merged


# -- environment and command line --------------------------------------------------------------


def read_environment(environ: Mapping[str, str], problems: list[str]) -> Table:
    """Read MUSTERD_SECTION__KEY=value; names are lowered, except those of a pool's `env`."""
    merged = Table("environment")
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or "__" not in name:
            continue
        origin = f"environment {one_line(name)}"
        path = _environment_path(name.removeprefix(ENVIRONMENT_PREFIX))
        if not all(path):
            problems.append(f"{origin}: not a key: write {ENVIRONMENT_PREFIX}SECTION__KEY")
            continue
        try:
            merged = merge(merged, _single(path, environ[name], origin))
        except Unusable as error:
            problems.append(f"{origin}: {error}")
    return merged


def _environment_path(name: str) -> Key:
    parts = name.split("__")
    if [part.lower() for part in parts[:1] + parts[2:3]] == ["pools", "env"]:
        return (
            *(part.lower() for part in parts[:3]),
            *(["__".join(parts[3:])] if parts[3:] else []),
        )
    return tuple(part.lower() for part in parts)


def read_overrides(overrides: Sequence[str], problems: list[str]) -> Table:
    """Read --set section.key=value; parts of a key may be quoted as in TOML."""
    merged = Table("--set")
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            path = _override_path(key) if equals else ()
        except Unusable as error:
            problems.append(f"--set: {shown(key)}: {error}")
            continue
        if not path:
            problems.append(f"--set: {shown(override)} cannot be used: write section.key=value")
            continue
        try:
            merged = merge(merged, _single(path, text, "--set"))
        except Unusable as error:
            problems.append(f"--set: key '{dotted(path)}': {error}")
    return merged


def _override_path(key: str) -> Key:
    """Return the parts of a dotted key, () if it is none; Unusable if there are too many."""
    if not key.isprintable():
        return ()  # a line break would make it two lines
    try:
        node: Any = tomllib.loads(f"{key.strip()} = 0")
    except RecursionError:  # since Python 3.14, for a thousand parts
        raise Unusable(_TOO_MANY_PARTS) from None
    except ValueError:
        return ()
    path: list[str] = []
    while isinstance(node, dict):
        if len(node) != 1:
            return ()
        [(part, node)] = node.items()
        path.append(part)
    return tuple(path)


def _single(path: Key, text: str, origin: str) -> Table:
    """Return a table with one value: TOML if the text is TOML, else the text."""
    if len(path) > NESTING_MAX:
        raise Unusable(_TOO_MANY_PARTS)
    value: Any = text
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        document = {}
    # A line break in the text could have added keys; dates are not used anywhere.
    if document.keys() == {"value"} and not isinstance(document["value"], datetime | date | time):
        value = document["value"]
    node: Leaf | Table
    node = grow(value, origin) if isinstance(value, dict) else Leaf(value, origin, text)
    for part in reversed(path):
        node = Table(origin, {part: node})
    assert isinstance(node, Table), path
    return node
