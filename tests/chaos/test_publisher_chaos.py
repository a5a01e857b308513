"""The publisher of events is killed again and again: it comes back, and its subscriber goes on."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import zmq

from support.daemon import Muster, Musters
from support.waiting import Waiting

KILLS = 5
SECONDS = 60.0
JOBS = """
from musterd import task

@task
def echo(ctx, value: object = None) -> object:
    return value
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_publisher_comes_back_and_its_subscriber_goes_on(
    muster: Musters,
    waiting: Waiting,
    tmp_path: Path,
    is_long: bool,
    how: int,
) -> None:
    path, kills = tmp_path / "events.sock", KILLS if is_long else 2
    pools = {"jobs": {"worker": "jobs", "size": 1}}
    daemon = muster(pools, start=False, events__publish=f"ipc://{path}")
    (daemon.folder / "jobs.py").write_text(JOBS)
    daemon.start()
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    client = daemon.client()
    try:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RCVTIMEO, 50)
        subscriber.connect(f"ipc://{path}")  # once: ZeroMQ reconnects by itself
        subscriber.subscribe("pool.paused.jobs")
        worker = waiting("a worker", lambda: daemon.worker("jobs/0").pid)
        killed = 0
        for _ in range(kills):
            killed = _next(daemon, waiting, killed)
            waiting("it is heard", lambda: _hears(daemon, subscriber))
            os.kill(killed, how)
            assert client.submit("jobs.echo", {"value": 1}).result(SECONDS) == 1
        _next(daemon, waiting, killed)
        waiting("it is heard", lambda: _hears(daemon, subscriber))
        assert daemon.worker("jobs/0").pid == worker, "no worker noticed"
        assert daemon.log().count("event=events.crashed") == kills
    finally:
        subscriber.close()
        context.term()
    daemon.stop()
    assert not path.exists()


def _next(daemon: Muster, waiting: Waiting, before: int) -> int:
    """Return the pid of a publisher that is up and is not the one before."""

    def found() -> int:
        status = daemon.status().events
        return status.pid if status.state == "up" and status.pid != before else 0

    pid: int = waiting("another publisher is up", found)
    return pid


def _hears(daemon: Muster, subscriber: "zmq.Socket[bytes]") -> bool:
    daemon.ctl("pause", "jobs")
    daemon.ctl("resume", "jobs")
    heard = False
    with contextlib.suppress(zmq.Again):
        while True:  # read all that is there, so that the next event is new
            heard = subscriber.recv_multipart()[0] == b"pool.paused.jobs"
    return heard
