"""musterctl breaker: list the circuit breakers of sites, or change one."""

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BreakerList, BreakerStatus
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import (
    Action,
    Settings,
    ask,
    command,
    completes,
    list_or_act,
    on_cluster,
)
from musterd.supervisor.ctl.table import Column, paper, table, told
from musterd.supervisor.text.printable import printable

_COLUMNS = (
    Column("SITE", name=True),
    Column("STATE"),
    Column("OPEN"),
    Column("FAILURES", rank=2, below=told("{} failure", "s")),
    Column("OPENED", rank=1, below=told("opened {} time", "s")),
    Column("RUNNING"),
    Column("WAITING"),
)
_WORST_FIRST = ("open", "forced-open", "half-open", "disabled")
_ACTIONS = ("open", "close", "reset", "disable")


@command(
    "breaker",
    click.argument("action", type=Action(("list", *_ACTIONS)), default="list"),
    click.argument("target", required=False, metavar="[SITE]", shell_complete=completes("sites")),
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
        for each in sorted(found.breakers, key=_rank)
    ]
    return table(_COLUMNS, rows, paper(), colour_of=show.states(1))


def _rank(each: BreakerStatus) -> tuple[int, bool]:
    """Sort sites with problems first: those whose tasks may not run, then those that fail."""
    states = (*_WORST_FIRST, each.state)
    return states.index(each.state), not each.failures
