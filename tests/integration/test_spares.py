"""Real spares: called, killed, no longer wanted, and never left behind."""

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from musterd.supervisor.core.model.events import (
    ForkServerExited,
    ForkServerReady,
    LeftoversEnded,
    SpawnFailed,
    WorkerExited,
    WorkerForked,
)
from musterd.supervisor.processes.forkserver_messages import ForkFailed
from musterd.supervisor.processes.handles import Event, ForkServerProcess
from musterd.supervisor.processes.spawner import Spawner
from musterd.supervisor.system.linux import family, is_alive, stat_of
from support.waiting import wait_for

HERE = Path(__file__).parent
DEADLINE_SECONDS = 20.0
MODES = ["pidns", pytest.param("cgroup", marks=pytest.mark.cgroups), "reaper"]
KEPT = frozenset({("parser", "")})
E = TypeVar("E", bound=Event)


class Bench:
    """A spawner with one fork server, and all its events."""

    def __init__(self, root: Path, containment: str) -> None:
        self.root = root
        self.containment = containment
        self.told: list[Event] = []
        self.open()

    def open(self) -> None:
        self.spawner = Spawner(
            "workers.sock", self.root, self.containment, runtime="spawner_workers"
        )

    def start(self, worker: str = "idle", options: bytes = b"") -> None:
        env = {"PYTHONPATH": str(HERE)}
        self.spawner.start_fork_server("parser", worker, options, env)
        self.wait_for(ForkServerReady)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Handle events until the condition holds, as the daemon does."""

        def met() -> Any:
            value = condition()
            if not value:
                select.select([self.spawner], [], [], 0.005)
                self.told += self.spawner.events()
            return value

        return wait_for(what, met)

    def wait_for(self, kind: type[E], **fields: Any) -> E:
        def find() -> E | None:
            for event in self.told:
                if isinstance(event, kind) and all(
                    getattr(event, name) == value for name, value in fields.items()
                ):
                    self.told.remove(event)
                    return event
            return None

        found: E = self.until(find, f"no {kind.__name__} {fields}")
        return found

    def spawn(self, worker: int, index: int = 0) -> int:
        """Spawn a worker; return its pid."""
        self.spawner.spawn(worker, "parser", index)
        return self.wait_for(WorkerForked, worker=worker).pid

    def keep(self) -> int:
        """Keep a spare; return its pid once it waits to be called."""
        self.spawner.keep_spares(KEPT)
        fork_server = self.spawner._fork_servers["parser", ""]

        def parked() -> int:
            waits = fork_server.spare is not None and fork_server.spare.pid in titled("spare")
            return fork_server.spare.pid if fork_server.spare is not None and waits else 0

        return int(self.until(parked, "no spare"))

    def ask_for_a_spare(self) -> tuple[ForkServerProcess, int]:
        """Ask for a spare, with the fork server stopped before it can fork; return both."""
        os.kill(self.fork_server, signal.SIGSTOP)
        self.spawner.keep_spares(KEPT)
        fork_server = self.spawner._fork_servers["parser", ""]
        (birth,) = self.until(lambda: fork_server.awaited, "none was asked for")
        return fork_server, birth

    @property
    def fork_server(self) -> int:
        return self.spawner._fork_servers["parser", ""].process.pid


def titled(word: str) -> list[int]:
    """Return the sleeping processes below this one whose title has this second word."""
    found = []
    below, children = [os.getpid()], family()
    while below:
        pid = below.pop()
        below += children.get(pid, [])
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        stat = stat_of(pid)
        if title.startswith(f"musterd: {word}".encode()) and stat is not None and stat.state == "S":
            found.append(pid)
    return found


def gone(pid: int) -> bool:
    """Tell whether the process is gone; a zombie is not."""
    return not Path(f"/proc/{pid}").exists()


def wait_until_dead(pid: int) -> None:
    """Wait until the process is dead, while the spawner handles no events."""
    wait_for("it is dead", lambda: not is_alive(pid))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Make a bench; afterwards nothing may be left."""
    before = descriptors()
    others = set(family().get(os.getpid(), []))  # processes that the suite itself started
    bench = Bench(tmp_path / "temp", getattr(request, "param", "auto"))
    yield bench
    bench.spawner.close()
    assert set(family().get(os.getpid(), [])) <= others, "processes are left"
    assert descriptors() == before
    assert not list(bench.root.iterdir())
    assert "janitor" not in [thread.name for thread in threading.enumerate()]


in_each_mode = pytest.mark.parametrize("bench", MODES, indirect=True)


@in_each_mode
def test_the_next_worker_is_the_spare(bench: Bench, tmp_path: Path) -> None:
    bench.start(options=str(tmp_path).encode())
    first = bench.spawn(1)
    spare = bench.keep()
    bench.until((tmp_path / "parser-0.json").exists, "the worker did not report")
    (tmp_path / "parser-0.json").unlink()
    os.kill(first, signal.SIGKILL)
    assert bench.wait_for(WorkerExited).exit_code == -signal.SIGKILL
    assert bench.spawn(2) == spare
    bench.until((tmp_path / "parser-0.json").exists, "the worker did not report")
    seen = json.loads((tmp_path / "parser-0.json").read_text())
    assert seen["title"] == "musterd: worker parser/0"
    assert seen["temp_dir"] == seen["TMPDIR"] == str(bench.root / "parser-0-2")
    assert bench.spawner.worker_of(seen["token"]) == 2
    assert bench.spawner.worker_of(seen["token"]) is None
    assert sorted(bench.spawner.inits()) == [2]
    assert not [event for event in bench.told if isinstance(event, LeftoversEnded)]


def test_a_spare_is_nobody(bench: Bench, tmp_path: Path) -> None:
    bench.start(options=str(tmp_path).encode())
    bench.spawn(1, index=7)
    bench.until((tmp_path / "parser-7.json").exists, "the worker did not report")
    bench.keep()
    assert [path.name for path in tmp_path.glob("*.json")] == ["parser-7.json"], "it has begun"
    assert [path.name for path in bench.root.iterdir()] == ["parser-7-1"]
    assert sorted(bench.spawner.inits()) == [1]
    assert bench.told == []


def test_a_spare_shares_what_its_fork_server_has_loaded(bench: Bench) -> None:
    bench.start()
    spare = bench.keep()
    stat = stat_of(spare)
    assert stat is not None
    rollup = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in (spare, stat.parent)]
    pss = sum(
        int(line.split()[1])
        for text in rollup
        for line in text.splitlines()
        if line.startswith("Pss:")
    )
    print(f"PSS of a spare and its init: {pss} kB")
    assert pss < 12_000, "that of two whole interpreters would be twice as much"


def test_another_spare_is_made_after_a_moment(bench: Bench) -> None:
    bench.start()
    spare = bench.keep()
    began = time.monotonic()
    assert bench.spawn(1) == spare
    next_one = bench.until(lambda: titled("spare"), "no other spare")[0]
    assert time.monotonic() - began >= 0.25
    assert next_one != spare


@in_each_mode
def test_a_spare_that_was_killed_is_not_called(bench: Bench) -> None:
    bench.start()
    spare = bench.keep()
    os.kill(spare, signal.SIGKILL)
    wait_until_dead(spare)
    assert bench.spawn(1) != spare  # its end was not noticed yet
    bench.until(lambda: gone(spare), "the spare is a zombie")
    assert bench.told == [], "its end is nobody's business"


def test_the_init_of_a_spare_may_be_killed_too(bench: Bench) -> None:
    bench.start()
    spare = bench.keep()
    stat = stat_of(spare)
    assert stat is not None
    os.kill(stat.parent, signal.SIGKILL)
    bench.until(lambda: gone(spare) and gone(stat.parent), "something is left")
    assert titled("spare") == [], "one that ended by itself is not replaced at once"
    bench.spawn(1)
    assert bench.told == []


@in_each_mode
def test_a_spare_that_nobody_wants_any_more_ends(bench: Bench) -> None:
    bench.start()
    bench.spawn(1)
    before = descriptors()
    spare = bench.keep()
    bench.spawner.keep_spares(frozenset())
    bench.until(lambda: gone(spare), "the spare is left")
    bench.until(lambda: descriptors() == before, "descriptors are left")
    assert bench.told == []


@pytest.mark.parametrize("kill", [False, True])
def test_a_spare_ends_with_its_fork_server(bench: Bench, kill: bool) -> None:
    bench.start()
    worker = bench.spawn(1)
    spare = bench.keep()
    if kill:
        os.kill(bench.fork_server, signal.SIGKILL)
        bench.wait_for(ForkServerExited)
    else:
        bench.spawner.stop_fork_server("parser")
    bench.until(lambda: gone(spare), "the spare is left")
    assert not gone(worker)
    assert bench.told == []


def test_a_fork_server_killed_while_it_makes_a_spare_leaves_nothing(bench: Bench) -> None:
    bench.start()
    bench.ask_for_a_spare()
    os.kill(bench.fork_server, signal.SIGKILL)
    bench.wait_for(ForkServerExited)
    assert bench.told == [], "nobody waited for it"


def test_all_ends_while_a_spare_is_being_made(bench: Bench) -> None:
    bench.start()
    fork_server, _ = bench.ask_for_a_spare()
    bench.spawner.close()
    assert fork_server.spare is None
    bench.open()  # closed by the fixture, which looks for leftovers


def test_a_spare_that_could_not_be_forked_is_not_called(bench: Bench) -> None:
    bench.start()
    fork_server, birth = bench.ask_for_a_spare()
    bench.spawner._heard(fork_server, ForkFailed(birth, "no more processes"), 0)
    os.kill(bench.fork_server, signal.SIGCONT)
    bench.spawn(1)
    assert bench.told == [], "nobody waited for it"


def test_a_worker_that_is_wanted_takes_the_spare_that_is_being_made(bench: Bench) -> None:
    bench.start()
    fork_server, birth = bench.ask_for_a_spare()
    bench.spawner.spawn(1, "parser", 0)
    assert fork_server.awaited == {birth}
    os.kill(bench.fork_server, signal.SIGCONT)
    bench.wait_for(WorkerForked, worker=1)


def test_a_spare_without_a_place_for_its_files_is_no_worker(bench: Bench) -> None:
    bench.start()
    spare = bench.keep()
    bench.root.rmdir()
    bench.root.touch()  # a directory that is gone would be made anew
    bench.spawner.spawn(1, "parser", 0)
    assert "cannot be prepared" in bench.wait_for(SpawnFailed, worker=1).reason
    bench.root.unlink()
    bench.root.mkdir()
    bench.until(lambda: gone(spare), "the spare is left")
    bench.spawn(2)


def test_what_started_threads_is_loaded_after_the_call(bench: Bench) -> None:
    bench.start("thread")
    spare = bench.keep()
    assert len(os.listdir(f"/proc/{spare}/task")) == 1, "it has loaded what it does not share"
    assert bench.spawn(1) == spare
    bench.until(lambda: len(os.listdir(f"/proc/{spare}/task")) == 2, "it has not loaded")
