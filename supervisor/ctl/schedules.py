"""musterctl schedule: list schedules, or run, pause or resume one."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import ScheduleList, ScheduleStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import Settings, ask, command, list_or_act, on_cluster
from musterd.supervisor.text.printable import printable

_HEADS = ["SCHEDULE", "STATE", "TASK", "WHEN", "NEXT", "LAST", "RUNS", "SKIPPED", "RESULT"]
_STATE_COLUMN = 1
_ACTIONS: dict[str, type[rpc.RunSchedule | rpc.PauseSchedule | rpc.ResumeSchedule]] = {
    "run": rpc.RunSchedule,
    "pause": rpc.PauseSchedule,
    "resume": rpc.ResumeSchedule,
}


@command(
    "schedule",
    click.argument("action", type=click.Choice(("list", *_ACTIONS)), default="list"),
    click.argument("name", required=False),
    on_cluster,
)
def schedule(settings: Settings, action: str, name: str | None) -> int:
    """List schedules, or run one now, pause it or resume it."""

    def done(name: str) -> str:
        status = ask(settings, _ACTIONS[action](name=name), ScheduleStatus)
        return printable(status.last_task if action == "run" else f"{name}: {status.state}")

    def listed() -> str:
        return _table(ask(settings, rpc.ListSchedules(), ScheduleList))

    return list_or_act(settings, action, name, listed, done, noun="NAME")


def _table(found: ScheduleList) -> str:
    if not found.schedules:
        return "no schedules are configured"
    rows = [_row(each) for each in found.schedules]
    return show.table(_HEADS, rows, _STATE_COLUMN, colour=show.coloured())


def _row(status: ScheduleStatus) -> list[str]:
    return [
        status.name,
        status.state,
        status.task,
        status.when,
        show.moment(status.next_at) if status.next_at else "-",
        show.moment(status.last_at) if status.last_at else "-",
        str(status.runs),
        str(status.skipped),
        f"{status.last_state} {status.last_task}" if status.last_task else "",
    ]
