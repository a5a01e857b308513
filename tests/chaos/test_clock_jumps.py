"""The clock of a running daemon jumps: a year ahead, back to 1970, to and fro.

The daemon forgets nothing, no task waits longer or shorter, and the jump is logged once. The clock
is that of storm/shim.c: the machine's own is not touched.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from storm.shim import Shim

from musterd import TaskFailed
from support.daemon import OUR_FRAME, Muster, Musters
from support.waiting import Waiting

SECONDS = 60
YEAR = 365 * 86400
DELAY_SECONDS = 5.0
FLAPS = 2

KEEPER = """
from musterd import Worker
from musterd import task

class Keeper(Worker):
    @task
    def echo(self, ctx, value: object = None) -> object:
        return value

    @task(max_retries=0)
    def fail(self, ctx) -> None:
        raise ValueError("no")
"""


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    made = Shim(tmp_path)
    yield made
    made.close()


@pytest.fixture
def keeper(muster: Musters, shim: Shim) -> Any:
    made = muster(
        {"keeper": {"worker": "keeper:Keeper", "size": 1}},
        start=False,
        store__keep_results="10m",
        schedule__tick={"task": "keeper.echo", "every": "1s", "args": {"value": "tick"}},
    )
    Path(made.folder, "keeper.py").write_text(KEEPER)
    made.popen_options = {"env": {**os.environ, **shim.environment}}
    return made.start()


def ticks(daemon: Muster) -> int:
    """Count the runs of the schedule that have ended."""
    return int(daemon.log().count("task=@tick."))


@pytest.mark.timeout(180)
def test_a_clock_that_jumps_under_a_running_daemon_loses_nothing(
    keeper: Muster, shim: Shim, waiting: Waiting
) -> None:
    states: dict[str, str] = {}

    def known() -> dict[str, str]:
        with keeper.client() as asking:
            return {id_: asking.task(id_).status(SECONDS).state for id_ in states}

    with keeper.client() as client:
        cached = client.submit("keeper.echo", {"value": 1}, key="once", cache=600)
        assert cached.result(SECONDS) == 1
        dead = client.submit("keeper.fail")
        with pytest.raises(TaskFailed):
            dead.result(SECONDS)
        kept = client.submit("keeper.echo", {"value": 2}, delay=86400, expires=2 * 86400)
        soon = client.submit("keeper.echo", {"value": 3}, delay=DELAY_SECONDS, expires=3600)
        for handle in (kept, soon):
            handle.ack(SECONDS)
        began = time.monotonic()
        states = {cached.id: "succeeded", dead.id: "failed", kept.id: "waiting"}

        for ahead, side in ((YEAR, "ahead of"), (60 - time.time(), "behind")):
            shim.set_clock(ahead)
            waiting("it is doubted", lambda side=side: side in keeper.status().problem)
            assert keeper.ctl("clock").returncode == 1
            before = ticks(keeper)
            waiting("the schedule goes on", lambda before=before: ticks(keeper) > before + 1)
            assert known() == states
            again = client.submit("keeper.echo", {"value": 4}, key="once", cache=600)
            assert (again.result(SECONDS), again.cached) == (1, True)
        assert soon.result(SECONDS) == 3
        assert time.monotonic() - began >= DELAY_SECONDS - 1, "no delay is shorter for it"
        shim.set_clock(0)
        waiting("it is believed again", lambda: keeper.ctl("clock").returncode == 0)
        assert known() == states

        for number in range(FLAPS):
            for ahead in (3600, YEAR, 0):
                shim.set_clock(ahead)
                time.sleep(1.0 + 0.1 * number)  # the daemon reads the clock once a second
        waiting("it is believed once more", lambda: keeper.ctl("clock").returncode == 0)
        assert known() == states
    log = keeper.log()
    for event in ("doubted", "trusted", "stepped"):
        assert log.count(f"event=clock.{event}") <= 2, "a word a minute is enough"
    assert log.count("event=schedule.reset") <= 2

    shim.set_clock(YEAR)
    waiting("it is doubted", lambda: keeper.ctl("clock").returncode == 1)
    assert keeper.ctl("clock", "accept").returncode == 0
    assert keeper.ctl("clock").returncode == 0
    waiting("the problem is over", lambda: keeper.status().problem == "")
    before = ticks(keeper)
    waiting("the schedule goes on", lambda: ticks(keeper) > before + 1)
    assert known()[kept.id] == "waiting", "its delay was given in seconds, not as a date"
    assert keeper.stop() == 0
    assert not OUR_FRAME.search(keeper.log())
