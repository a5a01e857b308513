"""Offer names for what is typed, in the shell of musterctl and in bash, zsh and fish.

They come from the daemon, or from the cluster with --cluster: nobody who pressed Tab waits longer
than COMPLETION_SECONDS, and where nothing can be asked nothing is offered. Ids are the newest
first, with some words about each; bash has no room for those.
"""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import click
import msgspec
from click.shell_completion import CompletionItem
from msgspec import structs

from musterd.ipc.errors import MusterdError
from musterd.ipc.wire.messages import FINAL_STATES, SUCCEEDED
from musterd.supervisor.api import rpc
from musterd.supervisor.api.alerts import AlertsStatus
from musterd.supervisor.api.status import (
    BreakerList,
    FleetStatus,
    ScheduleList,
    SessionList,
    TaskList,
    TaskStatus,
)
from musterd.supervisor.ctl.app import Settings, ask
from musterd.supervisor.ctl.show import duration

COMPLETION_SECONDS = 1.0
IDS_MAX = 30  # of recent tasks: more than a screen helps nobody
LOOKED_AT_MAX = 200  # newest tasks, for ids
SIGNALS = ("HUP", "INT", "TERM", "KILL", "USR1", "USR2", "STOP", "CONT", "QUIT")

T = TypeVar("T")
Items = Iterator["CompletionItem[str]"]  # generic since click 8.2


class Asker:
    """Ask whoever the options on the line say."""

    def __init__(self, ctx: click.Context, *, cluster: bool) -> None:
        given = ctx.find_object(Settings) or Settings()
        self.action = ctx.params.get("action") or ""
        self._settings = structs.replace(
            given,
            socket=ctx.find_root().params.get("socket") or "",
            timeout=COMPLETION_SECONDS,
            json=False,
            cluster=given.cluster or cluster,
            command="",
        )

    def get(self, params: rpc.Params, kind: type[T]) -> T:
        return ask(self._settings, params, kind)

    def fleet(self) -> FleetStatus:
        return self.get(rpc.Status(), FleetStatus)


def offered(kind: str, ctx: click.Context, begun: str) -> "list[CompletionItem[str]]":
    """Return what begins with `begun`; nothing if nobody answers."""
    if kind == "files":  # the shell knows them
        return [CompletionItem(begun, type="file")]
    try:
        items = list(_KINDS[kind](Asker(ctx, cluster=kind == "nodes")))  # no daemon has all
    except (MusterdError, msgspec.DecodeError, OSError):
        return []
    return [
        item for item in items if item.value.startswith(begun) and str(item.value).isprintable()
    ]


def _plain(names: Iterator[str]) -> Items:
    return (CompletionItem(name) for name in names)


def _names(asker: Asker) -> Items:
    pools = asker.fleet().pools
    yield CompletionItem("all")
    yield from _plain(pool.name for pool in pools)
    yield from _plain(worker.name for pool in pools for worker in pool.workers)


def _pools(asker: Asker) -> Items:
    return _plain(pool.name for pool in asker.fleet().pools)


def _tasks(asker: Asker) -> Items:
    return _plain(name for pool in asker.fleet().pools for name in pool.tasks)


def _schedules(asker: Asker) -> Items:
    """Yield schedules; of those of files nothing can be edited."""
    if asker.action in ("list", "add"):
        return
    for each in asker.get(rpc.ListSchedules(), ScheduleList).schedules:
        if not (each.origin and asker.action in ("edit", "remove")):
            yield CompletionItem(each.name, help=f"{each.state} {each.when}")


def _sites(asker: Asker) -> Items:
    for each in asker.get(rpc.ListBreakers(), BreakerList).breakers:
        yield CompletionItem(each.target, help=each.state)


def _sessions(asker: Asker) -> Items:
    return _plain(each.name for each in asker.get(rpc.ListSessions(), SessionList).sessions)


def _alerts(asker: Asker) -> Items:
    return _plain(each.name for each in asker.get(rpc.ListAlerts(), AlertsStatus).alerts)


def _nodes(asker: Asker) -> Items:
    for each in asker.fleet().nodes:
        yield CompletionItem(each.name, help=each.state)


def _signals(_asker: Asker) -> Items:
    return _plain(iter(SIGNALS))


def _ids(wanted: Callable[[TaskStatus], bool]) -> Callable[[Asker], Items]:
    def found(asker: Asker) -> Items:
        tasks = asker.get(rpc.ListTasks(limit=LOOKED_AT_MAX), TaskList).tasks
        chosen = [each for each in tasks if wanted(each)]
        return (_id(each) for each in chosen[:IDS_MAX])

    return found


def _dead(asker: Asker) -> Items:
    tasks = asker.get(rpc.ListDead(limit=IDS_MAX), TaskList).tasks
    return (_id(each) for each in tasks)


def _id(task: TaskStatus) -> "CompletionItem[str]":
    at = task.finished_at or task.submitted_at
    ago = f" {duration(max(0.0, time.time() - at))} ago" if at else ""
    return CompletionItem(task.id, help=f"{task.name} {task.state}{ago}")


_KINDS: dict[str, Callable[[Asker], Items]] = {
    "names": _names,
    "pools": _pools,
    "tasks": _tasks,
    "schedules": _schedules,
    "sites": _sites,
    "sessions": _sessions,
    "alerts": _alerts,
    "nodes": _nodes,
    "signals": _signals,
    "ids": _ids(lambda task: True),
    "live ids": _ids(lambda task: task.state not in FINAL_STATES),
    "ids to retry": _ids(lambda task: task.state in FINAL_STATES and task.state != SUCCEEDED),
    "dead ids": _dead,
}
