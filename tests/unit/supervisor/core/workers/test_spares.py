"""Which pools keep a spare, and when a spare is given up: decided without processes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.workers.pressure import Stage
from musterd.supervisor.log.worker_output import NEXT_WORKER, Outputs
from musterd.supervisor.processes import marks, orphans
from musterd.supervisor.processes.epoll import Watch
from musterd.supervisor.processes.orphans import Census
from musterd.supervisor.processes.tempdirs import Janitor
from support.core import Muster, of


def told(answer: list[Any]) -> list[list[str]]:
    """Return the pools that are to keep a spare, for each time the core says so."""
    return [sorted(name for name, _ in each.kept) for each in of(actions.KeepSpares, answer)]


def tick(m: Any) -> list[Any]:
    """Let a second pass, after which the core looks at all pools."""
    m.now_ns += SECOND_NS
    answer: list[Any] = m.tell(events.ClockRead(10**18 + m.now_ns))
    return answer


def test_a_pool_with_a_worker_keeps_a_spare_and_that_is_said_once(muster: type[Muster]) -> None:
    m = muster(size=1)
    assert told(m.tell(events.Started()) + tick(m)) == [], "there is no fork server yet"
    answer = m.start()
    assert of(actions.KeepSpares, answer) == [
        actions.KeepSpares((("p", m.fleet.pools["p"].build),))
    ]
    assert told(tick(m)) == []


def test_a_pool_that_waits_to_start_its_worker_again_keeps_its_spare(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    answer = m.exit(1, code=1) + m.bring_up(2) + m.exit(2, code=1)
    assert [slot.state.value for slot in m.slots] == ["BACKOFF"]
    assert told(answer + tick(m)) == []


def test_a_pool_without_workers_keeps_none(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    m.tell(events.ScaleRequested("p", 0))
    assert told(m.exit(1, code=0)) == [[]]
    assert told(m.tell(events.ScaleRequested("p", 1)) + tick(m)) == [["p"]]


def test_none_is_kept_while_memory_is_short(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    m.fleet._governor.stage = Stage.HALF
    assert told(tick(m)) == [[]]
    m.fleet._governor.stage = Stage.NORMAL
    assert told(tick(m)) == [["p"]]


def test_none_is_kept_when_the_daemon_ends(muster: type[Muster]) -> None:
    m = muster(size=1)
    m.start()
    assert told(m.tell(events.ShutdownRequested("test"))) == [[]]


def test_a_pool_that_wants_none_keeps_none(muster: type[Muster]) -> None:
    m = muster(size=1, spare=False)
    assert told(m.start() + tick(m)) == []


def test_what_is_told_of_a_descriptor_that_was_closed_reaches_nobody_else() -> None:
    watch = Watch()
    first, second = (os.eventfd(1, os.EFD_NONBLOCK) for _ in range(2))
    quiet = os.eventfd(0, os.EFD_NONBLOCK)
    called: list[str] = []

    def close(other: int) -> None:
        """Close the other watched descriptor; give its number to a stranger."""
        called.append("closed")
        watch.remove(other)
        os.dup2(quiet, other)
        watch.add(other, lambda: called.append("a stranger"))

    watch.add(first, lambda: close(second))
    watch.add(second, lambda: close(first))
    watch.turn()
    assert called == ["closed"]
    watch.close()
    for fd in (first, second, quiet):
        os.close(fd)


# -- the census after an init that was alone ----------------------------------------------------

MARK = 7
SLOT = ("p", 0)


class Looks:
    """A census of a machine whose processes the test makes up."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[int, list[int]] = {}
        self.looked = 0
        self.told: list[tuple[str, int, int, int]] = []
        self.watch = Watch()
        self.janitor = Janitor()
        monkeypatch.setattr(marks, "find", self._find)
        self.census = Census(
            1, self.watch, self.janitor, root, lambda *what: self.told.append(what)
        )

    def _find(self, run: int) -> dict[int, list[int]]:
        self.looked += 1
        return self.found

    def close(self) -> None:
        self.census.close()
        self.watch.close()
        self.janitor.close()


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    made = Looks(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_slot_waits_for_the_census_unless_an_init_has_taken_it(looks: Looks) -> None:
    looks.census.departed(MARK, *SLOT)
    assert looks.census.due() == {SLOT}
    looks.census.look(set())
    assert looks.census.due() == set()
    looks.census.departed(MARK, *SLOT, alone=True)
    assert looks.census.due() == set()
    assert not looks.census.check_due, "a moment later"


def test_what_an_init_has_said_is_checked(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "CHECK_SECONDS", 0.0)
    killed: list[int] = []
    monkeypatch.setattr(orphans, "_kill", killed.append)
    monkeypatch.setattr(marks, "open_marked", lambda pid, mark: os.eventfd(0))
    looks.census.departed(MARK, *SLOT, alone=True)
    assert looks.census.check_due
    looks.found = {MARK: [4242]}
    looks.census.look(set())
    assert looks.told == [("p", 0, 1, 0)]
    assert len(killed) == 1
    assert looks.census.due() == {SLOT}, "from now on the slot waits"
    assert not looks.census.check_due


def test_an_init_on_its_way_out_is_nothing_that_was_left(looks: Looks) -> None:
    looks.census.departed(MARK, *SLOT, alone=True)
    looks.found = {MARK: [4242]}
    looks.census.look(set(), leaving={4242})
    assert looks.told == []
    assert looks.census.due() == set()


# -- output of spares ---------------------------------------------------------------------------


def test_a_spare_is_heard_under_its_pool_until_it_is_introduced() -> None:
    outputs = Outputs()
    writers = {}

    def opened(name: str, *, known: bool) -> Any:
        with outputs.open(name, known=known) as source:
            writers[source] = os.dup(source.write_fd)
        return source

    def say(source: Any, text: bytes) -> None:
        os.write(writers[source], text)
        outputs._read(source)

    first = opened("jobs/0", known=True)
    say(first, b"one\n")
    spare = opened("jobs", known=False)
    say(spare, b"nobody\n")
    first.end()
    outputs.introduce(spare, "jobs/0")
    say(spare, b"two\n")
    assert [said.text for said in outputs.tail("jobs", 9)] == ["nobody"]
    words = [said.text for said in outputs.tail("jobs/0", 9)]
    assert words == ["one", NEXT_WORKER.decode(), "two"]
    outputs.close()
    for fd in writers.values():
        os.close(fd)
