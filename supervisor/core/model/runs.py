"""Runs of schedules: which of them are due, and the task of each.

Pure calculation, for the schedules of a daemon (core/tasks/schedules.py) and for those of a cluster
(cluster/scheduler.py). Instants are wall-clock nanoseconds.
"""

from typing import Literal

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import HIGH, Rejection, TaskSpec
from musterd.ipc.wire.schedule_messages import PERHAPS_MADE, STILL_RUNNING
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.timing import Every

RUN_PREFIX = "@"  # begins the id of a task that a schedule made
CATCH_UP_MAX = 100  # the most runs that `catch_up = "all"` makes: the newest
# A run that is at most so late is on time: a busy loop or a quick restart is no downtime.
ON_TIME_NS = 5 * SECOND_NS
# Steered clocks go back by microseconds; only more than this is a step.
STEP_BACK_NS = 2 * SECOND_NS
# A clock that was ahead by more than this was wrong: its instants no longer count as done, or the
# schedule would be silent until the wrong date has come.
WRONG_CLOCK_NS = 24 * 3600 * SECOND_NS


class DueRuns(Struct, frozen=True):
    """The instants to run, oldest first, and how many others were due."""

    instants: tuple[int, ...]
    newest_ns: int  # all instants up to this one are due
    left_out: int = 0
    why: str = ""


def plan_name(policy: SchedulePolicy) -> str:
    """Return task and timing: a schedule with another plan begins anew."""
    return f"{policy.task} {policy.timing}"


def due_runs(policy: SchedulePolicy, last_ns: int, wall_ns: int) -> DueRuns:
    """Return what is due since `last_ns`, as `catch_up` says; there must be something."""
    due = policy.timing.due(last_ns, wall_ns, CATCH_UP_MAX)
    newest_ns, left_out, runs = due.instants[-1], due.older, due.instants
    if policy.catch_up != "all":
        late = policy.catch_up == "none" and wall_ns - newest_ns > ON_TIME_NS
        runs = () if late else (newest_ns,)
        left_out += len(due.instants) - len(runs)
    many = "" if due.counted else "at least "
    why = f"{many}{left_out} were missed and are not caught up with (catch_up = {policy.catch_up})"
    return DueRuns(runs, newest_ns, left_out, why if left_out else "")


# What becomes of a run that is due: it begins, waits for its turn, begins in place of the last run,
# which ends; it is left out, and the last run is tried again at once; or it is left out.
Way = Literal["begins", "waits", "replaces", "hastens", "left out"]


def way_of(policy: SchedulePolicy, *, alive: bool, retrying: bool, asked: bool) -> Way:
    """Return what becomes of a run that is due while others may be `alive`.

    `retrying`: those that are alive have been attempted, and wait for another attempt. `asked`:
    a person asked for one of them and waits for it, so it does not end for another one.
    """
    if not alive or policy.overlap:
        return "begins"
    if policy.catch_up == "all":
        return "waits"
    if not retrying:
        return "left out"
    return "hastens" if asked else "replaces"


def is_by_hand(id_: str) -> bool:
    """Return whether somebody has asked for the run of this id."""
    return id_.endswith("m")


def replaced_why(name: str) -> str:
    """Say why a run that waited for a retry has ended."""
    return f"not tried again: the next run of schedule '{name}' is due"


def hastened_why(id_: str) -> str:
    """Say why no run was made: another one is attempted instead."""
    return f"run {id_}, which somebody waits for, is tried again in its place"


def is_set_back(policy: SchedulePolicy, ahead_ns: int) -> bool:
    """Return whether `last_ns` lies too far ahead of the clock to wait for it."""
    return ahead_ns > (STEP_BACK_NS if isinstance(policy.timing, Every) else WRONG_CLOCK_NS)


def set_back_why(ahead_ns: int) -> str:
    return f"the clock was set back by at least {ahead_ns // SECOND_NS} s: it begins anew"


def run_spec(
    policy: SchedulePolicy,
    instant_ns: int,
    turn: int,
    *,
    site: str = "",
    delay_ns: int = 0,
    by_hand: bool = False,
) -> TaskSpec:
    """Return the task of an instant; `turn` counts how often instants may have come again."""
    mark = f"-{turn}" if turn else ""
    return TaskSpec(
        id=f"{RUN_PREFIX}{policy.name}.{instant_ns:x}{mark}{'m' if by_hand else ''}",
        name=policy.task,
        args=policy.args,
        priority=min(policy.priority, HIGH) if by_hand else policy.priority,  # a person waits
        target=policy.target or site,
        timeout_ns=policy.timeout_ns,
        max_retries=policy.max_retries,
        delay_ns=delay_ns,
        key=policy.key,
        cache_ns=policy.cache_ns,
        debounce_ns=policy.debounce_ns,
        watch=policy.watching.rules if policy.notify else b"",
        session=policy.session,
    )


def asked_ns(id_: str) -> int:
    """Return when somebody asked for the run of this id, by the clock of that time; 0 for none."""
    digits = id_.rpartition(".")[2].rstrip("m").partition("-")[0]
    return int(digits, 16) if digits else 0


def perhaps_made(name: str, id_: str) -> Rejection:
    """Refuse to repeat a run that may have been made, has ended, and was followed by others."""
    return Rejection(
        id_,
        PERHAPS_MADE,
        f"schedule '{name}' was run by others since run {id_} was asked for, which may have been "
        f"made: look with `musterctl task {id_}`, or ask for another run",
    )


def still_running(name: str, alive: str) -> Rejection:
    """Refuse to run a schedule by hand beside its last run."""
    return Rejection(
        alive,
        STILL_RUNNING,
        f"run {alive} of schedule '{name}' has not ended: wait for it, cancel it, or allow a "
        "second one with overlap = true",
    )
