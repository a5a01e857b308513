"""States and locks of attempts of the cluster: what is asked, kept, told again and dropped."""

from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import Lease, TaskSpec
from musterd.ipc.wire.node_messages import (
    Attempt,
    Held,
    LockReply,
    LockWish,
    StateReply,
    StateRequest,
)
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.tasks import handler_requests, shared_requests
from musterd.supervisor.core.tasks.handler_requests import TRY_NS, UNKNOWN
from musterd.supervisor.core.tasks.shared_requests import FULL, LOST
from support.core import Muster, leases_of, of

LEASE_NS = 30 * SECOND_NS
ELSEWHERE = "p/7 (task z) on shed"


class Node(Muster):
    """A member of a cluster with a task on each of its workers, and the sidecar's side."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(size, clustered=True)
        self.start()
        self.tell(events.ClusterConnected())
        self.beat()
        attempts = [
            Attempt(TaskSpec(f"t{number}", "p.x", b"", timeout_ns=3600 * SECOND_NS), 7, 1)
            for number in range(1, size + 1)
        ]
        granted = self.tell(events.AttemptsGranted(1, "p", attempts))
        self.leases: list[Lease] = [Lease(0, "", "", b"", 0, 0), *leases_of(granted)]

    def beat(self, tenure: int = 1, **more: Any) -> list[Any]:
        return self.tell(events.MembershipTold(tenure, self.now_ns + LEASE_NS, **more))

    def lease(self, worker: int) -> int:
        return self.leases[worker].lease

    def load(self, worker: int, request: int = 1) -> list[Any]:
        return self.tell(events.StateWanted(worker, request, "k", self.lease(worker)))

    def save(self, worker: int, value: bytes | None = b"v", request: int = 1) -> list[Any]:
        return self.tell(events.StateGiven(worker, request, "k", value, 5, self.lease(worker)))

    def lock(self, worker: int, timeout_ns: int = 10 * SECOND_NS) -> list[Any]:
        return self.tell(events.LockWanted(worker, self.lease(worker), 1, "l", timeout_ns))

    def unlock(self, worker: int) -> list[Any]:
        return self.tell(events.LockReturned(worker, self.lease(worker), "l"))

    def told(self, wish: LockWish, *, taken: bool, tenure: int = 1) -> list[Any]:
        reply = LockReply(wish.request, wish.name, taken, "" if taken else ELSEWHERE)
        return self.tell(events.LocksTold(tenure, [reply]))

    def taken(self, worker: int) -> LockWish:
        """Have a lock taken for a task of this node."""
        [wish] = wishes(self.lock(worker))
        assert given(self.told(wish, taken=True)) == [(worker, True)]
        return wish


def wishes(answer: list[Any]) -> list[LockWish]:
    return [wish for asked in of(actions.AskLocks, answer) for wish in asked.wishes]


def kinds(answer: list[Any]) -> list[str]:
    return [wish.kind for wish in wishes(answer)]


def given(answer: list[Any]) -> list[tuple[int, bool]]:
    return [(each.worker, each.taken) for each in of(actions.AnswerLock, answer)]


def asks(answer: list[Any]) -> list[StateRequest]:
    return [ask for asked in of(actions.AskStates, answer) for ask in asked.asks]


def reports(answer: list[Any]) -> list[str]:
    return [each.event for each in of(actions.Report, answer)]


# -- states -----------------------------------------------------------------------------------


def test_a_save_is_asked_for_with_its_claim_and_answered_when_the_cluster_has() -> None:
    node = Node()
    answer = node.save(1)
    assert asks(answer) == [StateRequest(1, "t1", 7, "k", True, b"v", 5)]
    assert not of(actions.AnswerState, answer)
    assert not of(actions.Persist, answer)
    answer = node.tell(events.StatesTold([StateReply(1)]))
    assert of(actions.AnswerState, answer) == [actions.AnswerState(1, 1)]
    assert not node.tell(events.StatesTold([StateReply(1)]))  # told twice


def test_a_load_brings_the_value_or_says_why_not() -> None:
    node = Node()
    assert asks(node.load(1)) == [StateRequest(1, "t1", 7, "k")]
    assert asks(node.load(2)) == [StateRequest(2, "t2", 7, "k")]
    answer = node.tell(events.StatesTold([StateReply(2, b"v"), StateReply(1, None, "no")]))
    assert of(actions.AnswerState, answer) == [
        actions.AnswerState(2, 1, "", b"v"),
        actions.AnswerState(1, 1, "no"),
    ]


def test_what_was_not_answered_is_told_to_the_next_sidecar() -> None:
    node = Node()
    [first] = asks(node.save(1))
    node.tell(events.ClusterDisconnected())
    assert not asks(node.save(2, None))
    again = asks(node.tell(events.ClusterConnected()))
    assert again == [first, StateRequest(2, "t2", 7, "k", True, None, 5)]
    node.tell(events.StatesTold([StateReply(1), StateReply(2)]))
    assert not asks(node.tell(events.ClusterConnected()))


@pytest.mark.parametrize("how", ["completed", "returned", "exited"])
def test_a_request_ends_with_its_lease(how: str) -> None:
    node = Node()
    node.save(1)
    node.save(2)
    if how == "completed":
        node.complete(1, node.lease(1))
    elif how == "returned":
        node.tell(events.LeasesReturned(1, [node.lease(1)]))
    else:
        node.exit(1, node.lease(1))
    assert [ask.id for ask in asks(node.tell(events.ClusterConnected()))] == ["t2"]
    answer = node.tell(events.StatesTold([StateReply(1), StateReply(2)]))
    assert [each.worker for each in of(actions.AnswerState, answer)] == [2]


def test_no_worker_asks_for_a_lease_that_it_does_not_have() -> None:
    node = Node()
    answer = node.tell(events.StateGiven(1, 1, "k", b"v", 0, node.lease(2)))
    answer += node.tell(events.StateWanted(1, 1, "k"))
    assert not answer


@pytest.mark.parametrize("limit", ["UNANSWERED_MAX", "UNANSWERED_BYTES_MAX"])
def test_requests_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(shared_requests, limit, 1 if limit == "UNANSWERED_MAX" else 600)
    node = Node()
    node.save(1)
    answer = node.save(2)
    assert of(actions.AnswerState, answer) == [actions.AnswerState(2, 1, FULL)]
    assert not asks(answer)
    node.tell(events.StatesTold([StateReply(1)]))
    assert asks(node.save(2))


def test_a_lost_attempt_has_no_state_and_no_lock() -> None:
    node = Node()
    node.tell(events.AttemptsLost([Held("t1", 7)]))
    assert of(actions.AnswerState, node.save(1)) == [actions.AnswerState(1, 1, LOST)]
    assert [each.error for each in of(actions.AnswerLock, node.lock(1))] == [LOST]
    assert asks(node.save(2))


def test_a_task_of_this_machine_keeps_its_state_here() -> None:
    node = Node(1)
    node.complete(1, node.lease(1))
    [lease] = leases_of(node.submit(TaskSpec("local", "p.x", b"")))
    answer = node.tell(events.StateGiven(1, 1, "k", b"v", 0, lease.lease))
    assert not asks(answer)
    assert of(actions.AnswerState, answer) == [actions.AnswerState(1, 1)]
    assert of(actions.FindState, node.tell(events.StateWanted(1, 2, "k", lease.lease)))
    assert given(node.tell(events.LockWanted(1, lease.lease, 3, "l", 0))) == [(1, True)]


# -- locks ------------------------------------------------------------------------------------


def test_a_lock_is_given_when_the_cluster_has_given_it_to_this_node() -> None:
    node = Node()
    answer = node.lock(1)
    [wish] = wishes(answer)
    assert (wish.name, wish.kind, wish.holder) == ("l", "want", "p/0 (task t1)")
    assert not given(answer)
    assert not given(node.told(wish, taken=False))
    assert given(node.told(wish, taken=True)) == [(1, True)]
    assert not given(node.told(wish, taken=True))  # told twice
    [left] = wishes(node.unlock(1))
    assert (left.kind, left.token) == ("leave", wish.token)
    assert not node.fleet._handler_requests.locks


def test_the_next_who_waits_here_has_it_after_those_on_other_nodes() -> None:
    node = Node()
    wish = node.taken(1)
    assert not node.lock(2)
    answer = node.unlock(1)
    [passed] = wishes(answer)
    assert (passed.kind, passed.token, passed.holder) == ("pass", wish.token, "p/1 (task t2)")
    assert not given(answer)
    assert not given(node.told(wish, taken=True)), "an old answer"
    assert not given(node.told(passed, taken=False))
    assert given(node.told(passed, taken=True)) == [(2, True)]


@pytest.mark.parametrize("how", ["away", "disconnected"])
def test_while_the_engine_is_away_a_lock_goes_from_task_to_task_until_the_lease_is_over(
    how: str,
) -> None:
    node = Node(3)
    node.taken(1)
    node.lock(2, 3600 * SECOND_NS)
    node.lock(3, 3600 * SECOND_NS)
    until_ns = node.now_ns + LEASE_NS
    if how == "away":
        node.tell(events.MembershipTold(1, until_ns, away=True))
    else:
        node.tell(events.ClusterDisconnected())
    assert given(node.unlock(1)) == [(2, True)]
    answer = node.wait(LEASE_NS)
    assert reports(answer).count("cluster.locks_over") == 1
    assert not given(node.unlock(2))
    node.tell(events.ClusterConnected())
    assert given(node.beat()) == [(3, True)]


def test_who_does_not_wait_is_answered_when_the_cluster_has_answered() -> None:
    node = Node()
    [wish] = wishes(node.lock(1, 0))
    answer = node.told(wish, taken=False)
    [refused] = of(actions.AnswerLock, answer)
    assert (refused.taken, refused.holder) == (False, ELSEWHERE)
    assert kinds(answer) == ["leave"]


def test_who_does_not_wait_is_answered_at_once_if_somebody_waits_here_already() -> None:
    node = Node()
    node.lock(1)
    assert given(node.lock(2, 0)) == [(2, False)]


def test_without_an_answer_of_the_cluster_no_handler_waits_for_ever() -> None:
    node = Node()
    node.lock(1, 0)
    node.lock(2, 2 * TRY_NS)
    answer = node.wait(TRY_NS)
    [refused] = of(actions.AnswerLock, answer)
    assert (refused.worker, refused.taken, refused.holder) == (1, False, UNKNOWN)
    answer = node.wait(TRY_NS)
    assert given(answer) == [(2, False)]
    assert kinds(answer) == ["leave"]


def test_a_lock_that_comes_when_nobody_waits_any_more_goes_back() -> None:
    node = Node()
    [wish] = wishes(node.lock(1))
    assert kinds(node.unlock(1)) == ["leave"]
    assert not given(node.told(wish, taken=True))
    [again] = wishes(node.lock(2))
    assert again.token != wish.token


def test_what_was_not_answered_about_locks_is_told_to_the_next_sidecar() -> None:
    node = Node(3)
    node.taken(1)
    node.tell(events.LockWanted(2, node.lease(2), 2, "m", SECOND_NS * 60))
    node.tell(events.ClusterDisconnected())
    node.unlock(1)
    node.tell(events.LockWanted(3, node.lease(3), 2, "n", SECOND_NS * 60))
    told = wishes(node.tell(events.ClusterConnected()))
    assert [(wish.name, wish.kind) for wish in told] == [
        ("m", "want"),
        ("n", "want"),
        ("l", "leave"),
    ]
    node.told(told[2], taken=False)
    assert [wish.name for wish in wishes(node.tell(events.ClusterConnected()))] == ["m", "n"]


def test_locks_that_are_given_back_count_until_the_cluster_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handler_requests, "LOCKS_MAX", 1)
    node = Node()
    node.taken(1)
    [left] = wishes(node.unlock(1))
    [refused] = of(actions.AnswerLock, node.lock(1))
    assert "use fewer names" in refused.error
    node.told(left, taken=False)
    assert wishes(node.lock(1))


def test_a_new_tenure_has_no_locks_of_the_one_before() -> None:
    node = Node(3)
    node.taken(1)
    node.lock(2)
    answer = node.beat(2)  # all attempts are lost, and interrupted
    assert "cluster.locks_lost" in reports(answer)
    assert not wishes(answer)
    late = node.told(LockWish(1, "l", 1, "want"), taken=True)
    assert not given(late)
    node.fail(2, node.lease(2), "cancel")
    assert not wishes(node.fail(1, node.lease(1), "cancel"))
    assert not node.fleet._handler_requests.locks


def test_who_waits_while_the_node_is_no_member_asks_when_it_is_again() -> None:
    node = Node(1)
    node.complete(1, node.lease(1))
    node.tell(events.MembershipTold(0, 0))
    node.beat(2)
    attempt = Attempt(TaskSpec("t", "p.x", b""), 8, 1)
    [lease] = leases_of(node.tell(events.AttemptsGranted(9, "p", [attempt])))
    [asked] = of(actions.AskLocks, node.tell(events.LockWanted(1, lease.lease, 1, "l", SECOND_NS)))
    assert asked.tenure == 2


def test_the_lease_of_locks_is_watched_as_long_as_it_is_prolonged() -> None:
    node = Node()
    node.taken(1)
    for _ in range(5):
        assert "cluster.locks_over" not in reports(node.wait(LEASE_NS // 2))
        node.beat()
    answer = node.wait(LEASE_NS)
    [report] = [each for each in of(actions.Report, answer) if each.event == "cluster.locks_over"]
    assert (report.level, "'l'" in report.reason) == ("warning", True)


def test_a_pool_that_leaves_the_cluster_shares_locks_with_this_machine_alone() -> None:
    node = Node()
    wish = node.taken(1)
    pools = tuple(structs.replace(each, clustered=False) for each in node.policy.pools)
    node.tell(events.PolicyChanged(structs.replace(node.policy, pools=pools)))
    node.complete(2, node.lease(2))
    [lease] = leases_of(node.submit(TaskSpec("local", "p.x", b"")))
    node.tell(events.LockWanted(2, lease.lease, 1, "l", SECOND_NS))
    answer = node.unlock(1)
    assert given(answer) == [(2, True)]
    [left] = wishes(answer)
    assert (left.kind, left.token) == ("leave", wish.token)
