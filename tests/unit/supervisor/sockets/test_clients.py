"""Messages of clients on tasks.sock, as events for the core, and the answers to clients."""

import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire.codec import decode_server, encode
from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import (
    PROTOCOL,
    Accepted,
    Cancel,
    Fault,
    Follow,
    Hello,
    History,
    Invalidate,
    Missing,
    Outcome,
    ProgressNote,
    Rejection,
    Results,
    Submit,
    TaskSpec,
    Watch,
    Welcome,
)
from musterd.ipc.wire.resolving import Resolve, Resolved
from musterd.ipc.wire.schedule_messages import (
    UNKNOWN_SCHEDULE,
    DeleteSchedules,
    PauseSchedule,
    PutSchedules,
    RunSchedule,
    ScheduleAnswer,
    SchedulePut,
    Schedules,
    ScheduleView,
    ShowSchedules,
)
from musterd.ipc.wire.zmtp import Connection
from musterd.supervisor.core.model import events, schedule_events
from musterd.supervisor.core.model.watching import HISTORY_BYTES_MAX
from musterd.supervisor.core.tasks import client_limits
from musterd.supervisor.sockets import clients
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.peers import SchedulesWanted
from musterd.supervisor.sockets.schedule_requests import PutWanted
from support.waiting import wait_for

SECONDS = 20.0


class Stage:
    """A port, and clients on real sockets."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tasks.sock"
        self.port = ClientPort(self.path, "epoch", None)
        self.clients: list[Connection] = []
        self.events: list[Any] = []

    def turn(self) -> None:
        select.select([self.port], [], [], 0.01)
        self.events += self.port.receive(0)
        self.events += self.port.settle()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> object:
            value = condition()
            if not value:
                self.turn()
            return value

        wait_for(what, met)

    def connect(self) -> Connection:
        client = Connection(str(self.path))
        self.clients.append(client)
        self.until(lambda: client.receive() or client.ready, "the handshake")
        return client

    def greeted(self) -> Connection:
        client = self.connect()
        assert isinstance(self.ask(client, Hello(PROTOCOL)), Welcome)
        return client

    def say(self, client: Connection, message: Any) -> None:
        client.put(message if isinstance(message, bytes) else encode(message))
        client.flush()

    def hear(self, client: Connection) -> Any:
        heard: list[Any] = []
        self.until(lambda: heard or heard.extend(client.receive()), "an answer")
        return decode_server(heard[0])

    def ask(self, client: Connection, message: Any) -> Any:
        self.say(client, message)
        return self.hear(client)

    def event_of(self, client: Connection, message: Any) -> Any:
        self.say(client, message)
        self.until(lambda: self.events, "the event")
        return self.events.pop()

    def is_over(self, client: Connection) -> bool:
        try:
            client.receive()
        except ConnectionResetError:
            return True
        return False

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.port.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def task(number: int, size: int = 0) -> TaskSpec:
    return TaskSpec(str(number), "jobs.echo", bytes(size))


def test_an_invalidation_becomes_its_event(stage: Stage) -> None:
    found = stage.event_of(stage.greeted(), Invalidate("promo:", True))
    assert found == events.InvalidateRequested("promo:", True)


def test_a_request_is_answered_with_the_number_that_its_client_gave_it(stage: Stage) -> None:
    one, two = stage.greeted(), stage.greeted()
    tokens = [
        stage.event_of(each, Submit(7, [task(n)])).request for n, each in enumerate((one, two))
    ]
    assert len(set(tokens)) == 2, "two clients may use the same numbers"
    for token in tokens:
        stage.port.acknowledge(token, [])
    assert stage.hear(one) == stage.hear(two) == Accepted(7)
    stage.port.acknowledge(tokens[0], [])  # a second answer does nothing
    assert stage.port.pending == 0


def test_a_message_that_can_be_read_and_means_nothing_is_answered_and_stops_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer client may send one, or only half of the daemon may know a new type of message."""
    client = stage.greeted()
    with monkeypatch.context() as patch:
        patch.setattr(clients, "decode_client", lambda _: ProgressNote("a", 0.5))
        assert "a ProgressNote, which means nothing here" in stage.ask(client, Cancel(["a"])).reason
    assert stage.port.malformed == 1
    assert stage.event_of(client, Cancel(["a"])).ids == ["a"]
    assert stage.port.malformed == 1


def test_the_next_connection_of_a_client_ends_the_one_before_unread(stage: Stage) -> None:
    """Messages on the old connection were sent again, and must not be taken for new."""
    first, next_, other, nameless = (stage.connect() for _ in range(4))
    names = ((first, "mine"), (other, "another's"), (nameless, ""))
    for client, name in names:
        assert isinstance(stage.ask(client, Hello(PROTOCOL, "", name)), Welcome)
    assert isinstance(stage.ask(first, Hello(PROTOCOL, "", "mine")), Welcome), "as often as it says"
    stage.say(next_, Hello(PROTOCOL, "", "mine"))
    stage.say(next_, Submit(1, [task(1)], resend=True))
    stage.until(lambda: stage.events, "the task is sent again")
    assert stage.events.pop(0).tasks == [task(1)]
    with suppress(ConnectionError):  # the first connection may be over by now
        stage.say(first, Submit(1, [task(1)]))
    stage.until(lambda: stage.is_over(first), "the first connection is over")
    assert not [event for event in stage.events if isinstance(event, events.TasksSubmitted)]
    assert stage.port.malformed == 0, "there is nothing wrong with it"
    assert stage.event_of(other, Cancel(["a"])).ids == ["a"]
    assert stage.event_of(nameless, Cancel(["b"])).ids == ["b"]


def test_one_connection_speaks_for_one_client(stage: Stage) -> None:
    client = stage.connect()
    for number in range(100):
        stage.ask(client, Hello(PROTOCOL, "", f"session {number}"))
    assert list(stage.port._sessions) == ["session 0"]
    client.close()
    stage.until(lambda: not stage.port._sessions, "it is forgotten")


def test_a_malformed_message_is_answered_after_the_hello_and_only_counted_before(
    stage: Stage,
) -> None:
    client = stage.greeted()
    answer = stage.ask(client, b"\xc1")
    assert isinstance(answer, Fault)
    assert "malformed message of 1 bytes" in answer.reason
    stranger = stage.connect()
    stage.say(stranger, b"\xc1")
    stage.until(lambda: stage.port.malformed == 2, "it is counted")
    assert isinstance(stage.ask(stranger, Hello(PROTOCOL)), Welcome), "the first thing it hears"


def test_one_that_never_says_anything_sensible_is_told_and_put_out(stage: Stage) -> None:
    client = stage.greeted()
    for _ in range(2 * client_limits.FAULTS_MAX):
        client.put(b"\xc1")
    client.flush()
    heard: list[Any] = []

    def over() -> bool:
        try:
            heard.extend(client.receive())
        except ConnectionResetError:
            return True
        return False

    stage.until(over, "the end")
    assert stage.port.malformed == client_limits.FAULTS_MAX + 1
    assert "the connection ends: 100 malformed messages" in decode_server(heard[-1]).reason


def test_a_connection_that_ends_is_told_if_the_core_may_know_it(stage: Stage) -> None:
    one, two, three = stage.greeted(), stage.greeted(), stage.greeted()
    watcher = stage.event_of(two, Watch(["a"])).peer
    submitter = stage.event_of(three, Submit(1, [task(1)])).peer
    for client in (one, two, three):
        client.close()
    stage.until(lambda: not stage.port.router.held and len(stage.port.router) == 0, "all are gone")
    stage.turn()
    assert {each.peer for each in stage.events} == {watcher, submitter}
    assert all(isinstance(each, events.PeerLost) for each in stage.events)


def test_requests_under_way_are_charged_and_one_with_too_many_is_not_read(stage: Stage) -> None:
    client = stage.greeted()
    size = 1024 * 1024
    sent = 2 * client_limits.PENDING_BYTES_MAX // size
    for number in range(sent):
        client.put(encode(Submit(number, [task(number, size)])))

    def push() -> bool:
        client.flush()
        return len(stage.port._hushed) == 1

    stage.until(push, "it is not read")
    assert stage.port.pending > client_limits.PENDING_BYTES_MAX
    assert stage.port.held < client_limits.PENDING_BYTES_MAX + 3 * size
    while stage.events:
        stage.port.acknowledge(stage.events.pop(0).request, [])
        stage.turn()
    answers: list[Any] = []

    def answered() -> bool:
        client.flush()
        answers.extend(client.receive())
        while stage.events:
            stage.port.acknowledge(stage.events.pop(0).request, [])
        return len(answers) == sent

    stage.until(answered, "all are answered in the end")
    assert stage.port.held == 0


def test_a_client_that_follows_again_and_again_is_answered_once_at_a_time(stage: Stage) -> None:
    client = stage.greeted()
    follows = stage.event_of(client, Follow())
    for _ in range(10):
        stage.say(client, Follow())
    assert isinstance(stage.event_of(client, Watch(["a"])), events.TasksWatched)
    assert not stage.events
    stage.port.newest_changes(follows.peer, [])
    assert isinstance(stage.event_of(client, Follow()), events.ChangesFollowed)


def test_results_that_a_client_does_not_read_are_owed_by_their_ids(stage: Stage) -> None:
    client = stage.greeted()
    name = stage.event_of(client, Watch(["r0"])).peer
    size, count = 100_000, 100
    for number in range(count):
        stage.port.deliver(name, [Outcome(f"r{number}", "succeeded", bytes(size))])
        assert stage.port.router.held < client_limits.OUTBOX_BYTES_MAX + 2 * size
    (peer,) = stage.port._peers.values()
    assert 0 < len(peer.owed) < count
    assert not stage.port.ready, "nothing is looked up for one that does not read"
    heard: list[Any] = []

    def told() -> bool:
        heard.extend(client.receive())
        return bool(stage.port.ready)

    stage.until(told, "it reads")
    assert list(stage.port.ready) == [peer]
    first = peer.owed.first()
    assert isinstance(first, list)
    assert first[0] == f"r{count - len(peer.owed)}", "where it stopped"


def test_one_who_does_not_take_what_it_is_owed_is_put_out_in_the_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "OWED_MAX", 10)
    client = stage.greeted()
    name = stage.event_of(client, Watch(["r0"])).peer
    stage.port.look_up(name, [str(number) for number in range(10)])
    (peer,) = stage.port.ready
    stage.port._drained(peer.number)  # the peer has taken something else
    assert list(stage.port.ready) == [peer], "once, however often it reads"
    stage.port.look_up(name, ["one more"])
    stage.until(lambda: stage.is_over(client), "the end")
    assert stage.port.pending == 0
    assert not stage.port.ready


def test_who_takes_less_than_it_is_kept_is_counted_as_slow(stage: Stage) -> None:
    client = stage.greeted()
    (peer,) = stage.port._peers.values()
    for _ in range(4):
        stage.port.results(peer, [Outcome("1", "succeeded", bytes(client_limits.MIB))])
    stage.port.settle()
    stage.port.tidy_up(0)
    for look in (1, 2, 3):
        moved = stage.port.router.moved(peer.number)

        def takes_some(moved: int = moved) -> bool:
            client.receive(64 * 1024)
            return stage.port.router.moved(peer.number) > moved

        stage.until(takes_some, "it takes some")
        stage.port.tidy_up(0)
        assert (peer.looks, peer.slow) == (0, look)

    def takes_all() -> bool:
        client.receive()
        return not stage.port.router.unsent(peer.number)

    stage.until(takes_all, "it takes all")
    stage.port.tidy_up(0)
    assert peer.slow == 0


# -- a second socket ----------------------------------------------------------------------------


def test_only_the_daemons_user_may_use_the_second_socket(stage: Stage, tmp_path: Path) -> None:
    apart = tmp_path / "local.sock"
    stage.port.serve_apart(apart)
    assert apart.stat().st_mode & 0o777 == 0o600


def test_the_first_socket_is_served_when_told_to(stage: Stage, tmp_path: Path) -> None:
    stage.port.serve_apart(tmp_path / "local.sock")
    stage.path = tmp_path / "local.sock"
    sidecar = stage.greeted()
    stage.path = tmp_path / "tasks.sock"
    early = Connection(str(stage.path))
    for _ in range(5):
        stage.turn()
    assert not early.receive()
    assert not early.ready, "it was let in"
    stage.port.serve(True)
    stage.until(lambda: early.receive() or early.ready, "the handshake")
    stage.clients.append(early)
    assert isinstance(stage.ask(early, Hello(PROTOCOL)), Welcome)
    stage.event_of(early, Watch(["a"]))
    stage.port.serve(False)
    stage.until(lambda: stage.is_over(early), "the end of its connection")
    stage.until(lambda: stage.events, "the news of it")
    assert isinstance(stage.events.pop(), events.PeerLost)
    assert not stage.is_over(sidecar)


def test_what_is_not_here_may_be_elsewhere(stage: Stage, tmp_path: Path) -> None:
    """Clients of the first socket are not told that a task is missing; the sidecar is."""
    stage.port.serve_apart(tmp_path / "local.sock")
    stage.port.serve(True)
    client = stage.greeted()
    stage.path = tmp_path / "local.sock"
    sidecar = stage.greeted()
    names = [stage.event_of(each, Watch(["a"])).peer for each in (client, sidecar)]
    peers = [stage.port._named[name] for name in names]
    for name, peer in zip(names, peers, strict=True):
        stage.port.missing(name, ["a"])
        stage.port.inspected(peer, 1, None)
        stage.port.deliver(name, [Outcome("b", "succeeded")])
    assert isinstance(stage.hear(client), Results)
    assert isinstance(stage.hear(sidecar), Missing)


def test_a_schedule_that_is_not_here_may_be_elsewhere(stage: Stage, tmp_path: Path) -> None:
    """Clients of the first socket hear of schedules that are here; the sidecar of none, too."""
    stage.port.serve_apart(tmp_path / "local.sock")
    stage.port.serve(True)
    client = stage.greeted()
    stage.path = tmp_path / "local.sock"
    sidecar = stage.greeted()
    for each in (client, sidecar):
        for shown in (ShowSchedules(1, "kites"), ShowSchedules(1)):
            stage.port.show_schedules(stage.event_of(each, shown), [], False)
        stage.port.recall(stage.event_of(each, History(2, "kites")), [], "none", unknown=True)
        unknown = stage.event_of(each, PauseSchedule(3, "kites", True))
        stage.port.acknowledge(unknown.request, [Rejection("kites", UNKNOWN_SCHEDULE, "none")])
        refused = stage.event_of(each, PutSchedules(4, [SchedulePut("kites", b"\x80")]))
        stage.port.acknowledge(refused.request, [Rejection("kites", "InvalidSchedule", "no")])
    assert stage.hear(client) == ScheduleAnswer(4, [Rejection("kites", "InvalidSchedule", "no")])
    told: list[Any] = []
    stage.until(lambda: told.extend(sidecar.receive()) or len(told) == 5, "every answer")
    kinds = [type(decode_server(each)) for each in told]
    assert kinds == [Schedules, Schedules, Entries, ScheduleAnswer, ScheduleAnswer]
    assert stage.port.pending == 0
    found = stage.event_of(client, ShowSchedules(5, "kites"))
    views = [ScheduleView("kites", "active", "shop.check", "every 5m")]
    stage.port.show_schedules(found, views, False)
    assert stage.hear(client) == Schedules(5, views, False)


def test_a_handler_that_is_not_here_may_be_elsewhere(stage: Stage, tmp_path: Path) -> None:
    stage.port.serve_apart(tmp_path / "local.sock")
    stage.port.serve(True)
    client = stage.greeted()
    stage.path = tmp_path / "local.sock"
    sidecar = stage.greeted()
    for each in (client, sidecar):
        stage.port.resolve(stage.event_of(each, Resolve(1, "m:f")), Resolved(0))
    assert stage.hear(sidecar) == Resolved(1)
    assert stage.port.pending == 0
    stage.port.resolve(stage.event_of(client, Resolve(2, "m:f")), Resolved(0, ["p.f"]))
    assert stage.hear(client) == Resolved(2, ["p.f"])


def test_what_a_client_asks_about_schedules_is_charged_and_answered_by_its_number(
    stage: Stage,
) -> None:
    client, port = stage.greeted(), stage.port
    put = stage.event_of(client, PutSchedules(5, [SchedulePut("kites", b"\x80")]))
    assert isinstance(put, PutWanted)
    assert put.schedules == [SchedulePut("kites", b"\x80")]
    assert port.pending > 0
    refused = Rejection("kites", "InvalidSchedule", "no task")
    port.acknowledge(put.request, [refused])
    assert stage.hear(client) == ScheduleAnswer(5, [refused])
    assert port.pending == 0
    for message, event in (
        (DeleteSchedules(6, ["a"]), schedule_events.ScheduleDeleteRequested(["a"], put.peer, 2)),
        (
            PauseSchedule(7, "a", True),
            schedule_events.SchedulePauseRequested("a", True, put.peer, 3),
        ),
        (
            RunSchedule(8, "a", "@a.1fm", True),
            schedule_events.ScheduleRunRequested("a", put.peer, 4, "@a.1fm", True),
        ),
    ):
        assert stage.event_of(client, message) == event
    wanted = stage.event_of(client, ShowSchedules(9, after="a"))
    assert isinstance(wanted, SchedulesWanted)
    views = [ScheduleView("b", "active", "shop.check", "every 5m")]
    port.show_schedules(wanted, views, True)
    assert stage.hear(client) == Schedules(9, views, True)


@pytest.mark.parametrize("id_", ["0192f3", "@b.1fm", "@a.1f", "@a.1f-1m", "@a.xm"])
def test_a_run_has_an_id_of_its_schedule(stage: Stage, id_: str) -> None:
    assert isinstance(stage.ask(stage.greeted(), RunSchedule(1, "a", id_)), Fault)


def test_a_question_that_others_answer_later_is_held_until_then(stage: Stage) -> None:
    client = stage.greeted()
    wanted = stage.event_of(client, ShowSchedules(9, after="a"))
    token = stage.port.hold(wanted.peer, wanted.message.request)
    assert stage.port.holds(token)
    assert stage.port.holder(token) == wanted.peer.name
    assert stage.port.pending > 0
    views = [ScheduleView("b", "active", "shop.check", "every 5m")]
    stage.port.show_later(token, views, True)
    assert stage.hear(client) == Schedules(9, views, True)
    assert (stage.port.pending, stage.port.holds(token)) == (0, False)
    stage.port.show_later(token, [], False)  # answered already


def test_a_question_for_history_is_charged_until_it_is_answered(stage: Stage) -> None:
    client = stage.greeted()
    wanted = stage.event_of(client, History(7, "kites", 5))
    assert wanted.question == History(7, "kites", 5)
    assert stage.port.pending >= HISTORY_BYTES_MAX
    entry = HistoryEntry(1, 2, "@kites.1", "d", b"\x01")
    stage.port.recall(wanted, [entry])
    stage.port.recall(wanted, [])  # answered already
    assert stage.hear(client) == Entries(7, [entry])
    assert stage.port.pending == 0


def test_a_question_for_the_tasks_of_a_function_is_charged_until_it_is_answered(
    stage: Stage,
) -> None:
    client = stage.greeted()
    wanted = stage.event_of(client, Resolve(7, "m:f"))
    assert wanted.place == "m:f"
    assert stage.port.pending > 0
    stage.port.resolve(wanted, Resolved(0, ["p.f"]))
    stage.port.resolve(wanted, Resolved(0))  # answered already
    assert stage.hear(client) == Resolved(7, ["p.f"])
    assert stage.port.pending == 0
