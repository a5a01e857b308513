"""The client's protocol without a socket: what a Session sends in answer to each message."""

import os
from enum import StrEnum
from itertools import pairwise

import msgspec
import pytest

from musterd.ipc.client import session as session_module
from musterd.ipc.client.handle import rejection_error, unreported_error
from musterd.ipc.client.ids import new_id
from musterd.ipc.client.record import TaskRecord
from musterd.ipc.client.session import (
    COALESCE_TASKS,
    FULL_RETRY_NS,
    HELLO_PERIOD_NS,
    HELLO_RETRY_NS,
    HELLO_SILENCE_NS,
    REFRESH_NS,
    TASK_MISSING,
    UNACKED_TASKS_MAX,
    UNREPORTED_MAX,
    Session,
)
from musterd.ipc.client.taskspec import SECONDS_MAX, make_spec
from musterd.ipc.errors import InvalidTask, QueueFull, TaskMissing
from musterd.ipc.wire.codec import decode_client
from musterd.ipc.wire.messages import (
    BATCH_BYTES_MAX,
    BATCH_TASKS_MAX,
    CANCELLED,
    CRITICAL,
    PROTOCOL,
    SUCCEEDED,
    TASK_BYTES_MAX,
    Accepted,
    Cancel,
    Hello,
    Inspect,
    Inspected,
    Missing,
    Outcome,
    Refused,
    Rejection,
    Results,
    Submit,
    TaskSpec,
    TaskView,
    Watch,
    Welcome,
)

NOW = 1_000_000_000_000


def sent(session: Session) -> list[object]:
    """Return the messages of the session, taken out of its outbox."""
    frames = list(session.outbox)
    session.outbox.clear()
    return [decode_client(frame) for frame in frames]


def submits(session: Session) -> list[Submit]:
    return [message for message in sent(session) if isinstance(message, Submit)]


def task(task_id: str, args: bytes = b"\x80", *, patient: bool = False) -> TaskRecord:
    record = TaskRecord(task_id, "pool.method", TaskSpec(task_id, "pool.method", args))
    record._patient = patient
    return record


def added(session: Session, *ids: str, patient: bool = False) -> list[TaskRecord]:
    records = [task(task_id, patient=patient) for task_id in ids]
    for record in records:
        session.add(record)
    session.seal(NOW)
    return records


@pytest.fixture
def session() -> Session:
    """Return a session that is connected and welcomed, with nothing under way."""
    session = Session()
    session.connected(NOW)
    session.tick(NOW)
    assert [type(message) for message in sent(session)] == [Hello]
    session.receive(NOW, Welcome(PROTOCOL, "epoch-1"))
    assert sent(session) == []
    return session


# -- hello ------------------------------------------------------------------------------------


def test_nothing_but_hello_is_sent_before_the_welcome():
    session = Session()
    session.connected(NOW)
    added(session, "a")
    session.watch(TaskRecord("w", "", None))
    session.cancel(NOW, "a")
    session.inspect(NOW, "a")
    session.tick(NOW)
    (hello,) = sent(session)
    assert isinstance(hello, Hello)
    assert hello.protocol == PROTOCOL
    session.receive(NOW, Welcome(PROTOCOL, "epoch-1"))
    assert sent(session) == [
        Submit(1, [TaskSpec("a", "pool.method", b"\x80")]),
        Watch(["w"]),
        Cancel(["a"]),
        Inspect(1, "a"),
    ]


def test_nothing_at_all_is_sent_without_a_connection():
    session = Session()
    added(session, "a")
    session.tick(NOW)
    assert sent(session) == []


def test_hello_is_repeated_until_the_welcome():
    session = Session()
    session.connected(NOW)
    session.tick(NOW)
    assert len(sent(session)) == 1
    session.tick(NOW + HELLO_RETRY_NS - 1)
    assert sent(session) == []
    session.tick(NOW + HELLO_RETRY_NS)
    assert len(sent(session)) == 1


def test_hello_is_repeated_later_only_while_something_is_under_way(session):
    session.tick(NOW + 2 * HELLO_PERIOD_NS)
    assert sent(session) == []
    assert session.next_deadline() is None
    added(session, "a")
    sent(session)
    assert session.next_deadline() == NOW + HELLO_SILENCE_NS
    session.tick(NOW + 2 * HELLO_PERIOD_NS)
    assert [type(message) for message in sent(session)] == [Hello]


def hello_times(session: Session, until_ns: int) -> list[int]:
    """Return when a session says Hello, counted from NOW, if each Hello is welcomed at once."""
    times = []
    while (now_ns := session.next_deadline()) is not None and now_ns < NOW + until_ns:
        session.tick(now_ns)
        if any(isinstance(message, Hello) for message in sent(session)):
            times.append(now_ns - NOW)
            session.receive(now_ns, Welcome(PROTOCOL, session.epoch))
    return times


def test_hello_comes_soon_after_silence_begins_and_then_less_and_less_often(session):
    added(session, "a")
    session.receive(NOW, Accepted(1))
    times = hello_times(session, 20 * HELLO_PERIOD_NS)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == HELLO_SILENCE_NS
    assert gaps == sorted(gaps)
    assert gaps[-1] == HELLO_PERIOD_NS
    assert all(later <= 2 * earlier for earlier, later in pairwise(gaps))


def test_hello_is_repeated_although_the_supervisor_talks_all_the_time(session):
    added(session, "a")
    sent(session)
    step = HELLO_SILENCE_NS // 2
    hellos = []
    for now_ns in range(NOW, NOW + 4 * HELLO_PERIOD_NS, step):
        session.receive(now_ns, Results([Outcome("another", SUCCEEDED)]))
        session.tick(now_ns)
        hellos += [now_ns for message in sent(session) if isinstance(message, Hello)]
    assert len(hellos) == 3
    assert hellos[0] == NOW + HELLO_PERIOD_NS


def test_a_refusal_is_kept_with_its_reason_until_the_next_connection():
    session = Session()
    session.connected(NOW)
    session.receive(NOW, Refused(PROTOCOL + 1, "too old"))
    assert "too old" in session.refusal
    assert f"protocol {PROTOCOL + 1}" in session.refusal
    assert not session.ready
    session.disconnected()
    session.connected(NOW)
    assert session.refusal == ""


def test_a_welcome_in_another_protocol_counts_as_a_refusal():
    session = Session()
    session.connected(NOW)
    session.receive(NOW, Welcome(PROTOCOL + 1, "epoch-1"))
    assert session.refusal
    assert not session.ready


# -- submit, acknowledgement, result ----------------------------------------------------------


def test_tasks_added_together_are_one_request_and_one_acknowledgement(session):
    records = added(session, "a", "b")
    (message,) = submits(session)
    assert [spec.id for spec in message.tasks] == ["a", "b"]
    assert not message.resend
    assert session.unacked_tasks == 2
    session.receive(NOW, Accepted(message.request))
    assert all(record._acknowledged and record._ending is None for record in records)
    assert session.unacked_tasks == session.unacked_bytes == 0
    assert session.busy  # results are still awaited


def test_a_result_ends_its_task_and_a_second_one_changes_nothing(session):
    (record,) = added(session, "a")
    session.receive(NOW, Accepted(1))
    first = Outcome("a", SUCCEEDED, b"\x01")
    session.receive(NOW, Results([first]))
    session.receive(NOW, Results([Outcome("a", SUCCEEDED, b"\x02")]))
    session.receive(NOW, Accepted(1))
    session.receive(NOW, Missing(["a"]))
    assert record._ending is first
    assert not session.busy
    assert session.unacked_tasks == 0


def test_a_result_that_overtakes_its_acknowledgement_counts(session):
    (record,) = added(session, "a")
    session.receive(NOW, Results([Outcome("a", SUCCEEDED)]))
    assert record._acknowledged
    session.receive(NOW, Accepted(1, [Rejection("a", "QueueFull", "full")]))
    assert isinstance(record._ending, Outcome)
    assert session.unacked_tasks == session.unacked_bytes == 0


def test_answers_to_what_was_never_asked_are_ignored(session):
    session.receive(NOW, Accepted(99, [Rejection("x", "QueueFull", "full")]))
    session.receive(NOW, Results([Outcome("x", SUCCEEDED)]))
    session.receive(NOW, Missing(["x"]))
    session.receive(NOW, Inspected(99, None))
    assert not session.busy
    assert sent(session) == []


def test_listeners_hear_of_the_acknowledgement_and_of_the_end(session):
    (record,) = added(session, "a")
    heard = []
    record._listen(lambda told: heard.append((told._acknowledged, told._ending is not None)))
    session.receive(NOW, Accepted(1))
    session.receive(NOW, Results([Outcome("a", SUCCEEDED)]))
    session.receive(NOW, Results([Outcome("a", SUCCEEDED)]))
    assert heard == [(True, False), (True, True)]


def test_requests_are_cut_at_the_number_of_tasks(session):
    added(session, *(str(number) for number in range(1, BATCH_TASKS_MAX + 2)))
    assert [len(message.tasks) for message in submits(session)] == [BATCH_TASKS_MAX, 1]


def test_requests_are_cut_at_their_bytes_but_hold_at_least_one_task(session):
    for number in range(3):
        session.add(task(f"small-{number}", b"x" * (BATCH_BYTES_MAX // 2)))
    session.add(task("large", b"x" * TASK_BYTES_MAX))
    session.add(task("last"))
    session.seal(NOW)
    messages = submits(session)
    assert sum(len(message.tasks) for message in messages) == 5
    for message in messages:
        size = sum(len(spec.args) for spec in message.tasks)
        assert size <= BATCH_BYTES_MAX or len(message.tasks) == 1
    for message in messages:
        session.receive(NOW, Accepted(message.request))
    assert session.unacked_tasks == session.unacked_bytes == 0


def test_a_lone_task_is_due_at_once_and_those_behind_it_gather(session):
    session.add(task("first"))
    assert session.due
    session.seal(NOW)
    for number in range(COALESCE_TASKS - 1):
        session.add(task(str(number)))
        assert not session.due
    session.add(task("last"))
    assert session.due
    session.seal(NOW)
    assert not session.gathering


def test_it_is_full_at_the_limit_and_has_room_after_an_acknowledgement(session):
    for number in range(UNACKED_TASKS_MAX):
        assert not session.full
        session.add(task(str(number)))
    assert session.full
    session.seal(NOW)
    session.receive(NOW, Accepted(1))
    assert not session.full


def test_it_is_full_at_the_limit_of_bytes(session, monkeypatch):
    monkeypatch.setattr(session_module, "UNACKED_BYTES_MAX", 10_000)
    session.add(task("a", b"x" * 10_000))
    assert session.full


def test_a_flush_waits_for_what_was_submitted_before_it_only(session):
    added(session, "a")
    last = session.last_request
    added(session, "b")
    assert not session.acknowledged_up_to(last)
    session.receive(NOW, Accepted(1))
    assert session.acknowledged_up_to(last)


# -- another connection, another epoch --------------------------------------------------------


def test_a_new_epoch_sends_again_what_was_not_acknowledged_and_watches_the_rest(session):
    added(session, "done", "stored")
    added(session, "lost")
    first, second = submits(session)
    session.receive(NOW, Accepted(first.request))
    session.receive(NOW, Results([Outcome("done", SUCCEEDED)]))
    session.receive(NOW, Welcome(PROTOCOL, "epoch-2"))
    assert sent(session) == [Submit(second.request, second.tasks, True), Watch(["stored"])]


def test_a_welcome_of_the_same_epoch_on_the_same_connection_changes_nothing(session):
    added(session, "a")
    sent(session)
    session.receive(NOW, Welcome(PROTOCOL, "epoch-1"))
    assert sent(session) == []


def test_a_new_connection_asks_again_even_in_the_same_epoch(session):
    (record,) = added(session, "a")
    submits(session)
    session.disconnected()
    added(session, "b")
    assert sent(session) == []
    session.connected(NOW)
    session.tick(NOW)
    assert [type(message) for message in sent(session)] == [Hello]
    session.receive(NOW, Welcome(PROTOCOL, "epoch-1"))
    again, new = sent(session)
    assert (again.resend, [spec.id for spec in again.tasks]) == (True, ["a"])
    assert (new.resend, [spec.id for spec in new.tasks]) == (False, ["b"])
    # The supervisor had "a" already and may have ended it meanwhile: ask for the outcome.
    session.receive(NOW, Accepted(again.request))
    assert record._acknowledged
    assert sent(session) == [Watch(["a"])]


def test_what_was_queued_for_a_broken_connection_is_dropped(session):
    session.watch(TaskRecord("w", "", None))
    session.disconnected()
    assert sent(session) == []


def test_a_task_that_ended_is_not_sent_again(session):
    added(session, "a", "b")
    added(session, "c")
    sent(session)
    session.receive(NOW, Results([Outcome("a", SUCCEEDED), Outcome("c", SUCCEEDED)]))
    session.receive(NOW, Welcome(PROTOCOL, "epoch-2"))
    (message,) = sent(session)
    assert [spec.id for spec in message.tasks] == ["b"]
    session.receive(NOW, Accepted(message.request))
    assert session.unacked_tasks == session.unacked_bytes == 0


def test_watches_of_many_tasks_are_cut_at_the_limit(session):
    for number in range(BATCH_TASKS_MAX + 1):
        session.watch(TaskRecord(str(number), "", None))
    sent(session)
    session.receive(NOW, Welcome(PROTOCOL, "epoch-2"))
    assert [len(message.ids) for message in sent(session)] == [BATCH_TASKS_MAX, 1]


def test_an_answer_that_never_comes_is_asked_for_again(session):
    added(session, "stored")
    session.receive(NOW, Accepted(1))
    added(session, "lost")
    sent(session)
    session.tick(NOW + REFRESH_NS)
    messages = [message for message in sent(session) if not isinstance(message, Hello)]
    assert messages == [
        Submit(2, [TaskSpec("lost", "pool.method", b"\x80")], True),
        Watch(["stored"]),
    ]
    session.tick(NOW + REFRESH_NS + 1)
    assert sent(session) == []


# -- rejections -------------------------------------------------------------------------------


def test_a_rejection_ends_its_task_alone(session):
    refused, taken = added(session, "a", "b")
    rejection = Rejection("a", "QueueFull", "10000 of 10000", 2_000_000_000)
    session.receive(NOW, Accepted(1, [rejection]))
    assert refused._ending == rejection
    assert not refused._acknowledged
    assert taken._acknowledged
    error = rejection_error(rejection, "pool.method")
    assert isinstance(error, QueueFull)
    assert error.retry_after == 2.0
    assert "10000 of 10000" in str(error)


def test_rejections_nobody_asked_about_become_one_error_with_their_number(session):
    first, second, third = added(session, "a", "b", "c")
    rejections = [Rejection(record.id, "QueueFull", "full") for record in (first, second, third)]
    session.receive(NOW, Accepted(1, rejections))
    session.report(second)
    error = unreported_error(session)
    assert isinstance(error, QueueFull)
    assert "2 tasks" in str(error)
    assert unreported_error(session) is None


def test_only_so_many_rejections_are_kept_but_all_are_counted(session):
    ids = [str(number) for number in range(UNREPORTED_MAX + 500)]
    added(session, *ids)
    for message in submits(session):
        rejected = [Rejection(spec.id, "UnknownTask", "no") for spec in message.tasks]
        session.receive(NOW, Accepted(message.request, rejected))
    assert len(session.unreported) == UNREPORTED_MAX
    assert str(len(ids)) in str(unreported_error(session))


def test_a_patient_task_is_sent_again_when_the_full_queue_says(session):
    (record,) = added(session, "a", patient=True)
    sent(session)
    session.receive(NOW, Accepted(1, [Rejection("a", "QueueFull", "full", 7_000)]))
    assert record._ending is None
    assert session.unacked_tasks == 1
    assert not session.acknowledged_up_to(1)
    assert session.next_deadline() == NOW + 7_000
    session.tick(NOW + 6_999)
    assert not session.gathering
    session.tick(NOW + 7_000)
    session.seal(NOW)
    (message,) = submits(session)
    assert [spec.id for spec in message.tasks] == ["a"]
    assert message.request == 2
    session.receive(NOW, Accepted(2))
    assert record._acknowledged
    assert session.unacked_tasks == session.unacked_bytes == 0


def test_a_patient_task_has_a_pause_of_its_own_when_the_queue_says_nothing(session):
    added(session, "a", patient=True)
    session.receive(NOW, Accepted(1, [Rejection("a", "QueueFull", "full")]))
    assert session.next_deadline() == NOW + FULL_RETRY_NS


def test_patience_is_for_a_full_queue_only(session):
    (record,) = added(session, "a", patient=True)
    session.receive(NOW, Accepted(1, [Rejection("a", "ShuttingDown", "stopping", 1)]))
    assert isinstance(record._ending, Rejection)


def test_cancelling_a_task_that_waits_for_room_ends_it_here(session):
    (record,) = added(session, "a", patient=True)
    session.receive(NOW, Accepted(1, [Rejection("a", "QueueFull", "full")]))
    sent(session)
    session.cancel(NOW, "a")
    assert record._ending == Outcome("a", CANCELLED)
    session.tick(NOW + FULL_RETRY_NS)
    session.seal(NOW)
    assert sent(session) == []
    assert session.unacked_tasks == session.unacked_bytes == 0


def test_a_patient_task_that_was_cancelled_while_it_was_refused_is_not_sent_again(session):
    (record,) = added(session, "a", patient=True)
    session.cancel(NOW, "a")
    sent(session)
    session.receive(NOW, Accepted(1, [Rejection("a", "QueueFull", "full")]))
    assert record._ending == Outcome("a", CANCELLED)
    session.tick(NOW + FULL_RETRY_NS)
    session.seal(NOW)
    assert sent(session) == []


# -- watch, inspect, cancel -------------------------------------------------------------------


def test_a_watched_task_that_is_missing_ends_with_task_missing(session):
    record = TaskRecord("w", "", None)
    session.watch(record)
    assert sent(session) == [Watch(["w"])]
    session.receive(NOW, Missing(["w"]))
    assert isinstance(record._ending, Rejection)
    assert record._ending.code == TASK_MISSING
    assert isinstance(rejection_error(record._ending, ""), TaskMissing)


def test_a_task_on_its_way_cannot_be_missing(session):
    (record,) = added(session, "a")
    session.receive(NOW, Missing(["a"]))
    assert record._ending is None


def test_an_inspection_gets_its_answer_and_survives_a_new_epoch(session):
    inspection = session.inspect(NOW, "a")
    assert sent(session) == [Inspect(1, "a")]
    session.receive(NOW, Welcome(PROTOCOL, "epoch-2"))
    assert sent(session) == [Inspect(1, "a")]
    view = TaskView("a", "pool.method", "queued", "normal")
    session.receive(NOW, Inspected(1, view))
    assert inspection.answered
    assert inspection.view == view
    assert not session.busy


def test_an_inspection_nobody_waits_for_is_forgotten(session):
    session.drop(session.inspect(NOW, "a"))
    assert not session.busy


def test_a_cancel_goes_behind_its_task_and_is_repeated_in_a_new_epoch(session):
    session.add(task("a"))
    session.cancel(NOW, "a")
    assert [type(message) for message in sent(session)] == [Submit, Cancel]
    session.receive(NOW, Accepted(1))
    session.receive(NOW, Welcome(PROTOCOL, "epoch-2"))
    assert sent(session) == [Watch(["a"]), Cancel(["a"])]
    session.receive(NOW, Results([Outcome("a", CANCELLED)]))
    session.receive(NOW, Welcome(PROTOCOL, "epoch-3"))
    assert sent(session) == []


# -- task specs and ids -----------------------------------------------------------------------


def test_a_spec_carries_its_options():
    spec = make_spec(
        "p.m",
        {"url": "u"},
        priority="critical",
        target="site",
        timeout=1.5,
        max_retries=0,
        delay=2,
        expires=60,
    )
    assert msgspec.msgpack.decode(spec.args) == {"url": "u"}
    assert (spec.name, spec.priority, spec.target) == ("p.m", CRITICAL, "site")
    assert (spec.timeout_ns, spec.delay_ns, spec.expires_ns) == (
        1_500_000_000,
        2 * 10**9,
        60 * 10**9,
    )
    assert spec.max_retries == 0
    assert make_spec("p.m", priority=0).priority == CRITICAL


def test_a_spec_takes_a_name_from_an_enumeration():
    class Names(StrEnum):
        FETCH = "parser.fetch"

    spec = make_spec(Names.FETCH)
    assert type(spec.name) is str
    assert spec.name == "parser.fetch"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"page": object()}, ["args['page']", "object"]),
        ({"pages": [1, {"deep": (2, {3j})}]}, ["args['pages'][1]['deep'][1]", "set"]),
        ({"number": 2**70}, ["args['number']", "int"]),
        ({"text": "\ud800"}, ["args['text']", "str"]),
        ({7: "seven"}, ["7", "names of type str"]),
        ([1], ["mapping", "list"]),
        ({"data": b"x" * TASK_BYTES_MAX}, [str(TASK_BYTES_MAX), "p.m"]),
    ],
)
def test_arguments_that_cannot_be_sent_are_named(args, words):
    with pytest.raises(InvalidTask) as caught:
        make_spec("p.m", args)
    for word in words:
        assert word in str(caught.value)


def test_arguments_in_a_circle_are_invalid():
    circle: dict[str, object] = {}
    circle["self"] = circle
    with pytest.raises(InvalidTask, match="circle"):
        make_spec("p.m", circle)


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "urgent"},
        {"priority": 4},
        {"priority": []},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": "30"},
        {"timeout": True},
        {"delay": -1},
        {"expires": 1e12},
        {"max_retries": -1},
        {"max_retries": 1.0},
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_a_value_error_that_names_it(options):
    (name,) = options
    with pytest.raises(ValueError, match=name) as caught:
        make_spec("p.m", **options)
    if name == "priority":
        assert "'critical', 'high', 'normal', 'low'" in str(caught.value)
    if options == {"expires": 1e12}:
        assert f"at most {SECONDS_MAX}" in str(caught.value)


@pytest.mark.parametrize("name", ["", "n" * 201, "p.\udcff", 7, ["p.m"]])
def test_a_name_that_cannot_be_one_is_invalid(name):
    with pytest.raises(InvalidTask, match="task name"):
        make_spec(name)


def test_ids_are_unique_and_grow():
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)
    assert all(len(task_id) == 28 for task_id in ids)


def test_ids_of_a_fork_differ():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, new_id().encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        theirs = pipe.read()
    assert len(theirs) == 28
    assert theirs[11:21] != new_id()[11:21]
