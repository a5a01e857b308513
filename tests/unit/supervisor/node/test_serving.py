"""What clients send reaches the gateway in order, also where it has to wait."""

import os
import socket
from array import array
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model import events
from musterd.supervisor.node.direct_loop import HandedSockets
from musterd.supervisor.node.schedule_desk import ScheduleDesk
from musterd.supervisor.node.serving import AdmittingServer


class Gateway:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def handle(self, _now_ns: int, event: object) -> list[object]:
        self.heard.append(event)
        return []

    def next_deadline(self) -> None: ...
    def submits_of(self, _peer: bytes) -> bool:
        return False


class Port:
    """Stands for the port of clients: gives what the test says."""

    def __init__(self) -> None:
        self.come: list[object] = []
        self.lost: list[object] = []
        self.ready: dict[object, None] = {}
        self.behind = True
        self.held = 0
        self.router = self
        self.flushed = 0

    def fileno(self) -> int:
        return -1

    def flush(self) -> None:
        self.flushed += 1

    def receive(self, _wall_ns: int) -> Iterator[object]:
        while self.come:
            yield self.come.pop(0)

    def settle(self) -> list[object]:
        lost, self.lost = self.lost, []
        return lost


def submit(id_: str) -> events.TasksSubmitted:
    return events.TasksSubmitted(b"1", 1, [TaskSpec(id_, "p.x", b"\x80")], 0, False)


def test_what_cannot_be_admitted_holds_back_all_that_follows() -> None:
    gateway, port, ready = Gateway(), Port(), [False]
    engines: Any = None

    def admit(event: events.TasksSubmitted) -> events.TasksSubmitted | None:
        return event if ready[0] or event.tasks[0].id == "known" else None

    desk = ScheduleDesk(engines, port, Random(1))  # type: ignore[arg-type]
    server = AdmittingServer(gateway, port, engines, desk, admit)  # type: ignore[arg-type]
    known, unknown = submit("known"), submit("unknown")
    watched, gone = events.TasksWatched(b"1", ["known"]), events.PeerLost(b"1")
    port.come = [known, unknown, watched]
    server.hear()
    assert gateway.heard == [known]
    assert not server.behind  # nothing is read meanwhile
    port.come = [known]
    server.hear()
    port.lost = [gone]
    server.settle()
    assert gateway.heard == [known]
    assert port.flushed == 1
    ready[0] = True
    server.go_on()
    assert gateway.heard == [known, unknown, watched, gone]
    assert server.behind
    server.hear()
    assert gateway.heard[4:] == [known]


def test_sockets_are_handed_over() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, HandedSockets(fileno=theirs.detach()) as handed:
        handed.setblocking(False)
        with pytest.raises(BlockingIOError):
            handed.accept()
        here, there = socket.socketpair()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [there.fileno()]))
        ours.sendmsg([b"c"], [rights])
        there.close()
        got, _ = handed.accept()
        with here, got:
            got.send(b"hello")
            assert here.recv(10) == b"hello"
            assert not os.get_inheritable(got.fileno())
        ours.send(b"c")  # without a descriptor
        with pytest.raises(BlockingIOError):
            handed.accept()
        ours.close()
        with pytest.raises(BlockingIOError):
            handed.accept()
