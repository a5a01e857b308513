"""Templates of messages: `title` and `body` of [[alerts]], with placeholders such as {summary}."""

import string
from collections.abc import Mapping

PLACEHOLDERS = {
    "after": "the new result",
    "alert": "the name of the alert",
    "at": "when it happened",
    "before": "the result before",
    "diff": "what differs, line by line",
    "event": "task.changed, breaker.open, ...",
    "host": "the name of this machine",
    "number": "the number of the result in `musterctl history`",
    "schedule": "the name of the schedule",
    "subject": "the schedule, site, worker or pool",
    "summary": "what has changed, or what is wrong, in one line",
    "task": "the id of the run",
    "url": "the argument `url` of the run",
}


def names_in(template: str) -> frozenset[str]:
    """Return the placeholders of a template; ValueError for one that is unknown or no name."""
    found = set()
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        raise ValueError("has a single { or }: write {{ or }} for the sign itself") from None
    for _, name, wish, conversion in parts:
        if name is None:
            continue
        if name not in PLACEHOLDERS or wish or conversion:
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + wish if wish else ''}"
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            raise ValueError(f"has the unknown placeholder {{{shown[:40]}}}: known are {known}")
        found.add(name)
    return frozenset(found)


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template, which names_in() has accepted, with these values."""
    return template.format_map(values)
