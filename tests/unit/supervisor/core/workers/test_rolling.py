"""A new build of a pool: tried with one worker, then slot by slot, or given up."""

from typing import Any

import msgspec
import pytest

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import TaskDeclaration, TaskSpec
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.workers.rolling import FAILURES_MAX, FORK_SERVER_TRIES_MAX
from support.core import Muster, of

OLD, NEW = "old", "new"
BOTH = (TaskDeclaration("x"), TaskDeclaration("y"))


def reports(answer: list[Any]) -> list[str]:
    return [each.event for each in of(actions.Report, answer)]


@pytest.fixture
def fleet(muster: type[Muster]) -> Any:
    def make(size: int = 2, **pool: Any) -> Any:
        m = muster(size, build=OLD, **pool)
        m.tell(events.Started())
        answer = m.tell(events.ForkServerReady("p", BOTH, OLD))
        for spawn in of(actions.SpawnWorker, answer):
            assert spawn.build == OLD
            m.bring_up(spawn.worker)
        return m

    return make


def change(m: Any, **changes: Any) -> list[Any]:
    """Reload with these changes of the pool."""
    policy = m.fleet.policy
    (pool,) = policy.pools
    changed = msgspec.structs.replace(pool, **changes)
    policy = msgspec.structs.replace(policy, pools=(changed,))
    return m.tell(events.PolicyChanged(policy))  # type: ignore[no-any-return]


def load(m: Any, declarations: tuple[TaskDeclaration, ...] = BOTH) -> list[Any]:
    return m.tell(events.ForkServerReady("p", declarations, NEW))  # type: ignore[no-any-return]


def builds(m: Any) -> list[str]:
    return [slot.build for slot in m.slots]


def test_a_roll_loads_first_then_replaces_one_after_the_other(fleet: Any) -> None:
    m = fleet(2)
    answer = change(m, build=NEW)
    assert of(actions.StartForkServer, answer) == [actions.StartForkServer("p", NEW)]
    assert not of(actions.StopWorker, answer)
    assert of(actions.SpawnWorker, load(m)) == [actions.SpawnWorker(3, "p", 0, NEW)]
    answer = m.bring_up(3)
    assert of(actions.StopForkServer, answer) == [actions.StopForkServer("p", OLD)]
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1)]
    assert builds(m) == [NEW, OLD]
    answer = m.exit(1, code=0)
    assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(4, "p", 1, NEW)]
    assert of(actions.StopWorker, m.bring_up(4)) == [actions.StopWorker(2)]
    assert reports(m.exit(2, code=0)) == ["pool.rolled"]
    assert builds(m) == [NEW, NEW]
    assert m.fleet.pools["p"].counters.restarts == 0


def test_the_same_build_touches_nobody(fleet: Any) -> None:
    m = fleet(2)
    answer = change(m, task_timeout_ns=SECOND_NS, max_crashes=7)
    assert answer == []
    assert m.fleet.pools["p"].policy.max_crashes == 7


def test_a_class_that_cannot_be_loaded_changes_nothing(fleet: Any) -> None:
    m = fleet(2)
    change(m, build=NEW)
    answer = m.tell(events.ForkServerFailed("p", "no module", NEW))
    assert reports(answer) == ["pool.roll_failed"]
    assert m.fleet.pools["p"].rollout_problem == "no module"
    assert not of(actions.StopWorker, answer)
    assert builds(m) == [OLD, OLD]
    # A worker that crashes now comes back from the old build.
    assert of(actions.SpawnWorker, m.exit(1)) == [actions.SpawnWorker(3, "p", 0, OLD)]
    # The next reload tries the new build once more, although nothing has changed.
    assert of(actions.StartForkServer, change(m)) == [actions.StartForkServer("p", NEW)]


def test_a_first_worker_that_does_not_get_ready_ends_the_roll(fleet: Any) -> None:
    m = fleet(2)
    change(m, build=NEW)
    load(m)
    answer = m.exit(3)
    assert "pool.roll_failed" in reports(answer)
    assert of(actions.StopForkServer, answer) == [actions.StopForkServer("p", NEW)]
    assert builds(m) == [OLD, OLD]
    assert m.fleet.pools["p"].counters.restarts == 0


def test_a_class_that_takes_too_long_to_load_is_given_up(fleet: Any) -> None:
    m = fleet(1, start_timeout_ns=2 * SECOND_NS)
    change(m, build=NEW)
    assert "pool.roll_failed" in reports(m.wait(2 * SECOND_NS))


def test_a_fork_server_that_dies_while_it_loads_is_replaced_a_few_times(fleet: Any) -> None:
    m = fleet(1)
    change(m, build=NEW)
    for _ in range(FORK_SERVER_TRIES_MAX - 1):
        answer = m.tell(events.ForkServerExited("p", "killed", NEW))
        assert of(actions.StartForkServer, answer) == [actions.StartForkServer("p", NEW)]
    assert "pool.roll_failed" in reports(m.tell(events.ForkServerExited("p", "killed", NEW)))


def test_a_worker_whose_fork_goes_with_its_fork_server_is_tried_again(fleet: Any) -> None:
    m = fleet(1)
    change(m, build=NEW)
    load(m)
    m.tell(events.ForkServerExited("p", "killed", NEW))
    m.tell(events.SpawnFailed(2, "the fork server is gone"))
    load(m)
    answer = m.wait(10 * SECOND_NS)
    assert [each.build for each in of(actions.SpawnWorker, answer)] == [NEW]
    assert m.fleet.pools["p"].rollout is not None


def test_the_old_fork_server_may_die_in_the_middle_of_it(fleet: Any) -> None:
    m = fleet(2)
    change(m, build=NEW)
    answer = m.tell(events.ForkServerExited("p", "killed", OLD))
    answer += m.wait(1)
    assert of(actions.StartForkServer, answer) == [actions.StartForkServer("p", OLD)]
    load(m)
    m.bring_up(3)
    assert m.fleet.pools["p"].build == NEW


def test_what_runs_may_take_its_time(fleet: Any) -> None:
    m = fleet(1, task_timeout_ns=100 * SECOND_NS)
    m.submit(TaskSpec("t", "p.x", b""))
    change(m, build=NEW)
    load(m)
    m.bring_up(2)
    answer = m.wait(99 * SECOND_NS)
    assert not of(actions.TerminateWorker, answer)
    assert of(actions.Deliver, m.complete(1, 1))
    assert reports(m.exit(1, code=0)) == ["pool.rolled"]


def test_only_tasks_that_both_know_are_accepted_meanwhile(fleet: Any) -> None:
    m = fleet(2)
    change(m, build=NEW)
    load(m, (TaskDeclaration("x"), TaskDeclaration("z")))
    m.bring_up(3)
    codes = []
    for name in ("p.x", "p.y", "p.z"):
        (answer,) = of(actions.Acknowledge, m.submit(TaskSpec(name, name, b"")))
        codes.append([each.code for each in answer.rejected])
    assert codes == [[], ["UnknownTask"], ["UnknownTask"]]
    m.complete(3, 1)
    m.exit(1, code=0)
    m.bring_up(4)
    answer = m.exit(2, code=0)
    (declared,) = of(actions.Declare, answer)
    assert [each.method for each in declared.declarations] == ["x", "z"]
    (answer,) = of(actions.Acknowledge, m.submit(TaskSpec("z", "p.z", b"")))
    assert answer.rejected == []


def test_back_again_before_it_is_tried_leaves_all_as_it_was(fleet: Any) -> None:
    m = fleet(2)
    change(m, build=NEW)
    load(m)
    answer = change(m, build=OLD)
    assert of(actions.StopForkServer, answer) == [actions.StopForkServer("p", NEW)]
    assert of(actions.TerminateWorker, answer) == [actions.TerminateWorker(3)]
    m.exit(3, code=-15)
    assert builds(m) == [OLD, OLD]
    assert m.fleet.pools["p"].rollout is None
    assert not of(actions.SpawnWorker, m.wait(60 * SECOND_NS))


@pytest.mark.parametrize("late", [False, True])
def test_back_again_after_its_own_class_was_loaded_meanwhile(
    muster: type[Muster], late: bool
) -> None:
    m = muster(1, build=OLD)
    m.tell(events.Started())
    change(m, build=NEW)
    own = events.ForkServerReady("p", BOTH, OLD)
    if not late:
        m.tell(own)
        m.bring_up(1)
    load(m)
    change(m, build=OLD)  # the first worker of the new build is still there
    if late:
        m.tell(own)
    m.exit(1 if late else 2, code=-15)
    assert m.fleet.pools["p"].rollout is None
    assert sorted(m.fleet.pools["p"].declarations) == ["x", "y"]
    assert not any(
        ack.rejected for ack in of(actions.Acknowledge, m.submit(TaskSpec("t", "p.x", b"")))
    )


def test_another_build_in_the_middle_of_it_is_rolled_to_from_where_it_is(fleet: Any) -> None:
    m = fleet(2)
    change(m, build=NEW)
    load(m)
    m.bring_up(3)
    answer = change(m, build="newest")
    assert of(actions.StartForkServer, answer) == [actions.StartForkServer("p", "newest")]
    m.exit(1, code=0)
    answer = m.tell(events.ForkServerReady("p", BOTH, "newest"))
    assert [each.build for each in of(actions.SpawnWorker, answer)] == ["newest"]


def test_a_pool_that_is_fatal_comes_back_with_a_class_that_works(muster: type[Muster]) -> None:
    m = muster(2, build=OLD)
    m.tell(events.Started())
    m.tell(events.ForkServerFailed("p", "no module", OLD))
    assert [slot.state for slot in m.slots] == ["FATAL", "FATAL"]
    change(m, build=NEW)
    (spawn,) = of(actions.SpawnWorker, load(m))
    answer = m.bring_up(spawn.worker)
    (other,) = of(actions.SpawnWorker, answer)
    m.bring_up(other.worker)
    assert [slot.state for slot in m.slots] == ["RUNNING", "RUNNING"]
    assert builds(m) == [NEW, NEW]


def test_a_pool_without_workers_takes_the_new_build_over_at_once(fleet: Any) -> None:
    m = fleet(1)
    m.tell(events.StopRequested((("p", -1),)))
    m.exit(1, code=0)
    change(m, build=NEW)
    assert reports(load(m)) == ["pool.rolled"]
    assert m.fleet.pools["p"].build == NEW


def test_later_workers_that_fail_again_and_again_end_the_roll(fleet: Any) -> None:
    m = fleet(2)
    change(m, build=NEW)
    load(m)
    m.bring_up(3)
    answer = m.exit(1, code=0)
    for _ in range(FAILURES_MAX):
        while not of(actions.SpawnWorker, answer):
            answer = m.wait(SECOND_NS)
        (spawn,) = of(actions.SpawnWorker, answer)
        answer = m.exit(spawn.worker)
    assert "pool.roll_failed" in reports(answer)
    assert builds(m) == [NEW, OLD]
    # The next reload goes on with the other slots.
    (spawn,) = of(actions.SpawnWorker, change(m))
    assert (spawn.index, spawn.build) == (1, NEW)


def test_a_shutdown_ends_both_fork_servers(fleet: Any) -> None:
    m = fleet(1)
    change(m, build=NEW)
    answer = m.tell(events.ShutdownRequested("asked"))
    answer += m.exit(1, code=0)
    answer += m.tell(events.CleanupFinished())
    stopped = [each.build for each in of(actions.StopForkServer, answer)]
    assert sorted(stopped) == [NEW, OLD]
    assert answer[-1] == actions.Exit()
