"""When somebody is told of what: one rule, given events and times."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from musterd.supervisor.alerts.kinds import (
    ENDED_BY,
    KINDS,
    USUAL,
    Finding,
    Happening,
    Survey,
    matching,
)
from musterd.supervisor.alerts.rules import (
    GIVE_UP_NS,
    INCIDENTS_MAX,
    LINES_MAX,
    RETRY_NS,
    RETRY_NS_MAX,
    Alerting,
    Message,
    Rule,
    RuleState,
    Stage,
)
from musterd.supervisor.log.log import MESSAGES

SECOND = 1_000_000_000
CORE = Path(__file__).resolve().parents[4] / "supervisor" / "core"


class HandlerRequests:
    """One rule whose messages are delivered, with a clock to turn."""

    def __init__(self, **rule: object) -> None:
        fields = {"on": ("*",), "group_ns": 0, "every_ns": 3600 * SECOND, **rule}
        self.rule = Rule("ops", **fields)  # type: ignore[arg-type]
        self.alerting = Alerting([self.rule])
        self.now_ns = 1000 * SECOND
        self.works = True

    @property
    def at(self) -> float:
        return self.now_ns / SECOND

    def event(self, kind: str, **fields: object) -> list[Message]:
        happening = Happening(kind, at=self.at, **fields)  # type: ignore[arg-type]
        self.alerting.happened(self.now_ns, happening)
        return self.turn()

    def survey(self, **fields: object) -> list[Message]:
        self.alerting.surveyed(self.now_ns, Survey(**fields), self.at)  # type: ignore[arg-type]
        return self.turn()

    def turn(self, *, at_once: bool = False) -> list[Message]:
        told = self.alerting.turn(self.now_ns, self.at, at_once=at_once)
        for message in told:
            if self.works:
                self.alerting.delivered(message.rule, self.at)
            else:
                self.alerting.failed(self.now_ns, message.rule, "nobody there")
        return told

    def after(self, seconds: float) -> list[Message]:
        """Everything that is told in this time."""
        end_ns = self.now_ns + int(seconds * SECOND)
        told = []
        while (wake_ns := self.alerting.next_wake()) is not None and wake_ns <= end_ns:
            self.now_ns = max(self.now_ns, wake_ns)
            told += self.turn()
        self.now_ns = end_ns
        return told + self.turn()

    @property
    def state(self) -> RuleState:
        return self.alerting.states["ops"]


def began(messages: list[Message]) -> list[tuple[str, str, int]]:
    return [(line.kind, line.subject, line.times) for each in messages for line in each.began]


def ended(messages: list[Message]) -> list[tuple[str, str]]:
    return [(line.kind, line.subject) for each in messages for line in each.ended]


# -- beginning and end ------------------------------------------------------------------------


def test_a_condition_is_told_when_it_begins_and_once_when_it_is_over() -> None:
    handler_requests = HandlerRequests()
    assert began(handler_requests.event("breaker.open", target="a")) == [("breaker.open", "a", 1)]
    told = handler_requests.event("breaker.closed", target="a") + handler_requests.after(60)
    assert ended(told) == [("breaker.open", "a")]
    assert (
        ended(handler_requests.event("breaker.closed", target="a") + handler_requests.after(60))
        == []
    )


def test_the_end_is_that_of_the_same_subject() -> None:
    handler_requests = HandlerRequests(on=("worker.fatal", "pool.fatal"))
    handler_requests.event("worker.fatal", pool="p", worker="p/0")
    handler_requests.event("pool.fatal", pool="q")
    assert (
        handler_requests.event("worker.ready", pool="p", worker="p/1") + handler_requests.after(60)
        == []
    )
    told = handler_requests.event("worker.ready", pool="p", worker="p/0") + handler_requests.after(
        60
    )
    assert ended(told) == [("worker.fatal", "p/0")]
    told = handler_requests.event("worker.ready", pool="q", worker="q/3") + handler_requests.after(
        60
    )
    assert ended(told) == [("pool.fatal", "q")]


def test_an_event_without_an_end_is_told_and_never_resolved() -> None:
    handler_requests = HandlerRequests(on=("task.dead",))
    assert began(handler_requests.event("task.dead", pool="p", text="boom")) == [
        ("task.dead", "p", 1)
    ]
    assert handler_requests.after(7200) == []
    assert handler_requests.state.incidents == []


def test_without_resolved_nobody_is_told_of_the_end() -> None:
    handler_requests = HandlerRequests(resolved=False)
    handler_requests.event("memory.critical")
    assert ended(handler_requests.event("memory.normal") + handler_requests.after(60)) == []


def test_without_resolved_a_second_time_is_told_like_the_first() -> None:
    handler_requests = HandlerRequests(
        on=("breaker.open",), resolved=False, every_ns=60 * SECOND, group_ns=10 * SECOND
    )
    for _ in range(2):
        handler_requests.event("breaker.open", target="a")
        handler_requests.event("breaker.closed", target="a")
        assert len(handler_requests.after(59)) == 1, "it came and went"
        handler_requests.event("breaker.open", target="a")
        assert len(handler_requests.after(120)) == 1
        handler_requests.event("breaker.closed", target="a")
        handler_requests.after(59)


def test_what_holds_for_less_than_the_rule_wants_is_not_told() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",), for_ns=300 * SECOND)
    assert handler_requests.event("breaker.open", target="a") + handler_requests.after(299) == []
    assert handler_requests.event("breaker.closed", target="a") + handler_requests.after(600) == []
    assert handler_requests.state.incidents == []
    handler_requests.event("breaker.open", target="a")
    assert began(handler_requests.after(300)) == [("breaker.open", "a", 1)]


def test_for_does_not_hold_up_what_has_no_end() -> None:
    handler_requests = HandlerRequests(on=("task.dead",), for_ns=300 * SECOND)
    assert began(handler_requests.event("task.dead", pool="p")) == [("task.dead", "p", 1)]


def test_events_of_other_pools_and_targets_are_not_told() -> None:
    handler_requests = HandlerRequests(on=("task.dead", "breaker.*"), pools=("par*",))
    assert handler_requests.event("task.dead", pool="browser") == []
    assert began(handler_requests.event("task.dead", pool="parser")) == [("task.dead", "parser", 1)]
    handler_requests = HandlerRequests(on=("breaker.open",), targets=("*.example",))
    assert handler_requests.event("breaker.open", target="site.test") == []
    assert handler_requests.event("breaker.open", target="site.example")


# -- together ---------------------------------------------------------------------------------


def test_what_happens_within_the_group_is_one_message() -> None:
    handler_requests = HandlerRequests(on=("breaker.open", "task.dead"), group_ns=30 * SECOND)
    assert handler_requests.event("breaker.open", target="a") == []
    handler_requests.after(10)
    handler_requests.event("breaker.open", target="b")
    for _ in range(5):
        handler_requests.event("task.dead", pool="p")
    (message,) = handler_requests.after(20)
    assert began([message]) == [
        ("breaker.open", "a", 1),
        ("breaker.open", "b", 1),
        ("task.dead", "p", 5),
    ]


def test_what_comes_and_goes_within_the_group_is_told_as_that() -> None:
    handler_requests = HandlerRequests(on=("worker.fatal",), group_ns=30 * SECOND)
    handler_requests.event("worker.fatal", pool="p", worker="p/0")
    handler_requests.after(5)
    handler_requests.event("worker.ready", pool="p", worker="p/0")
    (message,) = handler_requests.after(60)
    assert message.began[0].over_at == message.began[0].since + 5
    assert message.ended == []
    assert handler_requests.after(600) == []


def test_an_end_that_is_taken_back_within_the_group_is_not_told() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",), group_ns=30 * SECOND)
    handler_requests.event("breaker.open", target="a")
    assert len(handler_requests.after(30)) == 1
    handler_requests.event("breaker.closed", target="a")
    handler_requests.after(5)
    assert handler_requests.event("breaker.open", target="a") + handler_requests.after(600) == []


def test_more_lines_than_a_message_shows_are_counted() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",), group_ns=SECOND)
    for number in range(LINES_MAX + 7):
        handler_requests.event("breaker.open", target=f"t{number}")
    (message,) = handler_requests.after(1)
    assert (len(message.began), message.more) == (LINES_MAX, 7)


# -- not too often ----------------------------------------------------------------------------


def test_what_happens_again_is_counted_and_told_after_every() -> None:
    handler_requests = HandlerRequests(on=("task.dead",))
    assert handler_requests.event("task.dead", pool="p")
    handler_requests.after(60)
    for _ in range(41):
        assert handler_requests.event("task.dead", pool="p") == []
    assert handler_requests.after(3600 - 61) == []
    assert began(handler_requests.after(1)) == [("task.dead", "p", 41)]


def test_a_count_is_many_times() -> None:
    handler_requests = HandlerRequests(on=("task.dead",))
    assert began(handler_requests.event("task.dead", pool="p", count=7)) == [("task.dead", "p", 7)]


def test_one_that_flaps_costs_two_messages_in_every() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",))
    told = []
    for _ in range(60):
        told += handler_requests.event("breaker.open", target="a")
        told += handler_requests.after(30)
        told += handler_requests.event("breaker.closed", target="a")
        told += handler_requests.after(29)
    assert [len(each.began) + len(each.ended) for each in told] == [1, 1]
    told = (
        handler_requests.after(120)
        + handler_requests.event("breaker.open", target="a")
        + handler_requests.after(1)
    )
    assert began(told) == [("breaker.open", "a", 60)]


def test_one_that_came_back_too_soon_and_stays_is_told_after_every() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",))
    handler_requests.event("breaker.open", target="a")
    handler_requests.event("breaker.closed", target="a")
    handler_requests.after(60)
    assert handler_requests.event("breaker.open", target="a") == []
    assert began(handler_requests.after(3600)) == [("breaker.open", "a", 1)]
    assert ended(
        handler_requests.event("breaker.closed", target="a") + handler_requests.after(60)
    ) == [("breaker.open", "a")]


def test_a_storm_of_many_subjects_makes_few_messages() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",), group_ns=10 * SECOND)
    told = []
    for number in range(360):
        told += handler_requests.event("breaker.open", target=f"t{number}")
        told += handler_requests.after(10)
    assert sum(len(each.began) + each.more for each in told) > 200
    assert len(told) <= 12  # in an hour


def test_a_hundred_thousand_events_are_remembered_in_bounded_room() -> None:
    handler_requests = HandlerRequests(on=("breaker.open", "task.dead"), group_ns=SECOND)
    for number in range(100_000):
        happening = Happening("breaker.open", target=f"t{number}", at=1.0)
        handler_requests.alerting.happened(handler_requests.now_ns, happening)
    assert len(handler_requests.state.incidents) == INCIDENTS_MAX
    (message,) = handler_requests.after(1)
    assert len(message.began) + message.more == 100_000
    assert len(msgspec.json.encode(handler_requests.state)) < 200_000


def test_subjects_that_are_over_make_room_for_others() -> None:
    handler_requests = HandlerRequests(on=("task.dead",))
    for number in range(INCIDENTS_MAX):
        handler_requests.alerting.happened(
            handler_requests.now_ns, Happening("task.dead", pool=f"p{number}")
        )
    handler_requests.after(1)
    handler_requests.after(1)
    told = handler_requests.event("task.dead", pool="another") + handler_requests.after(600)
    assert ("task.dead", "another", 1) in began(told)


# -- nobody there -----------------------------------------------------------------------------


def test_a_message_that_cannot_be_delivered_is_tried_again_with_longer_pauses() -> None:
    handler_requests = HandlerRequests(on=("memory.critical",))
    handler_requests.works = False
    (first,) = handler_requests.event("memory.critical", text="87 %")
    assert handler_requests.after(RETRY_NS / SECOND - 1) == []
    assert handler_requests.after(1) == [first]
    assert handler_requests.after(2 * RETRY_NS / SECOND) == [first]
    handler_requests.after(4000)
    before = handler_requests.state.failures
    handler_requests.after(2 * RETRY_NS_MAX / SECOND)
    assert handler_requests.state.failures - before == 2
    handler_requests.works = True
    assert handler_requests.after(RETRY_NS_MAX / SECOND) == [first]
    assert (handler_requests.state.sent, handler_requests.state.error) == (1, "")


def test_what_happens_while_nobody_can_be_reached_is_told_together_afterwards() -> None:
    handler_requests = HandlerRequests(on=("breaker.open", "task.dead"))
    handler_requests.works = False
    handler_requests.event("breaker.open", target="a")
    for number in range(1000):
        handler_requests.event("task.dead", pool=f"p{number % 3}")
    handler_requests.event("breaker.closed", target="a")
    handler_requests.works = True
    first, second = handler_requests.after(RETRY_NS_MAX / SECOND)
    assert began([first]) == [("breaker.open", "a", 1)]
    assert ended([second]) == [("breaker.open", "a")]
    assert sum(times for _, _, times in began([second])) == 1000


def test_old_news_are_given_up_and_counted() -> None:
    handler_requests = HandlerRequests(on=("task.dead",))
    handler_requests.works = False
    handler_requests.event("task.dead", pool="p")
    handler_requests.after(GIVE_UP_NS / SECOND + RETRY_NS_MAX / SECOND + 1)
    assert handler_requests.state.lost == 1


def test_at_the_end_nothing_waits_for_company() -> None:
    handler_requests = HandlerRequests(on=("shutdown.phase",), group_ns=30 * SECOND)
    assert handler_requests.event("shutdown.phase") == []
    assert len(handler_requests.turn(at_once=True)) == 1


# -- another life -----------------------------------------------------------------------------


def reborn(
    handler_requests: HandlerRequests, passed_ns: int = 0, **rule: object
) -> HandlerRequests:
    other = HandlerRequests(
        **{"on": handler_requests.rule.on, "group_ns": handler_requests.rule.group_ns, **rule}
    )
    other.now_ns = handler_requests.now_ns + passed_ns
    data = msgspec.json.encode(handler_requests.alerting.states)
    other.alerting.restore(msgspec.json.decode(data, type=dict[str, RuleState]), passed_ns)
    return other


def test_an_open_alert_is_not_repeated_by_the_next_life_and_is_resolved_by_it() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",))
    handler_requests.event("breaker.open", target="a")
    handler_requests = reborn(handler_requests, 7 * SECOND)
    assert handler_requests.turn() == []
    assert handler_requests.survey(breakers={"a": "open"}) == []
    assert ended(
        handler_requests.survey(breakers={"a": "closed"}) + handler_requests.after(60)
    ) == [("breaker.open", "a")]


def test_what_was_not_delivered_is_delivered_by_the_next_life() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",))
    handler_requests.works = False
    (message,) = handler_requests.event("breaker.open", target="a")
    handler_requests = reborn(handler_requests)
    assert began(handler_requests.after(RETRY_NS / SECOND)) == began([message])


@pytest.mark.parametrize("moved", [-900, 100_000])
def test_limits_hold_over_a_reboot_that_sets_the_clock_anew(moved: int) -> None:
    handler_requests = HandlerRequests(on=("breaker.open",), group_ns=10 * SECOND)
    for target in ("a", "b", "c"):  # the pause between messages has grown
        handler_requests.event("breaker.open", target=target)
        assert handler_requests.after(60)
    handler_requests.event("breaker.closed", target="a")
    handler_requests.after(60)
    handler_requests = reborn(handler_requests, moved * SECOND)
    handler_requests.event("breaker.open", target="a")
    assert handler_requests.after(3600 - 250) == []
    assert began(handler_requests.after(250)) == [("breaker.open", "a", 1)]
    handler_requests.event("breaker.open", target="d")
    assert began(handler_requests.after(60)) == [("breaker.open", "d", 1)]


def test_the_pause_between_messages_is_as_long_after_a_reboot() -> None:
    handler_requests = HandlerRequests(on=("breaker.open",), group_ns=10 * SECOND)
    for target in ("a", "b", "c"):
        handler_requests.event("breaker.open", target=target)
        assert handler_requests.after(60)
    handler_requests = reborn(handler_requests, -900 * SECOND)
    handler_requests.event("breaker.open", target="d")
    assert began(handler_requests.after(60)) == [("breaker.open", "d", 1)]


def test_what_a_changed_rule_does_not_want_is_forgotten() -> None:
    handler_requests = HandlerRequests(on=("breaker.open", "memory.*"))
    handler_requests.event("breaker.open", target="a")
    handler_requests = reborn(handler_requests, on=("memory.*",))
    assert handler_requests.state.incidents == []
    assert handler_requests.survey(breakers={"a": "closed"}) + handler_requests.after(60) == []


# -- surveys ----------------------------------------------------------------------------------


def test_a_survey_opens_what_no_event_has_told() -> None:
    handler_requests = HandlerRequests(
        on=("worker.fatal", "memory.*", "breaker.open", "pool.paused")
    )
    told = handler_requests.survey(
        pools={"p": "FATAL"},
        workers={"p/0": "FATAL", "p/1": "RUNNING"},
        pauses={"p": "paused"},
        breakers={"a": "half-open", "b": "closed"},
        stage="one",
    )
    assert sorted(began(told)) == [
        ("breaker.open", "a", 1),
        ("memory.critical", "", 1),
        ("pool.paused", "p", 1),
        ("worker.fatal", "p/0", 1),
    ]
    assert (
        handler_requests.survey(
            pools={"p": "FATAL"}, workers={"p/0": "FATAL"}, pauses={"p": "paused"}
        )
        != []
    )


def test_a_pool_that_cannot_start_is_one_matter_and_not_one_for_each_worker() -> None:
    handler_requests = HandlerRequests(on=("worker.fatal", "pool.fatal"))
    told = handler_requests.survey(
        pools={"p": "FATAL"},
        workers={"p/0": "FATAL", "p/1": "FATAL"},
        reasons={"p": "no module", "p/0": "no module", "p/1": "no module"},
    )
    assert began(told) == [("pool.fatal", "p", 1)]


@pytest.mark.parametrize(
    ("kind", "subject", "survey", "finding"),
    [
        ("worker.crashed", "p/0", Survey(workers={"p/0": "BACKOFF"}), Finding.UNKNOWN),
        ("worker.crashed", "p/0", Survey(workers={"p/0": "BUSY"}), Finding.OVER),
        ("worker.fatal", "p/0", Survey(), Finding.OVER),
        ("worker.fatal", "p/0", Survey(workers={"p/0": "FATAL"}), Finding.HOLDS),
        ("pool.fatal", "p", Survey(pools={"p": "STARTING"}), Finding.UNKNOWN),
        ("pool.fatal", "p", Survey(pools={"p": "FATAL"}), Finding.HOLDS),
        ("pool.fatal", "p", Survey(), Finding.OVER),
        ("pool.roll_failed", "p", Survey(pools={"p": "RUNNING"}), Finding.UNKNOWN),
        ("memory.critical", "", Survey(stage="half"), Finding.HOLDS),
        ("memory.critical", "", Survey(), Finding.OVER),
        ("store.failing", "", Survey(problem="disk full"), Finding.UNKNOWN),
        ("store.failing", "", Survey(), Finding.OVER),
        ("schedule.paused", "s", Survey(paused=frozenset({"s"})), Finding.HOLDS),
    ],
)
def test_what_the_status_says_of_a_condition(
    kind: str, subject: str, survey: Survey, finding: Finding
) -> None:
    assert survey.finding(kind, subject) == finding


# -- the table of kinds -----------------------------------------------------------------------


def test_every_event_that_the_core_reports_can_be_an_alert() -> None:
    words = set()
    for path in CORE.glob("*.py"):
        words |= set(re.findall(r'"([a-z]+\.[a-z_]+)"', path.read_text()))
    reported = {word for word in words if word in MESSAGES} - {"task.progress"}
    assert reported <= KINDS.keys(), reported - KINDS.keys()


def test_ends_are_events_too_and_usual_kinds_are_known() -> None:
    assert ENDED_BY.keys() <= KINDS.keys()
    assert set(USUAL) <= KINDS.keys()
    bad = tuple(name for name in KINDS if name.startswith("memory.") and name != "memory.normal")
    assert matching(("memory.*",)) == bad
    assert matching(("memory.normal", "nothing")) == ("memory.normal",)


# -- anything may happen ----------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("open", "closed", "dead", "fails", "works", "reborn", "survey", "wait")),
        st.sampled_from("ab"),
        st.floats(0, 2000),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(
    STEPS,
    st.sampled_from((0, 10)),
    st.sampled_from((0, 30)),
    st.sampled_from((0, 60, 3600)),
)
def test_whatever_happens_ends_follow_beginnings_and_nothing_open_is_forgotten(  # noqa: PLR0912
    steps: list[tuple[str, str, float]], group: int, hold: int, every: int
) -> None:
    rule = {
        "on": ("breaker.open", "task.dead"),
        "group_ns": group * SECOND,
        "for_ns": hold * SECOND,
        "every_ns": every * SECOND,
    }
    handler_requests = HandlerRequests(**rule)
    told: list[Message] = []
    is_open = {"a": False, "b": False}
    dead = 0
    for what, subject, seconds in steps:
        if what in ("open", "closed"):
            is_open[subject] = what == "open"
            told += handler_requests.event(f"breaker.{what}", target=subject)
        elif what == "dead":
            dead += 1
            told += handler_requests.event("task.dead", pool=subject)
        elif what in ("fails", "works"):
            handler_requests.works = what == "works"
        elif what == "reborn":
            handler_requests = reborn(handler_requests, int(seconds * SECOND), **rule)
        elif what == "survey":
            states = {name: "open" if is_open[name] else "closed" for name in "ab"}
            told += handler_requests.survey(breakers=states)
        else:
            told += handler_requests.after(seconds)
    handler_requests.works = True
    told += handler_requests.after(3 * RETRY_NS_MAX / SECOND + 2 * every + hold + group)
    assert handler_requests.state.lost == 0
    numbers = list({each.number: each for each in told}.values())  # an attempt each, told once
    for subject in "ab":
        standing = False
        for message in numbers:
            for line in message.began:
                if (line.kind, line.subject) == ("breaker.open", subject):
                    standing = not line.over_at
            for line in message.ended:
                if line.subject == subject:
                    assert standing, "an end without a beginning, or two ends"
                    standing = False
        assert standing == is_open[subject], "the last that was told is how it is"
    counted = sum(times for kind, _, times in began(numbers) if kind == "task.dead")
    assert counted == dead, "each was told, or counted in the next message"
    assert all(each.stage in (Stage.TOLD, Stage.QUIET) for each in handler_requests.state.incidents)
