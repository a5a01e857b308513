"""Many sites in few lines: defaults and patterns of targets, templates of schedules.

Both work on the tree of merged sources, before it is checked: what they fill in is checked, shown
and told with its origin as if somebody had written it.

    [target_defaults]            every site has these keys, unless its own section has them
    [targets."*.example"]        sites whose names fit; the most specific section wins, key by key

    [[schedule]]                 one schedule for each row of a list or of a CSV file
    name = "{name}"
    foreach = "sites.csv"
    args = {url = "{url}"}
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from musterd.supervisor.config.sources import (
    Leaf,
    Table,
    Unusable,
    dotted,
    merge,
    one_line,
    read_text,
    shown,
)

FOREACH = "foreach"
ROWS_MAX = 10_000
COLUMNS_SHOWN_MAX = 20  # in a problem
SEPARATORS = ",;\t"  # of cells, the first that the first line has: spreadsheets differ by country
ROW = "row"  # a column that every table has: the number of the row

# {column}; doubled braces stand for one. Others that name no column stay, as in `[0-9]{3}`.
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")

Row = dict[str, Any]


# -- targets ----------------------------------------------------------------------------------


def is_pattern(target: str) -> bool:
    return "*" in target or "?" in target


def by_precision(patterns: Sequence[str]) -> list[str]:
    """Return the patterns, the most specific first: the one with the most letters."""
    return sorted(patterns, key=lambda each: (sum(map(each.count, "*?")) - len(each), each))


def fill_targets(tree: Table) -> Table:
    """Return the tree with what targets inherit from patterns and from [target_defaults]."""
    targets = tree.table("targets")
    if targets is None:
        return tree
    patterns = by_precision([name for name in targets.entries if is_pattern(name)])
    entries = dict(targets.entries)
    for name, own in targets.entries.items():
        below = tree.table("target_defaults") or Table(own.origin)
        for pattern in reversed(patterns):
            node = targets.entries[pattern]
            if pattern != name and isinstance(node, Table) and fnmatchcase(name, pattern):
                below = merge(below, node)
        if isinstance(own, Table):
            entries[name] = Table(own.origin, merge(below, own).entries)
    return Table(tree.origin, {**tree.entries, "targets": Table(targets.origin, entries)})


# -- schedules --------------------------------------------------------------------------------


def expand_schedules(tree: Table, problems: list[str]) -> Table:
    """Return the tree with a schedule for each row of every template."""
    schedules = tree.table("schedule")
    if schedules is None:
        return tree
    entries: dict[str, Leaf | Table] = {}
    for name, node in schedules.entries.items():
        made: Iterator[tuple[str, Leaf | Table]] = iter([(name, node)])
        if isinstance(node, Table) and FOREACH in node.entries:
            made = _schedules(name, node, problems)
        for each, schedule in made:
            if each in entries:
                path = ("schedule", each)
                why = "is there twice: give rows, or schedules, names of their own"
                problems.append(one_line(f"{schedule.origin}: key '{dotted(path)}': {why}"))
            entries[each] = schedule
    return Table(tree.origin, {**tree.entries, "schedule": Table(schedules.origin, entries)})


def _schedules(
    name: str, template: Table, problems: list[str]
) -> Iterator[tuple[str, Leaf | Table]]:
    source = template.entries[FOREACH]
    path = ("schedule", name, FOREACH)
    try:
        rows = list(_rows(source))
        if not _PLACE.search(name):
            raise Unusable('needs a name for each row: give name = "{COLUMN}"')
    except Unusable as error:
        problems.append(one_line(f"{source.origin}: key '{dotted(path)}': {error}"))
        return
    rest = Table(template.origin, {k: v for k, v in template.entries.items() if k != FOREACH})
    for origin, row in rows:
        try:
            yield str(_filled(name, row)), _filled_table(rest, row, origin, top=True)
        except Unusable as error:
            problems.append(one_line(f"{origin}: key '{dotted(path)}': {error}"))


def _rows(source: Leaf | Table) -> Iterator[tuple[str, Row]]:
    """Yield the rows, each with its origin and its number as a column."""
    value = source.value if isinstance(source, Leaf) else None
    found: Iterator[tuple[str, Row]]
    if isinstance(value, str):
        found = _csv_rows(value, source.origin)
    elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
        found = ((f"{source.origin} (row {n})", row) for n, row in enumerate(value, 1))
    else:
        raise Unusable('is neither a CSV file ("sites.csv") nor a list of tables ([{url = "..."}])')
    for number, (origin, row) in enumerate(found, 1):
        if number > ROWS_MAX:
            raise Unusable(f"has more than {ROWS_MAX} rows: split it")
        yield origin, {ROW: number, **row}


def _csv_rows(name: str, origin: str) -> Iterator[tuple[str, Row]]:
    path = Path(name)
    if not path.is_absolute():  # beside the file that names it
        if not Path(origin).suffix:
            raise Unusable(f"value {shown(name)} is not an absolute path: only files know others")
        path = Path(origin).parent / path
    try:
        for line, row in table_rows(read_text(path)):
            yield f"{path} line {line}", row
    except Unusable as error:
        raise Unusable(f"{path} {error}") from None


def table_rows(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of CSV text with the numbers of their lines; Unusable if it is none."""
    try:
        first = text.partition("\n")[0]
        sign = next((each for each in SEPARATORS if each in first), SEPARATORS[0])
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=sign, strict=True)
        head = [each.strip() for each in next(lines, [])]
        if not head or not all(head) or len(set(head)) < len(head):
            raise Unusable("needs a first line with the names of its columns, each once")
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            line = lines.line_num
            if len(cells) > len(head):
                raise Unusable(f"has more cells than columns in line {line}: quote commas")
            filled = [*cells, *[""] * (len(head) - len(cells))]
            yield line, {key: cell.strip() for key, cell in zip(head, filled, strict=True)}
    except csv.Error as error:
        raise Unusable(f"is not valid CSV: {error} (line {lines.line_num})") from None


def _filled_table(table: Table, row: Row, origin: str, *, top: bool = False) -> Table:
    entries: dict[str, Leaf | Table] = {}
    for key, node in table.entries.items():
        if isinstance(node, Table):
            entries[str(_filled(key, row))] = _filled_table(node, row, origin)
            continue
        value = _filled(node.value, row)
        if top and value == "" and node.value != "":
            continue  # an empty cell: the default holds
        where = node.origin if value == node.value else origin
        entries[str(_filled(key, row))] = Leaf(value, where)
    return Table(origin, entries)


def _filled(value: Any, row: Row) -> Any:
    """Return the value with the row's cells in their places."""
    if isinstance(value, list):
        return [_filled(each, row) for each in value]
    if isinstance(value, dict):
        return {_filled(key, row): _filled(each, row) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    whole = _PLACE.fullmatch(value)
    if whole is not None and whole[1]:
        return _cell(whole[1], row)
    return _PLACE.sub(lambda it: str(_cell(it[1], row)) if it[1] else it[0][0], value)


def _cell(column: str, row: Row) -> Any:
    if column not in row and not column.isidentifier():
        return f"{{{column}}}"
    if column not in row:
        known = ", ".join(list(row)[:COLUMNS_SHOWN_MAX])
        raise Unusable(f"has no column '{column}': known are {known}; write {{{{ for a brace")
    return row[column]
