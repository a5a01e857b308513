"""The order of a run: rounds in which the systems take turns, then the tests that run once."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from figures import percentile
from fleet import BenchError
from msgspec import Struct
from versus.results import NEXT, P50, P99, RATE, WAIT, WEIGHT, WORKERS, Outcome, Plan, Survival
from versus.systems import KILLED, MEMORY, ROUNDTRIP, SURVIVAL, THROUGHPUT, URGENT, System
from versus.turn import Turn

REST_SECONDS = 0.5  # before the memory of an idle system is measured
SLOW_SECONDS = 5.0  # a next task that took longer is not measured again
BROKER_DOWN_SECONDS = 0.3
ORPHAN_SECONDS = 2.0  # a process that survives its main process for that long stays
LOOK_SECONDS = 0.05

Pair = tuple[System, Outcome]


class Stage(Struct, frozen=True, kw_only=True):
    """Input of every part of the run."""

    plan: Plan
    place: Path  # on a disk
    fsync: str  # of Redis
    measures: frozenset[str]
    say: Callable[[str], None]  # reports progress
    tell: Callable[[str], None]  # reports problems
    over: threading.Event  # set when the benchmark is interrupted

    def wanted(self, system: System, *names: str) -> frozenset[str]:
        return self.measures & frozenset(system.measures) & frozenset(names)

    @contextmanager
    def turn(self, pair: Pair, what: str) -> Iterator[Turn]:
        system, outcome = pair
        self.say(f"{system.label}: {what}")
        try:
            with Turn(system, self.place, self.fsync) as turn:
                outcome.version = turn.hello["version"]
                yield turn
        except BenchError as error:  # the other systems are still measured
            self.tell(str(error))
            outcome.problems.append(f"{what}: {str(error).splitlines()[0]}")


def run(stage: Stage, pairs: list[Pair]) -> None:
    """Fill in the outcomes."""
    for number in range(stage.plan.rounds):
        for pair in pairs:
            _steady(stage, pair, f"round {number + 1} of {stage.plan.rounds}")
    for _ in range(stage.plan.kills):
        for pair in pairs:
            _killed(stage, pair)
    for pair in pairs:
        _urgent(stage, pair)
    _untimed(stage, pairs)


def _steady(stage: Stage, pair: Pair, what: str) -> None:
    system, outcome = pair
    plan = stage.plan
    wanted = stage.wanted(system, MEMORY, THROUGHPUT, ROUNDTRIP)
    if not wanted:
        return
    with stage.turn(pair, what) as turn:
        turn.ask("start", workers=WORKERS)
        turn.ask("ready", workers=WORKERS)
        time.sleep(REST_SECONDS)
        if MEMORY in wanted:
            outcome.add(WEIGHT, [turn.weigh()])
        if ROUNDTRIP in wanted:
            times = turn.ask("roundtrip", seconds=plan.roundtrip_seconds, most=plan.roundtrips)
            outcome.add(P50, [percentile(times, 0.50)])
            outcome.add(P99, [percentile(times, 0.99)])
        if THROUGHPUT in wanted:
            done = turn.ask("throughput", seconds=plan.throughput_seconds)
            outcome.add(RATE, [done["count"] / done["seconds"]])


def _killed(stage: Stage, pair: Pair) -> None:
    """Kill the only worker; repeat only while the recovery is short."""
    system, outcome = pair
    if not stage.wanted(system, KILLED):
        return
    before = outcome.figures.get(NEXT)
    if before is not None and (not before.samples or before.high > SLOW_SECONDS):
        return
    with stage.turn(pair, "its worker is killed, the next task") as turn:
        found = _kill_worker(turn, next_seconds=stage.plan.patience_seconds, fate_seconds=0)
        outcome.add(NEXT, [found["next"]] if found["next"] is not None else [])


def _fate(stage: Stage, pair: Pair) -> None:
    """Note the fate of the task whose worker is killed."""
    patience = stage.plan.patience_seconds
    with stage.turn(pair, "its worker is killed, the task it had") as turn:
        found = _kill_worker(turn, next_seconds=patience, fate_seconds=patience)
        pair[1].killed_task = found["fate"]


def _kill_worker(turn: Turn, **seconds: float) -> dict[str, Any]:
    turn.ask("start", workers=1)
    turn.ask("ready", workers=1)
    return turn.ask("killed", path=str(turn.folder / "hold"), **seconds)


def _urgent(stage: Stage, pair: Pair) -> None:
    system, outcome = pair
    plan = stage.plan
    if not stage.wanted(system, URGENT):
        return
    with stage.turn(pair, f"an urgent task behind {plan.backlog:,}") as turn:
        found = turn.ask(
            "urgent",
            path=str(turn.folder / "begun"),
            workers=WORKERS,
            backlog=plan.backlog,
            spare=plan.spare,
            probes=plan.probes,
        )
        outcome.add(WAIT, found["waits"])


def _untimed(stage: Stage, pairs: list[Pair]) -> None:
    """Run the tests without a clock, of several systems side by side."""
    with ThreadPoolExecutor(stage.plan.at_once) as threads:
        futures = [
            threads.submit(find_out, stage, pair)
            for pair in pairs
            for name, find_out in ((KILLED, _fate), (SURVIVAL, _survival))
            if stage.wanted(pair[0], name)
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stage.over.set()
            threads.shutdown(cancel_futures=True)
            raise


def _survival(stage: Stage, pair: Pair) -> None:
    if pair[0].redis:
        _broker_killed(stage, pair)
    _main_killed(stage, pair)


def _broker_killed(stage: Stage, pair: Pair) -> None:
    """Kill Redis at work and start it again on its file; touch nothing else."""
    with stage.turn(pair, "Redis is killed") as turn:
        path = _at_work(stage, turn)
        assert turn.redis is not None
        turn.redis.kill()
        time.sleep(BROKER_DOWN_SECONDS)
        turn.redis.start()
        pair[1].broker_killed = _count(stage, path)


def _main_killed(stage: Stage, pair: Pair) -> None:
    """Kill the main process at work and start it again; leave orphans alone."""
    with stage.turn(pair, "its main process is killed") as turn:
        path = _at_work(stage, turn)
        turn.look()
        if turn.hello["in_process"]:
            turn.kill_client()
        else:
            for pid in turn.ask("mains"):
                psutil.Process(pid).kill()
        time.sleep(ORPHAN_SECONDS)
        left = len(turn.look())
        if turn.hello["in_process"]:
            turn.begin()
        turn.ask("start", workers=WORKERS)
        survival = _count(stage, path)
        survival.left_behind = left
        pair[1].main_killed = survival


def _at_work(stage: Stage, turn: Turn) -> Path:
    """Wait until some of the tasks are done and all are acknowledged."""
    plan = stage.plan
    path = turn.folder / "notes"
    turn.ask("start", workers=WORKERS)
    turn.ask("ready", workers=WORKERS)
    turn.ask("notes", path=str(path), count=plan.notes, seconds=plan.note_seconds)
    deadline = time.monotonic() + plan.patience_seconds
    while len(_lines(path)) < plan.notes_before and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return path


def _count(stage: Stage, path: Path) -> Survival:
    """Count the finished tasks when all are finished, or when the time is over."""
    deadline = time.monotonic() + stage.plan.patience_seconds
    while time.monotonic() < deadline and not stage.over.is_set():
        if len(set(_lines(path))) == stage.plan.notes:
            break
        time.sleep(LOOK_SECONDS)
    lines = _lines(path)
    return Survival(
        acknowledged=stage.plan.notes,
        finished=len(set(lines)),
        twice=sum(lines.count(each) > 1 for each in set(lines)),
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
