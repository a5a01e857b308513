"""The results of a run, as written to JSON."""

from figures import BYTES, SECONDS, TASKS_PER_SECOND, Figure
from msgspec import Struct
from versus.systems import System

WORKERS = 2
# The figures of each system.
RATE, P50, P99, NEXT, WAIT, WEIGHT = "throughput", "p50", "p99", "next_task", "urgent", "memory"
UNITS = {
    RATE: TASKS_PER_SECOND,
    P50: SECONDS,
    P99: SECONDS,
    NEXT: SECONDS,
    WAIT: SECONDS,
    WEIGHT: BYTES,
}


class Plan(Struct, frozen=True, kw_only=True):
    """The amount of measuring."""

    rounds: int = 3
    throughput_seconds: float = 3.0  # of each system in each round, approximately
    roundtrip_seconds: float = 2.0
    roundtrips: int = 2_000  # at most, in each round
    kills: int = 3
    patience_seconds: float = 30.0  # later events count as missing
    backlog: int = 10_000
    spare: int = 2_000
    probes: int = 5
    notes: int = 200  # tasks under way when something is killed
    note_seconds: float = 0.02
    notes_before: int = 40  # of them done before
    at_once: int = 4  # systems side by side in tests without a clock


QUICK = Plan(
    rounds=1,
    throughput_seconds=0.3,
    roundtrip_seconds=0.2,
    roundtrips=100,
    kills=1,
    patience_seconds=5.0,
    backlog=300,
    spare=200,
    probes=2,
    notes=40,
    notes_before=8,
    at_once=2,
)


class Machine(Struct, kw_only=True):
    """The machine that was measured."""

    musterd: str
    python: str
    kernel: str
    processors: int
    filesystem: str
    fsync_seconds: float
    load: float  # average of the last minute, before the run
    redis: str = ""  # version and sync interval; "" if not needed


class Survival(Struct, kw_only=True):
    """The fate of acknowledged tasks when something was killed."""

    acknowledged: int
    finished: int  # in time, each counted once
    twice: int  # tasks that ran more than once
    left_behind: int = 0  # processes that survived their main process


class Outcome(Struct, kw_only=True):
    """The outcome of one system. A figure without samples was measured but did not come in time."""

    key: str
    label: str
    version: str = ""
    disk: str
    urgent_by: str
    settings: str
    figures: dict[str, Figure] = {}
    killed_task: str = ""
    broker_killed: Survival | None = None
    main_killed: Survival | None = None
    problems: list[str] = []  # why something was not measured

    def add(self, name: str, samples: list[float]) -> None:
        """Add one round of a figure."""
        if name not in self.figures:
            self.figures[name] = Figure(
                key=f"{name}.{self.key}", label=self.label, unit=UNITS[name], samples=[]
            )
        self.figures[name].samples += samples


class Report(Struct, kw_only=True):
    machine: Machine
    plan: Plan
    outcomes: list[Outcome]

    def outcome(self, key: str) -> Outcome | None:
        return next((each for each in self.outcomes if each.key == key), None)


def blank(system: System, redis_fsync: str) -> Outcome:
    once = {"everysec": "once a second", "always": "each write"}[redis_fsync]
    return Outcome(
        key=system.key,
        label=system.label,
        disk=once if system.redis else system.disk,
        urgent_by=system.urgent_by,
        settings=system.settings,
    )
