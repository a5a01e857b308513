"""Bytes limit the tasks in memory, not only their number."""

import pytest

from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model import actions, pool
from musterd.supervisor.core.model.queue import TASK_BYTES
from musterd.supervisor.core.tasks import refusals
from support.core import Muster


def test_a_queue_of_large_arguments_is_full_before_its_number(
    muster: type[Muster], monkeypatch: pytest.MonkeyPatch
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
