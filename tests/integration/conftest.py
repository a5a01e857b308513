"""A worker module with everything the tests want to happen, put beside the daemon."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOBS = """
import asyncio, os, sys, time
from pathlib import Path
from musterd import Permanent, Retry, Worker, task

class Jobs(Worker):
    def open(self):
        self.count = 0

    @task
    def echo(self, ctx, value: object = None) -> object:
        return value

    @task
    async def aecho(self, ctx, value: object = None) -> object:
        await asyncio.sleep(0)
        return value

    @task
    def nap(self, ctx, seconds: float, tell: str = "") -> int:
        if tell:
            with open(tell, "a") as f:
                f.write(f"{ctx.task_id} {os.getpid()}\\n")
        time.sleep(seconds)
        return self.index

    @task
    def die(self, ctx, signal: int = 9, unless: str = "") -> str:
        if unless and Path(unless).exists():
            return "spared"
        if unless:
            Path(unless).touch()
        os.kill(os.getpid(), signal)
        time.sleep(10)

    @task(max_retries=0)
    def fail(self, ctx, text: str) -> None:
        raise ValueError(text)

    @task(max_retries=5)
    def flaky(self, ctx, path: str, times: int) -> int:
        with open(path, "a") as f:
            f.write(f"{ctx.attempt}\\n")
        if ctx.attempt <= times:
            raise Retry(after=0.01)
        return ctx.attempt

    @task(timeout=0.3, max_retries=0)
    def deaf(self, ctx) -> None:
        sum(range(10**12))      # never looks at signals nor leaves the interpreter's lock

    @task
    def stamp(self, ctx) -> int:
        return time.monotonic_ns()

    @task
    def orphans(self, ctx) -> str:
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                import signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
                os._exit(0)
        Path(os.environ["TMPDIR"], "left").write_text("x" * 1000)
        return os.environ["TMPDIR"]
"""


@pytest.fixture
def jobs(muster: Callable[..., Any]) -> Callable[..., Any]:
    """jobs(size=2, ...) -> a daemon whose pool `jobs` runs the tasks above."""

    def make(
        size: int = 2, *, pool: dict[str, Any] | None = None, start: bool = True, **settings: Any
    ) -> Any:
        pools = {"jobs": {"worker": "jobs:Jobs", "size": size, **(pool or {})}}
        pools.update(settings.pop("others", {}))
        made = muster(pools, start=False, **settings)
        Path(made.folder, "jobs.py").write_text(JOBS)
        return made.start() if start else made

    return make
