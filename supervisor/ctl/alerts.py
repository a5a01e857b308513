"""musterctl alerts: list alerts, or send a test message."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.alerts import AlertsStatus, AlertStatus, AlertTested, OpenAlert
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, FAILED, Action, Settings, ask, command, completes
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.ctl.table import Column, paper, short_moment, table, untold
from musterd.supervisor.text.printable import printable

_COLUMNS = (
    Column("ALERT", name=True),
    Column("STATE"),
    Column("OPEN"),
    Column("SENT", rank=1, below=untold),
    Column("FAILURES", rank=2, below=untold),
    Column("LAST SENT", short=short_moment),
    Column("TO", rank=9),
)


@command(
    "alerts",
    click.argument("action", type=Action(("list", "test")), default="list"),
    click.argument("name", required=False, shell_complete=completes("alerts")),
)
def alerts(settings: Settings, action: str, name: str | None) -> int:
    """List alerts, or send a test message through one."""
    context = click.get_current_context()
    if action == "list" and name is not None:
        raise click.UsageError(f"'list' takes no NAME, not {name!r}", context)
    if action == "test" and name is None:
        raise click.UsageError("'test' needs the NAME of an alert", context)
    if name is None:
        found = ask(settings, rpc.ListAlerts(), AlertsStatus)
        if not settings.json:
            emit(_listed(found))
        return DONE
    tested = ask(settings, rpc.TestAlert(name), AlertTested, waits=True)
    if tested.error:
        warn(f"{name}: the test message was not delivered: {tested.error}")
        return FAILED
    if not settings.json:
        emit(printable(f"{name}: the test message was delivered"))
    return DONE


def _listed(found: AlertsStatus) -> str:
    if not found.alerts and not found.pid:
        return "no alerts: none are configured, or the alerts process has not reported yet"
    alerts = sorted(found.alerts, key=lambda each: (each.state != "failing", not each.open))
    on = paper()
    parts = [table(_COLUMNS, [_row(each) for each in alerts], on, colour_of=show.states(1))]
    if not found.pid:
        why = found.reason or "it has not reported yet"
        parts.append(show.prose(f"the alerts process is {found.state}: {why}", on))
    for each in alerts:
        parts += [show.prose(_opened(each.name, line), on) for line in each.open]
        if each.error:
            parts.append(show.prose(f"{each.name}: not delivered: {each.error}", on))
    return "\n".join(parts)


def _row(each: AlertStatus) -> list[str]:
    return [
        each.name,
        each.state,
        str(len(each.open)),
        str(each.sent),
        str(each.failures) + (f" ({each.lost} lost)" if each.lost else ""),
        show.moment(each.sent_at),
        each.destination,
    ]


def _opened(name: str, line: OpenAlert) -> str:
    about = f"{line.kind} {line.subject}".rstrip()
    text = f": {line.text}" if line.text else ""
    return f"{name}: {about} {line.stage} since {show.moment(line.since)}{text}"
