"""What the parts of the core share: the facts of the moment and the actions being collected."""

from random import Random

from musterd.supervisor.core.model.actions import Action, Report
from musterd.supervisor.core.model.events import ClockRead
from musterd.supervisor.core.model.memory import Memory
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
        self.out: list[Action] = []
        self.timers = Timers()
        self.pools: dict[str, Pool] = {}
        self.tasks: dict[str, Task] = {}  # every task that has not ended, by id
        self.workers: dict[int, Slot] = {}  # every process that has not ended, by number
        self.memory = Memory(policy.memory)
        self.wall_offset_ns: int | None = None  # of the wall clock to the monotonic one, if known
        self.intake_open = True
        self.sockets_survive = False  # what is submitted from now on is for the next daemon
        self.recovering = False  # more of what the store held is to come: nothing may end yet
        self.recycling_due = False  # a worker is worn, or one that was waited for is there or gone
        self.store_problem = ""  # why nothing can be written at the moment
        self.asked: dict[str, int] = {}  # ids the store is asked about (CheckResent), how often
        self.ended_since: dict[str, None] = {}  # those of them that ended since
        self.stranded: dict[str, dict[bytes, None]] = {}  # who waits for tasks whose pool is gone
        self.cancelled_early: dict[str, None] = {}  # those to be cancelled if they turn out new

    def clock_read(self, event: ClockRead) -> None:
        self.wall_offset_ns = event.wall_ns - self.now_ns

    def wall_ns(self, from_now_ns: int = 0) -> int:
        """What the wall clock shows then; 0 if that is not known."""
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
        reason: str = "",
        phase: str = "",
        seconds: float = 0.0,
        cause: str = "",
    ) -> None:
        home = slot.pool if slot is not None else pool
        self.out.append(
            Report(
                event,
                level,
                pool=home.name if home is not None else "",
                worker=slot.name if slot is not None else "",
                task=task.spec.id if task is not None else "",
                attempt=task.attempt if task is not None else 0,
                target=task.spec.target if task is not None else "",
                phase=phase,
                reason=reason,
                seconds=seconds,
                cause=cause,
            )
        )

    def report_target(self, event: str, level: str, target: str, *, seconds: float = 0.0) -> None:
        self.out.append(Report(event, level, target=target, seconds=seconds))
