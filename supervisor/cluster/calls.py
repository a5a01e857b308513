"""Calls of the engine, of one kind one at a time, with growing pauses after failures."""

from collections.abc import Callable, Iterable
from random import Random

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.cluster.sidecar_events import Call

PAUSE_NS, PAUSE_MAX_NS = SECOND_NS // 20, 2 * SECOND_NS  # between two attempts of one call


class Lane(Struct):
    """The call that is under way, and when the next one may be made."""

    ticket: int = 0  # 0: nothing is under way
    called_ns: int = 0
    failures: int = 0  # in a row
    not_before_ns: int = 0

    def called(self, ticket: int, now_ns: int) -> None:
        self.ticket, self.called_ns = ticket, now_ns

    def answered(self) -> None:
        self.ticket = self.failures = self.not_before_ns = 0

    def failed(self, now_ns: int, rng: Random) -> None:
        self.ticket = 0
        self.failures += 1
        pause_ns = min(PAUSE_MAX_NS, PAUSE_NS << min(self.failures - 1, 10))
        self.not_before_ns = now_ns + round(pause_ns * rng.uniform(0.5, 1.0))


# A call that may be made, when, and what makes it.
Wanted = tuple[Lane, int, Callable[[], None]]


class Calls:
    """The calls under way, each with who gets its answer."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._ticket = 0
        self._under_way: dict[int, tuple[Lane, Callable[[object], None]]] = {}

    def make(
        self,
        now_ns: int,
        lane: Lane,
        answered: Callable[[object], None],
        method: str,
        *arguments: object,
        **options: object,
    ) -> Call:
        self._ticket += 1
        lane.called(self._ticket, now_ns)
        self._under_way[self._ticket] = (lane, answered)
        return Call(self._ticket, method, arguments, options)

    def answered(self, ticket: int) -> Callable[[object], None] | None:
        """Return who gets the answer to a call; None if nobody wants it any more."""
        lane, answered = self._under_way.pop(ticket, (None, None))
        if lane is not None:
            lane.answered()
        return answered

    def failed(self, ticket: int, now_ns: int) -> Lane | None:
        """Return the lane of a call that failed; None if nobody wants its answer any more."""
        lane, _ = self._under_way.pop(ticket, (None, None))
        if lane is not None:
            lane.failed(now_ns, self._rng)
        return lane

    def drop(self, *lanes: Lane) -> None:
        """Want no answers of these lanes any more; they may be called at once."""
        for lane in lanes:
            self._under_way.pop(lane.ticket, None)
            lane.answered()


def due_times(wanted: Iterable[Wanted]) -> list[int]:
    """Return when calls may be made whose lanes are free."""
    return [max(at_ns, lane.not_before_ns) for lane, at_ns, _ in wanted if not lane.ticket]


def make_due(wanted: Iterable[Wanted], now_ns: int) -> None:
    """Make the calls that are due. One may change what is wanted after it."""
    for lane, at_ns, make in list(wanted):
        if not lane.ticket and now_ns >= max(at_ns, lane.not_before_ns):
            make()


class Taking(Struct):
    """Whether the engine takes what is written. It may answer all else: its disk is full."""

    failing_since_ns: int | None = None
    reported: bool = False

    def failed(self, called_ns: int) -> None:
        if self.failing_since_ns is None:
            self.failing_since_ns = called_ns

    def is_over(self, before_ns: int) -> bool:
        """Whether it has failed since then. What comes next is tried as long again."""
        over = self.failing_since_ns is not None and self.failing_since_ns <= before_ns
        if over:
            self.failing_since_ns = None
        return over

    def is_news(self, known: bool) -> bool:
        """Whether to report that; it is `known` if the engine answers nothing at all."""
        news = not self.reported and not known
        self.reported = self.reported or news
        return news

    def answered(self) -> bool:
        """Note that a write was taken; return whether to report that."""
        was, self.reported = self.reported, False
        self.failing_since_ns = None
        return was


class Figures(Struct):
    """What metrics show of a gateway."""

    submitted: int = 0
    refused: int = 0
    told: int = 0
    failed_calls: int = 0
