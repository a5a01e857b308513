"""State: what the parts of the core share, and the actions that they collect."""

from random import Random

from musterd.supervisor.core.model.actions import Action, Report
from musterd.supervisor.core.model.events import ClockRead
from musterd.supervisor.core.model.memory_use import MemoryUse
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot
from musterd.supervisor.core.model.task import Task
from musterd.supervisor.core.model.timers import Timers


class State:
    def __init__(self, policy: FleetPolicy, rng: Random) -> None:
        self.policy = policy
        self.rng = rng
        self.now_ns = 0
        self.out: list[Action] = []  # in any order: their ranks decide (actions.py)
        self.timers = Timers()
        self.pools: dict[str, Pool] = {}
        self.tasks: dict[str, Task] = {}  # by id: every task that has not ended and is in memory
        self.claimed: dict[str, Task] = {}  # those of `tasks` that are attempts of the cluster
        self.workers: dict[int, Slot] = {}  # by number: every process that has not ended
        self.memory = MemoryUse(policy.memory)
        self.wall_offset_ns: int | None = None  # wall clock minus monotonic clock, if known
        self.intake_open = True
        self.sockets_survive = False  # at shutdown: new submits wait for the next daemon
        self.recovering = False  # more stored tasks are to come: nothing may end yet
        self.recycling_due = False  # a worker is worn, or an awaited one came or went
        self.store_problem = ""  # why the store cannot write at the moment
        self.asked: dict[str, int] = {}  # ids in pending CheckResent requests, with their number
        self.ended_since: dict[str, None] = {}  # ids of `asked` that ended since
        # Clients that wait for tasks of removed pools, by id.
        self.stranded: dict[str, dict[bytes, None]] = {}
        # By lease, for how long its time did not count (core/tasks/debugging.py).
        self.suspended: dict[int, int] = {}
        self.cancelled_early: dict[str, None] = {}  # ids to be cancelled if they turn out to be new

    def clock_read(self, event: ClockRead) -> None:
        self.wall_offset_ns = event.wall_ns - self.now_ns

    def wall_ns(self, from_now_ns: int = 0) -> int:
        """Return what the wall clock will show then; 0 if that is not known."""
        offset_ns = self.wall_offset_ns
        return 0 if offset_ns is None else self.now_ns + from_now_ns + offset_ns

    def report(
        self,
        event: str,
        level: str = "info",
        *,
        slot: Slot | None = None,
        pool: Pool | None = None,
        task: Task | None = None,
        target: str = "",
        reason: str = "",
        phase: str = "",
        seconds: float = 0.0,
        cause: str = "",
        count: int = 0,
        node: str = "",
        traceback: str = "",
    ) -> None:
        """Report an event of a slot, a pool, a task or a target."""
        home = slot.pool if slot is not None else pool
        self.out.append(
            Report(
                event,
                level,
                pool=home.name if home is not None else "",
                worker=slot.name if slot is not None else "",
                task=task.spec.id if task is not None else "",
                attempt=task.attempt if task is not None else 0,
                target=_site_of(task) if task is not None else target,
                phase=phase,
                reason=reason,
                seconds=seconds,
                cause=cause,
                count=count,
                node=node,
                traceback=traceback,
            )
        )


def _site_of(task: Task) -> str:
    return task.claim.target if task.claim is not None else task.spec.target
