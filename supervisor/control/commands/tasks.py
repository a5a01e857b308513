"""What people ask on control.sock: each method becomes an event, and an answer when it is done."""

import os
import platform
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from musterd import __version__
from musterd.ipc.wire.messages import FINAL_STATES, QUEUED, Outcome, Rejection, TaskView
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.rpc import FAILED, RpcError
from musterd.supervisor.api.status import (
    CacheResult,
    CommandResult,
    FleetStatus,
    TaskList,
    TaskStatus,
    VersionResult,
    select,
    task_status,
)
from musterd.supervisor.control.commands.alerts import OWN_ONLY, AlertCommands, Publish
from musterd.supervisor.control.commands.breakers import BreakerCommands
from musterd.supervisor.control.commands.cancel import PEER_PREFIX as CANCEL_PREFIX
from musterd.supervisor.control.commands.cancel import CancelCommands
from musterd.supervisor.control.commands.dead import PEER_PREFIX as RETRY_PREFIX
from musterd.supervisor.control.commands.dead import DeadCommands
from musterd.supervisor.control.commands.reload import ReloadCommands
from musterd.supervisor.control.commands.schedules import PEER_PREFIX as SCHEDULE_PREFIX
from musterd.supervisor.control.commands.schedules import ScheduleCommands
from musterd.supervisor.control.commands.slots import SlotCommands
from musterd.supervisor.control.connection import Pending, unreadable
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.log.worker_output import Outputs
from musterd.supervisor.service.reload import Reloading
from musterd.supervisor.service.wall_clock import WallClock
from musterd.supervisor.sockets.listen import Caller
from musterd.supervisor.store.interface import StoredTask
from musterd.supervisor.store.requests import BUSY, StoreRequests
from musterd.supervisor.views import fleet as fleet_view
from musterd.supervisor.views.metrics import Figures
from musterd.supervisor.views.task import look_at

PEER_PREFIX = b"control:"  # how the core knows a caller that waits; ZeroMQ's own start with NUL

ASK_THE_STORE = (
    *(rpc.SubmitTask, rpc.GetTask, rpc.ListTasks, rpc.CancelTasks),
    *(rpc.ListDead, rpc.RetryTasks, rpc.PurgeTasks),
)


class Office(Protocol):
    """What the commands need of the daemon."""

    fleet: Fleet
    reloading: Reloading
    figures: Figures
    clock: WallClock

    @property
    def store_requests(self) -> StoreRequests: ...
    @property
    def outputs(self) -> Outputs: ...
    def feed(self, event: object) -> None: ...
    def submit(self, event: events.TasksSubmitted) -> None: ...
    def shut_down(self, reason: str) -> None: ...
    def status(self) -> FleetStatus: ...
    def memory_status(self) -> MemoryStatus: ...
    def signal_worker(self, worker: int, number: int) -> None: ...
    def now_ns(self) -> int: ...
    def wall_ns(self) -> int: ...


class Submit(Struct):
    """A caller that submitted a task."""

    pending: Pending
    params: rpc.SubmitTask
    end: TaskStatus | None = None  # of a task that has ended, until the store has told when


def _listed(stored: StoredTask) -> TaskStatus:
    return task_status(fleet_view.stored_view(stored), with_value=False)


class Commands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._submits: dict[bytes, Submit] = {}
        self._exit_waits: list[Pending] = []
        self._peers = 0
        self._slots = SlotCommands(office)
        self._schedules = ScheduleCommands(office)
        self._dead = DeadCommands(office)
        self._cancels = CancelCommands(office)
        self._reloads = ReloadCommands(office)
        self._alerts = AlertCommands(office)
        self._methods: dict[type, Callable[[Any], object]] = {
            rpc.Status: self._status,
            rpc.SubmitTask: self._submit,
            rpc.GetTask: self._get,
            rpc.ListTasks: self._list,
            rpc.InvalidateCache: self._invalidate,
            rpc.Shutdown: self._shutdown,
            rpc.Version: self._version,
            rpc.ShowClock: lambda _: self._office.clock.status(),
            rpc.AcceptClock: self._accept_clock,
            rpc.Memory: lambda _: self._office.memory_status(),
            rpc.Metrics: lambda _: self._office.figures.all(),
            **self._slots.methods(),
            **self._cancels.methods(),
            **self._dead.methods(),
            **self._reloads.methods(),
            **self._schedules.methods(),
            **BreakerCommands(office).methods(),
            **self._alerts.methods(),
        }

    @property
    def publish(self) -> Publish:
        """Tells those who follow events; set by the daemon."""
        return self._alerts.publish

    @publish.setter
    def publish(self, publish: Publish) -> None:
        self._alerts.publish = publish

    def call(self, method: str, params: rpc.Params, caller: Caller) -> object:
        """A result, an RpcError, or a Pending; called by the ControlServer."""
        if isinstance(params, OWN_ONLY) and caller.uid not in (0, os.geteuid()):
            return RpcError(rpc.NOT_ALLOWED, f"not allowed: {method} is for the daemon's own")
        if isinstance(params, ASK_THE_STORE) and self._office.store_requests.full:
            return RpcError(rpc.LIMIT_REACHED, BUSY)
        return self._methods[type(params)](params)

    # -- looking ------------------------------------------------------------------------------

    def _status(self, params: rpc.Status) -> object:
        return select(self._office.status(), params.names)

    def _version(self, _params: rpc.Version) -> object:
        return VersionResult(version=__version__, pid=os.getpid(), python=platform.python_version())

    def _accept_clock(self, _params: rpc.AcceptClock) -> object:
        self._office.clock.accept()
        return self._office.clock.status()

    # -- tasks --------------------------------------------------------------------------------

    def _submit(self, params: rpc.SubmitTask) -> object:
        spec = convert.task_spec(params)
        self._peers += 1
        peer = PEER_PREFIX + str(self._peers).encode()
        pending = Pending(on_abandoned=lambda: self._submits.pop(peer, None))
        self._submits[peer] = Submit(pending, params)
        # The id is the caller's: a repeated submit is the same task, also when it has ended.
        self._office.submit(events.TasksSubmitted(peer, 0, [spec], self._office.wall_ns(), True))
        return pending

    def acknowledged(self, peer: bytes, rejected: list[Rejection]) -> None:
        """The core's answer to a submit of ours."""
        if peer.startswith(CANCEL_PREFIX):
            self._cancels.acknowledged(peer)
            return
        if peer.startswith(RETRY_PREFIX):
            self._dead.acknowledged(peer, rejected)
            return
        if peer.startswith(SCHEDULE_PREFIX):
            self._schedules.acknowledged(peer, rejected)
            return
        found = self._submits.get(peer)
        if found is None:
            return
        params = found.params
        if rejected:
            del self._submits[peer]
            found.pending.fail(convert.rejected(rejected[0]))
        elif not params.wait:
            del self._submits[peer]
            found.pending.resolve(TaskStatus(id=params.id, name=params.name, state="queued"))

    def delivered(self, peer: bytes, outcomes: list[Outcome]) -> None:
        """The end of a task a caller waits for."""
        submit = self._submits.get(peer)
        if submit is None or not outcomes:
            return
        (outcome,) = outcomes  # there was one task
        submit.end = task_status(
            TaskView(
                outcome.id,
                submit.params.name,
                outcome.state,
                submit.params.priority,
                submit.params.target,
                outcome.attempts,
                run_seconds=outcome.run_ns / 1e9,
                failure=outcome.failure,
                value=outcome.value,
                source=outcome.source,
            )
        )

        def found(stored: list[StoredTask]) -> None:
            if self._submits.pop(peer, None) is not None:  # else the caller is gone
                view = task_status(fleet_view.stored_view(stored[0])) if stored else submit.end
                submit.pending.resolve(view)

        # It knows the times.
        self._office.store_requests.find([outcome.id], found, lambda: found([]))

    def unknown(self, peer: bytes) -> None:
        """How a task ended that a caller waits for cannot be read."""
        submit = self._submits.pop(peer, None)
        if submit is not None:
            unreadable(submit.pending)()

    def _get(self, params: rpc.GetTask) -> object:
        pending = Pending()

        def found(view: TaskView | None) -> None:
            if view is not None:
                pending.resolve(task_status(view, with_value=params.value))
            else:
                pending.fail(
                    RpcError(
                        rpc.NO_SUCH_NAME,
                        f"no such task: {params.id!r}: never "
                        "accepted, or forgotten after keep_results",
                    )
                )

        look_at(self._office, params.id, found, unreadable(pending))
        return pending

    def _list(self, params: rpc.ListTasks) -> object:
        ended = params.state in (*FINAL_STATES, "finished")
        live = [] if ended else self._live(params)
        on_disk = self._office.fleet.on_disk
        pending = Pending()

        def found(stored: list[StoredTask]) -> None:
            tasks = live + [_listed(each) for each in stored]
            pending.resolve(TaskList(tasks=tasks[: params.limit], more=len(tasks) > params.limit))

        def found_live(stored: list[StoredTask]) -> None:
            live.extend([_listed(each) for each in stored if each.spec.id in on_disk])
            live.sort(key=lambda each: each.submitted_at, reverse=True)
            list_finished()

        def list_finished() -> None:
            if params.state and not ended:
                found([])
                return
            state = params.state if params.state in FINAL_STATES else None
            self._office.store_requests.list_finished(
                state, params.pool or None, params.limit + 1, found, unreadable(pending)
            )

        if on_disk and params.state in ("", QUEUED):
            self._office.store_requests.list_live(
                params.pool or None, params.limit + 1, found_live, unreadable(pending)
            )
        else:
            list_finished()
        return pending

    def _live(self, params: rpc.ListTasks) -> list[TaskStatus]:
        """Newest first; no more than asked for (and one, to know that there are more)."""
        now_ns = self._office.now_ns()
        found: list[TaskStatus] = []
        for task in reversed(self._office.fleet.tasks.values()):
            if params.pool and task.route.pool.name != params.pool:
                continue
            if params.state and fleet_view.shown_state(task) != params.state:
                continue  # before anything else is made of it: there may be thousands
            found.append(task_status(fleet_view.live_view(task, now_ns)))
            if len(found) > params.limit:
                break
        return found

    def _invalidate(self, params: rpc.InvalidateCache) -> object:
        before = self._office.fleet.results_remembered
        self._office.feed(events.InvalidateRequested(params.key, params.prefix))
        return CacheResult(forgotten=before - self._office.fleet.results_remembered)

    # -- the daemon ---------------------------------------------------------------------------

    def _shutdown(self, params: rpc.Shutdown) -> object:
        self._office.shut_down("asked for by musterctl")
        if params.no_block:
            return CommandResult(done=False)
        pending = Pending()
        self._exit_waits.append(pending)
        return pending

    def ending(self) -> None:
        """The daemon is about to exit: tell those who wait for that, and those who never will."""
        for pending in self._exit_waits:
            pending.resolve(CommandResult())
        gone = RpcError(
            FAILED,
            "the daemon is shutting down before it could say whether the task is stored: submit it"
            " again with the same id when it is up",
        )
        for submit in self._submits.values():
            if submit.end is not None:
                submit.pending.resolve(submit.end)
            else:
                submit.pending.fail(gone)
        self._slots.ending()
        self._schedules.ending()
        self._dead.ending()
        self._cancels.ending()
        self._reloads.ending()
        self._alerts.ending()
        self._exit_waits, self._submits = [], {}

    def settle(self) -> None:
        """After each turn of the loop: answer whoever has got what it waits for."""
        self._reloads.settle()
        self._slots.settle()
        self._cancels.settle()
