"""Measure schedules: how late runs start, what thousands cost the supervisor, what they leave.

python bench/schedules.py [--quick] [--json FILE] [--only NAME]
"""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from command import benchmark, carry_out
from figures import (
    BYTES,
    COUNT,
    SECONDS,
    SHARE,
    Figure,
    Measure,
    Target,
    Verdict,
    judged,
    percentile,
)
from fleet import BENCH_WORKERS, PARSER_WORKER, BenchError, Fleet, disk_directory
from msgspec import Struct
from plan import ANSWER_SECONDS
from processes import processor_seconds
from rich.console import Console
from table import measured

from musterd import Client
from musterd.ipc.wire.artefacts import FOLDER, entries

LOOK_SECONDS = 0.5
REST_SECONDS = 3.0
SECOND_NS = 1_000_000_000
PAGE = b"<html><body><p class=price>49.00</p></body></html>"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s" % (
    len(PAGE),
    PAGE,
)
KEPT = 1_000  # finished tasks of the long run that are kept; the store looks once a minute
MARKS = 10


class Plan(Struct, frozen=True, kw_only=True):
    schedules: int = 5_000
    every: int = 60  # seconds
    ahead: float = 15.0  # seconds until all are due at once
    runs: int = 100_000
    running: int = 100  # schedules of these runs
    result_bytes: int = 2_000


FULL = Plan()
QUICK = Plan(schedules=20, every=2, ahead=3.0, runs=600, running=10)

TARGETS = (
    Target(
        label="runs of 5,000 schedules start late by, at most", key="spread.late_max", bound=1.0
    ),
    Target(label="they cost the supervisor, of one processor", key="spread.supervisor", bound=0.1),
    Target(label="memory of the supervisor (PSS)", key="spread.memory", bound=100e6),
    Target(
        label="runs that are all due at once are late by, at most",
        key="at_once.late_max",
        bound=1.0,
    ),
    Target(label="artefacts that are left after 100,000 runs", key="runs.artefacts", bound=200),
    Target(label="results of a schedule that are kept then", key="runs.history", bound=20),
)


# -- every minute -----------------------------------------------------------------------------


class Site:
    """A static site that notes when its pages are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []  # path and time of day
        self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.asked.append((head.split(b" ", 2)[1].decode(), time.time()))
                writer.write(ANSWER)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    @contextmanager
    def open(self) -> Iterator["Site"]:
        loop, ready = asyncio.new_event_loop(), threading.Event()

        async def begin() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        def run() -> None:
            loop.create_task(begin())
            loop.run_forever()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        ready.wait(ANSWER_SECONDS)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def measure_spread(plan: Plan, folder: Path) -> Measure:
    """Run all schedules for two intervals; the second is measured."""
    with Site().open() as site, Fleet(folder, "full", {"parser": (PARSER_WORKER, 2)}) as fleet:
        with fleet.client() as client:

            def keys(name: str) -> dict[str, object]:
                url = f"http://127.0.0.1:{site.port}/{name}"
                return {
                    "task": "parser.extract",
                    "args": {"url": url, "select": {"price": ".price"}},
                    "every": f"{plan.every}s",
                    "notify": "task.changed",
                }

            put(client, plan, keys)
            due_at = {f"/{each.name}": each.next_at for each in client.schedules.list()}
        supervisor = psutil.Process(fleet.pid)
        time.sleep(plan.every)
        site.asked.clear()
        before = processor_seconds(supervisor)
        began = time.perf_counter()
        time.sleep(plan.every)
        asked = list(site.asked)
        seconds = time.perf_counter() - began
        spent = (processor_seconds(supervisor) - before) / seconds
        memory = float(supervisor.memory_full_info().pss)
        with fleet.client() as client:
            skipped = float(sum(each.skipped for each in client.schedules.list()))
    if len(asked) < plan.schedules // 2:
        raise BenchError(f"{len(asked)} runs of {plan.schedules} were made: {fleet.log()[-500:]}")
    late = [lateness(asked_at - due_at[path], plan.every) for path, asked_at in asked]
    return Measure(
        name="spread",
        title=f"{plan.schedules:,} schedules every {plan.every} s, {len(asked):,} runs",
        figures=[
            *late_figures("spread", late),
            _figure("spread.skipped", "skipped", COUNT, [skipped]),
            _figure("spread.supervisor", "supervisor, of one processor", SHARE, [spent]),
            _figure("spread.memory", "supervisor, PSS", BYTES, [memory]),
        ],
    )


def lateness(after: float, every: int) -> float:
    """Return how late a run was, of one that is due every so many seconds."""
    seconds = after % every
    return seconds if seconds < every - 0.5 else 0.0  # the two clocks are read at different times


def put(client: Client, plan: Plan, keys: Callable[[str], dict[str, object]]) -> None:
    names = [f"s{number}" for number in range(plan.schedules)]
    client.schedules.put_many({name: keys(name) for name in names})


def late_figures(name: str, late: list[float]) -> list[Figure]:
    return [
        _figure(f"{name}.late_p50", "late, median", SECONDS, [percentile(late, 0.5)]),
        _figure(f"{name}.late_p99", "late, p99", SECONDS, [percentile(late, 0.99)]),
        _figure(f"{name}.late_max", "late, at most", SECONDS, [max(late)]),
    ]


# -- all at once ------------------------------------------------------------------------------


def measure_at_once(plan: Plan, folder: Path) -> Measure:
    """Let all schedules be due at one instant; handlers do nothing."""
    with Fleet(folder, "full", {"bench": (BENCH_WORKERS, 2)}) as fleet, fleet.client() as client:
        at = int(time.time() + plan.ahead)
        moment = time.gmtime(at)
        cron = f"{moment.tm_sec} {moment.tm_min} {moment.tm_hour} * * *"
        put(client, plan, lambda _: {"task": "bench.wall_stamp", "cron": cron, "timezone": "UTC"})
        if time.time() > at - 1:
            raise BenchError("the schedules took too long to put: the machine is busy")
        time.sleep(max(0.0, at - time.time()))
        supervisor = psutil.Process(fleet.pid)
        before = processor_seconds(supervisor)
        time.sleep(REST_SECONDS)  # no look meanwhile: one at 5,000 schedules takes 50 ms
        spent = processor_seconds(supervisor) - before
        while sum(each.runs for each in client.schedules.list()) < plan.schedules:
            time.sleep(REST_SECONDS)
            if time.time() > at + ANSWER_SECONDS:
                raise BenchError("not all runs were made")
        tasks = [client.task(each.last_task) for each in client.schedules.list()]
        late = [task.result(ANSWER_SECONDS) / SECOND_NS - at for task in tasks]
    return Measure(
        name="at-once",
        title=f"{plan.schedules:,} schedules that are due at one instant",
        figures=[
            *late_figures("at_once", late),
            _figure("at_once.supervisor", "processor time of the supervisor", SECONDS, [spent]),
        ],
    )


# -- what is left -----------------------------------------------------------------------------


def measure_runs(plan: Plan, folder: Path) -> Measure:
    """Run schedules whose results all change, with pictures, as fast as they go."""
    fleet = Fleet(folder, "normal", {"bench": (BENCH_WORKERS, 2)})
    fleet.set("store.keep_results_max", KEPT)
    with fleet, fleet.client() as client:
        keys = {
            "task": "bench.page",
            "args": {"size": plan.result_bytes},
            "every": "100ms",
            "notify": "task.changed",
            "attach": "screenshot",
            "stale": 0,
        }
        client.schedules.put_many({f"s{number}": keys for number in range(plan.running)})
        supervisor = psutil.Process(fleet.pid)
        state = folder / "state"
        stores, kept, bytes_kept, memory = [], [], [], []
        began = time.perf_counter()
        for mark in range(1, MARKS + 1):
            while sum(each.runs for each in client.schedules.list()) < plan.runs * mark // MARKS:
                time.sleep(LOOK_SECONDS)
            found = entries(str(state / FOLDER))
            stores.append(float(sum(each.stat().st_size for each in state.glob("*.db*"))))
            kept.append(float(len(found)))
            bytes_kept.append(float(sum(each.bytes for each in found)))
            memory.append(float(supervisor.memory_full_info().pss))
        seconds = time.perf_counter() - began
        entries_kept = max(len(client.history(f"s{number}", 100)) for number in range(plan.running))
    return Measure(
        name="runs",
        title=f"{plan.runs:,} runs with other results and pictures, at each tenth",
        figures=[
            _figure("runs.artefacts", "artefacts, attempts", COUNT, kept, f"{seconds:.0f} s"),
            _figure("runs.artefact_bytes", "artefacts", BYTES, bytes_kept),
            _figure("runs.history", "entries of a schedule, at most", COUNT, [float(entries_kept)]),
            _figure("runs.store", "store", BYTES, stores),
            _figure("runs.memory", "supervisor, PSS", BYTES, memory),
        ],
    )


def _figure(key: str, label: str, unit: str, samples: list[float], note: str = "") -> Figure:
    return Figure(key=key, label=label, unit=unit, samples=samples, note=note)


MEASURES: dict[str, Callable[[Plan, Path], Measure]] = {
    "at-once": measure_at_once,
    "spread": measure_spread,
    "runs": measure_runs,
}


class Report(Struct, kw_only=True):
    load: float  # average of the last minute, before the run
    processors: int
    plan: Plan
    measures: list[Measure]
    targets: list[Verdict]


def run(plan: Plan, names: list[str], console: Console) -> Report:
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    console.print(f"{processors} processors, load {load:.1f}")
    with tempfile.TemporaryDirectory(prefix="musterd-bench-", dir=disk_directory()) as place:
        folder = Path(place)
        measures = measured(names, lambda name: MEASURES[name](plan, folder / name), console)
    verdicts = judged(TARGETS, measures)
    return Report(load=load, processors=processors, plan=plan, measures=measures, targets=verdicts)


@benchmark(MEASURES)
def main(quick: bool, path: Path | None, only: tuple[str, ...]) -> None:
    """Measure how late runs of schedules start, what they cost, and what they leave."""
    plan, names = QUICK if quick else FULL, list(only or MEASURES)
    carry_out("schedules-", lambda console: run(plan, names, console), quick=quick, path=path)


if __name__ == "__main__":
    main()
