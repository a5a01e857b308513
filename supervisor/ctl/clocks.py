"""musterctl's command about the time that the daemon goes by."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import ClockStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, FAILED, Settings, ask, command
from musterd.supervisor.ctl.output import emit


@command("clock", click.argument("action", type=click.Choice(("show", "accept")), default="show"))
def clock(settings: Settings, action: str) -> int:
    """Show the time that the daemon goes by, or accept the machine's clock as right."""
    params = rpc.AcceptClock() if action == "accept" else rpc.ShowClock()
    status = ask(settings, params, ClockStatus)
    if not settings.json:
        emit(_shown(status))
    return FAILED if status.doubted else DONE


def _shown(status: ClockStatus) -> str:
    lines = [
        f"the daemon goes by   {show.moment(status.now)}",
        f"the machine's clock  {show.moment(status.machine)}",
    ]
    if status.reason:
        lines.append(status.reason)
    elif not status.forgets:
        lines.append("the clock was set: nothing is forgotten for its age within the next hour")
    return "\n".join(lines)
