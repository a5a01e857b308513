"""Handlers that wait for tasks: which waits can never end, and which handlers are told."""

from random import Random
from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import Completion, TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy, ScalingPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.tasks import waits
from musterd.supervisor.core.tasks.waits import LOOK_NS

PEER = b"client"


class Waiting:
    """A fleet of several pools with handlers that wait."""

    def __init__(self, **pools: Any) -> None:
        self.widths: dict[str, int] = {}
        made = []
        for name, more in pools.items():
            options = dict(more) if isinstance(more, dict) else {"size": more}
            self.widths[name] = options.pop("width", 1)
            quiet = {"heartbeat_timeout_ns": 0, "health_timeout_ns": 0}
            made.append(PoolPolicy(name, **{**quiet, **options}))
        self.fleet = Fleet(FleetPolicy(pools=tuple(made)), Random(1))
        self.now_ns = 1000 * SECOND_NS
        self.leases: dict[str, tuple[int, int]] = {}  # worker and lease of each task
        self.answered: list[actions.AnswerWait] = []
        self.reports: list[str] = []
        self._request = 0
        self.tell(events.Started())
        for name in pools:
            self.tell(events.ForkServerReady(name, (TaskDeclaration("x"),)))

    def tell(self, event: Any) -> None:
        for action in self.fleet.handle(self.now_ns, event):
            match action:
                case actions.Persist():
                    self.tell(events.Persisted(action.ticket))
                case actions.SpawnWorker():
                    self.tell(events.WorkerForked(action.worker, 5000 + action.worker))
                    self.tell(events.WorkerReady(action.worker, self.widths[action.pool]))
                case actions.AssignLeases():
                    for lease in action.leases:
                        self.leases[lease.id] = (action.worker, lease.lease)
                case actions.AnswerWait():
                    self.answered.append(action)
                case actions.Report():
                    self.reports.append(action.event)
        self.fleet.validate()

    def submit(self, *ids: str, **options: Any) -> None:
        """Submit tasks with these ids, each to the pool that its first letter names: "a1"."""
        specs = [TaskSpec(id_, f"{id_[0]}.x", b"", **options) for id_ in ids]
        self._request += 1
        self.tell(events.TasksSubmitted(PEER, self._request, specs, 10**18))

    def wait(self, id_: str, *others: str) -> int:
        """Let the handler of a task begin to wait for one of the others."""
        worker, lease = self.leases[id_]
        self._request += 1
        self.tell(events.WaitBegun(worker, lease, self._request, list(others)))
        return self._request

    def complete(self, id_: str) -> None:
        worker, lease = self.leases[id_]
        self.tell(events.LeasesCompleted(worker, [Completion(lease, 1, b"value")]))

    def pass_(self, nanoseconds: int) -> None:
        until_ns = self.now_ns + nanoseconds
        while (due_ns := self.fleet.next_deadline()) is not None and due_ns <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.tell(events.Ticked())
        self.now_ns = until_ns

    def told(self) -> list[int]:
        """Let a second pass; return the requests that were answered."""
        self.pass_(SECOND_NS)
        found, self.answered = self.answered, []
        return [each.request for each in found]


def test_the_only_worker_of_a_pool_waits_for_a_task_of_that_pool() -> None:
    m = Waiting(a=1)
    m.submit("a1", "a2")
    request = m.wait("a1", "a2")
    m.pass_(SECOND_NS)
    (answer,) = m.answered
    assert (answer.request, answer.ids) == (request, ["a2"])
    assert "task a1 (a.x) waits for a2 (a.x), which can never run" in answer.reason
    assert "every worker of a runs" in answer.reason
    assert "task.deadlock" in m.reports
    m.answered.clear()
    m.tell(events.WaitEnded(*m.leases["a1"], request))
    assert m.told() == []
    m.complete("a1")
    assert m.leases["a2"]


def test_a_free_worker_is_hope() -> None:
    m = Waiting(a=2)
    m.submit("a1", "a2")
    m.wait("a1", "a2")
    assert m.told() == []


def test_a_worker_that_does_not_wait_is_hope() -> None:
    m = Waiting(a=2)
    m.submit("a1", "a2", "a3")
    m.wait("a1", "a3")
    assert m.told() == []
    last = m.wait("a2", "a3")
    assert m.told() == [last]


def test_only_the_last_one_is_told_and_the_others_go_on() -> None:
    m = Waiting(a=3)
    m.submit("a1", "a2", "a3", "a4", "a5", "a6")
    requests = [m.wait(f"a{number}", f"a{number + 3}") for number in (1, 2, 3)]
    assert m.told() == [requests[2]]
    assert m.told() == []
    m.complete("a3")
    m.complete("a4")
    assert m.told() == []


def test_one_that_waits_for_any_of_several_has_hope_as_long_as_one_of_them_has() -> None:
    m = Waiting(a=1, b=1)
    m.submit("a1", "a2", "b1")
    m.wait("a1", "a2", "b1")
    assert m.told() == []


def test_two_pools_that_wait_for_each_other() -> None:
    m = Waiting(a=1, b=1)
    m.submit("a1", "b1", "a2", "b2")
    m.wait("a1", "b2")
    assert m.told() == []  # b1 still runs
    request = m.wait("b1", "a2")
    assert m.told() == [request]


def test_a_chain_over_three_pools_and_one_that_hangs_on_it() -> None:
    m = Waiting(a=1, b=1, c=1, d=1)
    m.submit("a1", "b1", "c1", "d1", "a2", "b2", "c2")
    m.wait("a1", "b2")
    m.wait("b1", "c2")
    hanging = m.wait("d1", "a1")  # waits in vain too, but blocks nobody
    assert m.told() == []
    closing = m.wait("c1", "a2")
    assert m.told() == [closing]
    assert hanging != closing


def test_a_running_child_is_hope_and_one_that_waits_for_its_parent_is_not() -> None:
    m = Waiting(a=1, b=1)
    m.submit("a1", "b1")
    m.wait("a1", "b1")
    assert m.told() == []
    request = m.wait("b1", "a1")
    assert m.told() == [request]


def test_what_is_not_known_has_ended_or_is_on_its_way() -> None:
    m = Waiting(a=1)
    m.submit("a1")
    request = m.wait("a1", "a2")  # the wait has overtaken the submit
    assert m.told() == []
    m.submit("a2")
    assert m.told() == [request]


@pytest.mark.parametrize("more", [{"expires_ns": SECOND_NS * 60}, {"on_open": "fail"}])
def test_a_task_that_may_end_without_a_worker_is_hope(more: dict[str, Any]) -> None:
    m = Waiting(a=1)
    m.submit("a1")
    m.submit("a2", **more)
    m.wait("a1", "a2")
    assert m.told() == []


def test_a_task_that_waits_for_its_time_has_no_hope_in_a_full_pool() -> None:
    m = Waiting(a=1)
    m.submit("a1")
    m.submit("a2", delay_ns=3600 * SECOND_NS)
    request = m.wait("a1", "a2")
    assert m.told() == [request]


def test_a_task_that_follows_another_has_the_hope_of_that() -> None:
    m = Waiting(a=1, b=1)
    m.submit("b1", key="k")
    m.submit("b2", key="k")
    m.submit("a1", "a2")
    m.wait("a1", "b2")
    assert m.told() == []
    request = m.wait("b1", "a2")
    assert m.told() == [request]


def test_a_pool_that_may_grow_is_hope() -> None:
    scaling = ScalingPolicy(min=1, max=2)
    m = Waiting(a={"size": 1, "scaling": scaling})
    m.submit("a1", "a2")
    m.wait("a1", "a2")
    m.pass_(2 * LOOK_NS)
    assert not m.answered
    m = Waiting(a={"size": 1, "scaling": ScalingPolicy(min=1, max=1)})
    m.submit("a1", "a2")
    assert m.told() == []
    request = m.wait("a1", "a2")
    assert m.told() == [request]


def test_a_paused_pool_is_not_judged() -> None:
    m = Waiting(a=1)
    m.submit("a1", "a2")
    m.tell(events.PauseRequested((("a", -1),)))
    request = m.wait("a1", "a2")
    assert m.told() == []
    m.tell(events.ResumeRequested((("a", -1),)))
    assert m.told() == [request]


def test_a_worker_that_runs_several_has_room_until_all_of_them_wait() -> None:
    m = Waiting(a={"size": 1, "width": 2})
    m.submit("a1", "a2", "a3")
    m.wait("a1", "a3")
    assert m.told() == []
    request = m.wait("a2", "a3")
    assert m.told() == [request]


def test_a_wait_ends_with_its_lease() -> None:
    m = Waiting(a=2)
    m.submit("a1", "a2", "a3")
    m.wait("a1", "a3")
    m.complete("a1")
    m.wait("a2", "a3")
    assert m.told() == []
    m = Waiting(a=2)
    m.submit("a1", "a2", "a3")
    m.wait("a1", "a3")
    m.tell(events.WorkerExited(*m.leases["a1"][:1], -9, m.leases["a1"][1]))
    m.wait("a2", "a3")
    assert m.told() == []


def test_nobody_waits_for_another_ones_lease() -> None:
    m = Waiting(a=2)
    m.submit("a1", "a2", "a3")
    m.wait("a1", "a3")
    m.tell(events.WaitBegun(m.leases["a1"][0], m.leases["a2"][1], 99, ["a3"]))
    assert m.told() == []


def _chain(length: int, order: list[int]) -> tuple[Waiting, list[int]]:
    """Let each task wait for the next, the last for none; note the tasks that are looked at."""
    m = Waiting(a=length)
    for number in range(length):
        m.submit(f"a{number}")
    for number in order:
        m.wait(f"a{number}", f"a{number + 1}")
    looked_at: list[int] = []
    can_end = m.fleet._waits._can_end

    def counted(*arguments: Any) -> bool:
        looked_at.append(1)
        return can_end(*arguments)

    m.fleet._waits._can_end = counted  # type: ignore[method-assign]
    return m, looked_at


@pytest.mark.parametrize("backwards", [False, True])
def test_a_long_chain_of_waits_is_looked_at_a_few_times(backwards: bool) -> None:
    length = 100
    m, looked_at = _chain(length, sorted(range(length - 1), reverse=backwards))
    m.pass_(LOOK_NS)
    assert 0 < len(looked_at) <= 3 * length
    assert m.told() == []


def test_a_chain_in_any_order_is_looked_at_within_bounds_and_is_no_alarm() -> None:
    length = 100
    order = list(range(length - 1))
    Random(1).shuffle(order)
    m, looked_at = _chain(length, order)
    m.pass_(LOOK_NS)
    assert len(looked_at) <= waits.ROUNDS_MAX * length
    assert m.told() == []


def test_more_tasks_than_a_look_may_look_at_are_hope(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Waiting(a=1)
    m.submit("a1", "a2", "a3", "a4")
    monkeypatch.setattr(waits, "LOOKED_MAX", 2)
    m.wait("a1", "a2", "a3", "a4")
    assert m.told() == []
    monkeypatch.setattr(waits, "LOOKED_MAX", 3)
    assert len(m.told()) == 1


def test_every_one_of_a_chain_whose_end_is_hopeless_is_hopeless() -> None:
    length = 2 * waits.ROUNDS_MAX
    m, _ = _chain(length, list(range(length - 1)))
    m.submit("alast")
    request = m.wait(f"a{length - 1}", "alast")
    assert m.told()[0] == request


@pytest.mark.parametrize("how", ["worn", "beside"])
def test_a_worker_that_is_about_to_be_replaced_is_hope(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = Waiting(a=1)
    m.submit("a1", "a2")
    m.wait("a1", "a2")
    pool = m.fleet.pools["a"]
    (slot,) = pool.slots
    if how == "worn":
        slot.worn = "it had enough tasks"  # the worker ends after its task, and another one begins
    else:
        monkeypatch.setattr(Pool, "beside", [slot])  # a successor of the slot's worker starts
    assert not m.fleet._waits._hopeless()
