"""Requests to the store: refused while too many wait, and failed when no answer can come."""

from types import SimpleNamespace
from typing import Any

import pytest

from musterd.supervisor.api import rpc
from musterd.supervisor.control.commands.dispatch import Commands
from musterd.supervisor.core.model import actions
from musterd.supervisor.loop.perform import ActionRunner
from musterd.supervisor.store import requests
from musterd.supervisor.store.interface import (
    FindStranded,
    FindTasks,
    Query,
    StrandedTasks,
    Unanswered,
)
from musterd.supervisor.store.requests import StoreRequests


class BusyStore:
    """A store that has no room for a question while it is busy."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answers: list[tuple[Any, Any]] = []
        self.busy = True

    def ask(self, _query: Query[Any], question: Any) -> bool:
        if not self.busy:
            self.asked.append(question)
        return not self.busy

    def found(self) -> list[tuple[Any, Any]]:
        answers, self.answers = self.answers, []
        return answers


@pytest.fixture
def store() -> BusyStore:
    return BusyStore()


@pytest.fixture
def full(store: BusyStore) -> StoreRequests:
    """Return requests of which as many wait as may."""
    made = StoreRequests(store)  # type: ignore[arg-type]
    for number in range(requests.WAITING_MAX):
        assert not made.full
        made.ask(FindTasks([str(number)]), lambda _: None, lambda: None)
    assert made.full
    return made


@pytest.mark.parametrize(
    "params",
    [
        rpc.GetTask(id="x"),
        rpc.ListTasks(),
        rpc.ListDead(),
        rpc.SubmitTask(name="jobs.x", id="x"),
        rpc.RetryTasks(ids=["x"]),
        rpc.PurgeTasks(ids=["x"]),
        rpc.CancelTasks(ids=["x"]),
    ],
)
def test_a_caller_is_refused_while_too_many_questions_wait(
    full: StoreRequests, params: Any
) -> None:
    shell: Any = SimpleNamespace(fleet=None, store_requests=full)
    commands = Commands(shell, *[SimpleNamespace()] * 3)  # type: ignore[arg-type]
    refused = commands.call("method", params, SimpleNamespace(uid=0))  # type: ignore[arg-type]
    assert isinstance(refused, rpc.RpcError)
    assert refused.code == rpc.LIMIT_REACHED
    assert "musterctl status" in refused.message


def find_state(asked: StoreRequests) -> list[tuple[Any, ...]]:
    told: list[tuple[Any, ...]] = []
    workers = SimpleNamespace(answer_state=lambda *answer: told.append(answer))
    runner = SimpleNamespace(_shell=SimpleNamespace(store_requests=asked), _workers=workers)
    ActionRunner._find_state(runner, actions.FindState(7, 3, "state", "key"))  # type: ignore[arg-type]
    return told


def test_a_handler_is_refused_its_state_while_too_many_questions_wait(full: StoreRequests) -> None:
    assert find_state(full) == [(7, 3, None, requests.BUSY)]


def test_who_comes_when_there_is_room_again_is_served(
    full: StoreRequests, store: BusyStore
) -> None:
    store.busy = False
    full.repeat()
    assert len(store.asked) == requests.WAITING_MAX
    assert not full.full
    assert find_state(full) == []
    assert len(store.asked) == requests.WAITING_MAX + 1


def test_a_resend_fails_when_far_too_many_requests_wait(store: BusyStore) -> None:
    """Only the core asks without looking at `full`; the core's own questions are never lost."""
    asked = StoreRequests(store)  # type: ignore[arg-type]
    failed: list[int] = []
    for number in range(requests.WAITING_LAST + 2):
        asked.ask(FindTasks(["x"]), lambda _: None, lambda number=number: failed.append(number))
    assert failed == [requests.WAITING_LAST, requests.WAITING_LAST + 1]
    asked.ask(FindStranded("jobs", 0), lambda _: None)
    store.busy = False
    asked.repeat()
    assert len(store.asked) == requests.WAITING_LAST + 1


def test_a_handler_is_told_when_the_store_cannot_be_read(store: BusyStore) -> None:
    store.busy = False
    asked = StoreRequests(store)  # type: ignore[arg-type]
    told = find_state(asked)
    store.answers = [(store.asked[0], Unanswered())]
    asked.answer()
    assert [answer[:3] for answer in told] == [(7, 3, None)]
    assert "cannot be read" in told[0][3]


def test_the_core_s_own_question_is_asked_again(store: BusyStore) -> None:
    store.busy = False
    asked = StoreRequests(store)  # type: ignore[arg-type]
    found: list[StrandedTasks] = []
    asked.ask(FindStranded("jobs", 0), found.append)
    store.answers = [(store.asked.pop(), Unanswered())]
    asked.answer()
    assert not store.asked, "at once it would fail again"
    asked.repeat()
    store.answers = [(store.asked.pop(), StrandedTasks([], 0))]
    asked.answer()
    assert found == [StrandedTasks([], 0)]


def test_of_slow_requests_one_is_asked_at_a_time(store: BusyStore) -> None:
    store.busy = False
    asking = StoreRequests(store)  # type: ignore[arg-type]
    told: list[Any] = []
    for number in range(3):
        asking.ask_slow(FindTasks([]), told.append, lambda: told.append("failed"))
        assert len(store.asked) == 1, number
    store.answers = [(store.asked[0], "a")]
    asking.answer()
    assert (told, len(store.asked)) == (["a"], 2)
    store.answers = [(store.asked[1], Unanswered())]
    asking.answer()
    assert (told, len(store.asked)) == (["a", "failed"], 3)
    store.answers = [(store.asked[2], "c")]
    asking.answer()
    assert told == ["a", "failed", "c"]


def test_slow_requests_that_are_too_many_fail(
    store: BusyStore, full: StoreRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    full.ask_slow(FindTasks([]), lambda _: None, lambda: told.append("no room"))
    assert told == ["no room"]
    store.busy = False
    asking = StoreRequests(store)  # type: ignore[arg-type]
    monkeypatch.setattr(requests, "SLOW_MAX", 1)
    for _ in range(3):  # the first is asked, the second waits
        asking.ask_slow(FindTasks([]), lambda _: None, lambda: told.append("no room"))
    assert told == ["no room"] * 2
