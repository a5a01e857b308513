"""The life of workers and fork servers."""

from typing import Any

from musterd.ipc.resilience.policy import POOL_SIZE_MAX, SECOND_NS
from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.core.model import actions, events
from support.core import Muster, of

ALL = (("p", -1),)


def reports(answer: list[Any]) -> list[str]:
    return [each.event for each in of(actions.Report, answer)]


def states(m: Any) -> list[str]:
    return [slot.state.value for slot in m.slots]


# -- starting ---------------------------------------------------------------------------------


def test_the_fork_server_comes_first_and_the_workers_from_it(muster: type[Muster]) -> None:
    m = muster(size=2)
    assert m.tell(events.Started()) == [actions.StartForkServer("p")]
    answer = m.tell(events.ForkServerReady("p", ()))
    assert answer == [
        actions.Declare("p", ()),
        actions.SpawnWorker(1, "p", 0),
        actions.SpawnWorker(2, "p", 1),
        actions.KeepSpares((("p", ""),)),
    ]
    assert states(m) == ["STARTING", "STARTING"]
    assert reports(m.bring_up(1)) == ["worker.ready"]
    assert states(m) == ["RUNNING", "STARTING"]


def test_a_worker_that_is_not_ready_in_time_is_killed_and_replaced(muster: type[Muster]) -> None:
    m = muster(start_timeout_ns=SECOND_NS)
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    m.tell(events.WorkerForked(1, 100))
    assert m.wait(SECOND_NS) == [actions.KillWorker(1, dump=True)]
    answer = m.exit(1, code=-9)
    assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(2, "p", 0)]
    assert "start_timeout of 1 s" in of(actions.Report, answer)[0].reason


def test_workers_in_line_for_a_fork_server_that_forks_are_not_late(muster: type[Muster]) -> None:
    m = muster(size=3, start_timeout_ns=SECOND_NS)
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    half_ns = SECOND_NS // 2 + 1
    assert m.wait(half_ns) == []
    m.bring_up(1)
    assert m.wait(half_ns) == [], "worker 2 waits for its turn"
    m.tell(events.WorkerForked(2, 102))
    assert m.wait(half_ns) == [], "the time of worker 2 begins with its fork"
    answer = m.wait(half_ns)  # no fork for a second: now the fork server is to blame for worker 3
    assert actions.KillWorker(2, dump=True) in answer
    assert of(actions.StopForkServer, answer) == [actions.StopForkServer("p")]


def test_a_hello_after_the_start_timeout_brings_no_work(muster: type[Muster]) -> None:
    m = muster(start_timeout_ns=SECOND_NS)
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    m.tell(events.WorkerForked(1, 100))
    m.wait(SECOND_NS)
    m.tell(events.WorkerReady(1))
    assert of(actions.AssignLeases, m.submit(TaskSpec("t", "p.x", b""))) == []


def test_a_fork_server_that_does_not_fork_in_time_is_replaced_and_blamed(
    muster: type[Muster],
) -> None:
    m = muster(size=2, start_timeout_ns=SECOND_NS)
    m.start()
    m.exit(1)
    m.exit(2)
    answer = m.wait(SECOND_NS)  # workers 3 and 4 were asked for and not forked
    assert answer[:3] == [
        actions.StopForkServer("p"),
        actions.KillWorker(3),
        actions.KillWorker(4),
    ]
    assert reports(answer) == ["forkserver.crashed"]
    assert of(actions.StartForkServer, answer) == [actions.StartForkServer("p")]
    assert "forked no worker within its start_timeout of 1 s" in m.slots[0].reason
    assert [slot.failures for slot in m.slots] == [1, 1], "the slots are not to blame"
    assert m.tell(events.WorkerForked(3, 100)) == [actions.KillWorker(3)], "born too late"
    assert m.exit(3) == [actions.KeepSpares(())], "nothing is made of its fork server"
    answer = m.tell(events.ForkServerReady("p", ()))
    assert [spawn.worker for spawn in of(actions.SpawnWorker, answer)] == [5, 6]
    m.bring_up(5)
    m.bring_up(6)
    assert states(m) == ["RUNNING", "RUNNING"]


def test_a_failed_spawn_is_tried_again_with_growing_pauses_and_then_fatal(
    muster: type[Muster],
) -> None:
    m = muster()
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    answer = m.tell(events.SpawnFailed(1, "no memory"))
    assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(2, "p", 0)]
    for worker, pause in ((2, 1), (3, 2)):
        assert of(actions.SpawnWorker, m.tell(events.SpawnFailed(worker, "no memory"))) == []
        assert states(m) == ["BACKOFF"]
        assert m.wait(pause * SECOND_NS - 1) == []
        assert m.wait(1) == [actions.SpawnWorker(worker + 1, "p", 0)]
    answer = m.tell(events.SpawnFailed(4, "no memory"))
    assert reports(answer) == ["worker.fatal"]
    assert "more than 3 crashes within 60 s" in m.slots[0].reason
    assert "no memory" in m.slots[0].reason
    assert m.wait(3600 * SECOND_NS) == []


def test_a_worker_that_died_is_replaced_before_it_is_said(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    answer = [
        each for each in m.exit(1, 1) if isinstance(each, actions.Report | actions.SpawnWorker)
    ]
    assert reports(answer) == ["task.crashed", "worker.crashed"]
    assert isinstance(answer[1], actions.SpawnWorker)


def test_what_is_said_of_a_task_keeps_its_place(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    answer = [type(each) for each in m.exit(1, 1)]
    assert answer.index(actions.Report) < answer.index(actions.AssignLeases)


def test_a_worker_is_given_work_before_it_is_said_that_it_is_there(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    m.exit(1, 1)
    answer = [type(each) for each in m.bring_up(2)]
    assert answer.index(actions.AssignLeases) < answer.index(actions.Report)


def test_one_fatal_slot_does_not_disturb_the_others(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    worker = 1
    for _ in range(4):
        answer = m.exit(worker) + m.wait(5 * SECOND_NS)
        worker += 1 if worker > 1 else 2  # worker 2 is in the other slot
    assert of(actions.SpawnWorker, answer) == []
    assert states(m) == ["FATAL", "RUNNING"]
    assert of(actions.AssignLeases, m.submit(TaskSpec("t", "p.x", b"")))[0].worker == 2


def test_a_known_poison_task_does_not_burn_the_restart_budget(muster: type[Muster]) -> None:
    m = muster(max_crashes=10)
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    for number in range(1, 10):
        answer = m.exit(number, lease=number)
        assert of(actions.SpawnWorker, answer) == [actions.SpawnWorker(number + 1, "p", 0)]
        m.bring_up(number + 1)
    assert m.slots[0].failures == 1


# -- fork servers --------------------------------------------------------------------------------


def test_a_class_that_cannot_be_loaded_is_fatal_for_its_pool_until_a_reset(
    muster: type[Muster],
) -> None:
    m = muster(size=2)
    m.tell(events.Started())
    answer = m.tell(events.ForkServerFailed("p", "ImportError: nope"))
    assert reports(answer) == ["pool.fatal"]
    assert states(m) == ["FATAL", "FATAL"]
    assert m.slots[0].reason == "ImportError: nope"
    assert m.wait(3600 * SECOND_NS) == []
    assert m.tell(events.ResetRequested(ALL)) == [actions.StartForkServer("p")]
    answer = m.tell(events.ForkServerReady("p", ()))
    assert len(of(actions.SpawnWorker, answer)) == 2


def test_a_fork_server_that_dies_comes_back_at_once_then_with_pauses(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.ForkServerExited("p", "killed"))
    assert m.wait(0) == [actions.StartForkServer("p")]
    m.tell(events.ForkServerExited("p", "killed"))
    assert m.wait(SECOND_NS - 1) == []
    assert m.wait(1) == [actions.StartForkServer("p")]
    assert states(m) == ["RUNNING"]


def test_workers_wait_for_a_fork_server_that_is_coming_back(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.ForkServerExited("p", "killed"))
    assert of(actions.SpawnWorker, m.exit(1)) == []
    assert states(m) == ["STARTING"]
    m.wait(0)
    assert of(actions.SpawnWorker, m.tell(events.ForkServerReady("p", ()))) != []


def test_a_class_that_is_not_loaded_in_time_is_loaded_again_with_pauses(
    muster: type[Muster],
) -> None:
    m = muster(start_timeout_ns=5 * SECOND_NS)
    m.tell(events.Started())
    answer = m.wait(5 * SECOND_NS)
    assert answer[0] == actions.StopForkServer("p")
    assert of(actions.StartForkServer, answer) == [actions.StartForkServer("p")]
    assert "not loaded within its start_timeout of 5 s" in m.slots[0].reason
    assert m.fleet.pools["p"].reason == m.slots[0].reason
    m.wait(5 * SECOND_NS)
    assert states(m) == ["BACKOFF"]
    assert of(actions.StartForkServer, m.wait(SECOND_NS)) == [actions.StartForkServer("p")]
    assert states(m) == ["STARTING"]
    assert m.slots[0].restarts == 1
    answer = m.tell(events.ForkServerReady("p", ()))
    m.bring_up(of(actions.SpawnWorker, answer)[0].worker)
    assert states(m) == ["RUNNING"]
    assert m.fleet.pools["p"].reason == m.slots[0].reason == ""
    assert m.wait(3600 * SECOND_NS) == []


def test_news_of_a_fork_server_that_was_given_up_is_ignored(muster: type[Muster]) -> None:
    m = muster(start_timeout_ns=SECOND_NS)
    m.tell(events.Started())
    m.wait(SECOND_NS)  # the second fork server loads
    m.wait(SECOND_NS)  # the core gives up the second one, too
    assert m.tell(events.ForkServerReady("p", ())) == []
    assert m.tell(events.ForkServerFailed("p", "nope")) == []
    assert states(m) == ["BACKOFF"]


def test_an_import_that_ends_the_fork_server_again_and_again_is_fatal(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.tell(events.Started())
    for _ in range(3):
        answer = m.tell(events.ForkServerExited("p", "it exited with code 0"))
        assert reports(answer) == ["forkserver.crashed"]
        assert m.slots[1].reason == "it exited with code 0"
        m.wait(60 * SECOND_NS // 10)
    answer = m.tell(events.ForkServerExited("p", "it exited with code 0"))
    assert reports(answer) == ["pool.fatal"]
    assert states(m) == ["FATAL", "FATAL"]
    assert "more than 3 failures of its fork server in a row" in m.slots[0].reason
    assert "it exited with code 0" in m.fleet.pools["p"].reason
    assert m.wait(3600 * SECOND_NS) == []
    assert m.tell(events.ResetRequested(ALL)) == [actions.StartForkServer("p")]
    assert states(m) == ["STARTING", "STARTING"]


def test_a_fork_server_that_served_for_long_starts_with_a_clean_record(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    for _ in range(10):
        m.wait(m.policy.pools[0].restart.reset_ns)
        m.tell(events.ForkServerExited("p", "killed"))
        assert m.wait(0) == [actions.StartForkServer("p")]
        m.tell(events.ForkServerReady("p", ()))
    assert states(m) == ["RUNNING"]


def test_a_reset_revives_the_fork_server_of_a_pool_whose_workers_still_run(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.tell(events.ForkServerExited("p", "killed"))
    m.wait(0)
    m.tell(events.ForkServerFailed("p", "ImportError: nope"))
    assert states(m) == ["RUNNING"]
    assert m.tell(events.ResetRequested(ALL)) == [actions.StartForkServer("p")]


def test_forks_that_fail_because_the_fork_server_died_are_not_the_slots_fault(
    muster: type[Muster],
) -> None:
    m = muster()
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    m.tell(events.ForkServerExited("p", "killed"))
    m.tell(events.SpawnFailed(1, "the fork server was killed"))
    assert m.slots[0].failures == 0
    assert states(m) == ["STARTING"]


# -- stopping ---------------------------------------------------------------------------------


def test_a_slot_that_was_stopped_shows_no_crash_of_before(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.exit(1)
    m.exit(2)
    assert m.slots[0].reason
    m.tell(events.StopRequested(ALL))
    assert (states(m), m.slots[0].reason) == (["STOPPED"], "")


def test_a_stop_is_a_request_then_term_then_kill(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.submit(TaskSpec("t", "p.x", b""))
    assert m.tell(events.StopRequested(ALL)) == [actions.StopWorker(1)]
    assert states(m) == ["DRAINING"]
    drain_ns, stop_ns = m.policy.drain_timeout_ns, m.policy.stop_timeout_ns
    assert of(actions.TerminateWorker, m.wait(drain_ns)) == [actions.TerminateWorker(1)]
    assert of(actions.KillWorker, m.wait(stop_ns)) == [actions.KillWorker(1)]
    m.exit(1, lease=1, code=-9)
    assert states(m) == ["STOPPED"]
    assert m.fleet.tasks["t"].interruptions == 1
    assert m.wait(3600 * SECOND_NS) == []


def test_a_draining_worker_is_given_nothing_more(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.StopRequested(ALL))
    assert of(actions.AssignLeases, m.submit(TaskSpec("t", "p.x", b""))) == []


def test_a_worker_in_the_making_is_stopped_by_a_signal(muster: type[Muster]) -> None:
    m = muster()
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    assert m.tell(events.StopRequested(ALL)) == [actions.TerminateWorker(1)]
    answer = m.wait(m.policy.stop_timeout_ns)
    assert of(actions.KillWorker, answer) == [actions.KillWorker(1)]
    assert states(m) == ["STOPPED"]


def test_a_worker_whose_pid_is_unknown_but_that_said_hello_is_waited_for(
    muster: type[Muster],
) -> None:
    m = muster()
    m.tell(events.Started())
    m.tell(events.ForkServerReady("p", ()))
    m.tell(events.WorkerReady(1))
    m.submit(TaskSpec("t", "p.x", b""))
    m.tell(events.StopRequested(ALL))
    m.wait(m.policy.drain_timeout_ns + m.policy.stop_timeout_ns)
    assert states(m) == ["DRAINING"]
    m.exit(1, lease=1, code=-9)
    assert states(m) == ["STOPPED"]


def test_a_stopped_slot_starts_again_when_asked(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.StopRequested(ALL))
    m.exit(1, code=0)
    assert m.tell(events.StartRequested(ALL)) == [actions.SpawnWorker(2, "p", 0)]


def test_a_restart_stops_and_starts(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    assert m.tell(events.RestartRequested(ALL)) == [actions.StopWorker(1)]
    assert m.exit(1, code=0) == [actions.SpawnWorker(2, "p", 0)]
    assert m.slots[0].restarts == 0


def test_a_start_during_a_stop_means_a_restart_and_a_stop_takes_it_back(
    muster: type[Muster],
) -> None:
    m = muster()
    m.start()
    m.tell(events.StopRequested(ALL))
    m.tell(events.StartRequested(ALL))
    assert m.exit(1, code=0) == [actions.SpawnWorker(2, "p", 0)]
    m.bring_up(2)
    m.tell(events.RestartRequested(ALL))
    m.tell(events.StopRequested(ALL))
    assert m.exit(2, code=0) == [actions.KeepSpares(())]
    assert states(m) == ["STOPPED"]


def test_a_start_ends_a_backoff(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.exit(1)
    m.exit(2)
    assert states(m) == ["BACKOFF"]
    assert m.tell(events.StartRequested(ALL)) == [actions.SpawnWorker(3, "p", 0)]
    m.bring_up(3)
    assert m.wait(60 * SECOND_NS) == []


def test_a_reset_revives_a_fatal_slot_and_forgets_its_history(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    for worker in range(1, 5):
        m.exit(worker)
        m.wait(10 * SECOND_NS)
    assert states(m) == ["FATAL"]
    assert m.tell(events.StartRequested(ALL)) == []
    assert len(of(actions.SpawnWorker, m.tell(events.ResetRequested(ALL)))) == 1
    assert m.slots[0].failures == 0


def test_one_slot_is_addressed_by_its_number_and_unknown_names_by_nothing(
    muster: type[Muster],
) -> None:
    m = muster(size=3)
    m.start()
    assert m.tell(events.StopRequested((("p", 1),))) == [actions.StopWorker(2)]
    assert m.tell(events.StopRequested((("p", 9), ("nowhere", -1)))) == []


# -- scaling ----------------------------------------------------------------------------------


def test_scaling_up_starts_and_scaling_down_drains(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    answer = m.tell(events.ScaleRequested("p", 3))
    assert [spawn.index for spawn in of(actions.SpawnWorker, answer)] == [1, 2]
    m.bring_up(2)
    m.bring_up(3)
    answer = m.tell(events.ScaleRequested("p", 1))
    assert of(actions.StopWorker, answer) == [actions.StopWorker(2), actions.StopWorker(3)]
    m.exit(2, code=0)
    m.exit(3, code=0)
    assert [slot.name for slot in m.slots] == ["p/0"]


def test_scaling_up_again_keeps_the_slots_that_were_on_their_way_out(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    m.tell(events.ScaleRequested("p", 1))
    m.tell(events.ScaleRequested("p", 2))
    assert of(actions.SpawnWorker, m.exit(2, code=0)) == [actions.SpawnWorker(3, "p", 1)]
    assert states(m) == ["RUNNING", "STARTING"]


def test_a_size_out_of_bounds_is_brought_back(muster: type[Muster]) -> None:
    m = muster()
    m.start()
    m.tell(events.ScaleRequested("p", -5))
    assert m.fleet.pools["p"].size == 0
    m.tell(events.ScaleRequested("p", 10**6))
    assert m.fleet.pools["p"].size == POOL_SIZE_MAX
