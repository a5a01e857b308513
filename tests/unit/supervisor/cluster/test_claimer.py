"""The claimer between the supervisor of a node and the engine."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import INVALID, SHUT, Failure, TaskDeclaration, TaskSpec
from musterd.ipc.wire.node_messages import (
    Attempt,
    AttemptEnd,
    AttemptProgress,
    Begun,
    CancelAttempts,
    Confirmed,
    Finish,
    Granted,
    Greeting,
    Held,
    LoginsTold,
    LoseAttempts,
    Membership,
    PoolCard,
    Pools,
    ProgressMarks,
    Seen,
    SessionLogins,
    Want,
)
from musterd.supervisor.cluster import engine, handling
from musterd.supervisor.cluster.calls import PAUSE_NS
from musterd.supervisor.cluster.claimer import (
    BEAT_NS,
    CLAIM_MAX,
    CLAIM_POLL_NS,
    DAY_NS,
    FINISH_MAX,
    LEASE_NS_MIN,
    Claimer,
)
from musterd.supervisor.cluster.logging_in import LoginView
from musterd.supervisor.cluster.node_cards import PLACES_NS
from musterd.supervisor.cluster.rounds import LOOK_AGE_NS, LOOK_NS, SOON_NS
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EngineAnswered,
    EngineFailed,
    Leave,
    Left,
    NameInUse,
    NodeNotified,
    PoolsNotified,
    Tell,
)
from musterd.supervisor.core.model import actions, events

LEASE_NS = 30 * SECOND_NS
CARD = PoolCard("p", 5, (TaskDeclaration("extract"),), 100, SECOND_NS, 3, SECOND_NS, SECOND_NS)
NAMES = ("p.extract",)


class Bench:
    """A claimer with a clock; the calls under way are found by their method."""

    def __init__(self, **options: Any) -> None:
        card = engine.NodeCard("identity", "shed", LEASE_NS)
        self.claimer = Claimer(card, Random(1), **options)
        self.now_ns = 100 * SECOND_NS
        self.calls: dict[str, Call] = {}
        self.others: list[object] = []
        self.gives_slowly = False  # else what the daemon before had goes back at once

    def feed(self, event: object) -> list[object]:
        """Handle an event; return the messages to the supervisor."""
        told: list[object] = []
        for action in self.claimer.handle(self.now_ns, event):
            if isinstance(action, Call):
                assert action.method not in self.calls, action
                self.calls[action.method] = action
            elif isinstance(action, Tell):
                told.append(action.message)
            else:
                self.others.append(action)
        self.claimer.validate()
        if "give_back" in self.calls and not self.gives_slowly:
            told += self.answer("give_back")
        return told

    def answer(self, method: str, result: object = None) -> list[object]:
        return self.feed(EngineAnswered(self.calls.pop(method).ticket, result))

    def fail(self, method: str, *, fenced: bool = False) -> list[object]:
        return self.feed(EngineFailed(self.calls.pop(method).ticket, "gone", fenced=fenced))

    def pass_ns(self, by_ns: int) -> list[object]:
        self.now_ns += by_ns
        for method in ("tick", "reap", "retain"):  # of no concern here
            if method in self.calls:
                self.answer(method, [] if method == "reap" else engine.Ticked())
        return self.feed(events.Ticked())

    def want(self, count: int, *, pool: str = "p", seen: int = 0, request: int = 1) -> list[object]:
        return self.feed(Want(request, pool, count, NAMES, seen))

    def wanted(self) -> list[tuple[str, int]]:
        wants = self.calls["claim"].arguments[1]
        assert isinstance(wants, list)
        return [(want.pool, want.count) for want in wants]

    def grant(self, *ids: str) -> list[object]:
        return self.answer("claim", [grant(id_) for id_ in ids])


def grant(id_: str, claim: int = 7, **more: int) -> engine.Grant:
    return engine.Grant(TaskSpec(id_, "p.extract", b"\x80"), claim, 1, **more)  # type: ignore[arg-type]


def end(id_: str, claim: int = 7) -> AttemptEnd:
    return AttemptEnd(id_, claim, "succeeded", b"\x01")


@pytest.fixture
def fresh() -> Bench:
    return Bench()


@pytest.fixture
def bench(fresh: Bench) -> Bench:
    """A node that has joined, with tenure 3 at epoch e."""
    fresh.feed(Pools((CARD,)))
    fresh.feed(Greeting(1, 0, [], 0))
    fresh.answer("join", engine.Joined(3, "e", 0))
    return fresh


# -- membership -------------------------------------------------------------------------------


def test_a_daemon_that_begins_gives_back_what_was_claimed_before_its_pools_are_known(
    fresh: Bench,
) -> None:
    fresh.gives_slowly = True
    fresh.feed(Greeting(1, 0, [], 0))
    assert fresh.calls["give_back"].arguments == ("identity",)
    fresh.feed(Pools((CARD,)))
    assert "join" not in fresh.calls
    fresh.answer("give_back")
    assert list(fresh.calls) == ["join"]


def test_a_join_gives_back_what_could_not_be_given_back_before(fresh: Bench) -> None:
    fresh.gives_slowly = True
    fresh.feed(Greeting(1, 0, [], 0))
    fresh.fail("give_back")
    fresh.feed(Pools((CARD,)))
    fresh.pass_ns(SECOND_NS)
    assert list(fresh.calls) == ["join"]


def test_only_a_daemon_that_begins_gives_back(fresh: Bench) -> None:
    """A sidecar that takes over goes on with what the node holds."""
    fresh.gives_slowly = True
    fresh.feed(Greeting(1, 3, [], 0, member=True))
    assert "give_back" not in fresh.calls
    other = Bench()
    other.gives_slowly = True
    other.feed(Greeting(1, 0, [], 0, member=True))
    assert other.calls == {}


def test_a_node_joins_when_it_is_known_what_it_has(fresh: Bench) -> None:
    fresh.feed(Greeting(1, 0, [], 0, more=True))
    fresh.feed(Pools((CARD,)))
    assert fresh.calls == {}
    fresh.feed(Greeting(1, 0, [], 0))
    (card,) = fresh.calls["join"].arguments
    assert isinstance(card, engine.NodeCard)
    assert (card.name, card.lease_ns) == ("shed", LEASE_NS)
    assert card.pools[0].tasks == CARD.tasks
    asked_ns = fresh.now_ns
    fresh.now_ns += SECOND_NS
    told = fresh.answer("join", engine.Joined(3, "e", 0))
    assert told == [Membership(3, asked_ns + LEASE_NS)]  # counted from before the question


def test_a_beat_prolongs_the_lease(bench: Bench) -> None:
    bench.pass_ns(BEAT_NS)
    asked_ns = bench.now_ns
    told = bench.answer("beat", engine.Orders("e", 0, draining=True))
    assert told == [Membership(3, asked_ns + LEASE_NS, draining=True)]


def test_a_node_that_cannot_beat_is_away(bench: Bench) -> None:
    until_ns = bench.now_ns + LEASE_NS
    bench.pass_ns(BEAT_NS)
    assert bench.fail("beat") == [Membership(3, until_ns, away=True)]
    bench.pass_ns(PAUSE_NS)
    assert bench.fail("beat") == []  # it is known
    bench.pass_ns(2 * PAUSE_NS)
    told = bench.answer("beat", engine.Orders("e", 0))
    assert told == [Membership(3, bench.now_ns + LEASE_NS)]


def test_a_sidecar_that_takes_over_goes_on_with_the_tenure(fresh: Bench) -> None:
    fresh.feed(Pools((CARD,)))
    fresh.feed(Greeting(1, 3, [Held("a", 7), Held("b", 8)], 0))
    fresh.want(2)
    assert list(fresh.calls) == ["redeclare", "reap", "statistics"]  # other settings, maybe
    fresh.answer("redeclare")
    fresh.answer("beat", engine.Orders("e", 0))
    assert fresh.calls["rejoin"].arguments == (3, [engine.Held("a", 7), engine.Held("b", 8)])
    assert "claim" not in fresh.calls
    assert fresh.answer("rejoin", ["b"]) == [LoseAttempts([Held("b", 8)])]
    assert "release" not in fresh.calls  # whatever else it had went back
    assert fresh.wanted() == [("p", 2)]


def test_a_sidecar_that_takes_over_trusts_no_lease_but_the_shortest(fresh: Bench) -> None:
    fresh.feed(Greeting(1, 3, [], 0))
    [told] = fresh.answer("beat", engine.Orders("e", 0))
    assert told == Membership(3, fresh.now_ns + LEASE_NS_MIN)
    fresh.feed(Pools((CARD,)))
    fresh.answer("rejoin", [])
    fresh.answer("redeclare")
    fresh.pass_ns(LEASE_NS_MIN)
    assert fresh.answer("beat", engine.Orders("e", 0)) == [Membership(3, fresh.now_ns + LEASE_NS)]


def test_ends_that_the_one_before_has_not_told_are_known_before_anything_goes_back(
    fresh: Bench,
) -> None:
    fresh.feed(Pools((CARD,)))
    fresh.feed(Greeting(1, 3, [Held("a", 7)], 1))
    assert fresh.calls == {}
    fresh.feed(Finish([end("b", 8)]))
    assert fresh.calls["finish"].arguments == (3, [engine.End("b", 8, "succeeded", b"\x01")])
    fresh.answer("redeclare")
    fresh.answer("beat", engine.Orders("e", 0))
    assert "rejoin" not in fresh.calls
    assert fresh.answer("finish", []) == [Confirmed([Held("b", 8)])]
    assert fresh.calls["rejoin"].arguments == (3, [engine.Held("a", 7)])


def test_after_a_restart_of_the_server_claims_are_registered_before_others_are_made(
    bench: Bench,
) -> None:
    bench.want(2)
    bench.grant("a")
    bench.pass_ns(BEAT_NS)
    bench.answer("beat", engine.Orders("f", 0))
    bench.want(3, seen=1, request=2)
    assert bench.calls["rejoin"].arguments == (3, [engine.Held("a", 7)])
    assert "claim" not in bench.calls
    bench.answer("rejoin", [])
    assert bench.wanted() == [("p", 3)]


def test_after_a_restart_ends_that_were_never_told_count_for_claims_that_were_forgotten(
    bench: Bench,
) -> None:
    bench.want(3)
    bench.grant("a", "b", "c")
    bench.feed(Finish([end("a")]))
    bench.fail("finish")  # the engine may have heard of it
    bench.feed(Finish([end("b")]))
    bench.feed(NodeNotified())
    bench.answer("beat", engine.Orders("f", 0))
    assert "rejoin" not in bench.calls
    bench.pass_ns(PAUSE_NS)
    assert bench.calls["finish"].arguments == (3, [engine.End("a", 7, "succeeded", b"\x01")])
    bench.answer("finish", [])
    assert bench.calls["rejoin"].arguments == (3, [engine.Held("b", 7), engine.Held("c", 7)])
    assert "finish" not in bench.calls
    bench.answer("rejoin", [])
    assert bench.calls["finish"].arguments == (3, [engine.End("b", 7, "succeeded", b"\x01")])


def test_claims_are_not_registered_while_one_is_under_way(bench: Bench) -> None:
    bench.want(2)
    bench.feed(NodeNotified())
    bench.answer("beat", engine.Orders("f", 0))
    assert "rejoin" not in bench.calls
    bench.grant("a")
    assert bench.calls["rejoin"].arguments == (3, [engine.Held("a", 7)])


def test_cancelled_attempts_are_told_once(bench: Bench) -> None:
    bench.want(2)
    bench.grant("a", "b")
    bench.feed(NodeNotified())
    orders = engine.Orders("e", 0, cancel=("b", "unknown"))
    assert CancelAttempts([Held("b", 7)]) in bench.answer("beat", orders)
    bench.feed(NodeNotified())
    assert [type(each) for each in bench.answer("beat", orders)] == [Membership]


@pytest.mark.parametrize("method", ["beat", "finish", "claim"])
def test_a_fenced_node_has_lost_everything_and_joins_again(bench: Bench, method: str) -> None:
    bench.want(3)
    bench.grant("a", "b")
    bench.feed(Finish([end("a")]))
    bench.want(1, seen=2, request=2)
    bench.feed(NodeNotified())
    told = bench.fail(method, fenced=True)
    assert told == [Confirmed([Held("a", 7)]), LoseAttempts([Held("b", 7)]), Membership(0, 0)]
    late = {name: call for name, call in bench.calls.items() if name in ("beat", "finish", "claim")}
    for call in late.values():
        result = [grant("z")] if call.method == "claim" else []
        assert bench.feed(EngineAnswered(call.ticket, result)) == []
    bench.calls = {name: call for name, call in bench.calls.items() if name not in late}
    bench.pass_ns(PAUSE_NS)
    bench.answer("join", engine.Joined(4, "e", 0))
    assert bench.calls["claim"].arguments[0] == 4


def test_other_pools_are_declared_within_the_tenure(bench: Bench) -> None:
    bench.want(2)
    bench.grant("a")
    bench.feed(Pools((structs.replace(CARD, tasks=()),)))
    tenure, card = bench.calls["redeclare"].arguments
    assert isinstance(card, engine.NodeCard)
    assert (tenure, [each.tasks for each in card.pools]) == (3, [()])
    bench.answer("redeclare")
    assert not {"join", "redeclare"} & bench.calls.keys()
    assert bench.claimer.tenure == 3


def test_other_places_are_declared_now_and_then(bench: Bench) -> None:
    bench.feed(Pools((structs.replace(CARD, places=50),)))
    assert "redeclare" not in bench.calls
    bench.pass_ns(BEAT_NS)
    bench.answer("beat", engine.Orders("e", 0))
    assert "redeclare" not in bench.calls
    bench.pass_ns(PLACES_NS - BEAT_NS)
    assert "redeclare" in bench.calls


def test_heartbeats_go_on_while_a_declaration_is_refused(bench: Bench) -> None:
    bench.feed(Pools((structs.replace(CARD, tasks=()),)))
    bench.fail("redeclare")
    for _ in range(3):
        bench.pass_ns(BEAT_NS)
        if "redeclare" in bench.calls:
            bench.fail("redeclare")
            bench.pass_ns(BEAT_NS // 2)
        bench.answer("beat", engine.Orders("e", 0))


# -- a name that another node has ---------------------------------------------------------------


def taken(bench: Bench, age_ns: int, method: str = "join") -> None:
    """Answer a call: the name is another's, who was heard of so long ago."""
    call = bench.calls.pop(method)
    assert bench.feed(EngineFailed(call.ticket, "'shed' is taken", taken_ns=age_ns)) == []


def test_a_name_is_waited_for_until_the_lease_of_a_dead_node_is_over(fresh: Bench) -> None:
    fresh.feed(Pools((CARD,)))
    fresh.feed(Greeting(1, 0, [], 0))
    reaps = 0
    for seconds in range(5, 29):
        taken(fresh, seconds * SECOND_NS)
        reaps += "reap" in fresh.calls
        fresh.pass_ns(SECOND_NS)
    assert reaps > 5  # nobody else may be there to do it
    assert [type(each) for each in fresh.others] == [actions.Report]
    assert fresh.answer("join", engine.Joined(3, "e", 0)) == [
        Membership(3, fresh.now_ns + LEASE_NS)
    ]


def test_the_name_of_a_node_that_lives_ends_the_daemon(fresh: Bench) -> None:
    fresh.feed(Pools((CARD,)))
    fresh.feed(Greeting(1, 0, [], 0))
    taken(fresh, 4 * SECOND_NS)
    fresh.pass_ns(SECOND_NS)
    taken(fresh, SECOND_NS // 10)  # it was heard of meanwhile
    assert isinstance(fresh.others[-1], NameInUse)
    assert "'shed'" in fresh.others[-1].reason


def test_a_node_that_was_a_member_waits_for_its_name_and_stays(fresh: Bench) -> None:
    fresh.feed(Pools((CARD,)))
    fresh.feed(Greeting(1, 0, [], 0, member=True))
    for _ in range(60):
        taken(fresh, SECOND_NS // 10)
        fresh.pass_ns(SECOND_NS)
    assert [type(each) for each in fresh.others] == [actions.Report]
    assert "join" in fresh.calls


def test_a_new_name_that_is_taken_leaves_the_node_as_it_is(fresh: Bench) -> None:
    fresh.feed(Pools((CARD,)))
    fresh.feed(Greeting(1, 3, [Held("a", 7)], 0, member=True))
    taken(fresh, SECOND_NS, "redeclare")
    fresh.pass_ns(SECOND_NS)
    fresh.answer("beat", engine.Orders("e", 0))
    assert fresh.answer("rejoin", []) == []
    fresh.want(1)
    assert fresh.wanted() == [("p", 1)]


def test_a_node_leaves_when_its_ends_are_told(bench: Bench) -> None:
    bench.want(2)
    bench.grant("a")
    bench.feed(Finish([end("a")]))
    bench.feed(Leave())
    assert "leave" not in bench.calls
    bench.answer("finish", [])
    bench.answer("leave")
    assert bench.others[-1] == Left()


def test_a_sidecar_that_ends_before_the_daemon_leaves_its_attempts_to_the_next(
    bench: Bench,
) -> None:
    bench.want(2)
    bench.grant("a", "b")
    bench.feed(Finish([end("a")]))
    bench.feed(Leave())
    assert bench.others == []
    bench.answer("finish", [])
    assert bench.others == [Left()]
    assert "leave" not in bench.calls


def test_an_engine_that_is_away_is_not_waited_for_at_the_end(bench: Bench) -> None:
    bench.want(2)
    bench.grant("a")
    bench.feed(Finish([end("a")]))
    bench.pass_ns(BEAT_NS)
    bench.fail("beat")
    bench.feed(Leave())
    assert bench.others[1:] == [Left()]  # after the report


def test_a_node_that_never_joined_leaves_at_once(fresh: Bench) -> None:
    fresh.feed(Leave())
    assert fresh.others == [Left()]


# -- claims -----------------------------------------------------------------------------------


def test_what_is_wanted_is_claimed_at_once_and_granted(bench: Bench) -> None:
    bench.want(2, request=9)
    assert bench.calls["claim"].arguments == (3, [engine.Want("p", 2, NAMES)])
    asked_ns = bench.now_ns
    bench.now_ns += 50
    (told,) = bench.answer("claim", [grant("a", expires_in_ns=SECOND_NS), grant("b")])
    spec = TaskSpec("a", "p.extract", b"\x80")
    assert isinstance(told, Granted)
    assert (told.request, told.pool) == (9, "p")
    assert told.attempts[0] == Attempt(spec, 7, 1, expires_at_ns=asked_ns + SECOND_NS)
    assert told.attempts[1].expires_at_ns == 0
    assert "claim" not in bench.calls  # the want is used up


def test_what_is_on_its_way_counts(bench: Bench) -> None:
    bench.want(4)
    bench.want(5, request=2)  # written before the answer arrived there
    bench.grant("a", "b")
    bench.want(5, seen=0, request=3)
    assert bench.wanted() == [("p", 3)]
    bench.grant()
    bench.want(5, seen=2, request=4)
    assert bench.wanted() == [("p", 5)]


def test_an_empty_pool_is_asked_again_when_it_is_told_or_in_a_while(bench: Bench) -> None:
    bench.want(2)
    bench.grant()
    assert "claim" not in bench.calls
    bench.feed(PoolsNotified(("other",)))
    assert "claim" not in bench.calls
    bench.feed(PoolsNotified(("other", "p")))
    bench.feed(PoolsNotified(("p",)))  # while the call is under way
    bench.grant()
    bench.grant()
    assert "claim" not in bench.calls
    bench.pass_ns(CLAIM_POLL_NS * 6 // 5)
    assert "claim" in bench.calls


def test_one_claim_is_for_all_pools_and_has_a_limit(bench: Bench) -> None:
    bench.want(3)
    bench.want(80, pool="q", request=2)
    bench.want(90, pool="r", request=3)
    bench.grant()
    bench.pass_ns(2 * CLAIM_POLL_NS)
    assert bench.wanted() == [("p", 3), ("q", 80), ("r", CLAIM_MAX - 83)]


def test_nothing_is_claimed_when_the_lease_is_over_or_the_node_drains(bench: Bench) -> None:
    bench.pass_ns(BEAT_NS)
    bench.answer("beat", engine.Orders("e", 0, draining=True))
    bench.want(1)
    assert "claim" not in bench.calls
    bench.pass_ns(BEAT_NS)
    bench.answer("beat", engine.Orders("e", 0))
    assert "claim" in bench.calls
    bench.grant()
    bench.pass_ns(LEASE_NS)
    assert "claim" not in bench.calls


def test_after_a_claim_without_an_answer_unknown_claims_go_back_first(bench: Bench) -> None:
    bench.want(2)
    bench.grant("a")
    bench.want(1, seen=1, request=2)
    bench.fail("claim")
    bench.pass_ns(PAUSE_NS)
    assert bench.calls["release"].arguments == (3, [engine.Held("a", 7)])
    assert "claim" not in bench.calls
    bench.answer("release", 1)
    assert "claim" in bench.calls


def test_large_attempts_come_in_several_messages(bench: Bench) -> None:
    bench.want(3)
    specs = [TaskSpec(f"t{n}", "p.extract", bytes(600_000)) for n in range(3)]
    told = bench.answer("claim", [engine.Grant(spec, 7, 1) for spec in specs])
    assert [len(each.attempts) for each in told if isinstance(each, Granted)] == [1, 1, 1]


# -- ends -------------------------------------------------------------------------------------


def test_ends_are_confirmed_after_the_engine_has_heard_them(bench: Bench) -> None:
    bench.want(2)
    bench.grant("a", "b")
    assert bench.feed(Finish([end("a")])) == []
    bench.feed(Finish([end("b")]))
    assert bench.calls["finish"].arguments == (3, [engine.End("a", 7, "succeeded", b"\x01")])
    assert bench.answer("finish", []) == [Confirmed([Held("a", 7)])]
    assert bench.answer("finish", []) == [Confirmed([Held("b", 7)])]


def test_ends_that_failed_are_told_again_in_order(bench: Bench) -> None:
    bench.feed(Finish([end("a")]))
    bench.feed(Finish([end("b")]))
    bench.fail("finish")
    bench.pass_ns(PAUSE_NS)
    ends = bench.calls["finish"].arguments[1]
    assert isinstance(ends, list)
    assert [each.id for each in ends] == ["a"], "those that may have happened, alone"
    bench.answer("finish", [])
    ends = bench.calls["finish"].arguments[1]
    assert isinstance(ends, list)
    assert [each.id for each in ends] == ["b"]


def test_after_a_restart_no_claim_is_registered_whose_end_may_have_been_heard(
    bench: Bench,
) -> None:
    bench.want(3)
    bench.grant("a", "b", "c")
    bench.feed(Finish([end("a")]))
    bench.feed(Finish([end("b")]))
    bench.fail("finish")
    bench.pass_ns(BEAT_NS)
    bench.answer("beat", engine.Orders("f", 0))
    assert "rejoin" not in bench.calls, "the end of `a` is told first"
    bench.answer("finish", [])
    assert bench.calls["rejoin"].arguments == (3, [engine.Held("b", 7), engine.Held("c", 7)])
    assert "finish" not in bench.calls, "its claim may be forgotten: it is registered first"
    bench.answer("rejoin", [])
    assert bench.calls["finish"].arguments == (3, [engine.End("b", 7, "succeeded", b"\x01")])


def test_ends_are_told_in_batches(bench: Bench) -> None:
    bench.feed(Finish([end(f"t{number}") for number in range(FINISH_MAX + 1)]))
    (told,) = bench.answer("finish", [])
    assert isinstance(told, Confirmed)
    assert len(told.held) == FINISH_MAX
    (told,) = bench.answer("finish", [])
    assert isinstance(told, Confirmed)
    assert told.held == [Held(f"t{FINISH_MAX}", 7)]


def test_large_ends_go_alone(bench: Bench) -> None:
    large = [AttemptEnd(f"t{number}", 7, "succeeded", bytes(3_000_000)) for number in range(2)]
    bench.feed(Finish(large))
    (told,) = bench.answer("finish", [])
    assert told == Confirmed([Held("t0", 7)])


def test_begun_attempts_and_progress_are_told(bench: Bench) -> None:
    bench.want(2)
    bench.grant("a")
    bench.feed(Begun([Held("a", 7), Held("gone", 1)]))
    assert bench.calls["begun"].arguments == (3, [engine.Held("a", 7)])
    bench.answer("begun")
    bench.feed(ProgressMarks([AttemptProgress("a", 0.5, "half")]))
    assert bench.calls["progress"].arguments == (3, [handling.ProgressMark("a", 0.5, "half")])
    bench.answer("progress", [])
    bench.feed(ProgressMarks([AttemptProgress("a", 0.6), AttemptProgress("a", 0.7)]))
    assert "progress" not in bench.calls
    bench.pass_ns(SECOND_NS)
    assert bench.calls["progress"].arguments == (3, [handling.ProgressMark("a", 0.7, "")])


@pytest.mark.parametrize("how", ["too early", "failed"])
def test_the_last_progress_is_not_lost(bench: Bench, how: str) -> None:
    bench.want(2)
    bench.grant("a", "b")

    def tell_again() -> None:
        if how == "failed":
            bench.fail("progress")
        else:
            bench.answer("progress", ["a"])
        bench.pass_ns(2 * SECOND_NS)

    last = [handling.ProgressMark("a", 0.9, "")]
    bench.feed(ProgressMarks([AttemptProgress("a", 0.9)]))
    tell_again()
    assert bench.calls["progress"].arguments == (3, last)
    bench.feed(ProgressMarks([AttemptProgress("a", 1.0)]))  # what is newer wins
    tell_again()
    assert bench.calls["progress"].arguments == (3, [handling.ProgressMark("a", 1.0, "")])
    bench.feed(Finish([end("a")]))
    bench.answer("finish", [])
    tell_again()
    assert "progress" not in bench.calls


def test_time_is_passed(bench: Bench) -> None:
    assert "reap" in bench.calls
    bench.answer("reap", [engine.Reaped("barn", 2, 5)])
    assert bench.others
    assert bench.calls["retain"].arguments == (DAY_NS,)
    bench.answer("retain", 0)
    assert "tick" in bench.calls
    assert "statistics" in bench.calls  # which nobody waits for


# -- what people see ----------------------------------------------------------------------------


def test_the_node_that_reaps_another_tells_which(bench: Bench) -> None:
    bench.answer("reap", [engine.Reaped("barn", 2, 5)])
    [report] = [each for each in bench.others if isinstance(each, actions.Report)]
    assert (report.event, report.node, report.count) == ("cluster.node_lost", "barn", 5)
    assert bench.claimer.figures.reaped == 1


def test_a_look_at_the_cluster_is_told_with_its_age(bench: Bench) -> None:
    called_ns = bench.now_ns
    assert bench.calls["statistics"].arguments == (LOOK_AGE_NS,)
    node = engine.NodeSeen("barn", 2, True, False, 4, SECOND_NS, "1.0", ("p",))
    gone = engine.NodeSeen("attic", 0, False, False, 0, SECOND_NS, "1.0", ("p",))
    counts = (
        engine.Count("p", 1, "queued", 9),
        engine.Count("p", 1, "running", 2),
        engine.Count("p", 2, "queued", 1),
    )
    backlogs = (engine.Backlog("p", 1, 7, 3 * SECOND_NS),)
    found = engine.Statistics(5, 6, 7, counts, backlogs, (gone, node), age_ns=SECOND_NS)
    bench.now_ns += SECOND_NS // 10
    [told] = bench.answer("statistics", found)
    assert isinstance(told, Seen)
    assert told.at_ns == called_ns - SECOND_NS
    assert [(each.tasks, each.ready, each.waited_ns) for each in told.counts] == [
        (9, 7, 3 * SECOND_NS),
        (2, 0, 0),
        (1, 0, 0),
    ]
    assert [each.name for each in told.nodes] == ["barn", "attic"]
    bench.pass_ns(LOOK_NS // 2)
    assert "statistics" not in bench.calls


def test_what_is_queued_in_a_pool_without_workers_is_seen_soon(bench: Bench) -> None:
    """Also where another node has looked just before: what it saw is too old."""
    empty = engine.Statistics(0, 0, 0, ())
    bench.answer("statistics", empty)
    bench.feed(Pools((CARD, structs.replace(CARD, name="lazy", places=0))))
    bench.pass_ns(SECOND_NS)
    bench.feed(PoolsNotified(("p", "unknown")))
    assert "statistics" not in bench.calls
    bench.feed(PoolsNotified(("lazy",)))
    assert bench.calls["statistics"].arguments == (SOON_NS,)
    bench.answer("statistics", structs.replace(empty, age_ns=1))
    assert "statistics" not in bench.calls
    bench.pass_ns(SOON_NS)
    bench.answer("statistics", None)  # another node is at it
    bench.pass_ns(SOON_NS)
    bench.answer("statistics", empty)
    bench.pass_ns(LOOK_NS // 2)
    assert "statistics" not in bench.calls


def test_results_that_did_not_count_are_counted(bench: Bench) -> None:
    figures = bench.claimer.figures
    good, late, back = (AttemptEnd(id_, 7, "succeeded") for id_ in "abc")
    bench.feed(Finish([good, late, structs.replace(back, kind="untouched")]))
    bench.answer("finish", [engine.Told("a", 0, "succeeded")])
    assert (figures.ends, figures.fenced) == (3, 1)
    # Of a call that is made again nobody knows what the first one did.
    bench.feed(Finish([AttemptEnd("d", 8, "succeeded")]))
    bench.fail("finish")
    bench.pass_ns(SECOND_NS)
    bench.answer("finish", [])
    assert (figures.ends, figures.fenced, figures.failed_calls) == (4, 1, 1)


def test_claims_are_counted_and_timed(bench: Bench) -> None:
    bench.feed(Want(1, "p", 2, NAMES, 0))
    bench.now_ns += 3000
    grant = engine.Grant(TaskSpec("a", "p.extract", b""), 7, 1)
    bench.answer("claim", [grant])
    figures = bench.claimer.figures
    assert (figures.claims, figures.attempts) == (1, 1)
    assert (figures.claim_times.total_ns, figures.claim_times.buckets[12]) == (3000, 1)


def test_ends_that_the_engine_does_not_take_are_reported_once(bench: Bench) -> None:
    bench.want(1)
    bench.grant("a")
    bench.feed(Finish([end("a")]))
    for _ in range(20):
        bench.fail("finish")
        bench.pass_ns(BEAT_NS)
        bench.answer("beat", engine.Orders("e", 0))
    assert [each.event for each in bench.others if isinstance(each, actions.Report)] == [
        "cluster.failing"
    ]
    assert bench.answer("finish", []) == [Confirmed([Held("a", 7)])]


# -- what must not run ------------------------------------------------------------------------


def test_a_task_that_must_not_run_fails_and_is_not_sent_to_the_supervisor() -> None:
    bench = Bench(problems=lambda specs: {each.id: "no" for each in specs if each.id == "bad"})
    bench.feed(Pools((CARD,)))
    bench.feed(Greeting(1, 0, [], 0))
    bench.answer("join", engine.Joined(3, "e", 0))
    bench.want(2)
    (granted,) = bench.grant("good", "bad")
    assert isinstance(granted, Granted)
    assert [each.spec.id for each in granted.attempts] == ["good"]
    tenure, ends = bench.calls["finish"].arguments
    assert tenure == 3
    assert ends == [engine.End("bad", 7, "failed", b"", Failure(INVALID, "InvalidTask", "no"))]
    assert bench.answer("finish", []) == [Confirmed([Held("bad", 7)])]  # unknown there: no harm


def test_what_is_wanted_stays_wanted_when_all_that_came_must_not_run() -> None:
    bench = Bench(problems=lambda specs: {each.id: "no" for each in specs})
    bench.feed(Pools((CARD,)))
    bench.feed(Greeting(1, 0, [], 0))
    bench.answer("join", engine.Joined(3, "e", 0))
    bench.want(1)
    assert bench.grant("bad") == []
    assert bench.wanted() == [("p", 1)]  # at once


# -- sessions whose logins fail -------------------------------------------------------------------


def held(left_ns: int = 60 * SECOND_NS, node: str = "barn") -> LoginView:
    return LoginView("acme", 2, left_ns, "wrong password", node)


def test_an_attempt_whose_session_is_held_ends_and_never_begins(bench: Bench) -> None:
    bench.want(2)
    told = bench.answer("claim", [structs.replace(grant("a"), held=held()), grant("b")])
    [granted] = [each for each in told if isinstance(each, Granted)]
    assert [each.spec.id for each in granted.attempts] == ["b"]
    _, ends = bench.calls["finish"].arguments
    [end_] = ends  # type: ignore[misc]
    assert (end_.id, end_.kind, end_.retry_ns) == ("a", "failed", -1)
    assert (end_.failure.kind, end_.failure.type) == (SHUT, "SessionHeld")
    assert end_.failure.message == (
        "session 'acme' is held for 60 s more: 2 logins in a row failed (wrong password); mend the "
        "login, then: musterctl --cluster sessions reset acme"
    )


def test_a_heartbeat_tells_whose_logins_fail_when_that_has_changed(bench: Bench) -> None:
    def beat(*logins: LoginView) -> list[object]:
        bench.pass_ns(BEAT_NS)
        asked_ns = bench.now_ns
        told = bench.answer("beat", engine.Orders("e", 0, logins=logins))
        assert told[0] == Membership(3, asked_ns + LEASE_NS)
        return told[1:]

    assert beat() == []
    [told] = beat(held())
    until_ns = bench.now_ns + 60 * SECOND_NS
    assert told == LoginsTold([SessionLogins("acme", 2, until_ns, "wrong password", mine=False)])
    assert beat(held(55 * SECOND_NS)) == []
    assert beat(held(0)) == [LoginsTold([SessionLogins("acme", 2, 0, "wrong password")])]
    [told] = beat(held(node="shed"))
    assert isinstance(told, LoginsTold)
    assert told.logins[0].mine
    assert beat() == [LoginsTold([])]
