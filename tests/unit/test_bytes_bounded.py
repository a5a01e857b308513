"""What is kept in memory is bounded by its bytes, not only by its number."""

from typing import Any

import pytest

from musterd.ipc.messages import Outcome, TaskSpec
from musterd.supervisor import client_port
from musterd.supervisor.client_port import ClientPort, Peer
from musterd.supervisor.core import actions, pool, refusals
from musterd.supervisor.core.queue import TASK_BYTES


def test_a_queue_of_large_arguments_is_full_before_its_number(
    muster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pool, refusals):
        monkeypatch.setattr(module, "QUEUE_BYTES_MAX", 2 * (400 + TASK_BYTES))
    m = muster(queue_size=100)
    m.start()
    rejected = [
        rejection
        for number in range(3)
        for action in m.submit(TaskSpec(f"t{number}", "p.x", b"x" * 400))
        if isinstance(action, actions.Acknowledge)
        for rejection in action.rejected
    ]
    assert [(each.id, each.code) for each in rejected] == [("t2", "QueueFull")]
    assert "bytes" in rejected[0].message
    assert rejected[0].retry_after_ns > 0


def test_a_client_that_does_not_read_is_kept_no_more_than_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_port, "OUTBOX_BYTES_MAX", 1000)
    port = ClientPort.__new__(ClientPort)
    port._epoch, port._connections = "epoch", 1
    port._peers, port._full = {b"peer": Peer("epoch.1")}, {b"peer"}  # type: ignore[assignment]
    peer = port._peers[b"peer"]
    for number in range(10):
        port.deliver(b"peer", [Outcome(str(number), "succeeded", b"x" * 400)])
        assert peer.bytes == sum(map(len, peer.outbox))
        assert peer.bytes < 1000 + 500
    assert peer.epoch != "epoch.1", "it is told to ask again"
