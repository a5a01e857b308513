"""What clients say on tasks.sock, as events for the core."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from musterd.ipc.codec import encode
from musterd.ipc.messages import PROTOCOL, Cancel, Hello, Invalidate, ProgressNote
from musterd.supervisor import client_port
from musterd.supervisor.client_port import ClientPort
from musterd.supervisor.core import events


class Wire:
    """A client on a real socket, and the port it speaks to."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        path = folder / "tasks.sock"
        self.port = ClientPort(self.context, path, "epoch", None)
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(f"ipc://{path}")
        self.say(Hello(PROTOCOL))

    def say(self, message: Any) -> list[object]:
        self.client.send(encode(message))
        assert self.port.socket.poll(5000)
        return self.port.receive(0)

    def close(self) -> None:
        self.client.close(0)
        self.port.close()
        self.context.term()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    made.close()


def test_an_invalidation_becomes_its_event(wire: Wire) -> None:
    assert wire.say(Invalidate("promo:", True)) == [events.InvalidateRequested("promo:", True)]


def test_a_message_that_can_be_read_and_means_nothing_is_counted_and_dropped(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer client, or a message type that only half of the daemon knows, stops nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(client_port, "decode_client", lambda _: ProgressNote("a", 0.5))
        assert wire.say(Cancel(["a"])) == []
    assert wire.port.malformed == 1
    assert wire.say(Cancel(["a"])) == [events.CancelRequested(["a"])]
    assert wire.port.malformed == 1
