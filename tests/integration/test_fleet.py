"""The whole life of a task, with real processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from musterd import (
    AsyncClient,
    Client,
    InvalidTask,
    QueueFull,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    UnknownTask,
)
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import PROTOCOL, Done, Hello, Submit, TaskSpec, WorkerHello
from musterd.supervisor.api import rpc


def test_a_task_goes_all_the_way_and_back(jobs):
    daemon = jobs()
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": {"a": [1, "two", None]}}).result(20) == {
            "a": [1, "two", None]
        }
        began = time.monotonic()
        last = client.submit("jobs.aecho", {"value": 7})
        assert last.result(20) == 7
        took = time.monotonic() - began
        ended = last.outcome()
        assert (ended.result, ended.error, ended.attempts) == (7, "", 1)
        assert 0 < ended.run_seconds <= took
    assert daemon.stop() == 0


def test_results_come_as_they_finish(jobs):
    daemon = jobs(size=2)
    with daemon.client() as client:
        slow = client.submit("jobs.nap", {"seconds": 0.5})
        quick = [client.submit("jobs.echo", {"value": n}) for n in range(20)]
        finished = [handle.id for handle in client.as_completed([slow, *quick])]
    assert finished[-1] == slow.id
    assert sorted(finished[:-1]) == sorted(handle.id for handle in quick)


async def _through_async_client(path: str) -> list[int]:
    async with AsyncClient(path) as client:
        handles = [await client.submit("jobs.echo", {"value": n}) for n in range(50)]
        return [await handle.result() for handle in handles]


def test_the_async_client_does_the_same(jobs):
    import asyncio

    daemon = jobs()
    assert asyncio.run(_through_async_client(daemon.tasks_socket)) == list(range(50))


def test_wrong_arguments_are_not_retried(jobs):
    daemon = jobs()
    with daemon.client() as client:
        with pytest.raises(TaskFailed, match="seconds") as caught:
            client.submit("jobs.nap", {"seconds": "long"}).result(20)
        assert caught.value.kind == "invalid"
        assert caught.value.attempts == 1


def test_an_exception_arrives_with_type_message_and_traceback(jobs):
    daemon = jobs()
    with daemon.client() as client, pytest.raises(TaskFailed, match="no such luck") as caught:
        client.submit("jobs.fail", {"text": "no such luck"}).result(20)
    assert caught.value.type.endswith("ValueError")
    assert "in fail" in caught.value.traceback


def test_how_a_task_failed_can_be_had_without_an_exception(jobs):
    daemon = jobs()
    with daemon.client() as client:
        outcome = client.submit("jobs.fail", {"text": "no such luck"}).outcome(20)
    assert (outcome.state, outcome.result) == ("failed", None)
    assert outcome.error == "ValueError: no such luck"


def test_a_failing_task_is_tried_again(jobs, tmp_path):
    daemon = jobs()
    path = tmp_path / "attempts"
    with daemon.client() as client:
        assert client.submit("jobs.flaky", {"path": str(path), "times": 2}).result(20) == 3
    assert path.read_text().split() == ["1", "2", "3"]


def test_unknown_names_are_refused_with_what_there_is(jobs):
    daemon = jobs()
    with daemon.client() as client:
        with pytest.raises(UnknownTask, match=r"pools: jobs"):
            client.submit("nothing.here").result(20)
        with pytest.raises(UnknownTask, match="echo"):
            client.submit("jobs.nothing").result(20)


def test_urgent_tasks_overtake_the_queue(jobs):
    daemon = jobs(size=1, pool={"queue_size": 20000})
    with daemon.client() as client:
        low = client.submit_many([("jobs.nap", {"seconds": 0.001}, {"priority": "low"})] * 2000)
        client.flush()
        urgent = client.submit("jobs.stamp", priority="critical")
        submitted = time.monotonic_ns()
        started = urgent.result(30)
        behind = sum(not handle.done() for handle in low)
        for handle in low:
            handle.cancel()
    assert behind > 1000, "it waited for the queue"
    print(f"the urgent task began {(started - submitted) / 1e6:.1f} ms after its submit")


def test_a_full_queue_refuses_but_keeps_places_for_the_urgent(jobs):
    daemon = jobs(size=1, pool={"queue_size": 100})
    client = daemon.client()
    handles = client.submit_many([("jobs.nap", {"seconds": 30})] * 120)
    refused: list[QueueFull] = []
    for handle in handles:
        try:
            handle.ack(20)
        except QueueFull as error:
            refused.append(error)
    assert 23 <= len(refused) <= 26
    assert all(error.retry_after > 0 for error in refused)
    urgent = client.submit("jobs.nap", {"seconds": 30}, priority="critical")
    urgent.ack(20)
    for handle in [*handles, urgent]:
        handle.cancel()


def test_delay_and_expiry(jobs):
    daemon = jobs(size=1)
    with daemon.client() as client:
        began = time.monotonic_ns()
        delayed = client.submit("jobs.stamp", delay=0.3)
        assert delayed.result(20) - began >= 0.3e9
        blocker = client.submit("jobs.nap", {"seconds": 1.0})
        late = client.submit("jobs.echo", expires=0.2)
        with pytest.raises(TaskExpired):
            late.result(20)
        blocker.result(20)


def test_a_cancel_that_was_answered_holds_over_the_death_of_the_daemon(jobs, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        running = client.submit("jobs.deaf", timeout=600)
        queued = client.submit("jobs.echo")
        later = client.submit("jobs.echo", delay=600)
        client.flush()
        waiting("it runs", lambda: running.status().state == "running")
        ids = [running.id, queued.id, later.id]
        done = daemon.ctl("cancel", "--no-block", *ids)
        assert (done.returncode, f"{running.id}: running" in done.stdout) == (0, True), done.stderr
        daemon.kill()  # long before the worker ends, which ignores signals
        daemon.start()
        assert [client.task(id_).outcome(20).state for id_ in ids] == ["cancelled"] * 3
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1


def test_cancel_queued_and_running(jobs, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        running = client.submit("jobs.nap", {"seconds": 60})
        queued = client.submit("jobs.nap", {"seconds": 60})
        client.flush()
        waiting("it runs", lambda: daemon.worker("jobs/0").state == "BUSY")
        queued.cancel()
        running.cancel()
        for handle in (queued, running):
            with pytest.raises(TaskCancelled):
                handle.result(20)
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1
    assert daemon.worker("jobs/0").restarts == 0


def test_a_killed_worker_is_replaced_and_its_task_runs_again(jobs, tmp_path):
    daemon = jobs(size=1)
    with daemon.client() as client:
        mark = tmp_path / "mark"
        result = client.submit("jobs.die", {"unless": str(mark)}).result(20)
    assert result == "spared"
    assert daemon.worker("jobs/0").restarts == 1


def test_a_poison_task_is_quarantined_and_its_pool_goes_on(jobs):
    daemon = jobs(size=1)
    with daemon.client() as client:
        poison = client.submit("jobs.die")
        with pytest.raises(TaskFailed, match="quarantined") as caught:
            poison.result(30)
        assert caught.value.kind == "crash"
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1


def test_a_task_that_does_not_hear_its_timeout_is_killed_from_outside(jobs):
    daemon = jobs(size=1)
    with daemon.client() as client:
        with pytest.raises(TaskFailed, match="timeout") as caught:
            client.submit("jobs.deaf").result(30)
        assert caught.value.kind == "timeout"
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1
    assert "in deaf" in daemon.log(), "its stacks are in the log"


def test_slow_task_does_not_hold_back_the_window_behind_it(jobs):
    daemon = jobs(size=2)
    with daemon.client() as client:
        client.submit_many([("jobs.echo", {"value": 1})] * 500)
        client.flush()
        for _ in range(20):  # now known as tiny, so windows are large
            [h.result(20) for h in client.submit_many([("jobs.nap", {"seconds": 0})] * 50)]
        slow = client.submit("jobs.nap", {"seconds": 2.0})
        behind = client.submit_many([("jobs.nap", {"seconds": 0})] * 200)
        for handle in behind:
            handle.result(20)
        assert not slow.done(), "what was behind the slow task was done by the other worker"
        slow.result(20)


def test_everything_acknowledged_survives_the_supervisors_death(jobs):
    daemon = jobs(size=2)
    client = daemon.client()
    handles = client.submit_many([("jobs.nap", {"seconds": 0.02})] * 100)
    client.flush()
    daemon.kill()
    daemon.start()
    assert [handle.result(30) for handle in handles]  # the same client, across the restart
    again = daemon.client()
    assert again.task(handles[0].id).result(20) in (0, 1)


def test_a_task_that_ran_at_each_death_of_the_supervisor_is_quarantined(jobs, waiting):
    daemon = jobs(size=1, start=False, pool={"max_crashes": 2})
    daemon.start()
    client = daemon.client()
    handle = client.submit("jobs.nap", {"seconds": 60})
    client.flush()
    for _ in range(2):
        waiting("it runs", lambda: daemon.worker("jobs/0").state == "BUSY")
        time.sleep(0.5)  # long enough for the mark on disk
        daemon.kill()
        daemon.start()
    with pytest.raises(TaskFailed, match="quarantined"):
        handle.result(20)


def test_nothing_a_worker_started_outlives_it(jobs, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        folder = client.submit("jobs.orphans").result(20)
    before = len(daemon.processes())
    os.kill(daemon.worker("jobs/0").pid, signal.SIGKILL)
    waiting("the worker is replaced", lambda: daemon.worker("jobs/0").restarts == 1)
    waiting("its children are gone", lambda: len(daemon.processes()) <= before - 3, 2.0)
    waiting("its temporary directory is gone", lambda: not Path(folder).exists())


def test_nothing_outlives_a_killed_supervisor(jobs, waiting):
    daemon = jobs(size=2)
    with daemon.client() as client:
        for _ in range(4):
            client.submit("jobs.orphans").result(20)
    assert len(daemon.processes()) > 8
    daemon.kill()
    waiting("nothing is left", lambda: not daemon.processes(), 2.0)
    daemon.start()  # cleans up the files that the killed daemon left
    assert daemon.stop() == 0


def test_a_running_task_may_end_during_shutdown(jobs, waiting, tmp_path):
    daemon = jobs(size=1)
    client = daemon.client()
    begun = tmp_path / "begun"
    handle = client.submit("jobs.nap", {"seconds": 1.0, "tell": str(begun)})
    waiting("it runs", begun.exists)
    assert daemon.stop() == 0
    assert handle.result(5) == 0
    phases = [
        line.split("phase=")[1].split()[0] for line in daemon.log().splitlines() if "phase=" in line
    ]
    assert phases == ["intake", "drain", "stop", "cleanup", "close", "over"]


def test_a_second_signal_ends_the_drain_and_the_task_is_kept(jobs, waiting, tmp_path):
    daemon = jobs(size=1)
    client = daemon.client()
    begun = tmp_path / "begun"
    handle = client.submit("jobs.nap", {"seconds": 600.0, "tell": str(begun)})
    waiting("it runs", begun.exists)
    daemon.process.send_signal(signal.SIGTERM)
    waiting("it drains", lambda: "phase=drain" in daemon.log())
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    daemon.start()
    waiting("the task runs again", lambda: daemon.worker("jobs/0").task_id == handle.id)
    handle.cancel()


def test_a_bad_pool_is_fatal_and_the_others_run(jobs):
    daemon = jobs(others={"broken": {"worker": "no.such.module:Worker"}})
    broken = daemon.pool("broken")
    assert broken.state == "FATAL"
    assert "no.such.module" in broken.reason or "No module" in broken.reason
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1
    assert daemon.ctl("status").returncode == 3
    checked = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "check-config", "-c", daemon.config_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=daemon.folder,
    )
    assert checked.returncode == 78
    assert "pools.broken.worker" in checked.stderr


def test_a_task_that_can_never_run_is_refused_when_it_is_loaded(jobs, waiting):
    names = {"yields": "it contains `yield`", "opens": "a task cannot be called 'open'"}
    daemon = jobs(others={name: {"worker": f"{name}:W"} for name in names}, start=False)
    head = "from musterd import Worker, task\nclass W(Worker):\n    @task\n"
    Path(daemon.folder, "yields.py").write_text(f"{head}    def pages(self, ctx): yield 1\n")
    Path(daemon.folder, "opens.py").write_text(f"{head}    def open(self, ctx): ...\n")
    daemon.start()
    checked = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "check-config", "-c", daemon.config_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=daemon.folder,
    )
    assert checked.returncode == 78
    for name, why in names.items():
        waiting("it is given up", lambda name=name: daemon.pool(name).state == "FATAL")
        assert why in daemon.pool(name).reason
        assert why in checked.stderr
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1


def test_a_second_instance_is_refused(jobs):
    daemon = jobs()
    second = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "run", "-c", daemon.config_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=daemon.folder,
        timeout=30,
    )
    assert second.returncode == 69
    assert str(daemon.pid) in second.stderr
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1


def _garbage() -> list[list[bytes]]:
    submit = encode(Submit(1, [TaskSpec("x", "jobs.echo", b"\x80")]))
    return [
        [b""],
        [b"\xc1"],
        [os.urandom(200)],
        [submit[:-3]],
        [submit, b"second frame"],
        [b"\x91" * 100_000],
        [encode(Hello(PROTOCOL + 1))],
        [encode(["submit", 1, [["", "a", b""]]])],
        [b"\0" * (17 * 1024 * 1024)],
    ]


@pytest.mark.parametrize("socket_name", ["tasks.sock", "workers.sock"])
def test_garbage_is_counted_and_dropped(jobs, waiting, socket_name):
    daemon = jobs()
    path = str(daemon.runtime / socket_name)
    context = zmq.Context()
    try:
        for frames in _garbage():
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 2000
                dealer.connect(f"ipc://{path}")
                dealer.send_multipart(frames)
                if socket_name == "workers.sock":
                    dealer.send(encode(WorkerHello(PROTOCOL, "0" * 32)))  # an invented token
                    dealer.send(encode(Done([])))
    finally:
        context.term()
    with socket.socket(socket.AF_UNIX) as raw:  # not ZeroMQ at all
        raw.connect(path)
        raw.sendall(os.urandom(10_000))
    with daemon.client() as client:
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1
    assert daemon.process.poll() is None
    said = "from a client" if socket_name == "tasks.sock" else f"on {socket_name}"
    waiting("it is in the log", lambda: f"dropped a malformed message {said}" in daemon.log())


def test_the_same_id_with_another_body_is_refused(jobs):
    daemon = jobs(size=1)
    context = zmq.Context()
    first = TaskSpec("one", "jobs.nap", b"\x81\xa7seconds\x01")
    other = TaskSpec("one", "jobs.echo", b"\x80")
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"ipc://{daemon.tasks_socket}")
            for message in (
                Hello(PROTOCOL),
                Submit(1, [first]),
                Submit(2, [first]),
                Submit(3, [other]),
            ):
                dealer.send(encode(message))
            from musterd.ipc.wire.codec import decode_server
            from musterd.ipc.wire.messages import Accepted

            accepted = {}
            while len(accepted) < 3:
                assert dealer.poll(20_000)
                message = decode_server(dealer.recv())
                if isinstance(message, Accepted):
                    accepted[message.request] = message.rejected
    finally:
        context.term()
    assert accepted[1] == accepted[2] == []
    assert accepted[3][0].code == "InvalidTask"
    assert issubclass(InvalidTask, Exception)


def test_without_durability_it_works_too(jobs):
    daemon = jobs(store__durability="memory")
    with daemon.client() as client:
        handles = client.submit_many([("jobs.echo", {"value": n}) for n in range(500)])
        assert [handle.result(20) for handle in handles] == list(range(500))
        assert client.task(handles[3].id).result(20) == 3


def test_musterctl_sees_and_steers_the_fleet(jobs):
    daemon = jobs(size=2)
    assert daemon.ctl("status").returncode == 0
    done = daemon.ctl("submit", "jobs.echo", "value=5", "--wait")
    assert (done.returncode, done.stdout.strip()) == (0, "5")
    assert daemon.ctl("submit", "jobs.fail", "text=x", "--wait").returncode == 1
    assert daemon.ctl("submit", "no.such", "--wait").returncode == 4
    assert daemon.ctl("scale", "jobs", "3").returncode == 0
    assert daemon.pool("jobs").running == 3
    assert daemon.ctl("stop", "jobs/2").returncode == 0
    assert daemon.worker("jobs/2").state == "STOPPED"
    assert daemon.ctl("status").returncode == 3
    assert daemon.ctl("start", "all").returncode == 0
    before = daemon.worker("jobs/0").pid
    assert daemon.ctl("restart", "jobs/0").returncode == 0
    assert daemon.worker("jobs/0").pid not in (0, before)
    assert daemon.ctl("pid", "jobs/0").stdout.strip() == str(daemon.worker("jobs/0").pid)
    listed = daemon.ctl("--json", "tasks", "--state", "failed")
    assert listed.returncode == 0
    assert "jobs.fail" in listed.stdout
    assert daemon.ctl("status", "nobody").returncode == 4
    assert daemon.ctl("shutdown").returncode == 0
    assert daemon.process.wait(20) == 0
    assert daemon.ctl("status").returncode == 4
    assert daemon.ctl("pid").returncode == 7


def test_a_task_can_be_inspected_while_it_lives_and_after(jobs, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        handle = client.submit("jobs.nap", {"seconds": 60})
        client.flush()
        waiting("it runs", lambda: handle.status().state == "running")
        assert handle.status().worker == "jobs/0"
        handle.cancel()
        waiting("it is cancelled", lambda: handle.status().state == "cancelled")
    found = daemon.ask(rpc.GetTask(id=handle.id))
    assert found["state"] == "cancelled"


def test_worker_titles_name_pool_slot_and_task(jobs, waiting):
    daemon = jobs(size=1)
    with daemon.client() as client:
        handle = client.submit("jobs.nap", {"seconds": 60})
        client.flush()
        worker = waiting("it runs", lambda: daemon.worker("jobs/0").pid)
        title = Path(f"/proc/{worker}/cmdline")
        waiting(
            "the title", lambda: title.read_bytes().strip(b"\0") == b"musterd: worker jobs/0 nap"
        )
        handle.cancel()


def test_clients_of_other_users_are_kept_out(jobs):
    daemon = jobs()
    assert (daemon.runtime / "workers.sock").stat().st_mode & 0o777 == 0o600
    assert (daemon.runtime / "tasks.sock").stat().st_mode & 0o777 == 0o660
    assert (daemon.runtime / "control.sock").stat().st_mode & 0o777 == 0o660


def test_a_client_of_a_daemon_that_is_not_there_says_so(tmp_path):
    from musterd import NotConnected

    client = Client(str(tmp_path / "tasks.sock"), connect_timeout=0.2)
    with pytest.raises(NotConnected, match=r"tasks\.sock"):
        client.submit("a.b").result(5)
    with pytest.raises(NotConnected, match=r"tasks\.sock"):  # the timeout is over
        client.close(timeout=0.1)
