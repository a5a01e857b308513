"""What people ask on control.sock: each method becomes an event, and an answer when it is done."""

import os
import platform
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from musterd import __version__
from musterd.ipc.messages import FINAL_STATES, Outcome, Rejection, TaskView
from musterd.supervisor import overview, rpc
from musterd.supervisor.breaker_commands import BreakerCommands
from musterd.supervisor.control_connection import Pending
from musterd.supervisor.control_socket import Caller
from musterd.supervisor.core import events
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.slot import Slot, SlotState
from musterd.supervisor.dead_commands import PEER_PREFIX as RETRY_PREFIX
from musterd.supervisor.dead_commands import DeadCommands
from musterd.supervisor.inquiry import look_at
from musterd.supervisor.questions import Questions
from musterd.supervisor.rpc import FAILED, RpcError
from musterd.supervisor.schedule_commands import PEER_PREFIX as SCHEDULE_PREFIX
from musterd.supervisor.schedule_commands import ScheduleCommands
from musterd.supervisor.status import (
    WHOLE_POOL,
    CacheResult,
    CommandResult,
    FleetStatus,
    PidResult,
    SlotPid,
    SlotResult,
    TaskList,
    TaskStatus,
    VersionResult,
    expand,
    select,
    task_status,
)
from musterd.supervisor.store import StoredTask

PEER_PREFIX = b"control:"  # how the core knows a caller that waits; ZeroMQ's own start with NUL

Names = tuple[tuple[str, int], ...]


class Office(Protocol):
    """What the commands need of the daemon."""

    fleet: Fleet

    @property
    def questions(self) -> Questions: ...
    def feed(self, event: object) -> None: ...
    def submit(self, event: events.TasksSubmitted) -> None: ...
    def status(self) -> FleetStatus: ...
    def signal_worker(self, worker: int, number: int) -> None: ...
    def now_ns(self) -> int: ...
    def wall_ns(self) -> int: ...


class Wait(Struct):
    """A caller that is answered when the slots it named are where it wants them."""

    pending: Pending
    names: Names
    reached: Callable[[Slot], bool]
    failed: Callable[[Slot], bool]
    workers: dict[str, int]  # for a restart: the worker that must be gone


class Submit(Struct):
    """A caller that submitted a task."""

    pending: Pending
    params: rpc.SubmitTask
    end: TaskStatus | None = None  # of a task that has ended, until the store has told when


class Commands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._waits: list[Wait] = []
        self._submits: dict[bytes, Submit] = {}
        self._cancels: list[tuple[Pending, rpc.CancelTasks]] = []
        self._exit_waits: list[Pending] = []
        self._peers = 0
        self._schedules = ScheduleCommands(office)
        self._dead = DeadCommands(office)
        self._methods: dict[type, Callable[[Any], object]] = {
            rpc.Status: self._status,
            rpc.Start: self._start,
            rpc.Stop: self._stop,
            rpc.Restart: self._restart,
            rpc.Reset: self._reset,
            rpc.Scale: self._scale,
            rpc.Signal: self._signal,
            rpc.Pid: self._pid,
            rpc.SubmitTask: self._submit,
            rpc.GetTask: self._get,
            rpc.ListTasks: self._list,
            rpc.CancelTasks: self._cancel,
            rpc.InvalidateCache: self._invalidate,
            rpc.Shutdown: self._shutdown,
            rpc.Version: self._version,
            **self._dead.methods(),
            **self._schedules.methods(),
            **BreakerCommands(office).methods(),
        }

    def call(self, method: str, params: rpc.Params, caller: Caller) -> object:
        """A result, an RpcError, or a Pending; called by the ControlServer."""
        return self._methods[type(params)](params)

    # -- looking ------------------------------------------------------------------------------

    def _status(self, params: rpc.Status) -> object:
        return select(self._office.status(), params.names)

    def _version(self, _params: rpc.Version) -> object:
        return VersionResult(version=__version__, pid=os.getpid(), python=platform.python_version())

    def _pid(self, params: rpc.Pid) -> object:
        slots = self._slots(self._expand(params.names)) if params.names else []
        return PidResult(
            supervisor=os.getpid(),
            workers=[SlotPid(slot.name, slot.pid) for slot in slots if slot.pid],
        )

    # -- slots --------------------------------------------------------------------------------

    def _expand(self, names: list[str]) -> Names:
        pools = self._office.fleet.pools
        return expand(
            names, {name: [slot.index for slot in pool.slots] for name, pool in pools.items()}
        )

    def _slots(self, names: Names) -> list[Slot]:
        found: dict[Slot, None] = {}
        for pool_name, index in names:
            for slot in self._office.fleet.pools[pool_name].slots:
                if index in (WHOLE_POOL, slot.index):
                    found[slot] = None
        return list(found)

    def _start(self, params: rpc.Start) -> object:
        names = self._expand(params.names)
        self._office.feed(events.StartRequested(names))
        return self._wait_for(names, params.no_block, _is_up, _is_down)

    def _stop(self, params: rpc.Stop) -> object:
        names = self._expand(params.names)
        self._office.feed(events.StopRequested(names))
        return self._wait_for(names, params.no_block, _is_stopped, _never)

    def _restart(self, params: rpc.Restart) -> object:
        names = self._expand(params.names)
        before = {slot.name: slot.worker for slot in self._slots(names)}
        self._office.feed(events.RestartRequested(names))
        return self._wait_for(names, params.no_block, _is_up, _is_down, before)

    def _reset(self, params: rpc.Reset) -> object:
        names = self._expand(params.names)
        self._office.feed(events.ResetRequested(names))
        return self._wait_for(names, params.no_block, _is_settled, _is_down)

    def _scale(self, params: rpc.Scale) -> object:
        pool = self._office.fleet.pools.get(params.pool)
        if pool is None:
            self._expand([params.pool])  # says which names there are
            raise RpcError(rpc.NO_SUCH_NAME, f"no such pool: {params.pool!r}")
        self._office.feed(events.ScaleRequested(params.pool, params.size))
        return self._wait_for(
            ((params.pool, WHOLE_POOL),),
            params.no_block,
            lambda slot: slot.index < pool.size and _is_up(slot),
            _is_down,
        )

    def _signal(self, params: rpc.Signal) -> object:
        number = rpc.signal_number(params.signal)
        results = []
        for slot in self._slots(self._expand(params.names)):
            if slot.pid:
                self._office.signal_worker(slot.worker, number)
            results.append(_result(slot, bool(slot.pid), "" if slot.pid else "it has no process"))
        return CommandResult(slots=results)

    def _wait_for(
        self,
        names: Names,
        no_block: bool,
        reached: Callable[[Slot], bool],
        failed: Callable[[Slot], bool],
        workers: dict[str, int] | None = None,
    ) -> object:
        if no_block:
            slots = self._slots(names)
            return CommandResult(slots=[_result(slot, True) for slot in slots], done=False)
        wait = Wait(Pending(), names, reached, failed, workers or {})
        if not self._settle(wait):
            self._waits.append(wait)
        return wait.pending

    def _settle(self, wait: Wait) -> bool:
        """Answer if every slot has got there or failed; whether it did."""
        if wait.pending.abandoned:
            return True
        results = []
        for slot in self._slots(wait.names):
            still_old = wait.workers.get(slot.name) == slot.worker != 0
            if not still_old and wait.reached(slot):
                results.append(_result(slot, True))
            elif not still_old and wait.failed(slot):
                results.append(_result(slot, False, slot.reason))
            else:
                return False
        wait.pending.resolve(CommandResult(slots=results))
        return True

    # -- tasks --------------------------------------------------------------------------------

    def _submit(self, params: rpc.SubmitTask) -> object:
        spec = rpc.task_spec(params)
        self._peers += 1
        peer = PEER_PREFIX + str(self._peers).encode()
        pending = Pending(on_abandoned=lambda: self._submits.pop(peer, None))
        self._submits[peer] = Submit(pending, params)
        # The id is the caller's: a repeated submit is the same task, also when it has ended.
        self._office.submit(events.TasksSubmitted(peer, 0, [spec], self._office.wall_ns(), True))
        return pending

    def acknowledged(self, peer: bytes, rejected: list[Rejection]) -> None:
        """The core's answer to a submit of ours."""
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
            found.pending.fail(rpc.rejected(rejected[0]))
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
            )
        )

        def found(stored: list[StoredTask]) -> None:
            if self._submits.pop(peer, None) is not None:  # else the caller is gone
                view = task_status(overview.stored_view(stored[0])) if stored else submit.end
                submit.pending.resolve(view)

        self._office.questions.find([outcome.id], found)  # it knows the times

    def _get(self, params: rpc.GetTask) -> object:
        pending = Pending()

        def found(view: TaskView | None) -> None:
            if view is not None:
                pending.resolve(task_status(view))
            else:
                pending.fail(
                    RpcError(
                        rpc.NO_SUCH_NAME,
                        f"no such task: {params.id!r}: never "
                        "accepted, or forgotten after keep_results",
                    )
                )

        look_at(self._office, params.id, found)
        return pending

    def _list(self, params: rpc.ListTasks) -> object:
        live = [] if params.state in FINAL_STATES else self._live(params)
        if params.state and params.state not in FINAL_STATES:
            return TaskList(tasks=live[: params.limit], more=len(live) > params.limit)
        pending = Pending()

        def found(stored: list[StoredTask]) -> None:
            views = [task_status(overview.stored_view(each), with_value=False) for each in stored]
            tasks = live + views
            pending.resolve(TaskList(tasks=tasks[: params.limit], more=len(tasks) > params.limit))

        self._office.questions.list_finished(
            params.state or None, params.pool or None, params.limit + 1, found
        )
        return pending

    def _live(self, params: rpc.ListTasks) -> list[TaskStatus]:
        """Newest first; no more than asked for (and one, to know that there are more)."""
        now_ns = self._office.now_ns()
        found: list[TaskStatus] = []
        for task in reversed(self._office.fleet.tasks.values()):
            if params.pool and task.route.pool.name != params.pool:
                continue
            view = overview.live_view(task, now_ns)
            if not params.state or view.state == params.state:
                found.append(task_status(view))
                if len(found) > params.limit:
                    break
        return found

    def _cancel(self, params: rpc.CancelTasks) -> object:
        self._office.feed(events.CancelRequested(params.ids))
        pending = Pending()
        if params.no_block:
            self._answer_cancel(pending, params)
        else:
            self._cancels.append((pending, params))
        return pending

    def _answer_cancel(self, pending: Pending, params: rpc.CancelTasks) -> None:
        tasks = self._office.fleet.tasks
        now_ns = self._office.now_ns()
        live = [
            task_status(overview.live_view(tasks[id_], now_ns))
            for id_ in params.ids
            if id_ in tasks
        ]
        rest = [id_ for id_ in params.ids if id_ not in tasks]

        def found(stored: list[StoredTask]) -> None:
            ended = [task_status(overview.stored_view(each), with_value=False) for each in stored]
            known = {each.id for each in ended}
            pending.resolve(
                TaskList(tasks=live + ended, missing=[id_ for id_ in rest if id_ not in known])
            )

        self._office.questions.find(rest, found)

    def _invalidate(self, params: rpc.InvalidateCache) -> object:
        before = self._office.fleet.results_remembered
        self._office.feed(events.InvalidateRequested(params.key, params.prefix))
        return CacheResult(forgotten=before - self._office.fleet.results_remembered)

    # -- the daemon ---------------------------------------------------------------------------

    def _shutdown(self, params: rpc.Shutdown) -> object:
        self._office.feed(events.ShutdownRequested("asked for by musterctl"))
        if params.no_block:
            return CommandResult(done=False)
        pending = Pending()
        self._exit_waits.append(pending)
        return pending

    def ending(self) -> None:
        """The daemon is about to exit: tell those who wait for that, and those who never will."""
        for pending in self._exit_waits:
            pending.resolve(CommandResult())
        gone = RpcError(FAILED, "the daemon is shutting down")
        for wait in self._waits:
            wait.pending.fail(gone)
        for submit in self._submits.values():
            if submit.end is not None:
                submit.pending.resolve(submit.end)
            else:
                submit.pending.fail(gone)
        self._schedules.ending()
        self._dead.ending()
        self._exit_waits, self._waits, self._submits = [], [], {}

    def settle(self) -> None:
        """After each turn of the loop: answer whoever has got what it waits for."""
        if self._waits:
            self._waits = [wait for wait in self._waits if not self._settle(wait)]
        if self._cancels:
            tasks = self._office.fleet.tasks
            waiting = self._cancels
            self._cancels = []
            for pending, params in waiting:
                if pending.abandoned:
                    continue
                if any(id_ in tasks for id_ in params.ids):
                    self._cancels.append((pending, params))
                else:
                    self._answer_cancel(pending, params)


def _is_up(slot: Slot) -> bool:
    return slot.state == SlotState.RUNNING


def _is_down(slot: Slot) -> bool:
    return slot.state in (SlotState.FATAL, SlotState.BACKOFF, SlotState.STOPPED)


def _is_stopped(slot: Slot) -> bool:
    return slot.state == SlotState.STOPPED


def _is_settled(slot: Slot) -> bool:
    return slot.state in (SlotState.RUNNING, SlotState.STOPPED)


def _never(_slot: Slot) -> bool:
    return False


def _result(slot: Slot, ok: bool, reason: str = "") -> SlotResult:
    return SlotResult(name=slot.name, ok=ok, state=slot.shown_state, pid=slot.pid, reason=reason)
