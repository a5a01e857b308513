"""Retry, cancel and purge all tasks that fit: count, ask, then go from step to step.

The daemon does a step and remembers nothing; this end has the cursor. Whatever interrupts a command
leaves whole steps behind, and the command typed again goes on with the rest.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

import click
import msgspec
from msgspec import Struct, structs

from musterd.ipc.wire.selection import Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BulkResult
from musterd.supervisor.ctl.app import DONE, FAILED, Settings, connect
from musterd.supervisor.ctl.output import emit, emit_json, warn
from musterd.supervisor.ctl.selecting import in_words
from musterd.supervisor.text.printable import printable

ROOM_SECONDS = 0.5  # between two looks whether a full queue has room
REFUSED_SHOWN_MAX = 10
CLUSTER_BULK_MAX = 10_000  # tasks of a command with --cluster, whose lists have no cursors
_ERASE_LINE = "\r\033[K"

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask: do it.")
all_option = click.option("--all", "everything", is_flag=True, help="All of them.")


class Verb(Struct, frozen=True):
    """The words of a command, for tasks that fit."""

    to_do: str  # "run", as in "run 12 failed tasks again"
    behind: str  # "again"
    done: str  # "queued"
    state: str  # of the tasks where the selection names none
    step: type[rpc.RetryTasks | rpc.CancelTasks | rpc.PurgeTasks]


RETRY = Verb("run", " again", "queued again", "failed", rpc.RetryTasks)
CANCEL = Verb("cancel", "", "cancelled", "unfinished", rpc.CancelTasks)
PURGE = Verb("delete", "", "deleted", "failed", rpc.PurgeTasks)

Make = Callable[[str, bool], rpc.Params]  # a step: after a cursor, and whether it only counts


def on_ids(ids: tuple[str, ...], where: Selection, everything: bool) -> bool:
    """Whether a command is about ids; UsageError unless either ids or a selection is given."""
    chosen = everything or where != Selection()
    if bool(ids) == chosen:
        raise click.UsageError(
            "give either ID..., or which tasks: --pool, --target, --error, ..., or --all",
            click.get_current_context(),
        )
    return bool(ids)


def in_bulk(settings: Settings, verb: Verb, where: Selection, *, yes: bool) -> int:
    """Do it to all tasks that fit, when they are counted and that is confirmed."""

    def make(after: str, dry: bool) -> rpc.Params:
        return verb.step(where=where, after=after, dry_run=dry)

    wanted = _count(settings, make)
    what = _what(wanted, verb, where)
    if wanted and not yes:
        _confirm(verb, what)
    total = _go_through(settings, make, wanted, verb) if wanted else BulkResult(matched=0)
    if settings.json:
        emit_json(msgspec.json.encode(total))
    else:
        emit(f"{_what(total.done, verb, where)} {verb.done}" if wanted else f"no tasks: {what}")
    for each in total.refused[:REFUSED_SHOWN_MAX]:
        warn(printable(each.reason))
    if len(total.refused) > REFUSED_SHOWN_MAX:
        warn(f"... and {len(total.refused) - REFUSED_SHOWN_MAX} others refused")
    if settings.cluster and wanted >= CLUSTER_BULK_MAX:
        warn(f"these were the newest {wanted}: type the command again for the others")
    if total.full:
        warn("queues are full: type the command again later to go on with the others")
    if total.cluster:
        warn(f"not meant: tasks of the cluster, see musterctl --cluster {settings.command} --help")
    return FAILED if total.refused or total.full else DONE


def _what(count: int, verb: Verb, where: Selection) -> str:
    state = where.state or verb.state
    return f"{count} {state} task{'' if count == 1 else 's'}{in_words(where)}"


def _confirm(verb: Verb, what: str) -> None:
    if sys.stdin is not None and sys.stdin.isatty():
        to_do = verb.to_do.capitalize()
        click.confirm(f"{to_do} {what}{verb.behind}?", abort=True, err=True)
        return
    raise click.UsageError(
        f"{what}: to {verb.to_do} them{verb.behind}, add --yes", click.get_current_context()
    )


def _count(settings: Settings, make: Make) -> int:
    count, cursor = 0, ""
    while True:
        step = _ask(settings, make(cursor, True))
        count, cursor = count + step.matched, step.cursor
        if not cursor:
            return count


def _go_through(settings: Settings, make: Make, wanted: int, verb: Verb) -> BulkResult:
    """Return the sum of all steps. A step that finds a queue full is repeated until there is room,
    unless nobody is to wait."""
    total = BulkResult(matched=wanted)
    late = None if settings.timeout is None else time.monotonic() + settings.timeout
    waits = not settings.no_block
    try:
        while True:
            step = _ask(settings, make(total.cursor, False))
            done = total.done + step.done
            total = structs.replace(
                total,
                done=done,
                refused=[*total.refused, *step.refused],
                full=step.full,
                cursor=step.cursor,
                cluster=total.cluster or step.cluster,
            )
            waiting = ", waiting for room in the queue" if step.full else ""
            _show(f"{done} of {wanted} {verb.done}{waiting}")
            if step.full:
                if not waits or (late is not None and time.monotonic() > late):
                    break
                time.sleep(ROOM_SECONDS)
            elif not step.cursor:
                break
    except BaseException:
        warn(f"stopped: {total.done} of {wanted} {verb.done}: type the command again to go on")
        raise
    finally:
        _show("")
    return structs.replace(total, cursor="")


def _ask(settings: Settings, params: rpc.Params) -> BulkResult:
    with connect(settings) as connection:
        return connection.get(params, BulkResult)


def _show(text: str) -> None:
    """Keep the progress on one line of standard error, where that is a terminal."""
    with suppress(OSError):
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"{_ERASE_LINE}{text}")
            sys.stderr.flush()
