"""What `musterctl import` does: read the file, have the daemon store its schedules, tell the rest.

A request has as many schedules as cost the daemon's loop some milliseconds; one connection takes
them all.
"""

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.ipc.wire.schedule_messages import PUT_BYTES_MAX, PUTS_MAX
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import SchedulesPut
from musterd.supervisor.config.sources import Unusable, decoded, one_line, read_bytes, shown
from musterd.supervisor.ctl.app import DONE, FAILED, Settings, connect
from musterd.supervisor.ctl.import_changedetection import read_changedetection
from musterd.supervisor.ctl.import_csv import read_csv
from musterd.supervisor.ctl.import_entries import (
    IMPORT_BYTES_MAX,
    Entry,
    Note,
    give_names,
    safe,
    secrets_in,
)
from musterd.supervisor.ctl.import_urlwatch import read_urlwatch
from musterd.supervisor.ctl.output import emit, emit_json, warn
from musterd.supervisor.text.printable import printable

DEFAULT_EVERY = "1h"
WIDTH = 80
_WARNING_WIDTH = WIDTH - len("musterctl: ")
_KINDS = (".csv", ".yaml", ".yml", ".json", ".zip")


class Failed(MusterdError):
    """The file cannot be used; nothing was made of it."""


class Made(Struct, frozen=True):
    entry: str  # its place in the file
    name: str
    keys: dict[str, Any]
    paused: bool = False
    notes: list[Note] = []


class Refused(Struct, frozen=True):
    entry: str
    name: str
    problems: list[str]


class Report(Struct, frozen=True):
    """What --json prints."""

    dry_run: bool
    made: list[Made]
    refused: list[Refused]


def import_sites(
    settings: Settings, file: str, every: str | None, *, replace: bool, dry_run: bool
) -> int:
    """Make the schedules, tell what was lost or refused, and return the exit code."""
    path = Path(file)
    if path.suffix.lower() not in _KINDS:
        why = f"{file!r}: its name must end in {', '.join(_KINDS)}"
        raise click.UsageError(why, click.get_current_context())
    entries = _read(path)
    for entry in entries:
        if "every" not in entry.keys and "cron" not in entry.keys:
            entry.keys["every"] = every or entry.usual_every or DEFAULT_EVERY
    _put(settings, entries, replace=replace, dry_run=dry_run)
    if settings.json:
        emit_json(msgspec.json.encode(_report(entries, dry_run=dry_run)))
    else:
        _tell(entries, dry_run=dry_run)
    return FAILED if any(entry.problems for entry in entries) else DONE


def _read(path: Path) -> list[Entry]:
    """Return the entries of the file, each with a name; Failed if there are none."""
    try:
        content = read_bytes(path, IMPORT_BYTES_MAX)
        match path.suffix.lower():
            case ".csv":
                entries = read_csv(decoded(content))
            case ".yaml" | ".yml":
                entries = read_urlwatch(decoded(content))
            case _:
                entries = read_changedetection(content)
        if not entries:
            raise Unusable("has no entries: is it the right file?")
    except Unusable as error:
        raise Failed(one_line(f"{path}: {error}")) from None
    give_names(entries)
    return entries


# -- requests ---------------------------------------------------------------------------------


def _put(settings: Settings, entries: list[Entry], *, replace: bool, dry_run: bool) -> None:
    """Have the daemon store the schedules, and note those that it refuses."""
    by_name = {entry.name: entry for entry in entries if not entry.problems}
    portions = list(_portions(by_name.values()))
    if not portions:
        return
    stored = 0
    with connect(settings, waits=True) as connection:
        for portion in portions:
            asked = rpc.PutSchedules(portion, replace=replace, dry_run=dry_run)
            try:
                answer = connection.get(asked, SchedulesPut)
            except MusterdError:
                if stored:
                    warn(f"{stored} schedules are stored: import again, with --replace")
                raise
            for refused in answer.refused:
                own = f"schedule '{refused.name}': "
                lines = [line.removeprefix(own) for line in refused.why.splitlines()]
                by_name[refused.name].problems += lines
            stored += 0 if dry_run else len(portion) - len(answer.refused)


def _portions(entries: Iterable[Entry]) -> Iterator[list[rpc.NewSchedule]]:
    """Yield as many schedules as a request may have; each costs the daemon's loop some time."""
    portion: list[rpc.NewSchedule] = []
    size = 0
    for entry in entries:
        put = rpc.NewSchedule(entry.name, entry.keys, entry.paused)
        try:
            length = len(msgspec.json.encode(put))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            entry.problems.append(f"its values cannot be sent: {error}")
            continue
        if length > PUT_BYTES_MAX:
            entry.problems.append(f"it takes {length} bytes, and {PUT_BYTES_MAX} at most")
            continue
        if portion and (len(portion) == PUTS_MAX or size + length > PUT_BYTES_MAX):
            yield portion
            portion, size = [], 0
        portion.append(put)
        size += length
    if portion:
        yield portion


# -- output -----------------------------------------------------------------------------------


def _report(entries: list[Entry], *, dry_run: bool) -> Report:
    made = [
        Made(each.place, each.name, each.keys, each.paused, each.notes)
        for each in entries
        if not each.problems
    ]
    refused = [Refused(each.place, each.name, each.problems) for each in entries if each.problems]
    return Report(dry_run, made, refused)


def _tell(entries: list[Entry], *, dry_run: bool) -> None:
    refused = 0
    for entry in entries:
        who = f"{entry.place} ({entry.name})"
        if entry.problems:
            refused += 1
            for problem in entry.problems:
                warn(_wrapped(f"{who}: refused: {problem}", _WARNING_WIDTH))
            continue
        if dry_run:
            emit("\n".join(_shown(entry)))
        for note in entry.notes:
            text = f"{who}: {note.key} = {note.value} is lost: {note.advice}"
            warn(_wrapped(text, _WARNING_WIDTH))
    made = len(entries) - refused
    verbs = ("would make", "refuse") if dry_run else ("made", "refused")
    noted = sum(bool(entry.notes and not entry.problems) for entry in entries)
    lacking = f"; {noted} of them lack something" if noted else ""
    plural = "" if made == 1 else "s"
    emit(f"{verbs[0]} {made} schedule{plural}{lacking}, {verbs[1]} {refused}")


def _shown(entry: Entry) -> Iterator[str]:
    """Yield the lines that show a schedule before it is made."""
    keys = entry.keys
    when = f"every {keys['every']}" if "every" in keys else keys["cron"]
    state = ", paused" if entry.paused else ""
    yield printable(_cut(f"{entry.name}: {keys['task']}, {when}{state}"))
    yield printable(_cut(f"    {safe('url', entry.url)[1:-1]}"))
    select = keys["args"].get("select")
    for field, selector in select.items() if isinstance(select, dict) else ():
        yield printable(_cut(f"    {field}: {selector}"))
    for name in sorted(keys["args"].keys() - {"url", "select"}):
        yield printable(_cut(f"    args.{name} = {safe(name, keys['args'][name])}"))
    if secrets := sorted(secrets_in(keys["args"])):
        yield printable(_cut(f"    is given the secrets: {', '.join(secrets)}"))
    for key in sorted(keys.keys() - {"task", "every", "cron", "args"}):
        yield printable(_cut(f"    {key} = {shown(keys[key])}"))


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(printable(text), width, subsequent_indent="    "))
