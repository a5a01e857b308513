"""Lists of the stores find what a selection means, page by page."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire.messages import (
    CANCELLED,
    ERROR,
    EXPIRED,
    FAILED,
    SUCCEEDED,
    Failure,
    Outcome,
    TaskSpec,
)
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.core.model.actions import FinalRecord, NewRecord, Persist
from musterd.supervisor.store import memory, queries
from musterd.supervisor.store.engines import open_store
from musterd.supervisor.store.interface import (
    Listed,
    ListFinished,
    ListLive,
    Purge,
    Query,
    Store,
    ended_fits,
)
from support.waiting import wait_for

WALL = 1_700_000_000 * 10**9
HOUR = 3600 * 10**9
TASKS = 400
SELECTIONS: list[dict[str, Any]] = [
    {},
    {"state": SUCCEEDED},
    {"state": FAILED},
    {"state": EXPIRED},
    {"state": "finished", "pool": "parser"},
    {"pool": "browser"},
    {"target": "a.example"},
    {"state": FAILED, "target": "b.example"},
    {"state": FAILED, "error": "GATEWAY 2"},
    {"error": "gateway 3"},
    {"key": "promo"},
    {"schedule": "nightly"},
    {"state": FAILED, "schedule": "nightly", "target": "a.example"},
    {"since": (WALL + 2 * HOUR) / 1e9},
    {"before": (WALL + 2 * HOUR) / 1e9, "state": FAILED},
    {"target": "nowhere"},
]


@pytest.fixture(params=["full", "memory"])
def wall(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Wall"]:
    wall = Wall(tmp_path / "store.db", request.param)
    yield wall
    wall.store.close()


class Wall:
    """A store with a clock of its own."""

    def __init__(self, path: Path, durability: str) -> None:
        self.now_ns = WALL
        self.store: Store = open_store(path, durability, wall_ns=lambda: self.now_ns)
        self._ticket = 0

    def write(self, added: list[NewRecord], finished: list[FinalRecord]) -> None:
        self._ticket += 1
        self.store.write(Persist(self._ticket, added, [], finished))
        wait_for("it is on disk", lambda: self.store.completed() == self._ticket)

    def ask(self, query: Query[Any]) -> Any:
        assert self.store.ask(query, "token")
        found: list[Any] = []

        def is_there() -> bool:
            found.extend(self.store.found())
            return bool(found)

        wait_for("an answer", is_there)
        return found[0][1]

    def all(self, query: ListFinished | ListLive, limit: int) -> tuple[list[str], int]:
        """Go from page to page; return the ids and the number of pages."""
        ids: list[str] = []
        below = pages = 0
        while below or not pages:
            page: Listed = self.ask(type(query)(query.where, limit, below=below))
            assert len(page.tasks) <= limit
            ids += [task.spec.id for task in page.tasks]
            below, pages = page.below, pages + 1
        return ids, pages


def tasks() -> list[NewRecord]:
    rng = random.Random(7)
    made = []
    for seq in range(1, TASKS + 1):
        pool = rng.choice(("parser", "parser", "browser"))
        spec = TaskSpec(
            f"@nightly.{seq:x}" if rng.random() < 0.3 else f"id-{seq}",
            f"{pool}.run",
            b"\x81\xa1x\xa9a.example" if rng.random() < 0.3 else b"\x80",
            target=rng.choice(("", "a.example", "b.example")),
            key=rng.choice(("", "", "promo", "promo-2")),
        )
        made.append(NewRecord(seq, spec, WALL, pool))
    return made


def end_of(new: NewRecord) -> FinalRecord:
    rng = random.Random(new.seq)
    state = rng.choice((SUCCEEDED, SUCCEEDED, FAILED, FAILED, CANCELLED, EXPIRED))
    failure = Failure(ERROR, "OSError", f"gateway {new.seq % 5} is down")
    outcome = Outcome(new.spec.id, state, b"", failure if state == FAILED else None, 1)
    return FinalRecord(new.seq, new.spec, WALL, outcome, 0)


@pytest.mark.parametrize("limit", [7, 1000])
def test_every_task_that_fits_is_found_once_newest_first(
    wall: Wall, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (queries, memory):
        monkeypatch.setattr(module, "LIST_LOOKS_MAX", 50)
    monkeypatch.setattr(queries, "LIST_ROWS_SEARCHED_MAX", 64)
    made, ended = tasks(), []
    for start in range(0, TASKS, 40):
        part = [end_of(new) for new in made[start : start + 40]]
        wall.write(made[start : start + 40], part)
        ended += [(final, wall.now_ns) for final in part]
        wall.now_ns += HOUR // 2
    for given in SELECTIONS:
        where = Selection(**given)
        wanted = {
            final.spec.id for final, at in ended if ended_fits(where, final.spec, final.outcome, at)
        }
        found, pages = wall.all(ListFinished(where, limit), limit)
        assert (len(found), set(found)) == (len(wanted), wanted), given
        assert pages > 1 or given, "it has limits"
        at = {final.spec.id: at for final, at in ended}
        assert sorted(found, key=at.__getitem__, reverse=True) == found


@pytest.mark.parametrize("limit", [7, 1000])
def test_every_unfinished_task_that_fits_is_found_once_newest_first(
    wall: Wall, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (queries, memory):
        monkeypatch.setattr(module, "LIST_LOOKS_MAX", 50)
    monkeypatch.setattr(queries, "LIST_ROWS_SEARCHED_MAX", 64)
    made = tasks()
    for start in range(0, TASKS, 40):
        wall.write(made[start : start + 40], [])
    gone = [end_of(new) for new in made[::9]]
    wall.write([], gone)
    left = [new for new in made if new.seq % 9 != 1]
    for given in SELECTIONS:
        where = Selection(**given)
        if where.ended:
            continue
        fitting = [new for new in left if where.fits(new.spec, new.submitted_wall_ns)]
        found, _ = wall.all(ListLive(where, limit), limit)
        assert found == [new.spec.id for new in reversed(fitting)], given


def test_a_list_begins_again_where_it_began_whatever_has_come_since(wall: Wall) -> None:
    made = tasks()[:20]
    wall.write(made[:10], [end_of(new) for new in made[:10]])
    first: Listed = wall.ask(ListFinished(Selection(), 5))
    wall.write(made[10:], [end_of(new) for new in made[10:]])
    again: Listed = wall.ask(ListFinished(Selection(), 5, below=first.top))
    assert [each.spec.id for each in again.tasks] == [each.spec.id for each in first.tasks]


def test_a_purge_of_named_tasks_may_mean_all_that_did_not_succeed(wall: Wall) -> None:
    made = tasks()[:40]
    ends = [end_of(new) for new in made]
    wall.write(made, ends)
    ids = [new.spec.id for new in made]
    failed = sum(final.outcome.state == FAILED for final in ends)
    unwell = sum(final.outcome.state != SUCCEEDED for final in ends)
    assert wall.ask(Purge(ids, wall.now_ns + 1)).count == failed
    assert wall.ask(Purge(ids, wall.now_ns + 1, unwell=True)).count == unwell - failed
    assert len(wall.all(ListFinished(Selection(), 100), 100)[0]) == len(ends) - unwell
