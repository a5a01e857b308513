"""Changes: each is told once, whatever `every` says, whoever dies, and however many there are."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from musterd.supervisor.alerts.changes import PENDING_MAX, SEEN_MAX, Change, ChangeState
from musterd.supervisor.alerts.kinds import Happening
from musterd.supervisor.alerts.rules import (
    CHANGES_MAX,
    GIVE_UP_NS,
    RETRY_NS_MAX,
    Alerting,
    Message,
    Rule,
    RuleState,
)

SECOND = 1_000_000_000


def rule(**fields: object) -> Rule:
    given = {"on": ("task.changed", "watch.*", "watch.recovered"), "group_ns": 10 * SECOND}
    return Rule("me", **{**given, **fields})  # type: ignore[arg-type]


def change(number: int, schedule: str = "kites", at: float | None = None) -> Change:
    return Change(schedule, number, float(number) if at is None else at)


def told(messages: list[Message]) -> list[int]:
    return [each.number for message in messages for each in message.changes]


def deliver(alerting: Alerting, now_ns: int) -> list[Message]:
    messages = alerting.turn(now_ns, 0.0)
    for message in messages:
        alerting.delivered(message.rule, 0.0)
    return messages


def test_each_change_is_told_whatever_every_says() -> None:
    alerting = Alerting([rule()])
    found = []
    for minute in range(1, 61):
        alerting.changed(change(minute))
        for second in range(0, 60, 5):
            found += deliver(alerting, (minute * 60 + second) * SECOND)
    assert told(found) == list(range(1, 61))
    assert len(found) > 30  # not one message an hour


def test_changes_within_group_are_one_message_with_each_of_them() -> None:
    alerting = Alerting([rule()])
    for number in (1, 2, 3):
        alerting.changed(change(number))
        assert deliver(alerting, 1000 * SECOND + number) == []
    [message] = deliver(alerting, 1011 * SECOND)
    assert told([message]) == [1, 2, 3]
    assert deliver(alerting, 10_000 * SECOND) == []


def test_more_than_a_message_takes_come_in_the_next() -> None:
    alerting = Alerting([rule()])
    for number in range(1, CHANGES_MAX + 3):
        alerting.changed(change(number))
    alerting.turn(0, 0.0)
    first = deliver(alerting, 10 * SECOND)
    assert told(first) == list(range(1, CHANGES_MAX + 1))
    alerting.turn(11 * SECOND, 0.0)
    assert told(deliver(alerting, 100 * SECOND)) == [CHANGES_MAX + 1, CHANGES_MAX + 2]


def test_a_change_is_taken_once_and_a_schedule_made_anew_counts_from_one() -> None:
    state = ChangeState()
    assert state.happened(change(5))
    assert not state.happened(change(5))
    assert not state.happened(change(4))
    assert state.happened(change(6))
    assert state.happened(change(1, at=100.0))
    assert not state.happened(change(1, at=100.0))
    assert state.happened(change(0))  # of a cluster: it has no number
    assert state.happened(change(0))


def test_missed_changes_are_found_in_the_list_and_those_before_the_rule_are_not() -> None:
    alerting = Alerting([rule()])
    alerting.begin(2.5)
    alerting.changed(change(3))
    alerting.listed([change(1), change(2), change(3), change(4)])
    alerting.turn(0, 0.0)
    assert told(deliver(alerting, 10 * SECOND)) == [3, 4]


def test_a_rule_that_is_behind_catches_up_and_loses_nothing() -> None:
    alerting = Alerting([rule()])
    alerting.begin(0.5)
    everything = [change(number) for number in range(1, 2 * PENDING_MAX)]
    for each in everything:
        alerting.changed(each)
    found: list[int] = []
    now_ns = 0
    while len(found) < len(everything):
        now_ns += 100 * SECOND
        alerting.turn(now_ns - 50 * SECOND, 0.0)
        found += told(deliver(alerting, now_ns))
        if alerting.catches_up:
            alerting.listed(everything)
        assert now_ns < 100_000 * SECOND
    assert found == [each.number for each in everything]
    assert not alerting.catches_up


def test_a_change_is_never_given_up() -> None:
    alerting = Alerting([rule(group_ns=0)])
    alerting.changed(change(1))
    now_ns = 0
    while now_ns < 2 * GIVE_UP_NS:
        for message in alerting.turn(now_ns, 0.0):
            alerting.failed(now_ns, message.rule, "nobody there")
        now_ns += RETRY_NS_MAX
    assert told(deliver(alerting, now_ns)) == [1]


def test_after_a_death_nothing_is_lost_and_what_may_come_twice_says_so() -> None:
    alerting = Alerting([rule(group_ns=0)])
    alerting.changed(change(1))
    [message] = alerting.turn(0, 0.0)
    alerting.changed(change(2))
    kept = msgspec.json.decode(msgspec.json.encode(alerting.states), type=dict[str, RuleState])
    after = Alerting([rule(group_ns=0)])
    after.restore(kept, 0)
    after.changed(change(2))  # told again by the daemon
    [again] = deliver(after, SECOND)
    assert (told([again]), again.again) == ([1], True)
    [new] = deliver(after, 100 * SECOND)
    assert (told([new]), new.again) == ([2], False)
    assert not message.again


def test_lines_that_have_arrived_are_not_sent_again() -> None:
    alerting = Alerting([rule(group_ns=0)])
    for number in (1, 2, 3):
        alerting.changed(change(number))
    alerting.turn(0, 0.0)
    alerting.failed(0, "me", "the second part was refused", arrived=2)
    assert told(deliver(alerting, 1000 * SECOND)) == [3]


def test_a_rule_that_did_not_follow_changes_begins_with_those_to_come() -> None:
    alerting = Alerting([rule(group_ns=0)])
    alerting.begin(1.0)
    alerting.changed(change(2))
    other = Alerting([rule(on=("task.dead",))])
    other.restore(alerting.states, 0)
    anew = Alerting([rule(group_ns=0)])
    anew.restore(other.states, 0)
    anew.begin(10.0)
    anew.listed([change(2), change(3), change(11)])
    assert told(deliver(anew, SECOND)) == [11]


def test_large_results_do_not_wait_in_the_file() -> None:
    state = ChangeState()
    state.happened(Change("kites", 1, before="x" * 4000, after={"price": 1}))
    [kept] = state.pending
    assert (kept.before, kept.after, kept.cut) == (None, None, True)


def test_schedules_that_come_and_go_do_not_pile_up() -> None:
    state = ChangeState()
    for number in range(SEEN_MAX + 10):
        state.pending.clear()
        assert state.happened(change(1, f"site{number}", at=float(number + 1)))
    assert len(state.seen) == SEEN_MAX
    assert not state.listed([change(1, "site3", at=4.0)])


def test_pools_choose_changes() -> None:
    alerting = Alerting([rule(group_ns=0, pools=("parser",))])
    alerting.changed(msgspec.structs.replace(change(1), pool="browser"))
    alerting.changed(msgspec.structs.replace(change(2), pool="parser"))
    assert told(deliver(alerting, 0)) == [2]


def test_a_site_that_recovers_is_told_once() -> None:
    alerting = Alerting([rule(group_ns=0)])
    alerting.happened(0, Happening("watch.stale", schedule="kites", at=1.0))
    [message] = deliver(alerting, 0)
    assert [line.kind for line in message.began] == ["watch.stale"]
    alerting.happened(SECOND, Happening("watch.recovered", schedule="kites", at=2.0))
    [message] = deliver(alerting, 100 * SECOND)
    assert (message.began, [line.kind for line in message.ended]) == ([], ["watch.stale"])
    assert deliver(alerting, 10_000 * SECOND) == []


@given(st.lists(st.sampled_from(["change", "list", "die", "send", "fail"]), max_size=60))
def test_whatever_happens_each_change_is_told_in_order(steps: list[str]) -> None:
    """The daemon tells changes, which a dead process misses; its history has them all."""
    given = rule(group_ns=0)
    alerting = Alerting([given])
    alerting.begin(0.5)
    history: list[Change] = []
    arrived: list[int] = []
    now_ns = 0

    def send(*, works: bool) -> None:
        nonlocal now_ns
        now_ns += 1000 * SECOND
        for message in alerting.turn(now_ns, 0.0):
            if works:
                arrived.extend(told([message]))
                alerting.delivered("me", 0.0)
            else:
                alerting.failed(now_ns, "me", "no")

    for step in [*steps, "list", "send", "send"]:
        if step == "change":
            history.append(change(len(history) + 1))
            alerting.changed(history[-1])
        elif step == "list":
            alerting.listed(history)
        elif step == "die":
            history.append(change(len(history) + 1))  # and nobody hears of it
            kept = msgspec.json.encode(alerting.states)
            alerting = Alerting([given])
            alerting.restore(msgspec.json.decode(kept, type=dict[str, RuleState]), 0)
            alerting.begin(99.0)
            alerting.listed(history)
        else:
            send(works=step == "send")
    assert arrived == [each.number for each in history]
