"""Answer commands with --cluster: PostgreSQL in the place of the daemon.

The answers are those of control.sock, so that a command shows them as it shows the daemon's.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, structs

from musterd import __version__
from musterd.ipc.wire.messages import FINAL_STATES, TaskView
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import (
    BreakerList,
    BreakerStatus,
    BulkResult,
    FleetStatus,
    PurgeResult,
    RecentEvents,
    RefusedTask,
    RetryResult,
    TaskList,
    TaskStatus,
    select,
    task_status,
)
from musterd.supervisor.cluster import checks
from musterd.supervisor.cluster.engine import DEAD, Statistics, TaskFilter
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.ctl import (
    cluster_bulk,
    cluster_results,
    cluster_schedules,
    cluster_sessions,
)
from musterd.supervisor.ctl.app import ANSWER_SECONDS, Settings
from musterd.supervisor.ctl.cluster_events import Watch, fits
from musterd.supervisor.ctl.cluster_link import ClusterAway, find_url, told
from musterd.supervisor.ctl.cluster_view import breaker_status, fleet_status, waits_for

POLL_SECONDS = 0.2  # between two looks at tasks that are being cancelled
EVENTS_SECONDS = 1.0  # between two looks at everything, for those who follow
RATES_SECONDS = 5.0  # over which rates are taken
NOT_FAILED, NOT_ENDED, NO_SUCH_TASK = "NotFailed", "NotEnded", "NoSuchTask"

T = TypeVar("T")


class ClusterConnection:
    """Speak for the cluster as `Connection` does for a daemon."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = find_url(settings)
        self._deadline = time.monotonic() + settings.timeout if settings.timeout else None
        self._engine = PostgresEngine(
            self._url, patience_seconds=settings.timeout or ANSWER_SECONDS
        )
        self.done_rates: dict[str, float] = {}  # by pool, when it was looked at last
        self.failed_rates: dict[str, float] = {}
        self._watch = Watch()
        self._events = rpc.Events()
        self._answers: dict[type[rpc.Params], Callable[[Any], object]] = {
            rpc.Status: self._status,
            rpc.ListTasks: self._list,
            rpc.GetTask: self._get,
            rpc.ListDead: self._dead,
            rpc.RetryTasks: self._retry,
            rpc.PurgeTasks: self._purge,
            rpc.CancelTasks: self._cancel,
            rpc.ListBreakers: self._breakers,
            rpc.SetBreaker: self._set_breaker,
            rpc.Events: self._recent_events,
            rpc.ListChanges: lambda asked: cluster_results.changes(self._engine, asked),
            rpc.ShowHistory: lambda asked: cluster_results.history(self._engine, asked),
            rpc.ListSchedules: lambda asked: cluster_schedules.listed(self._engine, asked),
            rpc.GetSchedule: lambda asked: cluster_schedules.keys_of(self._engine, asked.name),
            rpc.PutSchedule: lambda asked: cluster_schedules.put(self._engine, asked),
            rpc.PutSchedules: lambda asked: cluster_schedules.put_many(self._engine, asked),
            rpc.DeleteSchedule: lambda asked: cluster_schedules.delete(self._engine, asked.name),
            rpc.ListSessions: lambda _: cluster_sessions.listed(self._engine),
            rpc.ForgetSession: lambda asked: cluster_sessions.forget(self._engine, asked.name),
            rpc.ResetSession: lambda asked: cluster_sessions.reset(self._engine, asked.name),
            rpc.RunSchedule: lambda asked: cluster_schedules.run(self._engine, asked.name),
            rpc.PauseSchedule: lambda asked: cluster_schedules.pause(
                self._engine, asked.name, paused=True
            ),
            rpc.ResumeSchedule: lambda asked: cluster_schedules.pause(
                self._engine, asked.name, paused=False
            ),
        }
        try:
            with told():
                self._engine.check("version_1", "node")
        except BaseException:
            self._engine.close()
            raise

    def close(self) -> None:
        self._engine.close()

    def interrupt(self) -> None:
        """Nobody waits in another thread."""

    def __enter__(self) -> "ClusterConnection":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def request(self, params: rpc.Params) -> Raw:
        """Return the answer as JSON, as the daemon would give it."""
        answer = self._answers.get(type(params))
        if answer is None:
            command = self._settings.command or rpc.METHOD_OF[type(params)]
            raise rpc.RpcError(
                rpc.INVALID_PARAMS,
                f"'{command}' is about one machine: run it there, without --cluster",
            )
        with told():
            return Raw(msgspec.json.encode(answer(params)))

    def get(self, params: rpc.Params, kind: type[T]) -> T:
        return msgspec.json.decode(self.request(params), type=kind)

    # -- the whole ----------------------------------------------------------------------------

    def look(self) -> FleetStatus:
        """Return all nodes and pools."""
        with told():
            before = time.monotonic()
            nodes = self._engine.nodes()
            answered = time.monotonic() - before
            statistics = self._engine.statistics() or Statistics(0, 0, 0, ())
            recent = self._engine.recent(round(RATES_SECONDS * 1e9))
            self.done_rates = {
                each.pool: (each.succeeded + each.failed) / RATES_SECONDS for each in recent
            }
            self.failed_rates = {each.pool: each.failed / RATES_SECONDS for each in recent}
            return fleet_status(
                nodes,
                statistics.counts,
                recent,
                statistics,
                version=__version__,
                place=checks.place(self._url),
                answer_seconds=answered,
            )

    def _status(self, asked: rpc.Status) -> FleetStatus:
        fleet = self.look()
        chosen = select(fleet, asked.names)
        whole = fleet.at_target or bool(asked.names)
        return structs.replace(chosen, at_target=chosen.at_target and whole)

    # -- tasks --------------------------------------------------------------------------------

    def _find(self, limit: int, where: Selection, state: str, pool: str) -> TaskList:
        where = structs.replace(where, pool=pool)
        found = cluster_bulk.find(self._engine, where, state, limit)
        tasks = [_shown(view, with_value=False) for view in found[:limit]]
        return TaskList(tasks=tasks, more=len(found) > limit)

    def _list(self, asked: rpc.ListTasks) -> TaskList:
        where = asked.where
        return self._find(asked.limit, where, asked.state or where.state, asked.pool or where.pool)

    def _dead(self, asked: rpc.ListDead) -> TaskList:
        where = asked.where
        state = DEAD if where.state in ("", "failed") else where.state
        return self._find(asked.limit, where, state, asked.pool or where.pool)

    def _get(self, asked: rpc.GetTask) -> TaskStatus:
        view = self._engine.view(asked.id)
        if view is None:
            raise rpc.RpcError(
                rpc.NO_SUCH_NAME,
                f"no such task in the cluster: {asked.id!r}: see musterctl --cluster tasks",
            )
        status = _shown(view, with_value=asked.value)
        if status.state == "queued":
            why = waits_for(status, self._engine.nodes(), self._engine.sites())
            status = structs.replace(status, waits_for=why)
        return status

    def _cancel(self, asked: rpc.CancelTasks) -> TaskList | BulkResult:
        if asked.where is not None:
            return cluster_bulk.cancel(self._engine, asked, asked.where)
        ids = list(dict.fromkeys(asked.ids))
        self._engine.cancel(ids)
        while True:
            views = {id_: self._engine.view(id_) for id_ in ids}
            found = [_shown(view, with_value=False) for view in views.values() if view is not None]
            if asked.no_block or all(task.state in FINAL_STATES for task in found):
                missing = [id_ for id_, view in views.items() if view is None]
                return TaskList(tasks=found, missing=missing)
            self._wait()

    def _wait(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise ClusterAway(
                f"not all have ended within {self._settings.timeout:g} seconds: they are cancelled "
                "as soon as their nodes hear of it: wait longer with --timeout"
            )
        time.sleep(POLL_SECONDS)

    def _retry(self, asked: rpc.RetryTasks) -> RetryResult | BulkResult:
        if asked.where is not None:
            return cluster_bulk.retry(self._engine, asked, asked.where)
        ids = list(dict.fromkeys(asked.ids))
        refused = {
            each.id: RefusedTask(each.id, each.code, each.message)
            for each in self._engine.retry(ids)
        }
        return RetryResult(
            retried=[id_ for id_ in ids if id_ not in refused],
            refused=[refused[id_] for id_ in ids if id_ in refused],
        )

    def _purge(self, asked: rpc.PurgeTasks) -> PurgeResult | BulkResult:
        if asked.where is not None:
            return cluster_bulk.purge(self._engine, asked, asked.where)
        ids = tuple(dict.fromkeys(asked.ids))
        refused = []
        for id_ in ids:
            view = self._engine.view(id_)
            if view is None:
                refused.append(RefusedTask(id_, NO_SUCH_TASK, f"no such task: '{id_}'"))
            elif view.state != "failed":
                code = NOT_FAILED if view.state in FINAL_STATES else NOT_ENDED
                why = f"task '{id_}' is {view.state}: only failed tasks are purged"
                refused.append(RefusedTask(id_, code, why))
        which = TaskFilter(
            state="failed", ids=ids or None, older_ns=round(asked.older_than * 1_000_000_000)
        )
        return PurgeResult(purged=self._engine.purge(which), refused=refused)

    # -- sites --------------------------------------------------------------------------------

    def _breakers(self, _asked: rpc.ListBreakers) -> BreakerList:
        return BreakerList(breakers=[breaker_status(site) for site in self._engine.sites()])

    def _set_breaker(self, asked: rpc.SetBreaker) -> BreakerStatus:
        self._engine.breaker(asked.target, asked.command)
        found = [site for site in self._engine.sites() if site.target == asked.target]
        if found:
            return breaker_status(found[0])
        return BreakerStatus(target=asked.target, state="closed")

    # -- events -------------------------------------------------------------------------------

    def _recent_events(self, asked: rpc.Events) -> RecentEvents:
        self._events = asked
        kept = [each for each in self._watch.begin(self._engine) if fits(each, asked)]
        return RecentEvents(recent=kept[len(kept) - asked.limit :] if asked.limit else [])

    def new_events(self) -> list[dict[str, Any]]:
        """Return what has happened since the call before."""
        return self._watch.look(self._engine)

    def stream(self) -> Iterator[bytes]:
        """Yield events as lines, from the looks at the cluster once a second."""
        while True:
            time.sleep(EVENTS_SECONDS)
            for event in self.new_events():
                if fits(event, self._events):
                    yield msgspec.json.encode(event)


def _shown(view: TaskView, *, with_value: bool) -> TaskStatus:
    """Return a task whose `worker` is the node that has claimed it, or ran it last."""
    status = task_status(view, with_value=with_value)
    return structs.replace(status, worker="", node=view.worker)
