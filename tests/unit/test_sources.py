"""What the loop is woken by."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from musterd.ipc.sockets import make_router, receive, send
from musterd.supervisor.sources import Sources

SECONDS = 20.0


class Stage:
    """A ROUTER with a peer, a descriptor, and the sources that have both."""

    def __init__(self, context: zmq.Context[Any], path: Path) -> None:
        self.router = make_router(context)
        self.router.bind(f"ipc://{path}")
        self.peer = context.socket(zmq.DEALER)
        self.peer.connect(f"ipc://{path}")
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.sources = Sources()
        self.sources.open([self.router], [self.fd])

    def wait(self) -> dict[Any, bool]:
        """Until there is something; the descriptor of a ROUTER may also tell of other things."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            ready = self.sources.wait(1000)
            if ready:
                return ready
        raise AssertionError("nothing came")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    context: zmq.Context[Any] = zmq.Context()
    stage = Stage(context, tmp_path / "s")
    with closing(stage.sources):
        yield stage
    os.close(stage.fd)
    context.destroy(linger=0)


def test_a_descriptor_is_told_as_long_as_it_is_readable(stage: Stage) -> None:
    os.eventfd_write(stage.fd, 1)
    assert stage.wait() == {stage.fd: True}
    assert stage.wait() == {stage.fd: True}
    os.eventfd_read(stage.fd)
    assert stage.sources.wait(0) == {}


def test_a_message_is_told_until_it_is_received(stage: Stage) -> None:
    stage.peer.send(b"one")
    assert stage.wait() == {stage.router: True}
    assert stage.wait() == {stage.router: True}  # though its descriptor tells only once
    assert [frame for _, frame in receive(stage.router, 10)] == [b"one"]
    assert stage.sources.wait(0) == {}


def test_what_is_left_is_told_again_without_a_sleep(stage: Stage) -> None:
    for _ in range(5):
        stage.peer.send(b"x")
    got = 0
    while got < 5:
        assert stage.router in stage.wait()
        got += len(receive(stage.router, 1))


def test_a_message_that_came_while_the_router_sent_is_not_missed(stage: Stage) -> None:
    stage.peer.send(b"hello")
    stage.wait()
    ((identity, _),) = receive(stage.router, 10)
    for _ in range(200):  # each send may swallow the sign that something has arrived
        stage.peer.send(b"x")
        send(stage.router, identity, b"y")
        assert stage.wait() == {stage.router: True}
        assert len(receive(stage.router, 10)) == 1


def test_both_are_told_at_once(stage: Stage) -> None:
    stage.peer.send(b"one")
    stage.wait()
    os.eventfd_write(stage.fd, 1)
    assert stage.sources.wait(1000) == {stage.router: True, stage.fd: True}


def test_nothing_is_nothing_after_the_time(stage: Stage) -> None:
    stage.sources.wait(100)  # the peer has come meanwhile
    began = time.monotonic()
    assert stage.sources.wait(50) == {}
    assert time.monotonic() - began >= 0.04
