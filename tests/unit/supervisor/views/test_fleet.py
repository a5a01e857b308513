"""The state of the fleet in one word."""

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskDeclaration, TaskSpec
from musterd.ipc.wire.resolving import Resolved
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.memory_use import MemoryUse
from musterd.supervisor.core.model.policy import MemoryPolicy
from musterd.supervisor.views import metrics as figures
from musterd.supervisor.views.fleet import fleet_state, headline, pool_status, tasks_at
from support.core import Muster


def test_a_fleet_that_was_up_once_is_degraded_not_starting(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.tell(events.Started())
    assert fleet_state(m.fleet, ready=False) == "starting"
    m = muster(size=2)
    m.start()
    assert fleet_state(m.fleet, ready=True) == "running"
    m.exit(1)
    m.exit(3)
    assert m.slots[0].state == "BACKOFF"
    assert fleet_state(m.fleet, ready=True) == "degraded"
    m.tell(events.StopRequested((("p", 0),)))
    assert fleet_state(m.fleet, ready=True) == "running", "it was asked for"


def test_a_pool_whose_class_cannot_be_loaded_any_more_degrades_the_fleet(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.tell(events.ForkServerExited("p", "killed"))
    m.wait(SECOND_NS)
    m.tell(events.ForkServerFailed("p", "SyntaxError"))
    assert m.slots[0].state == "RUNNING"
    assert fleet_state(m.fleet, ready=True) == "degraded"


def test_a_worker_that_drains_is_still_busy_with_its_task(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.submit(TaskSpec("a", "p.x", b"\x80"))
    assert pool_status(m.fleet.pools["p"], m.now_ns).busy == 1
    m.tell(events.StopRequested((("p", 0), ("p", 1))))
    status = pool_status(m.fleet.pools["p"], m.now_ns)
    draining = [worker for worker in status.workers if worker.state == "DRAINING"]
    assert [worker.method for worker in draining if worker.task_id] == ["x"]
    assert status.busy == 1
    assert "2 of 2 workers, 1 busy; 0 tasks wait" in headline(m.fleet, ready=True)
    assert figures._pool(m.fleet.pools["p"], MemoryUse(MemoryPolicy())).busy == 1


def test_the_headline_counts_workers_that_are_busy_not_their_tasks(muster: type[Muster]) -> None:
    m = muster()
    m.bring_up = lambda worker: [
        *m.tell(events.WorkerForked(worker, 5000 + worker)),
        *m.tell(events.WorkerReady(worker, 3)),
    ]
    m.start()
    m.submit(*(TaskSpec(id_, "p.x", b"\x80") for id_ in "abc"))
    assert m.fleet.pools["p"].leased == 3
    assert "1 of 1 workers, 1 busy" in headline(m.fleet, ready=True)


def test_the_tasks_of_a_function_are_those_of_pools_that_have_loaded_it(
    muster: type[Muster],
) -> None:
    m = muster()
    assert tasks_at(m.fleet, "m:f") == Resolved(0, loading=["p"], pools=["p"])
    m.tell(events.Started())
    assert tasks_at(m.fleet, "m:f").loading == ["p"]
    here, there = TaskDeclaration("f", place="m:f"), TaskDeclaration("g", place="m:g")
    m.tell(events.ForkServerReady("p", (here, there)))
    assert tasks_at(m.fleet, "m:f") == Resolved(0, ["p.f"], pools=["p"])
    assert tasks_at(m.fleet, "m:") == Resolved(0, pools=["p"])


def test_a_pool_that_cannot_load_its_worker_is_not_waited_for(muster: type[Muster]) -> None:
    m = muster()
    m.tell(events.Started())
    m.tell(events.ForkServerFailed("p", "SyntaxError"))
    assert tasks_at(m.fleet, "m:f") == Resolved(0, failed=["p"], pools=["p"])


def test_an_answer_about_a_function_is_bounded(
    muster: type[Muster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("musterd.supervisor.views.fleet.NAMES_SHOWN_MAX", 2)
    m = muster()
    m.tell(events.Started())
    many = tuple(TaskDeclaration(f"f{number}", place="m:f") for number in range(5))
    m.tell(events.ForkServerReady("p", many))
    assert tasks_at(m.fleet, "m:f").tasks == ["p.f0", "p.f1"]
