"""Results of schedules as they are kept: a fact of the store, and a part of messages."""

from msgspec import Struct


class HistoryEntry(Struct, array_like=True, frozen=True, gc=False):
    """A result of a schedule, as history keeps it."""

    number: int  # grows with each different result
    at_ns: int  # wall-clock time
    task: str  # id of the run that returned it
    digest: str
    value: bytes  # msgpack of the part that is watched
    cut: bool = False  # `value` is a text: the beginning of what is watched
    changed: bool = False  # it was told as a change
    before: int = 0  # of the result before the change; 0: not known


class Entries(Struct, array_like=True, tag="entries", frozen=True):
    """Results of a schedule, oldest first; those that are not kept any more are left out."""

    request: int
    entries: list[HistoryEntry] = []
    error: str = ""  # why there is no answer
    unknown: bool = False  # ... because there is no such schedule
