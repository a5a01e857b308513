"""Requests of clients that wait for the engine, and which of them one call can do."""

from msgspec import Struct

from musterd.ipc.wire.messages import Rejection, TaskSpec

REQUEST_BYTES = 200  # of a request beside its arguments


class Submit(Struct, eq=False):
    peer: bytes
    request: int
    tasks: list[TaskSpec]
    rejected: list[Rejection]
    resend: bool
    bytes: int
    alone: bool = False  # the engine refused a batch that it was part of


class Cancel(Struct, eq=False):
    peer: bytes
    request: int
    ids: list[str]
    bytes: int


class Invalidate(Struct, eq=False):
    key: str
    prefix: bool
    bytes: int = REQUEST_BYTES


Request = Submit | Cancel | Invalidate


def weight_of(request: Request) -> int:
    if isinstance(request, Invalidate):
        return 1
    return len(request.tasks if isinstance(request, Submit) else request.ids)


def go_together(first: Request, other: Request) -> bool:
    """Whether one call does both."""
    if isinstance(first, Submit) and isinstance(other, Submit):
        return first.resend == other.resend and not first.alone and not other.alone
    return isinstance(first, Cancel) and isinstance(other, Cancel)
