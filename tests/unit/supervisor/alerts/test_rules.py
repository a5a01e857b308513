"""One rule of [[alerts]]: which messages it sends when, given events and times."""

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
from musterd.supervisor.api.cluster import ClusterNode, ClusterStatus
from musterd.supervisor.log.log import MESSAGES

SECOND = 1_000_000_000
CORE = Path(__file__).resolve().parents[4] / "supervisor" / "core"


class RuleDriver:
    """One rule, a delivery that works or fails, and a clock that the test moves."""

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
        """Let time pass; return every message on the way."""
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
    driver = RuleDriver()
    assert began(driver.event("breaker.open", target="a")) == [("breaker.open", "a", 1)]
    told = driver.event("breaker.closed", target="a") + driver.after(60)
    assert ended(told) == [("breaker.open", "a")]
    assert ended(driver.event("breaker.closed", target="a") + driver.after(60)) == []


def test_the_end_is_that_of_the_same_subject() -> None:
    driver = RuleDriver(on=("worker.fatal", "pool.fatal"))
    driver.event("worker.fatal", pool="p", worker="p/0")
    driver.event("pool.fatal", pool="q")
    assert driver.event("worker.ready", pool="p", worker="p/1") + driver.after(60) == []
    told = driver.event("worker.ready", pool="p", worker="p/0") + driver.after(60)
    assert ended(told) == [("worker.fatal", "p/0")]
    told = driver.event("worker.ready", pool="q", worker="q/3") + driver.after(60)
    assert ended(told) == [("pool.fatal", "q")]


def test_an_event_without_an_end_is_told_and_never_resolved() -> None:
    driver = RuleDriver(on=("task.dead",))
    assert began(driver.event("task.dead", pool="p", text="boom")) == [("task.dead", "p", 1)]
    assert driver.after(7200) == []
    assert driver.state.incidents == []


def test_without_resolved_nobody_is_told_of_the_end() -> None:
    driver = RuleDriver(resolved=False)
    driver.event("memory.critical")
    assert ended(driver.event("memory.normal") + driver.after(60)) == []


def test_without_resolved_a_second_time_is_told_like_the_first() -> None:
    driver = RuleDriver(
        on=("breaker.open",), resolved=False, every_ns=60 * SECOND, group_ns=10 * SECOND
    )
    for _ in range(2):
        driver.event("breaker.open", target="a")
        driver.event("breaker.closed", target="a")
        assert len(driver.after(59)) == 1, "it came and went"
        driver.event("breaker.open", target="a")
        assert len(driver.after(120)) == 1
        driver.event("breaker.closed", target="a")
        driver.after(59)


def test_what_holds_for_less_than_the_rule_wants_is_not_told() -> None:
    driver = RuleDriver(on=("breaker.open",), for_ns=300 * SECOND)
    assert driver.event("breaker.open", target="a") + driver.after(299) == []
    assert driver.event("breaker.closed", target="a") + driver.after(600) == []
    assert driver.state.incidents == []
    driver.event("breaker.open", target="a")
    assert began(driver.after(300)) == [("breaker.open", "a", 1)]


def test_for_does_not_hold_up_what_has_no_end() -> None:
    driver = RuleDriver(on=("task.dead",), for_ns=300 * SECOND)
    assert began(driver.event("task.dead", pool="p")) == [("task.dead", "p", 1)]


def test_events_of_other_pools_and_targets_are_not_told() -> None:
    driver = RuleDriver(on=("task.dead", "breaker.*"), pools=("par*",))
    assert driver.event("task.dead", pool="browser") == []
    assert began(driver.event("task.dead", pool="parser")) == [("task.dead", "parser", 1)]
    driver = RuleDriver(on=("breaker.open",), targets=("*.example",))
    assert driver.event("breaker.open", target="site.test") == []
    assert driver.event("breaker.open", target="site.example")


# -- together ---------------------------------------------------------------------------------


def test_what_happens_within_the_group_is_one_message() -> None:
    driver = RuleDriver(on=("breaker.open", "task.dead"), group_ns=30 * SECOND)
    assert driver.event("breaker.open", target="a") == []
    driver.after(10)
    driver.event("breaker.open", target="b")
    for _ in range(5):
        driver.event("task.dead", pool="p")
    (message,) = driver.after(20)
    assert began([message]) == [
        ("breaker.open", "a", 1),
        ("breaker.open", "b", 1),
        ("task.dead", "p", 5),
    ]


def test_what_comes_and_goes_within_the_group_is_told_as_that() -> None:
    driver = RuleDriver(on=("worker.fatal",), group_ns=30 * SECOND)
    driver.event("worker.fatal", pool="p", worker="p/0")
    driver.after(5)
    driver.event("worker.ready", pool="p", worker="p/0")
    (message,) = driver.after(60)
    assert message.began[0].over_at == message.began[0].since + 5
    assert message.ended == []
    assert driver.after(600) == []


def test_an_end_that_is_taken_back_within_the_group_is_not_told() -> None:
    driver = RuleDriver(on=("breaker.open",), group_ns=30 * SECOND)
    driver.event("breaker.open", target="a")
    assert len(driver.after(30)) == 1
    driver.event("breaker.closed", target="a")
    driver.after(5)
    assert driver.event("breaker.open", target="a") + driver.after(600) == []


def test_more_lines_than_a_message_shows_are_counted() -> None:
    driver = RuleDriver(on=("breaker.open",), group_ns=SECOND)
    for number in range(LINES_MAX + 7):
        driver.event("breaker.open", target=f"t{number}")
    (message,) = driver.after(1)
    assert (len(message.began), message.more) == (LINES_MAX, 7)


# -- not too often ----------------------------------------------------------------------------


def test_what_happens_again_is_counted_and_told_after_every() -> None:
    driver = RuleDriver(on=("task.dead",))
    assert driver.event("task.dead", pool="p")
    driver.after(60)
    for _ in range(41):
        assert driver.event("task.dead", pool="p") == []
    assert driver.after(3600 - 61) == []
    assert began(driver.after(1)) == [("task.dead", "p", 41)]


def test_a_count_is_many_times() -> None:
    driver = RuleDriver(on=("task.dead",))
    assert began(driver.event("task.dead", pool="p", count=7)) == [("task.dead", "p", 7)]


def test_one_that_flaps_costs_two_messages_in_every() -> None:
    driver = RuleDriver(on=("breaker.open",))
    told = []
    for _ in range(60):
        told += driver.event("breaker.open", target="a")
        told += driver.after(30)
        told += driver.event("breaker.closed", target="a")
        told += driver.after(29)
    assert [len(each.began) + len(each.ended) for each in told] == [1, 1]
    told = driver.after(120) + driver.event("breaker.open", target="a") + driver.after(1)
    assert began(told) == [("breaker.open", "a", 60)]


def test_one_that_came_back_too_soon_and_stays_is_told_after_every() -> None:
    driver = RuleDriver(on=("breaker.open",))
    driver.event("breaker.open", target="a")
    driver.event("breaker.closed", target="a")
    driver.after(60)
    assert driver.event("breaker.open", target="a") == []
    assert began(driver.after(3600)) == [("breaker.open", "a", 1)]
    assert ended(driver.event("breaker.closed", target="a") + driver.after(60)) == [
        ("breaker.open", "a")
    ]


def test_a_storm_of_many_subjects_makes_few_messages() -> None:
    driver = RuleDriver(on=("breaker.open",), group_ns=10 * SECOND)
    told = []
    for number in range(360):
        told += driver.event("breaker.open", target=f"t{number}")
        told += driver.after(10)
    assert sum(len(each.began) + each.more for each in told) > 200
    assert len(told) <= 12  # in an hour


def test_a_hundred_thousand_events_are_remembered_in_bounded_room() -> None:
    driver = RuleDriver(on=("breaker.open", "task.dead"), group_ns=SECOND)
    for number in range(100_000):
        happening = Happening("breaker.open", target=f"t{number}", at=1.0)
        driver.alerting.happened(driver.now_ns, happening)
    assert len(driver.state.incidents) == INCIDENTS_MAX
    (message,) = driver.after(1)
    assert len(message.began) + message.more == 100_000
    assert len(msgspec.json.encode(driver.state)) < 200_000


def test_subjects_that_are_over_make_room_for_others() -> None:
    driver = RuleDriver(on=("task.dead",))
    for number in range(INCIDENTS_MAX):
        driver.alerting.happened(driver.now_ns, Happening("task.dead", pool=f"p{number}"))
    driver.after(1)
    driver.after(1)
    told = driver.event("task.dead", pool="another") + driver.after(600)
    assert ("task.dead", "another", 1) in began(told)


# -- deliveries that fail ---------------------------------------------------------------------


def test_a_message_that_cannot_be_delivered_is_tried_again_with_longer_pauses() -> None:
    driver = RuleDriver(on=("memory.critical",))
    driver.works = False
    (first,) = driver.event("memory.critical", text="87 %")
    assert driver.after(RETRY_NS / SECOND - 1) == []
    assert driver.after(1) == [first]
    assert driver.after(2 * RETRY_NS / SECOND) == [first]
    driver.after(4000)
    before = driver.state.failures
    driver.after(2 * RETRY_NS_MAX / SECOND)
    assert driver.state.failures - before == 2
    driver.works = True
    assert driver.after(RETRY_NS_MAX / SECOND) == [first]
    assert (driver.state.sent, driver.state.error) == (1, "")


def test_what_happens_while_nobody_can_be_reached_is_told_together_afterwards() -> None:
    driver = RuleDriver(on=("breaker.open", "task.dead"))
    driver.works = False
    driver.event("breaker.open", target="a")
    for number in range(1000):
        driver.event("task.dead", pool=f"p{number % 3}")
    driver.event("breaker.closed", target="a")
    driver.works = True
    first, second = driver.after(RETRY_NS_MAX / SECOND)
    assert began([first]) == [("breaker.open", "a", 1)]
    assert ended([second]) == [("breaker.open", "a")]
    assert sum(times for _, _, times in began([second])) == 1000


def test_old_news_are_given_up_and_counted() -> None:
    driver = RuleDriver(on=("task.dead",))
    driver.works = False
    driver.event("task.dead", pool="p")
    driver.after(GIVE_UP_NS / SECOND + RETRY_NS_MAX / SECOND + 1)
    assert driver.state.lost == 1


def test_at_the_end_nothing_waits_for_company() -> None:
    driver = RuleDriver(on=("shutdown.phase",), group_ns=30 * SECOND)
    assert driver.event("shutdown.phase") == []
    assert len(driver.turn(at_once=True)) == 1


# -- over a restart ---------------------------------------------------------------------------


def restarted(driver: RuleDriver, passed_ns: int = 0, **rule: object) -> RuleDriver:
    other = RuleDriver(**{"on": driver.rule.on, "group_ns": driver.rule.group_ns, **rule})
    other.now_ns = driver.now_ns + passed_ns
    data = msgspec.json.encode(driver.alerting.states)
    other.alerting.restore(msgspec.json.decode(data, type=dict[str, RuleState]), passed_ns)
    return other


def test_an_open_alert_is_not_repeated_by_the_next_life_and_is_resolved_by_it() -> None:
    driver = RuleDriver(on=("breaker.open",))
    driver.event("breaker.open", target="a")
    driver = restarted(driver, 7 * SECOND)
    assert driver.turn() == []
    assert driver.survey(breakers={"a": "open"}) == []
    assert ended(driver.survey(breakers={"a": "closed"}) + driver.after(60)) == [
        ("breaker.open", "a")
    ]


def test_what_was_not_delivered_is_delivered_by_the_next_life() -> None:
    driver = RuleDriver(on=("breaker.open",))
    driver.works = False
    (message,) = driver.event("breaker.open", target="a")
    driver = restarted(driver)
    assert began(driver.after(RETRY_NS / SECOND)) == began([message])


def test_the_next_life_tries_at_once_however_often_the_last_one_failed() -> None:
    """Somebody has mended the destination, and restarted or reloaded."""
    driver = RuleDriver(on=("breaker.open",))
    driver.works = False
    (message,) = driver.event("breaker.open", target="a")
    driver.after(3 * RETRY_NS_MAX / SECOND)
    driver = restarted(driver)
    assert began(driver.turn()) == began([message])


@pytest.mark.parametrize("moved", [-900, 100_000])
def test_limits_hold_over_a_reboot_that_sets_the_clock_anew(moved: int) -> None:
    driver = RuleDriver(on=("breaker.open",), group_ns=10 * SECOND)
    for target in ("a", "b", "c"):  # makes the pause between messages grow
        driver.event("breaker.open", target=target)
        assert driver.after(60)
    driver.event("breaker.closed", target="a")
    driver.after(60)
    driver = restarted(driver, moved * SECOND)
    driver.event("breaker.open", target="a")
    assert driver.after(3600 - 250) == []
    assert began(driver.after(250)) == [("breaker.open", "a", 1)]
    driver.event("breaker.open", target="d")
    assert began(driver.after(60)) == [("breaker.open", "d", 1)]


def test_the_pause_between_messages_is_as_long_after_a_reboot() -> None:
    driver = RuleDriver(on=("breaker.open",), group_ns=10 * SECOND)
    for target in ("a", "b", "c"):
        driver.event("breaker.open", target=target)
        assert driver.after(60)
    driver = restarted(driver, -900 * SECOND)
    driver.event("breaker.open", target="d")
    assert began(driver.after(60)) == [("breaker.open", "d", 1)]


def test_what_a_changed_rule_does_not_want_is_forgotten() -> None:
    driver = RuleDriver(on=("breaker.open", "memory.*"))
    driver.event("breaker.open", target="a")
    driver = restarted(driver, on=("memory.*",))
    assert driver.state.incidents == []
    assert driver.survey(breakers={"a": "closed"}) + driver.after(60) == []


# -- surveys ----------------------------------------------------------------------------------


def test_a_survey_opens_what_no_event_has_told() -> None:
    driver = RuleDriver(on=("worker.fatal", "memory.*", "breaker.open", "pool.paused"))
    told = driver.survey(
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
        driver.survey(pools={"p": "FATAL"}, workers={"p/0": "FATAL"}, pauses={"p": "paused"}) != []
    )


def test_a_pool_that_cannot_start_is_one_matter_and_not_one_for_each_worker() -> None:
    driver = RuleDriver(on=("worker.fatal", "pool.fatal"))
    told = driver.survey(
        pools={"p": "FATAL"},
        workers={"p/0": "FATAL", "p/1": "FATAL"},
        reasons={"p": "no module", "p/0": "no module", "p/1": "no module"},
    )
    assert began(told) == [("pool.fatal", "p", 1)]


def clustered(barn: str = "", *, state: str = "member", **fields: object) -> Survey:
    """What a node of a cluster says, which has seen node barn in this state, or nothing yet."""
    nodes = [ClusterNode(name="barn", state=barn)] if barn else []
    seen = 1.0 if barn else None
    cluster = ClusterStatus(node="shed", state=state, seen_seconds=seen, nodes=nodes, **fields)  # type: ignore[arg-type]
    return Survey(cluster=cluster)


def test_a_lost_node_is_an_incident_of_that_node_and_ends_with_it() -> None:
    driver = RuleDriver(on=USUAL)
    assert began(driver.event("cluster.node_lost", node="barn")) == [
        ("cluster.node_lost", "barn", 1)
    ]
    assert ended(driver.event("cluster.node_back", node="attic")) == []
    assert ended(driver.event("cluster.node_back", node="barn")) == [("cluster.node_lost", "barn")]


def test_a_survey_finds_an_outage_and_no_node_that_others_have_lost() -> None:
    driver = RuleDriver(on=USUAL)
    lost = clustered("gone", unreachable=True).cluster
    assert began(driver.survey(cluster=lost)) == [("cluster.unreachable", "", 1)]


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
        ("watch.stale", "s", Survey(stale=frozenset({"s"})), Finding.HOLDS),
        ("watch.stale", "s", Survey(), Finding.OVER),
        ("session.held", "acme", Survey(held=frozenset({"acme"})), Finding.HOLDS),
        ("session.held", "acme", Survey(), Finding.OVER),
        ("cluster.unreachable", "", Survey(), Finding.OVER),
        ("cluster.unreachable", "", clustered(unreachable=True), Finding.HOLDS),
        ("cluster.node_lost", "barn", clustered(), Finding.UNKNOWN),
        ("cluster.node_lost", "barn", clustered("gone"), Finding.HOLDS),
        ("cluster.node_lost", "barn", clustered("silent"), Finding.HOLDS),
        ("cluster.node_lost", "barn", clustered("alive"), Finding.OVER),
        ("cluster.node_lost", "attic", clustered("gone"), Finding.OVER),
        ("cluster.vacuum_stalled", "", clustered("alive", stalled=True), Finding.HOLDS),
        ("cluster.vacuum_stalled", "", clustered("alive"), Finding.OVER),
        ("cluster.fatal", "", clustered(state="down"), Finding.UNKNOWN),
        ("cluster.fatal", "", clustered(), Finding.OVER),
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


# -- any order of events ----------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("open", "closed", "dead", "fails", "works", "restarted", "survey", "wait")
        ),
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
    driver = RuleDriver(**rule)
    told: list[Message] = []
    is_open = {"a": False, "b": False}
    dead = 0
    for what, subject, seconds in steps:
        if what in ("open", "closed"):
            is_open[subject] = what == "open"
            told += driver.event(f"breaker.{what}", target=subject)
        elif what == "dead":
            dead += 1
            told += driver.event("task.dead", pool=subject)
        elif what in ("fails", "works"):
            driver.works = what == "works"
        elif what == "restarted":
            driver = restarted(driver, int(seconds * SECOND), **rule)
        elif what == "survey":
            states = {name: "open" if is_open[name] else "closed" for name in "ab"}
            told += driver.survey(breakers=states)
        else:
            told += driver.after(seconds)
    driver.works = True
    told += driver.after(3 * RETRY_NS_MAX / SECOND + 2 * every + hold + group)
    assert driver.state.lost == 0
    numbers = list({each.number: each for each in told}.values())  # without repeated attempts
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
    assert all(each.stage in (Stage.TOLD, Stage.QUIET) for each in driver.state.incidents)
