"""Actions of the dashboard, each translated into one request to the daemon.

    POST /api/actions     {"action": "scale", "pool": "parser", "size": 3}

No action waits for workers: the page shows the outcome.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from musterd.ipc.resilience.policy import POOL_SIZE_MAX
from musterd.ipc.wire.messages import Id, Name
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import RetryResult, TaskList

IDS_MAX = 100  # as many as the page lists

Ids = Annotated[list[Id], Meta(min_length=1, max_length=IDS_MAX)]


class Action(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """Base of all actions; the tag is the class name in lower case."""

    def request(self) -> rpc.Params:
        raise NotImplementedError


class Retry(Action, frozen=True):
    ids: Ids

    def request(self) -> rpc.Params:
        return rpc.RetryTasks(ids=self.ids)


class Cancel(Action, frozen=True):
    ids: Ids

    def request(self) -> rpc.Params:
        return rpc.CancelTasks(ids=self.ids, no_block=True)


class Scale(Action, frozen=True):
    pool: Name
    size: Annotated[int, Meta(ge=0, le=POOL_SIZE_MAX)]

    def request(self) -> rpc.Params:
        return rpc.Scale(pool=self.pool, size=self.size, no_block=True)


class Drain(Action, frozen=True):
    pool: Name

    def request(self) -> rpc.Params:
        return rpc.Drain(names=[self.pool], no_block=True)


class Resume(Action, frozen=True):
    pool: Name

    def request(self) -> rpc.Params:
        return rpc.Resume(names=[self.pool])


class Reset(Action, frozen=True):
    """Reset the breaker of a site."""

    target: Annotated[str, Meta(min_length=1, max_length=253)]

    def request(self) -> rpc.Params:
        return rpc.SetBreaker(target=self.target, command="reset")


AnyAction = Retry | Cancel | Scale | Drain | Resume | Reset
decode = msgspec.json.Decoder(AnyAction).decode


class Done(Struct, frozen=True):
    done: str  # in words


def outcome(action: AnyAction, answered: Raw) -> str:
    """Return the outcome in words; RpcError if nothing was done."""
    match action:
        case Retry():
            told = msgspec.json.decode(answered, type=RetryResult)
            if not told.retried:
                raise rpc.RpcError(rpc.FAILED, told.refused[0].reason)
            why = f"; {len(told.refused)} refused: {told.refused[0].reason}" if told.refused else ""
            return f"{_tasks(len(told.retried))} queued again{why}"
        case Cancel():
            found = msgspec.json.decode(answered, type=TaskList)
            if not found.tasks:
                raise rpc.RpcError(rpc.NO_SUCH_NAME, f"no such task: {found.missing[0]}")
            return f"{_tasks(len(found.tasks))} being cancelled"
        case Scale():
            return f"{action.pool} is being scaled to {action.size} workers"
        case Drain():
            return f"{action.pool} is being drained"
        case Resume():
            return f"{action.pool} resumed"
        case Reset():
            return f"the breaker of {action.target} was reset"


def _tasks(count: int) -> str:
    return "1 task is" if count == 1 else f"{count} tasks are"
