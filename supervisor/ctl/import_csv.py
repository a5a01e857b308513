"""Sites in a CSV file: a first line with the names of the columns, then a line for each site.

    url                       the page (required)
    name                      of the schedule; else made of the host
    select, select.FIELD      a selector, or one for each field; else all text of the page
    args.NAME                 any other argument of the task
    paused                    true, or false
    every, task, notify, ...  any other key of [[schedule]]

An empty cell is not given.
"""

from typing import Any

from musterd.supervisor.config.bulk import table_rows
from musterd.supervisor.config.sources import Unusable
from musterd.supervisor.ctl.arguments import value_of
from musterd.supervisor.ctl.import_entries import (
    BROWSER,
    CHANGED,
    ENTRIES_MAX,
    FIELD,
    PARSER,
    TOO_MANY,
    WHOLE_PAGE,
    Entry,
    check_size,
)

# Keys whose values are text, also where they look like a number.
_TEXTS = ("task", "cron", "timezone", "priority", "catch_up", "target", "key", "notify", "session")
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_csv(text: str) -> list[Entry]:
    """Return the sites of the file; Unusable if it has no such table."""
    entries: list[Entry] = []
    for line, row in table_rows(text):
        if "url" not in row:
            raise Unusable("needs a column 'url' in its first line")
        if len(entries) == ENTRIES_MAX:
            raise Unusable(TOO_MANY)
        entries.append(_entry(f"line {line}", {key: cell for key, cell in row.items() if cell}))
    return entries


def _entry(place: str, row: dict[str, str]) -> Entry:
    entry = Entry(place, row.pop("name", ""), row.get("url", ""))
    entry.check_url()
    keys: dict[str, Any] = {"task": PARSER, "notify": CHANGED}
    args: dict[str, Any] = {}
    select: dict[str, str] = {}
    for column, cell in row.items():
        first, _, rest = column.partition(".")
        if column == "url":
            args["url"] = cell
        elif column == "select":
            value = value_of(cell)
            select.update(value if isinstance(value, dict) else {FIELD: cell})
        elif first == "select" and rest:
            select[rest] = cell
        elif first == "args" and rest:
            args[rest] = value_of(cell)
        elif column == "paused":
            if cell.lower() not in _FLAGS:
                entry.refuse("paused", cell, "is neither true nor false")
            entry.paused = _FLAGS.get(cell.lower(), False)
        else:  # the daemon says whether there is such a key
            keys[column] = cell if column in _TEXTS else value_of(cell)
    if not select and keys["task"] in (PARSER, BROWSER):
        select = {FIELD: WHOLE_PAGE}
    given = keys.pop("args", {})
    if isinstance(given, dict):
        args = {**given, **args}
    else:
        entry.refuse("args", given, "is no JSON object")
    keys["args"] = args | ({"select": select} if select else {})
    check_size(keys, place)
    entry.keys = keys
    return entry
