"""Tasks that join the disk queue while they are being written."""

from typing import Any

import pytest

from musterd.ipc.wire.messages import CANCELLED, HIGH, NORMAL, QUEUE_FULL, SUCCEEDED, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.core.tasks import bulk
from musterd.supervisor.core.tasks.outage import PATIENCE_NS
from support.core import Muster, of

PEER, OTHER = b"client", b"other"
RESIDENT = 4
COUNT = 2 * bulk.RUN_MIN
LAST = f"t{COUNT - 1:02}"


def specs(first: int = 0, count: int = COUNT) -> list[TaskSpec]:
    return [TaskSpec(f"t{number:02}", "p.x", b"args") for number in range(first, first + count)]


class UnwrittenTasks:
    """A fleet that keeps few tasks in memory, with tasks that are being written."""

    def __init__(self, muster: type[Muster]) -> None:
        self.m = m = muster(resident_tasks=RESIDENT)
        m.start()
        m.tell(events.PauseRequested((("p", -1),)))
        m.disk_works = False
        self.answer = m.submit(*specs())
        self.ids = [id_ for id_, place in m.fleet.on_disk.items() if not place.written]

    @property
    def records(self) -> dict[str, actions.NewRecord]:
        return {
            new.spec.id: new for page in of(actions.Persist, self.answer) for new in page.news()
        }

    def read(self, question: actions.ReadDiskTasks) -> list[Any]:
        """Let the disk answer the question."""
        found = events.OnDisk()
        for new in map(self.records.__getitem__, question.ids):
            found.add(new.seq, new.spec, new.submitted_wall_ns)
        return list(self.m.tell(events.DiskTasksRead(question.ticket, found, [])))


@pytest.fixture
def unwritten(muster: type[Muster]) -> UnwrittenTasks:
    return UnwrittenTasks(muster)


def test_what_does_not_fit_into_memory_is_put_into_the_disk_queue_at_once(
    unwritten: UnwrittenTasks,
) -> None:
    m = unwritten.m
    assert list(m.fleet.tasks) == [spec.id for spec in specs()[:RESIDENT]]
    assert unwritten.ids == [spec.id for spec in specs()[RESIDENT:]]
    assert list(unwritten.records) == [spec.id for spec in specs()], "all are written"
    assert not of(actions.Acknowledge, unwritten.answer), "none is promised"
    assert of(actions.Acknowledge, m.commit())
    assert all(place.written for place in m.fleet.on_disk.values())


def test_it_is_not_read_before_it_is_there(unwritten: UnwrittenTasks) -> None:
    m = unwritten.m
    answer = m.tell(events.ResumeRequested((("p", -1),)))
    ran = []
    while leases := [lease for each in of(actions.AssignLeases, answer) for lease in each.leases]:
        ran += [lease.id for lease in leases]
        assert not of(actions.ReadDiskTasks, answer)
        answer = m.complete(1, *[lease.lease for lease in leases])
    assert len(ran) == RESIDENT
    (question,) = of(actions.ReadDiskTasks, m.commit())
    assert question.ids == unwritten.ids
    (first,) = of(actions.AssignLeases, unwritten.read(question))
    assert first.leases[0].id == unwritten.ids[0]


def test_those_that_come_next_stand_behind_it(unwritten: UnwrittenTasks) -> None:
    m = unwritten.m
    m.submit(*specs(COUNT))
    assert list(m.fleet.on_disk) == [spec.id for spec in specs(count=2 * COUNT)[RESIDENT:]]
    one = TaskSpec("single", "p.x", b"")
    m.submit(one)
    assert list(m.fleet.tasks)[-1] == "single", "it is not alike, and waits for the disk"
    m.submit(*specs(2 * COUNT))
    assert LAST.replace(str(COUNT - 1), str(2 * COUNT)) in m.fleet.tasks, "and these behind it"
    m.commit()
    assert list(m.fleet.on_disk)[-COUNT - 1] == "single"


def test_what_it_takes_in_memory_counts_until_it_is_on_disk(unwritten: UnwrittenTasks) -> None:
    queue = unwritten.m.fleet.pools["p"].queue
    before = queue.bytes
    unwritten.m.commit()
    assert before / COUNT == queue.bytes / RESIDENT


def test_a_cancel_waits_for_the_disk(unwritten: UnwrittenTasks) -> None:
    m = unwritten.m
    cancel = events.CancelRequested([LAST], PEER, 7)
    assert m.tell(cancel) == []
    page, question = of(actions.ReadDiskTasks, m.commit())
    assert sorted([page.ids, question.ids], key=len) == [[LAST], unwritten.ids]
    unwritten.read(min(page, question, key=lambda each: len(each.ids)))
    answer = m.commit()
    assert [each.state for one in of(actions.Deliver, answer) for each in one.outcomes] == [
        CANCELLED
    ]
    assert actions.Acknowledge(PEER, 7, []) in answer


def test_a_second_submit_of_it_waits_for_the_disk(unwritten: UnwrittenTasks) -> None:
    m = unwritten.m
    assert m.submit(specs()[-1], peer=OTHER) == []
    (question,) = of(actions.CheckResent, m.commit())
    checked = events.ResendChecked(question.submitted, frozenset(), frozenset([LAST]))
    (told,) = m.tell(checked)
    assert told == actions.Acknowledge(OTHER, question.submitted.request, [])


def test_a_second_submit_of_a_connection_that_is_over_waits_no_longer(
    unwritten: UnwrittenTasks,
) -> None:
    m = unwritten.m
    assert m.submit(specs()[-1], peer=OTHER) == []
    cancel = events.CancelRequested([LAST], PEER, 7)
    assert m.tell(cancel) == []
    (dropped,) = of(actions.DropRequest, m.tell(events.PeerLost(OTHER)))
    assert dropped.peer == OTHER
    assert not m.fleet._state.asked
    answer = m.commit()
    assert not of(actions.CheckResent, answer)
    assert of(actions.ReadDiskTasks, answer), "what others want of it is done"


def test_while_the_disk_fails_it_waits_as_others_do_and_is_refused(
    unwritten: UnwrittenTasks,
) -> None:
    m = unwritten.m
    m.tell(events.TasksWatched(OTHER, [LAST]))
    m.tell(events.StoreFailing("the disk is full"))
    assert not m.fleet.on_disk
    assert list(m.fleet.tasks)[-1] == LAST
    (withdraw,) = of(actions.Withdraw, m.wait(PATIENCE_NS))
    assert withdraw.seqs == [new.seq for new in unwritten.records.values()]
    answer = m.tell(events.TasksWithdrawn(withdraw.seqs))
    (ack,) = of(actions.Acknowledge, answer)
    assert [(each.id, each.code) for each in ack.rejected] == [
        (id_, QUEUE_FULL) for id_ in unwritten.records
    ]
    assert actions.LookUp(OTHER, [LAST]) in answer, "whoever waits for it hears that"
    assert not m.fleet.tasks
    assert not m.fleet.pools["p"].queue.bytes


def test_what_the_disk_has_after_all_runs_in_its_order(unwritten: UnwrittenTasks) -> None:
    m = unwritten.m
    m.tell(events.CancelRequested([LAST], PEER, 7))
    m.tell(events.StoreFailing("the disk is full"))
    assert m.fleet.tasks[LAST].cancelled, "it is a task again: that is heard"
    m.tell(events.StoreRecovered())
    answer = m.commit()
    assert of(actions.Acknowledge, answer)
    m.disk_works = True
    done = [each for one in of(actions.Deliver, answer) for each in one.outcomes]
    ran = []
    todo = m.tell(events.ResumeRequested((("p", -1),)))
    while todo:
        leases = [lease for each in of(actions.AssignLeases, todo) for lease in each.leases]
        ran += [lease.id for lease in leases]
        done += [each for one in of(actions.Deliver, todo) for each in one.outcomes]
        reads = of(actions.ReadDiskTasks, todo)
        todo = [each for read in reads for each in unwritten.read(read)]
        if leases:
            todo += m.complete(1, *[lease.lease for lease in leases])
    ids = [spec.id for spec in specs()]
    assert ran == ids[:-1]
    assert sorted((each.id, each.state) for each in done) == [
        *((id_, SUCCEEDED) for id_ in ids[:-1]),
        (LAST, CANCELLED),
    ]


def test_a_removed_pool_waits_until_it_is_on_disk(muster: type[Muster]) -> None:
    unwritten = UnwrittenTasks(muster)
    m = unwritten.m
    m.tell(events.PolicyChanged(FleetPolicy(pools=())))
    m.exit(1, code=0)
    assert "p" in m.fleet.pools
    m.commit()
    assert "p" not in m.fleet.pools
    assert m.fleet.stranded["p"] == COUNT


def test_all_of_a_submit_goes_to_the_disk_queue_where_memory_is_more_than_full(
    muster: type[Muster],
) -> None:
    m = muster(resident_tasks=8)
    m.start()
    m.tell(events.PauseRequested((("p", -1),)))
    for number in range(10):
        m.submit(TaskSpec(f"{number}", "p.x", b"", priority=NORMAL if number < 6 else HIGH))
    assert len(m.fleet.tasks) == 10, "a few of each lane are in memory, whatever else is there"
    m.submit(*specs())
    assert len(m.fleet.tasks) == 10
    assert list(m.fleet.on_disk) == [spec.id for spec in specs()]


def test_what_comes_back_undone_does_not_wait_for_the_disk(muster: type[Muster]) -> None:
    m = muster(resident_tasks=RESIDENT)
    m.start()
    m.disk_works = False
    answer = m.submit(*specs())
    (leases,) = of(actions.AssignLeases, answer)
    while m.fleet.pools["p"].queue.size:  # until the worker has all tasks in memory
        answer = m.complete(1, leases.leases[0].lease)
        (leases,) = of(actions.AssignLeases, answer)
    assert not of(actions.ReadDiskTasks, answer), "the others are not on disk yet"
    held = [lease.lease for lease in leases.leases]
    answer = m.exit(1, held[0]) + m.bring_up(2)
    (again,) = of(actions.AssignLeases, answer)
    assert [lease.id for lease in again.leases][:1] == [leases.leases[0].id]
