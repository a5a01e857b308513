"""Worn workers are replaced under load, with real processes: no task waits, none runs twice."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Muster, Musters

WORKERS = """
import os, subprocess, sys, time
from pathlib import Path
from musterd import Worker, task

class Worn(Worker):
    def open(self):
        self.me = os.urandom(4).hex()
        if Path("broken").exists():
            raise RuntimeError("the successor is broken")

    @task
    def eat(self, ctx, megabytes: int, child: bool = False) -> str:
        if child:
            hold = f"x = b'x' * {megabytes}_000_000; print(1, flush=True); input()"
            command = [sys.executable, "-c", hold]
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.child.stdout.readline()
        else:
            self.eaten = b"x" * (megabytes * 1_000_000)
        return self.me

    @task
    def work(self, ctx, seconds: float = 0.0) -> list:
        time.sleep(seconds)
        return [self.me, ctx.attempt]
"""


@pytest.fixture
def worn(muster: Musters) -> Callable[..., Any]:
    """Make a daemon with the pool `worn`: worn(size=2, max_tasks=3, ...)."""

    def make(
        size: int = 1,
        settings: dict[str, Any] | None = None,
        group: Path | None = None,
        **pool: Any,
    ) -> Any:
        pools = {"worn": {"worker": "worn:Worn", "size": size, **pool}}
        made = muster(pools, start=False, **(settings or {}))
        Path(made.folder, "worn.py").write_text(WORKERS)
        if group is not None:
            made.popen_options = {"preexec_fn": lambda: (group / "cgroup.procs").write_text("0")}
        return made.start()

    return make


class Sights:
    """Observations of the pool while it works."""

    def __init__(self) -> None:
        self.running: Counter[int] = Counter()
        self.leaving: Counter[int] = Counter()


@contextmanager
def watched(daemon: Muster) -> Iterator[Sights]:
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
    daemon = worn(size=1, max_age="500ms", settings={"supervisor__drain_timeout": "500ms"})
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
    restart = {"base": "100ms", "max": "200ms", "pause": "200ms"}
    daemon = worn(size=1, max_age="500ms", restart=restart)
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


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("child", [False, True], ids=["itself", "a child"])
def test_a_worker_that_takes_too_much_memory_is_replaced(worn, waiting, child):
    daemon = worn(size=2, max_memory="150M")
    with daemon.client() as client:
        me = client.submit("worn.eat", {"megabytes": 250, "child": child}).result(60)
        waiting("it is replaced", lambda: daemon.pool("worn").recycled == 1)
        others = {client.submit("worn.work").result(30)[0] for _ in range(10)}
        assert me not in others
    assert "(max_memory)" in daemon.log()
    pool = daemon.pool("worn")
    assert (pool.lost, pool.restarts) == ({}, 0)
    assert sorted(worker.recycled for worker in pool.workers) == [0, 1], "the other is well"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are root's to make")
def test_where_two_do_not_fit_into_memory_the_old_worker_goes_first(worn, waiting, memory_group):
    # Daemon, fork server and one worker of 300 MB are below 55 % of it; with a second one, above.
    group = memory_group(1000 * 1024 * 1024)
    settings = {"memory__enabled": True, "memory__warning": "55%", "memory__critical": "95%"}
    daemon = worn(size=1, settings=settings, group=group, max_memory="200M")
    try:
        with daemon.client() as client, watched(daemon) as sights:
            me = client.submit("worn.eat", {"megabytes": 300}).result(60)
            waiting("it is replaced", lambda: daemon.pool("worn").recycled == 1)
            assert client.submit("worn.work").result(60)[0] != me
        assert "there is no room for two" in daemon.log()
        assert 0 in sights.running
        assert set(sights.leaving) == {0}
        assert daemon.pool("worn").lost == {}
    finally:
        daemon.stop()
