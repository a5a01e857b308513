"""A cluster sidecar in the simulation: what it does with the engine, and what goes wrong between.

It does one thing after another. Whatever is lost (EngineAway) is done again: an end is fenced by
its claim, and a claim whose answer was lost is given back by the next rejoin().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.messages import TaskDeclaration
from musterd.ipc.wire.node_messages import Attempt, AttemptEnd
from musterd.ipc.wire.node_messages import Held as WireHeld
from musterd.supervisor.cluster.engine import (
    End,
    EngineAway,
    Fenced,
    Grant,
    Held,
    LockAsk,
    NodeCard,
    PoolCard,
    ProgressMark,
    StateAsk,
    Want,
)
from musterd.supervisor.cluster.handler_calls import HandlerCalls
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events
from simulation.profile import MS, SEC, US

if TYPE_CHECKING:
    from simulation.cluster import Node

LEASE_NS = 3 * SEC
BEAT_NS = 1 * SEC
WIRE_NS = (20 * US, 1 * MS)
CALL_NS = (300 * US, 8 * MS)  # of the engine, and back
SLOW, SLOW_NS = (
    0.05,
    (100 * MS, 2 * SEC),
)  # some calls for handlers: their sidecar may die meanwhile
AGAIN_NS = (20 * MS, 300 * MS)  # after a lost answer
POLL_NS = (5 * MS, 50 * MS)  # before nothing is asked for again

Key = tuple[str, int]


class Sidecar:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._world = node.world
        self._engine = node.world.engine
        self.alive = True
        self.tenure = 0
        self._greeted = self._joined = False
        self._expected = 0  # ends that the greeting announced
        self._epoch = ""
        self._register = False  # rejoin() is due
        self._beat_at_ns = 0
        self._until_ns = 0  # the end of the lease, by the clock of the node
        self._cards: tuple[PoolCard, ...] = ()
        self._running: dict[Key, None] = {}
        self._ends: dict[Key, AttemptEnd] = {}
        self._begun: list[Held] = []
        self._marks: list[ProgressMark] = []
        self._handlers = HandlerCalls(node.name, node.rng)
        self._states_at_ns = 0  # after a claim that the engine did not know
        self._wants: dict[str, act.WantAttempts] = {}
        self._asked_ns: dict[str, int] = {}  # when a want found nothing
        self._sent: dict[str, int] = {}
        self._busy = False
        self._arrival_ns = self._departure_ns = 0
        self._stopped_until_ns = 0

    # -- messages -----------------------------------------------------------------------------

    def stop(self, for_ns: int) -> None:
        """Do nothing for a while; what comes waits."""
        self._stopped_until_ns = self._world.now_ns + for_ns

    def hear(self, action: Any) -> None:
        world = self._world
        due_ns = world.now_ns + world.delay(*WIRE_NS)
        self._arrival_ns = max(self._arrival_ns, due_ns, self._stopped_until_ns)
        world.after(self._arrival_ns - world.now_ns, self._heard, action)

    def _heard(self, action: Any) -> None:
        if not self.alive:
            return
        match action:
            case act.GreetCluster(tenure, held, unconfirmed):
                assert not self._greeted, "a sidecar is greeted twice"
                self._greeted = True
                self.tenure, self._expected = tenure, unconfirmed
                self._running = {(each.id, each.claim): None for each in held}
            case act.ShowPools(cards):
                self._cards = tuple(
                    PoolCard(
                        card.name,
                        card.places,
                        tuple(TaskDeclaration(each.method) for each in card.tasks),
                    )
                    for card in cards
                )
            case act.WantAttempts():
                self._wants[action.pool] = action
                self._asked_ns.pop(action.pool, None)
            case act.TellCluster(ends, begun, marks):
                for end in ends:
                    key = (end.id, end.claim)
                    assert key not in self._ends, f"{key} ends twice"
                    self._ends[key] = end
                    self._running.pop(key, None)
                    self._handlers.forget(key)
                    self._world.ended[end.kind] = self._world.ended.get(end.kind, 0) + 1
                self._begun += [Held(each.id, each.claim) for each in begun]
                self._marks += [ProgressMark(each.id, each.fraction, each.text) for each in marks]
            case act.AskStates(asks):
                self._handlers.ask_states(asks, self._running)
            case act.AskLocks(tenure, wishes):
                if tenure == self.tenure:
                    self._handlers.ask_locks(wishes)
        self._work()

    def _say(self, event: Any) -> None:
        world = self._world
        self._departure_ns = max(self._departure_ns, world.now_ns + world.delay(*WIRE_NS))
        delay_ns = self._departure_ns - world.now_ns
        self._node.in_life(delay_ns, self._node.hear_from_sidecar, self, event)

    # -- calls of the engine --------------------------------------------------------------------

    def _work(self) -> None:
        """Do the next thing, if nothing is under way."""
        world = self._world
        if self._busy or not self.alive or not self._greeted:
            return
        if world.now_ns < self._stopped_until_ns:
            self._later(self._stopped_until_ns - world.now_ns)
            return
        joined = self._joined and self.tenure
        if not joined and len(self._ends) < self._expected:
            return  # they are on their way
        if self._ends and self.tenure:
            self._call(self._finish, dict(self._ends))
        elif self.tenure and (not self._joined or self._register):
            self._call(self._rejoin, dict(self._running))
        elif not self.tenure:
            if self._cards:
                self._call(self._join)
        elif world.now_ns >= self._beat_at_ns:
            self._call(self._beat)
        elif self._ask_for_handlers():
            pass
        elif self._begun or self._marks:
            self._call(self._tell_begun)
        elif (want := self._next_want()) is not None:
            self._call(self._claim, want)
        else:
            self._later(world.delay(*POLL_NS))

    def _later(self, delay_ns: int) -> None:
        self._busy = True
        self._world.after(delay_ns, self._idle)

    def _idle(self) -> None:
        self._busy = False
        self._work()

    def _call(self, call: Callable[..., Any], *args: Any) -> None:
        self._busy = True
        world = self._world
        sent_ns = self._node.now_ns
        delay_ns = world.delay(*CALL_NS) // 2
        if call in (self._ask_states, self._ask_locks) and world.rng.random() < SLOW:
            delay_ns = world.delay(*SLOW_NS)
        world.after(delay_ns, self._arrive, call, args, sent_ns)

    def _arrive(self, call: Callable[..., Any], args: Any, sent_ns: int) -> None:
        """The call reaches the engine, or not; so does the answer. Death loses the answer alone."""
        world = self._world
        lost = 0.0 if world.is_calm else world.faults.lost
        answer: Any
        if call in (self._ask_states, self._ask_locks):
            if self.alive:
                self._node.session = self  # which ends the session of the one before
            elif self._node.session is not self:
                return
        if self._node.cut or world.rng.random() < lost / 2:
            answer = EngineAway("before its effect")
        else:
            try:
                answer = call(*args)
            except Fenced as fenced:
                answer = fenced
            if world.rng.random() < lost / 2:
                answer = EngineAway("after its effect")
        world.after(world.delay(*CALL_NS) // 2, self._answered, call, args, answer, sent_ns)

    def _answered(self, call: Callable[..., Any], args: Any, answer: Any, sent_ns: int) -> None:
        if not self.alive:
            return
        world = self._world
        world.trace.append((world.now_ns, f"{self._node.name} ==", (call.__name__, args, answer)))
        self._busy = False
        if isinstance(answer, EngineAway):
            if call == self._claim:
                self._register = True  # what was granted is not known
            elif call == self._ask_states:
                self._handlers.states_failed("away", refused=False)
            elif call == self._ask_locks:
                self._handlers.locks_failed()
            self._say_membership(away=True)
            self._later(world.delay(*AGAIN_NS))
            return
        if isinstance(answer, Fenced):
            world.fenced += 1
            self.tenure, self._joined, self._register = 0, False, False
            self._running, self._ends, self._begun, self._marks = {}, {}, [], []
            self._expected = 0
            self._handlers.reset()
            self._say(events.MembershipTold(0, 0))
        else:
            answer(sent_ns)
        self._work()

    # Each is called at the engine, and returns what to do when its answer arrives.

    def _join(self) -> Callable[[int], None]:
        node = self._node
        card = NodeCard(f"identity{node.number}", node.name, LEASE_NS, "", self._cards)
        joined = self._engine.join(card)

        def done(sent_ns: int) -> None:
            self.tenure, self._epoch, self._joined = joined.tenure, joined.epoch, True
            self._running, self._ends, self._begun = {}, {}, []
            self._beaten(sent_ns)

        return done

    def _rejoin(self, running: dict[Key, None]) -> Callable[[int], None]:
        held = [Held(*key) for key in running]
        epoch = str(self._engine._epoch)
        lost = set(self._engine.rejoin(self.tenure, held))

        def done(sent_ns: int) -> None:
            self._joined, self._register, self._epoch = True, False, epoch
            gone = [key for key in running if key[0] in lost]
            for key in gone:
                self._handlers.forget(key)
                self._running.pop(key, None)
                self._ends.pop(key, None)
            if gone:
                self._say(events.AttemptsLost([WireHeld(*key) for key in gone]))
            self._beaten(sent_ns)

        return done

    def _beat(self) -> Callable[[int], None]:
        orders = self._engine.beat(self.tenure)

        def done(sent_ns: int) -> None:
            self._register = self._register or orders.epoch != self._epoch
            cancel = [WireHeld(*key) for key in self._running if key[0] in orders.cancel]
            if cancel:
                self._say(events.AttemptsCancelled(cancel))
            self._beaten(sent_ns, draining=orders.draining)

        return done

    def _beaten(self, sent_ns: int, *, draining: bool = False) -> None:
        """The lease counts from before the call, by the clock of the node."""
        self._beat_at_ns = self._world.now_ns + BEAT_NS
        self._until_ns = sent_ns + LEASE_NS
        self._say_membership(draining=draining)

    def _say_membership(self, *, away: bool = False, draining: bool = False) -> None:
        if self._joined:
            self._say(events.MembershipTold(self.tenure, self._until_ns, away, draining))

    def _finish(self, ends: dict[Key, AttemptEnd]) -> Callable[[int], None]:
        world = self._world
        for key, end in ends.items():
            if self._engine.finish(self.tenure, [to_end(end)]):
                assert key not in world.counted, f"{key} counts twice"
                world.counted[key] = None

        def done(_: int) -> None:
            for key in ends:
                self._ends.pop(key, None)
            self._expected = 0
            self._say(events.EndsConfirmed([WireHeld(*key) for key in ends]))

        return done

    def _tell_begun(self) -> Callable[[int], None]:
        begun, marks = self._begun, self._marks
        self._engine.begun(self.tenure, begun)
        self._engine.progress(self.tenure, marks)

        def done(_: int) -> None:
            self._begun = [each for each in self._begun if each not in begun]
            self._marks = [each for each in self._marks if each not in marks]

        return done

    def _ask_for_handlers(self) -> bool:
        """Call for handlers, if they want something."""
        now_ns, handlers = self._world.now_ns, self._handlers
        lock_at_ns = handlers.lock_call_at()
        if handlers.has_states and now_ns >= self._states_at_ns:
            self._call(self._ask_states, handlers.next_states())
        elif lock_at_ns is not None and now_ns >= lock_at_ns:
            self._call(self._ask_locks, handlers.next_locks(now_ns))
        else:
            return False
        return True

    def _ask_states(self, asks: list[StateAsk]) -> Callable[[int], None]:
        views = self._engine.states(self.tenure, asks)

        def done(_: int) -> None:
            told, unknown = self._handlers.states_answered(views)
            for each in told:
                self._say(events.StatesTold(each.replies))
            if unknown:
                self._beat_at_ns = 0
                self._states_at_ns = self._world.now_ns + self._world.delay(*AGAIN_NS)

        return done

    def _ask_locks(self, asks: list[LockAsk]) -> Callable[[int], None]:
        views = self._engine.locks(self.tenure, asks)

        def done(_: int) -> None:
            replies = self._handlers.locks_answered(views)
            if replies:
                self._say(events.LocksTold(self.tenure, replies))

        return done

    def _next_want(self) -> act.WantAttempts | None:
        now_ns = self._world.now_ns
        for pool, want in self._wants.items():
            if self._missing(want) > 0 and now_ns >= self._asked_ns.get(pool, 0):
                return want
        return None

    def _missing(self, want: act.WantAttempts) -> int:
        """How many are wanted beyond what was on its way when the want was written."""
        return want.count - (self._sent.get(want.pool, 0) - want.seen)

    def _claim(self, want: act.WantAttempts) -> Callable[[int], None]:
        count = self._missing(want)
        grants = self._engine.claim(self.tenure, [Want(want.pool, count, want.names)])
        self._world.check_places()
        assert len(grants) <= count

        def done(sent_ns: int) -> None:
            pool = want.pool
            if not grants:
                self._asked_ns[pool] = self._world.now_ns + self._world.delay(*POLL_NS)
                return
            if self._wants.get(pool) is want:
                del self._wants[pool]
            self._sent[pool] = self._sent.get(pool, 0) + len(grants)
            self._running |= {(each.id, each.claim): None for each in grants}
            attempts = [to_attempt(each, sent_ns) for each in grants]
            half = len(attempts) // 2  # in two messages, if there are several
            for part in (attempts[:half], attempts[half:]):
                if part:
                    self._say(events.AttemptsGranted(want.request, pool, part))

        return done

    def leave(self) -> None:
        """The node has shut down."""
        if self.tenure and not self._node.cut:
            self._engine.leave(self.tenure)


def to_end(end: AttemptEnd) -> End:
    return End(**{name: getattr(end, name) for name in AttemptEnd.__struct_fields__})


def to_attempt(grant: Grant, sent_ns: int) -> Attempt:
    """By the clock of the node, from before the engine was asked."""
    return Attempt(
        grant.spec,
        grant.claim,
        grant.attempt,
        grant.crashes,
        grant.interruptions,
        grant.policy,
        sent_ns + grant.expires_in_ns if grant.expires_in_ns else 0,
    )
