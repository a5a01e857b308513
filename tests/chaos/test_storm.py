"""Everything goes wrong at once, for a while: nothing is lost, doubled or left behind.

Seeded faults over thousands of tasks, on a real daemon with real workers: kill -9 and SIGSTOP of
everything that has a pid, forks that fail, descriptors that run out, a disk that is full, slow or
hangs, steps of the wall clock, workers that flood, clients that flood, lie and vanish, abuse of the
control socket, and operators who scale, restart, pause and reload. Another process asks for the
status all the time. See docs/chaos.md.
"""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest
from storm.diary import Diary
from storm.disk import Disk
from storm.faults import Storm
from storm.floods import POOL, Floods
from storm.pulse import Answers, Pulse
from storm.shim import Shim
from storm.work import ROUGH, Job, Submitter, check_outcomes, final_states, make_job, submit_all

from musterd.ipc.wire.messages import CANCELLED, SUCCEEDED
from musterd.supervisor.api import rpc
from musterd.supervisor.store.interface import pool_of
from musterd.supervisor.store.queries import contents
from musterd.supervisor.system.directories import store_file
from support.daemon import OUR_FRAME, Muster, Musters
from support.waiting import Waiting

NOBODY = 65534
SIZES = {"crowd": 3, "single": 1, POOL: 1}
SHARES = {"crowd": 9, "single": 1}  # of the tasks; the other pools are for the floods
DOOMED = "doomed"  # the pool whose workers never become ready
CLIENTS = 3
DESCRIPTORS_MAX = 2048  # of the daemon: a crowd of connections can reach it
STRIKE_SECONDS_MAX = 0.5  # from one fault to the next
DISK_MEGABYTES = 64
DISK_MEGABYTES_PER_SECOND = 8  # for results
CLIENT_SECONDS_MAX = 150.0  # after the storm, until the last task has ended
RECOVERY_SECONDS_MAX = 30.0
PAUSE_SECONDS_MAX = 30.0  # without any progress
# The promise is a second. But the daemon may get no processor: in the storm, dozens of processes
# share two processors, and so do other tests of the suite.

# Must never be in the daemon's log: our own mistakes.
FORBIDDEN = ("internal error", "is not stored", "was taken", "resists", "no pool")


def settings(containment: str) -> dict[str, Any]:
    restart = {"base": "10ms", "max": "50ms", "pause": "50ms", "limit": 10_000}
    ordinary = {"worker": "chaos_jobs:Jobs", "max_crashes": 100, "restart": restart}
    ordinary["secrets"] = ["CHAOS_GENERATION", "CHAOS_DIARY", "CHAOS_PAGE"]
    patient = {"start_timeout": "6s", "queue_size": 100_000, **ordinary}
    pools = {name: {"size": size, **patient} for name, size in SIZES.items()}
    pools["crowd"] |= {"max_tasks": 300, "max_age": "5s"}
    pools[DOOMED] = {**ordinary, "worker": "chaos_jobs:Doomed", "size": 2}
    pools[DOOMED]["restart"] = {"base": "10ms", "max": "50ms", "pause": "50ms"}
    return {
        "pools": pools,
        "retry__base": "10ms",
        "retry__max": "50ms",
        "retry__budget": False,  # all its attempts are counted
        "supervisor__containment": containment,
        "supervisor__drain_timeout": "10s",
        "memory__check_interval": "200ms",
        "memory__calm": "300ms",
    }


class RunRecord:
    """Things that a daemon could leave behind, remembered when it starts."""

    def __init__(self, daemon: Muster) -> None:
        self._daemon = daemon
        self._groups: set[Path] = set()

    def look(self) -> None:
        """Remember the control group of the supervisor that runs now."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            note = msgspec.json.decode((self._daemon.state / "tmp.run").read_bytes())
            if note["group"]:
                self._groups.add(Path(note["group"]))

    def left(self) -> list[str]:
        """Return what the ended daemon left: processes, directories, sockets and control groups."""
        found = [f"process {each}" for each in self._daemon.processes()]
        found += [f"directory {each}" for each in (self._daemon.state / "tmp").glob("*")]
        found += [f"socket {each}" for each in self._daemon.runtime.glob("*.sock")]
        found += [f"control group {each}" for each in self._groups if each.exists()]
        return found


@pytest.fixture
def weather(
    muster: Musters, chaos_seed: int, storm_seconds: float
) -> Iterator[Callable[[str], "Weather"]]:
    """Start a daemon, on a disk of its own where possible, and prepare the faults:
    weather(containment)."""
    with contextlib.ExitStack() as undo:

        def make(containment: str) -> Weather:
            user = os.geteuid() or (NOBODY if containment == "auto" else 0)
            daemon = muster(
                **settings(containment), start=False, as_user=user if user != os.geteuid() else None
            )
            daemon.limit_descriptors(DESCRIPTORS_MAX)
            undo.callback(daemon.close)
            shutil.copy(Path(__file__).with_name("chaos_jobs.py"), daemon.folder)
            (daemon.folder / "diary").touch()
            (daemon.folder / "diary").chmod(0o666)
            shim = Shim(daemon.folder)
            undo.callback(shim.close)
            disk = None
            if not Disk.missing():
                room = int(DISK_MEGABYTES + DISK_MEGABYTES_PER_SECOND * storm_seconds)
                disk = Disk(daemon.folder / "disk.img", daemon.state, user, room)
                undo.callback(disk.close)
                undo.callback(daemon.close)
            made = Storm(daemon, Random(chaos_seed), shim=shim, disk=disk, uid=user, pool="crowd")
            made.start(wait=True)
            found = Weather(made, storm_seconds)
            undo.callback(found.close)
            return found

        yield make


def jobs_until(rng: Random, end: float) -> Iterator[Job]:
    numbers = count()
    while time.monotonic() < end:
        yield make_job(rng, next(numbers), SHARES, ROUGH)


class Weather:
    """One storm: everything that takes part in it, and what it saw."""

    def __init__(self, storm: Storm, seconds: float) -> None:
        self.storm = storm
        self.daemon = storm.daemon
        self.seconds = seconds
        rng = Random(storm.rng.random())
        self.end = time.monotonic() + seconds
        self.floods = Floods(
            Random(rng.random()), self.daemon.runtime, self.daemon.folder / "ledger"
        )
        self.submitters = [
            Submitter(
                self.daemon.tasks_socket,
                jobs_until(Random(rng.random()), self.end),
                Random(rng.random()),
                seconds_max=seconds + CLIENT_SECONDS_MAX,
            )
            for _ in range(CLIENTS)
        ]
        self.run_record = RunRecord(self.daemon)
        self._pulse = Pulse(self.daemon.control_socket, self.daemon.folder / "pulse")
        self.answers: Answers | None = None

    def blow(self) -> None:
        """Run the storm until it is over and the last task has ended."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = submit_all(self.submitters, pool)
            try:
                self._strike_until_the_end()
            except BaseException:
                for submitter in self.submitters:
                    submitter.give_up()
                raise
            for client in clients:
                client.result()
        self.floods.finish()

    def _strike_until_the_end(self) -> None:
        next_name = self.storm.plan()
        while time.monotonic() < self.end:
            until = time.monotonic() + self.storm.rng.uniform(0, STRIKE_SECONDS_MAX)
            self.storm.watch(self._progress, lambda until=until: time.monotonic() >= until)
            self.floods.tick()
            self.run_record.look()
            name = next_name()
            print(f"chaos: {time.monotonic():.3f}: {name}")
            self.storm.strike(name)
        self.storm.heal()

    def _progress(self) -> float:
        return sum(len(each.ended) for each in self.submitters)

    def at_rest(self) -> bool:
        """Tell whether every pool that can has all its workers, and no task is under way."""
        pools = [pool for pool in self.daemon.status().pools if pool.name != DOOMED]
        return all(
            pool.running == pool.size and not pool.busy and not sum(pool.queued.values())
            for pool in pools
        )

    def close(self) -> None:
        self.floods.kill()
        if self.answers is None:
            self.answers = self._pulse.stop(self.storm.deaths)

    @property
    def refused(self) -> set[str]:
        return {id_ for each in self.submitters for id_ in each.refused}


def zombies(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # an init that has just ended
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def check_store(weather: Weather, jobs: dict[str, Job]) -> int:
    """Check that each task ended once in the store, as its client heard; return their number."""
    path = store_file(weather.daemon.state)
    states = final_states(path)
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        public = {each.spec.id for each in contents(store)[1] if pool_of(each.spec) == POOL}
    wanted = {job.id: job.state for job in jobs.values()}
    ours = {id_: state for id_, state in states.items() if id_ not in public}
    assert ours == wanted, {
        "lost": wanted.keys() - ours.keys(),
        "unknown": ours.keys() - wanted.keys(),
        "other": [id_ for id_ in wanted.keys() & ours.keys() if wanted[id_] != ours[id_]],
    }
    assert not weather.refused & states.keys(), "refused, and yet there"
    # Nobody knows what vanished clients submitted: only acknowledged tasks count.
    told = weather.floods.told()
    assert told["acked"] <= public, f"lost: {told['acked'] - public}"
    assert not told["refused"] & public, "refused, and yet there"
    assert {states[id_] for id_ in public} <= {SUCCEEDED, CANCELLED}
    return len(states)


def tell_counts(title: str, counts: dict[str, int], tell: Callable[[str, object], None]) -> None:
    tell(title, sum(counts.values()))
    for name, times in sorted(counts.items()):
        tell(f"  {name}", times)


@pytest.mark.long
@pytest.mark.parametrize("containment", ["auto", "cgroup", "reaper"])
def test_nothing_is_lost_doubled_or_left_behind_in_a_storm(
    weather: Callable[[str], Weather],
    waiting: Waiting,
    tell: Callable[[str, object], None],
    containment: str,
) -> None:
    began = time.monotonic()
    storm = weather(containment)
    daemon = storm.daemon
    storm.blow()
    daemon.ask(rpc.Scale("crowd", SIZES["crowd"]))
    daemon.ask(rpc.Reset(["crowd", "single", POOL]))
    waiting("it is at rest", storm.at_rest, RECOVERY_SECONDS_MAX)
    waiting("no zombie is left", lambda: not zombies(daemon.pid), RECOVERY_SECONDS_MAX)
    storm.run_record.look()
    storm.close()
    answers = storm.answers
    assert daemon.stop() == 0
    left = storm.run_record.left()
    jobs = check_outcomes(storm.submitters)
    stored = check_store(storm, jobs)
    diary = Diary(daemon.folder / "diary")

    tell("seconds of storm, in all", f"{storm.seconds:g}, {time.monotonic() - began:.0f}")
    tell("tasks that ended as they must", f"{len(jobs)}, {len(storm.refused)} more were refused")
    told = storm.floods.told()
    tell("tasks of floods acknowledged", f"{len(told['acked'])}, {len(told['refused'])} refused")
    tell("tasks in the store, each once", stored)
    tell("executions", f"{diary.executions}, {sum(diary.repeated.values())} of them repeated")
    tell("workers", f"{len(diary.incarnations)}, {len(diary.killed)} of them killed")
    tell_counts("faults", storm.storm.struck, tell)
    tell_counts("floods", storm.floods.counts, tell)
    tell("answers to status", f"{answers.count}, 99 % of them within {answers.p99:.3f} s")
    tell("  the slowest", f"{answers.longest:.3f} s")
    tell("  none at all for", f"{answers.unreachable:.1f} s (supervisor dead or starting)")
    tell("longest without progress", f"{storm.storm.longest_pause:.1f} s")
    tell("left behind", len(left))

    assert not left
    assert not [name for name in storm.floods.counts if "failed" in name or "stuck" in name]
    assert not answers.failed
    assert storm.storm.longest_pause < PAUSE_SECONDS_MAX
    assert storm.storm.struck.keys() == storm.storm.strikes.keys()
    diary.check()
    for line in daemon.log().splitlines():
        assert not any(words in line for words in FORBIDDEN), line
        assert not OUR_FRAME.search(line), line
