"""Resent submits that wait for the store: few are looked up at once, none without a client."""

from collections.abc import Callable
from typing import Any

import pytest

from musterd.ipc.wire.messages import SUCCEEDED, Outcome, TaskSpec
from musterd.supervisor.core.model import events
from musterd.supervisor.sockets.resend_checks import ASKED_MAX, ResendChecks
from musterd.supervisor.store.interface import FindTasks, StoredTask

WALL = 10**18


class Daemon:
    """A daemon whose store answers when told to."""

    def __init__(self) -> None:
        self.fed: list[Any] = []
        self.asked: list[tuple[list[str], Callable[..., None], Callable[[], None]]] = []

    @property
    def store_requests(self) -> Any:
        return self

    def ask(self, query: FindTasks, then: Any, otherwise: Any) -> None:
        self.asked.append((query.ids, then, otherwise))

    def feed(self, event: object) -> None:
        self.fed.append(event)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def checks(daemon: Daemon) -> ResendChecks:
    return ResendChecks(daemon)


def submitted(number: int, peer: bytes = b"1") -> events.TasksSubmitted:
    return events.TasksSubmitted(peer, number, [TaskSpec(f"t{number}", "a.b", b"")], WALL, True)


def stored(number: int, name: str = "a.b", *, ended: bool) -> StoredTask:
    spec = TaskSpec(f"t{number}", name, b"")
    outcome = Outcome(spec.id, SUCCEEDED) if ended else None
    return StoredTask(number, spec, SUCCEEDED if ended else "queued", outcome, 0, 1, WALL)


def test_the_store_says_which_tasks_it_knows(checks: ResendChecks, daemon: Daemon) -> None:
    for number in range(1, 4):
        checks.check(submitted(number))
    for number, (ids, then, _) in enumerate(daemon.asked, 1):
        assert ids == [f"t{number}"]
        then([[], [stored(2, ended=True)], [stored(3, ended=False)]][number - 1])
    specs = {f"t{number}": TaskSpec(f"t{number}", "a.b", b"") for number in (2, 3)}
    second, third = {"t2": specs["t2"]}, {"t3": specs["t3"]}
    assert daemon.fed == [
        events.ResendChecked(submitted(1), frozenset(), frozenset(), {}),
        events.ResendChecked(submitted(2), frozenset({"t2"}), frozenset(), second),
        events.ResendChecked(submitted(3), frozenset(), frozenset({"t3"}), third),
    ]
    assert len(checks) == 0


def test_what_the_store_knows_under_an_id_is_told_and_not_judged(
    checks: ResendChecks, daemon: Daemon
) -> None:
    checks.check(submitted(1))
    daemon.asked[0][1]([stored(1, "another.task", ended=True)])
    (checked,) = daemon.fed
    assert checked.submitted == submitted(1)
    assert checked.stored["t1"].name == "another.task"


def test_a_store_that_cannot_be_read_is_told(checks: ResendChecks, daemon: Daemon) -> None:
    checks.check(submitted(1))
    daemon.asked[0][2]()
    assert daemon.fed == [events.ResendUnknown(submitted(1))]
    assert len(checks) == 0


def test_few_are_with_the_store_at_a_time_and_all_in_their_order(
    checks: ResendChecks, daemon: Daemon
) -> None:
    for number in range(3 * ASKED_MAX):
        checks.check(submitted(number))
    assert len(daemon.asked) == ASKED_MAX
    for number in range(3 * ASKED_MAX):
        ids, then, otherwise = daemon.asked[number]
        assert ids == [f"t{number}"]
        if number % 2:
            then([])
        else:
            otherwise()
    assert len(daemon.asked) == len(daemon.fed) == 3 * ASKED_MAX


def test_what_a_lost_connection_wanted_is_given_up(checks: ResendChecks, daemon: Daemon) -> None:
    """Clients may come and go as often as they like while the store is slow."""
    checks.check(submitted(0, b"stays"))
    for number in range(1, 5 * ASKED_MAX):
        peer = b"%d" % (number // 10)
        checks.check(submitted(number, peer))
        if number % 10 == 9:
            checks.give_up(peer)
            assert len(checks) == 1, "nothing is kept for nobody"
    assert {type(event) for event in daemon.fed} == {events.ResendUnknown}
    assert len(daemon.fed) == 5 * ASKED_MAX - 1, "the core is told of each"
    assert len(daemon.asked) == ASKED_MAX
    checks.check(submitted(1000, b"stays"))
    for _, then, _ in list(daemon.asked):
        then([])
    ids, then, _ = daemon.asked[-1]
    assert ids == ["t1000"]
    then([])
    checked = [each for each in daemon.fed if isinstance(each, events.ResendChecked)]
    assert [each.submitted.request for each in checked] == [0, 1000]
    assert len(checks) == 0
    checks.give_up(b"nobody")
