"""Measure the engine on PostgreSQL by itself: claims behind a long queue, and beside a snapshot.

Two Python loops are the nodes; submits, claims and ends are batches of 100, as a sidecar has
them.
"""

import time
from itertools import zip_longest
from multiprocessing import get_context
from multiprocessing.queues import Queue
from statistics import median

import psycopg
from cluster_plan import Stage
from figures import BYTES, SECONDS, TASKS_PER_SECOND, Figure, Measure, percentile
from fleet import BenchError

from musterd.ipc.wire.messages import TaskDeclaration, TaskSpec
from musterd.supervisor.cluster.engine import End, NodeCard, PoolCard, Want
from musterd.supervisor.cluster.postgres import PostgresEngine

NOOP = b"\x80"  # of a task without arguments
ARGS = b"\x81\xa1x" + b"\xc4\x60" + b"x" * 96  # 100 bytes, as a small task has
VALUE = b"\xc4\x26" + b"y" * 38
BATCH = 100
NODES = 2
LEASE_NS = 600 * 10**9
QUEUE_SIZE = 100_000_000
CARD = PoolCard("p", 10, (TaskDeclaration("extract"),), queue_size=QUEUE_SIZE)
QUIET_SECONDS = 2.0  # a node for which nothing came for so long has done everything
FIRST_SECONDS = 10.0  # for the first task to come
POLL_SECONDS = 0.005
LIVE = """
SELECT sum(pg_total_relation_size(format('musterd.%I', tablename)::regclass)) FROM pg_tables
WHERE schemaname = 'musterd' AND tablename !~ '^done'
"""
FORK = get_context("spawn")

Told = tuple[int, float, list[float]]  # tasks done, when the last one was, durations of claims


def measure_claims(stage: Stage) -> Measure:
    """Claim from a queue that has only what is claimed, and from a long one with blocked sites."""
    plan = stage.plan
    short, long = stage.server.cluster(), stage.server.cluster()
    figures = {
        (key, number): Figure(
            key=f"claims.{key}.{number}",
            label=f"claim of {number}, {label}",
            unit=SECONDS,
            samples=[],
            baseline=f"claims.empty.{number}",
        )
        for number in (1, BATCH)
        for key, label in (
            ("empty", "nothing else is queued"),
            ("queued", f"{plan.queued:,} queued, {plan.blocked} of {plan.sites} sites blocked"),
        )
    }
    engines = {"empty": PostgresEngine(short), "queued": PostgresEngine(long)}
    tenures = {key: _join(engine, "n") for key, engine in engines.items()}
    _fill(stage, long, engines["queued"])
    for engine, tenure in zip(engines.values(), tenures.values(), strict=True):
        engine.claim(tenure, [Want("p", 1, ("p.extract",))])  # parks what is blocked
    for turn in range(plan.claims):
        for (key, number), figure in figures.items():
            if key == "empty":
                sites = plan.sites - plan.blocked
                engines[key].submit(_specs(f"e{number}-{turn}-", number, sites))
            figure.samples.append(_claim(engines[key], tenures[key], number))
    for engine in engines.values():
        engine.close()
    for url in (short, long):
        stage.server.drop(url)
    return Measure(name="claims", title="One claim", figures=list(figures.values()))


def measure_snapshot(stage: Stage) -> Measure:
    """Take many tasks from submit to end while a snapshot is held open."""
    tasks = stage.plan.snapshot_tasks
    rate, times, live = _beside_snapshot(stage, tasks, NOOP)
    _, _, larger = _beside_snapshot(stage, tasks // 10, ARGS)
    parts = max(1, len(times) // 10)
    return Measure(
        name="snapshot",
        title=f"{tasks:,} tasks while a snapshot is held open (no daemons)",
        figures=[
            _one("rate", "tasks a second", TASKS_PER_SECOND, rate),
            _one("claim.first", "claim of 100, median of the first tenth", SECONDS,
                 median(times[:parts])),
            _one("claim.last", "claim of 100, median of the last tenth", SECONDS,
                 median(times[-parts:])),
            _one("claim.p99", "claim of 100, p99", SECONDS, percentile(times, 0.99)),
            _one("live", "live tables at the end", BYTES, live),
            _one("live.args", "the same, with 100 bytes of arguments each, projected", BYTES,
                 larger * 10),
        ],
    )  # fmt: skip


def _beside_snapshot(stage: Stage, tasks: int, args: bytes) -> tuple[float, list[float], float]:
    """Return tasks a second, durations of claims, and the size of the live tables at the end."""
    url = stage.server.cluster()
    with psycopg.connect(stage.server.admin(url)) as snapshot:
        snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM musterd.live")
        rate, times = _throughput(url, tasks, args)
        ((size,),) = stage.server.execute(url, LIVE)
    stage.server.drop(url)
    return rate, times, float(str(size))


def _one(key: str, label: str, unit: str, value: float) -> Figure:
    return Figure(key=f"snapshot.{key}", label=label, unit=unit, samples=[value])


def _join(engine: PostgresEngine, name: str) -> int:
    return engine.join(NodeCard(name, name, lease_ns=LEASE_NS, pools=(CARD,))).tenure


def _specs(
    prefix: str, number: int, sites: int, first: int = 0, args: bytes = ARGS
) -> list[TaskSpec]:
    return [
        TaskSpec(f"{prefix}{i:09d}", "p.extract", args, target=f"site{i % sites}" if sites else "")
        for i in range(first, first + number)
    ]


def _claim(engine: PostgresEngine, tenure: int, number: int) -> float:
    """Return the duration of a claim; finishing is not measured."""
    began = time.perf_counter()
    grants = engine.claim(tenure, [Want("p", number, ("p.extract",))])
    took = time.perf_counter() - began
    if len(grants) != number:
        raise BenchError(f"{len(grants)} of {number} tasks were claimed")
    engine.finish(tenure, [End(each.id, each.claim, "succeeded", VALUE) for each in grants])
    return took


def _fill(stage: Stage, url: str, engine: PostgresEngine) -> None:
    """Queue many tasks at once, a submit for each lane, the rest by a copy; block sites."""
    plan, admin = stage.plan, stage.server.admin(url)
    for first in range(0, plan.sites, BATCH):
        engine.submit(_specs("f", min(BATCH, plan.sites - first), plan.sites, first))
    with psycopg.connect(admin) as connection:
        connection.execute(
            "INSERT INTO musterd.live (id, seq, lane, state, submitted_at, queued_at, owner, name, "
            "priority, args) SELECT 'g' || g, nextval('musterd.seq'), l.lanes[1 + g %% %s], 0, "
            "now(), now(), 10, 'p.extract', 2, %s FROM generate_series(1, %s) g, "
            "(SELECT array_agg(lane) AS lanes FROM musterd.lane) l",
            (plan.sites, ARGS, plan.queued),
        )
    ruler = PostgresEngine(admin)
    for site in range(plan.sites - plan.blocked, plan.sites):
        ruler.breaker(f"site{site}", "open")
    ruler.close()
    stage.server.execute(url, "VACUUM ANALYZE musterd.live")


def _throughput(url: str, tasks: int, args: bytes) -> tuple[float, list[float]]:
    """Return tasks a second, and the durations of all claims in the order of time."""
    engine = PostgresEngine(url)
    _join(engine, "first")
    told: Queue[Told] = FORK.Queue()
    nodes = [FORK.Process(target=_work, args=(url, f"n{number}", told)) for number in range(NODES)]
    for each in nodes:
        each.start()
    began = time.perf_counter()
    for first in range(0, tasks, BATCH):
        engine.submit(_specs("t", min(BATCH, tasks - first), 0, first, args))
    found = [told.get() for _ in nodes]
    for each in nodes:
        each.join()
    engine.close()
    if sum(done for done, _, _ in found) != tasks:
        raise BenchError(f"{sum(done for done, _, _ in found)} of {tasks} tasks ended")
    seconds = max(last for _, last, _ in found) - began
    pairs = zip_longest(*(times for _, _, times in found))  # of both nodes in turn
    return tasks / seconds, [time for pair in pairs for time in pair if time is not None]


def _work(url: str, name: str, told: "Queue[Told]") -> None:
    """Claim and finish until nothing comes any more."""
    engine = PostgresEngine(url)
    tenure, done, last, claims = _join(engine, name), 0, 0.0, []
    until = time.perf_counter() + FIRST_SECONDS  # the other node may be faster, and do all of it
    while time.perf_counter() < until:
        began = time.perf_counter()
        grants = engine.claim(tenure, [Want("p", BATCH, ("p.extract",))])
        if not grants:
            time.sleep(POLL_SECONDS)
            continue
        claims.append(time.perf_counter() - began)
        ends = [End(each.id, each.claim, "succeeded", VALUE) for each in grants]
        done += len(engine.finish(tenure, ends))
        last = time.perf_counter()
        until = last + QUIET_SECONDS
    engine.close()
    told.put((done, last, claims))
