"""Measure how long the tasks of a killed node are away.

The node that is killed runs tasks that would take an hour; each ends at once when it runs again.
The clock runs from `kill -9` of the daemon to the last of these ends, at another node.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from cluster_plan import Stage
from figures import SECONDS, Figure, Measure
from fleet import BENCH_WORKERS, BenchError, Fleet
from nodes import node
from plan import ANSWER_SECONDS

HOLD_SECONDS = 3600.0
LOOK_SECONDS = 0.005
# Nobody is reaped by a connection younger than the lease: the surviving node is older when the
# other one is killed.
OLDER_SECONDS = 2.0


def measure(stage: Stage) -> Measure:
    lease, held = stage.plan.lease_seconds, stage.plan.held
    figures = [
        Figure(
            key=f"loss.{key}",
            label=f"all {held} tasks of the killed node have run elsewhere{how}",
            unit=SECONDS,
            samples=[],
        )
        for key, how in (("gone", ""), ("restarted", ", it is restarted at once"))
    ]
    for number in range(stage.plan.kills):
        for figure in figures:
            place = stage.folder / f"{figure.key}.{number}"
            figure.samples.append(_loss(stage, place, restart=figure.key == "loss.restarted"))
    title = f'Loss of a node: kill -9, lease = "{lease}s"'
    return Measure(name="loss", title=title, figures=figures)


def _loss(stage: Stage, place: Path, *, restart: bool) -> float:
    """Return the seconds from the kill to the last result."""
    plan = stage.plan
    place.mkdir()
    url = stage.server.cluster()
    pools = {"bench": (BENCH_WORKERS, plan.held)}
    with ExitStack() as stack:
        stack.callback(stage.server.drop, url)
        victim, other = (
            node(place / name, name, url, pools, f"{plan.lease_seconds}s")
            for name in ("victim", "other")
        )
        stack.enter_context(victim)
        ids = _occupy(victim, place, plan.held)
        stack.enter_context(other)
        time.sleep(plan.lease_seconds + OLDER_SECONDS)
        client = stack.enter_context(other.client())
        began = time.perf_counter()
        os.kill(victim.pid, signal.SIGKILL)
        if restart:
            victim.wait()
            victim.start(wait=False)
        for each in ids:
            client.task(each).result(ANSWER_SECONDS)
        return time.perf_counter() - began


def _occupy(fleet: Fleet, place: Path, held: int) -> list[str]:
    """Have a node run tasks that do not end; return their ids."""
    paths = [place / f"task{number}" for number in range(held)]
    with fleet.client() as client:
        handles = client.submit_many(
            [("bench.hold", {"path": str(path), "seconds": HOLD_SECONDS}) for path in paths]
        )
        client.flush()
    _wait_for(lambda: all(path.exists() for path in paths), "the tasks did not begin")
    return [handle.id for handle in handles]


def _wait_for(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(problem)
        time.sleep(LOOK_SECONDS)
