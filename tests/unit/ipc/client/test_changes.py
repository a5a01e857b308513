"""Readers of changes, as pure state."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from musterd.ipc.client.changes import UNREAD_MAX, ChangeReader, Following, ResultChange
from musterd.ipc.client.history import KeptResult, question, results_of
from musterd.ipc.client.session import REFRESH_NS, Session
from musterd.ipc.errors import HistoryUnavailable, InvalidSchedule, UnknownSchedule
from musterd.ipc.watching.difference import FieldChange
from musterd.ipc.wire.codec import decode_client
from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import (
    PROTOCOL,
    Change,
    Changes,
    Follow,
    Hello,
    History,
    Welcome,
)

NOW = 1_000


def newest(*changes: tuple[str, str]) -> Changes:
    return Changes([Change(*change) for change in changes], newest=True)


def told(schedule: str, task: str) -> Changes:
    return Changes([Change(schedule, task)])


@pytest.fixture
def read() -> Callable[..., list[str]]:
    def hear(following: Following, *messages: Changes) -> list[str]:
        for message in messages:
            following.hear(message)
        found = []
        while following.any_unread():
            change = following.first()
            following.read(change)
            found.append(change.task)
        return found

    return hear


def test_a_reader_begins_with_what_changes_after_it_came(read: Callable[..., list[str]]) -> None:
    following = Following()
    assert read(following, told("a", "@a.1"), newest(("a", "@a.2"))) == []
    assert read(following, told("a", "@a.2"), told("a", "@a.3"), told("b", "@b.1")) == [
        "@a.3",
        "@b.1",
    ]


def test_a_change_that_is_told_again_is_no_news(read: Callable[..., list[str]]) -> None:
    following = Following()
    assert read(following, newest(), told("a", "@a.1"), told("a", "@a.1")) == ["@a.1"]
    assert read(following, newest(("a", "@a.1"))) == []


def test_several_changes_that_are_told_again_are_no_news(read: Callable[..., list[str]]) -> None:
    following = Following()
    one, two, three = (Change("a", f"@a.{n}", "", n, n) for n in (1, 2, 3))
    again = [msgspec.structs.replace(change, again=True) for change in (one, two, three)]
    begun = Changes([one], newest=True)
    assert read(following, begun, Changes([two]), Changes([three])) == ["@a.2", "@a.3"]
    assert read(following, Changes(again[:1]), Changes(again[1:])) == []
    # What the reader missed is news, also when it is told late, and comes in order.
    late = [Change("a", f"@a.{n}", "", n, n, again=True) for n in (3, 4, 5)]
    following.hear(Changes(late[2:], newest=True))
    following.hear(Changes(late))
    gap = following.gap()
    assert gap is not None
    following.fill(gap, [])
    assert read(following) == ["@a.4", "@a.5"]
    # A schedule that was deleted and put again counts from 1.
    anew = Change("a", "@a.6", "", 6, 1, again=True)
    assert read(following, Changes([anew])) == ["@a.6"]


def test_what_was_missed_comes_with_the_next_answer(read: Callable[..., list[str]]) -> None:
    following = Following()
    assert read(following, newest(("a", "@a.1"))) == []
    assert read(following, newest(("a", "@a.4"), ("b", "@b.1"))) == ["@a.4", "@b.1"]


def entry(number: int, *, changed: bool = True) -> HistoryEntry:
    return HistoryEntry(number, number, f"@a.{number}", "", b"\xc0", changed=changed)


def numbered(number: int, **more: Any) -> Change:
    return Change("a", f"@a.{number}", "", number, number, **more)


HISTORY = [entry(1, changed=False), entry(2), entry(3), entry(4, changed=False), entry(5), entry(6)]


@pytest.mark.parametrize(
    ("begun", "missed"),
    [
        ([numbered(2)], ["@a.3", "@a.5", "@a.6"]),
        ([numbered(5)], ["@a.6"]),
        ([], ["@a.2", "@a.3", "@a.5", "@a.6"]),
        # Deleted and put again: it counts from 1.
        ([Change("a", "@a.0", "", 0, 4)], ["@a.2", "@a.3", "@a.5", "@a.6"]),
    ],
    ids=["one before", "nothing missed", "no change before", "deleted"],
)
@pytest.mark.parametrize("live", [False, True])
def test_all_changes_that_were_missed_are_delivered_in_order_and_once(
    read: Callable[..., list[str]], begun: list[Change], missed: list[str], live: bool
) -> None:
    """Also if a change is told before the answer to the Follow of another connection."""
    following = Following()
    following.hear(Changes(begun, newest=True))
    following.doubt()
    following.hear(Changes([numbered(6)], newest=not live))
    following.hear(Changes([numbered(6)], newest=True))
    if gap := following.gap():
        following.fill(gap, HISTORY)
    assert following.gap() is None
    assert read(following) == missed
    again = [numbered(number, again=True) for number in (3, 5, 6)]
    assert read(following, Changes(again), Changes([numbered(6)], newest=True)) == []
    assert read(following, Changes([numbered(9)])) == ["@a.9"]


def test_nothing_is_asked_while_nothing_can_have_been_missed() -> None:
    following = Following()
    following.hear(Changes([numbered(1)], newest=True))
    for message in (Changes([numbered(3)]), Changes([Change("b", "@b.2", "", 1, 2)])):
        following.hear(message)
        assert following.gap() is None
    following.hear(newest(("c", "@c.1")))
    assert following.gap() is None, "a cluster's changes have no numbers"


def test_a_reader_of_some_schedules_hears_of_no_other(read: Callable[..., list[str]]) -> None:
    following = Following(["a"])
    assert read(following, newest(), told("b", "@b.1"), told("a", "@a.1")) == ["@a.1"]


def test_a_reader_that_does_not_come_keeps_the_newest() -> None:
    following = Following()
    following.hear(newest())
    for number in range(UNREAD_MAX + 1):
        following.hear(told("a", f"@a.{number}"))
    assert len(following.unread) == UNREAD_MAX
    assert following.unread[-1].change.task == f"@a.{UNREAD_MAX}"


# -- a session that follows -------------------------------------------------------------------


def sent(session: Session) -> list[type]:
    frames = list(session.outbox)
    session.outbox.clear()
    return [type(decode_client(frame)) for frame in frames]


def test_a_session_follows_again_on_each_connection_and_after_a_silence() -> None:
    session, following = Session(), Following()
    session.follow(following)
    assert session.busy
    session.connected(NOW)
    session.tick(NOW)
    assert sent(session) == [Hello], "nothing else before the Welcome"
    session.receive(NOW, Welcome(PROTOCOL, "one"))
    assert sent(session) == [Follow]
    session.receive(NOW, Welcome(PROTOCOL, "two"))
    assert sent(session) == [Follow]
    session.tick(NOW + REFRESH_NS)
    assert Follow in sent(session)
    session.unfollow(following)
    assert not session.busy
    session.receive(NOW, newest(("a", "@a.1")))
    assert not following.unread


# -- content ----------------------------------------------------------------------------------

CHANGE = Change("kites", "t", "d", 1_500_000_000, 2, 1, again=True)


def kept(number: int, value: Any, **more: Any) -> HistoryEntry:
    return HistoryEntry(number, 0, "t", "d", msgspec.msgpack.encode(value), **more)


def test_a_change_has_its_results_fields_and_diff() -> None:
    entries = results_of(Entries(1, [kept(1, {"a": 1, "b": 2}), kept(2, {"a": 1, "b": 3})]))
    change = ResultChange(CHANGE, "handle", entries)
    assert (change.before, change.after) == ({"a": 1, "b": 2}, {"a": 1, "b": 3})
    assert change.fields == {"b": FieldChange(2, 3)}
    assert '-  "b": 2' in change.diff
    assert change.summary == "b 2 → 3"
    assert (change.at, change.again, change.cut) == (1.5, True, False)


@pytest.mark.parametrize(
    "entries", [[], [kept(2, "x")], [kept(1, "x"), kept(2, "y", cut=True)]], ids=str
)
def test_a_change_says_what_is_not_kept(entries: list[HistoryEntry]) -> None:
    assert ResultChange(CHANGE, "handle", results_of(Entries(1, entries))).cut


def test_a_question_for_history_is_asked_again_on_the_next_connection() -> None:
    session = Session("me")
    session.connected(0)
    session.tick(0)
    session.receive(0, Welcome(PROTOCOL, "one"))
    asked = session.history(0, History(0, "kites", 5))
    other = session.advise(0)
    session.disconnected()
    session.connected(1)
    session.tick(1)
    session.receive(1, Welcome(PROTOCOL, "two"))
    questions = [decode_client(frame) for frame in session.outbox]
    assert History(1, "kites", 5) in questions
    session.receive(2, Entries(1, [kept(1, "x")]))
    assert asked.answered
    assert [each.value for each in results_of(asked.entries)] == ["x"]
    assert not other.answered


def test_what_the_daemon_says_instead_is_raised() -> None:
    with pytest.raises(UnknownSchedule, match="no schedule"):
        results_of(Entries(1, [], "there is no schedule 'x'", unknown=True))
    with pytest.raises(HistoryUnavailable, match="busy"):
        results_of(Entries(1, [], "busy"))


@pytest.mark.parametrize(
    ("schedule", "n", "error"),
    [
        ("", 1, TypeError),
        (3, 1, TypeError),
        ("s", 0, ValueError),
        ("s", True, ValueError),
        ("s" * 201, 1, InvalidSchedule),
        ("\ud800", 1, InvalidSchedule),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(schedule: Any, n: Any, error: Any) -> None:
    with pytest.raises(error):
        question(schedule, n)


@pytest.mark.parametrize("name", ["", "s" * 201, "\ud800"])
def test_a_name_that_no_schedule_has_is_not_followed(name: str) -> None:
    with pytest.raises(InvalidSchedule, match="give the name of a schedule"):
        Following(["kites", name])


def test_a_change_that_could_not_be_read_is_still_unread() -> None:
    following = Following()
    following.hear(newest())
    following.hear(told("kites", "t"))
    fail = [False, True]

    def recall(change: Change) -> list[KeptResult]:
        if fail.pop():
            raise TimeoutError
        return []

    reader: Any = ChangeReader(following, lambda: None, str, recall, look_back=list, stop=list)
    with pytest.raises(TimeoutError):
        next(reader)
    assert next(reader).task == "t"
    assert not following.any_unread()
