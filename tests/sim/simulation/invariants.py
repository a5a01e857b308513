"""Check the invariants at every step, whatever the seed does.

The Watch knows the truth of the simulated world (which worker really runs what, what is really on
disk) and compares every action of the core with it. It never asks the core whether the core is
right; it looks into the core only for what is invisible from outside (the content of a queue, the
measured cost of a task name).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.messages import (
    CANCELLED,
    CRASH,
    CRITICAL,
    ERROR,
    EXPIRED,
    FAILED,
    HIGH,
    INVALID,
    QUEUE_FULL,
    SHUT,
    SHUTTING_DOWN,
    SUCCEEDED,
    TIMEOUT,
    Lease,
    TaskSpec,
)
from musterd.supervisor.core.model.actions import (
    Acknowledge,
    AssignLeases,
    AttemptRecord,
    Deliver,
    DropRequest,
    Exit,
    FinalRecord,
    NewRecord,
    Persist,
    Report,
    SpawnWorker,
    Withdraw,
)
from musterd.supervisor.core.model.events import (
    CancelRequested,
    ResendChecked,
    ResendUnknown,
    RetryRequested,
    ScaleRequested,
    ShutdownRequested,
    StrandedFound,
    TasksRecovered,
    TasksSubmitted,
)
from musterd.supervisor.core.model.held import HELD_TYPE
from musterd.supervisor.core.model.queue import TINY_NS
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.core.model.task import TaskState
from musterd.supervisor.core.shutdown import CLEANUP_SLACK_NS, CLOSE_BUDGET_NS
from musterd.supervisor.core.tasks import endings
from musterd.supervisor.core.tasks.leases import WINDOW_MAX, WINDOW_NS
from simulation.breaker_watch import BreakerWatch
from simulation.cancel_watch import CancelWatch
from simulation.debugging import DebugWatch
from simulation.handler_requests_watch import HandlerRequestsWatch
from simulation.key_watch import KeyWatch, by_itself
from simulation.lifecycle_watch import LifecycleWatch
from simulation.nested import WaitWatch
from simulation.pause_watch import PauseWatch
from simulation.profile import SEC
from simulation.retry_watch import RetryWatch
from simulation.scale_watch import ScaleWatch
from simulation.session_watch import SessionWatch

if TYPE_CHECKING:
    from simulation.workers import Worker
    from simulation.world import World

NOT_AFFORDED = "the retry budget of"  # in the error of a task that got fewer retries than it wanted
CRASHES_MAX = 4  # more than any policy of ours allows
VALIDATE_EVERY = 16  # steps between two calls of fleet.validate(), which looks at every task
TIMERS_PER_TASK = 4
TIMERS_SLACK = 300  # for slots: starts, stops, stalls
SHUTDOWN_SLACK_NS = 1 * SEC  # signals and exits take time


class Watch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.steps = 0
        # Over all lives of the supervisor.
        self.acknowledged: dict[str, None] = {}
        self._running: dict[str, Worker] = {}
        self.suspects: dict[str, None] = {}  # ran beside others when their worker crashed
        self.shared = 0  # tasks that began beside others
        self.unknown = 0  # requests for which the store could not be read
        self.lies = 0  # leases that were returned and went on running
        self.fallbacks = 0  # tasks that failed and ended with a fallback
        self.unwritten = 0  # steps with tasks in the disk queue that were not on disk yet
        self._leased: dict[str, None] = {}
        self._leased_now: dict[str, None] = {}  # in this life of the supervisor
        self._failed_runs: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._crashes: dict[str, int] = {}
        self._ready_ns: dict[str, int] = {}
        self._max_retries = world.policy.retry.max_retries
        # Of this life.
        self._requests: dict[int | bytes, Any] = {}  # unanswered, by token or by a caller's name
        self._holders: dict[str, Worker] = {}
        self._last_lease = 0
        self._stopping_since_ns = -1
        self._closing_since_ns = 0
        self._seq_ids: dict[int, str] = {}
        self.specs: dict[str, TaskSpec] = {}
        self.reopened: dict[str, None] = {}
        self.keys = KeyWatch(world)
        self.handler_requests = HandlerRequestsWatch(world)
        self.waits = WaitWatch(world)
        self.pauses = PauseWatch(world)
        self.debugging = DebugWatch(world)
        self.lifecycle = LifecycleWatch(world)
        self.breakers = BreakerWatch(world)
        self.sessions = SessionWatch()
        self.cancels = CancelWatch(world)
        self.retries = RetryWatch(world)
        self._scale = ScaleWatch(world)
        self._untouched: dict[str, tuple[int, ...]] = {}
        self._checks: dict[type, Callable[[Any], None]] = {
            Persist: self._check_page,
            Withdraw: lambda action: self.keys.withdrawn([self._seq_ids[n] for n in action.seqs]),
            AssignLeases: self._check_assignment,
            Acknowledge: self._check_acknowledgement,
            DropRequest: self._check_drop,
            Deliver: self._check_delivery,
            SpawnWorker: self._check_spawn,
            Report: self._note_phase,
            Exit: self._check_exit,
        }

    def new_life(self) -> None:
        self._requests.clear()
        self._holders.clear()
        self._running.clear()
        self.suspects.clear()
        self._last_lease = 0
        self._stopping_since_ns = -1
        self.exits = 0
        self.keys.new_life()
        self.handler_requests.new_life()
        self.pauses.new_life()
        self.debugging.new_life()
        self.lifecycle.new_life()
        self.breakers.new_life()
        self.sessions.new_life()
        self.cancels.new_life()
        self.retries.new_life()
        self._scale.new_life()

    # -- the truth of the world ---------------------------------------------------------------

    def began(self, worker: Worker, lease: Lease) -> None:
        other = self._running.get(lease.id)
        assert other is None or not other.alive, (
            f"{lease.id} runs in workers {other and other.number} and {worker.number} at once"
        )
        beside = [other.id for other, _ in worker.runs]
        assert len(beside) <= worker.width, f"{worker.name} runs {beside}"
        if len(beside) > 1:
            self.shared += 1
            suspects = [id_ for id_ in beside if id_ in self.suspects]
            assert not suspects, f"{suspects} were to run alone, not as {beside}"
        self._running[lease.id] = worker
        self.keys.began(worker, lease)
        self.sessions.began(worker, lease)

    def ended(self, worker: Worker, lease: Lease) -> None:
        if self._running.get(lease.id) is worker:
            del self._running[lease.id]
        self.sessions.ended(lease)
        self.given_back(worker, lease)

    def lied(self, worker: Worker, lease: Lease) -> None:
        """Note that a worker returned a lease and goes on with it: others may rightly run it."""
        self.lies += 1
        worker.lied, worker.lied_ns = lease, 0
        self._running.pop(lease.id, None)
        self.keys.lied(lease)
        self.sessions.ended(lease)
        self.given_back(worker, lease)
        self.handler_requests.let_go(lease.lease)

    def failed_run(self, lease: Lease) -> None:
        self._failed_runs[lease.id] = self._failed_runs.get(lease.id, 0) + 1

    def given_back(self, worker: Worker, lease: Lease) -> None:
        if self._holders.get(lease.id) is worker:
            del self._holders[lease.id]

    def died(self, worker: Worker) -> None:
        # A worker with several tasks dies without blame: none of them caused it for certain.
        if len(worker.runs) == 1:
            self._count_death(worker.runs[0][0].id)

    def crashed(self, worker: Worker) -> None:
        """Count a crash by a task, before the core hears of it: at most `max_crashes` of them.

        Not counted: crashes that the core had not written when the supervisor ended, and crashes
        that the core may have caused.
        """
        runs = [lease for lease, _ in worker.runs]
        assert runs
        if self._world.lives > 1 or worker.doomed or worker.lied is not None:
            return
        if len(runs) > 1:
            self.suspects.update((lease.id, None) for lease in runs)
            return
        (lease,) = runs
        self._crashes[lease.id] = crashes = self._crashes.get(lease.id, 0) + 1
        crashes_max = self._world.fleet.pools[worker.pool].policy.max_crashes
        assert crashes <= crashes_max, f"{lease.id} crashed {crashes} workers"

    def supervisor_died(self) -> None:
        """Count a death for each leased task that has not ended on disk: it may have run."""
        self._leased_now.clear()
        for id_ in self._leased:
            if id_ not in self._world.store.finished:
                self._count_death(id_)

    def _count_death(self, id_: str) -> None:
        self._deaths[id_] = self._deaths.get(id_, 0) + 1

    def missing(self, ids: list[str]) -> None:
        for id_ in ids:
            assert id_ not in self.acknowledged, f"acknowledged task {id_} is nowhere"

    # -- the core's answers -------------------------------------------------------------------

    def before(self, event: Any) -> Any:
        """Remember what is needed to judge the answer to the event."""
        self.handler_requests.before(event)
        self._untouched = self._world.reloads.before(event)
        self.pauses.before(event)
        self.cancels.before(event)
        self._scale.before()
        if isinstance(event, TasksSubmitted | CancelRequested | RetryRequested):
            self._requests[event.request or event.peer] = event
        if isinstance(event, ScaleRequested):
            self._requests[event.peer] = event
        if isinstance(event, TasksSubmitted | ResendChecked):
            return {name: pool.held for name, pool in self._world.fleet.pools.items()}
        return None

    def handled(self, event: Any, actions: list[Any], before: Any) -> None:
        self.steps += 1
        places = self._world.fleet.on_disk.values()
        self.unwritten += any(not place.written for place in places)
        self._world.reloads.handled(event, actions, self._untouched)
        kinds: dict[type, None] = {}
        pages = [action for action in actions if type(action) is Persist]
        self.keys.handled(event, pages, self.steps)
        self.handler_requests.handled(event, actions)
        self.waits.handled(event, actions)
        self.pauses.handled(event, actions)
        self.debugging.handled(event, actions)
        self.lifecycle.handled(event, actions)
        self.breakers.handled(event, actions)
        self.cancels.handled(actions)
        self.retries.handled(actions)
        self._scale.handled(event, actions)
        for page in pages:  # tasks of a page may be leased before it is written
            self._note_new(page)
        for action in actions:
            kind = type(action)
            kinds[kind] = None
            check = self._checks.get(kind)
            if check is not None:
                check(action)
        if AssignLeases in kinds:
            self._check_windows(actions)
        if isinstance(event, ResendUnknown):
            self._check_unknown(event, actions)
        if before is not None:
            self._check_bound(event, actions, before)
        if isinstance(event, ShutdownRequested) and self._stopping_since_ns < 0:
            self._stopping_since_ns = self._world.now_ns
        if self._stopping_since_ns >= 0:
            self._check_budget()
        self._check_idle()
        if self.steps % VALIDATE_EVERY == 0:
            self.validate()

    def _check_idle(self) -> None:
        """Check that no worker is idle while a task of its pool could run."""
        for pool in self._world.fleet.pools.values():
            if pool.queue.size:
                picky = any(task.alone for task in self._world.fleet.tasks.values())
                for slot in pool.slots:
                    room = 1 if picky or slot.spent else slot.width
                    assert (
                        slot.state != SlotState.RUNNING
                        or len(slot.leases) >= room
                        or slot.recalling
                        or slot.killed_for
                        or slot.debugged_ns
                        or (slot.spent and self.lifecycle.soon_replaced(pool, slot))
                        or self.pauses.halted(pool.name, slot.name)
                    ), f"{slot.name} is idle while {pool.queue.size} tasks wait"

    def validate(self) -> None:
        fleet = self._world.fleet
        fleet.validate()
        self.lifecycle.validate()
        self.waits.validate()
        timers = len(fleet._state.timers)
        most = TIMERS_SLACK + TIMERS_PER_TASK * len(fleet.tasks)
        assert timers <= most, f"{timers} timers for {len(fleet.tasks)} tasks"

    def withdrawn(self, new: NewRecord) -> None:
        """Check that nothing counts on a task that the store leaves out."""
        task = self._world.fleet.tasks.get(new.spec.id)
        assert task is None or task.seq != new.seq or task.state == TaskState.NEW, new.spec.id

    def stored_end(self, final: FinalRecord, attempts: list[AttemptRecord]) -> None:
        """Check that a task that failed by itself has stored the error of each attempt."""
        outcome = by_itself(final.outcome)
        if outcome.state == FAILED and outcome.failure is not None and not outcome.cached:
            kinds = [attempt.failure.kind for attempt in attempts]
            if outcome.failure.kind in (ERROR, TIMEOUT):
                assert len(attempts) == outcome.attempts + final.crashes, (final, kinds)
                if NOT_AFFORDED not in outcome.failure.message:
                    assert attempts[-1].failure == outcome.failure, (final, attempts[-1])
            assert kinds.count(CRASH) == final.crashes, (final, kinds)

    def _note_reopened(self, id_: str) -> None:
        """Forget the past of a reopened task: it begins anew."""
        for counts in (self._failed_runs, self._deaths, self._crashes):
            counts.pop(id_, None)
        self._leased.pop(id_, None)
        self.cancels.begins_anew(id_)
        self.retries.begins_anew(id_)
        self.reopened[id_] = None

    def _note_new(self, page: Persist) -> None:
        for reopened in page.reopened:
            self._note_reopened(reopened.id)
        for new in page.news():
            self.specs[new.spec.id] = new.spec
            self._seq_ids[new.seq] = new.spec.id
            self._ready_ns[new.spec.id] = self._world.now_ns + new.spec.delay_ns

    def _check_page(self, page: Persist) -> None:
        world = self._world
        for change in page.changed:
            id_ = self._seq_ids[change.seq]
            self._ready_ns[id_] = world.now_ns + change.wait_ns
            task = world.fleet.tasks.get(id_)  # None: stranded by the same event
            crashes_max = task.route.pool.policy.max_crashes if task is not None else CRASHES_MAX
            assert change.crashes < crashes_max, f"{id_} lives on after {change.crashes} crashes"
            assert change.attempt >= 0, f"{id_} has made {change.attempt} attempts"
            assert change.interruptions <= endings.INTERRUPTIONS_MAX, id_
        for final in page.finished:
            self._check_final(final)

    def _check_final(self, final: FinalRecord) -> None:
        """Check that every outcome has its reason in what really happened."""
        world, id_, outcome = self._world, final.spec.id, by_itself(final.outcome)
        failure = outcome.failure
        pool = world.fleet.tasks[id_].route.pool
        self._check_fallback(final)
        assert final.crashes <= pool.policy.max_crashes, f"{id_} crashed {final.crashes} times"
        assert final.crashes <= self._deaths.get(id_, 0), (
            f"{id_} is blamed for {final.crashes} crashes and saw {self._deaths.get(id_, 0)}"
        )
        if outcome.cached:
            return  # the KeyWatch has checked it
        if outcome.state == SUCCEEDED:
            self._check_value(final)
        elif outcome.state == CANCELLED:
            assert id_ in world.cancelled, f"nobody cancelled {id_}"
        elif outcome.state == EXPIRED:
            expires_ns = final.submitted_wall_ns - world.wall_offset_ns + final.spec.expires_ns
            assert final.spec.expires_ns > 0, f"{id_} expired and never should"
            assert world.now_ns >= expires_ns, f"{id_} expired too early"
        else:
            assert outcome.state == FAILED, outcome
            assert failure is not None, outcome
            if failure.kind in (ERROR, TIMEOUT):
                attempts = self._retries(final.spec) + 1
                if NOT_AFFORDED in failure.message:
                    assert outcome.attempts < attempts, f"{id_} had no retry left"
                    attempts = outcome.attempts
                assert outcome.attempts == attempts, f"{id_}: {outcome.attempts} of {attempts}"
                failed = self._failed_runs.get(id_, 0)
                assert failed >= attempts, f"{id_} failed {failed} times, not {attempts}"
            elif failure.kind == SHUT and failure.type != HELD_TYPE:
                assert final.spec.on_open != "wait", f"{id_} would have waited"
            elif failure.kind == CRASH and final.crashes:
                assert final.crashes == pool.policy.max_crashes, f"{id_}: {final.crashes} crashes"

    def _check_fallback(self, final: FinalRecord) -> None:
        """Check that a task falls back exactly if it failed for good, wants to and can."""
        outcome, spec = final.outcome, final.spec
        failure = outcome.failure
        asks = self._world.fleet.tasks[spec.id].fallback_on == "failure"
        if outcome.state == FAILED and asks and failure is not None:
            hidden = failure.kind != INVALID and spec.fallback is not None
            assert not hidden, f"{spec.id} has failed and brought a value along"
        if outcome.state == SUCCEEDED and failure is not None:
            assert asks, f"{spec.id} fell back unasked: {outcome}"
            assert failure.kind != INVALID, f"{spec.id} hides a mistake of its caller: {outcome}"
            assert outcome.stale != outcome.fallback, f"{spec.id} fell back to what? {outcome}"
            self.fallbacks += 1
            self._check_value(final)

    def _check_value(self, final: FinalRecord) -> None:
        outcome, spec = final.outcome, final.spec
        if outcome.stale:
            assert outcome.value.startswith(b"value of "), f"{spec.id} got {outcome.value!r}"
        elif outcome.fallback:
            assert outcome.value == spec.fallback, f"{spec.id} got {outcome.value!r}"
        elif not outcome.cached:
            expected = b"value of " + spec.id.encode()
            assert outcome.value == expected, f"{spec.id} got {outcome.value!r}"

    def _retries(self, spec: Any) -> int:
        retries: int = self._world.fleet.tasks[spec.id].max_retries
        return retries

    def _check_assignment(self, action: AssignLeases) -> None:
        world = self._world
        worker = world.workers[action.worker]
        assert action.leases, "an empty assignment"
        assert not worker.recalled, (
            f"worker {worker.number} is given leases while it gives some back"
        )
        for lease in action.leases:
            id_ = lease.id
            assert lease.lease > self._last_lease, f"lease {lease.lease} was given before"
            self._last_lease = lease.lease
            holder = self._holders.get(id_)
            assert holder is None or not holder.alive, (
                f"{id_} is leased to worker {worker.number} while {holder and holder.number} has it"
            )
            self._holders[id_] = worker
            self._leased[id_] = None
            self.keys.leased(lease, self._holders)
            task = world.fleet.tasks[id_]
            assert not task.cancelled, f"{id_} was cancelled and is leased"
            assert not task.expires_at_ns or world.now_ns < task.expires_at_ns, (
                f"{id_} is leased after it expired"
            )
            assert task.early or id_ in world.store.live_ids, f"{id_} is leased and not on disk"
            self._leased_now[id_] = None
            assert world.now_ns >= self._ready_ns[id_], f"{id_} is leased before its time"
            attempts = self._retries(task.spec) + 1
            assert 1 <= lease.attempt <= attempts, f"{id_}: attempt {lease.attempt} of {attempts}"
            assert lease.timeout_ns > 0, lease

    def _check_windows(self, actions: list[Any]) -> None:
        """Check that only tiny tasks wait in a worker, and only a few."""
        for action in actions:
            if type(action) is not AssignLeases:
                continue
            slot = self._world.fleet._state.workers[action.worker]
            first, *others = slot.leases
            if not others:
                continue
            if slot.width > 1:
                held = len(slot.leases)
                assert held <= slot.width, f"{slot.name} holds {held} of {slot.width} leases"
                continue
            assert len(slot.leases) <= WINDOW_MAX, f"{slot.name} holds {len(slot.leases)} leases"
            for lease in action.leases:
                cost_ns = slot.leases[lease.lease].route.cost_ns
                assert lease.lease == first or cost_ns <= TINY_NS, (
                    f"{lease.id} waits in {slot.name} and costs {cost_ns} ns"
                )
            work_ns = sum(task.route.cost_ns for task in slot.leases.values())
            assert work_ns <= WINDOW_NS, f"{slot.name} holds {work_ns} ns of work"
            stalled = slot.leases[first].begun_recorded
            assert not stalled, f"{slot.name} is stalled and was given more"

    def _check_acknowledgement(self, action: Acknowledge) -> None:
        store = self._world.store
        rejected = {each.id for each in action.rejected}
        event = self._requests.pop(action.request or action.peer)
        by_hand = isinstance(event, RetryRequested)
        for each in action.rejected:
            if each.code == QUEUE_FULL and "cannot be stored" in each.message:
                seq = store.live_ids.get(each.id)
                assert seq is None, f"{each.id} is refused, and on disk"
                ran = each.id in self._leased_now and not by_hand
                assert not ran, f"{each.id} is refused, and was run"
        if isinstance(event, TasksSubmitted):
            assert {each.id for each in event.rejected} <= rejected, f"{action} hides a refusal"
        for spec in event.tasks if isinstance(event, TasksSubmitted) else ():
            if spec.id not in rejected:
                seq = store.live_ids.get(spec.id)
                if seq is None:
                    assert spec.id in store.finished, f"{spec.id} is acknowledged and not on disk"
                else:
                    assert store.live[seq].spec == spec, f"{spec.id} is on disk with another body"
                self.acknowledged[spec.id] = None

    def _check_drop(self, action: DropRequest) -> None:
        """Check that a request is dropped once, and never answered."""
        assert self._requests.pop(action.request).peer == action.peer, action

    def _check_unknown(self, event: ResendUnknown, actions: list[Any]) -> None:
        """Check that tasks perhaps accepted before are neither accepted nor refused for good."""
        self.unknown += 1
        ids = {spec.id for spec in event.submitted.tasks}
        added = [new.spec.id for each in actions if type(each) is Persist for new in each.news()]
        assert ids.isdisjoint(added), f"{ids} may be accepted for the second time"
        answers = [each for each in actions if isinstance(each, Acknowledge | DropRequest)]
        (answer,) = [each for each in answers if each.peer == event.submitted.peer]
        if isinstance(answer, Acknowledge):
            assert {each.id for each in answer.rejected} == ids, answer
            assert all(each.retry_after_ns for each in answer.rejected), answer

    def _check_delivery(self, action: Deliver) -> None:
        for outcome in action.outcomes:
            on_disk = self._world.store.finished.get(outcome.id)
            assert on_disk == outcome, f"{outcome} was told, on disk is {on_disk}"

    def _check_bound(self, event: Any, actions: list[Any], held: dict[str, int]) -> None:
        """Check that accepted tasks found room, and refused ones did not."""
        submitted = event.submitted if isinstance(event, ResendChecked) else event
        pages = [action for action in actions if isinstance(action, Persist)]
        added = {new.spec.id for page in pages for new in page.news()}
        # Tasks answered at once needed no room.
        added -= {final.spec.id for page in pages for final in page.finished}
        limits = {CRITICAL: 100, HIGH: 98}
        for spec in submitted.tasks:
            if spec.id not in added:
                continue
            added.discard(spec.id)
            pool = self._world.fleet.pools[spec.name.partition(".")[0]]
            size = pool.policy.queue_size
            kept = size * (100 - limits.get(spec.priority, 95)) // 100
            assert held[pool.name] < size - kept, (
                f"{spec.id} of priority {spec.priority} came in as number {held[pool.name] + 1} "
                f"of {size}"
            )
            held[pool.name] += 1
        for action in actions:
            for each in action.rejected if isinstance(action, Acknowledge) else ():
                assert each.code != SHUTTING_DOWN or self._stopping_since_ns >= 0, each
                if each.code == QUEUE_FULL and "queue of pool" in each.message:
                    pool = self._world.fleet.pools[each.message.split("'")[1].partition(".")[0]]
                    size = pool.policy.queue_size
                    assert held[pool.name] >= size - size * 5 // 100, each

    def _check_spawn(self, _: SpawnWorker) -> None:
        assert self._stopping_since_ns < 0, "a worker is started during the shutdown"

    # -- shutdown -----------------------------------------------------------------------------

    def _check_budget(self) -> None:
        policy = self._world.policy
        budget_ns = (
            policy.drain_timeout_ns
            + 2 * policy.stop_timeout_ns  # idle workers get a message first, then a signal
            + policy.cleanup_timeout_ns
            + CLEANUP_SLACK_NS
            + CLOSE_BUDGET_NS
            + SHUTDOWN_SLACK_NS
        )
        took_ns = self._world.now_ns - self._stopping_since_ns
        assert took_ns <= budget_ns, f"the shutdown takes {took_ns / SEC} s"

    def _note_phase(self, report: Report) -> None:
        if report.event == "shutdown.phase" and report.phase == "close":
            self._closing_since_ns = self._world.now_ns

    def _check_exit(self, _: Exit) -> None:
        world = self._world
        self.exits += 1
        assert self.exits == 1, "it exits twice"
        assert self._stopping_since_ns >= 0, "it exits unasked"
        for worker in world.workers.values():
            assert not (worker.alive and worker.counts), f"{worker.name} outlives the exit"
        assert not world.fleet._state.workers, "the core exits with workers"
        closing_ns = world.now_ns - self._closing_since_ns
        assert world.store.settled or closing_ns >= CLOSE_BUDGET_NS, "it exits with unsaved tasks"
        world.fleet.validate()

    def recovered(self, event: TasksRecovered | StrandedFound) -> None:
        self.retries.recovered(event)
        for old in event.tasks:
            self._seq_ids[old.seq] = old.spec.id
            self._ready_ns[old.spec.id] = old.ready_ns
            self.suspects.pop(old.spec.id, None)  # which tasks have to run alone is not on disk
