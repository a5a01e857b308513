"""What the cluster sidecar tells a daemon that does not read."""

from typing import Any

from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.node_messages import Figures, FoundTasks
from musterd.supervisor.node.process import MENTION_UNSENT_BYTES, Sidecar


class Full:
    """Stands for a connection to the daemon with much that was not read."""

    def __init__(self) -> None:
        self.unsent_bytes = MENTION_UNSENT_BYTES
        self.sent: list[bytes] = []

    def put(self, frame: bytes) -> None:
        self.sent.append(frame)


def test_only_what_nobody_waits_for_is_left_out() -> None:
    sidecar: Any = Sidecar.__new__(Sidecar)
    sidecar._node = node = Full()
    sidecar._mention(Figures())
    assert node.sent == []
    sidecar._tell_found(FoundTasks(7))
    assert node.sent == [encode(FoundTasks(7))]
