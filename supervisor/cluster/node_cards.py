"""What a node says of itself: its pools and their tasks."""

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import node_messages as wire
from musterd.supervisor.cluster import engine

PLACES_NS = 10 * SECOND_NS  # between two declarations that differ in places alone
DECLARE_NS = 5 * SECOND_NS  # after a declaration that failed: heartbeats come between


class Declaring:
    """What the engine knows of this node's pools, and what it is to know."""

    def __init__(self, card: engine.NodeCard) -> None:
        self._card = card
        self._next_ns = 0
        self._sent: tuple[wire.PoolCard, ...] | None = None
        self.cards: tuple[wire.PoolCard, ...] | None = None  # as the supervisor tells them
        self.known: tuple[wire.PoolCard, ...] | None = None  # to the engine, for sure
        self.taken_since_ns: int | None = None  # since when the name is known to be another's

    def due_ns(self) -> int | None:
        """Return when to declare the pools anew; None: the engine knows them."""
        if self.cards is None or self.cards == self.known:
            return None
        if self.known is not None and without_places(self.known) == without_places(self.cards):
            return self._next_ns + PLACES_NS
        return self._next_ns

    def sleeps(self, pool: str) -> bool:
        """Whether this node has the pool and no workers for it."""
        return any(card.name == pool and not card.places for card in self.cards or ())

    def card(self, now_ns: int) -> engine.NodeCard:
        """Return what to declare now."""
        assert self.cards is not None
        self._sent, self._next_ns = self.cards, now_ns + DECLARE_NS
        return structs.replace(self._card, pools=tuple(map(engine_card, self.cards)))

    def told(self, now_ns: int) -> None:
        """Note that the engine knows what was declared last."""
        self.known, self._next_ns, self.taken_since_ns = self._sent, now_ns, None

    def taken(self, now_ns: int, age_ns: int) -> tuple[bool, bool]:
        """Note that another node has the name, which was heard of `age_ns` ago.

        Return whether that is news, and whether the other was heard of since it was: it is alive.
        """
        if self.taken_since_ns is None:
            self.taken_since_ns = now_ns
            return True, False
        return False, age_ns < now_ns - self.taken_since_ns


def engine_card(card: wire.PoolCard) -> engine.PoolCard:
    return engine.PoolCard(
        card.name,
        card.places,
        card.tasks,
        card.queue_size,
        card.aging_ns,
        card.max_crashes,
        card.cache_ns,
        card.debounce_ns,
    )


def without_places(cards: tuple[wire.PoolCard, ...]) -> list[wire.PoolCard]:
    return [structs.replace(card, places=0) for card in cards]
