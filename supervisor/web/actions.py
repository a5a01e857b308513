"""What the page may have done, each as one request to the daemon.

    POST /api/actions     {"action": "scale", "pool": "parser", "size": 3}

None of them waits for workers: what becomes of it is seen on the page.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from musterd.ipc.resilience.policy import POOL_SIZE_MAX
from musterd.ipc.wire.messages import Id, Name
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import RetryResult, TaskList

IDS_MAX = 100  # as many as a list on the page has

Ids = Annotated[list[Id], Meta(min_length=1, max_length=IDS_MAX)]


class Action(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """Root of all; the tag is the class's name in small letters."""

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
    """A breaker."""

    target: Annotated[str, Meta(min_length=1, max_length=253)]

    def request(self) -> rpc.Params:
        return rpc.SetBreaker(target=self.target, command="reset")


AnyAction = Retry | Cancel | Scale | Drain | Resume | Reset
decode = msgspec.json.Decoder(AnyAction).decode


class Done(Struct, frozen=True):
    done: str  # in words


def outcome(action: AnyAction, answered: Raw) -> str:
    """What became of it, in words; RpcError if nothing did."""
    match action:
        case Retry():
            told = msgspec.json.decode(answered, type=RetryResult)
            if not told.retried:
                raise rpc.RpcError(rpc.FAILED, told.refused[0].reason)
            left = f"; {len(told.refused)} not: {told.refused[0].reason}" if told.refused else ""
            return f"{_tasks(len(told.retried))} in the queue again{left}"
        case Cancel():
            found = msgspec.json.decode(answered, type=TaskList)
            if not found.tasks:
                raise rpc.RpcError(rpc.NO_SUCH_NAME, f"no such task: {found.missing[0]}")
            return f"{_tasks(len(found.tasks))} cancelled, or about to be"
        case Scale():
            return f"{action.pool} gets {action.size} workers"
        case Drain():
            return f"{action.pool} takes no more tasks"
        case Resume():
            return f"{action.pool} works again"
        case Reset():
            return f"the breaker of {action.target} is reset"


def _tasks(count: int) -> str:
    return "1 task is" if count == 1 else f"{count} tasks are"
