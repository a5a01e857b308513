"""The measurements, the same for every system; they run in its client. Standard library only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tasks

if TYPE_CHECKING:
    from peer import Peer

ANSWER_SECONDS = 120.0  # later answers never come
START_SECONDS = 30.0
LOOK_SECONDS = 0.001
TASKS_MIN, TASKS_MAX = 100, 200_000  # tasks of one throughput round
CALIBRATION_SECONDS = 0.5
WARM_UP = 20  # round trips before the clock starts
HOLD_SECONDS = 3600.0  # duration of the task whose worker is killed
REST_SECONDS = 1.0  # from the beginning of that task to the kill, so that the start is over
PROBE_GAP_SECONDS = 0.05
PROBES_OVER_SECONDS = 1.0  # the longest wait after which another is measured


def ready(peer: Peer, workers: int) -> None:
    """Wait until tasks come back, from all workers as far as one can see."""
    handles = peer.submit_all("nap", [(0.01,)] * (10 * workers))
    for handle in handles:
        peer.result(handle, START_SECONDS)


def throughput(peer: Peer, seconds: float) -> dict[str, float]:
    """Measure from the first submit to the last result, with as many tasks as take that long."""
    count = TASKS_MIN
    for about in (CALIBRATION_SECONDS, seconds):
        took = _run(peer, count)
        count = max(TASKS_MIN, min(TASKS_MAX, int(count / took * about)))
    return {"count": count, "seconds": _run(peer, count)}


def _run(peer: Peer, count: int) -> float:
    began = time.perf_counter()
    right = peer.run_all(count)
    took = time.perf_counter() - began
    if right != count:
        raise RuntimeError(f"{right} of {count} tasks came back right")
    return took


def roundtrip(peer: Peer, seconds: float, most: int) -> list[float]:
    """Return the time of each round trip, one after the other, for that long or that many."""
    for _ in range(WARM_UP):
        _one_trip(peer)
    over = time.perf_counter() + seconds
    times = [_one_trip(peer)]
    while len(times) < most and time.perf_counter() < over:
        times.append(_one_trip(peer))
    return times


def _one_trip(peer: Peer) -> float:
    began = time.perf_counter()
    peer.result(peer.submit("echo", tasks.ARGUMENT), ANSWER_SECONDS)
    return time.perf_counter() - began


def killed(peer: Peer, path: str, next_seconds: float, fate_seconds: float) -> dict[str, Any]:
    """Kill the only worker during its task; measure the next task and the fate of the first.

    {"next": seconds, or None if it did not run, "fate": the end of the killed task}
    """
    held = peer.submit("hold", path, HOLD_SECONDS)
    victim = peer.worker_pid(_pid_in(Path(path)))
    time.sleep(REST_SECONDS)
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    next_took, broke = _next(peer, began, next_seconds)
    if not fate_seconds:
        return {"next": next_took, "fate": ""}
    fate = "runs again"
    try:
        peer.result(held, max(0.1, began + fate_seconds - time.perf_counter()))
    except TimeoutError:
        fate = f"not back within {fate_seconds:g} s"
    except Exception as error:  # noqa: BLE001 - each system has its own
        fate = f"fails: {type(error).__name__}"
    return {"next": next_took, "fate": f"{fate}, with all the others" if broke else fate}


def _next(peer: Peer, began: float, seconds: float) -> tuple[float | None, bool]:
    """Return the time from the kill to the next task's end; whether the whole pool broke."""
    broke = False
    try:
        try:
            peer.result(peer.submit("echo", tasks.ARGUMENT), seconds)
        except TimeoutError:
            raise
        except Exception:  # noqa: BLE001 - the pool itself is gone: as its manual says, a new one
            broke = True
            peer.renew()
            peer.result(peer.submit("echo", tasks.ARGUMENT), seconds)
    except TimeoutError:
        return None, broke
    return time.perf_counter() - began, broke


def _pid_in(path: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return int(text)
        time.sleep(LOOK_SECONDS)
    raise TimeoutError("the task to be killed did not begin")


def urgent(
    peer: Peer, *, path: str, workers: int, backlog: int, spare: int, probes: int
) -> dict[str, Any]:
    """Measure how long urgent tasks wait for their start, behind a long queue of 1 ms naps.

    Where possible, the queue is filled before the workers start. Additional naps keep it long until
    the last urgent task is submitted. Without priorities, one urgent task is enough.
    {"waits": [seconds], "enqueued": seconds}
    """
    if not peer.queues_alone:
        peer.start(workers)
        ready(peer, workers)
    began = time.perf_counter()
    peer.submit("note", path, 0, 0.0)
    peer.submit_all("nap", [(0.001,)] * (backlog + spare))
    enqueued = time.perf_counter() - began
    if peer.queues_alone:
        peer.start(workers)
    _until_exists(Path(path))
    waits = []
    for _ in range(probes if peer.priorities else 1):
        began_ns = time.monotonic_ns()
        started_ns = peer.result(peer.submit("stamp", urgent=True), ANSWER_SECONDS)
        waits.append((started_ns - began_ns) / 1e9)
        if waits[-1] > PROBES_OVER_SECONDS:
            break  # the wait has changed the queue
        time.sleep(PROBE_GAP_SECONDS)
    return {"waits": waits, "enqueued": enqueued}


def _until_exists(path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("no task began")
        time.sleep(LOOK_SECONDS)


def notes(peer: Peer, path: str, count: int, seconds: float) -> int:
    """Submit tasks that each take that long and leave a note; return how many were acknowledged."""
    return len(peer.submit_all("note", [(path, number, seconds) for number in range(count)]))
