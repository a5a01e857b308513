"""Sizes of a run: the full one, and a quick one that only shows that everything works."""

from pathlib import Path

from fleet import BENCH_WORKERS, PARSER_WORKER, Fleet
from msgspec import Struct

WORKERS = 2
ARGUMENT = "x" * 100
ANSWER_SECONDS = 120.0  # later answers never come
# The pools of each daemon: one for load, one of a single worker to be killed during its task, and
# the parser, whose replacement and memory are measured.
POOLS = {
    "bench": (BENCH_WORKERS, WORKERS),
    "solo": (BENCH_WORKERS, 1),
    "parser": (PARSER_WORKER, WORKERS),
}


class Standing(Struct, frozen=True):
    """Tasks that go through a queue kept at one depth."""

    before: int = 40_000  # done before the clock starts: more than is kept in memory
    timed: int = 200_000


class Plan(Struct, frozen=True, kw_only=True):
    rounds: int = 5
    tasks: int = 30_000  # of one throughput round
    executor_tasks: int = 10_000  # ProcessPoolExecutor is slow, and its rate does not depend on it
    round_trips: int = 1_000
    priority_rounds: int = 3
    backlog: int = 10_000  # LOW tasks in front of a CRITICAL one
    backlog_seconds: float = 0.001  # that each of them takes
    probes: int = 10  # CRITICAL tasks per round
    backlog_rounds: int = 5
    depths: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)  # queued; the first is compared
    standing: Standing = Standing()


FULL = Plan()
QUICK = Plan(
    rounds=1,
    tasks=300,
    executor_tasks=300,
    round_trips=20,
    priority_rounds=1,
    backlog=200,
    probes=2,
    backlog_rounds=1,
    depths=(100, 1_000),
    standing=Standing(200, 400),
)


class Stage(Struct, frozen=True, kw_only=True):
    """Input of every measurement."""

    plan: Plan
    folder: Path  # for files of its own, on a disk
    durable: Fleet  # durability "full"
    memory: Fleet  # durability "memory"
