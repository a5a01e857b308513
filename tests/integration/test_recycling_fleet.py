"""Worn workers are replaced under load, on real processes: nobody waits, nothing runs twice."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WORKERS = """
import os, time
from pathlib import Path
from musterd import Worker, task

class Worn(Worker):
    def open(self):
        self.me = os.urandom(4).hex()
        if Path("broken").exists():
            raise RuntimeError("the successor is broken")

    @task
    def work(self, ctx, seconds: float = 0.0) -> list:
        time.sleep(seconds)
        return [self.me, ctx.attempt]
"""


@pytest.fixture
def worn(muster: Callable[..., Any]) -> Callable[..., Any]:
    """worn(size=2, max_tasks=3, ...) -> a daemon with the pool `worn`."""

    def make(size: int = 1, drain_timeout: str = "30s", **pool: Any) -> Any:
        made = muster(
            {"worn": {"worker": "worn:Worn", "size": size, **pool}},
            start=False,
            supervisor__drain_timeout=drain_timeout,
        )
        Path(made.folder, "worn.py").write_text(WORKERS)
        return made.start()

    return make


class Sights:
    """What was seen of the pool all the while."""

    def __init__(self) -> None:
        self.running: Counter[int] = Counter()
        self.leaving: Counter[int] = Counter()


@contextmanager
def watched(daemon: Any) -> Iterator[Sights]:
    sights, over = Sights(), threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            pool = daemon.pool("worn")
            sights.running[sum(worker.state in ("RUNNING", "BUSY") for worker in pool.workers)] += 1
            sights.leaving[len(pool.leaving)] += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sights
    finally:
        over.set()
        thread.join()


def test_no_worker_runs_more_than_max_tasks_and_no_task_notices(worn, waiting):
    daemon = worn(size=1, max_tasks=3)
    with daemon.client() as client:
        results = [client.submit("worn.work").result(30) for _ in range(20)]
        results += [h.result(60) for h in client.submit_many([("worn.work", {}, {})] * 20)]
    runs = Counter(me for me, _ in results)
    assert max(runs.values()) <= 3
    assert len(runs) >= 40 // 3
    assert {attempt for _, attempt in results} == {1}
    waiting("all is counted", lambda: daemon.pool("worn").recycled >= len(runs) - 1)
    pool = daemon.pool("worn")
    assert (pool.lost, pool.restarts, pool.failed) == ({}, 0, 0)
    assert pool.workers[0].recycled == pool.recycled
    assert "(max_tasks)" in daemon.log()
    assert f"{pool.recycled} recycled" in daemon.ctl("status").stdout


def test_old_workers_are_replaced_one_by_one_while_the_pool_stays_whole(worn, waiting):
    daemon = worn(size=3, max_age="1s")
    with daemon.client() as client, watched(daemon) as sights:
        handles = [client.submit("worn.work", {"seconds": 0.2}) for _ in range(60)]
        results = [handle.result(60) for handle in handles]
        waiting("each was replaced", lambda: daemon.pool("worn").recycled >= 6)
    assert {attempt for _, attempt in results} == {1}
    assert len({me for me, _ in results}) > 3
    assert set(sights.running) == {3}, "the new one is there before the old one goes"
    assert max(sights.leaving) == 1, "one at a time"
    assert daemon.pool("worn").lost == {}


def test_a_task_longer_than_drain_timeout_ends_in_the_old_worker(worn, waiting):
    daemon = worn(size=1, max_age="500ms", drain_timeout="500ms")
    with daemon.client() as client:
        long = client.submit("worn.work", {"seconds": 3.0})
        waiting("another has its place", lambda: daemon.pool("worn").leaving)
        assert daemon.pool("worn").leaving[0].task_id == long.id
        assert long.id in daemon.ctl("status").stdout
        quick = [client.submit("worn.work").result(30) for _ in range(3)]
        me, attempt = long.result(30)
    assert attempt == 1
    assert me not in {other for other, _ in quick}


def test_a_broken_successor_leaves_the_old_worker_in_service(worn, waiting):
    daemon = worn(size=1, max_age="500ms", restart={"base": "100ms", "max": "200ms"})
    broken = Path(daemon.folder, "broken")
    broken.touch()
    with daemon.client() as client:
        waiting("it was tried", lambda: "could not be recycled" in daemon.log())
        assert "the successor is broken" in daemon.log()
        first, _ = client.submit("worn.work").result(30)
        assert daemon.worker("worn/0").state in ("RUNNING", "BUSY")
        assert daemon.pool("worn").recycled == 0
        broken.unlink()
        waiting("it is replaced", lambda: daemon.pool("worn").recycled >= 1)
        waiting("by another", lambda: client.submit("worn.work").result(30)[0] != first)
    assert daemon.pool("worn").restarts == 0
