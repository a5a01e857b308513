"""Entries of a file of sites: what each becomes, what of it is lost, and what it is called.

A reader (import_csv, import_urlwatch, import_changedetection) turns a file into entries. An entry
with `problems` is refused, because its schedule would look at something else. An entry with
`notes` becomes a schedule that lacks something, which the user is told.
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from musterd.supervisor.config.schema import SCHEDULE_NAME_LENGTH_MAX
from musterd.supervisor.config.section import NAME
from musterd.supervisor.config.sources import Unusable, shown
from musterd.supervisor.core.model.policy import SCHEDULES_MAX

IMPORT_BYTES_MAX = 32 * 1024 * 1024  # of a file: 10,000 watches of changedetection.io
ENTRIES_MAX = SCHEDULES_MAX
TOO_MANY = f"has more than {ENTRIES_MAX} entries, and there can be no more schedules: shorten it"
# Of one entry: references in YAML can make a few lines as large as the memory.
VALUES_MAX = 2000
NESTING_MAX = 16

SECRET = "$secret"  # the key of a reference to one
PARSER, BROWSER = "parser.extract", "browser.extract"
CHANGED = "task.changed"
FIELD = "text"  # the name of what is selected, where the file has none
# All text of a page that people see, as a list.
WHOLE_PAGE = (
    "[]xpath://body//text()[normalize-space() and not(ancestor::script or ancestor::style"
    " or ancestor::noscript or ancestor::template)]"
)

# Keys of other programs whose values may be secret.
_HIDDEN = ("cookie", "header", "data", "body", "proxy", "password", "notification_url", "token")
_USER = re.compile(r"(?<=//)[^/@\s]*@")  # of a URL, with the password


class Note(Struct, frozen=True):
    """Something that the schedule does not have."""

    key: str
    value: str
    advice: str  # what to do instead


class Entry(Struct):
    """One site of the file, and the schedule it becomes."""

    place: str  # "line 3"
    title: str = ""  # what the file calls it
    url: str = ""
    name: str = ""  # of the schedule
    keys: dict[str, Any] = {}
    paused: bool = False
    usual_every: str = ""  # the file's interval for entries without one of their own
    notes: list[Note] = []
    problems: list[str] = []

    def note(self, key: str, value: object, advice: str) -> None:
        self.notes.append(Note(key, safe(key, value), advice))

    def refuse(self, key: str, value: object, why: str) -> None:
        self.problems.append(f"{key} = {safe(key, value)} {why}")

    def check_url(self) -> None:
        """Refuse an address that no task can open."""
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            usable = False
        if not self.url:
            self.problems.append("it has no url: give one")
        elif not usable:
            self.refuse("url", self.url, "is no address of a page: give http:// or https://")

    def headers(self, given: object) -> dict[str, dict[str, str]]:
        """Return the argument for headers of requests; refuse what is no table."""
        if given and not isinstance(given, dict):
            self.refuse("headers", given, "are no table of names and values")
        if not isinstance(given, dict) or not given:
            return {}
        return {"headers": {str(name): str(value) for name, value in given.items()}}


def safe(key: str, value: object) -> str:
    """Format a value for a person, unless it may be secret."""
    if any(word in key.lower() for word in _HIDDEN):
        return "(not shown)"
    return shown(_USER.sub("", value) if isinstance(value, str) else value)


def secrets_in(value: object) -> set[str]:
    """Return the names of the secrets that arguments refer to."""
    if isinstance(value, dict) and value.keys() == {SECRET}:
        return {str(value[SECRET])}
    if isinstance(value, dict):
        return set().union(*map(secrets_in, value.values()))
    return set().union(*map(secrets_in, value)) if isinstance(value, list) else set()


def check_size(value: object, place: str) -> None:
    """Raise Unusable for a value that is too large or too deep to be worked with."""
    left = VALUES_MAX

    def count(node: object, depth: int) -> None:
        nonlocal left
        left -= 1
        if left < 0 or depth > NESTING_MAX:
            raise Unusable(
                f"{place} has more than {VALUES_MAX} values, or {NESTING_MAX} levels: shorten it"
            )
        children: Iterable[object] = ()
        if isinstance(node, dict):
            children = [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple, set)):
            children = node
        for each in children:
            count(each, depth + 1)

    count(value, 0)


def note_rest(
    entry: Entry, given: dict[str, Any], known: Iterable[str], advice: dict[str, str]
) -> None:
    """Note all keys that have a value and no meaning here."""
    for key in sorted(given.keys() - set(known)):
        if given[key]:
            entry.note(key, given[key], advice.get(key, "schedules have nothing like it"))


# -- names ------------------------------------------------------------------------------------


def give_names(entries: Iterable[Entry]) -> None:
    """Name each entry by its title, or else by its host; each name is used once."""
    used: set[str] = set()
    counts: dict[str, int] = {}
    for entry in entries:
        base = slug(entry.title) or slug(_host(entry.url)) or "site"
        entry.name = base
        while entry.name in used:
            counts[base] = counts.get(base, 1) + 1
            suffix = f"-{counts[base]}"
            entry.name = base[: SCHEDULE_NAME_LENGTH_MAX - len(suffix)].rstrip("-") + suffix
        used.add(entry.name)
        if entry.name != base and entry.title:
            entry.note("name", entry.title, f"is there twice: this one is called {entry.name}")


def slug(text: str) -> str:
    """Return a name for a schedule, or "" where too little of the text is left in it."""
    if NAME.fullmatch(text) and len(text) <= SCHEDULE_NAME_LENGTH_MAX:
        return text
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    found = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if 2 * len(found) < sum(map(str.isalnum, text)):
        return ""  # of another script: two names might be the same
    if found and not found[0].isalpha():
        found = f"site-{found}"
    return found[:SCHEDULE_NAME_LENGTH_MAX].rstrip("-")


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").removeprefix("www.")
    except ValueError:
        return ""
