"""musterctl reread, reload and update."""

import sys

import click

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import PoolReload, ReloadResult
from musterd.supervisor.ctl.app import DONE, FAILED, Settings, ask, command, no_block
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.text.printable import printable

_EFFECTS = {"restart": "needs a restart"}


@command("reread")
def reread(settings: Settings) -> int:
    """Show what a reload would change; nothing changes."""
    result = ask(settings, rpc.Reread(), ReloadResult)
    if not settings.json:
        _emit_changes(result)
    return DONE


@command(
    "reload",
    click.argument("names", nargs=-1, metavar="[POOL...]"),
    no_block,
)
def reload(settings: Settings, names: tuple[str, ...]) -> int:
    """Take over the configuration as it is now; only what changed is touched.

    The workers of the pools that are named are replaced in any case, one at a time, by workers
    that import their code anew.
    """
    code = _apply(settings, rpc.Reload(names=list(names), no_block=settings.no_block))
    if not names and sys.stderr.isatty():  # not in the log of a unit's ExecReload
        warn("the daemon itself goes on: to restart it, type systemctl restart musterd")
    return code


@command("update", no_block)
def update(settings: Settings) -> int:
    """The same as reload."""
    return _apply(settings, rpc.Update(no_block=settings.no_block))


def _apply(settings: Settings, params: rpc.Reload | rpc.Update) -> int:
    result = ask(settings, params, ReloadResult, waits=not settings.no_block)
    if not settings.json:
        _emit_changes(result)
        for pool in result.pools:
            emit(printable(_pool_line(pool, result.done)))
    failed = [pool for pool in result.pools if not pool.ok]
    for pool in failed:
        warn(f"{pool.name}: the old workers stay: {pool.reason}")
    if result.restart:
        warn(f"restart the daemon to apply {', '.join(result.restart)}")
    return FAILED if failed else DONE


def _emit_changes(result: ReloadResult) -> None:
    if not result.changes:
        emit("nothing has changed")
    for change in result.changes:
        effect = _EFFECTS.get(change.effect, change.effect)
        values = " -> ".join(value or "(not set)" for value in (change.old, change.new))
        emit(printable(f"{change.key}: {values}  ({effect})"))


def _pool_line(pool: PoolReload, done: bool) -> str:
    what = pool.effect
    if not done:
        what = f"{what}: under way"
    elif not pool.ok:
        what = f"{what}: failed"
    elif pool.stranded:
        what = f"{what}, {pool.stranded} tasks stay in the store until it comes back"
    return f"pool {pool.name}: {what}"
