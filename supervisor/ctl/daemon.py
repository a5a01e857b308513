"""musterctl's commands about the daemon itself: reload, shutdown, version, clock."""

import os
import select
import sys
from collections.abc import Callable

import click

from musterd import __version__
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import (
    ClockStatus,
    CommandResult,
    PidResult,
    PoolReload,
    ReloadResult,
    VersionResult,
)
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import (
    DONE,
    FAILED,
    Action,
    Settings,
    ask,
    command,
    completes,
    connect,
    no_block,
    report,
    understood,
)
from musterd.supervisor.ctl.newer import newer_text, tell_kept, tell_unread
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.text.printable import printable

EXIT_SECONDS = 30.0  # from the daemon's last word to the end of its process
_EFFECTS = {"restart": "needs a restart"}


@command("reread")
def reread(settings: Settings) -> int:
    """Show what a reload would change, without changing anything."""
    result = ask(settings, rpc.Reread(), ReloadResult)
    if not settings.json:
        _emit_changes(result)
    rolls = {pool.name for pool in result.pools if pool.effect == "rolls"}
    tell_kept(settings, [each for each in result.newer if each.pool not in rolls])
    return DONE


@command(
    "reload",
    click.argument("names", nargs=-1, metavar="[POOL...]", shell_complete=completes("pools")),
    click.option("--code", is_flag=True, help="Also pools whose code on disk is newer."),
    no_block,
)
def reload(settings: Settings, names: tuple[str, ...], code: bool) -> int:
    """Apply the configuration as it is now.

    Only what changed is touched. Workers of the pools that are named are always replaced, one at a
    time, by workers that import their code again. With --code, so are those of pools whose code on
    disk is newer than what they run.
    """
    params = rpc.Reload(names=list(names), no_block=settings.no_block, code=code)
    exit_code = _apply(settings, params)
    told = tell_unread(settings)
    if (
        not told and not names and not code and sys.stderr.isatty()
    ):  # not in the log of a unit's ExecReload
        warn("the daemon itself keeps running: to restart it, type systemctl restart musterd")
    return exit_code


@command("update", no_block)
def update(settings: Settings) -> int:
    """The same as reload."""
    return _apply(settings, rpc.Update(no_block=settings.no_block))


def _apply(settings: Settings, params: rpc.Reload | rpc.Update) -> int:
    result = ask(settings, params, ReloadResult, waits=not settings.no_block)
    _tell(settings, result)
    failed = [pool for pool in result.pools if not pool.ok]
    for pool in failed:
        warn(f"{pool.name}: the old workers stay: {pool.reason}")
    if result.restart:
        warn(f"restart the daemon to apply {', '.join(result.restart)}")
    return FAILED if failed else DONE


def _tell(settings: Settings, result: ReloadResult) -> None:
    """Tell what has changed, in the configuration and beside it, and what was done about it."""
    newer = {each.pool: each for each in result.newer}
    rolled = [newer.pop(pool.name, None) for pool in result.pools if pool.effect == "rolls"]
    news = {each.pool: newer_text(each) for each in rolled if each is not None}
    if not settings.json:
        _emit_changes(result)
        for pool in result.pools:
            what = news.get(pool.name, "") if pool.ok else ""
            line = _pool_line(pool, result.done)
            emit(printable(f"{line}: {what}" if what else line))
    tell_kept(settings, newer.values())


def _emit_changes(result: ReloadResult) -> None:
    if not result.changes:
        emit("the configuration has not changed")
    for change in result.changes:
        effect = _EFFECTS.get(change.effect, change.effect)
        values = " -> ".join(value or "(not set)" for value in (change.old, change.new))
        emit(printable(f"{change.key}: {values}  ({effect})"))


def _pool_line(pool: PoolReload, done: bool) -> str:
    what = pool.effect
    if not done:
        what = f"{what}: in progress"
    elif not pool.ok:
        what = f"{what}: failed"
    elif pool.stranded:
        what = f"{what}, {pool.stranded} tasks stay in the store until it comes back"
    return f"pool {pool.name}: {what}"


@command("shutdown", no_block)
def shutdown(settings: Settings) -> int:
    """Shut the daemon down and wait for it. Queued tasks are kept."""
    with connect(settings, waits=not settings.no_block) as connection:
        supervisor = connection.get(rpc.Pid(), PidResult).supervisor
        gone = _exit_of(supervisor)
        result = connection.request(rpc.Shutdown(no_block=settings.no_block))
    code = report(settings, understood(settings, result, CommandResult))
    if settings.no_block or code != DONE or gone is None:
        return code
    if not gone(settings.timeout or EXIT_SECONDS):
        warn(f"the daemon has stopped its work, but process {supervisor} still exists")
        return FAILED
    return DONE


def _exit_of(process: int) -> Callable[[float], bool] | None:
    """Return a function that waits until this process ends; None where it cannot be watched."""
    try:
        descriptor = os.pidfd_open(process)
    except OSError:  # gone already, or in another PID namespace
        return None

    def wait(seconds: float) -> bool:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        try:
            return bool(poller.poll(seconds * 1000))
        finally:
            os.close(descriptor)

    return wait


@command("version")
def version(settings: Settings) -> int:
    """Print the versions of musterctl and of the daemon."""
    if not settings.json:
        emit(f"musterctl {__version__}")
    result = ask(settings, rpc.Version(), VersionResult)
    if not settings.json:
        emit(printable(f"musterd {result.version} (pid {result.pid})"))
    return DONE


@command("clock", click.argument("action", type=Action(("show", "accept")), default="show"))
def clock(settings: Settings, action: str) -> int:
    """Show the daemon's time, or accept the machine's clock."""
    params = rpc.AcceptClock() if action == "accept" else rpc.ShowClock()
    status = ask(settings, params, ClockStatus)
    if not settings.json:
        emit(_shown(status))
    return FAILED if status.doubted else DONE


def _shown(status: ClockStatus) -> str:
    lines = [
        f"daemon time    {show.moment(status.now)}",
        f"machine clock  {show.moment(status.machine)}",
    ]
    if status.reason:
        lines.append(status.reason)
    elif not status.forgets:
        lines.append("the clock was set: nothing is deleted for its age within the next hour")
    return "\n".join(lines)
