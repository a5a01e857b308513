"""Measure what the web process costs, and how fast it answers beside a busy daemon.

python bench/web.py [--workers 200] [--rate 10000] [--seconds 15]
"""

import http.client
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import psutil
from fleet import BENCH_WORKERS, BenchError, Fleet, disk_directory

from musterd.supervisor.api import rpc

PSS_MB_MAX = 45.0
SUPERVISOR_SHARE_MAX = 0.01  # of a processor
HEALTH_P99_SECONDS_MAX = 0.020
CHECK_SECONDS = 0.02  # between requests to /healthz
SCRAPE_SECONDS = 5.0
DASHBOARD_SECONDS = 1.0
SLICES = 10  # batches per second in which the load is submitted
QUESTIONS = 200
ASKED = (rpc.Metrics, rpc.Status, rpc.ListBreakers, rpc.ListSchedules, rpc.ShowMemory, rpc.Version)


def asking(url: str, path: str, pause: float, stop: threading.Event, took: list[float]) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    while not stop.wait(pause):
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        took.append(time.perf_counter() - began)
        if answer.status != 200:
            raise BenchError(f"{path} answered {answer.status}")
    connection.close()


@contextmanager
def beside(*threads: threading.Thread, stop: threading.Event) -> Iterator[None]:
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def address_of(fleet: Fleet) -> tuple[str, int]:
    for _ in range(1000):
        web = fleet.status().web
        if web is not None and web.address:
            return web.address, web.pid
        time.sleep(0.02)
    raise BenchError(f"the web process is not up:\n{fleet.log()}")


def made(folder: Path, name: str, workers: int) -> Fleet:
    fleet = Fleet(folder / name, "full", {"bench": (BENCH_WORKERS, workers)})
    fleet.set("http.listen", "127.0.0.1:0")
    fleet.set("memory.enabled", "false")
    return fleet


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def share(pid: int, seconds: float) -> float:
    began, used = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / (time.monotonic() - began)


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def cost(fleet: Fleet, workers: int, seconds: float) -> bool:
    """Measure the supervisor's CPU time for one dashboard and one scraper."""
    url, web = address_of(fleet)
    each = {}
    for params in ASKED:
        used = cpu_seconds(fleet.pid)
        with fleet.connection() as connection:
            for _ in range(QUESTIONS):
                connection.request(params())
        each[params.__name__] = (cpu_seconds(fleet.pid) - used) / QUESTIONS
    idle = share(fleet.pid, seconds)
    stop, took = threading.Event(), []
    looking = [
        threading.Thread(target=asking, args=(url, path, pause, stop, took))
        for path, pause in (("/status", DASHBOARD_SECONDS), ("/metrics", SCRAPE_SECONDS))
    ]
    with beside(*looking, stop=stop):
        watched = share(fleet.pid, seconds)
    metrics = each.pop("Metrics")
    estimated = sum(each.values()) / DASHBOARD_SECONDS + metrics / SCRAPE_SECONDS
    print(f"{workers} workers: the supervisor takes {metrics * 1e3:.2f} ms for `metrics`,")
    print(f"  {sum(each.values()) * 1e3:.2f} ms for all that /status asks: {estimated:.3%} of a")
    print(f"  processor; idle it took {idle:.2%}, with both {watched:.2%}")
    memory = pss_mb(web)
    print(f"memory of the web process: {memory:.1f} MB (PSS), at most {PSS_MB_MAX:g}")
    return memory <= PSS_MB_MAX and estimated <= SUPERVISOR_SHARE_MAX


def load(fleet: Fleet, rate: int, stop: threading.Event, done: list[int]) -> None:
    with fleet.client() as client:
        due = time.monotonic()
        while not stop.is_set():
            handles = client.submit_many([("bench.noop", {"data": ""})] * (rate // SLICES))
            for handle in handles:
                handle.result(60)
            done.append(len(handles))
            due += 1 / SLICES
            time.sleep(max(0.0, due - time.monotonic()))


def health(fleet: Fleet, rate: int, seconds: float) -> bool:
    url, _ = address_of(fleet)
    stop, took, done = threading.Event(), [], []
    busy: list[Callable[[], None]] = [
        lambda: asking(url, "/healthz", CHECK_SECONDS, stop, took),
        lambda: asking(url, "/metrics", SCRAPE_SECONDS, stop, []),
        lambda: load(fleet, rate, stop, done),
    ]
    began = time.monotonic()
    with beside(*(threading.Thread(target=each) for each in busy), stop=stop):
        time.sleep(seconds)
        reached = sum(done) / (time.monotonic() - began)
    took.sort()
    p99 = took[int(len(took) * 0.99)]
    print(
        f"/healthz beside {reached:,.0f} tasks/s: {took[len(took) // 2] * 1e3:.1f} ms, 99th "
        f"percentile {p99 * 1e3:.1f} ms of {len(took)}, at most {HEALTH_P99_SECONDS_MAX * 1e3:g}"
    )
    return p99 <= HEALTH_P99_SECONDS_MAX


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--workers", default=200, show_default=True, help="Workers of the fleet.")
@click.option("--rate", default=10_000, show_default=True, help="Tasks per second beside /healthz.")
@click.option("--seconds", default=15.0, show_default=True, help="Duration of each measurement.")
def main(workers: int, rate: int, seconds: float) -> None:
    """Measure the web process: memory, what it costs the supervisor, how fast it answers."""
    with tempfile.TemporaryDirectory(prefix="musterd-bench-", dir=disk_directory()) as name:
        with made(Path(name), "many", workers) as fleet:
            good = cost(fleet, workers, seconds)
        with made(Path(name), "busy", 2) as fleet:
            good &= health(fleet, rate, seconds)
    if not good:
        sys.exit("not within its limits")


if __name__ == "__main__":
    main()
