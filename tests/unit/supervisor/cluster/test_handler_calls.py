"""States and locks of handlers, between the supervisor of a node and the engine."""

from random import Random

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskDeclaration, TaskSpec
from musterd.ipc.wire.node_messages import (
    AskLocks,
    AskStates,
    AttemptEnd,
    Finish,
    Greeting,
    Held,
    LockReply,
    LocksTold,
    LockWish,
    LockWishKind,
    LoseAttempts,
    PoolCard,
    Pools,
    StateReply,
    StateRequest,
    StatesTold,
    Want,
)
from musterd.supervisor.cluster import engine, handler_calls
from musterd.supervisor.cluster.claimer import Claimer
from musterd.supervisor.cluster.handler_calls import POLL_NS
from musterd.supervisor.cluster.handling import (
    LockAsk,
    LockView,
    StateAsk,
    StateView,
)
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EngineAnswered,
    EngineFailed,
    NodeNotified,
    Tell,
)
from musterd.supervisor.core.model import events

TENURE = 3
CARD = PoolCard("p", 5, (TaskDeclaration("extract"),), 100, SECOND_NS, 3, SECOND_NS, SECOND_NS)


class Bench:
    """A claimer with a clock; of its calls those of handlers and of the membership are kept."""

    def __init__(self) -> None:
        self.claimer = Claimer(engine.NodeCard("identity", "shed", 30 * SECOND_NS), Random(1))
        self.now_ns = 100 * SECOND_NS
        self.calls: dict[str, Call] = {}

    def feed(self, event: object) -> list[object]:
        """Handle an event; return the messages to the supervisor."""
        told: list[object] = []
        for action in self.claimer.handle(self.now_ns, event):
            if isinstance(action, Call):
                assert action.method not in self.calls, action
                if action.method not in ("tick", "reap", "retain"):  # of no concern here
                    self.calls[action.method] = action
            elif isinstance(action, Tell):
                told.append(action.message)
        self.claimer.validate()
        return told

    def answer(self, method: str, result: object = None) -> list[object]:
        return self.feed(EngineAnswered(self.calls.pop(method).ticket, result))

    def fail(self, method: str, **how: bool) -> list[object]:
        return self.feed(EngineFailed(self.calls.pop(method).ticket, "gone", **how))

    def pass_ns(self, by_ns: int) -> list[object]:
        self.now_ns += by_ns
        return self.feed(events.Ticked())


@pytest.fixture
def bench() -> Bench:
    """A node that has joined, and runs the tasks a and b."""
    bench = Bench()
    bench.feed(Pools((CARD,)))
    bench.feed(Greeting(1, 0, [], 0, member=True))
    bench.answer("join", engine.Joined(TENURE, "e", 0))
    bench.feed(Want(1, "p", 2, ("p.extract",), 0))
    bench.answer("claim", [engine.Grant(TaskSpec(id_, "p.extract", b"\x80"), 7, 1) for id_ in "ab"])
    return bench


def load(number: int, id_: str = "a") -> StateRequest:
    return StateRequest(number, id_, 7, "k")


def save(number: int, id_: str = "a", value: bytes | None = b"v") -> StateRequest:
    return StateRequest(number, id_, 7, "k", True, value, 5)


def asked(bench: Bench, method: str) -> list[object]:
    tenure, asks = bench.calls[method].arguments
    assert tenure == TENURE
    assert isinstance(asks, list)
    return asks


def refuse(bench: Bench, method: str) -> list[object]:
    return bench.feed(EngineFailed(bench.calls.pop(method).ticket, "no such key", refused=True))


# -- states -----------------------------------------------------------------------------------


def test_states_are_asked_for_in_batches_and_answered_after_the_commit(bench: Bench) -> None:
    assert bench.feed(AskStates([save(1)])) == []
    assert asked(bench, "states") == [StateAsk("a", 7, "k", True, b"v", 5)]
    bench.feed(AskStates([load(2), load(3, "b")]))
    assert bench.answer("states", [StateView()]) == [StatesTold([StateReply(1)])]
    assert asked(bench, "states") == [StateAsk("a", 7, "k"), StateAsk("b", 7, "k")]
    told = bench.answer("states", [StateView(value=b"v"), StateView()])
    assert told == [StatesTold([StateReply(2, b"v"), StateReply(3)])]
    assert "states" not in bench.calls


def test_a_batch_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_calls, "STATES_MAX", 2)
    monkeypatch.setattr(handler_calls, "STATES_BYTES", 10)
    bench.feed(AskStates([save(1, value=b"0123456789"), save(2, value=b"0"), load(3), load(4)]))
    sizes = []
    while "states" in bench.calls:
        sizes.append(len(asked(bench, "states")))
        bench.answer("states", [StateView()] * sizes[-1])
    assert sizes == [1, 2, 1]


def test_while_the_engine_is_away_requests_wait(bench: Bench) -> None:
    bench.feed(AskStates([save(1), load(2)]))
    assert bench.fail("states") == []
    assert "states" not in bench.calls
    bench.pass_ns(SECOND_NS)
    assert len(asked(bench, "states")) == 2
    told = bench.answer("states", [StateView(), StateView(value=b"v")])
    assert told == [StatesTold([StateReply(1), StateReply(2, b"v")])]


@pytest.mark.parametrize("how", ["ended", "lost"])
def test_requests_of_an_attempt_that_is_over_are_dropped(bench: Bench, how: str) -> None:
    bench.feed(AskStates([save(1), save(2, "b")]))
    bench.fail("states")
    if how == "ended":
        bench.feed(Finish([AttemptEnd("a", 7, "crashed")]))
    else:
        bench.pass_ns(5 * SECOND_NS)
        bench.answer("beat", engine.Orders("f", 0))
        assert LoseAttempts([Held("a", 7)]) in bench.answer("rejoin", ["a"])
        bench.fail("states")
    bench.pass_ns(SECOND_NS)
    assert [ask.id for ask in asked(bench, "states")] == ["b"]  # type: ignore[attr-defined]
    if how == "lost":
        bench.feed(AskStates([save(3)]))  # it was on its way
    assert bench.answer("states", [StateView()]) == [StatesTold([StateReply(2)])]
    assert "states" not in bench.calls


def test_an_answer_that_comes_after_the_end_is_told_to_nobody(bench: Bench) -> None:
    bench.feed(AskStates([save(1)]))
    bench.feed(Finish([AttemptEnd("a", 7, "crashed")]))
    assert bench.answer("states", [StateView()]) == []


def test_a_claim_that_the_engine_does_not_know_is_registered_first(bench: Bench) -> None:
    bench.feed(AskStates([save(1), load(2)]))
    told = bench.answer("states", [StateView(held=False), StateView(value=b"v")])
    assert told == [StatesTold([StateReply(2, b"v")])]
    assert "beat" in bench.calls
    bench.pass_ns(SECOND_NS)
    assert asked(bench, "states") == [StateAsk("a", 7, "k", True, b"v", 5)]
    assert bench.answer("states", [StateView()]) == [StatesTold([StateReply(1)])]


def test_what_the_engine_refuses_is_found_one_by_one(bench: Bench) -> None:
    bench.feed(AskStates([save(1), save(2), save(3)]))
    assert refuse(bench, "states") == []
    bench.pass_ns(SECOND_NS)
    assert len(asked(bench, "states")) == 1
    assert bench.answer("states", [StateView()]) == [StatesTold([StateReply(1)])]
    [told] = refuse(bench, "states")
    assert isinstance(told, StatesTold)
    assert "no such key" in told.replies[0].error
    bench.pass_ns(SECOND_NS)
    assert bench.answer("states", [StateView()]) == [StatesTold([StateReply(3)])]


# -- locks ------------------------------------------------------------------------------------


def wish(request: int, kind: LockWishKind = "want", token: int = 9, name: str = "l") -> LockWish:
    return LockWish(request, name, token, kind, "p/0")


def want(bench: Bench, *wishes: LockWish, tenure: int = TENURE) -> list[object]:
    return bench.feed(AskLocks(tenure, list(wishes)))


def test_a_lock_is_asked_for_and_told(bench: Bench) -> None:
    want(bench, wish(1))
    assert asked(bench, "locks") == [LockAsk("l", 9, "want", "p/0 on shed")]
    told = bench.answer("locks", [LockView(True, "p/0 on shed")])
    assert told == [LocksTold(TENURE, [LockReply(1, "l", True)])]
    bench.pass_ns(10 * POLL_NS)
    assert "locks" not in bench.calls
    want(bench, wish(2, "leave"))
    told = bench.answer("locks", [LockView(False)])
    assert told == [LocksTold(TENURE, [LockReply(2, "l", False)])]


@pytest.mark.parametrize("how", ["polled", "notified"])
def test_a_lock_of_another_node_is_asked_for_again_without_losing_its_turn(
    bench: Bench, how: str
) -> None:
    want(bench, wish(1, "pass"))
    told = bench.answer("locks", [LockView(False, "x on barn")])
    assert told == [LocksTold(TENURE, [LockReply(1, "l", False, "x on barn")])]
    assert "locks" not in bench.calls
    if how == "polled":
        bench.pass_ns(2 * POLL_NS)
    else:
        bench.feed(NodeNotified())
    assert asked(bench, "locks") == [LockAsk("l", 9, "want", "p/0 on shed")]
    told = bench.answer("locks", [LockView(True)])
    assert told == [LocksTold(TENURE, [LockReply(1, "l", True)])]


def test_a_newer_wish_replaces_the_one_under_way(bench: Bench) -> None:
    want(bench, wish(1))
    want(bench, wish(2, "leave"))
    assert bench.answer("locks", [LockView(True)]) == []
    assert asked(bench, "locks") == [LockAsk("l", 9, "leave", "p/0 on shed")]


def test_wishes_are_repeated_until_the_engine_has_answered(bench: Bench) -> None:
    want(bench, wish(1, "leave"), wish(2, token=10, name="m"))
    assert bench.fail("locks") == []
    want(bench, wish(3, "leave", token=10, name="m"))
    bench.pass_ns(SECOND_NS)
    kinds = [(ask.name, ask.kind) for ask in asked(bench, "locks")]  # type: ignore[attr-defined]
    assert sorted(kinds) == [("l", "leave"), ("m", "leave")]


def test_many_wishes_are_told_in_portions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_calls, "LOCKS_MAX", 2)
    want(bench, *(wish(number, token=number, name=f"l{number}") for number in range(5)))
    sizes = []
    while "locks" in bench.calls:
        sizes.append(len(asked(bench, "locks")))
        bench.answer("locks", [LockView(True)] * sizes[-1])
    assert sizes == [2, 2, 1]


def test_wishes_and_requests_of_a_tenure_that_is_over_mean_nothing(bench: Bench) -> None:
    want(bench, wish(1), tenure=2)
    assert "locks" not in bench.calls
    want(bench, wish(1))
    bench.feed(AskStates([save(1)]))
    bench.fail("states", fenced=True)
    bench.calls.pop("locks")
    bench.answer("join", engine.Joined(4, "e", 0))
    bench.pass_ns(10 * SECOND_NS)
    assert not {"states", "locks"} & bench.calls.keys()


def test_a_sidecar_that_takes_over_asks_again(bench: Bench) -> None:
    fresh = Bench()
    fresh.feed(Greeting(1, TENURE, [Held("a", 7)], 0))
    fresh.feed(AskStates([save(1)]))
    fresh.feed(AskLocks(TENURE, [wish(1)]))
    assert {"states", "locks"} <= fresh.calls.keys()
