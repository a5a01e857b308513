"""Requests of clients: submits, resends, watches; and recovery."""

import sys
from typing import Any

import msgspec

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import CRITICAL, HIGH, LOW, Rejection, TaskDeclaration, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.pool import ROUTES_MAX
from musterd.supervisor.core.model.task import WATCHERS_MAX
from support.core import Muster, of

PEER, OTHER = b"client", b"other"


def spec(id_: str = "t", name: str = "p.x", **fields: Any) -> TaskSpec:
    return TaskSpec(id_, name, b"", **fields)


def rejections(answer: list[Any]) -> list[Rejection]:
    return [each for ack in of(actions.Acknowledge, answer) for each in ack.rejected]


def told(answer: list[Any]) -> list[tuple[bytes, str]]:
    return [(each.peer, one.id) for each in of(actions.Deliver, answer) for one in each.outcomes]


def recovered(id_: str = "t", **fields: Any) -> events.Recovered:
    plain = events.Recovered(1, spec(id_), 0, 0, 0, 0, 0, 0, begun=False)
    return msgspec.structs.replace(plain, **fields)


# -- submits ----------------------------------------------------------------------------------


def test_a_submit_runs_at_once_and_is_acknowledged_after_its_commit(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.disk_works = False
    assigned, page = m.submit(spec())
    assert [lease.id for lease in assigned.leases] == ["t"]
    assert page == actions.Persist(1, [actions.NewRecord(1, spec(), 10**18, "p")], [], [])
    (ended,) = m.complete(1, assigned.leases[0].lease)  # no client is told yet
    assert [final.outcome.id for final in ended.finished] == ["t"]
    assert m.tell(events.Persisted(1)) == [actions.Acknowledge(PEER, 1, [])]
    assert told(m.commit()) == [(PEER, "t")]


def test_a_small_task_that_runs_at_once_is_written_with_its_end(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.disk_works = False

    def patience() -> bool:
        (page,) = of(actions.Persist, m.submit(spec(f"t{m.ticket}")))
        return bool(page.patient)

    assert not patience()  # the run time of `x` is not known yet
    m.complete(1, 1, run_ns=10_000)
    assert patience()
    m.complete(1, 2, run_ns=10_000_000)
    assert not patience()
    m.complete(1, 3, run_ns=1)
    m.tell(events.PauseRequested((("p", -1),)))
    assert not patience()  # the task waits for its turn


def test_what_nobody_waits_for_runs_after_its_commit(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.disk_works = False
    assert of(actions.AssignLeases, m.submit(spec(), peer=b"")) == []
    assert len(of(actions.AssignLeases, m.commit())) == 1


def test_tasks_of_a_pool_keep_their_order_where_one_waits_for_the_disk(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.disk_works = False
    m.submit(spec("own"), peer=b"")  # waits for the disk
    assert of(actions.AssignLeases, m.submit(spec("behind"))) == []
    (assigned,) = of(actions.AssignLeases, m.commit())
    assert [lease.id for lease in assigned.leases] == ["own"]
    (assigned,) = of(actions.AssignLeases, m.complete(1, assigned.leases[0].lease))
    assert [lease.id for lease in assigned.leases] == ["behind"]
    (assigned,) = of(actions.AssignLeases, m.complete(1, assigned.leases[0].lease)) or [None]
    assert assigned is None
    assert len(of(actions.AssignLeases, m.submit(spec("early")))) == 1  # none waits for the disk


def test_what_has_its_time_to_come_or_to_go_waits_for_the_disk(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.disk_works = False
    assert of(actions.AssignLeases, m.submit(spec(expires_ns=SECOND_NS))) == []
    assert len(of(actions.AssignLeases, m.commit())) == 1


def test_an_unknown_task_is_refused_with_what_there_is(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    pool, method = rejections(m.submit(spec("a", "nowhere.x"), spec("b", "p.absent")))
    assert (pool.code, method.code) == ("UnknownTask", "UnknownTask")
    assert "no pool 'nowhere' (pools: p)" in pool.message
    assert "it has: x, y" in method.message
    assert m.fleet.tasks == {}


def test_every_name_is_taken_until_the_class_is_loaded(muster: type[Muster]) -> None:
    m = muster()
    assert rejections(m.submit(spec("a", "p.perhaps"))) == []
    m.start()
    assert [each.code for each in rejections(m.submit(spec("b", "p.perhaps")))] == ["UnknownTask"]


def test_made_up_names_are_not_remembered_without_end(muster: type[Muster]) -> None:
    m = muster()
    for number in range(ROUTES_MAX + 50):
        assert rejections(m.submit(spec(f"t{number}", f"p.name{number}"))) == []
    assert len(m.fleet.pools["p"].routes) == ROUTES_MAX


def test_what_the_class_declares_holds_for_tasks_submitted_before(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec())
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", (TaskDeclaration("x", 7 * SECOND_NS, 9),)))
    (assigned,) = of(actions.AssignLeases, m.bring_up(1))
    assert assigned.leases[0].timeout_ns == 7 * SECOND_NS
    assert m.fleet.tasks["t"].max_retries == 9


def test_a_full_queue_refuses_but_keeps_places_for_the_urgent(muster: type[Muster]) -> None:
    m = muster(queue_size=100)
    answer = m.submit(*[spec(f"low{number}", priority=LOW) for number in range(100)])
    refused = rejections(answer)
    assert [each.id for each in refused] == [f"low{number}" for number in range(95, 100)]
    assert {each.code for each in refused} == {"QueueFull"}
    assert "holds 95 of 100 tasks" in refused[0].message
    assert refused[0].retry_after_ns > 0
    answer = m.submit(*[spec(f"high{number}", priority=HIGH) for number in range(10)])
    assert len(rejections(answer)) == 7
    answer = m.submit(*[spec(f"critical{number}", priority=CRITICAL) for number in range(10)])
    assert len(rejections(answer)) == 8
    assert m.fleet.pools["p"].held == 100


def test_what_the_shell_refused_is_passed_on(muster: type[Muster]) -> None:
    m = muster()
    refused = Rejection("big", "InvalidTask", "too big")
    answer = m.tell(events.TasksSubmitted(PEER, 1, [], 0, False, [refused]))
    assert answer == [actions.Acknowledge(PEER, 1, [refused])]


# -- resends ----------------------------------------------------------------------------------


def test_the_same_submit_twice_is_one_task_and_both_are_told(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    assert of(actions.Persist, m.submit(spec(), peer=OTHER)) == []
    assert told(m.complete(1, 1)) == [(PEER, "t"), (OTHER, "t")]


def test_a_resend_is_not_acknowledged_before_the_first_is_on_disk(muster: type[Muster]) -> None:
    m = muster()
    m.disk_works = False
    m.submit(spec())
    assert m.submit(spec(), peer=OTHER) == []
    assert m.commit() == [actions.Acknowledge(PEER, 1, []), actions.Acknowledge(OTHER, 2, [])]


def test_another_body_under_a_known_id_is_refused(muster: type[Muster]) -> None:
    m = muster()
    m.submit(spec())
    (refused,) = rejections(m.submit(spec(priority=LOW)))
    assert refused.code == "InvalidTask"
    assert "in use" in refused.message


def test_a_resend_of_a_finished_task_is_answered_from_the_store(muster: type[Muster]) -> None:
    m = muster()
    (question,) = m.submit(spec("old"), spec("new"), resend=True)
    assert isinstance(question, actions.CheckResent)
    answer = m.tell(events.ResendChecked(question.submitted, frozenset({"old"})))
    assert of(actions.LookUp, answer) == [actions.LookUp(PEER, ["old"])]
    assert list(m.fleet.tasks) == ["new"]


def test_another_body_under_an_id_of_the_store_is_refused_and_the_others_are_taken(
    muster: type[Muster],
) -> None:
    m = muster()
    (question,) = m.submit(spec("old", priority=LOW), spec("new"), resend=True)
    stored = {"old": spec("old")}
    checked = events.ResendChecked(question.submitted, frozenset({"old"}), frozenset(), stored)
    answer = m.tell(checked)
    (refused,) = rejections(answer)
    assert (refused.id, refused.code) == ("old", "InvalidTask")
    assert "in use" in refused.message
    assert of(actions.LookUp, answer) == [], "the result is another task's"
    assert list(m.fleet.tasks) == ["new"]
    assert m.fleet._state.asked == {}


def test_a_resend_that_was_refused_in_part_before_the_store_looked(
    muster: type[Muster],
) -> None:
    """The shell refuses a task that gives a secret away; the store is not asked about that task."""
    m = muster()
    refused = Rejection("secret", "InvalidTask", "it is one")
    (question,) = m.tell(
        events.TasksSubmitted(PEER, 1, [spec("new")], 10**18, True, rejected=[refused])
    )
    m.tell(events.ResendChecked(question.submitted, frozenset()))
    assert list(m.fleet.tasks) == ["new"]
    assert m.fleet._state.asked == {}


def test_a_task_that_ends_while_the_store_is_asked_is_not_run_again(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    (question,) = m.submit(spec(), peer=OTHER, resend=True)
    (again,) = m.submit(spec(), peer=OTHER, resend=True)
    m.complete(1, 1)
    for each in (question, again):
        answer = m.tell(events.ResendChecked(each.submitted, frozenset()))
        assert of(actions.Persist, answer) == []
        assert of(actions.LookUp, answer) == [actions.LookUp(OTHER, ["t"])]
    assert m.fleet._state.asked == {}
    assert m.fleet._state.ended_since == {}


def test_a_resend_of_a_task_that_is_being_written_is_not_kept(muster: type[Muster]) -> None:
    """While the disk is slow, clients may resend the task and all its arguments many times."""
    m = muster()
    m.disk_works = False
    size = 10_000
    m.submit(TaskSpec("t", "p.x", bytes(size)))
    repeated = bytes(bytearray(size))
    held = sys.getrefcount(repeated)
    (question,) = m.submit(TaskSpec("t", "p.x", repeated), peer=OTHER, resend=True)
    assert not of(
        actions.Acknowledge, m.tell(events.ResendChecked(question.submitted, frozenset()))
    )
    del question
    assert sys.getrefcount(repeated) == held
    assert actions.Acknowledge(OTHER, 2, []) in m.commit()


# -- watching ---------------------------------------------------------------------------------


def test_a_watcher_is_told_and_the_unknown_is_looked_up(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    answer = m.tell(events.TasksWatched(OTHER, ["t", "gone"]))
    assert answer == [actions.LookUp(OTHER, ["gone"])]
    assert told(m.complete(1, 1)) == [(PEER, "t"), (OTHER, "t")]


def test_a_lost_client_is_told_nothing_more(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("a"), spec("b"))
    m.tell(events.TasksWatched(OTHER, ["a", "b"]))
    assert m.tell(events.PeerLost(PEER)) == []
    assert told(m.complete(1, 1)) == [(OTHER, "a")]
    m.tell(events.PeerLost(OTHER))
    assert told(m.complete(1, 2)) == []


def test_only_so_many_connections_wait_for_one_task(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec())
    peers = [b"%d" % number for number in range(WATCHERS_MAX + 1)]
    for peer in (*peers[:2], peers[0], *peers[2:]):  # the first peer asks twice
        m.tell(events.TasksWatched(peer, ["t"]))
    assert {peer for peer, _ in told(m.complete(1, 1))} == {PEER, *peers} - {peers[1]}


def test_cancelling_a_task_on_its_way_to_the_disk_ends_it_there(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.disk_works = False
    m.submit(spec(expires_ns=SECOND_NS))  # its expiry makes the task wait for the disk
    (noted,) = m.tell(events.CancelRequested(["t", "unknown"]))
    assert [(fact.kind, fact.key) for fact in noted.facts] == [("cancel", "t")]
    page, acknowledged = m.commit()
    assert isinstance(acknowledged, actions.Acknowledge)
    assert [final.outcome.state for final in page.finished] == ["cancelled"]


def test_a_task_that_is_queued_before_it_is_on_disk_ends_behind_its_submit(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.disk_works = False
    m.submit(spec("runs"), spec("queued"))
    (page,) = m.tell(events.CancelRequested(["queued"]))
    assert (page.ticket, [final.outcome.state for final in page.finished]) == (2, ["cancelled"])
    assert of(actions.Acknowledge, m.tell(events.Persisted(1))) == [
        actions.Acknowledge(PEER, 1, [])
    ]
    assert told(m.commit()) == [(PEER, "queued")]


def test_a_cancel_is_answered_when_nothing_can_undo_it(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(spec("runs"), spec("queued"))
    m.disk_works = False
    answer = m.tell(events.CancelRequested(["runs", "queued", "gone"], OTHER, 7))
    (page,) = of(actions.Persist, answer)
    assert [fact.key for fact in page.facts] == ["runs"]
    assert [final.outcome.id for final in page.finished] == ["queued"]
    assert of(actions.Acknowledge, answer) == []
    assert of(actions.Acknowledge, m.commit()) == [actions.Acknowledge(OTHER, 7, [])]
    # The end of the task removes the note.
    (page,) = of(actions.Persist, m.fail(1, 1, "cancel"))
    assert [(fact.key, fact.value) for fact in page.facts] == [("runs", None)]


def test_a_cancel_of_nothing_is_answered_at_once(muster: type[Muster]) -> None:
    m = muster()
    assert m.tell(events.CancelRequested(["gone"], OTHER, 7)) == [actions.Acknowledge(OTHER, 7, [])]


# -- recovery ---------------------------------------------------------------------------------


def test_recovered_tasks_run_again_in_their_order(muster: type[Muster]) -> None:
    m = muster()
    tasks = [recovered(f"t{number}", seq=number) for number in range(1, 4)]
    assert m.tell(events.TasksRecovered(tasks)) == []
    (assigned,) = of(actions.AssignLeases, m.start())
    assert [lease.id for lease in assigned.leases] == ["t1"]
    assert m.fleet.pools["p"].live == 3


def test_a_recovered_task_waits_for_its_time(muster: type[Muster]) -> None:
    m = muster()
    m.tell(events.TasksRecovered([recovered(ready_ns=m.now_ns + SECOND_NS)]))
    assert of(actions.AssignLeases, m.start()) == []
    assert of(actions.AssignLeases, m.wait(SECOND_NS)) != []


def test_a_task_that_expired_while_the_daemon_was_down_never_runs(muster: type[Muster]) -> None:
    m = muster()
    (page,) = m.tell(events.TasksRecovered([recovered(expires_at_ns=m.now_ns)]))
    assert [final.outcome.state for final in page.finished] == ["expired"]
    assert of(actions.AssignLeases, m.start()) == []


def test_a_run_cut_short_by_the_daemons_death_is_a_crash_and_no_attempt(
    muster: type[Muster],
) -> None:
    m = muster(max_retries=0)
    (page,) = m.tell(events.TasksRecovered([recovered(attempt=1, begun=True)]))
    assert page.changed == [actions.LiveRecord(1, 0, 1, 0, 0, False)]
    (assigned,) = of(actions.AssignLeases, m.start())
    assert assigned.leases[0].attempt == 1


def test_a_task_that_ran_each_time_something_died_is_quarantined(muster: type[Muster]) -> None:
    m = muster()
    report, page = m.tell(events.TasksRecovered([recovered(attempt=1, crashes=2, begun=True)]))
    assert (report.event, report.attempt) == ("task.quarantined", 3)
    (final,) = page.finished
    assert final.outcome.attempts == 3
    assert (final.outcome.state, final.crashes) == ("failed", 3)
    assert final.outcome.failure.kind == "crash"
    assert of(actions.AssignLeases, m.start()) == []


def test_a_task_that_was_cancelled_before_the_daemon_died_does_not_run_again(
    muster: type[Muster],
) -> None:
    m = muster()
    assert "cancel" in m.fleet.fact_kinds
    m.tell(events.FactsRecovered("cancel", [("t", b"")]))
    tasks = [recovered(attempt=1, begun=True), recovered("other", seq=2)]
    (page,) = m.tell(events.TasksRecovered(tasks))
    assert [final.outcome.state for final in page.finished] == ["cancelled"]
    assert [(fact.key, fact.value) for fact in page.facts] == [("t", None)]
    (assigned,) = of(actions.AssignLeases, m.start())
    assert [lease.id for lease in assigned.leases] == ["other"]


def test_a_task_without_a_pool_is_reported_and_stays_on_disk(muster: type[Muster]) -> None:
    m = muster()
    lost = msgspec.structs.replace(recovered(), spec=spec(name="gone.x"))
    (report,) = m.tell(events.TasksRecovered([lost]))
    assert report.event == "task.stranded"
    assert "gone.x" in report.reason
    assert m.fleet.tasks == {}


def test_numbers_go_on_after_those_on_disk(muster: type[Muster]) -> None:
    from random import Random

    from musterd.supervisor.core.fleet import Fleet

    m = muster()
    m.fleet = Fleet(m.policy, Random(0), last_seq=41)
    (page, _) = m.submit(spec())
    assert page.added[0].seq == 42
