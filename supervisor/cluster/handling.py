"""What running handlers ask an engine for: states, locks, progress. Part of its contract."""

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct


class StateAsk(Struct, frozen=True):
    """A state that an attempt loads, saves, or clears with None."""

    id: str
    claim: int
    key: str
    saves: bool = False
    value: bytes | None = None
    ttl_ns: int = 0  # 0: for ever


class StateView(Struct, frozen=True):
    """The answer to a StateAsk."""

    held: bool = True  # False: the node does not have that claim, and nothing was saved
    value: bytes | None = None  # what was loaded


class LockAsk(Struct, frozen=True):
    """What a node wants with a lock. It is one holder, whatever goes on on the node: `token`.

    want    have it, or wait for it
    pass    have it after all others that wait now; keep it if there are none
    leave   give it back, or wait no longer
    """

    name: str
    token: int
    kind: Literal["want", "pass", "leave"]
    holder: str = ""  # for people


class LockView(Struct, frozen=True):
    taken: bool
    holder: str = ""  # who has it, if it was not taken


class ProgressMark(Struct, frozen=True):
    id: str
    fraction: float
    text: str


class HandlingEngine(Protocol):
    def states(self, tenure: int, asks: Sequence[StateAsk]) -> list[StateView]:
        """Load and save states of attempts, as if one after the other.

        A save counts only while the node has the claim: the attempt that follows on another node
        never finds what its predecessor saves too late.
        """

    def locks(self, tenure: int, asks: Sequence[LockAsk]) -> list[LockView]:
        """Take locks, wait for them in the order of the calls, and give them back.

        A lock ends with the tenure of its node at the latest.
        """

    def state_load(self, key: str) -> bytes | None: ...
    def state_save(self, key: str, value: bytes | None, *, ttl_ns: int = 0) -> None: ...
    def progress(self, tenure: int, marks: Sequence[ProgressMark]) -> list[str]:
        """Note how far attempts are; return those that were not noted, because it is too early."""

    def marks(self, waiter: int, age_ns: int) -> list[ProgressMark]:
        """Return how far the tasks of a waiter are that have said so within this time."""
