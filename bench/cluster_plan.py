"""Sizes of a run of `make bench-cluster`: the full one, and a quick one that shows it works."""

from pathlib import Path

from msgspec import Struct
from nodes import Server


class Plan(Struct, frozen=True, kw_only=True):
    rounds: int = 3
    some_missing: bool = False  # a system that is not installed is left out
    throughput_seconds: float = 5.0  # of each system in each round, approximately
    roundtrip_seconds: float = 3.0
    round_trips: int = 2_000  # at most, in each round
    queued: int = 1_000_000  # before a claim
    sites: int = 1_000
    blocked: int = 900
    claims: int = 40  # of each kind
    lease_seconds: int = 10
    kills: int = 3
    held: int = 8  # tasks of the node that is killed
    snapshot_tasks: int = 1_000_000


FULL = Plan()
QUICK = Plan(
    rounds=1,
    some_missing=True,
    throughput_seconds=0.3,
    roundtrip_seconds=0.3,
    round_trips=20,
    queued=2_000,
    sites=20,
    blocked=15,
    claims=3,
    lease_seconds=5,
    kills=1,
    held=2,
    snapshot_tasks=1_000,
)


class Stage(Struct, frozen=True, kw_only=True):
    """Input of every measurement."""

    plan: Plan
    folder: Path  # for files of its own, on a disk
    server: Server
