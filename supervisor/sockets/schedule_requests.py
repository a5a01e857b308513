"""What clients ask about schedules, as events; two kinds of questions are answered by the loop."""

import re

from msgspec import Struct

from musterd.ipc.wire.schedule_messages import (
    DeleteSchedules,
    PauseSchedule,
    PutSchedules,
    RunSchedule,
    SchedulePut,
)
from musterd.supervisor.core.model import schedule_events
from musterd.supervisor.core.model.runs import RUN_PREFIX

_RUN_ID = re.compile(r"[0-9a-f]{1,16}m")  # behind the schedule's name


class PutWanted(Struct, frozen=True, gc=False):
    """A client puts schedules, which are checked before the core hears of them."""

    peer: bytes
    request: int  # the core's
    schedules: list[SchedulePut]


def problem_of(message: object) -> str:
    """Return why a message about schedules means nothing, or ""."""
    if isinstance(message, RunSchedule):
        start = f"{RUN_PREFIX}{message.name}."
        is_run = message.id.startswith(start) and _RUN_ID.fullmatch(message.id, len(start))
        return "" if is_run else f"the id of a run of this schedule is '{start}HEXm'"
    return ""


def event_of(
    peer: bytes, token: int, message: PutSchedules | DeleteSchedules | RunSchedule | PauseSchedule
) -> object:
    match message:
        case PutSchedules(_, schedules):
            return PutWanted(peer, token, schedules)
        case DeleteSchedules(_, names):
            return schedule_events.ScheduleDeleteRequested(names, peer, token)
        case RunSchedule(_, name, id_, again):
            return schedule_events.ScheduleRunRequested(name, peer, token, id_, again)
        case PauseSchedule(_, name, paused):
            return schedule_events.SchedulePauseRequested(name, paused, peer, token)
