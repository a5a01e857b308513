"""Sections of schedules that are added at run time, checked as files are, made into policies."""

from typing import Any

import msgspec

from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import INVALID_SCHEDULE
from musterd.supervisor.config.load import load_entry
from musterd.supervisor.config.schema import Config, ScheduleConfig, schedule_conflicts
from musterd.supervisor.config.section import Conflict
from musterd.supervisor.core.model.schedule_events import AddedSchedule
from musterd.supervisor.settings.policy import schedule_policy

# Keys that name code, or files of this machine.
ONLY_IN_FILES = ("foreach", "login")


def read_puts(
    config: Config, puts: list[tuple[str, bytes]]
) -> tuple[list[AddedSchedule], list[Rejection]]:
    """Return the schedules that may be put, and why the others may not."""
    read = [read_added(config, name, section) for name, section in puts]
    rejected = [
        Rejection(each.name, INVALID_SCHEDULE, each.problem) for each in read if each.problem
    ]
    return [each for each in read if not each.problem], rejected


def read_added(config: Config, name: str, section: bytes) -> AddedSchedule:
    """Return a schedule as the configuration in force lets it run, or with all its problems."""
    try:
        values: Any = msgspec.msgpack.decode(section)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return AddedSchedule(name, section, None, f"schedule '{name}': cannot be read: {error}")
    if not isinstance(values, dict):
        why = "is not a table of keys: give its keys by their names"
        return AddedSchedule(name, section, None, f"schedule '{name}': {why}")
    problems = [
        f"schedule '{name}': key '{key}': is for configuration files only: write it there"
        for key in ONLY_IN_FILES
        if key in values
    ]
    allowed = {key: value for key, value in values.items() if key not in ONLY_IN_FILES}

    def conflicts(made: ScheduleConfig) -> Any:
        yield from schedule_conflicts(config, made)
        yield from _shared(config, made)

    made, found = load_entry(ScheduleConfig, name, allowed, conflicts)
    if made is None or problems or found:
        return AddedSchedule(name, section, None, "\n".join([*problems, *found]))
    return AddedSchedule(name, section, schedule_policy(name, made))


def _shared(config: Config, schedule: ScheduleConfig) -> "list[Conflict]":
    pool = schedule.task.partition(".")[0]
    if not config.cluster.shares(pool):
        return []
    why = (
        f"has the pool '{pool}', which the machines of a cluster share: write the schedule into "
        "a file, and use `musterctl cluster apply FILE`"
    )
    return [(("task",), why)]
