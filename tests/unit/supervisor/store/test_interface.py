"""The stores, memory and SQLite, through the interface the daemon uses."""

import logging
import os
import resource
import select
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from musterd.ipc.wire.messages import (
    ERROR,
    FAILED,
    QUEUED,
    RUNNING,
    SHUT,
    SHUT_TYPE,
    SUCCEEDED,
    WAITING,
    Failure,
    Outcome,
    TaskSpec,
)
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.core.model.actions import Fact, FinalRecord, LiveRecord, NewRecord, Persist
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.store import memory, queries, sqlite, task_batches
from musterd.supervisor.store import rows as store_rows
from musterd.supervisor.store import writer as store_writer
from musterd.supervisor.store.engines import open_store
from musterd.supervisor.store.interface import (
    WALL_NS_MAX,
    FindTasks,
    ListFinished,
    ListLive,
    Page,
    Purge,
    ReadQueued,
    Store,
    StoredTask,
    StoreError,
)
from musterd.supervisor.store.memory import MemoryStore
from musterd.supervisor.store.rows import SHORT_BYTES_MAX
from musterd.supervisor.store.sqlite import SqliteStore
from support.waiting import wait_for

DEADLINE_SECONDS = 30.0
SECOND = 1_000_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
WALL = 1_700_000_000 * SECOND
MANY = 10**6

pytestmark = pytest.mark.usefixtures("rows_or_batches")
ROWS_ONLY = pytest.mark.parametrize("rows_or_batches", ["rows"], indirect=True)


def spec(number: int, **fields: object) -> TaskSpec:
    values: dict[str, object] = {"id": f"id-{number}", "name": "parser.extract", "args": b"\x80"}
    return TaskSpec(**(values | fields))  # type: ignore[arg-type]


def new(number: int, *, submitted: int = WALL, **fields: object) -> NewRecord:
    return NewRecord(number, spec(number, **fields), submitted, "parser")


def final(number: int, state: str = SUCCEEDED, **fields: object) -> FinalRecord:
    task = spec(number, **fields)
    failure = None if state == SUCCEEDED else Failure(ERROR, "ValueError", "no")
    outcome = Outcome(task.id, state, b"value", failure, 2, 1000)
    return FinalRecord(number, task, WALL, outcome, 1)


def persist(
    ticket: int,
    added: list[NewRecord] | None = None,
    changed: list[LiveRecord] | None = None,
    finished: list[FinalRecord] | None = None,
) -> Persist:
    return Persist(ticket, added or [], changed or [], finished or [])


def wait_for_ticket(store: Store, ticket: int) -> None:
    """Wait for a ticket through the descriptor, as the daemon does."""
    if store.immediate:
        assert store.completed() == ticket
        return
    seen = None
    deadline = time.monotonic() + DEADLINE_SECONDS
    while seen != ticket:
        left = deadline - time.monotonic()
        assert left > 0, f"ticket {ticket} never completed, the last was {seen}: {store.problem()}"
        select.select([store.fileno()], [], [], left)
        seen = store.completed() or seen


def write(store: Store, record: Persist) -> None:
    store.write(record)
    wait_for_ticket(store, record.ticket)


def answer(store: Store, token: object) -> list[StoredTask]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        readable, _, _ = select.select([store.fileno()], [], [], deadline - time.monotonic())
        assert readable, "no answer"
        store.completed()
        found = store.found()
        if found:
            assert [each for each, _ in found] == [token]
            return found[0][1]


def find(store: Store, *ids: str) -> list[StoredTask]:
    token = object()
    assert store.ask(FindTasks(list(ids)), token)
    return answer(store, token)


def listed(
    store: Store,
    state: str | None = None,
    pool: str | None = None,
    limit: int = 100,
    *,
    dead: bool = False,
) -> list[str]:
    token = object()
    where = Selection(state=state or "", pool=pool or "")
    assert store.ask(ListFinished(where, limit, dead), token)
    return [task.spec.id for task in answer(store, token).tasks]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture(params=["full", "normal", "memory"])
def any_store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    store = open_store(path, request.param)
    yield store
    store.close()


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, "full")
    yield store
    store.close()


@contextmanager
def reopened(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, "normal")
    try:
        yield store
    finally:
        store.close()


def recovered(path: Path, *, now_ns: int = HOUR, wall_ns: int = WALL) -> list[Recovered]:
    with reopened(path) as store:
        return list(chain.from_iterable(store.recover(now_ns, wall_ns)))


@contextmanager
def held_up(path: Path) -> Iterator[None]:
    """Hold the write lock as another program does, so that writes wait meanwhile."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


# -- both stores ------------------------------------------------------------------------------


def test_a_new_store_is_empty(any_store: Store) -> None:
    assert list(chain.from_iterable(any_store.recover(0, WALL))) == []
    assert any_store.last_seq() == 0
    assert any_store.completed() is None
    assert any_store.found() == []
    assert any_store.problem() is None


def test_tickets_complete_in_order_and_are_told_once(any_store: Store) -> None:
    for ticket in range(1, 6):
        write(any_store, persist(ticket, [new(ticket)]))
    assert any_store.completed() is None


def test_a_task_is_found_through_its_whole_life(any_store: Store) -> None:
    write(any_store, persist(1, [new(1), new(2, delay_ns=HOUR, submitted=time.time_ns())]))
    queued, waiting = find(any_store, "id-1", "id-2")
    assert queued == StoredTask(1, spec(1), QUEUED, None, 0, 0, WALL)
    assert waiting.state == WAITING
    write(any_store, persist(2, changed=[LiveRecord(1, 3, 1, 0, 0, True)]))
    assert find(any_store, "id-1") == [StoredTask(1, spec(1), RUNNING, None, 1, 3, WALL)]
    write(any_store, persist(3, changed=[LiveRecord(1, 4, 1, 0, HOUR, False)]))
    assert find(any_store, "id-1")[0].state == WAITING

    before_ns = time.time_ns()
    write(any_store, persist(4, finished=[final(1, FAILED)]))
    (found,) = find(any_store, "id-1")
    assert found.outcome == final(1, FAILED).outcome
    assert (found.seq, found.spec, found.state) == (1, spec(1), FAILED)
    assert (found.crashes, found.attempt, found.submitted_wall_ns) == (1, 2, WALL)
    assert before_ns <= found.finished_wall_ns <= time.time_ns()


def test_find_answers_in_the_order_asked_and_leaves_out_what_is_unknown(any_store: Store) -> None:
    write(any_store, persist(1, [new(n) for n in range(1, 40)]))
    write(any_store, persist(2, finished=[final(n) for n in range(1, 20)]))
    tasks = find(any_store, "id-30", "never", "id-3", "id\0-3", "id-39")
    assert [task.spec.id for task in tasks] == ["id-30", "id-3", "id-39"]
    assert find(any_store) == []


def test_a_task_that_is_run_again_under_its_id_shows_its_newest_life(any_store: Store) -> None:
    write(any_store, persist(1, [new(1)]))
    write(any_store, persist(2, finished=[final(1, FAILED)]))
    again = NewRecord(2, spec(1), WALL, "parser")
    write(any_store, persist(3, [again]))
    assert [task.state for task in find(any_store, "id-1")] == [QUEUED]
    outcome = Outcome("id-1", SUCCEEDED)
    write(any_store, persist(4, finished=[FinalRecord(2, spec(1), WALL, outcome, 0)]))
    assert [task.state for task in find(any_store, "id-1")] == [SUCCEEDED]


@ROWS_ONLY
def test_lists_are_newest_first_filtered_and_without_payload(any_store: Store) -> None:
    write(any_store, persist(1, [new(n) for n in range(1, 7)]))
    write(any_store, persist(2, finished=[final(3), final(1, FAILED)]))
    browser = {"name": "browser.render"}
    write(any_store, persist(3, finished=[final(2), final(6, FAILED, **browser)]))
    assert listed(any_store) == ["id-6", "id-2", "id-1", "id-3"]
    assert listed(any_store, limit=3) == ["id-6", "id-2", "id-1"]
    assert listed(any_store, SUCCEEDED) == ["id-2", "id-3"]
    assert listed(any_store, FAILED) == ["id-6", "id-1"]
    assert listed(any_store, FAILED, "parser") == ["id-1"]
    assert listed(any_store, None, "browser") == ["id-6"]
    assert listed(any_store, None, "none") == []

    any_store.ask(ListFinished(Selection(), 1), "token")
    (task,) = answer(any_store, "token").tasks
    assert task.spec.args == b""
    assert task.outcome is not None
    assert (task.outcome.value, task.outcome.failure) == (b"", Failure(ERROR, "ValueError", "no"))


def test_trim_forgets_old_results_and_no_live_task(any_store: Store) -> None:
    write(any_store, persist(1, [new(n) for n in range(1, 31)]))
    write(any_store, persist(2, finished=[final(n) for n in range(1, 21)]))
    any_store.trim(HOUR, MANY)
    write(any_store, persist(3, finished=[final(21)]))
    assert len(listed(any_store)) == 21
    any_store.trim(0, MANY)
    wait_for("old results are gone", lambda: listed(any_store) == [])
    assert [task.spec.id for task in find(any_store, "id-5", "id-22")] == ["id-22"]


def test_no_thread_and_no_descriptor_outlives_the_store(path: Path) -> None:
    def open_fds() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    threads, fds = threading.active_count(), open_fds()
    for durability in ("full", "memory"):
        store = open_store(path, durability)
        write(store, persist(1, [new(1)]))
        find(store, "id-1")
        store.close()
        store.close()
    assert threading.active_count() == threads
    assert open_fds() == fds


# -- the memory store -------------------------------------------------------------------------


def test_memory_completes_at_once() -> None:
    with closing(MemoryStore()) as store:
        assert store.immediate
        store.write(persist(7, [new(1), new(9)]))
        assert store.completed() == 7
        assert store.last_seq() == 9


def test_memory_keeps_a_bounded_number_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RESULTS_MAX", 3)
    with closing(MemoryStore()) as store:
        store.write(persist(1, finished=[final(n) for n in range(1, 6)]))
        assert listed(store) == ["id-5", "id-4", "id-3"]


def test_memory_keeps_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RESULT_BYTES_MAX", 2500)
    with closing(MemoryStore()) as store:
        for number in range(1, 6):
            store.write(persist(number, finished=[final(number, args=b"x" * 1000)]))
            store.write(persist(number, finished=[final(number, args=b"x" * 1000)]))
        assert listed(store) == ["id-5", "id-4"]


# -- recovery ---------------------------------------------------------------------------------


def test_unfinished_tasks_come_back_in_order_with_all_their_fields(path: Path) -> None:
    rich = {"priority": 0, "target": "site.example", "timeout_ns": 5, "max_retries": 7}
    with reopened(path) as store:
        write(store, persist(1, [new(3), new(4), new(5, **rich)]))
        write(store, persist(2, [new(1), new(2)]))
        write(
            store,
            persist(3, changed=[LiveRecord(5, 2, 1, 3, 0, True)], finished=[final(4), final(1)]),
        )
    assert recovered(path) == [
        Recovered(2, spec(2), WALL, 0, 0, 0, 0, 0, False),
        Recovered(3, spec(3), WALL, 0, 0, 0, 0, 0, False),
        Recovered(5, spec(5, **rich), WALL, 0, 0, 2, 1, 3, True),
    ]


def test_delay_and_expiry_go_on_by_the_wall_clock(path: Path) -> None:
    with reopened(path) as store:
        write(store, persist(1, [new(1, delay_ns=60 * SECOND, expires_ns=HOUR)]))

    def times(wall_ns: int) -> tuple[int, int]:
        (task,) = recovered(path, now_ns=5 * HOUR, wall_ns=wall_ns)
        return task.ready_ns, task.expires_at_ns

    assert times(WALL + 20 * SECOND) == (5 * HOUR + 40 * SECOND, 6 * HOUR - 20 * SECOND)
    assert times(WALL + 61 * SECOND) == (0, 6 * HOUR - 61 * SECOND)
    assert times(WALL + DAY) == (0, 5 * HOUR)  # expired while no daemon ran
    # A clock that was set back by a day makes no task wait longer than it was told to.
    assert times(WALL - DAY) == (5 * HOUR + 60 * SECOND, 6 * HOUR)


def test_the_wait_before_a_retry_goes_on_after_a_restart(path: Path) -> None:
    with reopened(path) as store:
        write(store, persist(1, [new(1, delay_ns=DAY), new(2, delay_ns=DAY)]))
        before_ns = time.time_ns()
        changed = [LiveRecord(1, 1, 0, 0, 100 * SECOND, False), LiveRecord(2, 1, 0, 0, 0, False)]
        write(store, persist(2, changed=changed))
        after_ns = time.time_ns()
    waiting, ready = recovered(path, now_ns=HOUR, wall_ns=after_ns + 30 * SECOND)
    assert ready.ready_ns == 0
    left_ns = waiting.ready_ns - HOUR
    assert 70 * SECOND - (after_ns - before_ns) <= left_ns <= 70 * SECOND


def test_the_greatest_seq_is_known_after_its_task_is_gone(path: Path) -> None:
    with reopened(path) as store:
        write(store, persist(1, [new(1), new(41)]))
        write(store, persist(2, finished=[final(41)]))
        store.trim(0, MANY)
        wait_for("trimmed", lambda: listed(store) == [])
    with reopened(path) as store:
        assert store.last_seq() >= 41
        write(store, persist(1, [new(50)], finished=[final(50)]))
    with reopened(path) as store:
        assert store.last_seq() >= 50


@ROWS_ONLY
def test_a_row_that_cannot_be_decoded_does_not_keep_the_others_away(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with reopened(path) as store:
        write(store, persist(1, [new(1), new(2), new(3)], finished=[final(3)]))
    with closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE live SET spec = x'c1' WHERE seq = 1")
        other.execute("UPDATE finished SET outcome = x'93a2ff'")
        other.commit()
    assert [task.seq for task in recovered(path)] == [2]
    assert "cannot be read" in caplog.text
    with reopened(path) as store:
        assert [task.seq for task in find(store, "id-1", "id-2", "id-3")] == [2]


# -- group commits ----------------------------------------------------------------------------


def test_what_waits_goes_into_one_transaction(store: SqliteStore, path: Path) -> None:
    write(store, persist(1, [new(1)]))
    with held_up(path):
        store.write(persist(2, [new(2)]))
        wait_for("the writer took the first and waits", lambda: store._writes.qsize() == 0)
        for ticket in range(3, 103):
            store.write(persist(ticket, [new(ticket)]))
    wait_for_ticket(store, 102)
    # Commits: the first page; the one that was held up, with all in time for it; the others.
    assert 2 <= store.commits <= 3
    assert len(list(chain.from_iterable(store.recover(0, WALL)))) == 102


def test_a_patient_page_is_written_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_SECONDS", DEADLINE_SECONDS)
    with closing(SqliteStore(tmp_path / "store.db", "full")) as store:
        store.write(msgspec.structs.replace(persist(1, [new(1)]), patient=True))
        time.sleep(0.05)
        assert store.completed() is None
        store.write(persist(2, finished=[final(1)]))
        wait_for_ticket(store, 2)
        assert store.commits == 1


def test_a_patient_page_does_not_wait_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_SECONDS", 0.01)
    with closing(SqliteStore(tmp_path / "store.db", "full")) as store:
        write(store, msgspec.structs.replace(persist(1, [new(1)]), patient=True))
        store.write(msgspec.structs.replace(persist(2, [new(2)]), patient=True))
    with closing(SqliteStore(tmp_path / "store.db", "full")) as store:  # close() wrote the page
        assert store.unfinished() == 2


def test_a_large_backlog_is_cut_into_groups(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_rows, "GROUP_ROWS_MAX", 10)
    with held_up(path):
        for ticket in range(1, 101):
            store.write(persist(ticket, [new(ticket)]))
    wait_for_ticket(store, 100)
    assert 10 <= store.commits <= 11
    assert len(list(chain.from_iterable(store.recover(0, WALL)))) == 100


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65, 1023, 1024, 1025, 2500])
def test_groups_of_any_size_are_written_whole(store: SqliteStore, rows: int) -> None:
    numbers = range(1, rows + 1)
    write(store, persist(1, [new(n) for n in numbers]))
    write(store, persist(2, changed=[LiveRecord(n, n, 0, 0, 0, True) for n in numbers]))
    tasks = list(chain.from_iterable(store.recover(0, WALL)))
    assert [(task.seq, task.attempt, task.begun) for task in tasks] == [
        (n, n, True) for n in numbers
    ]
    write(store, persist(3, finished=[final(n) for n in numbers]))
    assert list(chain.from_iterable(store.recover(0, WALL))) == []
    assert len(find(store, *[f"id-{n}" for n in numbers])) == rows
    assert store.conflicts == 0


def test_added_changed_and_finished_within_one_group_ends_finished(
    store: SqliteStore, path: Path
) -> None:
    with held_up(path):
        store.write(persist(1))
        wait_for("the writer took the first", lambda: store._writes.qsize() == 0)
        store.write(persist(2, [new(1), new(2)]))
        store.write(persist(3, changed=[LiveRecord(n, 1, 0, 0, 0, True) for n in (1, 2)]))
        store.write(persist(4, changed=[LiveRecord(2, 2, 0, 0, 0, False)], finished=[final(1)]))
    wait_for_ticket(store, 4)
    (live,) = list(chain.from_iterable(store.recover(0, WALL)))
    assert (live.seq, live.attempt, live.begun) == (2, 2, False)
    assert [task.state for task in find(store, "id-1", "id-2")] == [SUCCEEDED, QUEUED]
    assert store.last_seq() >= 2


@ROWS_ONLY
def test_an_id_that_is_taken_is_reported_and_the_rest_is_written(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, persist(1, [new(1)]))
    twin = NewRecord(3, spec(1), WALL, "parser")
    with caplog.at_level(logging.ERROR, "musterd"):
        write(store, persist(2, [new(2), twin, new(4)], finished=[final(1)]))
    assert [task.seq for task in chain.from_iterable(store.recover(0, WALL))] == [2, 4]
    assert store.conflicts == 1
    assert "its seq or id is taken" in caplog.text
    write(store, persist(3, [new(5)]))
    assert store.problem() is None


# -- problems ---------------------------------------------------------------------------------


@contextmanager
def no_file_may_grow(limit_bytes: int) -> Iterator[None]:
    """Let the kernel refuse writes beyond this size: a real failing write(2), as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_written_waits_and_is_written_when_it_can(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, persist(1, [new(1)]))
    with no_file_may_grow(256 * 1024):
        store.write(persist(2, [new(2, args=b"x" * 1_000_000)]))
        wait_for("the problem is told", lambda: store.problem() is not None)
        store.write(persist(3, [new(3)]))
        assert store.completed() is None
        problem = store.problem()
        assert problem is not None
        assert "store.db" in problem
        assert [task.spec.id for task in find(store, "id-1", "id-2")] == ["id-1"]
    wait_for_ticket(store, 3)
    wait_for("the problem is over", lambda: store.problem() is None)
    assert [task.seq for task in chain.from_iterable(store.recover(0, WALL))] == [1, 2, 3]
    assert caplog.text.count("store fails") == 1


@pytest.mark.usefixtures("quick")
def test_a_group_that_fails_halfway_leaves_nothing_behind(store: SqliteStore, path: Path) -> None:
    write(store, persist(1, [new(1)]))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        for table in ("finished", "results"):
            other.execute(
                f"CREATE TRIGGER no_{table} BEFORE INSERT ON {table}"
                " BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        store.write(persist(2, [new(2)], finished=[final(1)]))
        wait_for("the group was refused", lambda: store.problem() is not None)
        assert [task.seq for task in chain.from_iterable(store.recover(0, WALL))] == [1]
        other.execute("DROP TRIGGER no_finished")
        other.execute("DROP TRIGGER no_results")
    wait_for_ticket(store, 2)
    assert [task.seq for task in chain.from_iterable(store.recover(0, WALL))] == [2]
    assert store.conflicts == 0


def test_close_says_when_something_could_not_be_written(path: Path) -> None:
    store = SqliteStore(path, "full")
    write(store, persist(1, [new(1)]))
    with no_file_may_grow(256 * 1024):
        store.write(persist(2, [new(2, args=b"x" * 1_000_000)]))
        with pytest.raises(StoreError, match="without the latest changes"):
            store.close()
    assert [task.seq for task in recovered(path)] == [1]


def test_close_writes_what_waits_and_leaves_one_file(path: Path) -> None:
    store = SqliteStore(path, "full")
    for ticket in range(1, 501):
        store.write(persist(ticket, [new(ticket)]))
    store.close()
    assert store.completed() == 500
    assert [entry.name for entry in path.parent.iterdir()] == ["store.db"]
    assert len(recovered(path)) == 500


def test_questions_are_refused_when_too_many_wait(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "READS_WAITING_MAX", 0)
    assert not store.ask(FindTasks(["id-1"]), "token")


def test_purges_and_trims_that_wait_are_limited(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PURGES_WAITING_MAX", 0)
    assert not store.ask(Purge(None, 0), "token")
    held = threading.Event()
    taken: list[tuple[int | None, int]] = []

    def hold(_writer: object, keep_ns: int | None, keep_max: int, _rows: int) -> int:
        taken.append((keep_ns, keep_max))
        assert held.wait(DEADLINE_SECONDS)
        return 0

    monkeypatch.setattr(store_writer.Writer, "trim_slice", hold)
    store.trim(None, 1)
    wait_for("the writer is at work", lambda: len(taken) == 1)
    for keep_max in range(2, 10):
        store.trim(None, keep_max)
    assert len(store._trims) == sqlite.TRIMS_WAITING_MAX
    held.set()
    wait_for("the trims are over", lambda: not store._trims)
    assert taken == [(None, 1), (None, 9)]


@ROWS_ONLY
def test_a_search_of_lists_has_an_end(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "LIST_ROWS_SEARCHED_MAX", 3)
    other = {"name": "browser.render"}
    ends = [final(1, FAILED, **other), final(2, **other), *(final(n) for n in range(3, 6))]
    write(store, persist(1, finished=ends))
    assert listed(store) == ["id-5", "id-4", "id-3"]
    assert listed(store, None, "browser") == []
    assert listed(store, FAILED) == ["id-1"]  # however long ago: tasks that succeeded do not count
    assert listed(store, FAILED, "browser") == ["id-1"]
    found: list[str] = []
    below, queries_needed = 0, 0
    while below or not queries_needed:
        assert store.ask(ListFinished(Selection(pool="browser"), 10, below=below), below)
        page = answer(store, below)
        found += [task.spec.id for task in page.tasks]
        below, queries_needed = page.below, queries_needed + 1
    assert (found, queries_needed) == (["id-2", "id-1"], 2)


def test_a_task_that_a_shut_site_refused_has_failed_and_is_no_dead_letter(store: Store) -> None:
    refused = Outcome("id-2", FAILED, b"", Failure(SHUT, SHUT_TYPE, "the breaker is open"), 0, 0)
    ends = [final(1, FAILED), FinalRecord(2, spec(2), WALL, refused, 0), final(3, FAILED)]
    write(store, persist(1, finished=ends))
    assert listed(store, FAILED) == ["id-3", "id-2", "id-1"]
    assert listed(store, FAILED, "parser", 2) == ["id-3", "id-2"]
    assert listed(store, FAILED, dead=True) == ["id-3", "id-1"]
    assert [task.state for task in find(store, "id-2")] == [FAILED]
    token = object()
    assert store.ask(Purge(["id-2"], WALL_NS_MAX), token)
    assert answer(store, token).ids == ["id-2"]
    assert listed(store, FAILED) == ["id-3", "id-1"]


def test_the_list_of_failures_uses_its_index(store: SqliteStore, path: Path) -> None:
    write(store, persist(1, finished=[final(1, FAILED)]))
    seen: list[str] = []
    store._reader.connection.set_trace_callback(seen.append)
    listed(store, FAILED)
    store._reader.connection.set_trace_callback(None)
    with closing(sqlite3.connect(path)) as other:
        plan = str(other.execute(f"EXPLAIN QUERY PLAN {seen[-1]}").fetchall())
    assert "finished_unwell" in plan
    assert "TEMP B-TREE" not in plan


def test_a_trim_takes_small_slices_and_goes_on_to_the_end(store: SqliteStore) -> None:
    rows = 2 * store_writer.SLICE_ROWS + 500
    write(store, persist(1, finished=[final(n) for n in range(1, rows + 1)]))
    store.trim(0, MANY)
    wait_for("all slices are done", lambda: listed(store) == [])


def test_a_trim_keeps_pace_with_what_ends_meanwhile(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trim once forgot only a thousand tasks after each commit: the store grew without end."""
    slice_, asked = store_writer.Writer.trim_slice, []

    def note(writer: store_writer.Writer, keep_ns: int, keep_max: int, rows: int) -> int:
        deleted = slice_(writer, keep_ns, keep_max, rows)
        asked.append((rows, deleted))
        return deleted

    monkeypatch.setattr(store_writer.Writer, "trim_slice", note)
    many = 3 * store_writer.SLICE_ROWS
    write(store, persist(1, finished=[final(n) for n in range(1, many + 1)]))
    store._trims.append((0, MANY))
    write(store, persist(2, finished=[final(n) for n in range(many + 1, 2 * many + 1)]))
    wait_for("all is forgotten", lambda: listed(store) == [])
    rows, deleted = asked[0]
    assert rows == sqlite.TRIM_PACE * many
    assert deleted > many


@pytest.mark.parametrize("dated", ["finished_at + 864000000000000", "20000000000"])
def test_results_of_a_wrong_clock_are_as_good_as_others(
    store: SqliteStore, path: Path, dated: str
) -> None:
    write(store, persist(1, finished=[final(1)]))
    with closing(sqlite3.connect(path)) as other:
        for table in ("finished", "results"):
            other.execute(f"UPDATE {table} SET finished_at = {dated}")  # in ten days, or in 1970
        other.commit()
    write(store, persist(2, finished=[final(2)]))
    store.trim(DAY, MANY)
    wait_for("the trim is over", lambda: not store._trims)
    assert listed(store) == ["id-2", "id-1"], "it is as good as the other, and dated like it"
    store.trim(0, MANY)
    wait_for("they are forgotten together", lambda: listed(store) == [])


def test_without_a_time_to_keep_only_the_number_counts(any_store: Store) -> None:
    for n in range(1, 4):
        write(any_store, persist(n, finished=[final(n)]))
    write(any_store, Persist(4, [], [], [], [Fact("state", "short", b"x", 1)]))
    any_store.trim(None, MANY)
    any_store.trim(None, 2)
    wait_for("the oldest is forgotten", lambda: len(listed(any_store)) == 2)
    assert listed(any_store) == ["id-3", "id-2"]
    if isinstance(any_store, SqliteStore):
        wait_for("the trim is over", lambda: not any_store._trims)
        with closing(sqlite3.connect(any_store._path)) as other:
            assert other.execute("SELECT key FROM facts").fetchall() == [("short",)]
    else:
        assert isinstance(any_store, MemoryStore)
        assert list(any_store._facts) == [("state", "short")]


def test_a_clock_that_was_set_back_hides_no_task(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, persist(1, [new(n) for n in range(1, 20)]))
    monkeypatch.setattr(task_batches, "latest_id", lambda: "0")  # as if in 1970
    assert [task.spec.id for task in find(store, "id-1", "id-9")] == ["id-1", "id-9"]
    store.ask(ReadQueued(["id-1", "id-9"]), "page")
    page = answer(store, "page")
    assert page.tasks.seqs == [1, 9]  # type: ignore[attr-defined]


# -- the file ---------------------------------------------------------------------------------


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    path.touch(0o666)
    with reopened(path) as store:
        write(store, persist(1, [new(1)]))
        for entry in path.parent.iterdir():
            assert stat.S_IMODE(entry.stat().st_mode) == 0o600, entry


def test_two_daemons_cannot_use_one_store(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreError, match="in use by another daemon"):
        SqliteStore(path, "full")
    write(store, persist(1, [new(1)]))


def test_the_database_of_another_program_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE cookies (name)")
    content = path.read_bytes()
    with pytest.raises(StoreError, match="of another program"):
        SqliteStore(path, "full")
    assert path.read_bytes() == content


def test_a_directory_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"state_dir"):
        SqliteStore(tmp_path / "none" / "store.db", "full")


@pytest.mark.parametrize(("durability", "level"), [("full", 2), ("normal", 1)])
def test_durability_decides_about_fsync(path: Path, durability: str, level: int) -> None:
    with closing(SqliteStore(path, durability)) as store:
        assert store._writer._connection.execute("PRAGMA synchronous").fetchone() == (level,)
        assert store._writer._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# -- queued tasks that are only on disk -------------------------------------------------------


def read(store: Store, *ids: str) -> Page:
    token = object()
    assert store.ask(ReadQueued(list(ids)), token)
    page = answer(store, token)
    assert isinstance(page, Page)
    return page


def test_queued_tasks_are_read_back_as_they_were_written(any_store: Store) -> None:
    specs = [spec(1, args=b"\x00,;' \xff"), spec(2, priority=3, target="ж.example"), spec(3)]
    added = [NewRecord(number, each, WALL, "noop") for number, each in enumerate(specs, 1)]
    write(any_store, persist(1, added))
    page = read(any_store, specs[2].id, "unheard-of", specs[0].id, specs[1].id)
    assert page.unread == []
    tasks = page.tasks
    assert sorted(zip(tasks.seqs, tasks.submits_wall_ns, strict=True)) == [
        (number, WALL) for number in (1, 2, 3)
    ]
    assert dict(zip(tasks.seqs, tasks.specs, strict=True)) == dict(enumerate(specs, 1))
    assert read(any_store).tasks == OnDisk()


@ROWS_ONLY
def test_a_page_of_large_tasks_is_cut(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_BYTES_MAX", 2 * SHORT_BYTES_MAX)
    specs = [spec(number, args=b"x" * SHORT_BYTES_MAX) for number in range(1, 7)]
    added = [NewRecord(number, each, WALL, "noop") for number, each in enumerate(specs, 1)]
    write(store, persist(1, added))
    ids = [each.id for each in specs]
    seen: list[str] = []
    while ids:
        page = read(store, *ids)
        assert 0 < len(page.tasks.specs) <= 3, "a page of at least one task, and of not much more"
        seen += [spec.id for spec in page.tasks.specs]
        ids = page.unread
    assert seen == [each.id for each in specs]


@ROWS_ONLY
def test_long_and_unreadable_tasks_do_not_hide_the_others_of_their_page(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [10, SHORT_BYTES_MAX, 20, 30, SHORT_BYTES_MAX * 3]
    specs = [spec(number, args=b"x" * size) for number, size in enumerate(sizes, 1)]
    with reopened(path) as store:
        added = [NewRecord(number, each, WALL, "noop") for number, each in enumerate(specs, 1)]
        write(store, persist(1, added))
        ids = [each.id for each in specs]
        page = read(store, *ids)
        assert sorted(page.tasks.seqs) == [1, 2, 3, 4, 5]
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE live SET spec = substr(spec, 1, length(spec) - 1) WHERE seq = 3")
        page = read(store, *ids)
    assert sorted(page.tasks.seqs) == [1, 2, 4, 5]
    assert {spec.id: spec for spec in page.tasks.specs}[ids[3]] == specs[3]
    assert not page.unread
    assert "cannot be read" in caplog.text


def test_the_newest_unfinished_tasks_are_listed_first(any_store: Store) -> None:
    pools = {n: "noop" if n % 2 else "other" for n in range(1, 6)}
    added = [NewRecord(n, spec(n, name=f"{pool}.run"), WALL, pool) for n, pool in pools.items()]
    write(any_store, persist(1, added))

    def ids(pool: str | None, limit: int) -> list[int]:
        token = object()
        assert any_store.ask(ListLive(Selection(pool=pool or ""), limit), token)
        return [task.seq for task in answer(any_store, token).tasks]

    assert ids(None, 3) == [5, 4, 3]
    assert ids("noop", 2) == [5, 3]
    assert ids("nowhere", 2) == []


def test_recovery_brings_pages_of_a_bounded_size(path: Path) -> None:
    with reopened(path) as store:
        write(store, persist(1, [NewRecord(n, spec(n), WALL, "noop") for n in range(1, 2501)]))
        assert store.unfinished() == 2500
        pages = list(store.recover(0, WALL))
    assert [len(page) for page in pages] == [1000, 1000, 500]
    assert [task.seq for page in pages for task in page] == list(range(1, 2501))
