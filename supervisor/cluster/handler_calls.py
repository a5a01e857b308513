"""What handlers of this node ask the cluster for: states and locks. Pure; the claimer calls.

    states   in batches, in order, until the engine has answered; those of an attempt that has ended
             or is lost are dropped
    locks    a wish for each lock that the node wants, has passed on or gives back. A lock that
             another node has is asked for again at each notification, and every POLL_NS behind that

A save that the engine does not take because it does not know the claim waits: after a crash of the
server the claim is registered again, or found to be lost.
"""

from collections.abc import Container, Sequence
from random import Random

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import node_messages as wire
from musterd.supervisor.cluster import handling

STATES_MAX = 100  # of one call ...
STATES_BYTES = 4 * 1024 * 1024  # ... and their bytes
LOCKS_MAX = 100  # of one call
POLL_NS = SECOND_NS  # behind notifications, which may be lost
REASON_CHARS = 500  # of an error that a handler is told

Pair = tuple[str, int]  # the id of a task, and the claim


class HandlerCalls:
    def __init__(self, node: str, rng: Random) -> None:
        self._node = node
        self._rng = rng
        # States: what waits, and what is in the call under way.
        self._asks: dict[int, wire.StateRequest] = {}
        self._asking: list[wire.StateRequest] = []
        self._alone: set[int] = set()  # the engine refused a batch that they were part of
        # Locks, by token: what is wanted, of that what is to be told, and what another node has.
        self._wishes: dict[int, wire.LockWish] = {}
        self._due: dict[int, None] = {}
        self._waiting: dict[int, None] = {}
        self._wishing: list[wire.LockWish] = []
        self.poll_at_ns = 0

    def reset(self) -> None:
        """Forget everything: the tenure is over."""
        self.__init__(self._node, self._rng)  # type: ignore[misc]

    def forget(self, pair: Pair) -> None:
        """Drop the requests of an attempt that has ended or is lost."""
        for ask in [each for each in self._asks.values() if (each.id, each.claim) == pair]:
            del self._asks[ask.number]

    def validate(self) -> None:
        assert self._due.keys() | self._waiting.keys() <= self._wishes.keys()
        assert not self._due.keys() & self._waiting.keys()

    # -- states -------------------------------------------------------------------------------

    @property
    def has_states(self) -> bool:
        return bool(self._asks)

    def ask_states(self, asks: Sequence[wire.StateRequest], held: Container[Pair]) -> None:
        self._asks.update({ask.number: ask for ask in asks if (ask.id, ask.claim) in held})

    def next_states(self) -> list[handling.StateAsk]:
        """Return the requests of the next call."""
        size, batch = 0, self._asking
        assert not batch
        for ask in self._asks.values():
            size += ask.size
            apart = ask.number in self._alone or (batch and batch[-1].number in self._alone)
            if batch and (len(batch) == STATES_MAX or size > STATES_BYTES or apart):
                break
            batch.append(ask)
        return [handling.StateAsk(*structs.astuple(ask)[1:]) for ask in batch]

    def states_answered(
        self, views: list[handling.StateView]
    ) -> tuple[list[wire.StatesTold], bool]:
        """Return what to tell, and whether the engine does not know the claim of a save."""
        batch, self._asking = self._asking, []
        replies, unknown = [], False
        for ask, view in zip(batch, views, strict=True):
            if ask.number not in self._asks:
                continue  # dropped meanwhile
            if view.held:
                del self._asks[ask.number]
                self._alone.discard(ask.number)
                replies.append(wire.StateReply(ask.number, view.value))
            else:
                unknown = True
        return [wire.StatesTold(part) for part in wire.portions(replies)], unknown

    def states_failed(self, reason: str, *, refused: bool) -> list[wire.StatesTold]:
        """Ask again; what the engine refuses is found one by one, and told."""
        batch, self._asking = self._asking, []
        if not refused:
            return []
        if len(batch) > 1:
            self._alone.update(ask.number for ask in batch)
            return []
        for ask in batch:
            self._asks.pop(ask.number, None)
            self._alone.discard(ask.number)
        why = f"the cluster's database refused it: {reason}"[:REASON_CHARS]
        return [wire.StatesTold([wire.StateReply(ask.number, None, why) for ask in batch])]

    # -- locks --------------------------------------------------------------------------------

    def ask_locks(self, wishes: Sequence[wire.LockWish]) -> None:
        for wish in wishes:
            self._wishes[wish.token] = wish
            self._due[wish.token] = None
            self._waiting.pop(wish.token, None)

    def lock_call_at(self) -> int | None:
        """Return when locks are to be asked for; None: there are none."""
        if self._due:
            return 0
        return self.poll_at_ns if self._waiting else None

    def look_again(self, now_ns: int) -> None:
        """A lock that another node had may be free."""
        if self._waiting:
            self.poll_at_ns = now_ns

    def next_locks(self, now_ns: int) -> list[handling.LockAsk]:
        """Return the wishes of the next call."""
        assert not self._wishing
        if now_ns >= self.poll_at_ns:
            self._due.update(self._waiting)
            self._waiting = {}
            self.poll_at_ns = now_ns + round(POLL_NS * self._rng.uniform(0.8, 1.2))
        tokens = [token for token, _ in zip(self._due, range(LOCKS_MAX), strict=False)]
        for token in tokens:
            del self._due[token]
        self._wishing = [self._wishes[token] for token in tokens]
        return [
            handling.LockAsk(wish.name, wish.token, wish.kind, f"{wish.holder} on {self._node}")
            for wish in self._wishing
        ]

    def locks_answered(self, views: list[handling.LockView]) -> list[wire.LockReply]:
        wishing, self._wishing = self._wishing, []
        replies = []
        for wish, view in zip(wishing, views, strict=True):
            if self._wishes.get(wish.token) is not wish:
                continue  # a newer one has taken its place
            if wish.kind == "leave" or view.taken:
                del self._wishes[wish.token]
                replies.append(wire.LockReply(wish.request, wish.name, view.taken))
                continue
            # From now on it waits its turn, whether it had the lock before or not.
            self._wishes[wish.token] = structs.replace(wish, kind="want")
            self._waiting[wish.token] = None
            holder = view.holder[:REASON_CHARS]
            replies.append(wire.LockReply(wish.request, wish.name, False, holder))
        return replies

    def locks_failed(self) -> None:
        wishing, self._wishing = self._wishing, []
        self._due.update({wish.token: None for wish in wishing if wish.token in self._wishes})
