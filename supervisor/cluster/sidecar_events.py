"""What the gateway and the claimer hear and do, beside what the fleet does (core/model)."""

from msgspec import Struct

from musterd.ipc.wire import node_messages as wire
from musterd.ipc.wire.history import Entries
from musterd.ipc.wire.messages import (
    Change,
    ClientMessage,
    History,
    ServerMessage,
    TaskView,
)
from musterd.ipc.wire.node_messages import PoolCard
from musterd.ipc.wire.resolving import Resolve, Resolved
from musterd.ipc.wire.schedule_messages import ScheduleMessage, ScheduleReply
from musterd.supervisor.cluster.handling import (
    ProgressMark,
)
from musterd.supervisor.core.model import actions

AboutSchedules = ScheduleMessage | History | Resolve
SchedulesAnswer = ScheduleReply | Entries | Resolved

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
    unsent: bool = False  # the call did not take effect
    taken_ns: int | None = None  # the node's name is another's, who was heard of so long ago


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
    scheduled: int | None = None  # as in engine.Orders; None: that is not known yet


class LookedUp(Struct, frozen=True):
    """The answer to LookUp. The results of those that have ended were sent."""

    peer: bytes
    ended: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    marks: tuple[ProgressMark, ...] = ()  # how far those are that are alive


class PoolsTold(Struct, frozen=True):
    """These pools are of this machine alone."""

    local: tuple[str, ...]


class ViewAsked(Struct, frozen=True):
    """A client asks for the view of a task."""

    peer: bytes
    request: int
    id: str


class AdviceAsked(Struct, frozen=True):
    """A client asks how many workers the pools of this machine should have."""

    peer: bytes
    request: int


class SchedulesAsked(Struct, frozen=True):
    """A client asks about schedules, their results or the tasks of a function: the supervisor
    first, with this message."""

    peer: bytes
    request: int
    message: AboutSchedules


class Invalidated(Struct, frozen=True):
    """A client wants results forgotten: of this key, or of all keys with this prefix."""

    peer: bytes
    key: str
    prefix: bool


class LocalSaid(Struct, frozen=True):
    """The supervisor has answered over a client's own connection to local.sock."""

    peer: bytes
    message: ServerMessage | ScheduleReply
    frame: bytes | bytearray  # the message as it came


class LocalLost(Struct, frozen=True):
    """A client's own connection to local.sock is over, or could not be made."""

    peer: bytes
    reason: str


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


class AskLocal(Struct, frozen=True):
    """Send a message over a client's own connection to local.sock, which is made if need be."""

    peer: bytes
    message: ClientMessage | ScheduleMessage


class EndLocal(Struct, frozen=True):
    """End a client's own connection to local.sock."""

    peer: bytes


class PassOn(Struct, frozen=True):
    """Send a client what the supervisor has said."""

    peer: bytes
    frame: bytes | bytearray


class ShowView(Struct, frozen=True):
    """Answer a ViewAsked; None: have the engine asked."""

    request: int
    id: str
    view: TaskView | None


class GiveAdvice(Struct, frozen=True):
    """Answer an AdviceAsked."""

    request: int
    workers: dict[str, int]


class ToldOfSchedules(Struct, frozen=True):
    """Hand on what the supervisor answers to a SchedulesAsked."""

    request: int
    answer: SchedulesAnswer


LocalAction = AskLocal | EndLocal | PassOn | ShowView | GiveAdvice | ToldOfSchedules
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

# -- of the claimer ---------------------------------------------------------------------------


class Tell(Struct, frozen=True):
    """Send a message to the supervisor."""

    message: wire.SidecarMessage


class Left(Struct, frozen=True):
    """The node has left the cluster: the process may end."""


class NameInUse(Struct, frozen=True):
    """Another live node has this node's name: the daemon ends."""

    reason: str


class Leave(Struct, frozen=True):
    """The process is to end (an event)."""


ClaimerAction = Call | Tell | Left | NameInUse | actions.Report
