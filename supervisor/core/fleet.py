"""Fleet: the whole core behind one door. Events in, actions out.

    fleet.handle(now_ns, event) -> [Action, ...]     decide
    fleet.next_deadline()       -> ns or None        when the shell must send Ticked
    fleet.validate()                                 check what must always hold

The core has no I/O, no clock and no randomness of its own: `now_ns` and the random generator are
handed in. The tables below map each event to the part that handles it. The main parts: intake (what
clients submit), ledger (what waits for the disk), leases (which worker runs what), endings (what
became of a task), gatekeeper (which sites are left alone), lifecycle (of workers), autoscale (how
many workers), shutdown (its phases). The parts share `State`.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from musterd.ipc.wire.messages import Failure, Outcome, TaskSpec
from musterd.supervisor.core.disk_queue.queue import DiskQueue
from musterd.supervisor.core.model import debug_events, events, schedule_events
from musterd.supervisor.core.model.actions import Action, rank_of
from musterd.supervisor.core.model.gates import SessionPlaces, Site
from musterd.supervisor.core.model.lanes import Place
from musterd.supervisor.core.model.ledger import CANCEL, UNPAID, Ledger, UnwrittenBulk
from musterd.supervisor.core.model.memory_use import MemoryUse
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.queue import TASK_BYTES
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.core.reload import Parts, Reload
from musterd.supervisor.core.shutdown import Phase, Shutdown
from musterd.supervisor.core.tasks.added_schedules import AddedSchedules
from musterd.supervisor.core.tasks.claims import Claims
from musterd.supervisor.core.tasks.cluster_watch import ClusterWatch
from musterd.supervisor.core.tasks.coalescing import GOOD, Coalescing
from musterd.supervisor.core.tasks.debugging import Debugging, DebugSession
from musterd.supervisor.core.tasks.endings import Endings
from musterd.supervisor.core.tasks.gatekeeper import BUDGET, Gatekeeper
from musterd.supervisor.core.tasks.gatekeeper import KIND as BREAKER_FACTS
from musterd.supervisor.core.tasks.handler_requests import HandlerRequests
from musterd.supervisor.core.tasks.intake import Intake
from musterd.supervisor.core.tasks.leases import Leases
from musterd.supervisor.core.tasks.logins import FACT as LOGINS
from musterd.supervisor.core.tasks.logins import Logins
from musterd.supervisor.core.tasks.lost_peers import LostPeers
from musterd.supervisor.core.tasks.manual_retry import ManualRetry
from musterd.supervisor.core.tasks.outage import Outage
from musterd.supervisor.core.tasks.pauses import FACT as HALT
from musterd.supervisor.core.tasks.pauses import Pauses
from musterd.supervisor.core.tasks.reception import Reception
from musterd.supervisor.core.tasks.retries import Retries
from musterd.supervisor.core.tasks.schedule import FACT as SCHEDULE
from musterd.supervisor.core.tasks.schedule import Schedule
from musterd.supervisor.core.tasks.schedules import Schedules
from musterd.supervisor.core.tasks.waits import Waits
from musterd.supervisor.core.workers.autoscale import Autoscale
from musterd.supervisor.core.workers.forkservers import News
from musterd.supervisor.core.workers.health_checks import HealthChecks
from musterd.supervisor.core.workers.lifecycle import WorkerLifecycle
from musterd.supervisor.core.workers.pressure import Governor, Stage
from musterd.supervisor.core.workers.sidecar import SidecarState, make_sidecars
from musterd.supervisor.core.workers.sizing import slots_left

Handlers = dict[type, Callable[[Any], None]]


class Fleet:
    def __init__(self, policy: FleetPolicy, rng: Random, last_seq: int = 0) -> None:
        self._state = state = State(policy, rng)
        hooks = _Hooks(self)
        self._ledger = ledger = Ledger(state, hooks)
        self._leases = leases = Leases(state, ledger, hooks)
        self._coalescing = coalescing = Coalescing(state, ledger, leases)
        self._disk_queue = disk_queue = DiskQueue(state, ledger.finish)
        self._reception = reception = Reception(state, ledger)
        self._intake = intake = Intake(
            state,
            ledger,
            leases,
            coalescing,
            disk_queue=disk_queue,
            reception=reception,
            last_seq=last_seq,
        )
        self._outage = Outage(state, ledger, hooks, coalescing, intake.unwritten)
        self._manual_retry = ManualRetry(state, ledger, intake)
        self._keeper = keeper = Gatekeeper(state, ledger, hooks)
        for each in policy.pools:
            state.pools[each.name] = Pool(each, policy.retry, keeper, disk_queue)
        self._retries = retries = Retries(state, ledger, leases, keeper)
        self._claims = claims = Claims(state, leases)
        self.cluster = ClusterWatch(state, claims)
        self._logins = logins = Logins(state, ledger, hooks, keeper, leases, intake=intake)
        self._endings = endings = Endings(
            state, ledger, leases, keeper, retries, claims=claims, logins=logins
        )
        self._lifecycle = lifecycle = WorkerLifecycle(state, leases, endings)
        self._pauses = pauses = Pauses(state, ledger, leases)
        self._autoscale = Autoscale(state, lifecycle)
        self._governor = Governor(state, lifecycle)
        self._handler_requests = HandlerRequests(state, ledger, coalescing, claims)
        self._debugging = Debugging(state, leases)
        self._waits = Waits(state, disk_queue, self._autoscale.bound)
        self._schedules = schedules = Schedules(state, ledger, leases, intake)
        self.added = added = AddedSchedules(state, ledger, schedules)
        self.sidecars = make_sidecars(state, self._place_taken)
        self._shutdown = Shutdown(state, ledger, lifecycle, self.sidecars, claims)
        self._recycling = lifecycle.recycling
        self._replacement = lifecycle.replacement
        self._health_checks = HealthChecks(state, leases, lifecycle.recycling)
        parts = Parts(
            ledger=ledger,
            intake=intake,
            coalescing=coalescing,
            keeper=keeper,
            disk_queue=disk_queue,
            lifecycle=lifecycle,
            added=added,
            autoscale=self._autoscale,
            governor=self._governor,
            retries=retries,
            sidecars=self.sidecars,
            claims=claims,
            logins=logins,
            reception=reception,
        )
        self._reload = Reload(state, parts)
        self._handlers: Handlers = {
            **self._of_tasks(),
            **self._of_workers(),
            **self._of_the_cluster(),
            **self._of_people(),
        }

        # By Fact.kind: which part takes the facts that are read at the start.
        self._facts: dict[str, Callable[[events.FactsRecovered], None]] = {
            GOOD: lambda event: coalescing.recovered(event.facts),
            SCHEDULE: lambda event: added.records_recovered(event.facts),
            BREAKER_FACTS: keeper.recovered,
            LOGINS: logins.recovered,
            HALT: pauses.recovered,
            CANCEL: lambda event: intake.cancelled_before(event.facts),
            BUDGET: retries.recovered_budgets,
            UNPAID: retries.recovered_unpaid,
        }

    def _of_tasks(self) -> Handlers:
        """Return the handlers for tasks and the store."""
        return {
            events.TasksSubmitted: self._intake.submitted,
            events.TasksRecovered: self._intake.recovered,
            schedule_events.AddedRecovered: self.added.recovered,
            events.FactsRecovered: lambda event: self._facts[event.kind](event),
            events.Persisted: _in_turn(
                lambda event: self._ledger.persisted(event.ticket), self._intake.go_on
            ),
            events.StoreFailing: _in_turn(self._outage.failing, self._intake.go_on),
            events.StoreRecovered: self._outage.recovered,
            events.TasksWithdrawn: self._outage.withdrawn,
            events.RetryRequested: self._manual_retry.requested,
            events.EndedFound: self._manual_retry.found,
            events.EndedUnknown: self._manual_retry.unknown,
            events.ResendChecked: self._intake.resend_checked,
            events.ResendUnknown: self._intake.resend_unknown,
            events.DiskTasksRead: self._intake.disk_tasks_read,
            events.TasksWatched: _in_turn(self._intake.watched, self._handler_requests.watched),
            events.StrandedFound: self._reload.stranded_found,
            events.LookedUp: _in_turn(self._reload.looked_up, self._handler_requests.looked_up),
            events.CancelRequested: self._intake.cancel,
            events.InvalidateRequested: self._coalescing.invalidate,
            events.PeerLost: _in_turn(
                self._intake.peer_lost,
                self._reception.peer_lost,
                LostPeers(self._state, self._disk_queue).lost,
            ),
        }

    def _of_workers(self) -> Handlers:
        """Return the handlers for the clock, fork servers, workers and sidecars."""
        return {
            events.Started: self._started,
            events.Ticked: lambda _: self._state.timers.run(self._state.now_ns),
            events.ClockRead: _in_turn(
                self._state.clock_read,
                self._ledger.clock_read,
                self._schedules.clock_read,
                lambda _: self._health_checks.begin(),  # a changed policy may want health checks
                self._lifecycle.fork_servers.keep_spares,
            ),
            events.ForkServerReady: self._of_fork_server,
            events.ForkServerFailed: self._of_fork_server,
            events.ForkServerExited: self._of_fork_server,
            events.MemorySampled: _in_turn(self._governor.sampled, self._recycling.weighed),
            events.WorkerForked: self._lifecycle.forked,
            events.LeftoversEnded: self._lifecycle.leftovers_ended,
            events.SpawnFailed: self._lifecycle.spawn_failed,
            events.WorkerReady: self._lifecycle.ready,
            events.LeasesCompleted: _in_turn(
                self._handler_requests.leases_over,
                self._waits.leases_over,
                self._debugging.leases_over,
                self._endings.completed,
            ),
            events.LeasesReturned: _in_turn(
                self._handler_requests.leases_over,
                self._waits.leases_over,
                self._debugging.leases_over,
                self._endings.returned,
            ),
            events.BoardRead: self._leases.board_read,
            events.BoardsRead: self._health_checks.boards_read,
            events.WorkerExited: _in_turn(
                self._debugging.worker_exited,
                self._lifecycle.exited,
                self._handler_requests.worker_exited,
                self._waits.worker_exited,
                self._lifecycle.fork_servers.keep_spares,
            ),
            events.ProgressMade: self._handler_requests.progressed,
            events.StateWanted: self._handler_requests.state_wanted,
            events.StateGiven: self._handler_requests.state_given,
            events.LockWanted: self._handler_requests.lock_wanted,
            events.LockReturned: self._handler_requests.lock_returned,
            events.WaitBegun: self._waits.begun,
            events.WaitEnded: self._waits.ended,
            debug_events.BreakpointHit: self._debugging.hit,
            debug_events.DebuggerAsked: self._debugging.asked,
            debug_events.DebuggerEnded: self._debugging.ended,
            events.SidecarReady: lambda event: self.sidecars[event.name].ready(event),
            events.SidecarBeat: lambda event: self.sidecars[event.name].beat(event),
            events.SidecarExited: self._sidecar_exited,
        }

    def _of_the_cluster(self) -> Handlers:
        """Return the handlers for what the cluster sidecar tells."""
        claims, requests, watch = self._claims, self._handler_requests, self.cluster
        return {
            events.ClusterConnected: _in_turn(
                watch.connected, claims.connected, requests.connected, self._reception.connected
            ),
            events.ClusterDisconnected: _in_turn(
                claims.disconnected, requests.disconnected, self._reception.disconnected
            ),
            events.ClusterTold: _in_turn(watch.told, self._autoscale.cluster_told),
            events.MembershipTold: _in_turn(
                watch.membership, claims.membership, requests.membership
            ),
            events.AttemptsGranted: _in_turn(claims.granted, self._logins.granted),
            events.AttemptsCancelled: claims.cancelled,
            events.AttemptsLost: claims.lost,
            events.EndsConfirmed: claims.confirmed,
            events.PolicyShared: claims.rules.shared,
            events.ScheduleNoted: claims.rules.noted,
            events.StatesTold: requests.states_told,
            events.LocksTold: requests.locks_told,
        }

    def _started(self, _: events.Started) -> None:
        self._lifecycle.started()
        self._health_checks.begin()
        self._autoscale.started()
        for sidecar in self.sidecars.values():
            sidecar.started()
        self._reception.started()

    def _sidecar_exited(self, event: events.SidecarExited) -> None:
        sidecar = self.sidecars[event.name]
        sidecar.exited(event)
        if event.name == events.CLUSTER:
            fatal = sidecar.state == SidecarState.FATAL
            self._reception.sidecar_exited(sidecar.reason, fatal=fatal)

    def _place_taken(self, reason: str) -> None:
        """End: another daemon has this one's place."""
        if self._shutdown.phase == Phase.UP:
            self._close(events.ShutdownRequested(reason), code=events.EXIT_TAKEN)

    def _close(self, event: events.ShutdownRequested, code: int = 0) -> None:
        self._schedules.closing(event)
        self._shutdown.request(event.reason, sockets_survive=event.sockets_survive, code=code)
        self._lifecycle.fork_servers.keep_spares(event)

    def _of_fork_server(self, event: News) -> None:
        if not self._replacement.heard(event):
            self._lifecycle.fork_servers.heard(event)
        self._lifecycle.fork_servers.keep_spares(event)

    def _of_people(self) -> Handlers:
        """Return the handlers for commands of operators, and for the end."""
        return {
            events.BreakerCommanded: self._keeper.command,
            events.SessionForgotten: self._handler_requests.session_forgotten,
            events.SessionReset: self._logins.reset,
            debug_events.DebuggerAttached: self._debugging.attached,
            debug_events.DebuggerTyped: self._debugging.typed,
            debug_events.DebuggerInterrupted: self._debugging.interrupted,
            debug_events.DebuggerDetached: self._debugging.detached,
            events.StartRequested: self._lifecycle.start,
            events.StopRequested: self._lifecycle.stop_named,
            events.RestartRequested: self._lifecycle.restart,
            events.ResetRequested: self._lifecycle.reset,
            events.PauseRequested: self._pauses.pause,
            events.DrainRequested: self._pauses.drain,
            events.ResumeRequested: self._pauses.resume,
            events.ScaleRequested: self._autoscale.scale,
            events.AutoscaleRequested: self._autoscale.resumed,
            schedule_events.ScheduleRunRequested: self._schedules.run_now,
            schedule_events.SchedulePauseRequested: self._schedules.pause,
            schedule_events.SchedulePutRequested: self.added.put,
            schedule_events.ScheduleDeleteRequested: self.added.delete,
            events.ChangesFollowed: self._schedules.followed,
            events.ChangeTold: self._schedules.change_told,
            events.PolicyChanged: self._reload.policy_changed,
            events.ShutdownRequested: self._close,
            events.CleanupFinished: lambda event: self._shutdown.cleaned_up(event.reason),
        }

    @property
    def fact_kinds(self) -> list[str]:
        """Return the kinds of facts that the shell sends as FactsRecovered before anything else."""
        return list(self._facts)

    @property
    def results_remembered(self) -> int:
        return self._coalescing.results

    def handle(self, now_ns: int, event: Any) -> list[Action]:
        """Decide what an event means. The shell carries the actions out in their order."""
        state = self._state
        assert now_ns >= state.now_ns, "time does not go back"
        state.now_ns = now_ns
        self._handlers[type(event)](event)
        if self._claims.awake:
            self._claims.before_dispatch()
        if self._replacement.rolling:
            self._replacement.advance()
        if self._reload.removing:
            self._reload.advance()
        if state.recycling_due:
            self._recycling.advance()
        if self._debugging.sessions:
            self._debugging.advance()
        self._dispatch()
        if not state.recovering:
            self._settle()
        if self._claims.awake:
            self._claims.after_dispatch()
        self._ledger.close_page()
        if self._shutdown.phase != Phase.UP:
            self._shutdown.advance()
        out = state.out
        state.out = []
        if len(out) > 1:
            out.sort(key=rank_of)
        return out

    def _settle(self) -> None:
        while self._logins.settle() or self._keeper.settle() or self._disk_queue.turn():
            self._dispatch()  # tasks that ended, or came from disk, may let another lane go on

    def _dispatch(self) -> None:
        for pool in self._state.pools.values():
            if pool.queue.size and not pool.halt:
                if pool.free_slots:
                    self._leases.dispatch(pool)
                if not pool.watched and pool.queue.size:
                    self._autoscale.notice(pool)

    def next_deadline(self) -> int | None:
        """Return when handle(now, Ticked()) is due, or None."""
        return self._state.timers.next_deadline()

    # -- what others read ---------------------------------------------------------------------

    @property
    def policy(self) -> FleetPolicy:
        return self._state.policy

    @property
    def pools(self) -> dict[str, Pool]:
        return self._state.pools

    @property
    def tasks(self) -> dict[str, Task]:
        return self._state.tasks

    @property
    def attempts(self) -> int:
        """Return how many attempts of the cluster are here."""
        return len(self._state.claimed)

    @property
    def refuses_shared(self) -> bool:
        """Whether new tasks of the cluster are refused, because its sidecar is not there."""
        return self._reception.refusing

    def leased(self, worker: int, lease: int) -> Task | None:
        """Return the task of a lease that a worker has."""
        slot = self._state.workers.get(worker)
        return slot.leases.get(lease) if slot is not None else None

    def alive(self, id_: str) -> bool:
        """Whether a task of this id is known and has not ended."""
        return self._intake.alive(id_)

    @property
    def on_disk(self) -> dict[str, Place]:
        """Return the places of the tasks that are only on disk, by id."""
        return self._disk_queue.places

    @property
    def stranded(self) -> dict[str, int]:
        """Return removed pools with the number of their tasks that stay in the store."""
        return self._reload.stranded

    @property
    def schedules(self) -> dict[str, Schedule]:
        return self._schedules.by_name

    @property
    def sites(self) -> dict[str, Site]:
        return self._keeper.sites

    @property
    def sessions(self) -> dict[str, SessionPlaces]:
        """Return the sessions that tasks have used or wait for."""
        return self._keeper.sessions

    @property
    def debugged(self) -> dict[int, DebugSession]:
        """Return the handlers that wait at a breakpoint or are debugged, by worker."""
        return self._debugging.sessions

    @property
    def breaker_transitions(self) -> dict[str, int]:
        """Return how often breakers have changed to each state."""
        return self._keeper.transitions

    @property
    def phase(self) -> Phase:
        return self._shutdown.phase

    @property
    def memory(self) -> MemoryUse:
        return self._state.memory

    @property
    def stage(self) -> Stage:
        """Return what is done about memory at the moment."""
        return self._governor.stage

    @property
    def now_ns(self) -> int:
        return self._state.now_ns

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        state = self._state
        self._handler_requests.validate()
        self._waits.validate()
        self._debugging.validate()
        counted: dict[str, list[int]] = {name: [0, 0, 0] for name in state.pools}
        sizes = self._ledger.unwritten_bytes()
        for task in state.tasks.values():
            counts = counted[task.route.pool.name]
            if task.state == TaskState.ENDING:
                assert task.outcome is not None and task.slot is None, task.spec.id
                continue
            counts[0] += 1
            sizes[task.route.pool.name] += len(task.spec.args) + TASK_BYTES
            if task.state == TaskState.LEASED:
                assert task.slot is not None and task.slot.leases[task.lease] is task
                assert task.slot.worker in state.workers, task.slot.name
                counts[1] += 1
            else:
                assert task.slot is None and task.lease == 0, task.spec.id
            counts[2] += task.state in (TaskState.WAITING, TaskState.JOINED)
        self._keeper.validate()
        self._logins.validate()
        self.added.validate()
        self._replacement.validate()
        self._coalescing.validate()
        self._claims.validate()
        self._reception.validate()
        self._disk_queue.validate()
        unstored = self._ledger.unstored()
        for name, pool in state.pools.items():
            pool.validate()
            assert pool.unstored == unstored.get(name, 0), (name, pool.unstored, unstored)
            assert pool.queue.bytes == sizes[name], (name, pool.queue.bytes, sizes[name])
            in_memory = pool.live - pool.queue.on_disk
            assert counted[name] == [in_memory, pool.leased, pool.waiting], (name, counted[name])
            for slot in pool.everyone:
                if slot.worker:
                    assert state.workers[slot.worker] is slot
                else:
                    assert not slot.leases and slot.state not in (
                        SlotState.RUNNING,
                        SlotState.DRAINING,
                    ), slot.name
                assert (slot not in pool.free_slots) or slot.state == SlotState.RUNNING
                assert (slot not in pool.free_slots) or not slot.halt, slot.name
                assert not slot.held or slot.state in (SlotState.STOPPED, SlotState.DRAINING)
            if state.intake_open:
                assert slots_left(pool) >= 0, (
                    f"{pool.name}: more slots than its limit of {pool.limit}"
                )
        for worker, slot in state.workers.items():
            assert slot.worker == worker and slot in slot.pool.everyone, slot.name


class _Hooks:
    """Passes news on to parts that are made later (model/hooks.py)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def stored(self, tasks: list[Task]) -> None:
        self._fleet._leases.stored(tasks)

    def written(self, written: list[UnwrittenBulk]) -> None:
        self._fleet._intake.unwritten.written(written)

    def ended(self, task: Task, outcome: Outcome) -> None:
        self._fleet._coalescing.ended(task, outcome)

    def last_good(self, spec: TaskSpec) -> bytes | None:
        return self._fleet._coalescing.good(spec)

    def schedule_ended(self, task: Task) -> None:
        self._fleet._schedules.ended(task)

    def schedule_retried(self, id_: str, alive: bool) -> None:
        self._fleet._schedules.retried(id_, alive)

    def session_ended(self, task: Task, outcome: Outcome | None) -> None:
        self._fleet._logins.ended(task, outcome)

    def login_failed(self, task: Task, failure: Failure) -> None:
        self._fleet._endings.login_failed(task, failure)

    def earned(self, site: Site) -> None:
        self._fleet._retries.earned(site)

    def owes(self, task: Task, ready_ns: int) -> bool:
        return self._fleet._retries.owes(task, ready_ns)

    def claim_begun(self, task: Task) -> None:
        self._fleet._claims.begun(task)

    def claim_ended(self, task: Task, state: str, failure: Failure | None, run_ns: int) -> None:
        self._fleet._claims.ended(task, state, failure, run_ns)


def _in_turn(*handlers: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a handler that calls all of these."""

    def handle(event: Any) -> None:
        for each in handlers:
            each(event)

    return handle
