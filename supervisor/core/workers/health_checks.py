"""Health checks: reads the scoreboards of all workers every few seconds, and kills hung workers.

A worker's scoreboard says whether the worker lives, without a message and without waking it. A busy
worker is judged by the deadline of its task (core/tasks/leases.py), not here. An idle worker stamps
its board now and then; without a stamp for `heartbeat_timeout` it hangs: the worker was stopped, or
something in it holds the interpreter. A worker that calls its own healthy() must have the answer
within `health_timeout`. Tasks that it was given meanwhile have not begun, and go to other workers
untouched. The checks also find workers that are too old (recycling.py).

One late stamp proves nothing: if the machine or the supervisor stood still, every worker is late.
So a late worker has until the next check.
"""

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.supervisor.core.model.actions import ReadBoards
from musterd.supervisor.core.model.events import BoardRead, BoardsRead
from musterd.supervisor.core.model.slot import Cause, Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.leases import RETURNED_AND_RUN, Leases
from musterd.supervisor.core.workers.recycling import Recycling

CHECK_NS = 5 * SECOND_NS  # reading 200 boards takes less than a millisecond
CHECKS_PER_TIMEOUT = 4  # more often where a timeout is short ...
CHECK_NS_MIN = 100 * MILLISECOND_NS  # ... down to this
# A worker made before the policy changed stamps its board at the pace of before: every two seconds,
# or more often.
OTHER_BUILD_NS = 12 * SECOND_NS
MISSED_MAX = 2  # checks in a row that find a worker late before it is killed


class HealthChecks:
    def __init__(self, state: State, leases: Leases, recycling: Recycling) -> None:
        self._state = state
        self._leases = leases
        self._recycling = recycling
        self._under_way = False

    def begin(self) -> None:
        """Set the timer of the next check, if any pool wants checks."""
        if not self._under_way and self._gap_ns():
            self._under_way = True
            self._state.timers.at(self._state.now_ns + self._gap_ns(), self._go)

    def _gap_ns(self) -> int:
        """Return the time between two checks; 0 if no pool wants checks."""
        policies = [pool.policy for pool in self._state.pools.values()]
        given = [(p.heartbeat_timeout_ns, p.health_timeout_ns, p.max_age_ns) for p in policies]
        timeouts = [timeout_ns for each in given for timeout_ns in each if timeout_ns]
        if not timeouts:
            return 0
        return max(CHECK_NS_MIN, min(CHECK_NS, min(timeouts) // CHECKS_PER_TIMEOUT))

    def _go(self) -> None:
        self._under_way = False
        if not self._state.intake_open:
            return  # the shutdown ends workers that do not stop
        running = [
            slot
            for slot in self._state.workers.values()
            if slot.state == SlotState.RUNNING and not slot.killed_for
        ]
        for slot in running:
            self._recycling.look_at(slot)
        if running:
            self._state.out.append(ReadBoards([slot.worker for slot in running]))
        self.begin()

    def boards_read(self, event: BoardsRead) -> None:
        for board in event.boards:
            slot = self._state.workers.get(board.worker)
            if slot is None or slot.state != SlotState.RUNNING or slot.killed_for:
                continue
            cause, why = self._late(slot, board)
            if not why:
                slot.missed = 0
                continue
            slot.missed += 1
            if slot.missed >= MISSED_MAX:
                self._state.report("worker.hung", "error", slot=slot, reason=why, cause=cause)
                self._leases.kill(slot, why, 0, cause)

    def _late(self, slot: Slot, board: BoardRead) -> tuple[Cause, str]:
        """Return how a worker is late, with the cause; "" if it is in time."""
        policy, now_ns = slot.pool.policy, self._state.now_ns
        if board.lease:
            running = (board.lease, *(lease for lease, _ in board.beside))
            return Cause.HUNG, RETURNED_AND_RUN if slot.runs_returned(running) else ""
        if board.checking_ns:
            limit_ns, since_ns, cause = policy.health_timeout_ns, board.checking_ns, Cause.UNHEALTHY
            what = "healthy() has not answered"
        else:
            limit_ns, since_ns, cause = policy.heartbeat_timeout_ns, board.since_ns, Cause.HUNG
            what = "no sign of life while idle"
        if limit_ns and slot.build != policy.build:
            limit_ns = max(limit_ns, OTHER_BUILD_NS)
        since_ns = max(since_ns, slot.ready_ns)
        if not limit_ns or now_ns - since_ns <= limit_ns:
            return cause, ""
        return cause, f"{what} for {(now_ns - since_ns) / SECOND_NS:.1f} s"
