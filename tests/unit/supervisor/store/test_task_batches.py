"""Tasks that come and go together share rows of the store: where each task is, and when."""

import logging
import select
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest

from musterd.ipc.client.ids import new_id
from musterd.ipc.wire.messages import FAILED, QUEUED, RUNNING, SUCCEEDED, Failure, Outcome, TaskSpec
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.core.model.actions import (
    FinalRecord,
    LiveRecord,
    NewRecord,
    Persist,
    ReopenRecord,
)
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.store import task_batches
from musterd.supervisor.store.interface import (
    A,
    FindStranded,
    FindTasks,
    ListFinished,
    ListLive,
    Query,
    ReadQueued,
    StoredTask,
)
from musterd.supervisor.store.sqlite import SqliteStore
from musterd.supervisor.store.task_batches import (
    BATCH_MIN,
    BATCH_TASKS,
    OVERLAP_MAX,
    latest_id,
    queued_rows_of,
)
from support.waiting import wait_for

SECOND_NS = 1_000_000_000


def task(seq: int, **fields: Any) -> NewRecord:
    values: dict[str, Any] = {"id": new_id(), "name": "parser.run", "args": b"\x80"}
    spec = TaskSpec(**(values | fields))
    return NewRecord(seq, spec, time.time_ns(), spec.name.partition(".")[0])


def end(new: NewRecord, state: str = SUCCEEDED, value: bytes = b"\xc0") -> FinalRecord:
    failure = None if state == SUCCEEDED else Failure("error", "ValueError", "no")
    outcome = Outcome(new.spec.id, state, value, failure, 1, 1000)
    return FinalRecord(new.seq, new.spec, new.submitted_wall_ns, outcome, 0)


class Book:
    """A store that is written ticket by ticket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = SqliteStore(path, "normal")
        self._ticket = 0

    def write(self, *, expect: bool = True, **fields: Any) -> None:
        self._ticket += 1
        values: dict[str, Any] = {"added": [], "changed": [], "finished": []}
        self.store.write(Persist(self._ticket, **(values | fields)))
        if expect:
            wait_for("it is written", lambda: self._completed() == self._ticket)

    def _completed(self) -> int | None:
        """Through the descriptor, as the daemon does."""
        select.select([self.store.fileno()], [], [], 0.1)
        return self.store.completed()

    def ask(self, query: Query[A]) -> A:
        token = object()
        assert self.store.ask(query, token)

        def found() -> list[tuple[object, Any]]:
            self._completed()
            return self.store.found()

        ((asked, answer),) = wait_for("it is answered", found)
        assert asked is token
        return answer  # type: ignore[no-any-return]

    def find(self, *ids: str) -> list[StoredTask]:
        return self.ask(FindTasks(list(ids)))

    def states(self, *tasks: NewRecord) -> list[str]:
        found = {each.spec.id: each.state for each in self.find(*(new.spec.id for new in tasks))}
        return [found.get(new.spec.id, "unknown") for new in tasks]

    def read(self, *ids: str) -> OnDisk:
        return self.ask(ReadQueued(list(ids))).tasks

    def finished(self, state: str | None = None, pool: str | None = None) -> list[str]:
        where = Selection(state=state or "", pool=pool or "")
        tasks = self.ask(ListFinished(where, 1000)).tasks
        return [each.spec.id for each in tasks]

    def live(self, pool: str | None = None, limit: int = 1000) -> list[int]:
        tasks = self.ask(ListLive(Selection(pool=pool or ""), limit)).tasks
        return [each.seq for each in tasks]

    def reopen(self) -> None:
        self.store.close()
        self.store = SqliteStore(self.path, "normal")
        self._ticket = 0

    def recovered(self) -> list[Recovered]:
        """Return the tasks in the files now, as a start after a kill finds them."""
        return list(chain.from_iterable(self.store.recover(0, time.time_ns())))

    def rows(self, table: str) -> int:
        with closing(sqlite3.connect(self.path)) as connection:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    book = Book(tmp_path / "store.db")
    yield book
    book.store.close()


def some(count: int, first: int = 1, **fields: Any) -> list[NewRecord]:
    return [task(seq, **fields) for seq in range(first, first + count)]


# -- where tasks are ------------------------------------------------------------------------------


def test_tasks_that_come_together_share_rows_and_few_do_not(book: Book) -> None:
    book.write(added=some(BATCH_MIN - 1))
    assert (book.rows("live"), book.rows("sheets")) == (BATCH_MIN - 1, 0)
    book.write(added=some(2 * BATCH_TASKS + BATCH_MIN, 100))
    assert (book.rows("live"), book.rows("sheets")) == (BATCH_MIN - 1, 3)
    assert [each.seq for each in book.recovered()] == [*range(1, BATCH_MIN), *range(100, 364)]


def test_long_tasks_and_other_ids_have_rows_and_all_are_found(book: Book) -> None:
    tasks = some(40)
    tasks[5] = task(6, args=b"x" * 10_000)
    tasks[6] = task(7, id="by-hand")
    tasks[7] = task(8, fallback=b"\xc0")
    book.write(added=tasks)
    assert (book.rows("live"), book.rows("sheets")) == (3, 1)
    assert [each.spec for each in book.recovered()] == [new.spec for new in tasks]
    ids = [new.spec.id for new in tasks]
    assert [each.spec for each in book.find(*ids)] == [new.spec for new in tasks]
    assert sorted(book.read(*ids).seqs) == [new.seq for new in tasks]
    assert book.live() == [new.seq for new in reversed(tasks)]


def test_a_batch_goes_with_its_last_task(book: Book) -> None:
    tasks = some(20)
    book.write(added=tasks)
    for new in tasks[1:]:
        book.write(finished=[end(new)])
    assert [each.seq for each in book.recovered()] == [1]
    assert (book.rows("sheets"), book.rows("sheet_masks")) == (1, 1)
    book.write(finished=[end(tasks[0])])
    assert (book.rows("sheets"), book.rows("sheet_masks")) == (0, 0)
    assert book.recovered() == []


def test_a_task_that_begins_gets_a_row_and_ends_there(book: Book) -> None:
    tasks = some(20)
    book.write(added=tasks)
    book.write(changed=[LiveRecord(3, 1, 0, 0, 0, True)])
    assert book.states(*tasks[:4]) == [QUEUED, QUEUED, RUNNING, QUEUED]
    assert [each.attempt for each in book.recovered()][:4] == [0, 0, 1, 0]
    assert book.rows("live") == 1
    book.reopen()
    assert book.store.unfinished() == 20
    book.write(finished=[end(tasks[2])])
    assert book.rows("live") == 0
    assert [each.seq for each in book.recovered()] == [1, 2, *range(4, 21)]


def test_one_that_came_and_began_at_once_has_a_row(book: Book) -> None:
    book.write(added=some(20), changed=[LiveRecord(3, 1, 0, 0, 0, True)])
    assert (book.rows("live"), book.rows("sheets")) == (1, 1)
    assert [each.attempt for each in book.recovered()][:4] == [0, 0, 1, 0]


def test_masks_are_kept_over_a_restart(book: Book) -> None:
    tasks = some(300)
    book.write(added=tasks)
    book.write(finished=[end(new) for new in tasks[::2]])
    book.reopen()
    assert [each.seq for each in book.recovered()] == list(range(2, 301, 2))
    assert book.store.unfinished() == 150
    book.write(finished=[end(new) for new in tasks[1::4]])
    book.reopen()
    assert [each.seq for each in book.recovered()] == list(range(4, 301, 4))
    assert book.states(*tasks[:4]) == [SUCCEEDED, SUCCEEDED, SUCCEEDED, QUEUED]


def test_the_greatest_seq_is_known_though_no_row_was_written(book: Book) -> None:
    tasks = some(20, 50)
    book.write(added=tasks)
    book.write(finished=[end(new) for new in tasks])
    book.reopen()
    noted = book.store.last_seq()
    assert noted >= 69
    more = some(20, noted + 1)
    book.write(added=more)
    book.write(finished=[end(new) for new in more])
    book.reopen()
    assert book.store.last_seq() >= noted + 20, "and again, behind those that were noted ahead"


@pytest.mark.usefixtures("quick")
def test_a_commit_that_fails_changes_nothing_of_the_batches(book: Book) -> None:
    tasks = some(20)
    book.write(added=tasks)
    with closing(sqlite3.connect(book.path, isolation_level=None)) as other:
        other.execute(
            "CREATE TRIGGER no BEFORE INSERT ON facts BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        other.execute(
            "CREATE TRIGGER too BEFORE INSERT ON sheet_masks BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        book.write(expect=False, added=some(20, 21), finished=[end(tasks[0]), end(tasks[1])])
        wait_for("the problem is told", book.store.problem)
        assert len(book.recovered()) == 20
        other.execute("DROP TRIGGER too")
        other.execute("DROP TRIGGER no")
    wait_for("it is written", book.store.completed)
    assert [each.seq for each in book.recovered()] == list(range(3, 41))
    book.write(finished=[end(new) for new in tasks[2:]])
    assert [each.seq for each in book.recovered()] == list(range(21, 41))
    assert book.rows("sheets") == 1


# -- found by id ----------------------------------------------------------------------------------


def test_ids_of_many_batches_are_found_in_whatever_order(book: Book) -> None:
    tasks: list[NewRecord] = []
    for part in range(60):
        tasks += some(50, 1 + 50 * part)
        book.write(added=tasks[-50:])
    Random(1).shuffle(tasks)
    ids = [new.spec.id for new in tasks]
    assert [each.spec.id for each in book.find(*ids)] == ids
    assert set(book.read(*ids).seqs) == set(range(1, 3001))
    assert book.find(new_id(), latest_id(), "", "zz") == []


def test_finding_an_id_takes_no_longer_where_more_batches_are_behind_it(book: Book) -> None:
    first = some(BATCH_TASKS)
    book.write(added=first)

    def steps() -> int:
        """Return the steps of SQLite's machine, in tens."""
        count = 0

        def step() -> int:
            nonlocal count
            count += 1
            return 0

        with closing(sqlite3.connect(book.path)) as connection:
            connection.set_progress_handler(step, 10)
            assert len(queued_rows_of(connection, [first[0].spec.id])) == 1
        return count

    few = 100
    for number in range(1, few + 1):
        book.write(added=some(BATCH_MIN, number * BATCH_TASKS + 1))
    with_few = steps()
    for number in range(few + 1, 5 * few):
        book.write(added=some(BATCH_MIN, number * BATCH_TASKS + 1))
    assert steps() == with_few


def test_ids_that_do_not_grow_have_rows_before_batches_would_overlap(book: Book) -> None:
    ids = sorted([new_id() for _ in range(60 * 20)])
    for part in range(60):  # each batch would reach from the oldest to the newest
        mine = ids[part::60]
        book.write(added=[task(1 + 20 * part + n, id=id_) for n, id_ in enumerate(mine)])
    assert book.rows("sheets") == OVERLAP_MAX
    assert len(book.find(*ids)) == len(ids)
    assert len(book.recovered()) == len(ids)


def test_a_task_is_found_where_its_id_is_alive(book: Book) -> None:
    tasks = some(20)
    book.write(added=tasks)
    book.write(finished=[end(new) for new in tasks[:5]])
    again = [NewRecord(100 + n, new.spec, 1, "parser") for n, new in enumerate(tasks[:5])]
    book.write(added=[*again, *some(20, 105)])
    assert [each.seq for each in book.find(*(new.spec.id for new in again))] == [
        100,
        101,
        102,
        103,
        104,
    ]
    assert sorted(book.read(*(new.spec.id for new in again)).seqs) == [
        100, 101, 102, 103, 104,
    ]  # fmt: skip


# -- results --------------------------------------------------------------------------------------


def test_results_that_come_together_share_a_row_and_failures_do_not(book: Book) -> None:
    tasks = some(300)
    book.write(added=tasks)
    ends = [end(new, FAILED if new.seq == 7 else SUCCEEDED) for new in tasks]
    ends[20] = end(tasks[20], value=b"x" * 10_000)
    book.write(finished=ends)
    assert (book.rows("finished"), book.rows("results"), book.rows("result_ids")) == (2, 3, 298)
    assert book.recovered() == []
    assert book.finished(FAILED) == [tasks[6].spec.id]
    assert set(book.finished()) == {new.spec.id for new in tasks}
    assert book.states(*tasks[5:8]) == [SUCCEEDED, FAILED, SUCCEEDED]
    (found,) = book.find(tasks[20].spec.id)
    assert found.outcome is not None
    assert len(found.outcome.value) == 10_000


def test_the_newest_results_come_first_and_by_pool(book: Book) -> None:
    old, newer = some(20), some(20, 21, name="other.run")
    alone = some(1, 41)
    for part in (old, newer, alone):
        book.write(added=part)
        book.write(finished=[end(new) for new in part])
    ids = [new.spec.id for new in reversed(old + newer + alone)]
    assert book.finished() == ids
    assert book.finished(SUCCEEDED, "other") == ids[1:21]
    assert book.finished(None, "nobody") == []


def test_a_second_end_of_an_id_counts_alone(book: Book) -> None:
    tasks = some(20)
    book.write(finished=[end(new, value=b"\x01") for new in tasks])
    book.write(finished=[end(new, value=b"\x02") for new in tasks])
    assert len(book.finished()) == 20
    values = [
        each.outcome.value for each in book.find(*(new.spec.id for new in tasks)) if each.outcome
    ]
    assert values == [b"\x02"] * 20


def test_a_task_that_is_run_again_by_hand_leaves_its_batch(book: Book) -> None:
    tasks = some(20)
    book.write(finished=[end(new) for new in tasks])
    spec = tasks[4].spec
    book.write(added=[NewRecord(30, spec, 1, "parser")], reopened=[ReopenRecord(spec.id, 5, 30)])
    assert book.states(tasks[3], tasks[4]) == [SUCCEEDED, QUEUED]
    assert spec.id not in book.finished()
    assert len(book.finished()) == 19
    assert book.rows("live") == 1


def test_old_results_are_forgotten_with_their_ids(book: Book) -> None:
    for part in range(4):
        tasks = some(300, 1 + 300 * part)
        book.write(finished=[end(new) for new in tasks])
    book.store.trim(3600 * SECOND_NS, 300)
    wait_for("old ids are gone", lambda: book.rows("result_ids") <= 300 + BATCH_TASKS)
    assert 300 <= len(book.finished()) <= 300 + BATCH_TASKS
    book.store.trim(0, 10**6)
    wait_for("all are gone", lambda: not (book.rows("result_ids") or book.rows("results")))
    assert book.states(*tasks[:2]) == ["unknown", "unknown"]


def test_numbers_go_on_after_a_restart(book: Book) -> None:
    first, second = some(20), some(3, 21)
    book.write(finished=[end(new) for new in first])
    book.reopen()
    book.write(finished=[end(new) for new in second])
    book.reopen()
    third = some(20, 24)
    book.write(finished=[end(new) for new in third])
    assert book.finished() == [new.spec.id for new in reversed(first + second + third)]


# -- what is left of a batch ----------------------------------------------------------------------


def test_a_few_that_wait_for_long_get_rows_and_the_batch_goes(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = some(BATCH_TASKS)
    book.write(added=tasks)
    book.write(finished=[end(new) for new in tasks[3:]])
    book.store.trim(3600 * SECOND_NS, 10**6)
    book.write(changed=[LiveRecord(999, 0, 0, 0, 0, False)])  # comes after the trim
    assert book.rows("sheets") == 1
    monkeypatch.setattr(task_batches, "OLD_NS", 0)
    book.store.trim(3600 * SECOND_NS, 10**6)
    wait_for("the batch is gone", lambda: not book.rows("sheets"))
    assert (book.rows("live"), book.rows("sheet_masks")) == (3, 0)
    assert [each.spec for each in book.recovered()] == [new.spec for new in tasks[:3]]
    book.write(finished=[end(new) for new in tasks[:3]])
    assert book.recovered() == []


def test_a_batch_that_cannot_be_read_is_left_and_the_others_are_found(
    book: Book, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = some(2 * BATCH_TASKS)
    book.write(added=tasks)
    done = some(20, 1000)
    book.write(finished=[end(new) for new in done])
    with closing(sqlite3.connect(book.path)) as other, other:
        other.execute("UPDATE sheets SET tasks = x'c1' WHERE first = 1")
        other.execute("UPDATE results SET tasks = x'c1'")
    with caplog.at_level(logging.ERROR, "musterd"):
        assert [each.seq for each in book.recovered()] == list(range(129, 257))
    assert "cannot be read" in caplog.text
    assert book.states(tasks[0], tasks[-1], done[0]) == ["unknown", QUEUED, "unknown"]
    assert book.finished() == []
    monkeypatch.setattr(task_batches, "OLD_NS", 0)
    book.write(finished=[end(new) for new in tasks[100 : BATCH_TASKS + 100]])
    book.write(changed=[LiveRecord(2, 1, 0, 0, 0, True)])
    book.store.trim(0, 0)
    wait_for("the rest is gone", lambda: book.rows("sheets") == 1 and not book.rows("results"))
    book.write(finished=[end(tasks[-1])])
    assert book.store.problem() is None
    assert [each.seq for each in book.recovered()] == list(range(229, 256))


def test_a_task_of_a_pool_that_is_gone_is_found_on_its_batch(book: Book) -> None:
    tasks = [task(n, name="gone.run" if n % 3 else "here.run") for n in range(1, 3001)]
    book.write(added=tasks)
    book.write(added=some(2, 3001, name="gone.run"))
    seqs: list[int] = []
    after = 0
    while True:
        found = book.ask(FindStranded("gone", after))
        seqs += [each.seq for each in found.tasks]
        after = found.after_seq
        if not after:
            break
    assert seqs == [n for n in range(1, 3001) if n % 3] + [3001, 3002]
    assert book.live("here", 3) == [3000, 2997, 2994]


# -- any order of events --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_every_task_is_in_one_place_at_any_time(book: Book, seed: int) -> None:
    """Compare with plain dictionaries after each commit and each restart."""
    random = Random(seed)
    live: dict[int, tuple[NewRecord, int]] = {}
    ended: dict[str, str] = {}
    seq = 0
    for _ in range(60):
        seq += random.choice([1, 1, 1, 40])
        added = some(
            random.choice([0, 1, 5, 9, 30, 200]), seq, args=b"x" * random.choice([1, 5000])
        )
        seq += len(added)
        live.update((new.seq, (new, 0)) for new in added)
        chosen = random.sample(sorted(live), min(len(live), random.choice([0, 1, 10, 150])))
        ends = [
            end(live.pop(each)[0], random.choice([SUCCEEDED, SUCCEEDED, FAILED])) for each in chosen
        ]
        ended.update((each.spec.id, each.outcome.state) for each in ends)
        begun = random.sample(sorted(live), min(len(live), random.choice([0, 0, 3])))
        changed = [LiveRecord(each, 1, 0, 0, 0, True) for each in begun]
        live.update((each, (live[each][0], 1)) for each in begun)
        book.write(added=added, finished=ends, changed=changed)
        if random.random() < 0.2:
            book.reopen()
        assert [(each.seq, each.attempt, each.spec) for each in book.recovered()] == [
            (each, live[each][1], live[each][0].spec) for each in sorted(live)
        ]
        asked = random.sample(sorted(ended), min(len(ended), 50))
        asked += [live[each][0].spec.id for each in random.sample(sorted(live), min(len(live), 50))]
        states = {new.spec.id: RUNNING if attempt else QUEUED for new, attempt in live.values()}
        expected = [ended.get(id_) or states[id_] for id_ in asked]
        assert [each.state for each in book.find(*asked)] == expected
    assert book.store.conflicts == 0
