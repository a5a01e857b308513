"""musterctl's commands about pools and slots: status, start, stop, scale, pause, ..."""

import sys
import time
from typing import Any, Literal

import click
import msgspec

from musterd.ipc.resilience.policy import POOL_SIZE_MAX
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.status import CommandResult, FleetStatus, PidResult
from musterd.supervisor.ctl import show
from musterd.supervisor.ctl.app import (
    DONE,
    FAILED,
    NOT_AT_TARGET,
    Settings,
    act,
    any_names,
    ask,
    command,
    completes,
    connect,
    no_block,
    on_cluster,
    report,
    slot_names,
)
from musterd.supervisor.ctl.cluster_link import ClusterAway
from musterd.supervisor.ctl.connection import NoAnswer, Unreachable
from musterd.supervisor.ctl.newer import tell_restarted, tell_unread
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.ctl.table import paper
from musterd.supervisor.text.printable import printable, printable_json

WATCH_SECONDS = 2.0
CLEAR = "\x1b[H\x1b[2J"  # the screen of a terminal


@command(
    "status",
    any_names,
    click.option("-w", "--watch", is_flag=True, help="Refresh every 2 s until Ctrl-C."),
    on_cluster,
)
def status(settings: Settings, names: tuple[str, ...], watch: bool) -> int:
    """Show pools and workers. Exit 3 unless every pool is at its target size."""
    params = rpc.Status(names=list(names))
    if watch:
        return _watch(settings, params)
    fleet = ask(settings, params, FleetStatus)
    if not settings.json:
        emit(_shown(settings, fleet))
    return DONE if fleet.at_target else NOT_AT_TARGET


def _shown(settings: Settings, fleet: FleetStatus) -> str:
    if settings.cluster:
        from musterd.supervisor.ctl import cluster_view

        return cluster_view.fleet_text(fleet, paper())
    return show.fleet(fleet, paper())


def _watch(settings: Settings, params: rpc.Status) -> int:
    """Show the status again and again, also across a restart; with --json a line each time."""
    clear = CLEAR if sys.stdout.isatty() and not settings.json else ""
    code, seen = DONE, False
    try:
        while True:
            try:
                with connect(settings) as connection:
                    answer = connection.request(params)
            except (Unreachable, NoAnswer, ClusterAway) as error:
                if not seen:
                    raise
                text = printable(f"{error}; retrying")
            else:
                fleet = msgspec.json.decode(answer, type=FleetStatus)
                code, seen = DONE if fleet.at_target else NOT_AT_TARGET, True
                text = _shown(settings, fleet)
                if settings.json:
                    text = printable_json(bytes(answer).decode())
            if not emit(f"{clear}{text}"):
                return code
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return code


@command("start", slot_names, no_block)
def start(settings: Settings, names: tuple[str, ...]) -> int:
    """Start stopped workers and wait until they run."""
    return act(settings, rpc.Start(names=list(names), no_block=settings.no_block))


@command("stop", slot_names, no_block)
def stop(settings: Settings, names: tuple[str, ...]) -> int:
    """Let running tasks finish, then stop the workers."""
    return act(settings, rpc.Stop(names=list(names), no_block=settings.no_block))


@command("restart", slot_names, no_block)
def restart(settings: Settings, names: tuple[str, ...]) -> int:
    """Stop and start workers, and wait until the new ones run; code is not imported anew."""
    params = rpc.Restart(names=list(names), no_block=settings.no_block)
    result = ask(settings, params, CommandResult, waits=not settings.no_block)
    code = report(settings, result)
    tell_restarted(settings, result.newer)
    tell_unread(settings)
    return code


@command("reset", slot_names, no_block)
def reset(settings: Settings, names: tuple[str, ...]) -> int:
    """Clear FATAL and the restart history; workers start again."""
    return act(settings, rpc.Reset(names=list(names), no_block=settings.no_block))


class SizeOrAuto(click.IntRange):
    name = "number of workers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


@command(
    "scale",
    click.argument("pool", shell_complete=completes("pools")),
    click.argument("size", type=SizeOrAuto(0, POOL_SIZE_MAX), metavar="N|auto"),
    no_block,
)
def scale(settings: Settings, pool: str, size: int | Literal["auto"]) -> int:
    """Set how many workers a pool has; auto: as configured."""
    return act(settings, rpc.Scale(pool=pool, size=size, no_block=settings.no_block))


@command("pause", slot_names)
def pause(settings: Settings, names: tuple[str, ...]) -> int:
    """Dispatch no more tasks; new tasks are accepted and wait."""
    return report(settings, ask(settings, rpc.Pause(names=list(names)), CommandResult))


@command("drain", any_names, no_block)
def drain(settings: Settings, names: tuple[str, ...]) -> int:
    """Dispatch and accept no more tasks; wait for running ones."""
    return act(settings, rpc.Drain(names=list(names), no_block=settings.no_block))


@command("resume", any_names)
def resume(settings: Settings, names: tuple[str, ...]) -> int:
    """Undo pause and drain."""
    return report(settings, ask(settings, rpc.Resume(names=list(names)), CommandResult))


@command(
    "signal",
    click.argument("signal", metavar="SIG", shell_complete=completes("signals")),
    slot_names,
)
def send_signal(settings: Settings, signal: str, names: tuple[str, ...]) -> int:
    """Send a signal (HUP, SIGHUP or 1) to workers."""
    try:
        number = convert.signal_number(signal)
    except rpc.RpcError as error:
        raise click.UsageError(error.message, click.get_current_context()) from error
    result = ask(settings, rpc.Signal(signal=number, names=list(names)), CommandResult)
    return report(settings, result)


@command("pid", any_names)
def pid(settings: Settings, names: tuple[str, ...]) -> int:
    """Print the supervisor's pid, or one worker pid per line."""
    result = ask(settings, rpc.Pid(names=list(names)), PidResult)
    pids = [worker.pid for worker in result.workers] if names else [result.supervisor]
    if not pids:
        warn(f"{' '.join(names)}: no worker is running: see musterctl status")
        return FAILED
    if not settings.json:
        emit("\n".join(str(number) for number in pids))
    return DONE
