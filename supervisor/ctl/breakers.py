"""musterctl's command about breakers."""

import click

from musterd.supervisor import rpc
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import DONE, Settings, ask, command
from musterd.supervisor.ctl.output import emit
from musterd.supervisor.status import BreakerList, BreakerStatus

_HEADS = ["TARGET", "STATE", "OPEN", "FAILURES", "REOPENED", "RUNNING", "WAITING"]
_STATE_COLUMN = 1
_ACTIONS = ("open", "close", "reset", "disable")


@command(
    "breaker",
    click.argument("action", type=click.Choice(("list", *_ACTIONS)), default="list"),
    click.argument("target", required=False),
)
def breaker(settings: Settings, action: str, target: str | None) -> int:
    """List the breakers, or open, close, reset or disable the one of a target."""
    context = click.get_current_context()
    if action == "list":
        if target is not None:
            raise click.UsageError(f"'list' takes no target, not {target!r}", context)
        found = ask(settings, rpc.ListBreakers(), BreakerList)
        if not settings.json:
            emit(_table(found))
        return DONE
    if target is None:
        raise click.UsageError(f"'{action}' needs a TARGET", context)
    status = ask(settings, rpc.SetBreaker(target=target, command=action), BreakerStatus)  # type: ignore[arg-type]
    if not settings.json:
        emit(show.printable(f"{target}: {status.state}"))
    return DONE


def _table(found: BreakerList) -> str:
    if not found.breakers:
        return "no target has been seen yet"
    rows = [
        [
            each.target,
            each.state,
            show.duration(each.open_seconds) if each.open_seconds else "-",
            str(each.failures),
            str(each.reopenings),
            str(each.running),
            str(each.waiting),
        ]
        for each in found.breakers
    ]
    return show.table(_HEADS, rows, _STATE_COLUMN, colour=show.coloured())
