"""Readers of changes, as pure state."""

from collections.abc import Callable

import pytest

from musterd.ipc.client.changes import UNREAD_MAX, Following
from musterd.ipc.client.session import REFRESH_NS, Session
from musterd.ipc.wire.codec import decode_client
from musterd.ipc.wire.messages import PROTOCOL, Change, Changes, Follow, Hello, Welcome

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
        found = [change.task for change in following.unread]
        following.unread.clear()
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


def test_what_was_missed_comes_with_the_next_answer(read: Callable[..., list[str]]) -> None:
    following = Following()
    assert read(following, newest(("a", "@a.1"))) == []
    assert read(following, newest(("a", "@a.4"), ("b", "@b.1"))) == ["@a.4", "@b.1"]


def test_a_reader_of_some_schedules_hears_of_no_other(read: Callable[..., list[str]]) -> None:
    following = Following(["a"])
    assert read(following, newest(), told("b", "@b.1"), told("a", "@a.1")) == ["@a.1"]


def test_a_reader_that_does_not_come_keeps_the_newest() -> None:
    following = Following()
    following.hear(newest())
    for number in range(UNREAD_MAX + 1):
        following.hear(told("a", f"@a.{number}"))
    assert len(following.unread) == UNREAD_MAX
    assert following.unread[-1].task == f"@a.{UNREAD_MAX}"


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
