"""Measure a cluster of two nodes beside other queues: tasks a second, and the idle round trip.

The systems take turns within a round, each with an empty database or Redis of its own, two workers
and the same tasks (bench/versus).
"""

import msgspec
from cluster_plan import Stage
from figures import SECONDS, TASKS_PER_SECOND, Figure, Measure, percentile
from fleet import BenchError
from versus import redis_server
from versus.results import WORKERS
from versus.systems import SYSTEMS, System
from versus.turn import Turn

BASELINE = "procrastinate"
CLUSTER = System(
    key="cluster",
    label="musterd, two nodes",
    script="musterd_cluster_peer.py",
    disk="each commit",
    settings="PostgreSQL, fsync on; submit_many of 1,000",
)
PROCRASTINATE = System(
    key="procrastinate",
    label="Procrastinate",
    script="procrastinate_peer.py",
    venv="procrastinate",
    disk="each commit",
    settings="the same PostgreSQL; batch_defer of 1,000, coroutines, 10 at once in each worker",
)
OTHERS = [system for system in SYSTEMS if system.key in ("celery", "musterd")]


def measure(stage: Stage) -> Measure:
    systems = [CLUSTER, PROCRASTINATE, *OTHERS]
    if stage.plan.some_missing:
        systems = [system for system in systems if _is_installed(system)]
    rates = {each.key: _figure("throughput", each, "tasks a second") for each in systems}
    trips = {
        (each.key, name): _figure(f"roundtrip.{name}", each, f"round trip, {name}")
        for each in systems
        for name in ("p50", "p99")
    }
    for _ in range(stage.plan.rounds):
        for system in systems:
            times, rate = _turn(stage, system)
            rates[system.key].samples.append(rate)
            for name, share in (("p50", 0.50), ("p99", 0.99)):
                trips[system.key, name].samples.append(percentile(times, share))
    return Measure(
        name="peers",
        title=f"End to end: echo with 100 bytes, {WORKERS} workers in all",
        figures=[*rates.values(), *trips.values()],
    )


def _is_installed(system: System) -> bool:
    try:
        system.python()
        if system.redis:
            redis_server.program()
    except BenchError:
        return False
    return True


def _figure(kind: str, system: System, what: str) -> Figure:
    return Figure(
        key=f"{kind}.{system.key}",
        label=f"{system.label}: {what}",
        unit=TASKS_PER_SECOND if kind == "throughput" else SECONDS,
        samples=[],
        baseline=f"{kind}.{BASELINE}",
        note=system.settings if kind == "throughput" else "",
    )


def _turn(stage: Stage, system: System) -> tuple[list[float], float]:
    """Return the times of round trips, and the tasks a second."""
    plan = stage.plan
    url = stage.server.cluster() if system is CLUSTER else stage.server.empty()
    environment = {**system.environment, "BENCH_POSTGRES": url}
    placed = msgspec.structs.replace(system, environment=environment)
    try:
        with Turn(placed, stage.folder, "everysec") as turn:
            turn.ask("start", workers=WORKERS)
            turn.ask("ready", workers=WORKERS)
            times = turn.ask("roundtrip", seconds=plan.roundtrip_seconds, most=plan.round_trips)
            done = turn.ask("throughput", seconds=plan.throughput_seconds)
    finally:
        stage.server.drop(url)
    return times, done["count"] / done["seconds"]
