"""What a run found out, as it is written to JSON."""

from figures import BYTES, SECONDS, TASKS_PER_SECOND, Figure
from msgspec import Struct
from versus.systems import System

WORKERS = 2
# Of each system: what its figures are called.
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
    """How much is measured."""

    rounds: int = 3
    throughput_seconds: float = 3.0  # of each system in each round, about
    roundtrip_seconds: float = 2.0
    roundtrips: int = 2_000  # at most, in each round
    kills: int = 3
    patience_seconds: float = 30.0  # what has not happened then is said not to happen
    backlog: int = 10_000
    spare: int = 2_000
    probes: int = 5
    notes: int = 200  # tasks that are on their way when something is killed
    note_seconds: float = 0.02
    notes_before: int = 40  # of them are done before
    at_once: int = 4  # systems side by side where nothing is timed


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
    """What the figures were measured on."""

    musterd: str
    python: str
    kernel: str
    processors: int
    filesystem: str
    fsync_seconds: float
    load: float  # average of the last minute, before the run
    redis: str = ""  # version and how often it syncs; "" if it was not needed


class Survival(Struct, kw_only=True):
    """What became of acknowledged tasks when something was killed."""

    acknowledged: int
    finished: int  # within the patience, each counted once
    twice: int  # ran more than once
    left_behind: int = 0  # processes that lived on without their main process


class Outcome(Struct, kw_only=True):
    """Of one system. A figure without samples was measured, and did not come in time."""

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
        """One more round of a figure."""
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
