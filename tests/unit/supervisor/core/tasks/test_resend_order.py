"""Submits and cancellations of a client take effect in the order in which it sends them."""

from random import Random

import pytest
from msgspec import structs

from musterd.ipc.wire.messages import CANCELLED, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy
from musterd.supervisor.core.tasks.refusals import id_taken

PEER = b"peer"
SPEC = TaskSpec("one", "jobs.nap", b"\x80")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(FleetPolicy((PoolPolicy("jobs", 1),)), Random(1))


def persisted(out: list[actions.Action]) -> actions.Persist:
    (persist,) = [action for action in out if isinstance(action, actions.Persist)]
    return persist


def resent(request: int) -> events.TasksSubmitted:
    return events.TasksSubmitted(PEER, request, [SPEC], 0, resend=True)


def test_a_cancel_right_behind_a_resent_submit_is_not_forgotten(fleet: Fleet) -> None:
    submitted = resent(1)
    assert fleet.handle(1, submitted) == [actions.CheckResent(submitted)]
    fleet.handle(2, events.CancelRequested([SPEC.id]))  # the store has not answered yet
    page = persisted(fleet.handle(3, events.ResendChecked(submitted, frozenset())))
    assert [record.spec for record in page.added] == [SPEC]
    assert [record.outcome.state for record in page.finished] == [CANCELLED]
    fleet.validate()


def test_a_cancel_is_forgotten_with_the_last_question_about_its_task(fleet: Fleet) -> None:
    first, second = resent(1), resent(2)
    fleet.handle(1, first)
    fleet.handle(2, second)
    fleet.handle(3, events.CancelRequested([SPEC.id]))
    finished = frozenset([SPEC.id])
    for now_ns, submitted in ((4, first), (5, second)):
        out = fleet.handle(now_ns, events.ResendChecked(submitted, finished))
        assert actions.LookUp(PEER, [SPEC.id]) in out
    fresh = events.TasksSubmitted(PEER, 3, [SPEC], 0)
    added = persisted(fleet.handle(6, fresh))
    assert not any(
        isinstance(action, actions.Persist)
        for action in fleet.handle(7, events.Persisted(added.ticket))
    ), "an earlier cancel ended a later task"


def test_a_resend_that_the_store_cannot_answer_is_dropped_with_its_connection(fleet: Fleet) -> None:
    submitted = resent(1)
    fleet.handle(1, submitted)
    (dropped,) = fleet.handle(2, events.ResendUnknown(submitted))
    assert isinstance(dropped, actions.DropRequest)
    assert (dropped.peer, dropped.request) == (PEER, 1)
    assert "store cannot be read" in dropped.reason
    assert not fleet.handle(3, events.CancelRequested([SPEC.id])), "it still waits for the store"


def test_a_caller_of_ours_is_refused_what_the_store_cannot_answer(fleet: Fleet) -> None:
    submitted = resent(0)
    fleet.handle(1, submitted)
    (answer,) = fleet.handle(2, events.ResendUnknown(submitted))
    assert isinstance(answer, actions.Acknowledge)
    (rejection,) = answer.rejected
    assert rejection.id == SPEC.id
    assert "accepted before is not known" in rejection.message


def test_a_task_with_a_stolen_id_leaves_nothing_behind(fleet: Fleet) -> None:
    """Otherwise the true task could not be retried by hand after it has failed."""
    submitted = resent(1)
    fleet.handle(1, submitted)
    stolen = structs.replace(submitted, tasks=[], rejected=[id_taken(SPEC)])
    fleet.handle(2, events.ResendChecked(stolen, frozenset()))
    retry = events.RetryRequested(b"c1", 0, [SPEC.id], 0)
    fleet.handle(3, retry)
    fleet.handle(4, events.EndedFound(retry, [SPEC.id], [], []))
    assert not fleet._state.asked
