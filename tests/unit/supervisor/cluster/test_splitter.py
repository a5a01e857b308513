"""The splitter: what goes to the engine, what to local.sock, and what clients are told of both."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.wire import messages as wire
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import (
    ELSEWHERE,
    INVALID_TASK,
    QUEUE_FULL,
    SUCCEEDED,
    Change,
    Outcome,
    ProgressNote,
    Rejection,
    TaskSpec,
    TaskView,
)
from musterd.ipc.wire.resolving import Resolve, Resolved
from musterd.supervisor.cluster import splitter as splitter_module
from musterd.supervisor.cluster.engine import Ended, Verdict
from musterd.supervisor.cluster.gateway import AWAY_NS, IDLE_POLL_NS, Gateway
from musterd.supervisor.cluster.sidecar_events import (
    AdviceAsked,
    AskLocal,
    Call,
    EndLocal,
    EndPeer,
    EngineAnswered,
    GiveAdvice,
    Invalidated,
    LocalLost,
    LocalSaid,
    LookedUp,
    PassOn,
    PoolsTold,
    SchedulesAsked,
    ShowView,
    ToldOfSchedules,
    ViewAsked,
)
from musterd.supervisor.cluster.splitter import Splitter
from musterd.supervisor.cluster.watching import Changed, ChangeNote
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    Acknowledge,
    Deliver,
    DropRequest,
    LookUp,
    TellChanges,
    TellMissing,
    TellProgress,
)

ANN, BOB = b"ann", b"bob"
SECOND_NS = 1_000_000_000


class Bench:
    """A splitter with the local pool `own`, and the calls of its gateway by their method."""

    def __init__(self) -> None:
        self.gateway = Gateway(7, Random(1))
        self.splitter = Splitter(self.gateway, self.prepare)
        self.now_ns = SECOND_NS
        self.calls: dict[str, Call] = {}
        self.refused: list[Rejection] = []
        self.feed(PoolsTold(("own",)))
        self.feed(events.Started())
        self.answer("ended", Ended((), "1:1:"))

    def prepare(self, event: events.TasksSubmitted) -> events.TasksSubmitted:
        ids = {each.id for each in self.refused}
        tasks = [structs.replace(s, target="seen") for s in event.tasks if s.id not in ids]
        return structs.replace(event, tasks=tasks, rejected=list(self.refused))

    def feed(self, event: object) -> list[Any]:
        out: list[Any] = []
        for action in self.splitter.handle(self.now_ns, event):
            if isinstance(action, Call):
                self.calls[action.method] = action
            else:
                out.append(action)
        self.splitter.validate()
        return out

    def answer(self, method: str, result: object) -> list[Any]:
        return self.feed(EngineAnswered(self.calls.pop(method).ticket, result))

    def accept(self, *ids: str) -> list[Any]:
        return self.answer("submit", [Verdict(id_, "accepted") for id_ in ids])

    def sent(self) -> list[str]:
        specs = self.calls["submit"].arguments[0]
        assert isinstance(specs, list)
        assert {each.target for each in specs} == {"seen"}, "it was not checked"
        return [each.id for each in specs]

    def submit(self, *specs: TaskSpec, request: int = 1, resend: bool = False) -> list[Any]:
        return self.feed(events.TasksSubmitted(ANN, request, list(specs), 0, resend))

    def say(self, message: wire.ServerMessage, peer: bytes = ANN) -> list[Any]:
        return self.feed(LocalSaid(peer, message, encode(message)))

    def go_away(self) -> list[Any]:
        """The engine answers no call any more."""
        self.now_ns += IDLE_POLL_NS
        self.feed(events.Ticked())
        self.now_ns += AWAY_NS
        out = self.feed(events.Ticked())
        assert self.gateway.refusing
        return out


@pytest.fixture
def bench() -> Bench:
    return Bench()


def own(id_: str) -> TaskSpec:
    return TaskSpec(id_, "own.x", b"")


def shared(id_: str) -> TaskSpec:
    return TaskSpec(id_, "shared.x", b"")


def ask(*specs: TaskSpec, request: int = 1, resend: bool = False) -> AskLocal:
    return AskLocal(ANN, wire.Submit(request, list(specs), resend))


# -- submits ----------------------------------------------------------------------------------


def test_shared_tasks_go_to_the_engine_alone(bench: Bench) -> None:
    assert bench.submit(shared("a")) == []
    assert bench.sent() == ["a"]
    assert bench.accept("a") == [Acknowledge(ANN, 1, [])]


def test_tasks_of_unknown_pools_go_to_the_engine(bench: Bench) -> None:
    assert bench.submit(TaskSpec("a", "other.x", b"")) == []
    assert bench.sent() == ["a"]


def test_local_tasks_go_to_local_sock_alone(bench: Bench) -> None:
    assert bench.submit(own("a"), own("b")) == [ask(own("a"), own("b"))]
    assert "submit" not in bench.calls
    full = Rejection("b", QUEUE_FULL, "full")
    assert bench.say(wire.Accepted(1, [full])) == [Acknowledge(ANN, 1, [full])]
    assert bench.splitter.is_idle


def test_a_mixed_submit_is_answered_once_when_both_have_answered(bench: Bench) -> None:
    assert bench.submit(own("a"), shared("b"), own("c")) == [ask(own("a"), own("c"))]
    assert bench.sent() == ["b"]
    no = Rejection("a", INVALID_TASK, "no")
    assert bench.say(wire.Accepted(1, [no])) == []
    assert bench.accept("b") == [Acknowledge(ANN, 1, [no])]


def test_a_mixed_submit_may_be_answered_the_other_way_round(bench: Bench) -> None:
    bench.submit(own("a"), shared("b"))
    rejected = Rejection("b", INVALID_TASK, "no")
    verdict = Verdict("b", "rejected", rejection=rejected)
    assert bench.answer("submit", [verdict]) == []
    assert bench.say(wire.Accepted(1)) == [Acknowledge(ANN, 1, [rejected])]


def test_what_is_checked_here_is_what_goes_to_the_engine(bench: Bench) -> None:
    bench.refused = [Rejection("b", INVALID_TASK, "a secret")]
    bench.submit(own("a"), shared("b"), shared("c"))
    assert bench.sent() == ["c"]
    bench.say(wire.Accepted(1))
    assert bench.accept("c") == [Acknowledge(ANN, 1, bench.refused)]


def test_local_tasks_are_accepted_while_the_engine_is_away(bench: Bench) -> None:
    bench.go_away()
    bench.submit(own("a"))
    assert bench.say(wire.Accepted(1)) == [Acknowledge(ANN, 1, [])]
    bench.submit(own("b"), shared("c"), request=2)
    [told] = bench.say(wire.Accepted(2))
    assert [(each.id, each.code) for each in told.rejected] == [("c", QUEUE_FULL)]


def test_what_was_sent_before_is_asked_of_this_machine_first(bench: Bench) -> None:
    """The pool may have been local then."""
    assert bench.submit(shared("a"), shared("b"), resend=True) == [
        ask(shared("a"), shared("b"), resend=True)
    ]
    assert "submit" not in bench.calls
    assert bench.splitter.submits_of(ANN)
    assert bench.say(wire.Accepted(1, [Rejection("b", ELSEWHERE, "")])) == []
    assert bench.sent() == ["b"]
    assert bench.calls["submit"].options["resend"] is True
    assert bench.accept("b") == [Acknowledge(ANN, 1, [])]


def test_what_was_sent_before_and_is_known_here_is_not_sent_to_the_engine(bench: Bench) -> None:
    bench.submit(shared("a"), own("b"), resend=True)
    assert bench.say(wire.Accepted(1)) == [Acknowledge(ANN, 1, [])]
    assert "submit" not in bench.calls


def test_a_pool_that_is_not_local_any_more_is_the_engines(bench: Bench) -> None:
    """The supervisor knows it before the splitter."""
    bench.submit(own("a"), own("b"))
    bench.say(wire.Accepted(1, [Rejection("a", ELSEWHERE, ""), Rejection("b", ELSEWHERE, "")]))
    assert bench.sent() == ["a", "b"]
    assert bench.accept("a", "b") == [Acknowledge(ANN, 1, [])]


def test_an_answer_that_comes_twice_or_for_nobody_changes_nothing(bench: Bench) -> None:
    bench.submit(own("a"))
    bench.say(wire.Accepted(1))
    assert bench.say(wire.Accepted(1)) == []
    assert bench.say(wire.Accepted(9)) == []
    assert bench.say(wire.Accepted(1), peer=BOB) == []


def test_a_request_that_the_gateway_drops_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("musterd.supervisor.cluster.gateway.QUEUED_MAX", 0)
    bench.submit(shared("a"), resend=True)
    out = bench.say(wire.Accepted(1, [Rejection("a", ELSEWHERE, "")]))
    assert [type(each) for each in out] == [DropRequest]
    assert not bench.splitter.submits_of(ANN)


# -- cancels ----------------------------------------------------------------------------------


def test_a_cancel_goes_to_both_sides(bench: Bench) -> None:
    out = bench.feed(events.CancelRequested(["a"], ANN, 5))
    assert out == [AskLocal(ANN, wire.Cancel(["a"]))]
    assert bench.calls["cancel"].arguments == (["a"],)
    assert bench.answer("cancel", []) == [Acknowledge(ANN, 5, [])]


def test_a_cancel_does_not_overtake_its_submit(bench: Bench) -> None:
    bench.submit(shared("a"), resend=True)
    bench.feed(events.CancelRequested(["a"], ANN, 5))
    assert "cancel" not in bench.calls
    bench.say(wire.Accepted(1, [Rejection("a", ELSEWHERE, "")]))
    assert bench.sent() == ["a"]
    bench.accept("a")
    assert bench.calls["cancel"].arguments == (["a"],)


def test_results_are_forgotten_on_both_sides(bench: Bench) -> None:
    assert bench.feed(Invalidated(ANN, "k", True)) == [AskLocal(ANN, wire.Invalidate("k", True))]
    assert bench.calls["invalidate"].arguments == ("k",)
    assert bench.splitter.submits_of(ANN), "the next answer would prove nothing"


# -- watched tasks ----------------------------------------------------------------------------


def watch(bench: Bench, *ids: str) -> None:
    out = bench.feed(events.TasksWatched(ANN, list(ids)))
    assert out == [AskLocal(ANN, wire.Watch(list(ids))), LookUp(ANN, list(ids))]


def test_a_task_is_missing_if_both_say_so(bench: Bench) -> None:
    watch(bench, "a", "b")
    assert bench.say(wire.Missing(["a", "b"])) == []
    assert bench.feed(LookedUp(ANN, absent=("a",))) == [TellMissing(ANN, ["a"])]
    assert bench.feed(LookedUp(ANN, absent=("b",))) == [TellMissing(ANN, ["b"])]
    assert bench.splitter.is_idle


def test_a_task_that_the_engine_does_not_have_may_be_here(bench: Bench) -> None:
    watch(bench, "a")
    assert bench.feed(LookedUp(ANN, absent=("a",))) == []
    results = wire.Results([Outcome("a", SUCCEEDED)])
    assert bench.say(results) == [PassOn(ANN, encode(results))]
    assert bench.splitter.is_idle


def test_a_task_that_has_ended_here_is_not_missing(bench: Bench) -> None:
    watch(bench, "a")
    bench.say(wire.Results([Outcome("a", SUCCEEDED)]))
    assert bench.feed(LookedUp(ANN, absent=("a",))) == []
    assert bench.splitter.is_idle


def test_a_task_of_the_engine_is_not_missing(bench: Bench) -> None:
    watch(bench, "a", "b")
    assert bench.say(wire.Missing(["a"])) == []
    bench.feed(LookedUp(ANN, ended=("a", "b")))
    assert bench.say(wire.Missing(["b"])) == []
    assert bench.splitter.is_idle


def test_a_task_that_the_engine_has_lost_is_missing(bench: Bench) -> None:
    bench.submit(shared("a"))
    bench.accept("a")
    assert bench.feed(LookedUp(ANN, absent=("a",))) == [TellMissing(ANN, ["a"])]


def test_watched_tasks_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitter_module, "WATCHES_MAX", 2)
    watch(bench, "a", "b")
    out = bench.feed(events.TasksWatched(ANN, ["c"]))
    assert EndPeer(ANN, splitter_module.TOO_MANY) in out
    bench.feed(events.PeerLost(ANN))
    watch(bench, "a", "b")


# -- questions --------------------------------------------------------------------------------


def test_a_view_is_asked_of_this_machine_first(bench: Bench) -> None:
    assert bench.feed(ViewAsked(ANN, 4, "a")) == [AskLocal(ANN, wire.Inspect(4, "a"))]
    view = TaskView("a", "own.x", "queued", "normal")
    assert bench.say(wire.Inspected(4, view)) == [ShowView(4, "a", view)]
    bench.feed(ViewAsked(ANN, 5, "b"))
    assert bench.say(wire.Inspected(5, None)) == [ShowView(5, "b", None)]
    assert bench.say(wire.Inspected(5, None)) == []


def test_advice_is_the_supervisors(bench: Bench) -> None:
    assert bench.feed(AdviceAsked(ANN, 4)) == [AskLocal(ANN, wire.Advise(4))]
    assert bench.say(wire.Advice(4, {"own": 3})) == [GiveAdvice(4, {"own": 3})]


def test_tasks_of_a_function_are_asked_of_this_machine_first(bench: Bench) -> None:
    question = Resolve(4, "m:f")
    assert bench.feed(SchedulesAsked(ANN, 4, question)) == [AskLocal(ANN, question)]
    answer = Resolved(4, ["own.f"])
    assert bench.say(answer) == [ToldOfSchedules(4, answer)]
    assert bench.say(answer) == []


def test_progress_is_passed_on(bench: Bench) -> None:
    bench.submit(own("a"))
    note = ProgressNote("a", 0.5, "half")
    assert bench.say(note) == [TellProgress([ANN], note)]


def test_outcomes_of_the_engine_are_passed_on(bench: Bench) -> None:
    watch(bench, "a")
    bench.submit(shared("a"), resend=True)
    bench.say(wire.Accepted(1, [Rejection("a", ELSEWHERE, "")]))
    outcome = Outcome("a", SUCCEEDED)
    out = bench.answer("submit", [Verdict("a", "answered", outcome)])
    assert out == [Acknowledge(ANN, 1, []), Deliver(ANN, [outcome])]


# -- changes ----------------------------------------------------------------------------------


def follow(bench: Bench) -> None:
    assert bench.feed(events.ChangesFollowed(ANN)) == [AskLocal(ANN, wire.Follow())]


LOCAL, SHARED = Change("mine", "t1"), Change("ours", "t2", "d")


def test_the_first_answer_has_the_changes_of_both_sides(bench: Bench) -> None:
    follow(bench)
    assert bench.say(wire.Changes([LOCAL], newest=True)) == []
    out = bench.answer("changes", Changed((ChangeNote(3, "ours", "t2", "d"),), "5:5:"))
    assert out == [TellChanges(ANN, [LOCAL, SHARED])]
    news = wire.Changes([Change("mine", "t9")])
    assert bench.say(news) == [PassOn(ANN, encode(news))]


def test_while_the_engine_is_away_the_first_answer_has_those_of_this_machine(bench: Bench) -> None:
    follow(bench)
    assert bench.say(wire.Changes([LOCAL], newest=True)) == []
    assert TellChanges(ANN, [LOCAL]) in bench.go_away()
    # What the engine says later would be taken for news.
    out = bench.answer("changes", Changed((ChangeNote(3, "ours", "t2", "d"),), "5:5:"))
    assert not [each for each in out if isinstance(each, TellChanges)]


# -- ends of connections ----------------------------------------------------------------------


def test_a_client_whose_other_connection_ends_asks_again(bench: Bench) -> None:
    bench.submit(own("a"))
    assert bench.feed(LocalLost(ANN, "gone")) == [EndPeer(ANN, "gone")]
    assert bench.feed(LocalLost(ANN, "gone")) == []
    assert bench.submit(own("b"), request=2) == [], "no other connection is made for it"
    out = bench.feed(events.PeerLost(ANN))
    assert [each.request for each in out if isinstance(each, DropRequest)] == [1, 2]
    assert bench.splitter.is_idle


def test_a_client_that_goes_takes_everything_along(bench: Bench) -> None:
    bench.submit(own("a"), shared("b"))
    bench.submit(shared("c"), request=2, resend=True)
    bench.feed(events.CancelRequested(["c"], ANN, 3))
    bench.feed(ViewAsked(ANN, 4, "a"))
    watch(bench, "d")
    bench.feed(events.ChangesFollowed(ANN))
    out = bench.feed(events.PeerLost(ANN))
    assert EndLocal(ANN) in out
    assert {each.request for each in out if isinstance(each, DropRequest)} == {1, 2, 3, 4}
    assert bench.say(wire.Accepted(1)) == []
    bench.accept("b")
    assert bench.splitter.is_idle


def test_a_client_without_a_connection_here_ends_none(bench: Bench) -> None:
    bench.submit(shared("a"))
    assert not [each for each in bench.feed(events.PeerLost(ANN)) if isinstance(each, EndLocal)]
