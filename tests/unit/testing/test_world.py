"""The world around a worker under test, and its clock."""

import math
import time

import pytest

from musterd.ipc.wire.messages import TaskDeclaration
from musterd.supervisor.core.model import actions
from musterd.testing.clock import STILL_NS, VirtualClock
from musterd.testing.settings import Middle, settings_of
from musterd.testing.world import Stuck, World
from musterd.workers.authoring.base import Worker
from support.core import action_kinds

# Nothing in a test asks for these: tasks are submitted once, none is on disk alone, the store never
# fails, and there are no sidecars, no cluster and no shutdown.
NEVER = {
    *(actions.CheckResent, actions.DropRequest, actions.FindEnded, actions.FindStranded),
    *(actions.LookUp, actions.ReadBoards, actions.ReadDiskTasks, actions.Withdraw),
    *(actions.AskLocks, actions.AskStates, actions.GreetCluster, actions.NewsTold),
    *(actions.ServeClients, actions.ShowPools, actions.TellCluster, actions.WantAttempts),
    *(actions.StartSidecar, actions.StopSidecar, actions.KillSidecar),
    *(actions.Exit, actions.RunCleanup),
    # Of breakpoint() in a handler, which is pytest's here.
    *(actions.AnswerDebugger, actions.BreakIntoHandler),
    *(actions.CloseDebugger, actions.ShowDebugger),
}


@pytest.fixture
def world(tmp_path):
    settings = settings_of(
        Worker, tmp_path, config=None, pool="p", options={}, secrets={}, concurrency=None
    )
    made = World(settings, (TaskDeclaration("x"),), None)
    yield made
    made.close()


def test_each_action_of_the_core_is_carried_out_or_cannot_come(world: World) -> None:
    known = set(world._table)
    assert known | NEVER == action_kinds()
    assert not known & NEVER


def test_the_clock_goes_to_what_is_due_and_no_further(world: World) -> None:
    came: list[str] = []
    began_ns = world.now_ns()
    world.at(2.5, lambda: came.append("second"))
    world.at(1, lambda: came.append("first"))
    world.clock.on_alarm(lambda *_: came.append("alarm"))
    world.clock.set_alarm(2)
    times = []
    while (due_ns := world.next_due_ns()) < began_ns + 3 * 10**9:
        world.pass_time(due_ns)
        times.append(world.now_ns() - began_ns)
    assert came == ["first", "alarm", "second"]
    assert times == [10**9, 2 * 10**9, 2_500_000_000]


def test_where_nothing_is_due_it_says_so(world: World) -> None:
    assert world.next_due_ns() < math.inf, "the worker has a time limit to start"
    with pytest.raises(Stuck, match="nothing more will happen: p/0 is STARTING"):
        world.pass_time(math.inf)


def test_a_clock_stands_still_while_little_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    real_ns = [10**12]
    monkeypatch.setattr("musterd.testing.clock.monotonic_ns", lambda: real_ns[0])
    clock = VirtualClock()
    before = clock.now_ns()
    real_ns[0] += 10 * STILL_NS
    assert clock.now_ns() == before, "no code of the worker runs"
    clock.run(True)
    real_ns[0] += STILL_NS
    assert clock.now_ns() == before
    clock.move_to(before + 5)
    real_ns[0] += STILL_NS
    assert clock.now_ns() == before + 5, "the time before the move is forgotten"
    real_ns[0] += 1
    assert clock.now_ns() == before + 5 + STILL_NS + 1
    clock.move_to(before)
    assert clock.now_ns() == before + 5 + STILL_NS + 1, "it never goes back"
    assert abs(clock.wall_ns() - time.time_ns()) < 3600 * 10**9


def test_chance_is_always_in_the_middle() -> None:
    rng = Middle(1)
    assert [rng.random() for _ in range(3)] == [0.5] * 3
    assert rng.uniform(2, 4) == 3
