"""`concurrency`: several async tasks run at once in one real worker; none disturbs another."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from musterd import Secret, TaskCancelled, TaskFailed
from support.daemon import Musters

WORKERS = """
import asyncio, logging, os, signal, time
from pathlib import Path
from musterd import Worker, task

class Wide(Worker):
    def open(self):
        self.now = self.most = 0

    @task
    async def meet(self, ctx, others: int, name: str = "") -> int:
        '''Returns when so many run at once.'''
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            while self.most < others:
                await asyncio.sleep(0.005)
            return self.most
        finally:
            self.now -= 1

    @task
    async def until(self, ctx, path: str, tell: str = "") -> bool:
        with open(tell or os.devnull, "a") as f:
            f.write(f"{ctx.task_id} {ctx.attempt}\\n")
        while not Path(path).exists():
            await asyncio.sleep(0.005)
        return ctx.cancelled

    @task(max_retries=0)
    async def deaf(self, ctx) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    @task
    async def crash(self, ctx, path: str) -> None:
        while not Path(path).exists():
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGSEGV)
        await asyncio.sleep(3600)

    @task
    async def remember(self, ctx, name: str, others: int) -> list:
        await ctx.state.asave({"name": name}, key=name)
        async with ctx.lock(f"lock-{name}"):
            for step in range(5):
                ctx.progress(step / 5, name)
                await asyncio.sleep(0.01)
            await self.meet(ctx, others)
        return [(await ctx.state.aload(key=name))["name"], ctx.task_id]

    @task(max_retries=1)
    async def leak(self, ctx, password: str, others: int) -> None:
        await self.meet(ctx, others)
        ctx.log.warning("the password is %s", password)
        raise ValueError(f"refused {password}")

    async def told(ctx, error):
        await asyncio.sleep(0)
        ctx.log.warning("on_retry heard %s", error)

    @task(max_retries=1, on_retry=told, backoff=lambda attempt, error: 0.01)
    async def flaky(self, ctx) -> int:
        if ctx.attempt == 1:
            raise ConnectionError("once")
        return ctx.attempt

class Mixed(Wide):
    @task
    def blocks(self, ctx): ...
"""


@pytest.fixture
def pool(muster: Musters) -> Callable[..., Any]:
    def make(worker: str = "Wide", *, wait: bool = True, drain: str = "30s", **keys: Any) -> Any:
        pools = {"wide": {"worker": f"several:{worker}", **keys}}
        made = muster(pools, start=False, supervisor__drain_timeout=drain)
        Path(made.folder, "several.py").write_text(WORKERS)
        return made.start(wait=wait)

    return make


def test_as_many_tasks_run_at_once_as_the_pool_says(pool):
    daemon = pool(concurrency=4)
    with daemon.client() as client:
        handles = [client.submit("wide.meet", {"others": 4}) for _ in range(12)]
        assert {handle.result(60) for handle in handles} == {4}
    assert daemon.pool("wide").lost == {}


def test_without_concurrency_async_tasks_run_one_after_the_other(pool):
    daemon = pool()
    with daemon.client() as client:
        handles = [client.submit("wide.meet", {"others": 1}) for _ in range(8)]
        assert {handle.result(60) for handle in handles} == {1}


def test_each_has_its_own_state_locks_progress_and_secrets(pool):
    names = ["anna", "bert", "cleo"]
    daemon = pool(concurrency=3)
    with daemon.client() as client:
        handles = [client.submit("wide.remember", {"name": n, "others": 3}) for n in names]
        told = [word.text for word in handles[0].progress()]
        assert [h.result(60) for h in handles] == [
            [name, handle.id] for name, handle in zip(names, handles, strict=True)
        ]
        assert told
        assert set(told) <= {"anna"}


def test_the_secret_of_one_is_kept_out_of_its_error_and_the_log_beside_others(pool, waiting):
    env = {"FIRST": "correct-horse-1", "SECOND": "battery-staple-2"}
    daemon = pool(concurrency=2, env=env)
    with daemon.client() as client:
        handles = [
            client.submit("wide.leak", {"password": Secret(name), "others": 2}, max_retries=0)
            for name in env
        ]
        for name, handle in zip(env, handles, strict=True):
            with pytest.raises(TaskFailed, match=rf"refused \*\*\*{name}\*\*\*"):
                handle.result(60)
    for name in env:
        waiting("it is logged", lambda name=name: f"password is ***{name}***" in daemon.log())
    assert not any(value in daemon.log() for value in env.values())


def test_a_retry_has_its_hook_and_its_backoff(pool):
    daemon = pool(concurrency=2)
    with daemon.client() as client:
        assert client.submit("wide.flaky").result(60) == 2
    assert "on_retry heard once" in daemon.log()


def test_a_cancelled_task_and_one_that_takes_too_long_leave_the_others_alone(
    pool, waiting, tmp_path
):
    daemon = pool(concurrency=3)
    told, go = tmp_path / "told", tmp_path / "go"
    with daemon.client() as client:
        wanted = {"path": str(go), "tell": str(told)}
        stays, goes = (client.submit("wide.until", wanted) for _ in range(2))
        late = client.submit("wide.until", wanted, timeout=0.5, max_retries=0)
        waiting("all run", lambda: told.exists() and len(told.read_text().splitlines()) == 3)
        goes.cancel()
        with pytest.raises(TaskCancelled):
            goes.result(30)
        with pytest.raises(TaskFailed, match="longer than its timeout"):
            late.result(30)
        go.touch()
        assert stays.result(30) is False
    assert daemon.pool("wide").lost == {}


def test_a_task_that_cannot_be_stopped_costs_the_others_no_attempt(pool, waiting, tmp_path):
    daemon = pool(concurrency=2)
    told, go = tmp_path / "told", tmp_path / "go"
    with daemon.client() as client:
        deaf = client.submit("wide.deaf", timeout=0.5)
        other = client.submit("wide.until", {"path": str(go), "tell": str(told)}, max_retries=0)
        with pytest.raises(TaskFailed, match="did not stop at its timeout"):
            deaf.result(60)
        waiting("it runs again", lambda: len(told.read_text().splitlines()) == 2)
        go.touch()
        assert other.result(60) is False
    runs = [line.split() for line in told.read_text().splitlines()]
    assert [attempt for _, attempt in runs] == ["1", "1"]
    assert daemon.pool("wide").lost == {"hung": 1}


def test_a_poison_task_is_found_and_its_neighbours_end_well(pool, waiting, tmp_path):
    daemon = pool(concurrency=3, max_crashes=1)
    told, go, later = tmp_path / "told", tmp_path / "go", tmp_path / "later"
    with daemon.client() as client:
        others = [
            client.submit("wide.until", {"path": str(later), "tell": str(told)}) for _ in range(2)
        ]
        poison = client.submit("wide.crash", {"path": str(go)})
        waiting("they run", lambda: told.exists() and len(told.read_text().splitlines()) == 2)
        waiting("it runs, too", lambda: poison.status().state == "running")
        go.touch()
        waiting("they are lost together", lambda: daemon.pool("wide").lost)
        later.touch()
        with pytest.raises(TaskFailed, match="quarantined"):
            poison.result(60)
        assert [each.result(60) for each in others] == [False, False]
    assert daemon.pool("wide").lost == {"signal": 2}, "once together, once alone"


def test_a_restart_interrupts_all_of_them_when_its_patience_ends(pool, waiting, tmp_path):
    daemon = pool(concurrency=2, drain="300ms")
    told, go = tmp_path / "told", tmp_path / "go"
    with daemon.client() as client:
        wanted = {"path": str(go), "tell": str(told)}
        handles = [client.submit("wide.until", wanted) for _ in range(2)]
        waiting("they run", lambda: told.exists() and len(told.read_text().splitlines()) == 2)
        assert daemon.ctl("restart", "wide").returncode == 0
        waiting("they run again", lambda: len(told.read_text().splitlines()) == 4)
        go.touch()
        assert [each.result(30) for each in handles] == [False, False]
    assert {line.split()[1] for line in told.read_text().splitlines()} == {"1"}, "no attempt lost"
    assert daemon.pool("wide").lost == {}
    assert daemon.stop() == 0


def test_a_stop_lets_them_finish(pool, waiting, tmp_path):
    daemon = pool(concurrency=2)
    told, go = tmp_path / "told", tmp_path / "go"
    with daemon.client() as client:
        wanted = {"path": str(go), "tell": str(told)}
        handles = [client.submit("wide.until", wanted) for _ in range(2)]
        waiting("they run", lambda: told.exists() and len(told.read_text().splitlines()) == 2)
        assert daemon.ctl("--no-block", "restart", "wide").returncode == 0
        waiting("it drains", lambda: daemon.worker("wide/0").state == "DRAINING")
        go.touch()
        assert [each.result(30) for each in handles] == [False, False]
    assert len(told.read_text().splitlines()) == 2, "nothing was run again"


def test_a_worker_with_tasks_that_block_is_refused(pool, waiting):
    daemon = pool("Mixed", wait=False, concurrency=2)
    waiting("it answers", daemon.answers)
    waiting("the pool is given up", lambda: daemon.worker("wide/0").state == "FATAL")
    reason = daemon.worker("wide/0").reason
    assert "concurrency = 2" in reason
    assert "not async (blocks)" in reason


def test_check_config_finds_tasks_that_block(pool, waiting):
    daemon = pool("Mixed", wait=False, concurrency=2)
    waiting("it answers", daemon.answers)
    done = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "check-config", "-c", daemon.config_path],
        cwd=daemon.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert "pools.wide.worker" in done.stderr
    assert "not async (blocks)" in done.stderr
