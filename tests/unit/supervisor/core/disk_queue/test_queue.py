"""The disk queue: queued tasks beyond a number stay on disk, and are read back in order."""

from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import CANCELLED, CRITICAL, LOW, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model import on_disk as on_disk_tasks
from musterd.supervisor.core.tasks import lost_peers
from support.core import Muster

PEER, OTHER = b"client", b"other"


class OnDisk:
    """A fleet that keeps few tasks in memory, and a disk that remembers all of them."""

    def __init__(self, muster: type[Muster], resident: int = 0, **pool: Any) -> None:
        self.m = muster(resident_tasks=resident, **pool)
        self.rows: dict[str, events.Recovered] = {}
        self.reads: list[actions.ReadDiskTasks] = []
        self.out: list[Any] = []

    def heard(self, answer: list[Any]) -> list[Any]:
        for each in answer:
            if isinstance(each, actions.Persist):
                for new in each.news():
                    self.rows[new.spec.id] = events.Recovered(
                        new.seq, new.spec, new.submitted_wall_ns, 0, 0, 0, 0, 0, begun=False
                    )
                for final in each.finished:
                    self.rows.pop(final.spec.id, None)
            elif isinstance(each, actions.ReadDiskTasks):
                self.reads.append(each)
        self.out += answer
        return answer

    def submit(self, *specs: TaskSpec, **how: Any) -> list[Any]:
        return self.heard(self.m.submit(*specs, **how))

    def fill(self, count: int, **fields: Any) -> list[str]:
        ids = [f"t{number:03}" for number in range(count)]
        self.submit(*(TaskSpec(id_, "p.x", b"", **fields) for id_ in ids))
        return ids

    def disk(self, unread: int = 0) -> list[Any]:
        """Let the disk answer all but the last `unread` tasks of each page."""
        answer: list[Any] = []
        reads, self.reads = self.reads, []
        for read in reads:
            kept = len(read.ids) - min(unread, len(read.ids) - 1)
            tasks = [self.rows[id_] for id_ in read.ids[:kept] if id_ in self.rows]
            found = on_disk_tasks.OnDisk()
            for task in tasks:
                found.add(task.seq, task.spec, task.submitted_wall_ns)
            event = events.DiskTasksRead(read.ticket, found, read.ids[kept:])
            answer += self.heard(self.m.tell(event))
        return answer

    def leased(self) -> list[str]:
        leases = [each for each in self.out if isinstance(each, actions.AssignLeases)]
        return [lease.id for each in leases for lease in each.leases]

    def run_all(self) -> list[str]:
        """Complete each lease at once; return the ids in the order of the leases."""
        while self.m.fleet.tasks or self.m.fleet.on_disk:
            self.disk()
            for slot in self.m.slots:
                if slot.leases:
                    self.heard(self.m.complete(slot.worker, *slot.leases))
        return self.leased()

    @property
    def in_memory(self) -> int:
        return len(self.m.fleet.tasks)


@pytest.fixture
def on_disk(muster: type[Muster]) -> OnDisk:
    fleet = OnDisk(muster)
    fleet.m.start()
    return fleet


def test_what_does_not_fit_into_memory_is_on_disk_alone(on_disk: OnDisk) -> None:
    on_disk.fill(100)
    assert on_disk.in_memory < 10
    assert len(on_disk.m.fleet.on_disk) == 100 - on_disk.in_memory
    pool = on_disk.m.fleet.pools["p"]
    assert pool.held == 99  # one runs, the others are queued
    assert pool.queue.size == 99


def test_all_run_in_the_order_they_came(on_disk: OnDisk) -> None:
    assert on_disk.run_all() == []
    ids = on_disk.fill(300)
    assert on_disk.run_all() == ids


def test_order_is_kept_when_a_page_is_too_large(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    while on_disk.m.fleet.on_disk:
        on_disk.disk(unread=3)
        for slot in on_disk.m.slots:
            if slot.leases:
                on_disk.heard(on_disk.m.complete(slot.worker, *slot.leases))
    assert on_disk.run_all() == ids


def test_what_must_stay_in_memory_keeps_its_place(on_disk: OnDisk) -> None:
    """A task with a key or an expiry stays: the disk could not tell of it in time."""
    specs = [
        TaskSpec(
            f"t{number:02}",
            "p.x",
            b"",
            key=f"key{number}" if number % 7 == 3 else "",
            expires_ns=1000 * SECOND_NS if number % 7 == 5 else 0,
        )
        for number in range(60)
    ]
    on_disk.submit(*specs)
    assert all(spec.id in on_disk.m.fleet.tasks for spec in specs if spec.key or spec.expires_ns)
    assert on_disk.run_all() == [spec.id for spec in specs]


def test_an_urgent_task_goes_before_those_on_disk(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50, priority=LOW)
    on_disk.submit(TaskSpec("urgent", "p.x", b"", priority=CRITICAL))
    assert on_disk.run_all() == [ids[0], "urgent", *ids[1:]]


def test_a_new_site_does_not_wait_for_the_disk(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    on_disk.submit(TaskSpec("new", "p.x", b"", target="new.example"))
    assert "new" in on_disk.m.fleet.tasks
    assert on_disk.run_all()[:3] == [ids[0], ids[1], "new"]


def test_a_lane_that_waits_for_the_disk_holds_up_no_other(on_disk: OnDisk) -> None:
    on_disk.fill(50, target="a.example")
    on_disk.submit(*(TaskSpec(f"b{number}", "p.x", b"", target="b.example") for number in range(3)))
    for _ in range(8):  # the disk does not answer
        on_disk.heard(on_disk.m.complete(1, *on_disk.m.slots[0].leases))
    assert {"b0", "b1", "b2"} <= set(on_disk.leased())
    assert len(on_disk.run_all()) == 53


def test_a_task_on_disk_is_cancelled(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    assert ids[40] in on_disk.m.fleet.on_disk
    assert on_disk.m.fleet.alive(ids[40])
    on_disk.heard(on_disk.m.tell(events.CancelRequested([ids[40]])))
    answer = on_disk.disk()
    (told,) = [each for each in answer if isinstance(each, actions.Deliver)]
    assert [(each.id, each.state) for each in told.outcomes] == [(ids[40], CANCELLED)]
    assert not on_disk.m.fleet.alive(ids[40])
    assert on_disk.run_all() == [id_ for id_ in ids if id_ != ids[40]]


def test_all_tasks_on_disk_are_cancelled(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    on_disk.heard(on_disk.m.tell(events.CancelRequested(ids[1:])))
    while on_disk.reads:
        on_disk.disk()
    assert list(on_disk.m.fleet.tasks) == ids[:1]
    assert not on_disk.m.fleet.on_disk
    assert on_disk.m.fleet.pools["p"].live == 1


def test_one_that_comes_to_its_turn_while_it_is_to_be_cancelled_is_cancelled(
    on_disk: OnDisk,
) -> None:
    ids = on_disk.fill(8)
    id_ = next(id_ for id_ in ids if id_ in on_disk.m.fleet.on_disk)
    on_disk.heard(on_disk.m.complete(1, 1))  # the next task is taken, and the next page ordered
    on_disk.heard(on_disk.m.tell(events.CancelRequested([id_])))
    cancel = next(read for read in on_disk.reads if read.ids == [id_])
    on_disk.reads.remove(cancel)
    on_disk.disk()  # the page comes before the answer about the cancelled task
    assert id_ in on_disk.m.fleet.tasks
    on_disk.reads.append(cancel)
    on_disk.disk()
    assert not on_disk.m.fleet.alive(id_)


def test_whoever_asks_for_a_task_on_disk_is_told_of_its_end(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    on_disk.heard(on_disk.m.tell(events.TasksWatched(OTHER, [ids[30]])))
    on_disk.run_all()
    told = [each for each in on_disk.out if isinstance(each, actions.Deliver)]
    assert ids[30] in [each.id for one in told if one.peer == OTHER for each in one.outcomes]
    mine = [each.id for one in told if one.peer == PEER for each in one.outcomes]
    assert sorted(mine) == ids


@pytest.mark.parametrize("portion", [1, 7, 10_000])
def test_who_is_gone_waits_for_nothing_on_disk(
    on_disk: OnDisk, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_peers, "PORTION", portion)
    ids = on_disk.fill(50)
    on_disk.heard(on_disk.m.tell(events.TasksWatched(OTHER, ids)))
    on_disk.heard(on_disk.m.tell(events.TasksWatched(b"third", ids[40:])))
    for peer in (PEER, b"third"):  # the second goes while the disk looks for the tasks of the first
        on_disk.heard(on_disk.m.tell(events.PeerLost(peer)))
    on_disk.heard(on_disk.m.wait(SECOND_NS))
    state, disk_queue = on_disk.m.fleet._state, on_disk.m.fleet._disk_queue
    waiting = {
        peer for task in state.tasks.values() for peer in (task.peer, *(task.watchers or ()))
    }
    waiting |= {place.peer for place in disk_queue.places.values()}
    waiting |= {peer for peers in disk_queue.watchers.values() for peer in peers}
    assert waiting - {b""} == {OTHER}
    on_disk.m.fleet.validate()
    on_disk.run_all()
    told = [each for each in on_disk.out if isinstance(each, actions.Deliver)]
    assert sorted(each.id for one in told if one.peer == OTHER for each in one.outcomes) == ids
    assert {one.peer for one in told} == {OTHER}


def test_who_waits_for_a_task_that_is_being_written_after_its_submitter_is_gone(
    muster: type[Muster],
) -> None:
    on_disk = OnDisk(muster)
    on_disk.m.start()
    on_disk.m.disk_works = False
    ids = on_disk.fill(50)
    on_disk.heard(on_disk.m.tell(events.PeerLost(PEER)))
    on_disk.heard(on_disk.m.tell(events.TasksWatched(OTHER, ids)))
    assert not all(place.written for place in on_disk.m.fleet.on_disk.values())
    on_disk.m.disk_works = True
    on_disk.heard(on_disk.m.commit())
    on_disk.run_all()
    told = [each for each in on_disk.out if isinstance(each, actions.Deliver)]
    assert sorted(each.id for one in told if one.peer == OTHER for each in one.outcomes) == ids


def test_a_submit_of_a_known_id_is_compared_with_the_disk(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    same = TaskSpec(ids[30], "p.x", b"")
    (question,) = on_disk.submit(same, peer=OTHER)
    assert isinstance(question, actions.CheckResent)
    asked = events.ResendChecked(question.submitted, frozenset(), frozenset())
    (again,) = on_disk.m.tell(asked)  # the store had looked before the task was written
    assert again == question
    checked = events.ResendChecked(question.submitted, frozenset(), frozenset([ids[30]]))
    (told,) = on_disk.m.tell(checked)
    assert told == actions.Acknowledge(OTHER, question.submitted.request, [])
    on_disk.run_all()
    told = [each for each in on_disk.out if isinstance(each, actions.Deliver)]
    assert ids[30] in [each.id for one in told if one.peer == OTHER for each in one.outcomes]


def test_a_retry_by_hand_of_a_task_on_disk_is_refused(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    (find,) = on_disk.m.tell(events.RetryRequested(PEER, 1, [ids[30]], 0))
    assert [each.code for each in find.rejected] == ["NotEnded"]


def test_a_task_that_cannot_be_read_is_reported_and_holds_up_nothing(on_disk: OnDisk) -> None:
    ids = on_disk.fill(50)
    del on_disk.rows[ids[20]]
    assert on_disk.run_all() == [id_ for id_ in ids if id_ != ids[20]]
    reports = [each for each in on_disk.out if isinstance(each, actions.Report)]
    assert [each.event for each in reports if ids[20] in each.reason] == ["task.unreadable"]
    assert on_disk.m.fleet.pools["p"].live == 0


def test_large_arguments_are_on_disk_too(muster: type[Muster]) -> None:
    on_disk = OnDisk(muster, resident=1000, resident_bytes=100_000)
    on_disk.m.start()
    ids = [f"t{number:02}" for number in range(50)]
    on_disk.submit(*(TaskSpec(id_, "p.x", b"x" * 10_000) for id_ in ids))
    assert 0 < on_disk.in_memory < 20
    assert on_disk.run_all() == ids
    assert on_disk.m.fleet.pools["p"].queue.bytes == 0


def test_after_a_restart_only_the_first_are_in_memory(muster: type[Muster]) -> None:
    on_disk = OnDisk(muster, resident=20)
    rows = [
        events.Recovered(n, TaskSpec(f"t{n:03}", "p.x", b""), 0, 0, 0, 0, 0, 0, begun=n == 2)
        for n in range(1, 201)
    ]
    on_disk.rows = {row.spec.id: row for row in rows}
    for start in range(0, 200, 50):
        page = rows[start : start + 50]
        on_disk.heard(on_disk.m.tell(events.TasksRecovered(page, more=True)))
    on_disk.heard(on_disk.m.tell(events.TasksRecovered([])))
    assert on_disk.in_memory < 30
    on_disk.heard(on_disk.m.start())
    ran = on_disk.run_all()
    assert ran[0] == "t002", "what ran when the daemon died goes first"
    assert ran[1:] == [row.spec.id for row in rows if row.spec.id != "t002"]
