"""What a worker has said before its end is heard before that end."""

from typing import Any

import pytest

from musterd.ipc.messages import TaskSpec
from musterd.supervisor import worker_port
from musterd.supervisor.core import actions, events
from musterd.supervisor.worker_port import LAST_LOOKS, WorkerPort


class Port(WorkerPort):
    """Whose messages come after some looks."""

    def __init__(self, coming: list[list[object]]) -> None:
        self.coming = coming
        self.forgotten: list[int] = []

    def receive(self) -> list[object]:
        return self.coming.pop(0) if self.coming else []

    def forget(self, worker: int) -> None:
        self.forgotten.append(worker)


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(worker_port.time, "sleep", slept.append)
    return slept


def test_a_word_that_is_owed_is_waited_for(no_sleep: list[float]) -> None:
    heard: list[object] = []
    port = Port([[], [], ["done"], ["never"]])
    exited = events.WorkerExited(7, 0, 0)
    port.last_words(exited, heard.append, lambda _: not heard)
    assert heard == ["done"]
    assert len(no_sleep) == 2
    assert port.forgotten == [7]


def test_one_that_owes_nothing_is_not_waited_for(no_sleep: list[float]) -> None:
    port = Port([])
    port.last_words(events.WorkerExited(7, 0, 0), lambda _: None, lambda _: False)
    assert not no_sleep


def test_a_word_that_never_comes_is_not_waited_for_long(no_sleep: list[float]) -> None:
    port = Port([])
    port.last_words(events.WorkerExited(7, 0, 0), lambda _: None, lambda _: True)
    assert len(no_sleep) == LAST_LOOKS
    assert port.forgotten == [7]


def test_who_ended_in_order_and_holds_a_task_owes_a_word(muster: Any) -> None:
    m = muster()
    m.start()
    exited, crashed = events.WorkerExited(1, 0, 0), events.WorkerExited(1, -9, 0)
    assert not m.fleet.owes(exited)
    answer = m.submit(TaskSpec("t", "p.x", b""))
    (leases,) = [each for each in answer if isinstance(each, actions.AssignLeases)]
    assert m.fleet.owes(exited)
    assert not m.fleet.owes(crashed), "it died with its task"
    assert not m.fleet.owes(events.WorkerExited(99, 0, 0))
    m.complete(1, leases.leases[0].lease)
    assert not m.fleet.owes(exited)
