"""The claimer: keeps this node's membership, claims attempts for it, and tells how they ended.

Pure: `handle(now_ns, event)`. On one side is the supervisor of this machine, which wants attempts
and runs them (ipc/wire/node_messages.py); on the other the engine.

    membership   join ─► beat, beat, ...; a beat brings cancels, and the epoch of the server
    claims       at once when something is wanted and may be there; up to CLAIM_MAX together
    ends         in batches, until the engine has heard of them; `begun` and progress behind them
    handlers     their states and locks (handler_calls.py)
    time         tick, reap and retain: every node does it, and one of them is enough

A sidecar that takes over goes on with the tenure of the one before. What is held is known from the
supervisor. Claims that the supervisor does not know of (a claim's answer was lost) are given back
before anything else is claimed. After a restart of the server the claims are registered again, but
not those whose end the engine may have heard: such a claim would be made anew, and its end would
count twice. So these ends are told first.

While the engine is away ends wait: the supervisor bounds them, and wants nothing when it has too
many. `until_ns` of the membership is counted from before the call that prolonged it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from msgspec import Struct, structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import node_messages as wire
from musterd.supervisor.cluster import engine, rounds
from musterd.supervisor.cluster.calls import Lane
from musterd.supervisor.cluster.grants import attempt_of, engine_card, portions, without_places
from musterd.supervisor.cluster.handler_calls import HandlerCalls, Pair
from musterd.supervisor.cluster.reports import Figures, node_lost, results, seen
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EngineAnswered,
    EngineFailed,
    NodeNotified,
    PoolsNotified,
    Standing,
)
from musterd.supervisor.core.model import actions, events

CLAIM_MAX = 100  # attempts of one call: more make it slower for everybody
FINISH_MAX = 100  # ends of one call ...
FINISH_BYTES = 4 * 1024 * 1024  # ... and their bytes; a single larger end goes alone
BEAT_NS = 5 * SECOND_NS  # at most between two heartbeats; less with a short lease
CLAIM_POLL_NS = SECOND_NS  # behind NOTIFY, which may be lost
DAY_NS = 86_400 * SECOND_NS
MARKS_NS = SECOND_NS  # between two reports of progress
BEGUN_NS = SECOND_NS // 5  # begun attempts are told together


class Tell(Struct, frozen=True):
    """Send a message to the supervisor."""

    message: wire.SidecarMessage


class Left(Struct, frozen=True):
    """The node has left the cluster: the process may end."""


class Leave(Struct, frozen=True):
    """The process is to end (an event)."""


Action = Call | Tell | Left | actions.Report


class Claimer:
    def __init__(self, card: engine.NodeCard, rng: Random, keep_ns: int = DAY_NS) -> None:
        """`card` is without pools: the supervisor tells them. `keep_ns`: how long results stay."""
        self._card = card
        self._rng = rng
        self._now_ns = 0
        self._out: list[Action] = []
        self._ticket = 0
        self.figures = Figures()
        # What the supervisor has still to tell before it is known what this node holds.
        self._more = True
        self._unheard = 0  # ends
        self._leaving = False
        # Membership.
        self.tenure = 0
        self.policy: int | None = None  # version of the applied policy, once it is known
        self._epoch = ""  # of the server at which the claims are registered; "": not known
        self._server = ""  # the epoch that the server tells
        self._until_ns = 0
        self._away = False
        self._draining = False
        self._declared: tuple[wire.PoolCard, ...] | None = None  # what the engine knows
        self._cards: tuple[wire.PoolCard, ...] | None = None
        self._unsure = False  # there may be claims of ours that nobody knows of
        self._beat_at_ns = 0
        # Attempts.
        self._held: dict[Pair, None] = {}
        self._cancelled: dict[Pair, None] = {}
        self._wants: dict[str, wire.Want] = {}
        self._sent: dict[str, int] = {}  # attempts sent over this connection, by pool
        self._claiming: list[engine.Want] = []
        self._claim_at_ns = 0
        self._woken = False
        self._ends: deque[wire.AttemptEnd] = deque()
        self._finishing: list[wire.AttemptEnd] = []
        self._repeated = 0  # of the first ends: the engine may have heard of them
        self._begun: dict[Pair, None] = {}
        self._begun_at_ns = 0
        self._marks: dict[str, wire.AttemptProgress] = {}
        self._marking: dict[str, wire.AttemptProgress] = {}  # in the call under way
        self._marks_at_ns = 0
        self._handlers = HandlerCalls(card.name, rng)
        self._rounds, self._look_rounds = rounds.of_time(rng, keep_ns), rounds.of_looks(rng)
        # Calls, each with what becomes of its answer.
        self._member, self._claims, self._finishes = Lane(), Lane(), Lane()
        self._notes, self._time, self._looks = Lane(), Lane(), Lane()
        self._states, self._locks = Lane(), Lane()
        self._answers: dict[int, Callable[[object], None]] = {}

    @property
    def standing(self) -> Standing | None:
        """Return what the engine knows of this node and it of the engine; None: nothing yet."""
        if self.policy is None:
            return None
        known = self._declared if self.tenure and self._declared is not None else ()
        return Standing(self.policy, known)

    def handle(self, now_ns: int, event: object) -> list[Action]:
        self._now_ns = now_ns
        match event:
            case EngineAnswered(ticket, result):
                self._answered(ticket, result)
            case EngineFailed():
                self._failed(event)
            case PoolsNotified(pools):
                self._woken = self._woken or any(pool in self._wants for pool in pools)
            case NodeNotified():
                self._beat_at_ns = now_ns
                self._handlers.look_again(now_ns)
            case Leave():
                self._leaving = True
                if not self.tenure:
                    self._out.append(Left())
            case events.Ticked():
                pass
            case _:
                self._hear(event)
        self._go_on()
        out, self._out = self._out, []
        return out

    def _hear(self, message: object) -> None:
        """Hear the supervisor."""
        match message:
            case wire.Greeting(_, tenure, held, unconfirmed, more):
                self.tenure, self._more, self._unheard = tenure, more, unconfirmed
                self._repeated = unconfirmed  # the sidecar before may have told them
                self._unsure = tenure != 0
                self._hold(held)
            case wire.Holds(held, more):
                self._more = more
                self._hold(held)
            case wire.Pools(cards):
                self._cards = cards
                if self.tenure and self._declared is None:  # the sidecar before has joined with it
                    self._declared = cards
            case wire.Want(_, pool):
                self._wants[pool] = message
                self._claim_at_ns = self._now_ns
            case wire.Finish(ends):
                self._hold(wire.Held(end.id, end.claim) for end in ends)
                self._ends.extend(ends)
                self._unheard -= len(ends)
                for end in ends:
                    self._handlers.forget((end.id, end.claim))
            case wire.Begun(held):
                self._begun.update({(each.id, each.claim): None for each in held})
            case wire.ProgressMarks(marks):
                self._marks.update({mark.id: mark for mark in marks})
            case wire.AskStates(asks):
                self._handlers.ask_states(asks, self._held)
            case _:
                assert isinstance(message, wire.AskLocks), f"{message} means nothing here"
                if message.tenure == self.tenure:
                    self._handlers.ask_locks(message.wishes)

    def next_deadline(self) -> int | None:
        """Return when to come back with Ticked, if nothing happens before."""
        return min(
            (
                max(at_ns, lane.not_before_ns)
                for lane, at_ns, _ in self._wanted_calls()
                if not lane.ticket
            ),
            default=None,
        )

    def validate(self) -> None:
        """Check what must hold between two events."""
        assert self._cancelled.keys() <= self._held.keys()
        assert bool(self._finishing) == bool(self._finishes.ticket)
        pending = {(end.id, end.claim) for end in (*self._ends, *self._finishing)}
        assert not self.tenure or pending <= self._held.keys()
        self._handlers.validate()

    # -- calls --------------------------------------------------------------------------------

    def _wanted_calls(self) -> Iterable[tuple[Lane, int, Callable[[], None]]]:
        """Yield what is to be called, and when."""
        if self._more or self._unheard > 0:
            return
        if not self.tenure:
            if self._cards and not self._leaving:
                yield self._member, 0, self._join
            return
        yield self._member_call()
        if self._repeated or (self._ends and self._epoch):
            yield self._finishes, 0, self._finish
        if self._begun:
            yield self._notes, self._begun_at_ns, self._tell_begun
        elif self._marks:
            yield self._notes, self._marks_at_ns, self._tell_progress
        if self._leaving:
            return
        if self._handlers.has_states:
            yield self._states, 0, self._ask_states
        lock_at_ns = self._handlers.lock_call_at()
        if lock_at_ns is not None:
            yield self._locks, lock_at_ns, self._ask_locks
        if self._may_claim and self._next_wants():
            yield self._claims, 0 if self._woken else self._claim_at_ns, self._claim
        yield self._time, self._rounds.due_ns, self._pass_time
        yield self._looks, self._look_rounds.due_ns, self._look

    def _member_call(self) -> tuple[Lane, int, Callable[[], None]]:
        member, idle = self._member, not self._claims.ticket
        if self._leaving and not self._ends and not self._finishes.ticket:
            return member, 0, self._leave
        if self._card_is_stale and not self._held and idle:
            return member, 0, self._join
        if self._epoch and self._unsure and idle:
            return member, 0, self._release
        if self._server != self._epoch and not self._repeated and not self._finishes.ticket:
            return member, 0, self._rejoin
        return member, self._beat_at_ns, self._beat

    def _go_on(self) -> None:
        for lane, at_ns, make in list(self._wanted_calls()):
            if not lane.ticket and self._now_ns >= max(at_ns, lane.not_before_ns):
                make()

    def _call(
        self, lane: Lane, answered: Callable[[object], None], method: str, *arguments: object
    ) -> None:
        self._ticket += 1
        lane.called(self._ticket, self._now_ns)
        self._answers[self._ticket] = answered
        self._out.append(Call(self._ticket, method, arguments))

    def _lane_of(self, ticket: int) -> Lane | None:
        lanes = (self._member, self._claims, self._finishes, self._notes, self._time,
                 self._looks, self._states, self._locks)  # fmt: skip
        return next((lane for lane in lanes if lane.ticket == ticket), None)

    def _answered(self, ticket: int, result: object) -> None:
        lane, answered = self._lane_of(ticket), self._answers.pop(ticket, None)
        if lane is not None and answered is not None:
            lane.answered()
            answered(result)

    def _failed(self, event: EngineFailed) -> None:
        lane = self._lane_of(event.ticket)
        self._answers.pop(event.ticket, None)
        if lane is None:
            return
        self.figures.failed_calls += 1
        lane.failed(self._now_ns, self._rng)
        if lane is self._claims:
            self._unsure = True  # it may have happened
        elif lane is self._finishes:
            if not event.unsent:
                self._repeated = max(self._repeated, len(self._finishing))
            self._ends.extendleft(reversed(self._finishing))
            self._finishing = []
        elif lane is self._notes:
            self._mark_again(self._marking)
        elif lane is self._states:
            for told in self._handlers.states_failed(event.reason, refused=event.refused):
                self._tell(told)
        elif lane is self._locks:
            self._handlers.locks_failed()
        if event.fenced:
            self._lose_all(event.reason)
        elif event.refused:
            self._report("cluster.refused", "error", reason=event.reason)
        if not event.fenced and lane is self._member and not self._away:
            self._away = True
            self._report("cluster.away", "warning", reason=event.reason)
            self._tell_membership()

    # -- membership ---------------------------------------------------------------------------

    @property
    def _card_is_stale(self) -> bool:
        """Whether the engine must be told of other pools. How many places they have may wait."""
        if self._declared is None or self._cards is None:
            return False  # the one before has told them
        return without_places(self._declared) != without_places(self._cards)

    def _join(self) -> None:
        assert self._cards is not None
        pools = tuple(map(engine_card, self._cards))
        self._declared = self._cards
        self.tenure, self._epoch, self._server = 0, "", ""
        self._call(self._member, self._joined, "join", structs.replace(self._card, pools=pools))

    def _joined(self, result: object) -> None:
        assert isinstance(result, engine.Joined)
        self.tenure, self._epoch, self._server = result.tenure, result.epoch, result.epoch
        self.policy = result.policy
        self._look_rounds.hurry()
        self._unsure = False
        self._claim_at_ns = self._now_ns
        self._is_alive()

    def _is_alive(self) -> None:
        called_ns = self._member.called_ns
        self._until_ns = called_ns + self._card.lease_ns
        self._beat_at_ns = called_ns + min(BEAT_NS, self._card.lease_ns // 4)
        self._away = False
        self._tell_membership()

    def _tell_membership(self) -> None:
        until_ns = self._until_ns if self.tenure else 0
        policy = self.policy or 0
        self._tell(wire.Membership(self.tenure, until_ns, self._away, self._draining, policy))

    def _beat(self) -> None:
        self._call(self._member, self._ordered, "beat", self.tenure)

    def _ordered(self, result: object) -> None:
        assert isinstance(result, engine.Orders)
        self._draining, self.policy = result.draining, result.policy
        self._is_alive()
        self._server = result.epoch
        if self._server != self._epoch:
            self._epoch = ""
        cancelled = [pair for pair in self._pairs_of(result.cancel) if pair not in self._cancelled]
        self._cancelled.update(dict.fromkeys(cancelled))
        self._tell_pairs(wire.CancelAttempts, cancelled)

    def _rejoin(self) -> None:
        self._call(
            self._member, self._rejoined, "rejoin", self.tenure, self._held_list(engine.Held)
        )

    def _rejoined(self, result: object) -> None:
        assert isinstance(result, list)
        self._epoch = self._server
        self._claim_at_ns = self._now_ns
        lost = self._pairs_of(result)
        pending = {(end.id, end.claim) for end in (*self._ends, *self._finishing)}
        # An end that is told already may be what made it "lost": that one is confirmed as usual.
        self._drop([pair for pair in lost if pair not in pending])

    def _release(self) -> None:
        self._call(
            self._member, self._released, "release", self.tenure, self._held_list(engine.Held)
        )

    def _released(self, result: object) -> None:
        self._unsure = False
        self._claim_at_ns = self._now_ns
        if result:
            reason = f"{result} claims whose grant was lost went back"
            assert isinstance(result, int)
            self._report("cluster.released", "warning", reason=reason, count=result)

    def _lose_all(self, reason: str) -> None:
        """The tenure is over: nothing that this node holds counts any more."""
        if not self.tenure:
            return
        ends = [*self._finishing, *self._ends]
        self.figures.fenced += results(ends)
        held = len(self._held)
        why = f"{reason}: {held} attempts of this node do not count and run again elsewhere"
        self._report("cluster.fenced", "warning", reason=why, count=held)
        self._ends.clear()
        self._finishing, self._repeated = [], 0
        # What is under way belongs to the tenure that is over: its answers mean nothing.
        self._member, self._claims, self._finishes, self._notes = Lane(), Lane(), Lane(), Lane()
        self._states, self._locks = Lane(), Lane()
        self._handlers.reset()
        self.tenure, self._epoch, self._server, self._declared = 0, "", "", None
        self._begun, self._marks = {}, {}
        self._unsure = False
        self._confirm(ends)
        self._drop(list(self._held))
        self._tell_membership()

    def _leave(self) -> None:
        self._call(self._member, self._has_left, "leave", self.tenure)

    def _has_left(self, _result: object) -> None:
        self.tenure = 0
        self._out.append(Left())

    # -- attempts -----------------------------------------------------------------------------

    def _hold(self, held: Iterable[wire.Held]) -> None:
        self._held.update({(each.id, each.claim): None for each in held})

    def _held_list(self, kind: type[engine.Held]) -> list[engine.Held]:
        return [kind(*pair) for pair in self._held]

    def _pairs_of(self, ids: Iterable[str]) -> list[Pair]:
        wanted = set(ids)
        return [pair for pair in self._held if pair[0] in wanted] if wanted else []

    def _drop(self, pairs: list[Pair]) -> None:
        """Tell the supervisor that attempts are not ours any more."""
        self._forget(pairs)
        self._tell_pairs(wire.LoseAttempts, pairs)

    def _forget(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            self._held.pop(pair, None)
            self._cancelled.pop(pair, None)
            self._begun.pop(pair, None)
            self._marks.pop(pair[0], None)
            self._marking.pop(pair[0], None)
            self._handlers.forget(pair)

    def _confirm(self, ends: list[wire.AttemptEnd]) -> None:
        pairs = [(end.id, end.claim) for end in ends]
        self._forget(pairs)
        self._tell_pairs(wire.Confirmed, pairs)

    def _tell_pairs(
        self,
        kind: type[wire.Confirmed] | type[wire.LoseAttempts] | type[wire.CancelAttempts],
        pairs: list[Pair],
    ) -> None:
        for at in range(0, len(pairs), wire.ATTEMPTS_MAX):
            part = [wire.Held(*pair) for pair in pairs[at : at + wire.ATTEMPTS_MAX]]
            self._tell(kind(part))

    def _tell(self, message: wire.SidecarMessage) -> None:
        self._out.append(Tell(message))

    # -- claims -------------------------------------------------------------------------------

    @property
    def _may_claim(self) -> bool:
        if self._unsure or not self._epoch or self._draining or self._card_is_stale:
            return False
        return self._now_ns < self._until_ns

    def _next_wants(self) -> list[engine.Want]:
        """Return what to claim: what is wanted, without what is on its way to the supervisor."""
        wants, left = [], CLAIM_MAX
        for pool, want in self._wants.items():
            count = min(left, want.count - (self._sent.get(pool, 0) - want.seen))
            if count > 0:
                wants.append(engine.Want(pool, count, want.names))
                left -= count
        return wants

    def _claim(self) -> None:
        self._woken = False
        self._claim_at_ns = self._now_ns + round(CLAIM_POLL_NS * self._rng.uniform(0.8, 1.2))
        wants = self._next_wants()
        self._call(self._claims, self._granted, "claim", self.tenure, wants)

    def _granted(self, result: object) -> None:
        assert isinstance(result, list)
        self.figures.claims += 1
        self.figures.attempts += len(result)
        self.figures.claim_times.add(max(0, self._now_ns - self._claims.called_ns))
        pools: dict[str, list[wire.Attempt]] = {}
        for grant in result:
            assert isinstance(grant, engine.Grant)
            attempt = attempt_of(grant, self._claims.called_ns)
            pools.setdefault(grant.spec.name.partition(".")[0], []).append(attempt)
            self._held[grant.id, grant.claim] = None
        for pool, attempts in pools.items():
            self._sent[pool] = self._sent.get(pool, 0) + len(attempts)
            request = self._wants.pop(pool).request if pool in self._wants else 0
            for part in portions(attempts):
                self._tell(wire.Granted(request, pool, part))
        if pools:  # others may have more
            self._claim_at_ns = self._now_ns

    # -- ends ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        size = 0
        number = min(FINISH_MAX, self._repeated or FINISH_MAX)
        while self._ends and len(self._finishing) < number:
            size += self._ends[0].size
            if self._finishing and size > FINISH_BYTES:
                break
            self._finishing.append(self._ends.popleft())
        ends = [engine.End(*structs.astuple(end)) for end in self._finishing]
        self._call(self._finishes, self._finished, "finish", self.tenure, ends)

    def _finished(self, result: object) -> None:
        assert isinstance(result, list)
        ends, self._finishing = self._finishing, []
        self.figures.ends += len(ends)
        # Of those that are told again, the call before may have counted.
        self.figures.fenced += results(ends[self._repeated :], {told.id for told in result})
        self._repeated = max(0, self._repeated - len(ends))
        self._confirm(ends)

    def _tell_begun(self) -> None:
        self._begun_at_ns = self._now_ns + BEGUN_NS
        pairs = [pair for pair in self._begun if pair in self._held]
        self._begun = {}
        held = [engine.Held(*pair) for pair in pairs]
        self._call(self._notes, _nothing, "begun", self.tenure, held)

    def _tell_progress(self) -> None:
        self._marks_at_ns = self._now_ns + MARKS_NS
        self._marking, self._marks = self._marks, {}
        marks = [engine.ProgressMark(*structs.astuple(each)) for each in self._marking.values()]
        self._call(self._notes, self._marked, "progress", self.tenure, marks)

    def _marked(self, result: object) -> None:
        assert isinstance(result, list)
        self._mark_again({id_: self._marking[id_] for id_ in result if id_ in self._marking})

    def _mark_again(self, marks: dict[str, wire.AttemptProgress]) -> None:
        """Tell again what came too early, or failed; what is newer wins."""
        self._marks = {**marks, **self._marks}
        self._marking = {}

    # -- handlers -----------------------------------------------------------------------------

    def _ask_states(self) -> None:
        asks = self._handlers.next_states()
        self._call(self._states, self._states_answered, "states", self.tenure, asks)

    def _states_answered(self, result: object) -> None:
        assert isinstance(result, list)
        told, unknown = self._handlers.states_answered(result)
        for each in told:
            self._tell(each)
        if unknown:  # the server may have crashed: a beat finds out
            self._beat_at_ns = self._now_ns
            self._states.failed(self._now_ns, self._rng)

    def _ask_locks(self) -> None:
        asks = self._handlers.next_locks(self._now_ns)
        self._call(self._locks, self._locks_answered, "locks", self.tenure, asks)

    def _locks_answered(self, result: object) -> None:
        assert isinstance(result, list)
        replies = self._handlers.locks_answered(result)
        if replies:
            self._tell(wire.LocksTold(self.tenure, replies))

    # -- time ---------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        method, arguments = self._rounds.turn(self._now_ns)
        answered = self._reaped if method == "reap" else _nothing
        self._call(self._time, answered, method, *arguments)

    def _look(self) -> None:
        method, arguments = self._look_rounds.turn(self._now_ns)
        self._call(self._looks, self._looked, method, *arguments)

    def _reaped(self, result: object) -> None:
        assert isinstance(result, list)
        self.figures.reaped += len(result)
        for each in result:
            assert isinstance(each, engine.Reaped)
            self._out.append(node_lost(each))

    def _looked(self, result: object) -> None:
        if result is None:  # another node is at it, for the first time
            return
        assert isinstance(result, engine.Statistics)
        at_ns = max(0, self._looks.called_ns - result.age_ns)
        self._tell(seen(result, at_ns))

    def _report(self, event: str, level: str, *, reason: str, count: int = 0) -> None:
        self._out.append(actions.Report(event, level, reason=reason, count=count))


def _nothing(_result: object) -> None: ...
