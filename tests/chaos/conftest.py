"""What breaks the fleet at random moments, from one seed: `pytest tests/chaos --chaos-seed N`."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from musterd.supervisor.ctl.connection import Unreachable

# How often each of them strikes in a run. The supervisor's death takes longest to get over.
STRIKES = {
    "kill worker": 12,
    "stop worker, let it go on": 4,
    "stop worker, kill it": 3,
    "kill nursery": 4,
    "kill supervisor": 4,
}
DELAY_SECONDS_MAX = 0.15  # from the moment's progress to the strike: also into starts and restarts
STOPPED_SECONDS_MAX = 0.4  # how long a stopped worker stays so
DOWN_SECONDS_MAX = 0.15  # how long the supervisor stays dead
VICTIM_SECONDS_MAX = 20.0  # until there is one to strike again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seed", type=int, help="repeat the chaos run of this seed")


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--chaos-seed", default=None)
    seed = given if given is not None else int.from_bytes(os.urandom(4), "big")
    print(f"\nchaos: repeat with  pytest tests/chaos --chaos-seed {seed}")
    return int(seed)


@dataclass
class Monkey:
    """Strikes at moments given as progress of the work, so that each meets a busy fleet."""

    daemon: Any
    rng: Random
    generation: int = 0
    struck: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STRIKES, 0))
    longest_pause: float = 0.0  # seconds without progress
    _later: list[tuple[float, int, int]] = field(default_factory=list)  # when, pidfd, signal

    @property
    def workers_killed(self) -> int:
        return self.struck["kill worker"] + self.struck["stop worker, kill it"]

    def start(self, *, wait: bool) -> None:
        """Start the daemon, the next generation of it."""
        self.generation += 1
        diary = str(self.daemon.folder / "diary")
        environment = {"CHAOS_GENERATION": str(self.generation), "CHAOS_DIARY": diary}
        self.daemon.popen_options = {"env": {**os.environ, **environment}}
        self.daemon.start(wait=wait)

    def rage(self, progress: Callable[[], float], over: Callable[[], bool]) -> None:
        """All strikes, spread over a progress from 0 to 1; returns when `over`."""
        names = [name for name, times in STRIKES.items() for _ in range(times)]
        self.rng.shuffle(names)
        moments = sorted(self.rng.uniform(0.02, 0.95) for _ in names)
        plan = [
            (at, name, self.rng.uniform(0, DELAY_SECONDS_MAX))
            for at, name in zip(moments, names, strict=True)
        ]
        for at, name, delay in plan:
            self._watch(progress, lambda at=at: progress() >= at or over())
            self._wait(delay)
            if over():
                break
            print(f"chaos: {time.monotonic():.3f} at {progress():.1%}: {name}")
            self._strike(name)
        self._watch(progress, over)
        self._wait(0, flush=True)

    def _watch(self, progress: Callable[[], float], until: Callable[[], bool]) -> None:
        """Wait, and measure how long nothing moves."""
        seen, since = progress(), time.monotonic()
        while not until():
            assert self.daemon.process.poll() is None, "the supervisor ended by itself"
            self._wait(0.002)
            now = time.monotonic()
            if progress() != seen:
                seen, since = progress(), now
            elif now - since > self.longest_pause:
                self.longest_pause = now - since

    def _wait(self, seconds: float, *, flush: bool = False) -> None:
        """Let time pass, and do what is due to stopped workers meanwhile."""
        end = time.monotonic() + seconds
        while self._later and (flush or self._later[0][0] <= end):
            when, pidfd, number = heappop(self._later)
            time.sleep(max(0.0, when - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # it died with its supervisor
                signal.pidfd_send_signal(pidfd, number)
            os.close(pidfd)
        time.sleep(max(0.0, end - time.monotonic()))

    def _strike(self, name: str) -> None:
        if name == "kill supervisor":
            self.daemon.kill()
            self._wait(self.rng.uniform(0, DOWN_SECONDS_MAX))
            self.start(wait=False)
        else:
            pidfd = self._victim("nursery" if name == "kill nursery" else "worker")
            if name.startswith("kill"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
            else:
                signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
                number = signal.SIGKILL if name.endswith("kill it") else signal.SIGCONT
                due = time.monotonic() + self.rng.uniform(0.01, STOPPED_SECONDS_MAX)
                heappush(self._later, (due, pidfd, number))
        self.struck[name] += 1

    def _victim(self, kind: str) -> int:
        """A pidfd of a living worker or nursery, as soon as there is one."""
        deadline = time.monotonic() + VICTIM_SECONDS_MAX
        while time.monotonic() < deadline:
            assert self.daemon.process.poll() is None, "the supervisor ended by itself"
            pids = self._workers() if kind == "worker" else self._children()
            self.rng.shuffle(pids)
            for pid in pids:
                pidfd = _opened(pid, f"musterd: {kind} ")
                if pidfd is not None:
                    return pidfd
            self._wait(0.005)
        pytest.fail(f"no {kind} within {VICTIM_SECONDS_MAX} s")

    def _workers(self) -> list[int]:
        try:
            pools = self.daemon.status().pools
        except (Unreachable, OSError):
            return []  # it is starting
        return [worker.pid for pool in pools for worker in pool.workers if worker.pid]

    def _children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.daemon.pid).children()]


def _opened(pid: int, title: str) -> int | None:
    """A pidfd of this process, if it lives and has a title that begins so."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # Looked at after the pidfd was opened: the pid cannot become somebody else's in between.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
            return pidfd
    os.close(pidfd)
    return None


@pytest.fixture
def monkey() -> type[Monkey]:
    return Monkey
