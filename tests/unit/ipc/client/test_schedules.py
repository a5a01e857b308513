"""Schedules of a client: what is sent, in portions, again on another connection, and errors."""

from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest

from musterd.ipc.client import schedules
from musterd.ipc.client.record import Question
from musterd.ipc.client.session import Session
from musterd.ipc.errors import InvalidSchedule, ScheduleError, StillRunning, UnknownSchedule
from musterd.ipc.secrets.reference import Secret
from musterd.ipc.wire import schedule_messages as wire
from musterd.ipc.wire.codec import decode_client
from musterd.ipc.wire.messages import (
    PROTOCOL,
    Advice,
    Rejection,
    Welcome,
)
from musterd.ipc.wire.schedule_messages import (
    PUT_BYTES_MAX,
    PUTS_MAX,
)
from musterd.supervisor.config.schema import ScheduleConfig

NOW = 10**9


def sent(session: Session) -> list[Any]:
    frames = list(session.outbox)
    session.outbox.clear()
    return [decode_client(frame) for frame in frames]


def ready() -> Session:
    session = Session()
    session.connected(NOW)
    session.receive(NOW, Welcome(PROTOCOL, "one"))
    session.outbox.clear()
    return session


def test_keys_are_sent_as_a_file_would_have_them() -> None:
    put = schedules._put(
        "kites",
        {
            "task": "shop.check",
            "every": timedelta(minutes=5),
            "cron": None,
            "args": {"login": {"password": Secret("SHOP")}, "pages": (1, 2)},
        },
    )
    assert msgspec.msgpack.decode(put.section) == {
        "task": "shop.check",
        "every": 300.0,
        "args": {"login": {"password": {"$secret": "SHOP"}}, "pages": [1, 2]},
    }


@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        ("", {}, "give the name of a schedule"),
        (7, {}, "give the name of a schedule, not 7"),
        ("a", {"args": {"x": object()}}, "objects of type object cannot be sent"),
        ("a", {"args": {"x": "y" * 70_000}}, "65536 at most"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(
    name: Any, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidSchedule, match=problem):
        schedules._puts({"good": {"task": "shop.check"}, name: keys})


@pytest.mark.parametrize("name", ["", "s" * 201, "\ud800", None])
def test_a_name_that_cannot_be_sent_is_refused(name: Any) -> None:
    for ask in (schedules._new_run, partial(schedules._pause, paused=True)):
        with pytest.raises(InvalidSchedule, match="give the name of a schedule"):
            ask(name)
    for several in (
        schedules._deletes,
        lambda names: schedules._puts({each: {} for each in names}),
    ):
        with pytest.raises(InvalidSchedule, match="give the name of a schedule"):
            several(["kites", name])


def test_many_go_in_messages_of_bounded_size() -> None:
    small = {f"s{number}": {"task": "shop.check"} for number in range(PUTS_MAX + 1)}
    large = {f"l{number}": {"args": {"x": "y" * 60_000}} for number in range(10)}
    for given in (small, large):
        made = [make(1, False) for make in schedules._puts(given)]
        portions = [each.schedules for each in made if isinstance(each, wire.PutSchedules)]
        assert [put.name for portion in portions for put in portion] == list(given)
        assert max(map(len, portions)) <= PUTS_MAX
        sizes = [sum(len(put.section) for put in portion) for portion in portions]
        assert max(sizes) <= PUT_BYTES_MAX
        assert len(portions) > 1


def test_a_question_without_an_answer_is_asked_again_of_the_next_daemon() -> None:
    session = ready()
    id_, make = schedules._new_run("kites")
    question = session.ask(NOW, Question(make))
    assert sent(session) == [wire.RunSchedule(1, "kites", id_)]
    session.receive(NOW, Welcome(PROTOCOL, "two"))
    assert sent(session) == [wire.RunSchedule(1, "kites", id_, again=True)]
    session.receive(NOW, Advice(1, {}))
    assert not question.answered, "that is no answer to this"
    session.receive(NOW, wire.ScheduleAnswer(1, []))
    assert question.answered
    session.receive(NOW, wire.ScheduleAnswer(1, []))
    assert not session.busy


def answered(*rejected: Rejection, asked: int = 1) -> Question:
    question = Question(schedules._show())
    question.asked, question.answer = asked, wire.ScheduleAnswer(1, list(rejected))
    return question


def test_each_refusal_is_an_error_that_says_why() -> None:
    bad = Rejection("a", wire.INVALID_SCHEDULE, "one\ntwo")
    file = Rejection("b", wire.READ_ONLY, "in a file")
    with pytest.raises(InvalidSchedule, match="one\ntwo\nin a file") as caught:
        schedules._check([answered(bad), answered(file)])
    assert caught.value.problems == {"a": ["one", "two"], "b": ["in a file"]}
    unknown = Rejection("a", wire.UNKNOWN_SCHEDULE, "nobody")
    with pytest.raises(UnknownSchedule):
        schedules._check([answered(unknown)], deleted=True)
    schedules._check([answered(unknown, asked=2)], deleted=True)  # the first one deleted it
    with pytest.raises(StillRunning) as running:
        schedules._check([answered(Rejection("@a.1", wire.STILL_RUNNING, "alive"))])
    assert running.value.task == "@a.1"
    with pytest.raises(ScheduleError, match="disk"):
        schedules._check([answered(Rejection("a", wire.STORE_FAILS, "disk"))])
    many = [Rejection(f"s{number}", wire.INVALID_SCHEDULE, "no") for number in range(100)]
    with pytest.raises(InvalidSchedule, match="and 80 more problems"):
        schedules._check([answered(*many)])


def test_keys_that_type_checkers_know_are_those_of_the_configuration():
    known = {field.encode_name for field in msgspec.structs.fields(ScheduleConfig)}
    assert set(schedules.ScheduleKeys.__annotations__) == known
