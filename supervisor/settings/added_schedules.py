"""Sections of schedules that are added at run time, checked as files are, made into policies."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.schedule_messages import INVALID_SCHEDULE
from musterd.supervisor.config.load import load_entry
from musterd.supervisor.config.redact import problem_of
from musterd.supervisor.config.schema import Config, ScheduleConfig, schedule_conflicts
from musterd.supervisor.config.section import Conflict
from musterd.supervisor.config.shared import SharedConfig
from musterd.supervisor.core.model.schedule_events import AddedSchedule
from musterd.supervisor.settings.policy import schedule_policy

# Keys that name code, or files of this machine.
ONLY_IN_FILES = ("foreach", "login")
POOLS_SHOWN_MAX = 20  # in a message


def read_puts(
    config: Config, puts: list[tuple[str, bytes]]
) -> tuple[list[AddedSchedule], list[Rejection]]:
    """Return the schedules that may be put, and why the others may not."""
    return _divided([read_added(config, name, section) for name, section in puts])


def _divided(read: list[AddedSchedule]) -> tuple[list[AddedSchedule], list[Rejection]]:
    rejected = [
        Rejection(each.name, INVALID_SCHEDULE, each.problem) for each in read if each.problem
    ]
    return [each for each in read if not each.problem], rejected


def read_added(config: Config, name: str, section: bytes) -> AddedSchedule:
    """Return a schedule as the configuration in force lets it run, or with all its problems."""

    def conflicts(made: ScheduleConfig) -> Iterator[Conflict]:
        yield from schedule_conflicts(config, made)
        yield from _shared(config, made)

    return _read(name, section, conflicts)


def read_shared(
    pools: Iterable[str], redact: tuple[str, ...], puts: list[tuple[str, bytes]]
) -> tuple[list[AddedSchedule], list[Rejection]]:
    """Return the schedules that may be put into a cluster with these pools, and why the others may
    not: checked as `musterctl cluster apply` checks files."""
    known = sorted(pools)

    def read(name: str, section: bytes) -> AddedSchedule:
        def conflicts(made: ScheduleConfig) -> Iterator[Conflict]:
            pool = made.task.partition(".")[0]
            if pool not in known:
                there = ", ".join(known[:POOLS_SHOWN_MAX]) or "none"
                yield ("task",), f"has the pool '{pool}', which no node has: there are {there}"
            for path, why in SharedConfig(schedule={name: made}).conflicts():
                yield path[2:], why
            if problem := problem_of(made.task, made.args, redact):
                yield ("args",), problem

        return _read(name, section, conflicts)

    return _divided([read(*each) for each in puts])


def _read(
    name: str, section: bytes, conflicts: Callable[[ScheduleConfig], Iterator[Conflict]]
) -> AddedSchedule:
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
    made, found = load_entry(ScheduleConfig, name, allowed, conflicts)
    if made is None or problems or found:
        return AddedSchedule(name, section, None, "\n".join([*problems, *found]))
    return AddedSchedule(name, section, schedule_policy(name, made))


def _shared(config: Config, schedule: ScheduleConfig) -> "list[Conflict]":
    pool = schedule.task.partition(".")[0]
    if not config.cluster.shares(pool):
        return []
    why = (
        f"has the pool '{pool}', which the machines of a cluster share: use `musterctl "
        "--cluster schedule add`, or write it into a file for `musterctl cluster apply FILE`"
    )
    return [(("task",), why)]
