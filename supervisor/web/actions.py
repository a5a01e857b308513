"""Actions of the dashboard, each translated into one request to the daemon.

    POST /api/actions     {"action": "scale", "pool": "parser", "size": 3}

No action waits for workers: the page shows the outcome.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from musterd.ipc.resilience.policy import POOL_SIZE_MAX
from musterd.ipc.wire.messages import Id, Name
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import (
    RetryResult,
    ScheduleKeys,
    SchedulesPut,
    ScheduleStatus,
    TaskList,
)
from musterd.supervisor.config.secrets import HIDDEN

IDS_MAX = 100  # as many as the page lists
KEYS_MAX = 100  # of a schedule; it has some 30
WORDS_CHARS_MAX = 300  # of the names of keys, in the log

Ids = Annotated[list[Id], Meta(min_length=1, max_length=IDS_MAX)]


class Action(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """Base of all actions; the tag is the class name in lower case."""

    def request(self) -> rpc.Params:
        raise NotImplementedError

    def outcome(self, answered: Raw) -> str:
        """Return the outcome in words; RpcError if nothing was done."""
        raise NotImplementedError

    def words(self) -> str:
        """Return the action for the log."""
        return f"{self.__struct_config__.tag} {msgspec.json.encode(self).decode()}"


class Retry(Action, frozen=True):
    ids: Ids

    def request(self) -> rpc.Params:
        return rpc.RetryTasks(ids=self.ids)

    def outcome(self, answered: Raw) -> str:
        told = msgspec.json.decode(answered, type=RetryResult)
        if not told.retried:
            raise rpc.RpcError(rpc.FAILED, told.refused[0].reason)
        why = f"; {len(told.refused)} refused: {told.refused[0].reason}" if told.refused else ""
        return f"{_tasks(len(told.retried))} queued again{why}"


class Cancel(Action, frozen=True):
    ids: Ids

    def request(self) -> rpc.Params:
        return rpc.CancelTasks(ids=self.ids, no_block=True)

    def outcome(self, answered: Raw) -> str:
        found = msgspec.json.decode(answered, type=TaskList)
        if not found.tasks:
            raise rpc.RpcError(rpc.NO_SUCH_NAME, f"no such task: {found.missing[0]}")
        return f"{_tasks(len(found.tasks))} being cancelled"


class Scale(Action, frozen=True):
    pool: Name
    size: Annotated[int, Meta(ge=0, le=POOL_SIZE_MAX)]

    def request(self) -> rpc.Params:
        return rpc.Scale(pool=self.pool, size=self.size, no_block=True)

    def outcome(self, _: Raw) -> str:
        return f"{self.pool} is being scaled to {self.size} workers"


class Drain(Action, frozen=True):
    pool: Name

    def request(self) -> rpc.Params:
        return rpc.Drain(names=[self.pool], no_block=True)

    def outcome(self, _: Raw) -> str:
        return f"{self.pool} is being drained"


class Resume(Action, frozen=True):
    pool: Name

    def request(self) -> rpc.Params:
        return rpc.Resume(names=[self.pool])

    def outcome(self, _: Raw) -> str:
        return f"{self.pool} resumed"


class Reset(Action, frozen=True):
    """Reset the breaker of a site."""

    target: Annotated[str, Meta(min_length=1, max_length=253)]

    def request(self) -> rpc.Params:
        return rpc.SetBreaker(target=self.target, command="reset")

    def outcome(self, _: Raw) -> str:
        return f"the breaker of {self.target} was reset"


# -- schedules --------------------------------------------------------------------------------


class _ScheduleAction(Action, frozen=True):
    """Base of actions on a schedule; the tags are the words of `musterctl schedule`."""

    name: Name


class AddSchedule(_ScheduleAction, frozen=True, tag="schedule.add"):
    """Add a schedule; none of this name may be there."""

    keys: dict[str, Any]

    def request(self) -> rpc.Params:
        return rpc.PutSchedules([rpc.NewSchedule(self.name, self.keys)], replace=False)

    def outcome(self, answered: Raw) -> str:
        _check_put(answered)
        return f"schedule {self.name} was added"

    def words(self) -> str:
        """Name the keys alone: their values may be secrets that the daemon will refuse."""
        return f"schedule.add {self.name}: {_listed(self.keys)}"


class EditSchedule(_ScheduleAction, frozen=True, tag="schedule.edit"):
    """Change some keys of a schedule that was added.

    request() asks for the schedule as it is; edited() returns the request that changes it.
    """

    keys: dict[str, Any] = {}
    unset: Annotated[list[str], Meta(max_length=KEYS_MAX)] = []

    def request(self) -> rpc.Params:
        return rpc.GetSchedule(name=self.name)

    def edited(self, answered: Raw) -> rpc.Params:
        if _hides(self.keys):
            why = f"{HIDDEN!r} stands for a value that is not shown here"
            command = f"musterctl schedule edit {self.name}"
            raise rpc.RpcError(rpc.INVALID_PARAMS, f"{why}: write it anew, or use {command}")
        before = msgspec.json.decode(answered, type=ScheduleKeys).keys
        kept = {key: value for key, value in before.items() if key not in self.unset}
        return rpc.PutSchedules([rpc.NewSchedule(self.name, kept | self.keys)])

    def outcome(self, answered: Raw) -> str:
        _check_put(answered)
        return f"schedule {self.name} was changed"

    def words(self) -> str:
        return f"schedule.edit {self.name}: {_listed([*self.keys, *self.unset])}"


class RemoveSchedule(_ScheduleAction, frozen=True, tag="schedule.remove"):
    def request(self) -> rpc.Params:
        return rpc.DeleteSchedule(name=self.name)

    def outcome(self, _: Raw) -> str:
        return f"schedule {self.name} was removed"


class RunSchedule(_ScheduleAction, frozen=True, tag="schedule.run"):
    def request(self) -> rpc.Params:
        return rpc.RunSchedule(name=self.name)

    def outcome(self, answered: Raw) -> str:
        run = msgspec.json.decode(answered, type=ScheduleStatus).last_task
        return f"schedule {self.name} runs now: task {run}"


class PauseSchedule(_ScheduleAction, frozen=True, tag="schedule.pause"):
    def request(self) -> rpc.Params:
        return rpc.PauseSchedule(name=self.name)

    def outcome(self, _: Raw) -> str:
        return f"schedule {self.name} is paused"


class ResumeSchedule(_ScheduleAction, frozen=True, tag="schedule.resume"):
    def request(self) -> rpc.Params:
        return rpc.ResumeSchedule(name=self.name)

    def outcome(self, _: Raw) -> str:
        return f"schedule {self.name} goes on"


def _check_put(answered: Raw) -> None:
    """Raise what is wrong with a schedule, each problem on a line."""
    if refused := msgspec.json.decode(answered, type=SchedulesPut).refused:
        raise rpc.RpcError(rpc.INVALID_PARAMS, refused[0].why)


def _listed(keys: Iterable[str]) -> str:
    text = ", ".join(keys)
    return text if len(text) <= WORDS_CHARS_MAX else f"{text[:WORDS_CHARS_MAX]} ..."


def _hides(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_hides, value.values()))
    return any(map(_hides, value)) if isinstance(value, list) else value == HIDDEN


def _tasks(count: int) -> str:
    return "1 task is" if count == 1 else f"{count} tasks are"


_OfSchedules = (
    AddSchedule | EditSchedule | RemoveSchedule | RunSchedule | PauseSchedule | ResumeSchedule
)
AnyAction = Retry | Cancel | Scale | Drain | Resume | Reset | _OfSchedules
decode = msgspec.json.Decoder(AnyAction).decode


class Done(Struct, frozen=True):
    done: str  # in words
