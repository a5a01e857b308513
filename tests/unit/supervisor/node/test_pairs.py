"""Connections to local.sock: made when needed, read as fast as clients read, ended with them."""

import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from musterd.ipc.wire.codec import decode_server, encode
from musterd.ipc.wire.history import Entries
from musterd.ipc.wire.messages import (
    PROTOCOL,
    RESULT_BYTES_MAX,
    Accepted,
    Advise,
    Hello,
    History,
    Inspect,
    Invalidate,
    Outcome,
    Results,
    Submit,
    TaskSpec,
    TaskView,
    Watch,
    Welcome,
)
from musterd.ipc.wire.zmtp import Connection
from musterd.supervisor.cluster.sidecar_events import (
    AdviceAsked,
    Invalidated,
    LocalLost,
    LocalSaid,
    ViewAsked,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.tasks import client_limits
from musterd.supervisor.node import pairs
from musterd.supervisor.node.pairs import Pairs
from musterd.supervisor.node.relay_port import RelayPort
from musterd.supervisor.sockets.clients import ClientPort
from support.waiting import wait_for

LARGE = 2 * 1024 * 1024
OUTCOME = Outcome("a", "succeeded", b"\xc0")
E = TypeVar("E")


class Stage:
    """A client, the sidecar's port with its pairs, and the supervisor's port behind them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tasks.sock"
        self.supervisor = ClientPort(folder / "local.sock", "there", None)
        self.port = RelayPort(self.path, "here", None)
        self.said: list[Any] = []
        self.pairs = Pairs(str(folder / "local.sock"), self.port, self.said.append)
        self.events: list[Any] = []  # of clients
        self.there: list[Any] = []  # of pairs, at the supervisor
        self.clients: list[Connection] = []

    def turn(self) -> None:
        select.select([self.port, self.supervisor, self.pairs], [], [], 0.01)
        self.events += self.port.receive(0)
        self.events += self.port.settle()
        self.pairs.receive()
        self.pairs.settle()
        self.there += self.supervisor.receive(0)
        self.there += self.supervisor.settle()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> object:
            value = condition()
            if not value:
                self.turn()
            return value

        wait_for(what, met)

    def connect(self, session: str = "") -> tuple[Connection, bytes]:
        """Return a client that has said something, and its name."""
        client = Connection(str(self.path))
        self.clients.append(client)
        self.until(lambda: client.receive() or client.ready, "the handshake")
        client.put(encode(Hello(PROTOCOL, "", session)))
        client.put(encode(Watch(["a"])))
        client.flush()
        self.until(lambda: _of(events.TasksWatched, self.events), "the event")
        heard: list[Any] = []
        self.until(lambda: heard or heard.extend(client.receive()), "the welcome")
        assert isinstance(decode_server(heard[0]), Welcome)
        [watched] = _of(events.TasksWatched, self.events)
        self.events.clear()
        return client, watched.peer

    def submit(self, name: bytes, id_: str = "a") -> events.TasksSubmitted:
        """Have a client's task sent to the supervisor; return what comes in there."""
        self.pairs.ask(name, Submit(1, [TaskSpec(id_, "own.x", b"")]))
        self.until(lambda: _of(events.TasksSubmitted, self.there), "the submit")
        [event] = _of(events.TasksSubmitted, self.there)
        self.there.clear()
        return event

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.pairs.close()
        self.port.close()
        self.supervisor.close()


def _of(kind: type[E], found: list[Any]) -> list[E]:
    return [each for each in found if isinstance(each, kind)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_a_pair_is_made_for_the_first_question_and_ends_with_its_client(stage: Stage) -> None:
    _, name = stage.connect()
    assert len(stage.pairs) == 0
    event = stage.submit(name)
    assert [spec.id for spec in event.tasks] == ["a"]
    assert len(stage.pairs) == len(stage.supervisor.router) == 1
    stage.submit(name, "b")
    assert len(stage.supervisor.router) == 1
    stage.pairs.end(name)
    stage.until(lambda: not len(stage.supervisor.router), "the end of the pair")
    assert isinstance(stage.there.pop(), events.PeerLost)


def test_answers_come_with_the_name_of_the_client_and_as_they_were(stage: Stage) -> None:
    names = [stage.connect()[1] for _ in range(2)]
    for name in names:
        event = stage.submit(name)
        stage.supervisor.acknowledge(event.request, [])
        stage.supervisor.deliver(event.peer, [OUTCOME])
        frame = encode(Results([OUTCOME]))
        wanted = [LocalSaid(name, Accepted(1), encode(Accepted(1)))]
        wanted += [LocalSaid(name, Results([OUTCOME]), frame)]
        stage.until(lambda: len(stage.said) == 3, "the answers")  # used at once
        assert isinstance(stage.said.pop(0).message, Welcome)
        assert stage.said == wanted
        stage.said.clear()


def test_a_client_that_comes_again_ends_its_pair_before(stage: Stage) -> None:
    _, first = stage.connect("the session")
    stage.submit(first)
    _, second = stage.connect("the session")
    stage.submit(second)
    stage.until(lambda: any(isinstance(each, LocalLost) for each in stage.said), "the end")
    [lost] = [each for each in stage.said if isinstance(each, LocalLost)]
    assert lost.peer == first


def test_a_supervisor_that_is_not_there_is_told(stage: Stage) -> None:
    _, name = stage.connect()
    stage.supervisor.router.close()
    stage.pairs.ask(name, Advise(1))
    stage.pairs.settle()
    [lost] = stage.said
    assert isinstance(lost, LocalLost)
    assert lost.peer == name
    stage.supervisor = ClientPort(stage.path.parent / "local.sock", "again", None)


def test_without_descriptors_no_pair_is_made(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    _, name = stage.connect()
    monkeypatch.setattr(pairs.descriptors, "enough", lambda: False)
    stage.pairs.ask(name, Advise(1))
    stage.pairs.settle()
    assert isinstance(stage.said.pop(), LocalLost)
    assert len(stage.pairs) == 0


def test_a_client_that_does_not_read_is_not_read_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_limits, "OUTBOX_BYTES_MAX", 200_000)
    client, name = stage.connect()
    event = stage.submit(name)

    def pass_on() -> None:
        for each in stage.said:
            stage.port.pass_on(name, bytes(each.frame))
        stage.said.clear()

    number = 0
    while not stage.supervisor.router.unsent(int(event.peer)):  # the kernel takes some
        stage.supervisor.deliver(event.peer, [Outcome(f"{number}", "succeeded", bytes(50_000))])
        number += 1
        assert number < 500, "it is read without end"
        stage.turn()
        pass_on()
    assert stage.port.router.unsent(int(name)) < 1_000_000
    heard: list[str] = []

    def read() -> bool:
        for frame in client.receive():
            assert frame is not None
            message = decode_server(frame)
            if isinstance(message, Results):
                heard.extend(each.id for each in message.outcomes)
        pass_on()
        return len(heard) >= number

    stage.until(read, "everything")
    assert heard == [f"{each}" for each in range(number)]
    assert stage.port.pending == 0


def test_a_large_answer_waits_for_room_and_is_charged(stage: Stage) -> None:
    assert LARGE < RESULT_BYTES_MAX
    _, name = stage.connect()
    event = stage.submit(name)
    stage.until(lambda: stage.said, "the welcome")
    stage.said.clear()
    stage.connect()
    stage.port.charge(stage.port._peers[2], client_limits.ALL_BYTES_MAX)
    stage.supervisor.deliver(event.peer, [Outcome("a", "succeeded", bytes(LARGE))])
    for _ in range(20):
        stage.turn()
    assert not stage.said
    assert stage.pairs.awaited_bytes > LARGE // 2
    stage.port.charge(stage.port._peers[2], -client_limits.ALL_BYTES_MAX)
    stage.until(lambda: stage.said, "the answer")
    assert stage.pairs.awaited_bytes == 0
    assert stage.port.pending == 0


def test_questions_of_clients_are_events_and_charged_until_they_are_answered(stage: Stage) -> None:
    client, name = stage.connect()
    for question in (Inspect(5, "t"), Advise(6), Invalidate("k", True)):
        client.put(encode(question))
    client.flush()
    stage.until(lambda: len(stage.events) == 3, "the questions")
    view, advice, forget = stage.events
    assert (type(view), view.peer, view.id) == (ViewAsked, name, "t")
    assert (type(advice), advice.peer) == (AdviceAsked, name)
    assert forget == Invalidated(name, "k", True)
    assert stage.port.pending > 0
    shown = TaskView("t", "own.x", "queued", "normal")
    stage.port.answer_view(view.request, "t", shown)
    stage.port.answer_advice(advice.request, {"own": 2})
    assert stage.port.pending == 0
    heard: list[Any] = []
    stage.until(lambda: len(heard) == 2 or heard.extend(client.receive()), "the answers")
    found = [decode_server(frame) for frame in heard]
    assert [each.request for each in found] == [5, 6]


def test_a_view_that_nobody_here_has_is_looked_up(stage: Stage) -> None:
    client, name = stage.connect()
    client.put(encode(Inspect(5, "t")))
    client.flush()
    stage.until(lambda: stage.events, "the question")
    stage.port.answer_view(stage.events[0].request, "t", None)
    peer = stage.port.peer_of(name)
    assert peer is not None
    assert list(stage.port.ready) == [peer]
    assert peer.owed.first().request == 5  # type: ignore[union-attr]


def test_what_a_client_asks_about_results_is_a_question_for_others(stage: Stage) -> None:
    client, name = stage.connect()
    client.put(encode(History(3, "kites")))
    client.flush()
    stage.until(lambda: stage.events, "the question")
    [wanted] = stage.events
    assert stage.port.holder(wanted.token) == name
    stage.port.recall(wanted, [], "why")
    heard: list[Any] = []
    stage.until(lambda: heard or heard.extend(client.receive()), "the answer")
    assert decode_server(heard[0]) == Entries(3, [], "why")
