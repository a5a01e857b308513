"""Measure the engine on PostgreSQL: tasks a second, claims behind long queues, a held snapshot.

    .venv/bin/python bench/cluster_engine.py [throughput] [claims] [snapshot]

It starts a PostgreSQL of its own (Debian's, fsync on, a socket in a temporary folder). Two Python
loops are the nodes; submits, claims and ends are batches of 100, as a sidecar makes them.
"""

import argparse
import os
import sys
import time
from multiprocessing import Process, Queue
from pathlib import Path
from statistics import median, quantiles

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]  # for a server of their own

# ruff: noqa: E402
import psycopg
from postgres import Server, servers
from rig import pool, want

from musterd.ipc.resilience.policy import BreakerPolicy
from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.cluster.engine import ClusterPolicy, End, Joined, NodeCard
from musterd.supervisor.cluster.migrate import migrate
from musterd.supervisor.cluster.postgres import PostgresEngine

ARGS = b"\x81\xa1x" + b"\xc4\x60" + b"x" * 96  # 100 bytes, as a small task has
VALUE = b"\xc4\x26" + b"y" * 38
BATCH = 100


def joined(engine: PostgresEngine, name: str) -> Joined:
    pools = (pool(queue_size=100_000_000),)
    return engine.join(NodeCard(name, name, lease_ns=600_000_000_000, pools=pools))


def specs(first: int, number: int, sites: int, prefix: str = "t") -> list[TaskSpec]:
    return [
        TaskSpec(f"{prefix}{i:09d}", "p.extract", ARGS, target=f"site{i % sites}" if sites else "")
        for i in range(first, first + number)
    ]


def node(url: str, name: str, ended: "Queue[tuple[int, float, list[float]]]") -> None:
    """Claim and finish until nothing came for a while; tell how many and until when."""
    engine = PostgresEngine(url)
    tenure, number, last, claims, idle = joined(engine, name).tenure, 0, 0.0, [], 0
    while idle < 300:
        began = time.perf_counter()
        grants = engine.claim(tenure, [want(BATCH)])
        if not grants:
            idle += 1 if last else 0
            time.sleep(0.005)
            continue
        idle = 0
        claims.append(time.perf_counter() - began)
        number += len(
            engine.finish(tenure, [End(g.id, g.claim, "succeeded", VALUE) for g in grants])
        )
        last = time.perf_counter()
    engine.close()
    ended.put((number, last, claims))


def throughput(server: Server, count: int, sites: int, title: str, held: bool = False) -> None:
    """Submit, claim and finish durably, in two nodes; with a snapshot held open all the time."""
    url = fresh(server)
    snapshot = psycopg.connect(url)
    if held:
        snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM musterd.live")
    ended: Queue[tuple[int, float, list[float]]] = Queue()
    engine = PostgresEngine(url)
    joined(engine, "first")
    nodes = [Process(target=node, args=(url, f"n{number}", ended)) for number in (1, 2)]
    for each in nodes:
        each.start()
    time.sleep(1)
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        verdicts = engine.submit(specs(first, BATCH, sites))
        assert {each.state for each in verdicts} == {"accepted"}, verdicts
    found = [ended.get() for _ in nodes]
    for each in nodes:
        each.join()
    done = sum(each[0] for each in found)
    seconds = max(each[1] for each in found) - began
    times = sorted(taken for each in found for taken in each[2])
    p50, p99 = 1e3 * median(times), 1e3 * quantiles(times, n=100)[98]
    query = "SELECT pg_total_relation_size('musterd.live') / 1048576"
    [(size,)] = server.execute(query, database="bench")
    print(
        f"{title}: {done / seconds:,.0f} tasks/s ({done} of {count}), claim p50 {p50:.1f} ms, "
        f"p99 {p99:.1f} ms, live {size} MB"
    )
    engine.close()
    snapshot.close()


def fresh(server: Server) -> str:
    server.execute("DROP DATABASE IF EXISTS bench WITH (FORCE)")
    server.execute("CREATE DATABASE bench")
    migrate(server.url("bench"))
    return server.url("bench")


def claim_times(engine: PostgresEngine, tenure: int, number: int, times: int) -> list[float]:
    """Claim, and give back, which is not measured."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        grants = engine.claim(tenure, [want(number)])
        taken.append(time.perf_counter() - began)
        assert len(grants) == number, len(grants)
        engine.finish(tenure, [End(g.id, g.claim, "succeeded", VALUE) for g in grants])
    return taken


def claims(server: Server, depth: int, sites: int, blocked: int) -> None:
    """Claim from a queue that has little, and from one with `depth` tasks, most sites blocked."""
    url = fresh(server)
    engine = PostgresEngine(url)
    engine.apply(ClusterPolicy(breaker=BreakerPolicy(failures=3)), 0)
    tenure = joined(engine, "n").tenure
    results = {}
    for title in ("short", "long"):
        if title == "long":
            fill(url, depth, sites)
            for number in range(blocked):
                engine.breaker(f"site{number}", "open")
            engine.claim(tenure, [want(1)])  # parks what is blocked
        else:
            for first in range(0, 6_000, BATCH):
                engine.submit(specs(first, BATCH, sites - blocked, "s"))
        server.execute("VACUUM ANALYZE musterd.live", database="bench")
        for number in (1, BATCH):
            results[title, number] = claim_times(engine, tenure, number, 40)
    for number in (1, BATCH):
        short, long = (median(results[title, number]) for title in ("short", "long"))
        worst = 1e3 * max(results["long", number])
        print(
            f"claim {number}: {1e3 * short:.2f} ms with 6,000 queued, {1e3 * long:.2f} ms with "
            f"{depth:,} and {blocked} of {sites} sites blocked ({long / short:.2f}x, worst "
            f"{worst:.1f} ms)"
        )
    engine.close()


def fill(url: str, depth: int, sites: int) -> None:
    """Queue many tasks at once: lanes by a submit each, the rest by a copy."""
    engine = PostgresEngine(url)
    for first in range(0, sites, BATCH):
        engine.submit(specs(first, min(BATCH, sites - first), sites, "f"))
    engine.close()
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO musterd.live (id, seq, lane, state, submitted_at, queued_at, owner, name, "
            "priority, args) SELECT 'g' || g, nextval('musterd.seq'), l.lanes[1 + g %% %s], 0, "
            "now(), now(), 10, 'p.extract', 2, %s FROM generate_series(1, %s) g, "
            "(SELECT array_agg(lane) AS lanes FROM musterd.lane) l",
            (sites, ARGS, depth),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", default=["throughput", "claims", "snapshot"])
    parser.add_argument("--tasks", type=int, default=60_000)
    parser.add_argument("--depth", type=int, default=1_000_000)
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    with servers(shared_buffers="256MB", max_wal_size="4GB") as server:
        if "throughput" in options.figures:
            throughput(server, options.tasks, 0, "one lane, batches of 100")
            throughput(server, options.tasks, 1000, "1,000 sites, batches of 100")
        if "claims" in options.figures:
            claims(server, options.depth, 1000, 900)
        if "snapshot" in options.figures:
            throughput(server, options.tasks, 0, "a snapshot held open", held=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
