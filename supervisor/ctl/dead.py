"""musterctl's commands about failed tasks."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import (
    PurgeResult,
    RefusedTask,
    RetryResult,
    TaskList,
    TaskStatus,
)
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, FAILED, NO_SUCH_NAME, Settings, ask, command
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.text.printable import printable

_HEADS = ["ID", "TASK", "TARGET", "ATTEMPTS", "CRASHES", "FAILED", "ERROR"]
_NO_SUCH_TASK = "NoSuchTask"


@command(
    "dead",
    click.option("--pool", default=""),
    click.option("--limit", type=click.IntRange(1, rpc.LIST_MAX), default=100, show_default=True),
)
def dead(settings: Settings, pool: str, limit: int) -> int:
    """List the tasks that failed, newest first, each with its error."""
    found = ask(settings, rpc.ListDead(pool=pool, limit=limit), TaskList)
    if not settings.json:
        emit(_table(found))
    return DONE


def _table(found: TaskList) -> str:
    if not found.tasks:
        return "no failed tasks"
    rows = [_row(task) for task in found.tasks]
    text = show.table(_HEADS, rows, -1, colour=show.coloured())
    return text + "\n... and more: see --limit" if found.more else text


def _row(task: TaskStatus) -> list[str]:
    return [
        task.id,
        task.name,
        task.target or "-",
        str(task.attempt),
        str(task.crashes),
        show.moment(task.finished_at),
        show.failure_line(task.failure) if task.failure is not None else "",
    ]


@command("retry", click.argument("ids", nargs=-1, required=True, metavar="ID..."))
def retry(settings: Settings, ids: tuple[str, ...]) -> int:
    """Run tasks again that failed, expired or were cancelled, under their ids."""
    result = ask(settings, rpc.RetryTasks(ids=list(ids)), RetryResult)
    if not settings.json and result.retried:
        emit("\n".join(printable(f"{id_}: queued") for id_ in result.retried))
    return _refused(result.refused)


@command(
    "purge",
    click.argument("ids", nargs=-1, metavar="[ID...]"),
    click.option("--all", "everything", is_flag=True, help="All that failed."),
    click.option("--older-than", metavar="D", help="Those that failed so long ago: 12h, 7d."),
)
def purge(
    settings: Settings, *, ids: tuple[str, ...], everything: bool, older_than: str | None
) -> int:
    """Forget failed tasks: their errors, arguments and attempts."""
    if bool(ids) + everything + (older_than is not None) != 1:
        raise click.UsageError("give either ID..., --all or --older-than D")
    params = rpc.PurgeTasks(ids=list(ids), all=everything)
    if older_than is not None:
        seconds = _seconds(older_than)
        params = rpc.PurgeTasks(older_than=seconds, all=not seconds)
    result = ask(settings, params, PurgeResult, waits=True)
    if not settings.json:
        emit(f"{result.purged} failed tasks are forgotten")
    return _refused(result.refused)


def _seconds(duration: str) -> float:
    from musterd.supervisor.text.units import parse_duration

    try:
        return parse_duration(duration) / 1e9
    except ValueError as error:
        raise click.BadParameter(f"{duration!r} {error}", param_hint="--older-than") from error


def _refused(refused: list[RefusedTask]) -> int:
    for each in refused:
        warn(f"{each.reason}: see musterctl task {each.id}")
    if any(each.code == _NO_SUCH_TASK for each in refused):
        return NO_SUCH_NAME
    return FAILED if refused else DONE
