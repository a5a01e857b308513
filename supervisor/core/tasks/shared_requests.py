"""States and locks that handlers share over all machines of a cluster.

Requests of attempts of the cluster go to the engine, through the cluster sidecar. What the engine
has not answered is kept here, and told to each new sidecar again: a save may come twice, which
changes nothing, and a lock is asked for under the token that it has. Requests end with their lease.

In the cluster a lock belongs to a node, not to a task: who gets it on this node is decided by
HandlerRequests. A lock that the cluster has given is ours as long as the node's tenure lasts, which
is sure until the end of the node's lease. When a task gives a lock back and others wait for it
here, the lock is passed on to other nodes that wait, first. While the engine is away nobody else
can have it, so it goes from task to task here, until the lease is over.
"""

from collections.abc import Callable, Set

from msgspec import Struct, structs

from musterd.ipc.wire.node_messages import LockWish, LockWishKind, StateRequest
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import AnswerState, AskLocks, AskStates
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task

# Requests that wait for an answer of the engine: far more than workers make while it answers.
UNANSWERED_MAX = 1_000
UNANSWERED_BYTES_MAX = 32 * 1024 * 1024
REQUEST_BYTES = 512  # of a request in memory besides its value
NAMES_SHOWN = 5  # of locks, in one line of the log

FULL = (
    "too many states wait for the cluster's database, which does not answer: raise Retry, or save "
    "less often"
)
UNFIT = "the cluster's database keeps no NUL characters: use another key"
LOST = "this attempt does not count any more: the lease of its node was over"


class _Ask(Struct, frozen=True, gc=False):
    worker: int
    lease: int
    request: int  # the worker's own number
    sent: StateRequest

    @property
    def bytes(self) -> int:
        return len(self.sent.value or b"") + REQUEST_BYTES


class SharedStates:
    def __init__(self, state: State) -> None:
        self._state = state
        self._connected = False
        self._numbers = 0
        self.asks: dict[int, _Ask] = {}  # by our number, in the order of the requests
        self._bytes = 0

    def ask(self, event: events.StateWanted | events.StateGiven, task: Task) -> None:
        assert task.claim is not None
        sent = StateRequest(self._numbers + 1, task.spec.id, task.claim.number, event.key)
        if isinstance(event, events.StateGiven):
            sent = structs.replace(sent, saves=True, value=event.value, ttl_ns=event.ttl_ns)
        ask = _Ask(event.worker, event.lease, event.request, sent)
        full = len(self.asks) >= UNANSWERED_MAX or self._bytes + ask.bytes > UNANSWERED_BYTES_MAX
        why = LOST if task.claim.lost else UNFIT if "\0" in event.key else FULL if full else ""
        if why:
            self._state.out.append(AnswerState(event.worker, event.request, why))
            return
        self._numbers += 1
        self.asks[self._numbers] = ask
        self._bytes += ask.bytes
        if self._connected:
            self._state.out.append(AskStates([sent]))

    def answered(self, event: events.StatesTold) -> None:
        for reply in event.replies:
            ask = self.asks.get(reply.number)
            if ask is not None:
                self._forget(reply.number)
                answer = AnswerState(ask.worker, ask.request, reply.error, reply.value)
                self._state.out.append(answer)

    def connected(self) -> None:
        self._connected = True
        if self.asks:
            self._state.out.append(AskStates([ask.sent for ask in self.asks.values()]))

    def disconnected(self) -> None:
        self._connected = False

    def leases_over(self, worker: int, leases: list[int] | None = None) -> None:
        """Drop the requests of leases that have ended; None: of all leases of the worker."""
        for number, ask in list(self.asks.items()):
            if ask.worker == worker and (leases is None or ask.lease in leases):
                self._forget(number)

    def _forget(self, number: int) -> None:
        self._bytes -= self.asks.pop(number).bytes

    def validate(self, runs: Callable[[int, int], bool]) -> None:
        """`runs` says whether a lease of a worker is under way."""
        assert len(self.asks) <= UNANSWERED_MAX and self._bytes <= UNANSWERED_BYTES_MAX
        assert self._bytes == sum(ask.bytes for ask in self.asks.values())
        for ask in self.asks.values():
            assert runs(ask.worker, ask.lease), ask


class _Wish(Struct):
    """A lock that tasks of this node have or want."""

    token: int
    sent: LockWish  # what the cluster was asked last
    held: bool = False  # and it is ours


class SharedLocks:
    def __init__(self, state: State) -> None:
        self._state = state
        self._connected = False
        self._away = False
        self._tenure = 0
        self._until_ns = 0  # the end of the lease
        self._requests = 0
        self._wishes: dict[str, _Wish] = {}  # by name
        self._leaving: dict[int, LockWish] = {}  # by request; until the engine has heard of them
        self._stalled = False  # a lock of ours waits for the lease to be prolonged
        self._due_ns = 0  # when the end of the lease is looked at, 0 for never

    @property
    def leaving(self) -> int:
        """Number of locks that are given back, and whose return is not confirmed."""
        return len(self._leaving)

    def is_ours(self, name: str, holder: str, *, passes: bool) -> bool:
        """Whether a task of this node may have the lock now; else the cluster is asked for it.

        `passes`: another task has just given it back, so other nodes come first.
        """
        wish = self._wishes.get(name)
        if not self._tenure:
            return False  # membership() asks again
        if wish is None:
            token = self._state.rng.getrandbits(62)
            self._wishes[name] = _Wish(token, self._ask(name, token, "want", holder))
            return False
        if not wish.held:
            return False
        if self._state.now_ns >= self._until_ns:
            self._stalled = True
            return False
        if passes and self._connected and not self._away:
            wish.held = False
            wish.sent = self._ask(name, wish.token, "pass", holder)
            return False
        return True

    def leave(self, name: str) -> None:
        """Give a lock back, or want it no longer."""
        wish = self._wishes.pop(name, None)
        if wish is not None:
            sent = self._ask(name, wish.token, "leave", "")
            self._leaving[sent.request] = sent

    def _ask(self, name: str, token: int, kind: LockWishKind, holder: str) -> LockWish:
        self._requests += 1
        wish = LockWish(self._requests, name, token, kind, holder)
        if self._connected:
            self._state.out.append(AskLocks(self._tenure, [wish]))
        return wish

    def answered(self, event: events.LocksTold) -> list[tuple[str, str]]:
        """Return the locks that are news to this node, each with its holder; "": it is ours."""
        if event.tenure != self._tenure:
            return []
        news = []
        for reply in event.replies:
            self._leaving.pop(reply.request, None)
            wish = self._wishes.get(reply.name)
            if wish is None or wish.sent.request != reply.request or wish.held:
                continue
            wish.held = reply.taken
            news.append((reply.name, "" if reply.taken else reply.holder))
        self._watch_lease()
        return news

    def connected(self) -> None:
        self._connected = True
        wishes = [wish.sent for wish in self._wishes.values() if not wish.held]
        wishes += self._leaving.values()
        if wishes and self._tenure:
            self._state.out.append(AskLocks(self._tenure, wishes))

    def disconnected(self) -> None:
        self._connected = False

    def membership(self, event: events.MembershipTold) -> bool:
        """Return whether locks that nobody here has may be had now, or asked for again."""
        self._away, self._until_ns = event.away, event.until_ns
        stalled, self._stalled = self._stalled, False
        if event.tenure == self._tenure:
            self._watch_lease()
            return stalled
        self._tenure = event.tenure
        lost = [name for name, wish in self._wishes.items() if wish.held]
        if lost:
            self._warn("cluster.locks_lost", "its lease was over: it has lost", lost)
        self._wishes.clear()
        self._leaving.clear()
        return True

    def _watch_lease(self) -> None:
        if not self._due_ns and any(wish.held for wish in self._wishes.values()):
            self._due_ns = self._until_ns
            self._state.timers.at(self._due_ns, self._look_at_lease)

    def _look_at_lease(self) -> None:
        self._due_ns = 0
        held = [name for name, wish in self._wishes.items() if wish.held]
        if self._state.now_ns < self._until_ns:
            self._watch_lease()
        elif held:
            why = "the lease of this node is over: other nodes may get"
            self._warn("cluster.locks_over", why, held)

    def _warn(self, event: str, why: str, names: list[str]) -> None:
        shown = ", ".join(repr(name) for name in names[:NAMES_SHOWN])
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        reason = f"{why} locks that tasks here hold: {shown}{more}"
        self._state.report(event, "warning", reason=reason)

    def validate(self, names: Set[str]) -> None:
        """`names`: the locks that somebody on this machine has or waits for."""
        assert self._tenure or not (self._wishes or self._leaving)
        assert self._wishes.keys() <= names, (list(self._wishes), names)
