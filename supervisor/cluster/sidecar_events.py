"""What the gateway and the claimer hear and do, beside what the fleet does (core/model)."""

from msgspec import Struct

from musterd.ipc.wire.messages import Change
from musterd.ipc.wire.node_messages import PoolCard
from musterd.supervisor.cluster.engine import ProgressMark
from musterd.supervisor.core.model import actions

# -- what else happens ------------------------------------------------------------------------


class EngineAnswered(Struct, frozen=True):
    ticket: int
    result: object


class EngineFailed(Struct, frozen=True):
    """A call failed. `refused`: it did not happen, and would be refused again."""

    ticket: int
    reason: str
    refused: bool = False
    fenced: bool = False  # the tenure is over
    unsent: bool = False  # the call was not made


class Notified(Struct, frozen=True):
    """The engine says that tasks of this waiter have ended."""


class PoolsNotified(Struct, frozen=True):
    """The engine says that there is something to claim in these pools."""

    pools: tuple[str, ...]


class NodeNotified(Struct, frozen=True):
    """The engine has orders for this node."""


class Standing(Struct, frozen=True):
    """A node in its cluster, as the claimer knows it."""

    policy: int  # version of the applied policy
    cards: tuple[PoolCard, ...]  # pools whose tasks the engine knows from this node


class LookedUp(Struct, frozen=True):
    """The answer to LookUp. The results of those that have ended were sent."""

    peer: bytes
    ended: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    marks: tuple[ProgressMark, ...] = ()  # how far those are that are alive


# -- what else is done ------------------------------------------------------------------------


class Call(Struct, frozen=True):
    """Call a method of the engine; EngineAnswered or EngineFailed follows."""

    ticket: int
    method: str
    arguments: tuple[object, ...] = ()
    options: dict[str, object] = {}


class TellChange(Struct, frozen=True):
    """Tell all followers of a change."""

    change: Change


class EndPeer(Struct, frozen=True):
    """End a connection: its client asks again."""

    peer: bytes
    reason: str


Action = (
    Call
    | TellChange
    | EndPeer
    | actions.Acknowledge
    | actions.Deliver
    | actions.DropRequest
    | actions.LookUp
    | actions.Report
    | actions.TellChanges
    | actions.TellMissing
    | actions.TellProgress
)
