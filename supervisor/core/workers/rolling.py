"""Rolling replacement: replaces the workers of a pool by those of another build, one at a time.

A *build* is what workers are made of: class, environment, options (PoolPolicy.build names it). When
the policy gives a pool another build, a second fork server loads it beside the first:

    LOADING   the new fork server loads the class; the pool runs on as before
    TRIAL     one slot gets its successor from the new fork server
    ROLLING   the successor got ready: the pool has the new build, the old fork server ends, and the
              other slots follow, one at a time

A slot is replaced as in a recycle (recycling.py): where both fit, the new worker starts first.
Until the first new worker is ready nothing is risked: if the class cannot be loaded, or that worker
does not get ready, the replacement is given up and the old workers go on. Afterwards every
new worker has the new build. A slot that becomes FATAL, or several failed successors in a row, end
the replacement, and the remaining slots keep their old workers.

No task is dropped: a replaced worker gives back the tasks it has not begun, and its running task
has its whole timeout. While two builds are at work, only tasks that both know are accepted.
"""

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Declare, StartForkServer, StopForkServer
from musterd.supervisor.core.model.pool import ForkServerState, Pool, Rollout, RolloutPhase
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.workers.forkservers import ForkServers, News, SlotActions
from musterd.supervisor.core.workers.recycling import Recycling

FORK_SERVER_TRIES_MAX = 3  # new fork servers that may end before the replacement is given up
FAILURES_MAX = 3  # successors in a row that may fail after the first got ready
ANOTHER_BUILD = "its code, options or environment have changed"


class RollingReplacement:
    def __init__(
        self, state: State, slots: SlotActions, fork_servers: ForkServers, recycling: Recycling
    ) -> None:
        self._state = state
        self._slots = slots
        self._fork_servers = fork_servers
        self._recycling = recycling
        self.rolling: dict[str, Pool] = {}  # pools whose workers are being replaced

    # -- beginning and ending -----------------------------------------------------------------

    def begin(self, pool: Pool) -> None:
        """Bring the pool to the build that its policy names, whatever is under way."""
        build, rollout = pool.policy.build, pool.rollout
        if rollout is not None and build == rollout.build:
            return  # under way already
        self.cancel(pool)
        pool.rollout_problem = ""
        if build != pool.build:
            self._open(pool, Rollout(build))
        elif self._outdated(pool):  # an earlier replacement was given up half-way
            rollout = self._open(pool, Rollout(build), load=False)
            rollout.phase = RolloutPhase.ROLLING
            if pool.declarations is not None:
                rollout.declarations = tuple(pool.declarations.values())

    def _open(self, pool: Pool, rollout: Rollout, *, load: bool = True) -> Rollout:
        pool.rollout = rollout
        self.rolling[pool.name] = pool
        self._state.report("pool.rolling", pool=pool)
        pool.recycle_failures = pool.recycle_after_ns = 0  # earlier failures do not count
        if load:
            self._load(pool, rollout)
        return rollout

    def _load(self, pool: Pool, rollout: Rollout) -> None:
        rollout.fork_server = ForkServerState.STARTING
        rollout.since_ns = now_ns = self._state.now_ns
        self._state.out.append(StartForkServer(pool.name, rollout.build))
        due_ns = now_ns + pool.policy.start_timeout_ns
        self._state.timers.at(due_ns, self._overdue, pool, rollout, now_ns)

    def cancel(self, pool: Pool) -> None:
        """End a replacement: another build is wanted, or none any more."""
        rollout = pool.rollout
        if rollout is None:
            return
        self._close(pool)
        if rollout.phase == RolloutPhase.ROLLING:
            return
        self._state.out.append(StopForkServer(pool.name, rollout.build))
        slot = rollout.slot
        if slot is not None and slot.trial:
            self._take_back(slot)

    def _take_back(self, slot: Slot) -> None:
        """Return the slot on trial to the pool's own build."""
        slot.trial = False
        if slot is slot.pool.successor:
            slot.pool.recycled = None
            self._slots.stop(slot, within_ns=0)
        elif slot.state != SlotState.STARTING:
            return  # it drains, and starts again from the pool's build
        elif slot.worker:
            slot.restart_after_stop = True
            self._slots.stop(slot, within_ns=0)
        else:
            self._slots.start_waiting(slot)

    def _close(self, pool: Pool) -> None:
        pool.rollout = None
        del self.rolling[pool.name]
        self._state.recycling_due = True  # worn workers have waited for it

    def _fail(self, pool: Pool, why: str) -> None:
        kept = "the old workers stay"
        pool.rollout_problem = why
        self._state.report("pool.roll_failed", "error", pool=pool, reason=f"{why}; {kept}")
        self.cancel(pool)

    def stop_all(self) -> None:
        """End all replacements: the daemon ends."""
        for pool in list(self.rolling.values()):
            rollout = pool.rollout
            assert rollout is not None
            self._close(pool)
            if rollout.phase != RolloutPhase.ROLLING:
                self._state.out.append(StopForkServer(pool.name, rollout.build))
            if rollout.slot is not None:
                rollout.slot.trial = False

    # -- the new fork server ----------------------------------------------------------------------

    def heard(self, event: News) -> bool:
        """Take news of a fork server; return whether it is the new one of a replacement."""
        pool = self._state.pools.get(event.pool)
        rollout = pool.rollout if pool is not None else None
        if pool is None or rollout is None or rollout.phase == RolloutPhase.ROLLING:
            return False
        if rollout.build != event.build:
            return False
        match event:
            case events.ForkServerReady():
                self._loaded(rollout, event)
            case events.ForkServerFailed():
                self._fail(pool, event.reason)
            case events.ForkServerExited():
                self._exited(pool, rollout, event.reason)
        return True

    def _loaded(self, rollout: Rollout, event: events.ForkServerReady) -> None:
        if rollout.fork_server != ForkServerState.STARTING:
            return
        rollout.fork_server = ForkServerState.UP
        rollout.since_ns = self._state.now_ns
        rollout.declarations = event.declarations
        if rollout.phase == RolloutPhase.LOADING:
            rollout.phase = RolloutPhase.TRIAL
        slot = rollout.slot
        if slot is not None and slot.trial and slot.state == SlotState.STARTING and not slot.worker:
            self._slots.spawn(slot)

    def _exited(self, pool: Pool, rollout: Rollout, reason: str) -> None:
        rollout.tries += 1
        if rollout.tries >= FORK_SERVER_TRIES_MAX:
            self._fail(pool, f"{rollout.tries} times: {reason}")
        else:
            self._load(pool, rollout)

    def _overdue(self, pool: Pool, rollout: Rollout, since_ns: int) -> None:
        current = pool.rollout is rollout and rollout.since_ns == since_ns
        if (
            current
            and rollout.phase != RolloutPhase.ROLLING
            and rollout.fork_server == ForkServerState.STARTING
        ):
            seconds = pool.policy.start_timeout_ns / SECOND_NS
            self._fail(pool, f"its class was not loaded within its start_timeout of {seconds:g} s")

    def trial_failed(self, slot: Slot, why: str) -> None:
        """Give up: the first worker of the new build ended before it was ready."""
        slot.trial = False
        self._fail(slot.pool, f"{slot.name}: {why}")

    # -- slot by slot -------------------------------------------------------------------------

    def advance(self) -> None:
        """Go on with the next slot as soon as the last one is done; called after every event."""
        for pool in list(self.rolling.values()):
            rollout = pool.rollout
            assert rollout is not None
            if rollout.phase == RolloutPhase.TRIAL:
                self._try(pool, rollout)
            if rollout.phase == RolloutPhase.ROLLING and pool.rollout is rollout:
                self._go_on(pool, rollout)

    def _try(self, pool: Pool, rollout: Rollout) -> None:
        slot = rollout.slot
        if slot is not None:
            if slot.state == SlotState.RUNNING and slot.build == rollout.build:
                self._commit(pool, rollout)
                return
            if slot.trial and not _is_out(slot):
                return
            slot.trial = False
            rollout.slot = None
        if rollout.fork_server != ForkServerState.UP:
            return
        for slot in pool.slots:  # first a slot with nothing to lose
            waits = slot.state in (SlotState.FATAL, SlotState.BACKOFF, SlotState.STARTING)
            if waits and not slot.worker:
                self._put_on_trial(rollout, slot)
                return
        slot = next((each for each in pool.slots if each.state == SlotState.RUNNING), None)
        if slot is not None and self._recycling.may_replace(pool):
            rollout.slot = self._recycling.replace(slot, ANOTHER_BUILD, trial=True)
        elif not any(each.worker or each.restart_after_stop for each in pool.everyone):
            self._commit(pool, rollout)  # no worker is here: a trial is not needed

    def _put_on_trial(self, rollout: Rollout, slot: Slot) -> None:
        rollout.slot = slot
        slot.trial = True
        if slot.state == SlotState.STARTING:
            self._slots.start_waiting(slot)
        else:
            self._slots.reset_slot(slot)

    def _commit(self, pool: Pool, rollout: Rollout) -> None:
        """Make the new build the pool's: its first worker got ready."""
        self._state.out.append(StopForkServer(pool.name, pool.build))
        pool.build = rollout.build
        pool.fork_server, pool.fork_server_since_ns = rollout.fork_server, rollout.since_ns
        pool.fork_server_failures = 0
        pool.reason = ""
        rollout.phase = RolloutPhase.ROLLING
        if rollout.slot is not None:
            rollout.slot.trial = False
            rollout.slot = None
        self._declare(pool, rollout, whole=False)
        if pool.fork_server == ForkServerState.STARTING:  # it died meanwhile, and is being replaced
            self._fork_servers.watch(pool)
        for slot in list(pool.slots):
            if slot.state == SlotState.FATAL:
                self._slots.reset_slot(slot)
            elif slot.state == SlotState.STARTING and not slot.worker:
                self._slots.start_waiting(slot)

    def _declare(self, pool: Pool, rollout: Rollout, *, whole: bool) -> None:
        known = rollout.declarations
        if known is None:
            return  # its fork server will tell them
        if not whole and pool.declarations is not None:
            known = tuple(each for each in known if each.method in pool.declarations)
        pool.declare(known)
        self._state.out.append(Declare(pool.name, known))

    def _go_on(self, pool: Pool, rollout: Rollout) -> None:
        slot = rollout.slot
        if slot is not None and not _is_out(slot):
            if slot.state != SlotState.RUNNING or slot.build != pool.build:
                return
        elif slot is not None and slot.state == SlotState.FATAL:
            self._fail(pool, f"{slot.name}: {slot.reason}")
            return
        if pool.recycle_failures >= FAILURES_MAX:
            self._fail(pool, f"{pool.recycle_failures} workers in a row did not get ready")
            return
        rollout.slot = None
        if self._recycling.may_replace(pool):
            for slot in pool.slots:
                if slot.state == SlotState.RUNNING and slot.build != pool.build:
                    rollout.slot = self._recycling.replace(slot, ANOTHER_BUILD)
                    return
        if not self._outdated(pool):
            self._close(pool)
            self._declare(pool, rollout, whole=True)
            self._state.report("pool.rolled", pool=pool)

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        for pool in self._state.pools.values():
            rollout = pool.rollout
            assert (rollout is not None) == (pool.name in self.rolling), pool.name
            for slot in pool.everyone:
                on_trial = (
                    rollout is not None
                    and rollout.phase == RolloutPhase.TRIAL
                    and rollout.slot is slot
                )
                assert on_trial or not slot.trial, slot.name
                known = (pool.build, rollout.build if rollout is not None else pool.build)
                young = slot.state == SlotState.STARTING and slot.worker
                assert not young or slot.build in known or not slot.trial, slot.name
            assert rollout is None or pool.is_open, pool.name

    def _outdated(self, pool: Pool) -> bool:
        return any(slot.worker and slot.build != pool.build for slot in pool.everyone)


def _is_out(slot: Slot) -> bool:
    """Return whether this slot will start no worker any more."""
    pool = slot.pool
    if slot is pool.successor:
        return False
    stopped = slot.state == SlotState.STOPPED and not slot.held  # a held slot may start again
    return slot not in pool.slots or stopped or slot.state == SlotState.FATAL
