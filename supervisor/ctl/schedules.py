"""musterctl schedule: list schedules; add, edit, remove those of run time; run, pause, resume."""

from typing import Any

import click
import msgspec

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import (
    CommandResult,
    ScheduleKeys,
    ScheduleList,
    ScheduleStatus,
)
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import (
    DONE,
    Action,
    Settings,
    ask,
    command,
    completes,
    connect,
    on_cluster,
)
from musterd.supervisor.ctl.arguments import task_arguments, value_of
from musterd.supervisor.ctl.output import emit, emit_json
from musterd.supervisor.ctl.table import Column, paper, short_moment, table, told, untold
from musterd.supervisor.text.printable import printable

_COLUMNS = (
    Column("SCHEDULE", name=True),
    Column("STATE"),
    Column("TASK", rank=4, name=True),
    Column("WHEN", rank=5, below=str),
    Column("NEXT", short=short_moment),
    Column("LAST", short=short_moment),
    Column("RUNS", rank=2, below=untold),
    Column("SKIPPED", rank=3, below=told("{} skipped")),
    Column("RUN", rank=1, below=untold),
    Column("RESULT"),
)
_ACTIONS: dict[str, type[rpc.RunSchedule | rpc.PauseSchedule | rpc.ResumeSchedule]] = {
    "run": rpc.RunSchedule,
    "pause": rpc.PauseSchedule,
    "resume": rpc.ResumeSchedule,
}
_WRITES = ("add", "edit")
_FAILED = ("failed", "expired")
# Keys that a new timing replaces.
_TIMING = ("every", "cron", "timezone")


@command(
    "schedule",
    click.argument("action", type=Action(("list", *_WRITES, "remove", *_ACTIONS)), default="list"),
    click.argument("name", required=False, shell_complete=completes("schedules")),
    click.argument("pairs", nargs=-1, metavar="[k=v ...]"),
    click.option(
        "--task",
        metavar="POOL.METHOD",
        help="The task to run.",
        shell_complete=completes("tasks"),
    ),
    click.option("--every", metavar="5m", help="Run at this interval."),
    click.option("--cron", metavar="'*/5 * * * *'", help="Run at these times."),
    click.option("--notify", metavar="task.changed", help="Report when the result has changed."),
    click.option(
        "--set",
        "others",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other key of [[schedule]]; the value is JSON or else text.",
    ),
    click.option("--unset", multiple=True, metavar="KEY", help="edit: drop a key, or args.KEY."),
    click.option("--json-args", metavar="J", help="Arguments as a JSON object; k=v wins over it."),
    on_cluster,
)
def schedule(
    settings: Settings,
    *,
    action: str,
    name: str | None,
    pairs: tuple[str, ...],
    task: str | None,
    every: str | None,
    cron: str | None,
    notify: str | None,
    others: tuple[str, ...],
    unset: tuple[str, ...],
    json_args: str | None,
) -> int:
    """List schedules; add, edit or remove one of run time; run one now, pause it or resume it.

    add and edit: k=v are arguments of the task. Schedules of configuration files are changed there.
    """
    given = {"task": task, "every": every, "cron": cron, "notify": notify}
    keys = {key: value for key, value in given.items() if value is not None}
    written = bool(keys or others or unset or json_args is not None or pairs)
    context = click.get_current_context()
    if action == "list" and name is not None:
        raise click.UsageError(f"'list' takes no NAME, not {name!r}", context)
    if action != "list" and name is None:
        raise click.UsageError(f"'{action}' needs a NAME", context)
    if written and action not in _WRITES:
        raise click.UsageError(f"'{action}' takes neither keys nor arguments", context)
    if action == "edit" and not written:
        change = "--every, --set, --unset or NAME=VALUE"
        raise click.UsageError(f"'edit' needs something to change: give {change}", context)
    if name is None:
        text = _table(_all(settings))
    elif action in _WRITES:
        keys |= _others(others)
        args = task_arguments(pairs, json_args)
        if action == "add":
            made = keys | ({"args": args} if args else {})
        else:
            made = _edited(_as_added(settings, name), keys, args, unset)
        status = ask(settings, rpc.PutSchedule(name=name, keys=made), ScheduleStatus)
        text = printable(f"{name}: {status.state}, {status.when}")
    elif action == "remove":
        ask(settings, rpc.DeleteSchedule(name=name), CommandResult)
        text = printable(f"{name}: removed")
    else:
        status = ask(settings, _ACTIONS[action](name=name), ScheduleStatus)
        text = printable(status.last_task if action == "run" else f"{name}: {status.state}")
    if not settings.json:
        emit(text)
    return DONE


def _others(pairs: tuple[str, ...]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise click.UsageError(
                f"--set {pair!r}: write it as KEY=VALUE", click.get_current_context()
            )
        keys[key] = value_of(text)
    return keys


def _as_added(settings: Settings, name: str) -> dict[str, Any]:
    """Return the keys of a schedule of run time; those of files are refused when they are put."""
    with connect(settings) as connection:
        return connection.get(rpc.GetSchedule(name=name), ScheduleKeys).keys


def _edited(
    before: dict[str, Any], keys: dict[str, Any], args: dict[str, Any], unset: tuple[str, ...]
) -> dict[str, Any]:
    """Return the keys with changes; another kind of timing replaces the one before."""
    made = dict(before)
    if keys.keys() & {"every", "cron"}:
        made = {key: value for key, value in made.items() if key not in _TIMING}
        if "cron" in keys and "timezone" in before:
            made["timezone"] = before["timezone"]
    made |= keys
    made["args"] = {**before.get("args", {}), **args}
    for key in unset:
        section, _, argument = key.partition(".")
        table = made.get(section) if argument else made
        if not isinstance(table, dict) or (argument or section) not in table:
            raise click.UsageError(
                f"--unset {key!r}: the schedule has no such key", click.get_current_context()
            )
        del table[argument or section]
    return made


def _all(settings: Settings) -> ScheduleList:
    """Return all schedules, which come in portions."""
    found: list[ScheduleStatus] = []
    more = True
    with connect(settings) as connection:
        while more:
            asked = rpc.ListSchedules(after=found[-1].name if found else "")
            answer = connection.get(asked, ScheduleList)
            found += answer.schedules
            more = answer.more and bool(answer.schedules)
    listed = ScheduleList(schedules=found)
    if settings.json:
        emit_json(msgspec.json.encode(listed))
    return listed


def _table(found: ScheduleList) -> str:
    if not found.schedules:
        return "no schedules are configured"
    schedules = sorted(found.schedules, key=_rank)
    on = paper()
    rows = [_row(each) for each in schedules]
    shown = table(_COLUMNS, rows, on, colour_of=show.states(len(_COLUMNS) - 1))
    skipped = [
        f"{each.name}: the last run that was skipped: {each.skipped_why}"
        for each in schedules
        if each.skipped_why
    ]
    failing = [
        f"{each.name}: its last {each.failures} runs failed: musterctl task {each.last_task}"
        for each in schedules
        if each.stale
    ]
    problems = [line for each in schedules for line in each.problem.splitlines() if line]
    below = [show.prose(line, on) for line in (*problems, *failing, *skipped)]
    return "\n".join([shown, *below])


def _rank(each: ScheduleStatus) -> int:
    """Sort schedules with problems first: not run, failing, failed; then active, held back."""
    ranks = (bool(each.problem), each.stale, each.last_state in _FAILED, each.state == "active")
    return ranks.index(True) if True in ranks else len(ranks)


def _row(status: ScheduleStatus) -> list[str]:
    return [
        status.name,
        status.state,
        status.task,
        status.when,
        show.moment(status.next_at),
        show.moment(status.last_at),
        str(status.runs),
        str(status.skipped),
        status.last_task or "-",
        status.last_state,
    ]
