"""Workers that hang at start, at work and idle: found, dumped, killed, replaced; nothing lost.

Each hangs in a way that its own code cannot prevent: stopped by a signal, in an endless loop in C
that holds the interpreter, in a deadlock of C, in a loop that swallows every exception.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Musters

WAYS = ("stop", "loop", "deadlock", "stubborn")


@pytest.fixture
def hangs(muster: Musters) -> Callable[..., Any]:
    def make(pools: dict[str, dict[str, Any]], *, wait: bool = True) -> Any:
        made = muster(
            {name: {"worker": "hung_jobs:Hangs", **keys} for name, keys in pools.items()},
            start=False,
        )
        shutil.copy(Path(__file__).with_name("hung_jobs.py"), made.folder)
        return made.start(wait=wait)

    return make


def test_tasks_that_hang_are_ended_from_outside_and_tried_again(hangs, waiting):
    daemon = hangs({"jobs": {"size": len(WAYS)}})
    with daemon.client() as client:
        handles = [
            client.submit("jobs.work", {"how": how, "marker": f"{copy}{how}"})
            for how in WAYS
            for copy in "ab"
        ]
        assert [handle.result(110) for handle in handles] == [2] * len(handles)
    log = daemon.log()
    assert daemon.pool("jobs").lost == {"hung": len(handles)}
    assert log.count("it did not stop at its timeout") >= len(handles)
    assert log.count("in hang") >= len(handles), "the stacks of each are in the log"


def test_workers_that_hang_while_they_start_are_replaced(hangs, waiting):
    pools = {
        how: {"options": {"open": how}, "start_timeout": "6s", "restart": {"base": "1ms"}}
        for how in WAYS
    }
    daemon = hangs(pools)
    with daemon.client() as client:
        for how in WAYS:
            assert client.submit(f"{how}.echo", {"value": 1}).result(60) == 1
    for how in WAYS:
        assert daemon.pool(how).lost == {"hung": 1}, how
    assert daemon.log().count("in hang") >= len(WAYS)


def test_workers_that_hang_while_idle_are_found_though_tasks_keep_coming(hangs, waiting):
    daemon = hangs({"jobs": {"size": 3, "heartbeat_timeout": "1500ms"}})
    with daemon.client() as client:
        client.submit("jobs.later", {"how": "loop"}).result(30)
        workers = daemon.pool("jobs").workers
        os.kill(next(each.pid for each in workers if not each.tasks_done), signal.SIGSTOP)
        handles = [
            client.submit("jobs.echo", {"value": n}, delay=n * 0.02, timeout=60) for n in range(150)
        ]
        assert [handle.result(100) for handle in handles] == list(range(150))
        waiting("both are found", lambda: daemon.pool("jobs").lost == {"hung": 2})
        waiting("both are back", lambda: daemon.pool("jobs").running == 3)
    assert daemon.pool("jobs").failed == 0
