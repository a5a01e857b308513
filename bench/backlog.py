"""Measure whether a long queue is slower than a short one, and its memory in the supervisor.

The queue is kept at one depth: a pool is paused and filled, then it works, and each finished task
is replaced by a new one. The clock starts when all tasks that were kept in memory are done. So the
daemon does the same work at every depth: tasks come, run and go, and their results are told. Only
the place where tasks wait differs.
"""

import contextlib
import time

import msgspec
import psutil
from figures import BYTES, TASKS_PER_SECOND, Figure, Measure
from fleet import BENCH_WORKERS, BenchError, Fleet
from memory import pss
from msgspec import Struct
from plan import ANSWER_SECONDS, ARGUMENT, WORKERS, Stage, Standing
from processes import processor_seconds

from musterd import Client
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.ctl.connection import Connection

BATCH = 5_000
CLIENT_TASKS = 50_000  # per client, because a client with a million results needs memory, too
REQUEST = ("bench.noop", {"data": ARGUMENT})
POOLS = {"bench": (BENCH_WORKERS, WORKERS)}


def measure(stage: Stage) -> Measure:
    depths = stage.plan.depths
    base = _key("rate", depths[0])
    rates = {
        depth: Figure(
            key=_key("rate", depth),
            label=f"{depth:,} queued",
            unit=TASKS_PER_SECOND,
            samples=[],
            baseline=base,
        )
        for depth in depths
    }
    weights = {
        depth: Figure(
            key=_key("supervisor", depth),
            label=f"supervisor, PSS, {depth:,} queued",
            unit=BYTES,
            samples=[],
        )
        for depth in depths
    }
    for number in range(stage.plan.backlog_rounds):
        for depth in depths:
            with Fleet(stage.folder / f"deep-{number}-{depth}", "full", POOLS) as fleet:
                held = hold(fleet, depth, stage.plan.standing)
            rates[depth].samples.append(held.rate)
            weights[depth].samples.append(held.weight)
    return Measure(
        name="backlog",
        title=f"Backlog: durable tasks per second while so many are queued, {WORKERS} workers",
        figures=[*rates.values(), *weights.values()],
    )


def _key(what: str, depth: int) -> str:
    return f"backlog.{what}.{depth}"


class Held(Struct, frozen=True):
    rate: float  # tasks per second
    weight: float  # of the supervisor when its queue is full, in bytes
    work: float  # processor seconds of the supervisor for a task
    shortest: int  # the lowest queue length seen


def hold(fleet: Fleet, depth: int, tasks: Standing) -> Held:
    """Fill the queue, then run its tasks and keep it at that depth."""
    with fleet.connection() as connection:
        connection.request(rpc.Pause(names=["bench"]))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(fleet.client())
        # This client gets the results of tasks that end meanwhile, at every depth.
        first = min(depth, tasks.before + tasks.timed)
        _submit(client, first)
        _fill(fleet, depth - first)
        connection = stack.enter_context(fleet.connection())
        done, queued = _look(connection)
        if queued != depth:
            raise BenchError(f"{queued} of {depth} tasks are queued")
        weight = pss(fleet.pid)
        connection.request(rpc.Resume(names=["bench"]))
        supervisor = psutil.Process(fleet.pid)
        began, spent, begun = 0.0, 0.0, 0
        shortest = depth
        while not began or done < begun + tasks.timed:
            client.submit_many([REQUEST] * (depth - queued))
            done, queued = _look(connection)
            if not began and done >= tasks.before:
                began, spent, begun = time.perf_counter(), processor_seconds(supervisor), done
            shortest = min(shortest, queued)
        seconds = time.perf_counter() - began
        work = (processor_seconds(supervisor) - spent) / (done - begun)
        connection.request(rpc.Pause(names=["bench"]))  # to end without the other tasks
    return Held((done - begun) / seconds, weight, work, shortest)


def _look(connection: Connection) -> tuple[int, int]:
    """Return how many tasks are done, and how many are queued."""
    answer = connection.request(rpc.Status(names=["bench"]))
    (pool,) = msgspec.json.decode(answer, type=FleetStatus).pools
    return pool.succeeded, sum(pool.queued.values())


def _fill(fleet: Fleet, count: int) -> None:
    for start in range(0, count, CLIENT_TASKS):
        with fleet.client() as client:
            _submit(client, min(CLIENT_TASKS, count - start))


def _submit(client: Client, count: int) -> None:
    for start in range(0, count, BATCH):
        client.submit_many([REQUEST] * min(BATCH, count - start))
        client.flush(ANSWER_SECONDS)
