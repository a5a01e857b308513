"""Measure the memory of idle processes as PSS, which divides shared pages by their users."""

import subprocess
import sys
from pathlib import Path

import psutil
from figures import BYTES, Figure, Measure
from fleet import BenchError, Fleet
from plan import POOLS, WORKERS, Stage

PARSER_MODULE = "musterd.workers.parser"
BARE_POOL, LOADED_POOL = "memory.pool.worker", "memory.pool.parser"  # a fair comparison


def measure(stage: Stage) -> Measure:
    """Measure a new fleet, in which nothing has run before."""
    with Fleet(stage.folder / "weighed", "full", POOLS) as fleet:
        figures = [
            _figure("musterd.supervisor", "musterd, supervisor", [pss(fleet.pid)]),
            _figure(
                "musterd.fork server", "musterd, fork server of the parsers", [_fork_server(fleet)]
            ),
            _figure(
                "musterd.parser",
                "musterd, parser worker with its init",
                _pool(fleet, "parser"),
                LOADED_POOL,
            ),
            _figure(
                "musterd.worker",
                "musterd, noop worker with its init",
                _pool(fleet, "bench"),
                BARE_POOL,
            ),
        ]
    after = [pss(stage.durable.pid)]
    return Measure(
        name="memory",
        title=f"Memory: PSS of idle processes, {WORKERS} workers per pool",
        figures=[
            *figures,
            _figure("musterd.supervisor_after", "musterd, supervisor after the load above", after),
            _figure("pool.worker", "Pool worker", _idle_pool([]), BARE_POOL),
            _figure(
                "pool.parser",
                "Pool worker, the parser's modules",
                _idle_pool([PARSER_MODULE]),
                LOADED_POOL,
            ),
        ],
    )


def _figure(key: str, label: str, samples: list[float], baseline: str = "") -> Figure:
    return Figure(key=f"memory.{key}", label=label, unit=BYTES, samples=samples, baseline=baseline)


def _pool(fleet: Fleet, pool: str) -> list[float]:
    """Return the memory of each worker of the pool, with its init."""
    workers = next(each.workers for each in fleet.status().pools if each.name == pool)
    weights = []
    for worker in workers:
        init = psutil.Process(worker.pid).parent()
        assert init is not None
        weights.append(pss(worker.pid) + (pss(init.pid) if init.pid != fleet.pid else 0.0))
    return weights


def _fork_server(fleet: Fleet) -> float:
    for child in psutil.Process(fleet.pid).children():
        if "fork server parser" in " ".join(child.cmdline()):
            return pss(child.pid)
    raise BenchError("the parser's fork server was not found among the supervisor's children")


def _idle_pool(modules: list[str]) -> list[float]:
    """Return the memory of workers of a Pool in a process with nothing else in it."""
    script = str(Path(__file__).with_name("peers.py"))
    process = subprocess.Popen(
        [sys.executable, script, str(WORKERS), *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        weights = [pss(pid) for pid in pids]
        process.stdin.close()
    return weights


def pss(pid: int) -> float:
    """Return the PSS of a process in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            return int(rest.split()[0]) * 1024.0
    raise BenchError(f"/proc/{pid}/smaps_rollup has no line Pss")
