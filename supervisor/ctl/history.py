"""musterctl changes and musterctl history: results of schedules, and what has changed."""

from collections.abc import Iterable, Iterator
from typing import Any

import click
import msgspec
from msgspec import structs

from musterd.ipc.watching.difference import FieldChange, changed_fields, one_line, unified_diff
from musterd.supervisor.api import rpc
from musterd.supervisor.api.history import ChangeItem, ChangeList, HistoryItem, HistoryList
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, Settings, ask, command, completes, connect, on_cluster
from musterd.supervisor.ctl.output import emit
from musterd.supervisor.ctl.streams import follow_events
from musterd.supervisor.ctl.table import BELOW, BELOW_LINES_MAX, Paper, paper
from musterd.supervisor.text.fitting import wrapped
from musterd.supervisor.text.printable import printable, printable_json

CHANGED = "task.changed"


class Change(ChangeItem, frozen=True, kw_only=True):
    """A line of `musterctl --json changes`."""

    fields: dict[str, FieldChange]  # that differ, where both results are objects
    diff: str


_limit = click.option(
    "-n",
    "limit",
    type=click.IntRange(1, rpc.LIST_MAX),
    metavar="N",
    default=20,
    show_default=True,
    help="Number of the newest.",
)


@command(
    "changes",
    click.argument("name", required=False, default="", shell_complete=completes("schedules")),
    _limit,
    click.option("-f", "--follow", is_flag=True, help="Keep printing until Ctrl-C."),
    click.option("--diff", is_flag=True, help="Show what differs, line by line."),
    on_cluster,
)
def changes(settings: Settings, name: str, limit: int, follow: bool, diff: bool) -> int:
    """Show what has changed: the results of schedules with notify, oldest first."""
    shown: dict[tuple[str, str, int], None] = {}

    def told(item: ChangeItem) -> Iterable[str]:
        key = (item.schedule, item.task, item.number)
        if key not in shown:
            shown[key] = None
            yield _change(item, as_json=settings.json, diff=diff)

    def listed() -> Iterator[str]:
        with connect(settings) as connection:
            answer = connection.request(rpc.ListChanges(name=name, limit=limit))
        for item in msgspec.json.decode(answer, type=ChangeList).changes:
            yield from told(item)

    def line_of(fields: dict[str, Any]) -> Iterable[str]:
        if fields.get("event") != CHANGED or (name and fields.get("schedule") != name):
            return ()
        return told(_item(fields))

    if follow:  # listed when the stream has begun: nothing is missed in between
        return follow_events(settings, [CHANGED], listed, line_of)
    for text in listed():
        if not emit(text):
            return DONE
    if not shown and not settings.json:
        emit("no changes yet")
    return DONE


@command(
    "history",
    click.argument("name", shell_complete=completes("schedules")),
    _limit,
    on_cluster,
)
def history(settings: Settings, name: str, limit: int) -> int:
    """Show the results of a schedule that differ, oldest first; a change has a mark."""
    found = ask(settings, rpc.ShowHistory(name=name, limit=limit), HistoryList)
    if not settings.json:
        emit("\n".join(_entry(each) for each in found.entries) or "no results yet")
    return DONE


def _item(fields: dict[str, Any]) -> ChangeItem:
    """Return the change that an event tells."""
    return ChangeItem(
        schedule=fields.get("schedule", ""),
        at=fields.get("changed_at") or fields.get("at", 0.0),
        task=fields.get("task", ""),
        number=fields.get("number", 0),
        digest=fields.get("digest", ""),
        summary=fields.get("summary", ""),
        before=fields.get("before"),
        after=fields.get("after"),
        cut="before" not in fields or "after" not in fields,
        pool=fields.get("pool", ""),
        again=fields.get("again", False),
    )


def _change(item: ChangeItem, *, as_json: bool, diff: bool) -> str:
    both = item.before is not None and item.after is not None
    if as_json:
        told = Change(
            **structs.asdict(item),
            fields=changed_fields(item.before, item.after) if both else {},
            diff=unified_diff(item.before, item.after) if both else "",
        )
        return printable_json(msgspec.json.encode(told).decode())
    on = paper()
    summary = item.summary or f"another result: musterctl task {item.task}"
    line = _fitted(f"{show.moment(item.at)}  ", f"{item.schedule}  {summary}", on)
    if not diff:
        return line
    text = unified_diff(item.before, item.after) if both else "(not kept, or too long)"
    lines = [
        part
        for each in text.splitlines()
        for part in wrapped(printable(each), on.columns, first=BELOW, indent=2 * BELOW)
    ]
    return "\n".join([line, *lines])


def _entry(item: HistoryItem) -> str:
    mark = "*" if item.changed else " "
    head = f"{item.number:>6}{mark} {show.moment(item.at)}  "
    value = "(too long to show)" if item.value is None else one_line(item.value)
    return _fitted(head, value, paper())


def _fitted(head: str, text: str, on: Paper) -> str:
    """Return one line, or a few where the terminal has no room for it."""
    return "\n".join(
        wrapped(printable(text), on.columns, first=head, indent=BELOW, lines_max=BELOW_LINES_MAX)
    )
