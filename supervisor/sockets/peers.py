"""A connection of a client, and what it asks that others than the port answer."""

from msgspec import Struct

from musterd.ipc.wire.messages import History
from musterd.ipc.wire.schedule_messages import ShowSchedules
from musterd.supervisor.sockets.owed import Owed


class Peer:
    """One connection that has sent something."""

    __slots__ = (
        "complained", "epoch", "faults", "follows", "gone", "greeted", "known", "looks", "moved",
        "name", "number", "owed", "pending", "session", "slow", "waited",
    )  # fmt: skip

    def __init__(self, number: int, epoch: str) -> None:
        self.number = number
        self.name = b"%d" % number  # for the core
        self.epoch = epoch
        self.session = ""  # the name of its client, which has one connection at a time
        self.greeted = False  # it has said hello, or was told to
        self.known = False  # the core may know its name
        self.gone = False
        self.follows = False  # it follows changes and waits for the first answer
        self.pending = 0  # bytes of requests that are under way
        self.owed = Owed()
        self.faults = 0
        self.complained = False
        self.moved = 0  # what Router.moved() returned last ...
        self.looks = 0  # ... and how many times in a row
        self.waited = 0  # bytes that waited at the last look ...
        self.slow = 0  # ... and at how many looks in a row fewer than those had moved


class Request(Struct, frozen=True, gc=False):
    """A request that the core answers with an Acknowledge."""

    peer: Peer
    number: int | None  # the client's own number; None: it wants no answer
    bytes: int
    schedules: bool = False  # it is about schedules: answered by a ScheduleAnswer


class SchedulesWanted(Struct, frozen=True, gc=False):
    """A client asks for schedules."""

    peer: Peer
    message: ShowSchedules


class AdviceWanted(Struct, frozen=True, gc=False):
    """A client asks how many workers each pool should have."""

    peer: Peer
    request: int


class ResolutionWanted(Struct, frozen=True, gc=False):
    """A client asks which tasks run a function; ClientPort.resolve() answers."""

    token: int
    place: str


class HistoryWanted(Struct, frozen=True, gc=False):
    """A client asks for results of a schedule; ClientPort.recall() answers."""

    token: int
    question: History
