"""The claimer: keeps this node's membership, claims attempts for it, and tells how they ended.

Pure: `handle(now_ns, event)`, between the supervisor (ipc/wire/node_messages.py) and the engine.

    membership   give back ─► join ─► beat, beat, ...; a beat brings cancels, and the epoch of the
                 server; other pools are declared within the tenure
    claims       at once when something is wanted and may be there; up to CLAIM_MAX together
    ends         in batches, until the engine has heard of them; `begun` and progress behind them
    handlers     their states and locks (handler_calls.py)
    time         tick, reap and retain: every node does it, and one of them is enough

A sidecar that takes over goes on with the tenure of the one before. What is held is known from the
supervisor. Claims that the supervisor does not know of (a claim's answer was lost) are given back
before anything else is claimed. After a restart of the server the claims are registered again. An
end that may have been told already is told again before that: its task may be queued for the next
attempt, and must not be taken for one whose claim was forgotten.

A name that another node has is waited for until that node's lease is over. If it is heard of
meanwhile it is alive: a daemon that was never a member then ends (NameInUse). One that was a member
keeps trying, and serves its clients.

While the engine is away ends wait: the supervisor bounds them, and wants nothing with too many.
`until_ns` of the membership is counted from before the call that prolonged it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import node_messages as wire
from musterd.supervisor.cluster import engine, rounds
from musterd.supervisor.cluster.calls import Calls, Lane, Wanted, due_times, make_due
from musterd.supervisor.cluster.grants import Problems, divided, next_wants, none, portions
from musterd.supervisor.cluster.handler_calls import HandlerCalls, Pair
from musterd.supervisor.cluster.logging_in import KnownLogins
from musterd.supervisor.cluster.node_cards import Declaring
from musterd.supervisor.cluster.notes import Notes
from musterd.supervisor.cluster.reports import Figures, node_lost, results, seen
from musterd.supervisor.cluster.sidecar_events import (
    ClaimerAction,
    EngineAnswered,
    EngineFailed,
    Leave,
    Left,
    NameInUse,
    NodeNotified,
    PoolsNotified,
    Standing,
    Tell,
)
from musterd.supervisor.core.model import actions, events

CLAIM_MAX = 100  # attempts of one call: more make it slower for everybody
FINISH_MAX = 100  # ends of one call ...
FINISH_BYTES = 4 * 1024 * 1024  # ... and their bytes; a single larger end goes alone
BEAT_NS = 5 * SECOND_NS  # at most between two heartbeats; less with a short lease
CLAIM_POLL_NS = SECOND_NS  # behind NOTIFY, which may be lost
AWAY_NS = 5 * SECOND_NS  # an engine that answers later is away
DAY_NS = 86_400 * SECOND_NS
NEVER_NS = 2**63
FAILING = 5  # failures of one kind of call in a row, until they are reported
TAKEN_NS = SECOND_NS // 2  # between two attempts to have a name that another node has
LEASE_NS_MIN = 5 * SECOND_NS  # of every node (config/cluster.py)
ALONE = "give each machine a name with cluster.node, and a state_dir, of its own"

PairsMessage = wire.Confirmed | wire.LoseAttempts | wire.CancelAttempts


class Claimer:
    def __init__(
        self, card: engine.NodeCard, rng: Random, keep_ns: int = DAY_NS, problems: Problems = none
    ) -> None:
        """`card` is without pools: the supervisor tells them. `keep_ns`: how long results stay."""
        self._card = card
        self._problems = problems
        self._declaring = Declaring(card)
        self._rng = rng
        self._now_ns = 0
        self._out: list[ClaimerAction] = []
        self._calls = Calls(rng)
        self.figures = Figures()
        # What the supervisor has still to tell before it is known what this node holds.
        self._more = True
        self._unheard = 0  # ends
        self._was_member = False
        self._begins = False  # what the daemon before has claimed is to go back
        self._leaving = self._has_left = False
        # Membership.
        self.tenure = 0
        self.policy: int | None = None  # version of the applied policy, once it is known
        self._epoch = ""  # of the server at which the claims are registered; "": not known
        self._server = ""  # the epoch that the server tells
        self._until_ns = 0
        self._away = False
        self._draining = False
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
        self._notes = Notes()
        self._scheduled: int | None = None  # as the last heartbeat said
        self._handlers = HandlerCalls(card.name, rng)
        self._logins = KnownLogins()
        self._rounds, self._look_rounds = rounds.of_time(rng, keep_ns), rounds.Looks(rng)
        self._member, self._claims, self._finishes = Lane(), Lane(), Lane()
        self._noting, self._time, self._looks = Lane(), Lane(), Lane()
        self._states, self._locks = Lane(), Lane()

    @property
    def standing(self) -> Standing | None:
        """Return what the engine knows of this node and it of the engine; None: nothing yet."""
        known = (self.tenure and self._declaring.known) or ()
        return Standing(self.policy, known, self._scheduled) if self.policy is not None else None

    def handle(self, now_ns: int, event: object) -> list[ClaimerAction]:
        self._now_ns = now_ns
        match event:
            case EngineAnswered(ticket, result):
                answered = self._calls.answered(ticket)
                if answered is not None:
                    answered(result)
            case EngineFailed():
                self._failed(event)
            case PoolsNotified(pools):
                self._woken = self._woken or any(pool in self._wants for pool in pools)
                if any(map(self._declaring.sleeps, pools)):
                    self._look_rounds.queued(now_ns)
            case NodeNotified():
                self._beat_at_ns = now_ns
                self._handlers.look_again(now_ns)
            case Leave():
                self._leaving = True
            case events.Ticked():
                pass
            case _:
                self._hear(event)
        self._go_on()
        self._end_if_it_may()
        out, self._out = self._out, []
        return out

    def _end_if_it_may(self) -> None:
        """End without leaving if attempts run (the next sidecar has them) or the engine is away."""
        told = not self._ends and not self._finishes.ticket
        over = not self.tenure or self._away or (told and self._held)
        if self._leaving and not self._has_left and over:
            self._has_left = True
            self._out.append(Left())

    def _hear(self, message: object) -> None:
        """Hear the supervisor."""
        match message:
            case wire.Greeting(_, tenure, held, unconfirmed, more, member):
                self.tenure, self._more, self._unheard = tenure, more, unconfirmed
                self._was_member = member
                self._begins = not member and not tenure
                self._repeated = unconfirmed  # the sidecar before may have told them
                self._unsure = tenure != 0
                self._hold(held)
            case wire.Holds(held, more):
                self._more = more
                self._hold(held)
            case wire.Pools(cards):
                if cards or self._declaring.cards:  # none at first: they are not known yet
                    self._declaring.cards = cards
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
                self._notes.begun([each for each in held if (each.id, each.claim) in self._held])
            case wire.ProgressMarks(marks):
                self._notes.marked(marks)
            case wire.AskStates(asks):
                self._handlers.ask_states(asks, self._held)
            case _:
                assert isinstance(message, wire.AskLocks), f"{message} means nothing here"
                if message.tenure == self.tenure:
                    self._handlers.ask_locks(message.wishes)

    def next_deadline(self) -> int | None:
        """Return when to come back with Ticked, if nothing happens before."""
        due_ns = min([*due_times(self._wanted_calls()), self._silent_at_ns()])
        return due_ns if due_ns < NEVER_NS else None

    def _silent_at_ns(self) -> int:
        """Return when an engine that answers nothing is away."""
        member = self._member
        silent = self.tenure and member.ticket and not self._away
        return member.called_ns + AWAY_NS if silent else NEVER_NS

    def validate(self) -> None:
        """Check what must hold between two events."""
        assert self._cancelled.keys() <= self._held.keys()
        assert bool(self._finishing) == bool(self._finishes.ticket)
        pending = max(0, self._unheard) + len(self._ends) + len(self._finishing)
        assert self._repeated <= pending
        pairs = {(end.id, end.claim) for end in (*self._ends, *self._finishing)}
        assert not self.tenure or pairs <= self._held.keys()
        self._handlers.validate()

    # -- calls --------------------------------------------------------------------------------

    def _wanted_calls(self) -> Iterable[Wanted]:
        """Yield what is to be called, and when."""
        if self._more or self._unheard > 0:
            return
        if not self.tenure:
            if self._begins and not self._leaving:
                yield self._member, 0, self._give_back
            elif self._declaring.cards and not self._leaving:
                yield self._member, 0, self._join
                if self._declaring.taken_since_ns is not None:  # maybe nobody else is there
                    yield self._time, self._rounds.at_ns("reap"), self._pass_time
            return
        yield self._member_call()
        if self._repeated or (self._ends and self._epoch):
            yield self._finishes, 0, self._finish
        notes_at_ns = self._notes.due_ns()
        if notes_at_ns is not None:
            yield self._noting, notes_at_ns, self._tell_notes
        if self._leaving:
            return
        if self._handlers.has_states:
            yield self._states, 0, self._ask_states
        lock_at_ns = self._handlers.lock_call_at()
        if lock_at_ns is not None:
            yield self._locks, lock_at_ns, self._ask_locks
        if self._may_claim and next_wants(self._wants, self._sent, CLAIM_MAX):
            yield self._claims, 0 if self._woken else self._claim_at_ns, self._claim
        yield self._time, self._rounds.due_ns, self._pass_time
        yield self._looks, self._look_rounds.due_ns, self._look

    def _member_call(self) -> Wanted:
        member, idle = self._member, not self._claims.ticket
        if self._leaving and not self._ends and not self._finishes.ticket and not self._held:
            return member, 0, self._leave
        declare_at_ns = self._declaring.due_ns()
        if declare_at_ns is not None and declare_at_ns <= self._beat_at_ns:
            return member, declare_at_ns, self._redeclare
        told = not self._repeated and not self._finishes.ticket
        if self._server != self._epoch and idle and told:
            return member, 0, self._rejoin
        if self._epoch and self._unsure and idle:
            return member, 0, self._release
        return member, self._beat_at_ns, self._beat

    def _go_on(self) -> None:
        if self._now_ns >= self._silent_at_ns():
            self._is_away("the cluster's database does not answer")
        make_due(self._wanted_calls(), self._now_ns)

    def _call(
        self, lane: Lane, answered: Callable[[object], None], method: str, *arguments: object
    ) -> None:
        self._out.append(self._calls.make(self._now_ns, lane, answered, method, *arguments))

    def _failed(self, event: EngineFailed) -> None:
        lane = self._calls.failed(event.ticket, self._now_ns)
        if lane is None:
            return
        self.figures.failed_calls += 1
        self._undo(lane, event)
        if event.fenced:
            self._lose_all(event.reason)
        elif event.taken_ns is not None:
            self._name_is_taken(event.reason, event.taken_ns)
            return
        elif event.refused:
            self._report("cluster.refused", "error", reason=event.reason)
        elif lane.failures == FAILING and not self._away:  # it answers, and does not do it
            self._report("cluster.failing", "error", reason=event.reason)
        if not event.fenced and lane is self._member and not self._away:
            self._is_away(event.reason)

    def _is_away(self, reason: str) -> None:
        self._away = True
        self._report("cluster.away", "warning", reason=reason)
        self._tell_membership()

    def _undo(self, lane: Lane, event: EngineFailed) -> None:
        """Put back what a failed call was about."""
        if lane is self._claims:
            self._unsure = self._unsure or not event.unsent  # it may have happened
        elif lane is self._finishes:
            if not event.unsent:
                self._repeated = max(self._repeated, len(self._finishing))
            self._ends.extendleft(reversed(self._finishing))
            self._finishing = []
        elif lane is self._noting:
            self._notes.failed()
        elif lane is self._states:
            for told in self._handlers.states_failed(event.reason, refused=event.refused):
                self._tell(told)
        elif lane is self._locks:
            self._handlers.locks_failed()

    # -- membership ---------------------------------------------------------------------------

    def _give_back(self) -> None:
        """Give back what the daemon before had; a join does it too, when workers have started."""
        self._begins = False
        self._call(self._member, _nothing, "give_back", self._card.identity)

    def _join(self) -> None:
        self._call(self._member, self._joined, "join", self._declaring.card(self._now_ns))

    def _joined(self, result: object) -> None:
        assert isinstance(result, engine.Joined)
        self.tenure, self._epoch, self._server = result.tenure, result.epoch, result.epoch
        self._was_member = True
        self.policy = result.policy
        self._look_rounds.hurry()
        self._unsure = False
        self._claim_at_ns = self._now_ns
        self._is_declared(None)
        self._is_alive()

    def _redeclare(self) -> None:
        card = self._declaring.card(self._now_ns)
        self._call(self._member, self._is_declared, "redeclare", self.tenure, card)

    def _is_declared(self, _result: object) -> None:
        self._declaring.told(self._now_ns)

    def _name_is_taken(self, reason: str, age_ns: int) -> None:
        first, lives = self._declaring.taken(self._now_ns, age_ns)
        if first:
            why = f"{reason}; this one waits until its lease is over"
            self._report("cluster.name_taken", "error", reason=why)
        elif lives and not self._was_member:
            self._out.append(NameInUse(f"{reason} that is alive: {ALONE}"))
        self._member.not_before_ns = self._now_ns + TAKEN_NS

    def _is_alive(self) -> None:
        called_ns, lease_ns = self._member.called_ns, self._card.lease_ns
        if self._declaring.known is None:  # the sidecar before had other settings, maybe
            lease_ns = min(lease_ns, LEASE_NS_MIN)
        self._until_ns = called_ns + lease_ns
        self._beat_at_ns = called_ns + min(BEAT_NS, lease_ns // 4)
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
        self._scheduled = result.scheduled
        self._is_alive()
        told = self._logins.news(result.logins, self._card.name, self._member.called_ns)
        if told is not None:
            self._tell(told)
        self._server = result.epoch
        if self._server != self._epoch:
            self._epoch = ""
        cancelled = [pair for pair in self._pairs_of(result.cancel) if pair not in self._cancelled]
        self._cancelled.update(dict.fromkeys(cancelled))
        self._tell_pairs(wire.CancelAttempts, cancelled)

    def _rejoin(self) -> None:
        """Register what is held: no claim is under way, and no end is told meanwhile."""
        self._call(self._member, self._rejoined, "rejoin", self.tenure, self._held_list())

    def _rejoined(self, result: object) -> None:
        assert isinstance(result, list)
        self._epoch = self._server
        self._unsure = False  # whatever else the tenure had went back
        self._claim_at_ns = self._now_ns
        lost = self._pairs_of(result)
        pending = {(end.id, end.claim) for end in (*self._ends, *self._finishing)}
        # What has ended meanwhile is confirmed as usual, and does not count.
        self._drop([pair for pair in lost if pair not in pending])

    def _release(self) -> None:
        self._call(self._member, self._released, "release", self.tenure, self._held_list())

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
        lanes = (
            self._member,
            self._claims,
            self._finishes,
            self._noting,
            self._states,
            self._locks,
        )
        self._calls.drop(*lanes)
        self._handlers.reset()
        self.tenure, self._epoch, self._server, self._declaring.known = 0, "", "", None
        self._notes = Notes()
        self._unsure = False
        self._confirm(ends)
        self._drop(list(self._held))
        self._tell_membership()

    def _leave(self) -> None:
        self._call(self._member, self._left, "leave", self.tenure)

    def _left(self, _result: object) -> None:
        self.tenure = 0

    # -- attempts -----------------------------------------------------------------------------

    def _hold(self, held: Iterable[wire.Held]) -> None:
        self._held.update({(each.id, each.claim): None for each in held})

    def _held_list(self) -> list[engine.Held]:
        return [engine.Held(*pair) for pair in self._held]

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
            self._notes.forget(pair)
            self._handlers.forget(pair)

    def _confirm(self, ends: list[wire.AttemptEnd]) -> None:
        pairs = [(end.id, end.claim) for end in ends]
        self._forget(pairs)
        self._tell_pairs(wire.Confirmed, pairs)

    def _tell_pairs(self, kind: type[PairsMessage], pairs: list[Pair]) -> None:
        for at in range(0, len(pairs), wire.ATTEMPTS_MAX):
            part = [wire.Held(*pair) for pair in pairs[at : at + wire.ATTEMPTS_MAX]]
            self._tell(kind(part))

    def _tell(self, message: wire.SidecarMessage) -> None:
        self._out.append(Tell(message))

    # -- claims -------------------------------------------------------------------------------

    @property
    def _may_claim(self) -> bool:
        if self._unsure or not self._epoch or self._draining:
            return False
        return self._now_ns < self._until_ns

    def _claim(self) -> None:
        self._woken = False
        self._claim_at_ns = self._now_ns + round(CLAIM_POLL_NS * self._rng.uniform(0.8, 1.2))
        wants = next_wants(self._wants, self._sent, CLAIM_MAX)
        self._call(self._claims, self._granted, "claim", self.tenure, wants)

    def _granted(self, result: object) -> None:
        assert isinstance(result, list)
        self.figures.claims += 1
        self.figures.attempts += len(result)
        self.figures.claim_times.add(max(0, self._now_ns - self._claims.called_ns))
        self._held.update({(grant.id, grant.claim): None for grant in result})
        pools, refusals = divided(result, self._problems, self._claims.called_ns)
        self._ends.extend(refusals)
        for pool, attempts in pools.items():
            self._sent[pool] = self._sent.get(pool, 0) + len(attempts)
            request = self._wants.pop(pool).request if pool in self._wants else 0
            for part in portions(attempts):
                self._tell(wire.Granted(request, pool, part))
        if result:  # others may have more
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

    def _tell_notes(self) -> None:
        method, notes = self._notes.next(self._now_ns)
        self._call(self._noting, self._notes.answered, method, self.tenure, notes)

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
            self._out.append(node_lost(each))

    def _looked(self, result: object) -> None:
        at_ns = 0
        if isinstance(result, engine.Statistics):  # else another node is at it, for the first time
            at_ns = max(0, self._looks.called_ns - result.age_ns)
            self._tell(seen(result, at_ns))
        self._look_rounds.seen(at_ns)

    def _report(self, event: str, level: str, *, reason: str, count: int = 0) -> None:
        self._out.append(actions.Report(event, level, reason=reason, count=count))


def _nothing(_result: object) -> None: ...
