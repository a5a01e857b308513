"""Answers that come later: a token for each request to the core, and waits for the fleet."""

from itertools import count
from typing import Any

import pytest

from musterd.ipc.wire.messages import SUCCEEDED, Outcome, Rejection
from musterd.supervisor.api.rpc import FAILED, RpcError
from musterd.supervisor.control.answers import LaterAnswers

REFUSED = Rejection("t", "QueueFull", "no room")
OUTCOME = Outcome("t", SUCCEEDED, attempts=1)


class Caller:
    """A caller that waits under a token, and all that its command was told."""

    def __init__(self, answers: LaterAnswers, *, waits: bool = False) -> None:
        self.told: list[Any] = []
        self.answers = answers
        ended = self.told.append if waits else None
        self.token, self.pending = answers.begin(self.told.append, ended)
        self.pending.bind(self.told.append)


def test_each_request_has_its_own_token_and_only_its_caller_is_told() -> None:
    answers = LaterAnswers()
    first, second = Caller(answers), Caller(answers)
    answers.acknowledge(second.token, [REFUSED])
    assert (first.told, second.told) == ([], [[REFUSED]])
    assert first.token in answers
    assert second.token not in answers


def test_no_token_is_the_name_of_a_client() -> None:
    answers = LaterAnswers()
    names = {b"%d" % number for number in range(100)}  # as sockets/clients.py makes them
    assert not names & {Caller(answers).token for _ in range(100)}


def test_a_caller_that_waits_for_the_end_is_kept_until_then() -> None:
    caller = Caller(LaterAnswers(), waits=True)
    caller.answers.acknowledge(caller.token, [])
    assert caller.token in caller.answers
    caller.answers.deliver(caller.token, [OUTCOME])
    assert caller.told == [[], OUTCOME]
    assert caller.token not in caller.answers


def test_a_refusal_is_the_end_for_a_caller_that_waits() -> None:
    caller = Caller(LaterAnswers(), waits=True)
    caller.answers.acknowledge(caller.token, [REFUSED])
    assert caller.token not in caller.answers


def test_an_outcome_that_overtakes_the_acknowledgement_is_for_those_who_wait_alone() -> None:
    caller = Caller(LaterAnswers())
    caller.answers.deliver(caller.token, [OUTCOME])
    assert caller.told == []
    caller.answers.acknowledge(caller.token, [])
    assert caller.told == [[]]


def test_a_caller_that_goes_away_is_forgotten() -> None:
    caller = Caller(LaterAnswers(), waits=True)
    caller.pending.abandon()
    assert caller.token not in caller.answers
    caller.answers.fail(caller.token, RpcError(FAILED, "nobody hears this"))
    assert caller.told == []


@pytest.mark.parametrize("gone", [False, True])
def test_a_wait_is_asked_after_each_turn_until_it_answers_or_its_caller_is_gone(
    gone: bool,
) -> None:
    caller, turns = Caller(LaterAnswers()), count(1)
    asked: list[int] = []

    def attempt() -> bool:
        asked.append(next(turns))
        return len(asked) == 3

    caller.answers.wait(caller.pending, attempt)
    for turn in range(6):
        caller.answers.settle()
        if gone and turn == 1:
            caller.pending.abandon()
    assert asked == ([1, 2] if gone else [1, 2, 3])
