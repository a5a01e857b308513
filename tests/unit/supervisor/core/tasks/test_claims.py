"""Attempts of the cluster: wanted, granted, ended, and what the end of the lease means."""

from itertools import count
from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.policy import (
    MILLISECOND_NS,
    SECOND_NS,
    BackoffPolicy,
    BreakerPolicy,
)
from musterd.ipc.wire.messages import (
    ERROR,
    LOGGED_IN,
    LOGIN_FAILED,
    LOGIN_WANTED,
    LOW,
    NO_LOGIN,
    NOT_GIVEN,
    PERMANENT,
    Completion,
    Failure,
    TaskDeclaration,
    TaskSpec,
)
from musterd.ipc.wire.node_messages import (
    Attempt,
    AttemptEnd,
    AttemptProgress,
    Held,
    LoginVerdict,
)
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import GatePolicy, SessionPolicy, TargetPolicy
from musterd.supervisor.core.shutdown import AWAY_BUDGET_NS, Phase
from musterd.supervisor.core.tasks import claims
from musterd.supervisor.core.tasks.claims import HOLD_NS, WANT_NS
from musterd.supervisor.core.tasks.leases import CANCEL_GRACE_NS, STALL_NS
from support.core import EXACT, Muster, leases_of, of

LEASE_NS = 30 * SECOND_NS
NAMES = ("p.x", "p.y")


class Node(Muster):
    """A fleet whose pool is clustered, and the sidecar's side of node.sock."""

    def __init__(self, size: int = 1, **more: Any) -> None:
        super().__init__(size, clustered=True, **more)

    def follow(self, **changes: Any) -> None:
        self.policy = structs.replace(self.policy, **changes)
        self.fleet = Fleet(self.policy, Random(1))

    def join(self, tenure: int = 1) -> list[Any]:
        answer = self.start()
        answer += self.tell(events.ClusterConnected())
        return answer + self.beat(tenure)

    def beat(self, tenure: int = 1, **more: Any) -> list[Any]:
        return self.tell(events.MembershipTold(tenure, self.now_ns + LEASE_NS, **more))

    def grant(self, *attempts: Attempt, request: int = 1) -> list[Any]:
        return self.tell(events.AttemptsGranted(request, "p", list(attempts)))


def attempt(id_: str = "t", claim: int = 7, number: int = 1, **more: Any) -> Attempt:
    fields = {each: more.pop(each) for each in list(more) if each in Attempt.__struct_fields__}
    return Attempt(TaskSpec(id_, "p.x", b"", **more), claim, number, **fields)


def ends(answer: list[Any]) -> list[AttemptEnd]:
    return [end for told in of(actions.TellCluster, answer) for end in told.ends]


def kinds(answer: list[Any]) -> list[tuple[str, str]]:
    return [(end.id, end.kind) for end in ends(answer)]


def wants(answer: list[Any]) -> list[int]:
    return [each.count for each in of(actions.WantAttempts, answer)]


# -- wanting ----------------------------------------------------------------------------------


def test_a_member_wants_an_attempt_for_each_free_worker() -> None:
    node = Node(3)
    answer = node.join()
    assert of(actions.WantAttempts, answer) == [actions.WantAttempts(1, "p", 3, NAMES, 0)]
    assert of(actions.GreetCluster, answer) == [actions.GreetCluster(0, [], 0)]
    assert [(card.name, card.places) for card in of(actions.ShowPools, answer)[0].cards] == [
        ("p", 3)
    ]


def test_nothing_is_wanted_without_a_lease_or_while_the_node_drains() -> None:
    node = Node()
    answer = node.start() + node.tell(events.ClusterConnected())
    assert not of(actions.WantAttempts, answer)
    assert not of(actions.WantAttempts, node.beat(draining=True))
    assert wants(node.beat()) == [1]
    assert wants(node.beat(draining=True)) == [0]


def test_a_pool_that_is_not_clustered_wants_nothing() -> None:
    muster = Muster()
    answer = muster.start() + muster.tell(events.ClusterConnected())
    answer += muster.tell(events.MembershipTold(1, muster.now_ns + LEASE_NS))
    assert not of(actions.WantAttempts, answer)


def test_one_want_is_open_and_a_newer_one_tells_what_has_been_seen() -> None:
    node = Node(2)
    node.join()
    assert not wants(node.grant(attempt("a"), attempt("b")))
    answer = node.complete(1, 1, run_ns=SECOND_NS)
    assert of(actions.WantAttempts, answer) == [actions.WantAttempts(2, "p", 1, NAMES, 2)]
    answer = node.complete(2, 2, run_ns=SECOND_NS)
    assert of(actions.WantAttempts, answer) == [actions.WantAttempts(3, "p", 2, NAMES, 2)]


def test_an_idle_node_whose_code_has_other_tasks_wants_those() -> None:
    node = Node(2)
    node.join()
    node.fleet.pools["p"].declare((TaskDeclaration("x"), TaskDeclaration("new")))
    answer = node.tell(events.Ticked())
    assert of(actions.WantAttempts, answer) == [
        actions.WantAttempts(2, "p", 2, ("p.x", "p.new"), 0)
    ]
    assert not of(actions.WantAttempts, node.tell(events.Ticked()))


def test_a_worker_that_is_gone_wants_nothing() -> None:
    node = Node(2)
    node.join()
    assert wants(node.tell(events.StopRequested((("p", 1),)))) == [1]


def test_of_tiny_tasks_a_window_is_wanted() -> None:
    node = Node()
    node.join()
    run_ns = MILLISECOND_NS // 4
    node.grant(attempt())
    assert wants(node.complete(1, 1, run_ns=run_ns)) == [WANT_NS // run_ns]


def test_local_tasks_leave_less_to_want() -> None:
    node = Node(2)
    node.start()
    node.tell(events.TasksSubmitted(b"caller", 0, [TaskSpec("local", "p.x", b"")], 0))
    node.tell(events.ClusterConnected())
    assert wants(node.beat()) == [1]


def test_ends_that_nobody_confirms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "UNCONFIRMED_MAX", 2)
    node = Node()
    node.join()
    node.grant(attempt("a"))
    assert wants(node.complete(1, 1, run_ns=SECOND_NS)) == [1]
    node.grant(attempt("b"), request=2)
    assert not wants(node.complete(1, 2, run_ns=SECOND_NS))
    assert wants(node.tell(events.EndsConfirmed([Held("a", 7)]))) == [1]


def test_bytes_of_ends_that_nobody_confirms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "UNCONFIRMED_BYTES_MAX", 5000)
    node = Node()
    node.join()
    node.grant(attempt("a"))
    large = [Completion(1, SECOND_NS, bytes(5000))]
    assert not wants(node.tell(events.LeasesCompleted(1, large)))
    assert wants(node.tell(events.EndsConfirmed([Held("a", 7)]))) == [1]


# -- grants -----------------------------------------------------------------------------------


def test_an_attempt_runs_and_is_written_nowhere() -> None:
    node = Node()
    node.join()
    answer = node.grant(attempt(number=2, target="site", key="k", priority=LOW, timeout_ns=9))
    [lease] = leases_of(answer)
    assert (lease.id, lease.attempt, lease.timeout_ns, lease.last) == ("t", 2, 9, False)
    answer += node.complete(1, lease.lease)
    assert not of(actions.Persist, answer)
    assert ends(answer) == [AttemptEnd("t", 7, "succeeded", b"value", run_ns=MILLISECOND_NS)]
    assert not node.fleet.tasks


def test_sites_and_classes_say_what_holds_for_an_attempt() -> None:
    node = Node(max_retries=0)
    slow = BackoffPolicy(base_ns=5 * SECOND_NS, max_ns=50 * SECOND_NS, jitter=0.0)
    node.follow(
        targets={"site": TargetPolicy(timeout_ns=11, counts=("a.B",))},
        classes={"c": GatePolicy("c", timeout_ns=12, max_retries=2, backoff=slow)},
    )
    node.join()
    [lease] = leases_of(node.grant(attempt(target="site", policy="c")))
    assert (lease.timeout_ns, lease.counts, lease.last) == (11, ("a.B",), False)
    [end] = ends(node.fail(1, lease.lease))
    assert (end.retry_ns, end.patience_ns) == (5 * SECOND_NS, 2 * 50 * SECOND_NS)


def test_the_last_attempt_is_known_as_such() -> None:
    node = Node(max_retries=1)
    node.join()
    [lease] = leases_of(node.grant(attempt(number=2)))
    assert lease.last


def test_a_result_that_may_be_a_fallback_is_kept() -> None:
    node = Node(2)
    node.join()
    node.grant(attempt("a", key="k", fallback_on="failure"), attempt("b", key="k"))
    answer = node.complete(1, 1) + node.complete(2, 2)
    assert [(end.id, end.keeps) for end in ends(answer)] == [("a", True), ("b", False)]


def test_attempts_keep_the_order_of_their_grants_whatever_their_sites() -> None:
    node = Node()
    node.join()
    several = [attempt(f"t{number}", target=f"site{number % 2}") for number in (0, 2, 1, 3)]
    run = [lease.id for lease in leases_of(node.grant(*several))]
    while len(run) < 4:
        run += [lease.id for lease in leases_of(node.complete(1, len(run), run_ns=SECOND_NS))]
        node.beat()
    assert run == ["t0", "t2", "t1", "t3"]


def test_an_attempt_that_has_expired_does_not_begin() -> None:
    node = Node()
    node.join()
    answer = node.grant(attempt("late", expires_at_ns=node.now_ns))
    answer += node.grant(attempt("a"), attempt("b", expires_at_ns=node.now_ns + MILLISECOND_NS))
    answer += node.wait(2 * MILLISECOND_NS)
    assert [lease.id for lease in leases_of(answer)] == ["a"]
    assert kinds(answer) == [("late", "untouched"), ("b", "untouched")]


def test_no_late_event_lets_an_attempt_begin_after_its_expiry() -> None:
    """The clock is past the expiry, and its timer has not been called."""
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b", expires_at_ns=node.now_ns + SECOND_NS))
    node.now_ns += SECOND_NS
    answer = node.complete(1, 1)
    assert not leases_of(answer)
    assert kinds(answer) == [("a", "succeeded"), ("b", "untouched")]


def test_an_attempt_that_is_given_back_in_time_expires_here() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a", expires_at_ns=node.now_ns + MILLISECOND_NS))
    node.wait(2 * MILLISECOND_NS)
    assert kinds(node.exit(1, lease=0)) == [("a", "untouched")]


def test_an_attempt_of_a_task_that_the_code_lacks_goes_back() -> None:
    node = Node()
    node.join()
    strange = structs.replace(attempt(), spec=TaskSpec("t", "p.unknown", b""))
    assert kinds(node.grant(strange)) == [("t", "untouched")]


def test_an_attempt_that_is_told_twice_runs_once() -> None:
    node = Node(2)
    node.join()
    assert len(leases_of(node.grant(attempt()) + node.grant(attempt()))) == 1
    node.complete(1, 1)
    assert not leases_of(node.grant(attempt()))


def test_an_attempt_that_finds_no_worker_goes_back() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    assert kinds(node.wait(HOLD_NS - 1)) == []
    assert kinds(node.wait(1)) == [("b", "untouched")]


def test_tasks_that_turn_out_to_be_long_are_wanted_one_by_one() -> None:
    node = Node()
    node.join()
    node.grant(attempt("tiny"))
    node.complete(1, 1, run_ns=MILLISECOND_NS // 4)
    node.grant(attempt("a"), attempt("b"), attempt("c"), request=2)
    assert of(actions.RecallLeases, node.wait(STALL_NS))
    node.tell(events.LeasesReturned(1, [3, 4]))
    assert kinds(node.wait(HOLD_NS)) == [("b", "untouched"), ("c", "untouched")]
    assert wants(node.fail(1, 2, PERMANENT)) == [1]


def test_a_paused_pool_gives_back_what_waits_and_wants_nothing() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    assert kinds(node.tell(events.PauseRequested((("p", -1),)))) == [("b", "untouched")]
    assert not wants(node.complete(1, 1, run_ns=SECOND_NS))
    assert wants(node.tell(events.ResumeRequested((("p", -1),)))) == [1]


# -- ends -------------------------------------------------------------------------------------


def test_a_failure_says_when_to_try_again() -> None:
    node = Node()
    node.join()
    node.grant(attempt(number=2))
    [end] = ends(node.fail(1, 1))
    assert (end.kind, end.retry_ns) == ("failed", 2 * SECOND_NS)
    assert end.patience_ns == 2 * EXACT.max_ns
    assert end.failure == Failure(ERROR)


@pytest.mark.parametrize(("kind", "number"), [(PERMANENT, 1), (ERROR, 4)])
def test_a_failure_that_must_not_be_tried_again_says_so(kind: str, number: int) -> None:
    node = Node()
    node.join()
    node.grant(attempt(number=number))
    [end] = ends(node.fail(1, 1, kind))
    assert (end.kind, end.retry_ns) == ("failed", NOT_GIVEN)


def test_a_crash_is_told_as_one_and_nothing_runs_again_here() -> None:
    node = Node()
    node.join()
    node.grant(attempt(crashes=1))
    answer = node.exit(1, lease=1)
    assert kinds(answer) == [("t", "crashed")]
    assert not leases_of(answer)
    assert not node.fleet.tasks


def test_what_a_recycled_worker_was_stopped_in_is_interrupted() -> None:
    node = Node()
    node.join()
    node.grant(attempt())
    assert kinds(node.fail(1, 1, "cancel")) == [("t", "interrupted")]


def test_an_attempt_that_was_interrupted_before_runs_alone() -> None:
    node = Node()
    node.tell(events.Started())
    node.tell(events.ForkServerReady("p", (TaskDeclaration("x"),)))
    node.tell(events.WorkerForked(1, 5001))
    node.tell(events.WorkerReady(1, width=4))
    node.tell(events.ClusterConnected())
    assert wants(node.beat()) == [4]
    assert [
        lease.id for lease in leases_of(node.grant(attempt("a"), attempt("b", interruptions=1)))
    ] == ["a"]
    assert [lease.id for lease in leases_of(node.complete(1, 1))] == ["b"]


def test_a_long_run_is_told_to_have_begun() -> None:
    node = Node()
    node.join()
    node.grant(attempt())
    told = of(actions.TellCluster, node.wait(STALL_NS))
    assert [each.begun for each in told] == [[Held("t", 7)]]


def test_progress_is_told_to_the_sidecar_and_shown_once_a_second() -> None:
    node = Node()
    node.join()
    node.grant(attempt())
    answer = node.tell(events.ProgressMade(1, 1, 0.1, "a"))
    answer += node.tell(events.ProgressMade(1, 1, 0.2, "b"))
    node.now_ns += SECOND_NS
    answer += node.tell(events.ProgressMade(1, 1, 0.3, "c"))
    marks = [mark for told in of(actions.TellCluster, answer) for mark in told.marks]
    assert [mark.text for mark in marks] == ["a", "b", "c"]
    assert marks[0] == AttemptProgress("t", 0.1, "a")
    shown = [each.reason for each in of(actions.Report, answer) if each.event == "task.progress"]
    assert shown == ["10% a", "30% c"]


def test_a_cancelled_task_is_interrupted_or_taken_from_the_queue() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    answer = node.tell(events.AttemptsCancelled([Held("a", 7), Held("b", 7), Held("no", 1)]))
    assert of(actions.CancelRunning, answer) == [actions.CancelRunning(1, 1)]
    assert kinds(answer) == [("b", "untouched")]
    assert kinds(node.fail(1, 1, "cancel")) == [("a", "interrupted")]


def test_the_state_that_a_success_clears_is_the_engines() -> None:
    node = Node()
    node.join()
    node.grant(attempt())
    done = [Completion(1, 5, b"value", clears="key")]
    answer = node.tell(events.LeasesCompleted(1, done))
    assert [end.clears for end in ends(answer)] == ["key"]
    assert not of(actions.Persist, answer)


# -- the lease --------------------------------------------------------------------------------


def test_nothing_begins_when_the_lease_is_over_and_what_runs_goes_on() -> None:
    node = Node()
    node.join()
    node.wait(LEASE_NS - MILLISECOND_NS)
    node.grant(attempt("a"), attempt("b"))
    answer = node.wait(MILLISECOND_NS)
    assert kinds(answer) == [("b", "untouched")]
    assert not of(actions.CancelRunning, answer)
    answer = node.grant(attempt("c"))
    assert not leases_of(answer)
    assert kinds(answer) == [("c", "untouched")]
    answer = node.complete(1, 1, run_ns=SECOND_NS)
    assert kinds(answer) == [("a", "succeeded")]
    assert not of(actions.WantAttempts, answer)
    assert wants(node.beat()) == [1]


def test_no_late_event_lets_an_attempt_begin_after_the_lease() -> None:
    """The clock is past the lease, and its timer has not been called."""
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    node.now_ns += LEASE_NS
    answer = node.complete(1, 1)
    assert not leases_of(answer)
    assert kinds(answer) == [("a", "succeeded"), ("b", "untouched")]


def test_a_node_without_a_tenure_has_no_lease() -> None:
    node = Node()
    node.join()
    assert wants(node.tell(events.MembershipTold(0, 0))) == [0]
    assert kinds(node.grant(attempt())) == [("t", "untouched")]


def test_a_window_is_recalled_when_the_lease_is_over() -> None:
    node = Node()
    node.join()
    node.grant(attempt("learn"))
    node.complete(1, 1, run_ns=MILLISECOND_NS // 10)
    node.now_ns += LEASE_NS - MILLISECOND_NS
    assert len(leases_of(node.grant(attempt("a"), attempt("b"), request=2))) == 2
    assert of(actions.RecallLeases, node.wait(MILLISECOND_NS)) == [actions.RecallLeases(1)]
    assert kinds(node.tell(events.LeasesReturned(1, [3]))) == [("b", "untouched")]


def test_a_fence_that_stops_interrupts_what_runs() -> None:
    node = Node()
    node.follow(fence_stops=True)
    node.join()
    node.grant(attempt())
    answer = node.wait(LEASE_NS + CANCEL_GRACE_NS)
    assert of(actions.CancelRunning, answer) == [actions.CancelRunning(1, 1)]
    assert of(actions.KillWorker, answer)
    assert kinds(node.exit(1, lease=1, code=-9)) == [("t", "interrupted")]


def test_a_lease_that_was_renewed_in_time_stops_nothing() -> None:
    node = Node()
    node.follow(fence_stops=True)
    node.join()
    node.grant(attempt())
    node.wait(LEASE_NS // 2)
    node.beat()
    assert not of(actions.CancelRunning, node.wait(LEASE_NS // 2 + 1))


def test_attempts_of_another_tenure_are_lost_and_nobody_is_told() -> None:
    node = Node()
    node.join()
    node.grant(attempt("done"), attempt("b"), attempt("c"))
    node.complete(1, 1, run_ns=SECOND_NS)
    answer = node.beat(tenure=2)
    assert of(actions.CancelRunning, answer) == [actions.CancelRunning(1, 2)]
    assert not ends(answer + node.complete(1, 2))
    answer = node.tell(events.ClusterConnected())
    assert of(actions.GreetCluster, answer) == [actions.GreetCluster(2, [], 0, member=True)]
    assert not ends(answer)


def test_a_lost_task_may_be_granted_again_while_it_still_runs() -> None:
    node = Node(2)
    node.join()
    node.grant(attempt(claim=7))
    node.tell(events.AttemptsLost([Held("t", 7)]))
    [again] = leases_of(node.grant(attempt(claim=8, number=2), request=2))
    assert not ends(node.fail(1, 1, "cancel"))
    [end] = ends(node.complete(2, again.lease))
    assert (end.claim, end.kind) == (8, "succeeded")


# -- the sidecar ------------------------------------------------------------------------------


def test_a_new_sidecar_is_told_what_the_node_has() -> None:
    node = Node(2)
    node.join(tenure=5)
    node.grant(attempt("a"), attempt("b"))
    node.wait(STALL_NS)
    node.complete(1, 1, run_ns=SECOND_NS)
    node.grant(attempt("c"), request=2)
    node.tell(events.ClusterDisconnected())
    assert not of(actions.TellCluster, node.complete(2, 2, run_ns=SECOND_NS))
    answer = node.tell(events.ClusterConnected())
    assert of(actions.GreetCluster, answer) == [
        actions.GreetCluster(5, [Held("c", 7)], 2, member=True)
    ]
    assert kinds(answer) == [("a", "succeeded"), ("b", "succeeded")]
    assert of(actions.WantAttempts, answer) == [actions.WantAttempts(3, "p", 1, NAMES, 0)]


def test_what_runs_is_told_again_to_have_begun() -> None:
    node = Node()
    node.join()
    node.grant(attempt())
    node.wait(STALL_NS)
    [told] = of(actions.TellCluster, node.tell(events.ClusterConnected()))
    assert told.begun == [Held("t", 7)]


# -- shutdown and reload ----------------------------------------------------------------------


def test_a_shutdown_gives_back_what_waits_and_waits_for_the_ends() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    answer = node.tell(events.ShutdownRequested("asked"))
    assert kinds(answer) == [("b", "untouched")]
    assert kinds(node.complete(1, 1)) == [("a", "succeeded")]
    node.exit(1, code=0)
    answer = node.tell(events.CleanupFinished())
    assert node.fleet.phase == Phase.CLOSE
    assert not of(actions.Exit, answer)
    assert of(actions.Exit, node.tell(events.EndsConfirmed([Held("a", 7), Held("b", 7)])))


def test_a_shutdown_does_not_wait_for_a_sidecar_that_is_gone() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    node.tell(events.ShutdownRequested("asked"))
    node.complete(1, 1)
    node.exit(1, code=0)
    node.tell(events.CleanupFinished())
    assert of(actions.Exit, node.tell(events.ClusterDisconnected()))


def test_a_shutdown_waits_a_moment_for_an_engine_that_is_away() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"))
    node.beat(away=True)
    node.tell(events.ShutdownRequested("asked"))
    node.complete(1, 1)
    node.exit(1, code=0)
    assert not of(actions.Exit, node.tell(events.CleanupFinished()))
    assert not of(actions.Exit, node.wait(AWAY_BUDGET_NS - 1))
    assert of(actions.Exit, node.wait(1))


def test_a_pool_that_leaves_the_cluster_gives_back_what_waits() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    [pool] = node.policy.pools
    alone = structs.replace(node.policy, pools=(structs.replace(pool, clustered=False),))
    assert kinds(node.tell(events.PolicyChanged(alone))) == [("b", "untouched")]
    assert kinds(node.complete(1, 1)) == [("a", "succeeded")]
    node.tell(events.PolicyChanged(node.policy))
    node.tell(events.TasksSubmitted(b"caller", 0, [TaskSpec("local", "p.x", b"")], 0))
    assert "local" in node.fleet.tasks


def test_a_pool_that_leaves_the_cluster_takes_its_want_back() -> None:
    node = Node()
    node.join()
    [pool] = node.policy.pools
    alone = structs.replace(node.policy, pools=(structs.replace(pool, clustered=False),))
    assert wants(node.tell(events.PolicyChanged(alone))) == [0]


def test_a_pool_that_comes_back_still_knows_what_it_has_seen() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"))
    node.complete(1, 1, run_ns=SECOND_NS)
    [pool] = node.policy.pools
    alone = structs.replace(node.policy, pools=(structs.replace(pool, clustered=False),))
    node.tell(events.PolicyChanged(alone))
    [want] = of(actions.WantAttempts, node.tell(events.PolicyChanged(node.policy)))
    assert (want.count, want.seen) == (1, 1)


def test_an_attempt_that_comes_for_a_pool_that_is_gone_goes_back() -> None:
    node = Node()
    node.join()
    node.tell(events.PolicyChanged(structs.replace(node.policy, pools=())))
    node.exit(1, code=0)
    assert not node.fleet.pools
    assert kinds(node.grant(attempt("a"))) == [("a", "untouched")]


def test_a_removed_pool_gives_back_what_waits_and_is_forgotten() -> None:
    node = Node()
    node.join()
    node.grant(attempt("a"), attempt("b"))
    answer = node.tell(events.PolicyChanged(structs.replace(node.policy, pools=())))
    assert kinds(answer) == [("b", "untouched")]
    assert kinds(node.complete(1, 1)) == [("a", "succeeded")]
    node.exit(1, code=0)
    assert not node.fleet.pools


# -- sessions ---------------------------------------------------------------------------------


def test_the_end_of_an_attempt_says_what_became_of_its_login_and_the_node_counts_nothing() -> None:
    limit = BreakerPolicy(failures=2, open_ns=60 * SECOND_NS, open_max_ns=90 * SECOND_NS)
    never = structs.replace(limit, enabled=False)
    node = Node()
    sessions = {"acme": SessionPolicy(logins=limit), "free": SessionPolicy(logins=never)}
    node.follow(sessions=sessions)
    node.join()
    numbers = count(1)

    def said(login: int, error: str = "", session: str = "acme") -> LoginVerdict | None:
        number = next(numbers)
        answer = node.grant(attempt(f"t{number}", number, session=session), request=number)
        (lease,) = leases_of(answer)
        failure = Failure(ERROR, "Oops", error) if error else None
        done = Completion(lease.lease, SECOND_NS, b"", failure, login=login)
        (worker,) = [each.worker for each in of(actions.AssignLeases, answer)]
        (end,) = ends(node.tell(events.LeasesCompleted(worker, [done])))
        assert end.kind == ("failed" if error else "succeeded")
        return end.login

    rules = (2, 60 * SECOND_NS, 90 * SECOND_NS)
    for _ in range(4):
        failed = said(LOGIN_FAILED, "wrong password")
        assert failed == LoginVerdict("acme", "failed", *rules, "Oops: wrong password")
    assert said(LOGGED_IN) == LoginVerdict("acme", "worked", *rules)
    assert said(NO_LOGIN) is None
    assert said(NO_LOGIN, "no price") is None
    assert said(LOGIN_FAILED, "wrong password", session="free") is None
    assert node.fleet.sessions == {}


BY_TASK = SessionPolicy(
    login_task="q.log_in", login_args=b"\x81", logins=BreakerPolicy(failures=2, open_ns=SECOND_NS)
)


class Login(Node):
    """A node whose session has a login task; each attempt is granted and ends at once."""

    def __init__(self, session: SessionPolicy = BY_TASK) -> None:
        super().__init__()
        self.follow(sessions={"acme": session})
        self.join()
        self._numbers = count(1)

    def run(self, login: int, error: str = "", **granted: Any) -> AttemptEnd:
        number = next(self._numbers)
        given = structs.replace(attempt(f"t{number}", number, session="acme"), **granted)
        answer = self.grant(given, request=number)
        (lease,) = leases_of(answer)
        failure = Failure(ERROR, "Oops", error) if error else None
        done = Completion(lease.lease, SECOND_NS, b"", failure, login=login)
        (worker,) = [each.worker for each in of(actions.AssignLeases, answer)]
        (end,) = ends(self.tell(events.LeasesCompleted(worker, [done])))
        return end


def test_an_attempt_that_finds_nobody_logged_in_goes_back_and_wants_the_login_task() -> None:
    node = Login()
    end = node.run(LOGIN_WANTED, "nobody is logged in")
    assert (end.kind, end.failure) == ("untouched", None)
    assert end.login is not None
    assert (end.login.said, end.login.task, end.login.args) == ("wanted", "q.log_in", b"\x81")
    node = Login(SessionPolicy())  # by now it has none
    end = node.run(LOGIN_WANTED, "nobody is logged in")
    assert (end.kind, end.login) == ("failed", None)


def test_after_a_login_an_attempt_says_whether_it_has_worked() -> None:
    node = Login()
    worked = node.run(NO_LOGIN, again=True)
    assert (worked.kind, worked.login and worked.login.said) == ("succeeded", "worked")
    end = node.run(LOGIN_WANTED, "the site still asks", again=True)
    assert (end.kind, end.login and end.login.said) == ("failed", "failed")
    assert end.login is not None
    assert end.login.problem == "Oops: the site still asks"
    assert end.retry_ns > 0
    other = node.run(NO_LOGIN, "no price", again=True)
    assert (other.kind, other.login) == ("failed", None)


def test_an_attempt_whose_login_task_failed_has_failed_before_it_begins() -> None:
    node = Login()
    waited = structs.replace(attempt("a", session="acme"), login_error="it did not work: no")
    answer = node.grant(waited)
    assert leases_of(answer) == []
    (end,) = ends(answer)
    assert (end.kind, end.login) == ("failed", None)
    assert end.failure is not None
    assert (end.failure.type, end.failure.message) == ("LoginFailed", "it did not work: no")
    assert end.retry_ns > 0
    last = structs.replace(waited, attempt=9, claim=8)
    (end,) = ends(node.grant(last, request=2))
    assert end.retry_ns == NOT_GIVEN
