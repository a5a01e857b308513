"""Pools that scale up and down automatically, with real workers."""

import time

from musterd.supervisor.api import rpc

QUICK = {"scale_wait": "200ms", "scale_idle": "1s"}


def scalings(daemon) -> list[str]:
    recent = daemon.ask(rpc.Events(follow=False))["recent"]
    return [event["reason"] for event in recent if event["event"] == "pool.scaled"]


def test_a_pool_grows_under_load_and_shrinks_again_and_loses_nothing(jobs, waiting):
    daemon = jobs(size=1, pool={"min": 1, "max": 3, **QUICK})
    with daemon.client() as client:
        handles = client.submit_many([("jobs.nap", {"seconds": 0.3})] * 40)
        waiting("it has grown", lambda: daemon.pool("jobs").running == 3)
        indices = {handle.result(60) for handle in handles}
        assert indices == {0, 1, 2}, "the new workers did nothing"
        waiting("it has shrunk", lambda: len(daemon.pool("jobs").workers) == 1, 60.0)
        status = daemon.pool("jobs")
        assert (status.scaling, status.size, status.min, status.max) == ("auto", 1, 1, 3)
        assert status.scaled.startswith("from 2 to 1: "), status.scaled
        assert (status.succeeded, status.failed, status.restarts) == (40, 0, 0)
        assert client.submit("jobs.echo", {"value": 1}).result(20) == 1
    assert [reason[:11] for reason in scalings(daemon)] == [
        "from 1 to 2",
        "from 2 to 3",
        "from 3 to 2",
        "from 2 to 1",
    ]
    assert "scales 1-3; from 2 to 1: 1 unused for 1 s" in daemon.ctl("status").stdout
    assert daemon.stop() == 0


def test_a_pool_of_nothing_starts_its_first_worker_at_once_and_ends_with_nothing(jobs, waiting):
    daemon = jobs(size=0, pool={"min": 0, "max": 2, "scale_wait": "1h", "scale_idle": "1s"})
    with daemon.client() as client:
        for turn in range(2):
            began = time.monotonic()
            assert client.submit("jobs.echo", {"value": turn}).result(20) == turn
            print(f"the first result came after {(time.monotonic() - began) * 1000:.0f} ms")
            waiting("nobody is left", lambda: not daemon.pool("jobs").workers)
    up, down = "from 0 to 1: a task waits and there is no worker", "from 1 to 0: 1 unused for 1 s"
    assert scalings(daemon) == [up, down] * 2


def test_a_person_says_how_many_and_takes_it_back(jobs, waiting):
    daemon = jobs(size=1, pool={"min": 1, "max": 2, **QUICK}, supervisor__workers_max=4)
    assert daemon.ctl("scale", "jobs", "4").returncode == 0
    status = daemon.pool("jobs")
    assert (status.scaling, status.size, status.running) == ("manual", 4, 4)
    refused = daemon.ctl("scale", "jobs", "5")
    assert refused.returncode == 1
    assert "jobs may have 4 workers" in refused.stderr
    assert "workers_max is 4" in refused.stderr
    assert daemon.ctl("scale", "jobs", "some").returncode == 2
    assert daemon.ctl("scale", "jobs", "auto").returncode == 0
    waiting("it scales by itself", lambda: daemon.pool("jobs").size == 1)


def test_a_worker_in_the_middle_of_its_task_is_not_let_go(jobs, waiting):
    daemon = jobs(size=2, pool={"min": 1, "max": 2, **QUICK})
    with daemon.client() as client:
        naps = {each.id: each for each in client.submit_many([("jobs.nap", {"seconds": 100})] * 2)}
        waiting(
            "both run",
            lambda: {each.task_id for each in daemon.pool("jobs").workers} == naps.keys(),
        )
        first, last = (naps[each.task_id] for each in daemon.pool("jobs").workers)
        first.cancel()
        waiting("the idle one has gone", lambda: len(daemon.pool("jobs").workers) == 1)
        (worker,) = daemon.pool("jobs").workers
        assert (worker.name, worker.state, worker.task_id) == ("jobs/1", "BUSY", last.id)
        last.cancel()
        assert client.submit("jobs.echo", {"value": 2}).result(20) == 2
