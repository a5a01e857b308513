"""Strikes that break the fleet at random moments, from one seed."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from musterd.supervisor.ctl.connection import NoAnswer, Unreachable
from support.daemon import Muster
from support.waiting import wait_for

DELAY_SECONDS_MAX = 0.15  # from the moment of progress to the strike: also hits starts and restarts
STOPPED_SECONDS_MAX = 0.4  # how long a stopped process stays stopped
DOWN_SECONDS_MAX = 0.15  # how long the supervisor stays dead
VICTIM_SECONDS_MAX = 30.0  # until there is a victim
SPARE_SECONDS_MAX = 3.0

SUPERVISOR = "kill supervisor"
# The number of strikes of each kind in a run. The supervisor's death takes longest to recover from.
KILLS = {
    "kill worker": 12,
    "stop worker, let it go on": 4,
    "stop worker, kill it": 3,
    "kill fork server": 4,
    "kill spare": 2,
    SUPERVISOR: 4,
}


class Monkey:
    """Starts the daemon and strikes."""

    def __init__(self, daemon: Muster, rng: Random) -> None:
        self.daemon = daemon
        self.rng = rng
        self.generation = 0
        self.environment: dict[str, str] = {}
        self.struck: dict[str, int] = {}
        self.longest_pause = 0.0  # seconds without progress
        self.deaths: list[float] = []  # times at which the supervisor was killed
        self.spares_killed = 0  # before they were called: they are no workers
        self.strikes: dict[str, Callable[[], object]] = {
            "kill worker": lambda: self.kill("worker"),
            "stop worker, let it go on": lambda: self.stop("worker", signal.SIGCONT),
            "stop worker, kill it": lambda: self.stop("worker", signal.SIGKILL),
            "kill fork server": lambda: self.kill("fork server"),
            "kill spare": self.kill_spare,
            SUPERVISOR: self.kill_supervisor,
        }
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    @property
    def workers_killed(self) -> int:
        return self.struck["kill worker"] + self.struck["stop worker, kill it"]

    def start(self, *, wait: bool) -> None:
        """Start the daemon's next generation."""
        self.generation += 1
        diary = str(self.daemon.folder / "diary")
        own = {"CHAOS_GENERATION": str(self.generation), "CHAOS_DIARY": diary}
        options = self.daemon.popen_options
        env = {**options.get("env", os.environ), **self.environment, **own}
        self.daemon.popen_options = {**options, "env": env}
        self.daemon.start(wait=wait)

    # -- when ---------------------------------------------------------------------------------

    def rage(
        self, counts: Mapping[str, int], progress: Callable[[], float], over: Callable[[], bool]
    ) -> None:
        """Strike each kind that often, spread over a progress from 0 to 1; return when `over`."""
        names = [name for name, times in counts.items() for _ in range(times)]
        self.rng.shuffle(names)
        moments = sorted(self.rng.uniform(0.02, 0.95) for _ in names)
        plan = [
            (at, name, self.rng.uniform(0, DELAY_SECONDS_MAX))
            for at, name in zip(moments, names, strict=True)
        ]
        for at, name, delay in plan:
            self.watch(progress, lambda at=at: progress() >= at or over())
            self.wait(delay)
            if over():
                break
            print(f"chaos: {time.monotonic():.3f} at {progress():.1%}: {name}")
            self.strike(name)
        self.watch(progress, over)
        self.heal()

    def watch(self, progress: Callable[[], float], until: Callable[[], bool]) -> None:
        """Wait, and measure how long nothing moves."""
        seen, since = progress(), time.monotonic()
        while not until():
            self.check_supervisor()
            self.wait(0.002)
            now = time.monotonic()
            if progress() != seen:
                seen, since = progress(), now
            elif now - since > self.longest_pause:
                self.longest_pause = now - since

    def check_supervisor(self) -> None:
        code = self.daemon.process.poll()
        assert code is None, f"the supervisor ended by itself with {code}"

    def wait(self, seconds: float) -> None:
        """Let time pass; run actions that are due."""
        end = time.monotonic() + seconds
        while self._later and self._later[0][0] <= end:
            when, _, deed = heappop(self._later)
            time.sleep(max(0.0, when - time.monotonic()))
            deed()
        time.sleep(max(0.0, end - time.monotonic()))

    def later(self, seconds: float, deed: Callable[[], object]) -> None:
        """Run an action after that delay."""
        heappush(self._later, (time.monotonic() + seconds, next(self._numbers), deed))

    def heal(self) -> None:
        """Undo everything now that was going to be undone."""
        while self._later:
            heappop(self._later)[2]()

    # -- what ---------------------------------------------------------------------------------

    def strike(self, name: str) -> None:
        self.strikes[name]()
        self.struck[name] = self.struck.get(name, 0) + 1

    def kill(self, kind: str) -> None:
        with self.victim(kind) as pidfd:
            send(pidfd, signal.SIGKILL)

    def kill_spare(self) -> None:
        """Kill a spare, if there is one soon: a pool whose workers change often may have none."""
        deadline = time.monotonic() + SPARE_SECONDS_MAX
        while time.monotonic() < deadline:
            for pid in self.children(recursive=True):
                pidfd = opened(pid, "musterd: spare ", self.daemon.pid)
                if pidfd is None:
                    continue
                # One that has been called meanwhile is a worker, and lives on.
                is_spare = stopped(pid, pidfd) and title_of(pid).startswith("musterd: spare ")
                send(pidfd, signal.SIGKILL if is_spare else signal.SIGCONT)
                os.close(pidfd)
                if is_spare:
                    self.spares_killed += 1
                    return
            self.wait(0.005)

    def stop(self, kind: str, then: signal.Signals) -> None:
        with self.victim(kind) as pidfd:
            send(pidfd, signal.SIGSTOP)
            again = os.dup(pidfd)

        def undo() -> None:
            send(again, then)
            os.close(again)

        self.later(self.rng.uniform(0.01, STOPPED_SECONDS_MAX), undo)

    def kill_supervisor(self) -> None:
        self.deaths.append(time.monotonic())
        self.daemon.kill()
        time.sleep(self.rng.uniform(0, DOWN_SECONDS_MAX))  # nothing else: the daemon is down
        self.start(wait=False)

    # -- whom ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def victim(self, kind: str) -> Any:
        """Return a pidfd of a living worker, init or fork server, as soon as there is one."""
        pidfd = self._victim(kind)
        try:
            yield pidfd
        finally:
            os.close(pidfd)

    def _victim(self, kind: str) -> int:
        deadline = time.monotonic() + VICTIM_SECONDS_MAX
        while time.monotonic() < deadline:
            self.check_supervisor()
            pids = self._workers() if kind == "worker" else self.children()
            self.rng.shuffle(pids)
            for pid in pids:
                pidfd = opened(pid, f"musterd: {kind} ", self.daemon.pid)
                if pidfd is not None:
                    return pidfd
            self.wait(0.005)
        pytest.fail(f"no {kind} within {VICTIM_SECONDS_MAX} s")

    def _workers(self) -> list[int]:
        try:
            pools = self.daemon.status().pools
        except (Unreachable, NoAnswer, OSError):
            return []  # the daemon is starting
        return [worker.pid for pool in pools for worker in pool.workers if worker.pid]

    def children(self, recursive: bool = False) -> list[int]:
        return [child.pid for child in psutil.Process(self.daemon.pid).children(recursive)]


def send(pidfd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process died, perhaps with its supervisor
        signal.pidfd_send_signal(pidfd, number)


def opened(pid: int, title: str, supervisor: int) -> int | None:
    """Open a pidfd of a process that lives, has such a title and belongs to this supervisor."""
    if not pid:  # ready, but its fork is not reported yet
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # no process, or a thread of another one
        return None
    # Read after the pidfd was opened, because the pid could be reused in between. Title and family
    # show that it was not reused before.
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if title_of(pid).startswith(title) and supervisor in [
            each.pid for each in process.parents()
        ]:
            return pidfd
    os.close(pidfd)
    return None


def stopped(pid: int, pidfd: int) -> bool:
    """Stop this process; whether it is stopped, and not gone."""
    send(pidfd, signal.SIGSTOP)
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    try:
        process = psutil.Process(pid)
        wait_for("it is stopped", lambda: process.status() in (psutil.STATUS_STOPPED, *ended))
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
