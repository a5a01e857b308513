"""node.sock: only the sidecar that was started is heard, and what it says becomes events."""

import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import TaskSpec, TaskView
from musterd.ipc.wire.node_codec import decode_node
from musterd.ipc.wire.node_messages import (
    ATTEMPTS_MAX,
    NODE_PROTOCOL,
    REQUESTS_MAX,
    AskLocks,
    AskStates,
    Attempt,
    AttemptEnd,
    AttemptProgress,
    Begun,
    CancelAttempts,
    Confirmed,
    Figures,
    FindTasks,
    Finish,
    FoundTasks,
    Granted,
    Greeting,
    Held,
    Holds,
    LockReply,
    LocksTold,
    LockWish,
    LoseAttempts,
    Membership,
    Notice,
    Pools,
    ProgressMarks,
    QueueCount,
    ScheduleNews,
    Seen,
    SharedPolicy,
    SidecarHello,
    StateReply,
    StateRequest,
    StatesTold,
    Want,
    found_tasks,
)
from musterd.ipc.wire.zmtp import Connection
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import TargetPolicy
from musterd.supervisor.core.model.shared import ClusterPolicy
from musterd.supervisor.sockets import node
from musterd.supervisor.sockets.node import NodePort

PATIENCE_SECONDS = 20
HELD = [Held("a", 1)]


class Stage:
    """The port, and connections to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = NodePort(path)
        self.connections: list[Connection] = []

    def connect(self) -> Connection:
        connection = Connection(str(self.path))
        self.connections.append(connection)
        while not connection.ready:
            self.port.receive()
            connection.receive()
        return connection

    def say(self, connection: Connection, message: Any) -> list[object]:
        connection.put(encode(message))
        connection.flush()
        return self.hear()

    def hear(self) -> list[object]:
        select.select([self.port], [], [], PATIENCE_SECONDS)
        return self.port.receive()

    def join(self) -> Connection:
        connection = self.connect()
        hello = SidecarHello(NODE_PROTOCOL, self.port.new_token())
        assert events.ClusterConnected() in self.say(connection, hello)
        return connection

    def told(self, connection: Connection, action: node.ClusterAction) -> list[object]:
        self.port.perform(action)
        select.select([connection], [], [], PATIENCE_SECONDS)
        return [decode_node(frame) for frame in connection.receive() if frame is not None]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "n.sock")
    yield stage
    for connection in stage.connections:
        connection.close()
    stage.port.close()


def test_the_socket_is_for_its_owner_alone(stage: Stage) -> None:
    assert stage.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (Membership(1, 2, True, True, 3), events.MembershipTold(1, 2, True, True, 3)),
        (
            ScheduleNews("task.changed", "kites", "p", "@kites.1", "", 0, "d", True),
            events.ScheduleNoted("task.changed", "kites", "p", "@kites.1", "", 0, "d", True),
        ),
        (SharedPolicy(3), events.PolicyShared(3, None)),
        (Confirmed(HELD), events.EndsConfirmed(HELD)),
        (CancelAttempts(HELD), events.AttemptsCancelled(HELD)),
        (LoseAttempts(HELD), events.AttemptsLost(HELD)),
        (StatesTold([StateReply(1, b"v")]), events.StatesTold([StateReply(1, b"v")])),
        (
            LocksTold(3, [LockReply(1, "l", False, "x")]),
            events.LocksTold(3, [LockReply(1, "l", False, "x")]),
        ),
        (
            Granted(3, "p", [Attempt(TaskSpec("t", "p.x", b""), 1, 1)]),
            events.AttemptsGranted(3, "p", [Attempt(TaskSpec("t", "p.x", b""), 1, 1)]),
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_the_sidecar_says_becomes_an_event(stage: Stage, message: Any, event: Any) -> None:
    assert stage.say(stage.join(), message) == [event]


def test_a_policy_comes_in_parts(stage: Stage) -> None:
    sidecar = stage.join()
    policy = ClusterPolicy(targets={"shop.example": TargetPolicy(rate=2.0)})
    encoded = msgspec.msgpack.encode(policy)
    assert stage.say(sidecar, SharedPolicy(4, encoded[:20], True)) == []
    found = stage.say(sidecar, SharedPolicy(4, encoded[20:]))
    assert found == [events.PolicyShared(4, policy)]


def test_half_a_policy_of_a_sidecar_before_does_not_count(stage: Stage) -> None:
    encoded = msgspec.msgpack.encode(ClusterPolicy())
    assert stage.say(stage.join(), SharedPolicy(4, b"x" * 20, True)) == []
    sidecar = stage.join()
    stage.port.receive()
    assert stage.say(sidecar, SharedPolicy(4, encoded)) == [events.PolicyShared(4, ClusterPolicy())]


def test_a_policy_that_cannot_be_read_is_told_as_such(stage: Stage) -> None:
    found = stage.say(stage.join(), SharedPolicy(4, b"\xc1"))
    assert found == [events.PolicyShared(4, None)]
    assert stage.port.malformed == 1


def test_a_policy_has_a_limit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "POLICY_BYTES_MAX", 100)
    sidecar = stage.join()
    assert stage.say(sidecar, SharedPolicy(4, b"x" * 80, True)) == []
    assert stage.say(sidecar, SharedPolicy(4, b"x" * 80, True)) == []
    assert stage.port.malformed == 1
    encoded = msgspec.msgpack.encode(None)
    assert stage.say(sidecar, SharedPolicy(5, encoded)) == [events.PolicyShared(5, None)]


@pytest.mark.parametrize(
    ("action", "messages"),
    [
        (actions.GreetCluster(4, HELD, 2), [Greeting(NODE_PROTOCOL, 4, HELD, 2)]),
        (actions.ShowPools(()), [Pools(())]),
        (actions.WantAttempts(1, "p", 2, ("p.x",), 3), [Want(1, "p", 2, ("p.x",), 3)]),
        (
            actions.TellCluster(
                [AttemptEnd("a", 1, "untouched")], HELD, [AttemptProgress("a", 0.5)]
            ),
            [
                Finish([AttemptEnd("a", 1, "untouched")]),
                Begun(HELD),
                ProgressMarks([AttemptProgress("a", 0.5)]),
            ],
        ),
        (
            actions.AskStates([StateRequest(1, "a", 1, "k", True, b"v")]),
            [AskStates([StateRequest(1, "a", 1, "k", True, b"v")])],
        ),
        (
            actions.AskLocks(3, [LockWish(1, "l", 9, "want", "p/0")] * (REQUESTS_MAX + 1)),
            [
                AskLocks(3, [LockWish(1, "l", 9, "want", "p/0")] * REQUESTS_MAX),
                AskLocks(3, [LockWish(1, "l", 9, "want", "p/0")]),
            ],
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_action_becomes_messages(
    stage: Stage, action: node.ClusterAction, messages: list[object]
) -> None:
    assert stage.told(stage.join(), action) == messages


def test_a_long_greeting_comes_in_parts() -> None:
    held = [Held(str(number), 1) for number in range(2 * ATTEMPTS_MAX + 1)]
    first, *others = node.messages_of(actions.GreetCluster(1, held, 0))
    assert isinstance(first, Greeting)
    assert first.more
    parts = [each for each in others if isinstance(each, Holds)]
    assert [each.more for each in parts] == [True, False]
    assert [*first.held, *parts[0].held, *parts[1].held] == held


@pytest.mark.parametrize("token", ["", "never given"])
def test_nobody_without_the_token_is_heard(stage: Stage, token: str) -> None:
    if token:
        stage.port.new_token()
    stranger = stage.connect()
    assert stage.say(stranger, SidecarHello(NODE_PROTOCOL, token)) == []
    assert stage.say(stranger, Membership(1, 2)) == []
    assert stage.port.malformed == 2


def test_a_token_is_good_for_one_hello(stage: Stage) -> None:
    token = stage.port.new_token()
    assert stage.say(stage.connect(), SidecarHello(NODE_PROTOCOL, token))
    assert stage.say(stage.connect(), SidecarHello(NODE_PROTOCOL, token)) == []


def test_another_protocol_is_refused(stage: Stage) -> None:
    hello = SidecarHello(NODE_PROTOCOL + 1, stage.port.new_token())
    assert stage.say(stage.connect(), hello) == []
    assert stage.port.malformed == 1


def test_a_new_sidecar_takes_the_place_of_the_one_before(stage: Stage) -> None:
    stage.join()
    token = stage.port.new_token()
    told = stage.say(stage.connect(), SidecarHello(NODE_PROTOCOL, token))
    assert told == [events.ClusterDisconnected(), events.ClusterConnected()]
    assert len(stage.port._router) == 1


def test_the_end_of_the_connection_is_told(stage: Stage) -> None:
    stage.join().close()
    assert stage.hear() == [events.ClusterDisconnected()]


def test_a_sidecar_that_does_not_read_is_put_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.join()
    large = actions.TellCluster([AttemptEnd("a", 1, "succeeded", bytes(1024 * 1024))], [], [])
    for _ in range(node.QUEUE_MAX):
        stage.port.perform(large)
        if not stage.port._peer:
            break
        monkeypatch.setattr(stage.port._router, "_queue_max", 5)
    assert stage.port.receive() == [events.ClusterDisconnected()]


def test_without_a_sidecar_nothing_is_sent(stage: Stage) -> None:
    stage.port.perform(actions.ShowPools(()))
    assert stage.port.receive() == []


# -- what people see ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (Notice("cluster.away", "warning", "gone"), events.ClusterTold),
        (Figures(claims=3, claim_buckets=[1, 2]), events.ClusterTold),
        (Seen(1, 2, 3, 4, (QueueCount("p", 1, "queued", 9),), ()), events.ClusterTold),
    ],
)
def test_what_operators_and_metrics_see_is_told(stage: Stage, message: Any, event: Any) -> None:
    assert stage.say(stage.join(), message) == [event(message)]


@pytest.mark.parametrize(
    "message",
    [
        Notice("task.dead", "warning"),
        Notice("cluster.away", "fatal"),  # type: ignore[arg-type]
        Notice("cluster.away", "info", "x" * 1001),
        Figures(claims=-1),
        Figures(claim_buckets=[0] * 66),
        Seen(0, 0, 0, 0, (QueueCount("p", 99, "queued", 1),), ()),
    ],
)
def test_what_is_beyond_the_bounds_is_dropped(stage: Stage, message: Any) -> None:
    assert stage.say(stage.join(), message) == []
    assert stage.port.malformed == 1


def test_people_are_answered_by_the_sidecar(stage: Stage) -> None:
    sidecar = stage.join()
    answers: list[FoundTasks] = []
    stage.port.find(FindTasks(0, "running", node="barn"), answers.append)
    select.select([sidecar], [], [], PATIENCE_SECONDS)
    [asked] = [decode_node(frame) for frame in sidecar.receive() if frame is not None]
    assert isinstance(asked, FindTasks)
    assert (asked.state, asked.node) == ("running", "barn")
    found = found_tasks(asked.request, [TaskView("t", "p.x", "running", "low")], more=True)
    assert stage.say(sidecar, found) == []
    assert answers == [found]
    assert stage.say(sidecar, found) == []  # told twice
    assert answers == [found]


def test_nobody_waits_for_a_sidecar_that_is_gone(stage: Stage) -> None:
    answers: list[FoundTasks] = []
    stage.port.find(FindTasks(0), answers.append)
    assert [each.reason for each in answers] == [node.NO_SIDECAR]
    sidecar = stage.join()
    for _ in range(node.FINDS_MAX + 1):
        stage.port.find(FindTasks(0), answers.append)
    assert [each.reason for each in answers[1:]] == [node.TOO_MANY]
    sidecar.close()
    assert stage.hear() == [events.ClusterDisconnected()]
    assert [each.reason for each in answers[2:]] == [node.NO_SIDECAR] * node.FINDS_MAX
