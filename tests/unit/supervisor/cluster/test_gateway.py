"""The gateway between clients and the engine: which calls it makes, and what it tells when."""

from itertools import pairwise
from random import Random

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    QUEUE_FULL,
    SUCCEEDED,
    UNKNOWN_TASK,
    Change,
    Outcome,
    ProgressNote,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.cluster import gateway as gateway_module
from musterd.supervisor.cluster.calls import PAUSE_MAX_NS, PAUSE_NS
from musterd.supervisor.cluster.engine import (
    BATCH_MAX,
    Ended,
    Fetched,
    Verdict,
)
from musterd.supervisor.cluster.gateway import (
    AWAY_NS,
    IDLE_POLL_NS,
    MARKS_NS,
    MARKS_SLACK_NS,
    POLL_NS,
    Gateway,
)
from musterd.supervisor.cluster.handling import (
    ProgressMark,
)
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EndPeer,
    EngineAnswered,
    EngineFailed,
    LookedUp,
    Notified,
    TellChange,
)
from musterd.supervisor.cluster.watches import LOOK_NS
from musterd.supervisor.cluster.watching import Changed, ChangeNote
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import (
    Acknowledge,
    Deliver,
    DropRequest,
    LookUp,
    Report,
    TellChanges,
    TellMissing,
    TellProgress,
)

ANN, BOB = b"ann", b"bob"
WAITER = 77


class Bench:
    """A gateway that has begun, with a clock. The calls under way are found by their method."""

    def __init__(self) -> None:
        self.gateway = Gateway(WAITER, Random(1))
        self.now_ns = SECOND_NS
        self.calls: dict[str, Call] = {}

    def feed(self, event: object) -> list[object]:
        """Handle an event; return the actions that are no calls."""
        out: list[object] = []
        for action in self.gateway.handle(self.now_ns, event):
            if isinstance(action, Call):
                assert action.method not in self.calls, "one call of a kind at a time"
                self.calls[action.method] = action
            else:
                out.append(action)
        self.gateway.validate()
        return out

    def answer(self, method: str, result: object) -> list[object]:
        return self.feed(EngineAnswered(self.calls.pop(method).ticket, result))

    def fail(self, method: str, *, refused: bool = False) -> list[object]:
        return self.feed(EngineFailed(self.calls.pop(method).ticket, "gone", refused))

    def pass_ns(self, by_ns: int) -> list[object]:
        self.now_ns += by_ns
        return self.feed(events.Ticked())

    def submit(
        self, *ids: str, peer: bytes = ANN, request: int = 1, resend: bool = False
    ) -> list[object]:
        specs = [spec(id_) for id_ in ids]
        return self.feed(events.TasksSubmitted(peer, request, specs, 0, resend))

    def sent(self) -> list[str]:
        specs = self.calls["submit"].arguments[0]
        assert isinstance(specs, list)
        return [each.id for each in specs]

    def accepted(self, *ids: str, peer: bytes = ANN, request: int = 1) -> None:
        """Have tasks that were accepted."""
        self.submit(*ids, peer=peer, request=request)
        told = self.answer("submit", [Verdict(id_, "accepted") for id_ in ids])
        assert told == [Acknowledge(peer, request, [])]


def spec(id_: str, args: bytes = b"\x80") -> TaskSpec:
    return TaskSpec(id_, "p.extract", args)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    assert bench.feed(events.Started()) == []
    assert bench.calls["ended"].arguments == (0, "")
    bench.answer("ended", Ended((), "5:5:"))
    return bench


# -- submits ----------------------------------------------------------------------------------


def test_a_submit_is_acknowledged_after_the_engine_has_answered(bench: Bench) -> None:
    assert bench.submit("a", "b", request=9) == []
    call = bench.calls["submit"]
    assert call.arguments == ([spec("a"), spec("b")],)
    assert call.options == {"waiter": WAITER, "resend": False}
    refused = Rejection("b", UNKNOWN_TASK, "no node has it")
    verdicts = [Verdict("a", "accepted"), Verdict("b", "rejected", rejection=refused)]
    assert bench.answer("submit", verdicts) == [Acknowledge(ANN, 9, [refused])]


def test_it_is_known_whether_a_client_has_submits_under_way(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("b", peer=BOB, request=2)
    assert bench.gateway.submits_of(ANN)
    bench.answer("submit", [Verdict("a", "accepted")])
    assert not bench.gateway.submits_of(ANN)
    assert bench.gateway.submits_of(BOB)


def test_results_to_be_forgotten_are_under_way_for_everybody(bench: Bench) -> None:
    """A client takes the answer to its next question for the proof that they are forgotten."""
    bench.feed(events.InvalidateRequested("k"))
    assert bench.gateway.submits_of(ANN)
    bench.answer("invalidate", None)
    assert not bench.gateway.submits_of(ANN)


def test_a_gateway_that_is_held_writes_nothing_but_looks_up(bench: Bench) -> None:
    bench.gateway.held = True
    bench.submit("a")
    assert "submit" not in bench.calls
    assert bench.feed(events.TasksWatched(BOB, ["b"])) == [LookUp(BOB, ["b"])]
    bench.gateway.held = False
    bench.feed(events.Ticked())
    assert bench.sent() == ["a"]


def test_submits_gather_while_a_call_is_under_way(bench: Bench) -> None:
    bench.submit("a", request=1)
    bench.submit("b", request=2)
    bench.submit("c", "d", peer=BOB, request=3)
    assert bench.sent() == ["a"]
    assert bench.answer("submit", [Verdict("a", "accepted")]) == [Acknowledge(ANN, 1, [])]
    assert bench.sent() == ["b", "c", "d"]
    told = bench.answer("submit", [Verdict(id_, "accepted") for id_ in "bcd"])
    assert told == [Acknowledge(ANN, 2, []), Acknowledge(BOB, 3, [])]


def test_a_batch_has_a_limit_of_tasks(bench: Bench) -> None:
    bench.submit("first")
    many = [f"m{number}" for number in range(BATCH_MAX - 1)]
    bench.submit(*many, request=2)
    bench.submit("x", "y", request=3)
    bench.answer("submit", [Verdict("first", "accepted")])
    assert bench.sent() == many


def test_a_batch_has_a_limit_of_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "BATCH_BYTES", 2000)
    bench.submit("first")
    for request, size in ((2, 1000), (3, 1000), (4, 9000)):
        body = spec(f"t{request}", bytes(size))
        bench.feed(events.TasksSubmitted(ANN, request, [body], 0))
    bench.answer("submit", [Verdict("first", "accepted")])
    for id_ in ("t2", "t3", "t4"):  # the last is too large for any batch, and goes alone
        assert bench.sent() == [id_]
        bench.answer("submit", [Verdict(id_, "accepted")])


def test_resends_are_sent_as_such(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("b", request=2)
    bench.submit("c", request=3, resend=True)
    bench.answer("submit", [Verdict("a", "accepted")])
    assert bench.sent() == ["b"]
    bench.answer("submit", [Verdict("b", "accepted")])
    assert bench.sent() == ["c"]
    assert bench.calls["submit"].options["resend"] is True


def test_a_submit_that_is_answered_from_memory_is_delivered_after_its_acknowledgement(
    bench: Bench,
) -> None:
    bench.submit("a")
    outcome = Outcome("a", SUCCEEDED, b"\x01", cached=True)
    told = bench.answer("submit", [Verdict("a", "answered", outcome)])
    assert told == [Acknowledge(ANN, 1, []), Deliver(ANN, [outcome])]


def test_what_the_shell_refused_is_in_the_acknowledgement(bench: Bench) -> None:
    refused = Rejection("b", "InvalidTask", "a secret")
    bench.feed(events.TasksSubmitted(ANN, 1, [spec("a")], 0, rejected=[refused]))
    told = bench.answer("submit", [Verdict("a", "accepted")])
    assert told == [Acknowledge(ANN, 1, [refused])]


# -- results ----------------------------------------------------------------------------------


def test_a_result_is_looked_up_for_who_submitted_it_when_the_engine_says_that_it_ended(
    bench: Bench,
) -> None:
    bench.accepted("a", "b")
    bench.feed(Notified())
    assert bench.calls["ended"].arguments == (WAITER, "5:5:")
    assert bench.answer("ended", Ended(("b", "other"), "9:9:")) == [LookUp(ANN, ["b"])]
    bench.feed(LookedUp(ANN, ("b",)))
    bench.feed(Notified())
    assert bench.calls["ended"].arguments == (WAITER, "9:9:")
    assert bench.answer("ended", Ended(("b",), "9:9:")) == []  # it has it already


def test_a_notification_during_a_call_makes_another(bench: Bench) -> None:
    bench.feed(Notified())
    bench.feed(Notified())
    bench.answer("ended", Ended((), "6:6:"))
    assert "ended" in bench.calls


def test_the_engine_is_polled_behind_notifications(bench: Bench) -> None:
    bench.accepted("a")
    bench.pass_ns(POLL_NS - 1)
    assert "ended" not in bench.calls
    bench.pass_ns(1)
    assert "ended" in bench.calls


def test_the_engine_is_polled_seldom_where_nobody_waits(bench: Bench) -> None:
    bench.pass_ns(IDLE_POLL_NS - 1)
    assert bench.calls == {}
    assert bench.gateway.next_deadline() == bench.now_ns + 1
    bench.pass_ns(1)
    assert "ended" in bench.calls


def test_a_task_that_ends_before_its_submit_is_answered_is_not_missed(bench: Bench) -> None:
    bench.submit("a")
    bench.feed(Notified())
    assert bench.answer("ended", Ended(("a",), "7:7:")) == []
    told = bench.answer("submit", [Verdict("a", "accepted")])
    assert told == [Acknowledge(ANN, 1, []), LookUp(ANN, ["a"])]


def test_nothing_is_called_before_it_is_known_where_the_ends_begin() -> None:
    bench = Bench()
    bench.submit("a")
    assert bench.feed(events.TasksWatched(BOB, ["b"])) == []
    assert list(bench.calls) == ["ended"]
    assert bench.answer("ended", Ended((), "1:1:")) == [LookUp(BOB, ["b"])]
    assert bench.sent() == ["a"]


def test_a_watched_task_is_looked_up_at_once_and_when_it_ends(bench: Bench) -> None:
    assert bench.feed(events.TasksWatched(ANN, ["a", "b", "c"])) == [LookUp(ANN, ["a", "b", "c"])]
    told = bench.feed(LookedUp(ANN, ended=("b",), absent=("c",)))
    assert told == [TellMissing(ANN, ["c"])]
    bench.feed(Notified())
    assert bench.answer("ended", Ended(("a", "b", "c"), "7:7:")) == [LookUp(ANN, ["a"])]


def test_a_watched_task_of_another_node_is_looked_at_in_turn(bench: Bench) -> None:
    bench.feed(events.TasksWatched(ANN, ["a", "b"]))
    assert "fetch" not in bench.calls  # the lookup says it, for now
    bench.pass_ns(POLL_NS)
    assert bench.calls["fetch"].arguments == (["a", "b"], -1)
    assert bench.answer("fetch", Fetched(alive=("a", "b"))) == []
    bench.pass_ns(POLL_NS)
    told = bench.answer("fetch", Fetched(alive=("a",), unread=("b",)))
    assert told == [LookUp(ANN, ["b"])]
    bench.feed(LookedUp(ANN, ("b",)))
    bench.pass_ns(POLL_NS)
    assert bench.calls["fetch"].arguments == (["a"], -1)
    assert bench.answer("fetch", Fetched(absent=("a",))) == [TellMissing(ANN, ["a"])]


def looks_within(bench: Bench, by_ns: int, took_ns: int = 0) -> list[int]:
    """Return after how long each look at the foreign task `a` is made, for a time."""
    began_ns, looks = bench.now_ns, []
    while (at_ns := bench.gateway.next_deadline() or 0) - began_ns <= by_ns:
        bench.pass_ns(max(0, at_ns - bench.now_ns))
        if "fetch" in bench.calls:
            looks.append(bench.now_ns - began_ns)
            bench.now_ns += took_ns
            bench.answer("fetch", Fetched(alive=("a",)))
        for method, result in (("ended", Ended((), "7:7:")), ("marks", [])):
            if method in bench.calls:
                bench.answer(method, result)
    return looks


def test_who_has_waited_long_for_a_task_of_another_node_waits_a_little_longer(bench: Bench) -> None:
    bench.feed(events.TasksWatched(ANN, ["a"]))
    looks = looks_within(bench, 20 * SECOND_NS)
    assert looks[0] == LOOK_NS
    gaps = [after - before for before, after in pairwise(looks)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == POLL_NS
    assert all(gap <= max(LOOK_NS, at // 16) for at, gap in zip(looks, gaps, strict=False))
    bench.feed(events.TasksWatched(BOB, ["b"]))
    assert looks_within(bench, SECOND_NS)[1] < POLL_NS  # at most one of the former pauses is left


def test_slow_looks_at_tasks_of_other_nodes_are_rare(bench: Bench) -> None:
    bench.feed(events.TasksWatched(ANN, ["a"]))
    looks = looks_within(bench, SECOND_NS, took_ns=LOOK_NS // 5)
    assert {after - before for before, after in pairwise(looks)} == {LOOK_NS // 5 * 21}


def test_foreign_tasks_have_their_turn_whatever_their_number(bench: Bench) -> None:
    ids = [f"t{number}" for number in range(BATCH_MAX + 5)]
    bench.feed(events.TasksWatched(ANN, ids[:BATCH_MAX]))
    bench.feed(events.TasksWatched(ANN, ids[BATCH_MAX:]))
    turns: list[list[str]] = []
    for _ in range(2):
        bench.pass_ns(POLL_NS)
        turns += bench.calls["fetch"].arguments[:1]  # type: ignore[arg-type]
        bench.answer("fetch", Fetched(alive=tuple(turns[-1])))
    assert [len(turn) for turn in turns] == [BATCH_MAX, BATCH_MAX]
    assert set(turns[0]) | set(turns[1]) == set(ids)


def test_a_known_task_of_another_node_is_looked_at_in_turn(bench: Bench) -> None:
    bench.submit("a", resend=True)
    bench.answer("submit", [Verdict("a", "known")])
    bench.pass_ns(POLL_NS)
    assert bench.calls["fetch"].arguments == (["a"], -1)


def test_a_lost_client_waits_for_nothing(bench: Bench) -> None:
    bench.accepted("a")
    bench.accepted("b", peer=BOB, request=2)
    bench.feed(events.TasksWatched(BOB, ["a"]))
    bench.feed(events.PeerLost(ANN))
    bench.feed(Notified())
    told = bench.answer("ended", Ended(("a", "b"), "7:7:"))
    assert told == [LookUp(BOB, ["a", "b"])]


def test_what_a_lost_client_has_queued_is_dropped(bench: Bench) -> None:
    bench.submit("a", request=1)
    bench.submit("b", request=2)
    assert [type(each) for each in bench.feed(events.PeerLost(ANN))] == [DropRequest]
    told = bench.answer("submit", [Verdict("a", "accepted")])
    assert [type(each) for each in told] == [Acknowledge]  # frees what the port counted
    assert "submit" not in bench.calls
    bench.feed(Notified())
    assert bench.answer("ended", Ended(("a",), "7:7:")) == []


def test_a_client_that_waits_for_too_many_is_let_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "WATCHES_MAX", 3)
    bench.accepted("a", "b")
    told = bench.submit("c", "d", request=2)
    assert [each.code for each in rejected_of(told)] == [QUEUE_FULL, QUEUE_FULL]
    assert isinstance(bench.feed(events.TasksWatched(BOB, ["x", "y"]))[0], EndPeer)


def rejected_of(told: list[object]) -> list[Rejection]:
    (answer,) = [each for each in told if isinstance(each, Acknowledge)]
    return answer.rejected


# -- cancels and invalidations ----------------------------------------------------------------


def test_a_cancel_comes_after_the_submits_before_it(bench: Bench) -> None:
    bench.submit("a")
    bench.feed(events.CancelRequested(["a"], ANN, 2))
    bench.feed(events.CancelRequested(["b", "a"], BOB, 3))
    bench.submit("c", request=4)
    assert list(bench.calls) == ["submit"]
    bench.answer("submit", [Verdict("a", "accepted")])
    assert bench.calls["cancel"].arguments == (["a", "b"],)
    told = bench.answer("cancel", ["a"])
    assert told == [Acknowledge(ANN, 2, []), Acknowledge(BOB, 3, [])]
    assert bench.sent() == ["c"]


def test_an_invalidation_comes_after_the_submits_before_it(bench: Bench) -> None:
    bench.submit("a")
    bench.feed(events.InvalidateRequested("k", True))
    bench.answer("submit", [Verdict("a", "accepted")])
    assert bench.calls["invalidate"] == Call(3, "invalidate", ("k",), {"prefix": True})


# -- outages ----------------------------------------------------------------------------------


def test_a_submit_that_failed_is_sent_again_as_a_resend(bench: Bench) -> None:
    bench.submit("a")
    assert bench.fail("submit") == []
    assert "submit" not in bench.calls
    bench.pass_ns(PAUSE_NS)
    assert bench.sent() == ["a"]
    assert bench.calls["submit"].options["resend"] is True
    outcome = Outcome("a", SUCCEEDED, b"\x01")
    told = bench.answer("submit", [Verdict("a", "known", outcome)])
    assert told == [Acknowledge(ANN, 1, []), Deliver(ANN, [outcome])]


def test_pauses_between_attempts_grow_and_have_a_limit(bench: Bench) -> None:
    bench.submit("a")
    pauses = []
    for _ in range(12):
        bench.fail("submit")
        bench.calls.pop("ended", None)
        before_ns = bench.now_ns
        while "submit" not in bench.calls:
            bench.pass_ns(PAUSE_NS // 10)
        pauses.append(bench.now_ns - before_ns)
    assert pauses[0] <= PAUSE_NS
    assert pauses[4] > 3 * pauses[0]
    assert max(pauses) <= PAUSE_MAX_NS + PAUSE_NS


def test_new_submits_are_refused_when_the_engine_is_away(bench: Bench) -> None:
    bench.submit("a", request=1)
    bench.submit("b", request=2)
    bench.submit("c", request=3, resend=True)
    bench.fail("submit")  # whether `a` was accepted is not known
    told = bench.pass_ns(AWAY_NS)
    assert isinstance(told[0], Report)
    (rejection,) = rejected_of(told)
    assert (rejection.id, rejection.code) == ("b", QUEUE_FULL)
    assert rejection.retry_after_ns > 0
    (rejection,) = rejected_of(bench.submit("d", request=4))
    assert rejection.id == "d"
    assert bench.submit("e", request=5, resend=True) == []
    bench.calls.pop("submit", None)


def test_a_submit_that_never_reached_the_engine_is_refused_as_well(bench: Bench) -> None:
    bench.submit("a")
    bench.feed(EngineFailed(bench.calls.pop("submit").ticket, "no connection", unsent=True))
    told = bench.pass_ns(AWAY_NS)
    assert [each.id for each in rejected_of(told)] == ["a"]


def test_a_silent_engine_is_away(bench: Bench) -> None:
    bench.submit("a")
    assert bench.submit("b", request=2) == []
    assert bench.gateway.next_deadline() is not None
    bench.pass_ns(AWAY_NS - 1)
    told = bench.pass_ns(1)
    assert [each.id for each in rejected_of(told)] == ["b"]
    told = bench.answer("submit", [Verdict("a", "accepted")])
    assert told == [Report("cluster.reachable"), Acknowledge(ANN, 1, [])]
    assert bench.submit("c", request=3) == []


def test_after_an_outage_everything_that_is_watched_is_looked_at(bench: Bench) -> None:
    bench.accepted("a", "b")
    bench.feed(Notified())
    bench.fail("ended")
    bench.pass_ns(PAUSE_NS)
    bench.answer("ended", Ended((), "3:3:"))
    assert bench.calls["fetch"].arguments == (["a", "b"], -1)
    assert bench.answer("fetch", Fetched(alive=("a",), unread=("b",))) == [LookUp(ANN, ["b"])]
    bench.pass_ns(POLL_NS)
    assert "fetch" not in bench.calls  # once


def test_a_look_that_failed_is_made_again(bench: Bench) -> None:
    bench.accepted("a")
    bench.feed(Notified())
    bench.fail("ended")
    bench.pass_ns(PAUSE_NS)
    bench.answer("ended", Ended((), "3:3:"))
    bench.fail("fetch")
    bench.pass_ns(PAUSE_NS)
    assert bench.calls["fetch"].arguments == (["a"], -1)


def test_of_a_batch_that_the_engine_refuses_each_submit_is_tried_alone(bench: Bench) -> None:
    bench.submit("first")
    for request, id_ in ((2, "good"), (3, "bad")):
        bench.submit(id_, request=request)
    bench.answer("submit", [Verdict("first", "accepted")])
    bench.fail("submit", refused=True)
    assert bench.sent() == ["good"]
    bench.answer("submit", [Verdict("good", "accepted")])
    assert bench.sent() == ["bad"]
    told = bench.fail("submit", refused=True)
    assert [each.id for each in rejected_of(told)] == ["bad"]


def test_a_resend_that_the_engine_refuses_is_neither_accepted_nor_rejected(bench: Bench) -> None:
    bench.submit("a", resend=True)
    told = bench.fail("submit", refused=True)
    assert [each for each in told if not isinstance(each, Report)] == [DropRequest(ANN, 1, "gone")]


def test_what_waits_has_a_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "QUEUED_MAX", 2)
    bench.submit("a")
    bench.submit("b", request=2)
    bench.submit("c", request=3)
    assert [each.id for each in rejected_of(bench.submit("d", request=4))] == ["d"]
    assert isinstance(bench.submit("e", request=5, resend=True)[0], DropRequest)
    assert isinstance(bench.feed(events.CancelRequested(["a"], ANN, 6))[0], DropRequest)
    assert isinstance(bench.feed(events.InvalidateRequested("k"))[0], Report)


def test_what_waits_has_a_limit_of_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "QUEUED_BYTES_MAX", 2000)
    bench.submit("a")
    bench.submit("b", request=2)
    large = events.TasksSubmitted(ANN, 3, [spec("c", bytes(1500))], 0)
    assert [each.id for each in rejected_of(bench.feed(large))] == ["c"]


# -- changes ----------------------------------------------------------------------------------


def test_a_follower_gets_the_newest_of_each_schedule_and_then_each_change(bench: Bench) -> None:
    bench.feed(events.ChangesFollowed(ANN))
    assert bench.calls["changes"].arguments == ("",)
    notes = (ChangeNote(1, "kites", "t1", "x"), ChangeNote(2, "kites", "t2", "y"))
    told = bench.answer("changes", Changed(notes, "2"))
    assert told == [TellChanges(ANN, [Change("kites", "t2", "y")])]
    bench.pass_ns(SECOND_NS)
    assert bench.calls["changes"].arguments == ("2",)
    told = bench.answer("changes", Changed((ChangeNote(3, "kites", "t3", "z"),), "3"))
    assert told == [TellChange(Change("kites", "t3", "z"))]
    bench.feed(events.ChangesFollowed(BOB))
    assert bench.answer("changes", Changed((), "3")) == [
        TellChanges(BOB, [Change("kites", "t3", "z")])
    ]
    bench.feed(events.PeerLost(ANN))
    bench.feed(events.PeerLost(BOB))
    bench.pass_ns(10 * SECOND_NS)
    assert "changes" not in bench.calls


# -- progress ---------------------------------------------------------------------------------


def progress(peer: bytes, *marks: ProgressMark) -> list[object]:
    notes = [ProgressNote(mark.id, mark.fraction, mark.text) for mark in marks]
    return [TellProgress([peer], note) for note in notes]


def test_progress_of_own_tasks_is_asked_for_once_a_second_while_somebody_waits(
    bench: Bench,
) -> None:
    assert "marks" not in bench.calls
    bench.submit("a")
    bench.answer("submit", [Verdict("a", "accepted")])
    assert bench.calls["marks"].arguments == (WAITER, MARKS_SLACK_NS)
    half = ProgressMark("a", 0.5, "half")
    assert bench.answer("marks", [half, ProgressMark("nobody's", 0.1, "")]) == progress(ANN, half)
    assert "marks" not in bench.calls
    bench.pass_ns(MARKS_NS)
    assert bench.calls["marks"].arguments == (WAITER, MARKS_NS + MARKS_SLACK_NS)
    more = ProgressMark("a", 0.6, "")
    assert bench.answer("marks", [half]) == []  # known
    bench.pass_ns(MARKS_NS)
    assert bench.answer("marks", [more]) == progress(ANN, more)
    bench.feed(LookedUp(ANN, ("a",)))
    bench.pass_ns(10 * MARKS_NS)
    assert "marks" not in bench.calls


def test_marks_of_an_outage_are_made_up_for(bench: Bench) -> None:
    bench.submit("a")
    bench.answer("submit", [Verdict("a", "accepted")])
    bench.answer("marks", [])
    bench.pass_ns(MARKS_NS)
    bench.fail("marks")
    bench.pass_ns(9 * MARKS_NS)
    assert bench.calls["marks"].arguments == (WAITER, 10 * MARKS_NS + MARKS_SLACK_NS)


def test_late_watchers_and_watchers_of_foreign_tasks_are_told_the_latest(bench: Bench) -> None:
    half = ProgressMark("a", 0.5, "half")
    assert LookUp(ANN, ["a"]) in bench.feed(events.TasksWatched(ANN, ["a"]))
    assert bench.feed(LookedUp(ANN, (), (), (half,))) == progress(ANN, half)
    bench.pass_ns(POLL_NS)
    more = ProgressMark("a", 0.75, "")
    told = bench.answer("fetch", Fetched(alive=("a",), marks=(more,)))
    assert told == progress(ANN, more)
    bench.pass_ns(POLL_NS)
    assert bench.answer("fetch", Fetched(alive=("a",), marks=(more,))) == []
    bench.feed(events.TasksWatched(BOB, ["a"]))
    assert bench.feed(LookedUp(BOB, (), (), (half,))) == progress(BOB, more)  # that look was slow


def test_what_a_late_watcher_was_told_first_is_not_told_again(bench: Bench) -> None:
    half = ProgressMark("a", 0.5, "half")
    for peer in (ANN, BOB):
        bench.feed(events.TasksWatched(peer, ["a"]))
    told = bench.feed(LookedUp(ANN, (), (), (half,)))
    assert told == [TellProgress([ANN, BOB], ProgressNote("a", 0.5, "half"))]
    bench.pass_ns(POLL_NS)
    assert bench.answer("fetch", Fetched(alive=("a",), marks=(half,))) == []


def test_a_watcher_whose_look_was_slow_is_not_told_again(bench: Bench) -> None:
    half, more = ProgressMark("a", 0.5, "half"), ProgressMark("a", 0.75, "")
    bench.feed(events.TasksWatched(ANN, ["a"]))
    bench.pass_ns(POLL_NS)
    assert bench.answer("fetch", Fetched(alive=("a",), marks=(more,))) == progress(ANN, more)
    assert bench.feed(LookedUp(ANN, (), (), (half,))) == []
    bench.feed(events.TasksWatched(BOB, ["a"]))
    assert bench.feed(LookedUp(BOB, (), (), (more,))) == progress(BOB, more)
    bench.feed(events.TasksWatched(ANN, ["a"]))
    assert bench.feed(LookedUp(ANN, (), (), (more,))) == progress(ANN, more)  # it has asked again


def test_a_look_that_was_slow_takes_no_progress_back(bench: Bench) -> None:
    half, more = ProgressMark("a", 0.5, "half"), ProgressMark("a", 0.75, "")
    bench.feed(events.TasksWatched(ANN, ["a"]))
    bench.pass_ns(POLL_NS)
    assert "fetch" in bench.calls
    bench.pass_ns(MARKS_NS)
    assert bench.answer("marks", [more]) == progress(ANN, more)
    assert bench.answer("fetch", Fetched(alive=("a",), marks=(half,))) == []


def test_all_who_wait_for_a_task_are_told(bench: Bench) -> None:
    for peer in (ANN, BOB):
        bench.feed(events.TasksWatched(peer, ["a"]))
    bench.pass_ns(POLL_NS)
    mark = ProgressMark("a", 0.5, "")
    told = bench.answer("fetch", Fetched(alive=("a",), marks=(mark,)))
    assert told == [TellProgress([ANN, BOB], ProgressNote("a", 0.5, ""))]


def test_an_engine_that_answers_and_takes_nothing_is_tried_with_each_submit(bench: Bench) -> None:
    """Its disk is full."""
    for request in (1, 2):
        assert bench.submit("a", request=request) == []
        until_ns, told = bench.now_ns + 2 * AWAY_NS, []
        while bench.now_ns < until_ns and not told:
            if "submit" in bench.calls:
                ticket = bench.calls.pop("submit").ticket
                told += bench.feed(EngineFailed(ticket, "no space left", unsent=True))
            told += bench.pass_ns(POLL_NS)
            if "ended" in bench.calls:
                bench.answer("ended", Ended((), "5:5:"))
        reports = [each for each in told if isinstance(each, Report)]
        [acknowledged] = [each for each in told if isinstance(each, Acknowledge)]
        assert [each.code for each in acknowledged.rejected] == [QUEUE_FULL]
        assert [each.reason for each in reports] == (["no space left"] if request == 1 else [])
    bench.submit("b", request=3)
    told = bench.answer("submit", [Verdict("b", "accepted")])
    assert told == [Report("cluster.reachable"), Acknowledge(ANN, 3, [])]
