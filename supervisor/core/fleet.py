"""The whole core behind one door: events in, actions out.

    fleet.handle(now_ns, event) -> [Action, ...]     decide
    fleet.next_deadline()       -> ns or None        when to come back with Ticked
    fleet.validate()                                 check what must always hold

No I/O, no clock, no randomness of its own: `now_ns` and the random generator are handed in.
The parts: intake (what clients ask), ledger (what waits for the disk), leases (who runs what),
endings (what became of it), gatekeeper (which sites are left alone), staff (the life of workers),
autoscale (how many of them), shutdown (its phases). They share `State` and nothing else.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from musterd.ipc.messages import Outcome
from musterd.supervisor.core import events, shelf_rules
from musterd.supervisor.core.actions import Action, can_wait
from musterd.supervisor.core.attendant import Attendants
from musterd.supervisor.core.attendant_events import AttendantBeat, AttendantExited, AttendantReady
from musterd.supervisor.core.autoscale import Autoscale
from musterd.supervisor.core.coalescing import GOOD, Coalescing
from musterd.supervisor.core.desk import Desk
from musterd.supervisor.core.endings import Endings
from musterd.supervisor.core.gatekeeper import BUDGET, Gatekeeper
from musterd.supervisor.core.gatekeeper import KIND as BREAKER_FACTS
from musterd.supervisor.core.gates import Site
from musterd.supervisor.core.halts import FACT as HALT
from musterd.supervisor.core.halts import Halts
from musterd.supervisor.core.intake import Intake
from musterd.supervisor.core.leases import Leases
from musterd.supervisor.core.ledger import CANCEL, UNPAID, Ledger
from musterd.supervisor.core.lost_peers import LostPeers
from musterd.supervisor.core.memory import Memory
from musterd.supervisor.core.outage import Outage
from musterd.supervisor.core.policy import FleetPolicy
from musterd.supervisor.core.pool import Pool
from musterd.supervisor.core.pressure import Governor, Stage
from musterd.supervisor.core.queue import TASK_BYTES
from musterd.supervisor.core.reload import Parts, Reload
from musterd.supervisor.core.retries import Retries
from musterd.supervisor.core.revival import Revival
from musterd.supervisor.core.rounds import Rounds
from musterd.supervisor.core.schedules import FACT as SCHEDULE
from musterd.supervisor.core.schedules import Schedule, Schedules
from musterd.supervisor.core.shelf import Place, Shelf
from musterd.supervisor.core.shutdown import Phase, Shutdown
from musterd.supervisor.core.sizing import room
from musterd.supervisor.core.slot import SlotState
from musterd.supervisor.core.spares import spares_kept
from musterd.supervisor.core.staff import Staff
from musterd.supervisor.core.state import State
from musterd.supervisor.core.task import Task, TaskState
from musterd.supervisor.core.waits import Waits

Handlers = dict[type, Callable[[Any], None]]


class Fleet:
    def __init__(self, policy: FleetPolicy, rng: Random, last_seq: int = 0) -> None:
        self._state = state = State(policy, rng)
        self._ledger = ledger = Ledger(state, self._stored, self._ended)
        self._leases = leases = Leases(state, ledger)
        self._coalescing = coalescing = Coalescing(state, ledger, leases)
        ledger.last_good = coalescing.good
        self._shelf = shelf = Shelf(state, ledger.finish)
        self._intake = intake = Intake(
            state, ledger, leases, coalescing, shelf=shelf, last_seq=last_seq
        )
        ledger.written = intake.afloat.written
        self._outage = Outage(state, ledger, coalescing, intake.afloat)
        self._revival = Revival(state, ledger, intake)
        self._keeper = keeper = Gatekeeper(state, ledger, coalescing.good)
        for pool in state.pools.values():
            pool.queue.keeper = keeper
            pool.queue.shelf = shelf
        retries = Retries(state, ledger, leases, keeper)
        self._endings = endings = Endings(state, ledger, leases, keeper, retries)
        self._staff = staff = Staff(state, leases, endings)
        self._halts = halts = Halts(state, ledger, leases)
        self._autoscale = Autoscale(state, staff)
        self._governor = Governor(state, staff)
        self._desk = Desk(state, ledger, coalescing)
        self._waits = Waits(state, shelf, self._autoscale.bound)
        self._schedules = schedules = Schedules(state, ledger, intake)
        self.attendants = Attendants(state)
        self._shutdown = Shutdown(state, ledger, staff, self.attendants)
        self._recycling = staff.recycling
        self._rolls = staff.rolls
        self._rounds = Rounds(state, leases, staff.recycling)
        parts = Parts(
            ledger=ledger,
            intake=intake,
            coalescing=coalescing,
            keeper=keeper,
            shelf=shelf,
            staff=staff,
            schedules=schedules,
            autoscale=self._autoscale,
            governor=self._governor,
            retries=retries,
            attendants=self.attendants,
        )
        self._reload = Reload(state, parts)
        self._handlers: Handlers = {**self._of_tasks(), **self._of_workers(), **self._of_people()}

        # What is read back at the start, by Fact.kind, and who wants it.
        self._facts: dict[str, Callable[[events.FactsRecovered], None]] = {
            GOOD: lambda event: coalescing.recovered(event.facts),
            SCHEDULE: lambda event: schedules.recovered(event.facts),
            BREAKER_FACTS: keeper.recovered,
            HALT: halts.recovered,
            CANCEL: lambda event: intake.cancelled_before(event.facts),
            BUDGET: retries.recovered_budgets,
            UNPAID: retries.recovered_unpaid,
        }

    def _of_tasks(self) -> Handlers:
        """Tasks, and the disk."""
        return {
            events.TasksSubmitted: self._intake.submitted,
            events.TasksRecovered: self._intake.recovered,
            events.FactsRecovered: lambda event: self._facts[event.kind](event),
            events.Persisted: _in_turn(
                lambda event: self._ledger.persisted(event.ticket), self._intake.go_on
            ),
            events.StoreFailing: _in_turn(self._outage.failing, self._intake.go_on),
            events.StoreRecovered: self._outage.recovered,
            events.TasksWithdrawn: self._outage.withdrawn,
            events.RetryRequested: self._revival.requested,
            events.EndedFound: self._revival.found,
            events.ResendChecked: self._intake.resend_checked,
            events.ResendUnknown: self._intake.resend_unknown,
            events.ShelvedRead: self._intake.shelved_read,
            events.TasksWatched: _in_turn(self._intake.watched, self._desk.watched),
            events.StrandedFound: self._reload.stranded_found,
            events.StrandedWatched: self._reload.watched,
            events.CancelRequested: self._intake.cancel,
            events.InvalidateRequested: self._coalescing.invalidate,
            events.PeerLost: _in_turn(
                self._intake.peer_lost, LostPeers(self._state, self._shelf).lost
            ),
        }

    def _of_workers(self) -> Handlers:
        """The clock, nurseries and workers."""
        return {
            events.Started: _in_turn(
                lambda _: self._staff.started(),
                lambda _: self._rounds.begin(),
                lambda _: self._autoscale.started(),
                lambda _: self.attendants.started(),
            ),
            events.Ticked: lambda _: self._state.timers.run(self._state.now_ns),
            events.ClockRead: _in_turn(
                self._state.clock_read,
                self._ledger.clock_read,
                self._schedules.clock_read,
                lambda _: self._rounds.begin(),  # a changed policy may want them
            ),
            events.NurseryReady: _first(self._rolls.heard, self._staff.nurseries.ready),
            events.NurseryFailed: _first(self._rolls.heard, self._staff.nurseries.failed),
            events.NurseryExited: _first(self._rolls.heard, self._staff.nurseries.exited),
            events.MemorySampled: _in_turn(self._governor.sampled, self._recycling.weighed),
            events.WorkerForked: self._staff.forked,
            events.LeftoversEnded: self._staff.leftovers_ended,
            events.SpawnFailed: self._staff.spawn_failed,
            events.WorkerReady: self._staff.ready,
            events.LeasesCompleted: _in_turn(
                self._desk.leases_completed,
                self._waits.leases_completed,
                self._endings.completed,
            ),
            events.LeasesReturned: _in_turn(
                self._desk.leases_returned, self._waits.leases_returned, self._endings.returned
            ),
            events.BoardRead: self._leases.board_read,
            events.BoardsRead: self._rounds.boards_read,
            events.WorkerExited: _in_turn(
                self._staff.exited, self._desk.worker_exited, self._waits.worker_exited
            ),
            events.ProgressMade: self._desk.progressed,
            events.StateWanted: self._desk.state_wanted,
            events.StateGiven: self._desk.state_given,
            events.LockWanted: self._desk.lock_wanted,
            events.LockReturned: self._desk.lock_returned,
            events.WaitBegun: self._waits.begun,
            events.WaitEnded: self._waits.ended,
            AttendantReady: self.attendants.ready,
            AttendantBeat: self.attendants.beat,
            AttendantExited: self.attendants.exited,
        }

    def _of_people(self) -> Handlers:
        """What people ask for, and the end."""
        return {
            events.BreakerCommanded: self._keeper.command,
            events.StartRequested: self._staff.start,
            events.StopRequested: self._staff.stop_named,
            events.RestartRequested: self._staff.restart,
            events.ResetRequested: self._staff.reset,
            events.PauseRequested: self._halts.pause,
            events.DrainRequested: self._halts.drain,
            events.ResumeRequested: self._halts.resume,
            events.ScaleRequested: self._autoscale.scale,
            events.AutoscaleRequested: self._autoscale.resumed,
            events.ScheduleRunRequested: self._schedules.run_now,
            events.SchedulePauseRequested: self._schedules.pause,
            events.ChangesFollowed: self._schedules.followed,
            events.PolicyChanged: self._reload.policy_changed,
            events.ShutdownRequested: _in_turn(
                self._schedules.closing,
                lambda event: self._shutdown.request(event.reason, heir=event.heir),
            ),
            events.CleanupFinished: lambda event: self._shutdown.cleaned_up(event.reason),
        }

    @property
    def fact_kinds(self) -> list[str]:
        """Facts that are to be told by FactsRecovered before anything else happens."""
        return list(self._facts)

    @property
    def results_remembered(self) -> int:
        return self._coalescing.results

    def _stored(self, tasks: list[Task]) -> None:
        self._leases.stored(tasks)

    def _ended(self, task: Task, outcome: Outcome) -> None:
        self._coalescing.ended(task, outcome)

    def handle(self, now_ns: int, event: Any) -> list[Action]:
        """Decide what this event means. Actions are to be carried out in their order."""
        state = self._state
        assert now_ns >= state.now_ns, "time does not go back"
        state.now_ns = now_ns
        self._handlers[type(event)](event)
        if self._rolls.rolling:
            self._rolls.advance()
        if self._reload.removing:
            self._reload.advance()
        if state.recycling_due:
            self._recycling.advance()
        self._dispatch()
        if not state.recovering:
            self._settle()
        self._ledger.close_page()
        if state.reported:  # what is done goes before what is said of it
            state.out.sort(key=can_wait)
            state.reported = False
        if state.told:  # workers first: they work while the clients are told
            state.out += state.told
            state.told = []
        if self._shutdown.phase != Phase.UP:
            self._shutdown.advance()
        out = state.out
        state.out = []
        return out

    def _settle(self) -> None:
        while self._keeper.settle(self._leases.end_queued) or self._shelf.turn():
            self._dispatch()  # what ended, or came from the shelf, may have let another lane go on

    def _dispatch(self) -> None:
        for pool in self._state.pools.values():
            if pool.queue.size and not pool.halt:
                if pool.hungry:
                    self._leases.dispatch(pool)
                if not pool.watched and pool.queue.size:
                    self._autoscale.notice(pool)

    def next_deadline(self) -> int | None:
        """When handle(now, Ticked()) is due, or None."""
        return self._state.timers.next_deadline()

    # -- for whoever looks --------------------------------------------------------------------

    @property
    def policy(self) -> FleetPolicy:
        return self._state.policy

    @property
    def pools(self) -> dict[str, Pool]:
        return self._state.pools

    @property
    def tasks(self) -> dict[str, Task]:
        return self._state.tasks

    def alive(self, id_: str) -> bool:
        """Whether there is such a task that has not ended."""
        return self._intake.alive(id_)

    @property
    def shelved(self) -> dict[str, Place]:
        """The places of those tasks that are only on disk, by id."""
        return self._shelf.places

    @property
    def stranded(self) -> dict[str, int]:
        """Pools that were removed, and how many tasks of theirs stay in the store."""
        return self._reload.stranded

    @property
    def schedules(self) -> dict[str, Schedule]:
        return self._schedules.by_name

    @property
    def sites(self) -> dict[str, Site]:
        return self._keeper.sites

    @property
    def breaker_transitions(self) -> dict[str, int]:
        """How often breakers have come to each state."""
        return self._keeper.transitions

    def bound(self, pool: Pool) -> int:
        """How many workers this pool may have beside those of the others."""
        return self._autoscale.bound(pool)

    @property
    def phase(self) -> Phase:
        return self._shutdown.phase

    @property
    def memory(self) -> Memory:
        return self._state.memory

    @property
    def spares(self) -> frozenset[tuple[str, str]]:
        """The pools, each with its build, that keep a process ready for their next worker."""
        return spares_kept(self._state, self.stage)

    @property
    def stage(self) -> Stage:
        """What is done about memory at the moment."""
        return self._governor.stage

    @property
    def now_ns(self) -> int:
        return self._state.now_ns

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        state = self._state
        self._desk.validate()
        self._waits.validate()
        counted: dict[str, list[int]] = {name: [0, 0, 0] for name in state.pools}
        sizes = self._ledger.afloat_bytes()
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
        self._rolls.validate()
        self._coalescing.validate()
        shelf_rules.validate(self._shelf, state)
        unstored = self._ledger.unstored()
        for name, pool in state.pools.items():
            pool.validate()
            assert pool.unstored == unstored.get(name, 0), (name, pool.unstored, unstored)
            assert pool.queue.bytes == sizes[name], (name, pool.queue.bytes, sizes[name])
            in_memory = pool.live - pool.queue.shelved
            assert counted[name] == [in_memory, pool.leased, pool.waiting], (name, counted[name])
            for slot in pool.everyone:
                if slot.worker:
                    assert state.workers[slot.worker] is slot
                else:
                    assert not slot.leases and slot.state not in (
                        SlotState.RUNNING,
                        SlotState.DRAINING,
                    ), slot.name
                assert (slot not in pool.hungry) or slot.state == SlotState.RUNNING
                assert (slot not in pool.hungry) or not slot.halt, slot.name
                assert not slot.held or slot.state in (SlotState.STOPPED, SlotState.DRAINING)
            if state.intake_open:
                assert room(pool) >= 0, f"{pool.name}: more slots than its limit of {pool.limit}"
        for worker, slot in state.workers.items():
            assert slot.worker == worker and slot in slot.pool.everyone, slot.name


def _first(taken: Callable[[Any], bool], handler: Callable[[Any], None]) -> Callable[[Any], None]:
    """A handler for what the first one does not take."""

    def handle(event: Any) -> None:
        if not taken(event):
            handler(event)

    return handle


def _in_turn(*handlers: Callable[[Any], None]) -> Callable[[Any], None]:
    """A handler that has each of these do its part."""

    def handle(event: Any) -> None:
        for each in handlers:
            each(event)

    return handle
