"""Records of the stores besides tasks and results: facts, failed attempts, second lives."""

import resource
import select
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import pytest

from musterd.ipc.wire.messages import (
    CANCELLED,
    CRASH,
    ERROR,
    FAILED,
    QUEUED,
    SUCCEEDED,
    Failure,
    Outcome,
    TaskSpec,
)
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.core.model.actions import (
    AttemptRecord,
    Fact,
    FinalRecord,
    NewRecord,
    Persist,
    ReopenRecord,
)
from musterd.supervisor.store import queries
from musterd.supervisor.store import writer as store_writer
from musterd.supervisor.store.engines import open_store
from musterd.supervisor.store.file import connect
from musterd.supervisor.store.interface import (
    ATTEMPTS_KEPT,
    TRACEBACK_CHARS_KEPT,
    A,
    FindFact,
    FindFacts,
    FindTasks,
    ListFinished,
    Purge,
    Purged,
    Query,
    Store,
    StoredTask,
    Withdraw,
)
from musterd.supervisor.store.sqlite import SqliteStore
from support.waiting import wait_for

DEADLINE_SECONDS = 30.0
SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND
MANY = 10**6
LATER = 2**62  # after everything

pytestmark = pytest.mark.usefixtures("rows_or_batches")


def spec(number: int) -> TaskSpec:
    return TaskSpec(f"id-{number}", "parser.extract", b"\x80")


def new(number: int, id_number: int | None = None) -> NewRecord:
    return NewRecord(number, spec(number if id_number is None else id_number), WALL, "parser")


def final(number: int, state: str = FAILED, id_number: int | None = None) -> FinalRecord:
    task = spec(number if id_number is None else id_number)
    failure = Failure(ERROR, "ValueError", "no") if state == FAILED else None
    return FinalRecord(number, task, WALL, Outcome(task.id, state, b"", failure, 2, 1000), 0)


def failed(number: int, ordinal: int, **fields: str) -> AttemptRecord:
    failure = Failure(ERROR, "ValueError", f"error {ordinal}", **fields)
    return AttemptRecord(number, ordinal, ordinal, "parser/0", failure)


class Page:
    """A maker of pages with tickets of their own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ticket = 0

    def put(self, **fields: object) -> None:
        """Hand a page over without waiting."""
        self.ticket += 1
        values: dict[str, object] = {"added": [], "changed": [], "finished": []}
        self._store.write(Persist(self.ticket, **(values | fields)))  # type: ignore[arg-type]

    def write(self, **fields: object) -> None:
        self.put(**fields)
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        seen = self._store.completed()
        while not self._store.immediate and seen != self.ticket:
            left = deadline - time.monotonic()
            assert left > 0, f"ticket {self.ticket} never completed: {self._store.problem()}"
            select.select([self._store.fileno()], [], [], left)
            seen = self._store.completed() or seen


def answered(store: Store, query: Query[A]) -> A:
    token = object()
    assert store.ask(query, token)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        left = deadline - time.monotonic()
        assert left > 0, "no answer"
        select.select([store.fileno()], [], [], left)
        store.completed()
        for each, answer in store.found():
            assert each is token
            return answer  # type: ignore[return-value]


def fact(store: Store, kind: str, key: str) -> bytes | None:
    return answered(store, FindFact(kind, key))


def find(store: Store, *ids: str) -> list[StoredTask]:
    return answered(store, FindTasks(list(ids), attempts=True))


def messages(store: Store, id_: str) -> list[str]:
    (task,) = find(store, id_)
    return [attempt.failure.message for attempt in task.attempts]


def purge(store: Store, ids: list[str] | None, before_ns: int = LATER) -> Purged:
    return answered(store, Purge(ids, before_ns))


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture(params=["normal", "memory"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    store = open_store(path, request.param)
    yield store
    store.close()


@pytest.fixture
def page(store: Store) -> Page:
    return Page(store)


@pytest.fixture
def durable(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, "normal")
    yield store
    store.close()


@contextmanager
def reopened(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path, "normal")) as store:
        yield store


# -- facts ------------------------------------------------------------------------------------


def test_a_fact_is_found_by_kind_and_key(store: Store, page: Page) -> None:
    page.write(facts=[Fact("breaker", "b", b"1"), Fact("breaker", "a", b"2"), Fact("x", "a", b"3")])
    assert store.facts("breaker") == [("a", b"2"), ("b", b"1")]
    assert store.facts("none") == []
    assert fact(store, "x", "a") == b"3"
    assert fact(store, "x", "b") is None


def test_the_last_word_about_a_fact_counts(store: Store, page: Page) -> None:
    page.write(facts=[Fact("x", "a", b"1"), Fact("x", "a", b"2"), Fact("x", "b", b"1")])
    assert (fact(store, "x", "a"), fact(store, "x", "b")) == (b"2", b"1")
    page.write(facts=[Fact("x", "a", None), Fact("x", "b", None), Fact("x", "b", b"3")])
    assert (fact(store, "x", "a"), fact(store, "x", "b")) == (None, b"3")
    page.write(facts=[Fact("x", "c", b"1"), Fact("x", "c", None)])
    assert fact(store, "x", "c") is None


def test_a_fact_that_has_ended_is_not_found(store: Store, page: Page) -> None:
    page.write(facts=[Fact("x", "short", b"1", 1), Fact("x", "long", b"2", 3600 * SECOND)])
    page.write(facts=[Fact("x", "endless", b"3", 2**62)])
    wait_for("its time is over", lambda: fact(store, "x", "short") is None)
    assert store.facts("x") == [("endless", b"3"), ("long", b"2")]


def test_facts_survive_and_ended_ones_are_trimmed(path: Path) -> None:
    with reopened(path) as store:
        Page(store).write(facts=[Fact("x", "short", b"1", 1), Fact("x", "long", b"2")])
        store.trim(3600 * SECOND, MANY)
        wait_for("the ended one is gone from the file", lambda: rows(path, "facts") == 1)
    with reopened(path) as store:
        assert store.facts("x") == [("long", b"2")]


# -- failed attempts --------------------------------------------------------------------------


def test_each_failed_attempt_is_kept_with_its_time_and_worker(store: Store, page: Page) -> None:
    before = time.time()
    page.write(added=[new(1), new(2)])
    page.write(failed=[failed(1, 1)])
    crash = Failure(CRASH, message="its worker ended by signal 9")
    page.write(failed=[AttemptRecord(1, 2, 2, "parser/1", crash)])
    page.write(finished=[final(1)])
    task, other = find(store, "id-1", "id-2")
    assert other.attempts == []
    first, second = task.attempts
    assert (first.attempt, first.worker, first.failure.message) == (1, "parser/0", "error 1")
    assert (second.attempt, second.worker, second.failure) == (2, "parser/1", crash)
    assert before <= first.at <= second.at <= time.time()


def test_attempts_are_read_only_where_asked_for(store: Store, page: Page) -> None:
    page.write(added=[new(1)], failed=[failed(1, 1)])
    (task,) = answered(store, FindTasks(["id-1"]))
    assert task.attempts == []


def test_the_last_attempts_of_a_task_are_kept(store: Store, page: Page, path: Path) -> None:
    page.write(added=[new(1)])
    for ordinal in range(1, ATTEMPTS_KEPT + 8):
        page.write(failed=[failed(1, ordinal)])
    assert messages(store, "id-1") == [f"error {n}" for n in range(8, ATTEMPTS_KEPT + 8)]
    if path.exists():
        assert rows(path, "attempts") == ATTEMPTS_KEPT


def test_a_long_traceback_is_cut_and_its_end_kept(store: Store, page: Page) -> None:
    traceback = "x" * 100_000 + "the line that raised"
    page.write(added=[new(1)], failed=[failed(1, 1, traceback=traceback)])
    ((attempt,),) = [task.attempts for task in find(store, "id-1")]
    assert len(attempt.failure.traceback) == TRACEBACK_CHARS_KEPT
    assert attempt.failure.traceback.endswith("the line that raised")


def test_attempts_go_when_their_task_is_trimmed(path: Path) -> None:
    with reopened(path) as store:
        page = Page(store)
        page.write(added=[new(1), new(2)], failed=[failed(1, 1), failed(2, 1)])
        page.write(finished=[final(1)])
        store.trim(0, MANY)
        wait_for("the finished one is gone", lambda: not find(store, "id-1"))
        assert rows(path, "attempts") == 1
        assert messages(store, "id-2") == ["error 1"]


# -- trimming ---------------------------------------------------------------------------------


def test_the_newest_results_are_kept_up_to_their_number(store: Store, page: Page) -> None:
    page.write(finished=[final(n) for n in range(1, 31)])
    store.trim(3600 * SECOND, 10)
    wait_for("the older ones are gone", lambda: not find(store, "id-20"))
    assert len(find(store, *[f"id-{n}" for n in range(1, 31)])) == 10
    store.trim(3600 * SECOND, 0)
    wait_for("all are gone", lambda: not find(store, "id-30"))


def test_a_trim_asked_for_during_another_one_is_not_forgotten(
    durable: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second trim is asked for at the moment when the first finds nothing more to do."""
    page = Page(durable)
    page.write(finished=[final(n) for n in range(1, 4)])
    slice_ = store_writer.Writer.trim_slice
    asked: list[int] = []

    def ask_meanwhile(writer: store_writer.Writer, *limits: int) -> int:
        deleted = slice_(writer, *limits)
        if not asked:
            asked.append(deleted)
            durable.trim(0, MANY)
        return deleted

    monkeypatch.setattr(store_writer.Writer, "trim_slice", ask_meanwhile)
    durable.trim(3600 * SECOND, MANY)
    wait_for("the second trim is done", lambda: not find(durable, "id-3"))
    assert asked == [0]


# -- second lives -----------------------------------------------------------------------------


def reopen(page: Page, former: int, seq: int, id_number: int) -> None:
    record = ReopenRecord(f"id-{id_number}", former, seq)
    page.write(added=[new(seq, id_number)], reopened=[record])


def test_a_reopened_task_is_live_and_not_finished(store: Store, page: Page) -> None:
    page.write(added=[new(1)])
    page.write(finished=[final(1)])
    reopen(page, 1, 2, 1)
    (task,) = find(store, "id-1")
    assert (task.seq, task.state, task.outcome, task.attempt) == (2, QUEUED, None, 0)
    assert answered(store, ListFinished(Selection(), 10)).tasks == []
    page.write(finished=[final(2, SUCCEEDED, 1)])
    (task,) = find(store, "id-1")
    assert (task.seq, task.state) == (2, SUCCEEDED)
    assert store.last_seq() >= 2


def test_a_reopened_task_keeps_the_errors_of_its_former_life(store: Store, page: Page) -> None:
    page.write(added=[new(1)], failed=[failed(1, n) for n in range(1, 4)])
    page.write(finished=[final(1)])
    reopen(page, 1, 2, 1)
    page.write(failed=[AttemptRecord(2, 1, 1, "parser/0", Failure(ERROR, message="again"))])
    assert messages(store, "id-1") == ["error 1", "error 2", "error 3", "again"]
    page.write(finished=[final(2, FAILED, 1)])
    reopen(page, 2, 3, 1)
    page.write(failed=[AttemptRecord(3, 1, 1, "parser/0", Failure(ERROR, message="and again"))])
    assert messages(store, "id-1")[-2:] == ["again", "and again"]


def test_a_reopened_task_that_ends_within_the_same_group_is_finished_once(
    durable: SqliteStore, path: Path
) -> None:
    page = Page(durable)
    page.write(added=[new(1)])
    page.write(finished=[final(1)])
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the writer waits, then takes all pages that came
        page.put()
        wait_for("the writer took the first", lambda: durable._writes.qsize() == 0)
        page.put(added=[new(2, 1)], reopened=[ReopenRecord("id-1", 1, 2)])
        page.put(finished=[final(2, CANCELLED, 1)])
    page.wait()
    assert rows(path, "finished") == 1
    assert rows(path, "live") == 0
    assert [task.state for task in find(durable, "id-1")] == [CANCELLED]


def test_a_task_that_ends_while_it_is_looked_up_is_found_all_the_same(path: Path) -> None:
    """The task goes from one table to the other between two looks."""
    with closing(SqliteStore(path, "full")) as store, closing(connect(path)) as reader:
        page = Page(store)
        page.write(added=[new(1)])
        moved = []

        def between(statement: str) -> None:
            if " FROM live " in statement and not moved:
                moved.append(statement)
                page.write(finished=[final(1)])

        reader.set_trace_callback(between)
        found = queries.answer(reader, FindTasks(["id-1"], True), 0)
        assert moved
        assert isinstance(found, list)
        assert [task.spec.id for task in found if isinstance(task, StoredTask)] == ["id-1"]
        assert not reader.in_transaction
        assert [task.state for task in find(store, "id-1")] == [FAILED]


def test_a_reopened_task_survives_as_live(path: Path) -> None:
    with reopened(path) as store:
        page = Page(store)
        page.write(added=[new(1)])
        page.write(finished=[final(1)])
        reopen(page, 1, 2, 1)
    with reopened(path) as store:
        assert [
            (task.seq, task.spec.id) for task in list(chain.from_iterable(store.recover(0, WALL)))
        ] == [(2, "id-1")]


# -- purging ----------------------------------------------------------------------------------


def test_named_failed_tasks_are_purged_and_no_others(store: Store, page: Page) -> None:
    page.write(added=[new(n) for n in range(1, 6)], failed=[failed(1, 1)])
    page.write(finished=[final(1), final(2, SUCCEEDED), final(3), final(4, CANCELLED)])
    answer = purge(store, ["id-1", "id-2", "id-4", "id-5", "id-9"])
    assert (answer.count, answer.ids) == (1, ["id-1"])
    left = [task.spec.id for task in find(store, *[f"id-{n}" for n in range(1, 6)])]
    assert left == ["id-2", "id-3", "id-4", "id-5"]


def test_all_failed_tasks_are_purged_in_slices(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "SLICE_ROWS", 10)
    with reopened(path) as store:
        page = Page(store)
        page.write(
            finished=[final(n) for n in range(1, 36)] + [final(40, SUCCEEDED)],
            failed=[failed(n, 1) for n in range(1, 36)],
        )
        assert purge(store, None) == Purged(35, [])
        assert rows(path, "attempts") == 0
        assert [task.spec.id for task in find(store, "id-1", "id-40")] == ["id-40"]


def test_only_what_failed_before_is_purged(store: Store, page: Page) -> None:
    page.write(finished=[final(1)])
    between_ns = time.time_ns()
    page.write(finished=[final(2)])
    assert purge(store, None, between_ns).count == 1
    assert [task.spec.id for task in find(store, "id-1", "id-2")] == ["id-2"]


# -- while nothing can be written -------------------------------------------------------------


@contextmanager
def no_file_may_grow(limit_bytes: int) -> Iterator[None]:
    """Let the kernel refuse writes beyond this size: a real failing write(2), as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def withdraw(store: Store, *seqs: int) -> list[int]:
    return answered(store, Withdraw(list(seqs)))


def test_what_is_written_cannot_be_withdrawn(store: Store, page: Page) -> None:
    page.write(added=[new(1), new(2)])
    assert withdraw(store, 1, 2) == []
    assert len(find(store, "id-1", "id-2")) == 2


@pytest.mark.usefixtures("quick")
def test_what_is_not_written_yet_is_withdrawn_and_never_written(
    durable: SqliteStore, path: Path
) -> None:
    page = Page(durable)
    page.write(added=[new(1)])
    big = NewRecord(2, TaskSpec("id-2", "parser.extract", b"x" * 1_000_000), WALL, "parser")
    with no_file_may_grow(256 * 1024):
        page.put(added=[big])
        wait_for("the problem is told", lambda: durable.write_problem() is not None)
        page.put(added=[new(3), new(4)], failed=[failed(1, 1)])
        assert withdraw(durable, 1, 2, 3) == [2, 3]
        assert durable.completed() is None
    page.wait()
    wait_for("the problem is over", lambda: durable.write_problem() is None)
    assert [task.spec.id for task in find(durable, *[f"id-{n}" for n in range(1, 5)])] == [
        "id-1",
        "id-4",
    ]
    assert messages(durable, "id-1") == ["error 1"]
    page.write(added=[new(5)])
    assert [task.seq for task in chain.from_iterable(durable.recover(0, WALL))] == [1, 4, 5]


@pytest.mark.usefixtures("quick")
def test_a_withdrawn_second_life_leaves_the_first_one_as_it_was(durable: SqliteStore) -> None:
    page = Page(durable)
    page.write(added=[new(1)], failed=[failed(1, 1)])
    page.write(finished=[final(1)])
    with no_file_may_grow(0):
        record = ReopenRecord("id-1", 1, 2)
        page.put(added=[new(2, 1)], reopened=[record], facts=[Fact("x", "a", b"1")])
        wait_for("the problem is told", lambda: durable.write_problem() is not None)
        assert withdraw(durable, 2) == [2]
    page.wait()
    assert fact(durable, "x", "a") == b"1"
    (task,) = find(durable, "id-1")
    assert (task.seq, task.state, len(task.attempts)) == (1, FAILED, 1)


@pytest.mark.usefixtures("quick")
def test_room_is_proved_before_the_problem_is_said_to_be_over(
    durable: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything withdrawn there is nothing to write, and writing nothing always works."""
    page = Page(durable)
    page.write(added=[new(1)])
    probes: list[bool] = []
    probe = store_writer.Writer.probe

    def noted(writer: store_writer.Writer) -> None:
        probes.append(False)
        probe(writer)
        probes[-1] = True

    monkeypatch.setattr(store_writer.Writer, "probe", noted)
    with no_file_may_grow(0):
        page.put(added=[new(2)])
        wait_for("the problem is told", lambda: durable.write_problem() is not None)
        assert withdraw(durable, 2) == [2]
        wait_for("it was tried more than once", lambda: len(probes) > 1)
        assert durable.write_problem() is not None
    page.wait()
    wait_for("the problem is over", lambda: durable.write_problem() is None)
    assert probes[-1]
    assert durable.facts(store_writer.PROBE) == []


@pytest.mark.usefixtures("quick")
def test_an_idle_store_finds_out_by_itself_that_there_is_room_again(durable: SqliteStore) -> None:
    Page(durable).write(finished=[final(1)])
    with no_file_may_grow(0):
        durable.trim(0, MANY)  # fails, and is not tried again before the next trim
        wait_for("the problem is told", lambda: durable.write_problem() is not None)
    wait_for("the problem is over", lambda: durable.write_problem() is None)


def test_many_facts_are_found_at_once_in_the_order_of_their_keys(store: Store, page: Page) -> None:
    facts = [Fact("history", f"a.{number}", b"%d" % number) for number in (1, 2)]
    page.write(facts=[*facts, Fact("other", "a.3", b"3")])
    query = FindFacts("history", ["a.2", "a.9", "a.1", "a.3"])
    assert answered(store, query) == [b"2", None, b"1", None]
