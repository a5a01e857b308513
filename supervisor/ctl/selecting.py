"""Options that say which tasks: --pool, --target, --state, --error, --key, --schedule, --since.

Lists and commands in bulk share them. A list goes from page to page by the daemon's cursors.
"""

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from musterd.ipc.wire.messages import FINAL_STATES, QUEUED, RUNNING, WAITING
from musterd.ipc.wire.selection import ENDED, Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import TaskList
from musterd.supervisor.ctl.app import Function, Settings, completes, connect
from musterd.supervisor.ctl.output import emit_json
from musterd.supervisor.text.units import parse_duration

if TYPE_CHECKING:
    _Moment = click.ParamType[float]
else:
    _Moment = click.ParamType  # generic since click 8.2

PAGE_TASKS = 250  # which a turn of the daemon's loop makes in some milliseconds
LIVE_STATES = (QUEUED, WAITING, RUNNING)
DEAD_STATES = ("failed", "expired", "cancelled")  # of tasks that can be retried
ANY_STATES = (*LIVE_STATES, *FINAL_STATES, ENDED)


class Since(_Moment):
    """A moment: so long ago, or a date with or without a time of day, local unless it says."""

    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            at = datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            at = self._ago(str(value), param, ctx)
        if not 0 <= at <= time.time():
            self.fail(f"{value!r} is not in the past.", param, ctx)
        return at

    def _ago(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return time.time() - parse_duration(value) / 1e9
        except ValueError:
            self.fail(
                f"{value!r} is no moment: give how long ago, such as 30m, 2h or 3d, or a date such "
                "as 2026-11-19 or 2026-11-19T08:30.",
                param,
                ctx,
            )


def selects(states: tuple[str, ...], what: str) -> Callable[[Function], Function]:
    """Add the options to a command, which gets them by name (`selection`)."""
    options = (
        click.option(
            "--pool", default="", help="Only tasks of this pool.", shell_complete=completes("pools")
        ),
        click.option(
            "--target",
            default="",
            metavar="SITE",
            help="Only tasks of this site.",
            shell_complete=completes("sites"),
        ),
        click.option(
            "--state", type=click.Choice(states), help=f"Only tasks in this state. {what}"
        ),
        click.option(
            "--error", default="", metavar="TEXT", help="Only tasks with this text in their error."
        ),
        click.option("--key", default="", help="Only tasks with this key."),
        click.option(
            "--schedule",
            default="",
            metavar="NAME",
            help="Only tasks of this schedule.",
            shell_complete=completes("schedules"),
        ),
        click.option(
            "--since",
            type=Since(),
            metavar="WHEN",
            help="Only tasks that ended, or were submitted, since then: 2h, 3d, 2026-11-19.",
        ),
    )

    def add(decorated: Function) -> Function:
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return add


def selection(which: dict[str, Any]) -> Selection:
    """Return what the options say; UsageError if one is too long."""
    given = {name: value for name, value in which.items() if value}
    try:
        return msgspec.convert(given, Selection)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error


def in_words(where: Selection) -> str:
    """Return a selection as it continues "tasks"; "" for all."""
    named = (
        ("of pool", where.pool),
        ("of site", where.target),
        ("with key", where.key),
        ("of schedule", where.schedule),
        ("with the error", f"'{where.error}'" if where.error else ""),
        ("since", _moment(where.since)),
        ("before", _moment(where.before)),
    )
    return "".join(f" {words} {value}" for words, value in named if value)


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""


def page_through(
    settings: Settings, make: Callable[[int, str], rpc.Params], limit: int
) -> TaskList:
    """Return a list of `limit` tasks at most, asked for page by page; with --json print it.

    `make` returns the request for so many tasks after a cursor.
    """
    found = TaskList(tasks=[])
    page_max = rpc.LIST_MAX if settings.cluster else PAGE_TASKS  # a cluster has one page
    while True:
        with connect(settings) as connection:
            params = make(min(limit - len(found.tasks), page_max), found.cursor)
            page = connection.get(params, TaskList)
        found = msgspec.structs.replace(page, tasks=[*found.tasks, *page.tasks])
        if not found.cursor or len(found.tasks) >= limit:
            break
    if settings.json:
        emit_json(msgspec.json.encode(found))
    return found
