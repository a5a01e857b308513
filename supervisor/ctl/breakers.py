"""musterctl breaker: list the circuit breakers of sites, or change one."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BreakerList, BreakerStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import Settings, ask, command, list_or_act, on_cluster
from musterd.supervisor.text.printable import printable

_HEADS = ["SITE", "STATE", "OPEN", "FAILURES", "OPENED", "RUNNING", "WAITING"]
_STATE_COLUMN = 1
_ACTIONS = ("open", "close", "reset", "disable")


@command(
    "breaker",
    click.argument("action", type=click.Choice(("list", *_ACTIONS)), default="list"),
    click.argument("target", required=False, metavar="[SITE]"),
    on_cluster,
)
def breaker(settings: Settings, action: str, target: str | None) -> int:
    """List circuit breakers, or change the one of a site."""

    def done(name: str) -> str:
        params = rpc.SetBreaker(target=name, command=action)  # type: ignore[arg-type]
        return printable(f"{name}: {ask(settings, params, BreakerStatus).state}")

    def listed() -> str:
        return _table(ask(settings, rpc.ListBreakers(), BreakerList))

    return list_or_act(settings, action, target, listed, done, noun="SITE")


def _table(found: BreakerList) -> str:
    if not found.breakers:
        return "no sites yet"
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
