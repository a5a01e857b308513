"""Fixtures: a worker module whose tasks do whatever tests need, a check that a process tree is
gone, and the examples of the documentation, ready to run."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.errors import SpawnError
from musterd.supervisor.processes.cgroups import own_group
from musterd.supervisor.system.linux import become_subreaper
from support.daemon import Jobs, Muster, Musters
from support.surroundings import BrokenDisk, Document, Survivors

GONE_SECONDS_MAX = 20.0

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
    def visit(self, ctx, url: str) -> str:
        return url

    @task
    def nap(self, ctx, seconds: float, tell: str = "") -> int:
        if tell:
            with open(tell, "a") as f:
                f.write(f"{ctx.task_id} {os.getpid()}\\n")
        time.sleep(seconds)
        return self.index

    @task
    def until(self, ctx, path: str) -> int:
        while not Path(path).exists():
            time.sleep(0.01)
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
    def flaky(self, ctx, path: str, times: int, after: float = 0.01) -> int:
        with open(path, "a") as f:
            f.write(f"{ctx.attempt}\\n")
        if ctx.attempt <= times:
            raise Retry(after=after)
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
            child = os.fork()
            if child:
                os.waitpid(child, 0)  # then the orphan is there
            else:
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
def jobs(muster: Musters) -> Jobs:
    """Make a daemon whose pool `jobs` runs the tasks above: jobs(size=2, ...)."""

    def make(
        size: int = 2, *, pool: dict[str, Any] | None = None, start: bool = True, **settings: Any
    ) -> Muster:
        pools = {"jobs": {"worker": "jobs:Jobs", "size": size, **(pool or {})}}
        pools.update(settings.pop("others", {}))
        made = muster(pools, start=False, **settings)
        Path(made.folder, "jobs.py").write_text(JOBS)
        return made.start() if start else made

    return make


@pytest.fixture(autouse=True)
def _no_subreaper() -> Iterator[None]:
    """A Spawner of a test makes this process inherit orphans; tests after it do not expect any."""
    yield
    become_subreaper(until_now=True)


@pytest.fixture
def survivors_in() -> Iterator[Callable[[Path], Survivors]]:
    with contextlib.ExitStack() as opened:

        def open_survivors(folder: Path) -> Survivors:
            fifo = Survivors(folder)
            opened.callback(fifo.close)
            return fifo

        yield open_survivors


@pytest.fixture
def survivors(tmp_path: Path, survivors_in: Callable[[Path], Survivors]) -> Survivors:
    return survivors_in(tmp_path)


@pytest.fixture(autouse=True)
def groups(request: pytest.FixtureRequest) -> None:
    """Skip unless this process may change a control group hierarchy of version 2."""
    if request.node.get_closest_marker("cgroups") is None:
        return
    try:
        trial = own_group() / f"trial-of-tests-{os.getpid()}"
        trial.mkdir()
        trial.rmdir()
    except (SpawnError, OSError) as error:
        pytest.skip(f"no control groups can be made here: {error}")


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """Make a control group limited to that many bytes, of version 1 or 2: memory_group(BYTES)."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        mounted = Path("/sys/fs/cgroup")
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
        base, limit = mounted, "memory.max"
        if "memory" in own:  # version 1
            base, limit = mounted / "memory" / own["memory"], "memory.limit_in_bytes"
            base = base if base.exists() else mounted / "memory"
        group = base / f"musterd-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
            made.append(group)
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group for memory can be made here: {error}")
        return group

    yield make
    for group in made:
        _remove_group(group)


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:  # the last process has not left the group yet
            time.sleep(0.01)
        else:
            return
    pytest.fail(f"{group} is not empty")


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Serve a control.sock with the answers of a module: answering("support.x") is its path."""
    with contextlib.ExitStack() as started:

        def start(module: str) -> str:
            path = str(tmp_path_factory.mktemp("answers") / "control.sock")
            program = Path(__file__).with_name("answers_standin.py")
            process = started.enter_context(
                subprocess.Popen([sys.executable, program, path, module], stdout=subprocess.PIPE)
            )
            started.callback(process.terminate)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            return path

        yield start


@pytest.fixture
def document(muster: Musters) -> Callable[[str], Document]:
    """Put a page's examples beside a daemon that is not started: document("docs/page.md")."""

    def make(path: str) -> Document:
        return Document(Path(__file__).parents[2] / path, muster({}, start=False))

    return make


@pytest.fixture
def disk(tmp_path: Path) -> BrokenDisk:
    """Make a disk that breaks when a test says so."""
    return BrokenDisk(tmp_path, Path(__file__).with_name("broken_disk.c"))
