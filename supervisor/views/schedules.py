"""Show schedules: what the core and the store know of each, for clients and for people."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import msgspec

from musterd.ipc.wire.messages import QUEUED
from musterd.ipc.wire.schedule_messages import ScheduleView
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.core.tasks.schedule import Schedule
from musterd.supervisor.text.units import format_duration
from musterd.supervisor.views import fleet as fleet_view

UNUSABLE = "unusable"
STALE = "stale"  # for lists: those that keep failing, whatever their state
# The states of a schedule.
STATES = ("active", "paused", "disabled", UNUSABLE)


def find_schedule(fleet: Fleet, name: str, now_ns: int) -> ScheduleView | None:
    """Return a schedule, or None if there is none of this name."""
    schedule = fleet.schedules.get(name)
    if schedule is not None:
        return _running(fleet, schedule, now_ns)
    if name in fleet.added.sections:
        return _unusable(fleet, name)
    return None


def list_schedules(
    fleet: Fleet, now_ns: int, *, after: str = "", limit: int, state: str = ""
) -> tuple[list[ScheduleView], bool]:
    """Return schedules by name, those after one, and whether there are more."""
    names: Iterable[str] = fleet.schedules.keys() | fleet.added.unusable.keys()
    if state == STALE:
        schedules = fleet.schedules.items()
        names = [name for name, each in schedules if each.record.watched.stale]
    elif state:
        names = [name for name in names if _state(fleet, name) == state]
    ordered = sorted(names)
    start = bisect_right(ordered, after) if after else 0
    shown = [find_schedule(fleet, name, now_ns) for name in ordered[start : start + limit]]
    return [each for each in shown if each is not None], start + limit < len(ordered)


def _state(fleet: Fleet, name: str) -> str:
    schedule = fleet.schedules.get(name)
    if schedule is None:
        return UNUSABLE
    if not schedule.policy.enabled:
        return "disabled"
    return "paused" if schedule.record.paused else "active"


def _running(fleet: Fleet, schedule: Schedule, now_ns: int) -> ScheduleView:
    policy, record = schedule.policy, schedule.record
    last_state = record.state
    task = fleet.tasks.get(record.task)
    if task is not None:
        last_state = fleet_view.live_view(task, now_ns).state
    elif record.task and schedule.alive == record.task:
        last_state = QUEUED
    hidden = fleet.added.unusable.get(policy.name)
    return ScheduleView(
        name=policy.name,
        state=_state(fleet, policy.name),
        task=policy.task,
        when=_when(schedule),
        origin=policy.origin,
        section=fleet.added.sections.get(policy.name, b"") if hidden is None else b"",
        problem=hidden.problem if hidden is not None else "",
        next_ns=(schedule.next_ns or 0) if schedule.active else 0,
        last_ns=record.ran_ns,
        last_task=record.task,
        last_state=last_state,
        runs=record.runs,
        skipped=record.skipped,
        skipped_why=schedule.why,
        failures=record.watched.failures,
        stale=record.watched.stale,
    )


def _when(schedule: Schedule) -> str:
    timing = schedule.policy.timing
    if isinstance(timing, Every):
        return f"every {format_duration(timing.every_ns)}"
    return f"{timing.expression} ({timing.zone})"


def _unusable(fleet: Fleet, name: str) -> ScheduleView:
    section = fleet.added.sections[name]
    keys = section_keys(section)
    every = keys.get("every")
    return ScheduleView(
        name=name,
        state=UNUSABLE,
        task=str(keys.get("task", "")),
        when=f"every {every}" if every else str(keys.get("cron", "")),
        section=section,
        problem=fleet.added.unusable[name].problem,
    )


def section_keys(section: bytes) -> dict[str, Any]:
    """Return the keys of a schedule as they were put; {} where it was not put."""
    try:
        keys = msgspec.msgpack.decode(section) if section else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # of another version
        return {}
    return keys if isinstance(keys, dict) else {}
