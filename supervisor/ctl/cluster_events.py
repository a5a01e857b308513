"""Events of a cluster, out of one look after the other.

The engine keeps no log: what happened is what differs between two looks. Seen are tasks that
failed, expired or were cancelled, nodes that join, leave, fall silent or are lost, breakers, an
applied policy, and whether PostgreSQL answers. Crashes of workers, and what happens faster than the
looks come, are in the events of each node. Only what the results of schedules say is kept.
"""

import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from musterd.ipc.errors import MusterdError
from musterd.ipc.watching.content import content_of
from musterd.ipc.wire.messages import TaskView
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import NodeStatus
from musterd.supervisor.cluster.engine import UNSUCCESSFUL, Engine, SiteView, TaskFilter
from musterd.supervisor.cluster.watching import CHANGED, STALE, ChangeNote
from musterd.supervisor.ctl.cluster_link import told
from musterd.supervisor.ctl.cluster_view import ALIVE, DRAINING, LEFT, LOST, SILENT, node_status

LEVELS = ("debug", "info", "warning", "error")
ENDS_MAX = 200  # ended tasks that one look sees
_ENDS = {"failed": "error", "expired": "warning", "cancelled": "info"}
_NODES = {  # the event of a new state, and its level
    ALIVE: ("cluster.node_joined", "info"),
    DRAINING: ("cluster.node_draining", "info"),
    SILENT: ("cluster.node_silent", "warning"),
    LOST: ("cluster.node_lost", "error"),
    LEFT: ("cluster.node_left", "info"),
}
_BREAKERS = {
    "open": ("breaker.open", "warning"),
    "forced-open": ("breaker.forced_open", "warning"),
    "half-open": ("breaker.half_open", "info"),
    "closed": ("breaker.closed", "info"),
    "disabled": ("breaker.disabled", "info"),
}

Event = dict[str, Any]


class Watch:
    """Look at a cluster again and again, and tell what is new."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._nodes: dict[str, NodeStatus] = {}
        self._sites: dict[str, str] = {}
        self._ended: set[tuple[str, float]] = set()
        self._policy: int | None = None
        self._away = False
        self._changed = ""

    def begin(self, engine: Engine) -> list[Event]:
        """Return what ended lately, oldest first, and look for the first time."""
        self._look(engine)
        ends = engine.find(TaskFilter(state=UNSUCCESSFUL, limit=ENDS_MAX))
        return [task_event(view) for view in reversed(ends)]

    def look(self, engine: Engine) -> list[Event]:
        """Return what has happened since the look before."""
        try:
            with told():
                found = self._look(engine)
        except MusterdError as error:
            known, self._away = self._away, True
            return [] if known else [self._event("cluster.unreachable", "error", str(error))]
        if self._away:
            self._away = False
            found.insert(0, self._event("cluster.reachable", "info", "PostgreSQL answers again"))
        return found

    def _look(self, engine: Engine) -> list[Event]:
        nodes = [node_status(node) for node in engine.nodes()]
        sites = engine.sites()
        ends = engine.find(TaskFilter(state=UNSUCCESSFUL, limit=ENDS_MAX))
        policy = engine.policy().version
        found = [*self._new_nodes(nodes), *self._new_sites(sites), *self._new_ends(ends)]
        found += self._new_changes(engine)
        if self._policy is not None and policy != self._policy:
            found.append(self._event("cluster.applied", "info", f"version {policy} is applied"))
        self._policy = policy
        return found

    def _event(self, name: str, level: str, reason: str = "", **fields: Any) -> Event:
        told = {"event": name, "level": level, **fields}
        return {"at": round(self._clock(), 3), **told, **({"reason": reason} if reason else {})}

    def _new_changes(self, engine: Engine) -> list[Event]:
        """Return changes of results, and schedules that are stale or have recovered."""
        first, changed = not self._changed, engine.changes(self._changed)
        self._changed = changed.after
        return [change_event(engine, note) for note in changed.notes if not first]

    def _new_nodes(self, nodes: list[NodeStatus]) -> list[Event]:
        before = self._nodes
        self._nodes = {node.identity: node for node in nodes}
        found = []
        for node in nodes:
            former = before.get(node.identity)
            if former is not None and former.state == node.state:
                continue
            if former is not None and (former.state, node.state) == (DRAINING, ALIVE):
                found.append(self._event("cluster.node_resumed", "info", node=node.name))
                continue
            name, level = _NODES[node.state]
            running = f"{node.running} tasks claimed" if node.running else ""
            found.append(self._event(name, level, running, node=node.name))
        for identity, node in before.items():
            if identity not in self._nodes:
                found.append(self._event("cluster.node_forgotten", "info", node=node.name))
        return found

    def _new_sites(self, sites: list[SiteView]) -> list[Event]:
        before = self._sites
        self._sites = {site.target: site.breaker for site in sites}
        now = {**dict.fromkeys(before, "closed"), **self._sites}
        return [
            self._event(*_BREAKERS[state], target=target)
            for target, state in now.items()
            if before.get(target, "closed") != state
        ]

    def _new_ends(self, ends: list[TaskView]) -> list[Event]:
        before = self._ended
        self._ended = {(view.id, view.finished_at) for view in ends}
        new = [view for view in reversed(ends) if (view.id, view.finished_at) not in before]
        found = [task_event(view) for view in new]
        if before and len(new) == ENDS_MAX:
            why = f"more than {ENDS_MAX} tasks ended without success since the last look"
            found.insert(0, self._event("log.left_out", "warning", why))
        return found


def task_event(view: TaskView) -> Event:
    """Return the end of a task as the event that its node would tell."""
    refused = view.failure is not None and view.failure.refused
    state = "refused" if refused else view.state
    event = {
        "at": round(view.finished_at, 3),
        "event": f"task.{state}",
        "level": _ENDS.get(state, "info"),
        "task": view.id,
        "pool": view.name.partition(".")[0],
        "method": view.name.partition(".")[2],
        "attempt": view.attempt,
    }
    if view.target:
        event["target"] = view.target
    if view.failure is not None:
        kind = view.failure.type or view.failure.kind
        event["reason"] = f"{kind}: {view.failure.message}"
    return event


def fits(event: Event, asked: rpc.Events) -> bool:
    """Whether somebody asked for an event: by its level, its kind, and its pool or node."""
    name = event.get("node") or event.get("pool") or ""
    return (
        LEVELS.index(event["level"]) >= LEVELS.index(asked.level)
        and (not asked.kinds or any(fnmatchcase(event["event"], kind) for kind in asked.kinds))
        and (not asked.names or any(fnmatchcase(name, given) for given in asked.names))
    )


def change_event(engine: Engine, note: ChangeNote) -> Event:
    event = {
        "at": round(note.at_ns / 1e9, 3),
        "event": note.event,
        "level": "warning" if note.event == STALE else "info",
        "pool": note.pool,
        "schedule": note.schedule,
    }
    if note.event != CHANGED:
        return {**event, "reason": note.reason, "count": note.count}
    kept = {
        each.number: each for each in engine.history(note.schedule, (note.before, note.entry)) or ()
    }
    summary, before, after = content_of(kept.get(note.before), kept.get(note.entry))
    event |= {"task": note.task, "digest": note.digest, "number": note.entry}
    event |= {"number_before": note.before, "changed_at": note.at_ns / 1e9, "summary": summary}
    both = {"before": before, "after": after}
    return event | {key: value for key, value in both.items() if value is not None}
