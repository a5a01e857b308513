"""The gateway: serves clients of tasks.sock out of the engine. Pure: `handle(now_ns, event)`.

It keeps nothing that a client was promised. Every promise is the engine's: no client is told that a
task was accepted, cancelled or has ended before the engine has committed that. If this process
dies, clients connect to the next one, send again what was not acknowledged, and watch again what
they wait for.

    submits, cancels, invalidations ──► one queue ──► one call at a time, in order
    watched ids                     ──► LookUp ──► LookedUp     (portions: node/lookups.py)
    ids that have ended             ──► LookUp of who watches them

*Batches.* An idle gateway calls the engine at once. While a call is under way, requests gather, and
the next call takes as many as fit.

*Waiting.* The tasks that were submitted here have this node's `waiter`. The engine tells which of
them have ended since the call before (`ended`), at each NOTIFY, and every POLL_NS behind that. No
other call is made before the first answer: from then on no end is missed. Tasks that others
submitted are looked at in turn. After an outage everything that is watched is looked at once.

*Progress* is told at most once a second. That of tasks with this node's waiter is asked for as long
as anything is watched; that of other tasks, and what late watchers have missed, comes with the
looks at them.

*Outages.* A call that failed is made again, as a resend: it may have happened. After AWAY_NS, new
submits are refused (QueueFull). What was sent to the engine stays unanswered, because nobody knows
whether it is accepted. An engine that answers and takes nothing (its disk is full) is tried with
each submit for AWAY_NS.
"""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    QUEUE_FULL,
    Change,
    Outcome,
    ProgressNote,
    Rejection,
)
from musterd.supervisor.cluster.calls import (
    Calls,
    Figures,
    Lane,
    Taking,
    Wanted,
    due_times,
    make_due,
)
from musterd.supervisor.cluster.client_requests import (
    REQUEST_BYTES,
    Cancel,
    Invalidate,
    Request,
    Submit,
    go_together,
    weight_of,
)
from musterd.supervisor.cluster.engine import (
    BATCH_MAX,
    Ended,
    Fetched,
    Verdict,
)
from musterd.supervisor.cluster.handling import ProgressMark
from musterd.supervisor.cluster.sidecar_events import (
    Action,
    EndPeer,
    EngineAnswered,
    EngineFailed,
    LookedUp,
    Notified,
    TellChange,
)
from musterd.supervisor.cluster.watches import LOOK_NS, Watches
from musterd.supervisor.cluster.watching import CHANGED, Changed
from musterd.supervisor.core.model import actions, events

POLL_NS = SECOND_NS // 2  # behind NOTIFY, which may be lost
IDLE_POLL_NS = 30 * SECOND_NS  # while nobody waits: what ended meanwhile stays little
AWAY_NS = 5 * SECOND_NS  # an engine that answers later is away: new submits are refused
RETRY_AFTER_NS = 5 * SECOND_NS  # what refused clients are told
CHANGES_NS = SECOND_NS  # between two looks at the changes of schedules
MARKS_NS = SECOND_NS  # between two looks at the progress of tasks
# A mark is seen at its commit, which is later than its time. What is older is known from a look at
# the task itself.
MARKS_SLACK_NS, MARKS_AGE_MAX_NS = 2 * SECOND_NS, 60 * SECOND_NS
BATCH_BYTES = 4 * 1024 * 1024  # of one call; a single larger submit goes alone
QUEUED_BYTES_MAX = 64 * 1024 * 1024  # of requests that wait for the engine
QUEUED_MAX = 100_000  # requests that wait
WATCHES_MAX = 1_000_000  # pairs of a client and a task that it waits for

AWAY = "the cluster's database does not answer; the task was not accepted"
FULL = "too much waits for the cluster's database; the task was not accepted"
CROWDED = f"the clients of this node wait for {WATCHES_MAX} tasks; the task was not accepted"
REFUSED = "the cluster's database refused the task"
GONE = "its client is gone"
TOO_MANY = "too much waits for the cluster's database"


class Gateway:
    def __init__(self, waiter: int, rng: Random) -> None:
        """`waiter` is the same in each life of this node."""
        self._waiter = waiter
        self._now_ns = 0
        self._out: list[Action] = []
        self._calls = Calls(rng)
        self.figures = Figures()
        self.away_since_ns: int | None = None
        self.refusing = False  # the engine has been away for AWAY_NS
        self.held = False  # nothing is written: the engine does not know this node's tasks yet
        self._last_failure = ""  # why it is away
        self._taking = Taking()
        # Requests, and those that are in the call under way.
        self._queue: deque[Request] = deque()
        self._queued_bytes = 0
        self._writing: list[Request] = []
        self._flying: set[str] = set()  # ids of submits in the call under way
        self._write = Lane()
        self._watches = Watches()
        self._ended_early: dict[str, None] = {}  # ended before their submit was answered
        self._after: str | None = None
        self._listen = Lane()
        self._notified = False
        self._check = Lane()
        self._checking: list[str] = []
        self._check_at_ns = 0
        # Progress.
        self._marks = Lane()
        self._marks_at_ns = 0
        self._marked_ns: int | None = None  # when the last look that succeeded began
        # Changes of schedules.
        self._followers: dict[bytes, bool] = {}  # whether each has its first answer
        self._newest: dict[str, Change] | None = None
        self._change = ""
        self._changes = Lane()
        self._changes_at_ns = 0

    def handle(self, now_ns: int, event: object) -> list[Action]:
        self._now_ns = now_ns
        match event:
            case events.TasksSubmitted():
                self._submitted(event)
            case events.TasksWatched(peer, ids):
                self._watch_new(peer, ids)
            case events.CancelRequested():
                self._cancel(event)
            case events.InvalidateRequested(key, prefix):
                self._invalidate(key, prefix)
            case events.ChangesFollowed(peer):
                self._followers[peer] = False
                self._changes_at_ns = now_ns
            case events.PeerLost(peer):
                self._lose(peer)
            case LookedUp(peer, ended, absent, marks):
                self._looked_up(peer, ended, absent)
                self._tell_missed(peer, marks)
            case EngineAnswered(ticket, result):
                self._answered(ticket, result)
            case EngineFailed():
                self._failed(event)
            case Notified():
                self._notified = True
            case _:
                assert isinstance(event, events.Started | events.Ticked), event
        self._go_on()
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> int | None:
        """Return when to come back with Ticked, if nothing happens before."""
        due = due_times(self._wanted_calls())
        silent_ns = self._silent_since_ns()
        if silent_ns is not None and not self.refusing:
            due.append(silent_ns + AWAY_NS)
        if self._taking.failing_since_ns is not None:
            due.append(self._taking.failing_since_ns + AWAY_NS)
        return min(due, default=None)

    def submits_of(self, peer: bytes) -> bool:
        """Whether the engine has to do something for a client, or to forget results for anybody."""
        requests = (*self._writing, *self._queue)
        return any(getattr(each, "peer", peer) == peer for each in requests)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for any client."""
        return not (self._queue or self._writing or self._queued_bytes or len(self._watches))

    def validate(self) -> None:
        """Check what must hold between two events."""
        self._watches.validate()
        assert len(self._watches) <= WATCHES_MAX + BATCH_MAX
        held = sum(each.bytes for each in (*self._queue, *self._writing))
        assert held == self._queued_bytes
        assert bool(self._writing) == bool(self._write.ticket)
        assert self._ended_early.keys() <= self._flying

    # -- calls --------------------------------------------------------------------------------

    def _wanted_calls(self) -> Iterable[Wanted]:
        """Yield what is to be called, and when."""
        if self._after is None:
            yield self._listen, 0, self._call_ended
            return
        if self._queue and not self.held:
            yield self._write, 0, self._call_write
        watches = self._watches
        waits = len(watches) or self.away_since_ns is not None
        poll_ns = self._listen.called_ns + (POLL_NS if waits else IDLE_POLL_NS)
        yield self._listen, 0 if self._notified else poll_ns, self._call_ended
        if watches.has_doubtful or watches.has_foreign:
            at_ns = 0 if watches.has_doubtful else self._check_at_ns
            yield self._check, at_ns, self._call_check
        if len(watches):
            yield self._marks, self._marks_at_ns, self._call_marks
        if self._followers:
            yield self._changes, self._changes_at_ns, self._call_changes

    def _go_on(self) -> None:
        """Make the calls that are due."""
        silent_ns = self._silent_since_ns()
        if silent_ns is not None and not self.refusing and self._now_ns >= silent_ns + AWAY_NS:
            self.refusing = True
            why = self._last_failure or "the cluster's database does not answer"
            self._out.append(actions.Report("cluster.unreachable", "error", reason=why))
            self._refuse_queued()
        if self._taking.is_over(self._now_ns - AWAY_NS):
            if self._taking.is_news(self.refusing):
                why = self._last_failure
                self._out.append(actions.Report("cluster.unreachable", "error", reason=why))
            self._refuse_queued()
        make_due(self._wanted_calls(), self._now_ns)

    def _silent_since_ns(self) -> int | None:
        """Return since when the engine does not answer; None if nothing says so."""
        since = [self.away_since_ns] if self.away_since_ns is not None else []
        since += [lane.called_ns for lane in (self._write, self._listen) if lane.ticket]
        return min(since, default=None)

    def _call(
        self,
        lane: Lane,
        answered: Callable[[object], None],
        method: str,
        *arguments: object,
        **options: object,
    ) -> None:
        call = self._calls.make(self._now_ns, lane, answered, method, *arguments, **options)
        self._out.append(call)

    def _answered(self, ticket: int, result: object) -> None:
        answered = self._calls.answered(ticket)
        if answered is not None:
            self._is_back()
            answered(result)

    def _failed(self, event: EngineFailed) -> None:
        lane = self._calls.failed(event.ticket, self._now_ns)
        if lane is None:
            return
        self.figures.failed_calls += 1
        self._last_failure = event.reason
        if event.refused:
            self._out.append(actions.Report("cluster.refused", "error", reason=event.reason))
        if self.away_since_ns is None and not (event.refused and lane is self._write):
            self.away_since_ns = lane.called_ns
        if lane is self._write:
            if not event.refused:
                self._taking.failed(lane.called_ns)
            self._unwritten(event)
        elif lane is self._listen:
            self._notified = True
        elif lane is self._check:
            self._watches.doubt(self._checking)
            self._checking = []

    def _is_back(self) -> None:
        if self.refusing:
            self.refusing = False
            self._out.append(actions.Report("cluster.reachable"))
        if self.away_since_ns is None:
            return
        self.away_since_ns = None
        # Another server may answer now, which counts its transactions differently.
        self._watches.doubt()
        for lane in (self._write, self._listen, self._check, self._marks, self._changes):
            if lane is not self._write or self._taking.failing_since_ns is None:
                lane.not_before_ns = 0

    # -- requests -----------------------------------------------------------------------------

    def _submitted(self, event: events.TasksSubmitted) -> None:
        size = REQUEST_BYTES + sum(
            REQUEST_BYTES + len(spec.args) + len(spec.fallback or b"") for spec in event.tasks
        )
        why = self._no_room(size)
        if why and event.resend:  # it may be accepted already: neither accept nor refuse it
            self._out.append(actions.DropRequest(event.peer, event.request, TOO_MANY))
            return
        if self.refusing and not event.resend:
            why = AWAY
        if len(self._watches) + len(event.tasks) > WATCHES_MAX:
            why = why or CROWDED
        submit = Submit(
            event.peer, event.request, event.tasks, list(event.rejected), event.resend, size
        )
        if why:
            self._refuse(submit, why)
            return
        self._add(submit)

    def _no_room(self, size: int) -> str:
        if len(self._queue) >= QUEUED_MAX:
            return FULL
        return FULL if self._queue and self._queued_bytes + size > QUEUED_BYTES_MAX else ""

    def _add(self, request: Request) -> None:
        self._queue.append(request)
        self._queued_bytes += request.bytes

    def _refuse(self, submit: Submit, why: str) -> None:
        """Refuse tasks that the engine has not been asked about."""
        assert not submit.resend, submit
        rejected = [
            Rejection(spec.id, QUEUE_FULL, f"'{spec.id}': {why}", RETRY_AFTER_NS)
            for spec in submit.tasks
        ]
        self.figures.refused += len(rejected)
        self._out.append(
            actions.Acknowledge(submit.peer, submit.request, [*submit.rejected, *rejected])
        )

    def _refuse_queued(self) -> None:
        kept: deque[Request] = deque()
        for request in self._queue:
            if isinstance(request, Submit) and not request.resend:
                self._queued_bytes -= request.bytes
                self._refuse(request, AWAY)
            else:
                kept.append(request)
        self._queue = kept

    def _cancel(self, event: events.CancelRequested) -> None:
        request = Cancel(event.peer, event.request, event.ids, REQUEST_BYTES * len(event.ids))
        if self._no_room(request.bytes):
            self._out.append(actions.DropRequest(event.peer, event.request, TOO_MANY))
        else:
            self._add(request)

    def _invalidate(self, key: str, prefix: bool) -> None:
        last = self._queue[-1] if self._queue else None
        if isinstance(last, Invalidate) and (last.key, last.prefix) == (key, prefix):
            return
        if self._no_room(REQUEST_BYTES):
            report = actions.Report("cluster.refused", "error", reason=f"forget '{key}': {FULL}")
            self._out.append(report)
        else:
            self._add(Invalidate(key, prefix))

    def _call_write(self) -> None:
        batch = self._writing = self._next_batch()
        first = batch[0]
        if isinstance(first, Submit):
            specs = [spec for each in batch if isinstance(each, Submit) for spec in each.tasks]
            self._flying = {spec.id for spec in specs}
            resend = first.resend
            write, written = self._write, self._written
            self._call(write, written, "submit", specs, waiter=self._waiter, resend=resend)
        elif isinstance(first, Cancel):
            ids = [id_ for each in batch if isinstance(each, Cancel) for id_ in each.ids]
            self._call(self._write, self._written, "cancel", list(dict.fromkeys(ids)))
        else:
            key, prefix = first.key, first.prefix
            self._call(self._write, self._written, "invalidate", key, prefix=prefix)

    def _next_batch(self) -> list[Request]:
        """Take the first requests that one call can do, at least one."""
        batch: list[Request] = []
        tasks = size = 0
        while self._queue:
            request = self._queue[0]
            tasks += weight_of(request)
            size += request.bytes
            if batch and (
                tasks > BATCH_MAX or size > BATCH_BYTES or not go_together(batch[0], request)
            ):
                break
            batch.append(self._queue.popleft())
        return batch

    def _written(self, result: object) -> None:
        if self._taking.answered():
            self._out.append(actions.Report("cluster.reachable"))
        batch, self._writing = self._writing, []
        self._queued_bytes -= sum(each.bytes for each in batch)
        if isinstance(batch[0], Submit):
            assert isinstance(result, list)
            self._accepted([each for each in batch if isinstance(each, Submit)], result)
            return
        for request in batch:
            if isinstance(request, Cancel):
                self._out.append(actions.Acknowledge(request.peer, request.request, []))

    def _accepted(self, batch: list[Submit], verdicts: list[Verdict]) -> None:
        early, self._ended_early, self._flying = self._ended_early, {}, set()
        start = 0
        for submit in batch:
            own = verdicts[start : start + len(submit.tasks)]
            start += len(submit.tasks)
            rejected = [each.rejection for each in own if each.rejection is not None]
            self.figures.submitted += len(own) - len(rejected)
            self.figures.refused += len(rejected)
            everything = [*submit.rejected, *rejected]
            self._out.append(actions.Acknowledge(submit.peer, submit.request, everything))
            if submit.peer:
                self._wait_for(submit.peer, own, early)

    def _wait_for(self, peer: bytes, verdicts: list[Verdict], early: dict[str, None]) -> None:
        """Note who waits for accepted tasks; deliver what has an outcome already."""
        outcomes: list[Outcome] = []
        at_once: list[str] = []
        for verdict in verdicts:
            if verdict.outcome is not None:
                outcomes.append(verdict.outcome)
            elif verdict.state != "rejected":
                self._watches.add(peer, verdict.id)
                if verdict.state == "known":
                    self._note_foreign(verdict.id)
                if verdict.id in early:
                    at_once.append(verdict.id)
        if outcomes:
            self.figures.told += len(outcomes)
            self._out.append(actions.Deliver(peer, outcomes))
        if at_once:
            self._out.append(actions.LookUp(peer, at_once))

    def _unwritten(self, event: EngineFailed) -> None:
        """Put a batch back that failed; what the engine refuses is found one by one."""
        batch, self._writing = self._writing, []
        self._ended_early, self._flying = {}, set()
        if not event.refused:
            for request in batch:
                if isinstance(request, Submit) and not event.unsent:
                    request.resend = True  # it may have happened
        elif len(batch) > 1:
            for request in batch:
                if isinstance(request, Submit):
                    request.alone = True
            self._write.not_before_ns = 0
        else:
            self._give_up(batch.pop(), event.reason)
        self._queue.extendleft(reversed(batch))

    def _give_up(self, request: Request, reason: str) -> None:
        """Answer a request that the engine refuses by itself."""
        self._queued_bytes -= request.bytes
        if isinstance(request, Submit) and not request.resend:
            self._refuse(request, f"{REFUSED}: {reason}")
        elif not isinstance(request, Invalidate):
            self._out.append(actions.DropRequest(request.peer, request.request, reason))

    # -- who waits for what -------------------------------------------------------------------

    def _note_foreign(self, id_: str) -> None:
        if not self._watches.has_foreign:
            self._check_at_ns = self._now_ns + LOOK_NS
        self._watches.note_foreign(id_, self._now_ns)

    def _watch_new(self, peer: bytes, ids: list[str]) -> None:
        if len(self._watches) + len(ids) > WATCHES_MAX:
            self._out.append(EndPeer(peer, TOO_MANY))
            return
        for id_ in ids:
            self._watches.add(peer, id_)
            self._note_foreign(id_)
        if self._after is not None and ids:
            self._out.append(actions.LookUp(peer, ids))

    def _lose(self, peer: bytes) -> None:
        """Forget a client that is gone. It sends again what was not acknowledged."""
        self._followers.pop(peer, None)
        self._watches.remove_peer(peer)
        kept: deque[Request] = deque()
        for request in self._queue:
            if isinstance(request, Submit) and request.peer == peer:
                self._queued_bytes -= request.bytes
                self._out.append(actions.DropRequest(peer, request.request, GONE))
            else:
                kept.append(request)
        self._queue = kept
        for request in self._writing:
            if isinstance(request, Submit) and request.peer == peer:
                request.peer = b""  # nobody waits for its tasks

    def _looked_up(self, peer: bytes, ended: tuple[str, ...], absent: tuple[str, ...]) -> None:
        self.figures.told += len(ended)
        for id_ in ended:
            self._watches.remove(peer, id_)
        missing = [id_ for id_ in absent if self._watches.remove(peer, id_)]
        if missing:
            self._out.append(actions.TellMissing(peer, missing))

    def _call_ended(self) -> None:
        self._notified = False
        if self._after is None:
            self._call(self._listen, self._heard, "ended", 0, "")  # only where it stands
        else:
            self._call(self._listen, self._heard, "ended", self._waiter, self._after)

    def _heard(self, result: object) -> None:
        assert isinstance(result, Ended)
        first = self._after is None
        self._after = result.after
        self._notified = self._notified or result.more
        if first:
            self._look_up(None)
            return
        self._look_up(result.ids)
        for id_ in result.ids:
            if id_ in self._flying:
                self._ended_early[id_] = None

    def _look_up(self, ids: Iterable[str] | None) -> None:
        """Look up the results of tasks that have ended, for all who watch them."""
        self._out.extend([actions.LookUp(*each) for each in self._watches.by_peer(ids)])

    def _call_check(self) -> None:
        self._check_at_ns = self._now_ns + POLL_NS
        ids = self._checking = self._watches.next_to_check(BATCH_MAX)
        self._call(self._check, self._checked, "fetch", ids, -1)

    def _checked(self, result: object) -> None:
        assert isinstance(result, Fetched)
        self._checking = []
        self._check_at_ns = self._watches.next_look_ns(self._now_ns, self._check.called_ns)
        self._look_up(result.unread)
        # What was heard meanwhile may be newer than this look.
        self._tell_progress(self._watches.still_news(result.marks, self._check.called_ns))
        for id_ in result.absent:
            for peer in self._watches.peers_of(id_):
                self._looked_up(peer, (), (id_,))

    # -- progress -----------------------------------------------------------------------------

    def _call_marks(self) -> None:
        self._marks_at_ns = self._now_ns + MARKS_NS
        age_ns = self._now_ns - self._marked_ns if self._marked_ns is not None else 0
        age_ns = min(age_ns, MARKS_AGE_MAX_NS) + MARKS_SLACK_NS
        self._call(self._marks, self._marked, "marks", self._waiter, age_ns)

    def _marked(self, result: object) -> None:
        assert isinstance(result, list)
        self._marked_ns = self._marks.called_ns
        self._tell_progress(result)

    def _tell_missed(self, peer: bytes, marks: Iterable[ProgressMark]) -> None:
        """Tell a late watcher how far tasks are. What the others know may be newer than this look;
        what nobody knows is for all of them."""
        for mark in marks:
            if not self._watches.has_mark(mark.id):
                self._tell_progress([mark])
                continue
            newest = self._watches.missed(peer, mark.id)
            if newest is not None:
                self._out.append(actions.TellProgress([peer], _note(newest)))

    def _tell_progress(self, marks: Iterable[ProgressMark]) -> None:
        for mark in marks:
            peers = self._watches.note_mark(mark, self._now_ns)
            if peers:
                self._out.append(actions.TellProgress(peers, _note(mark)))

    # -- changes of schedules -----------------------------------------------------------------

    def _call_changes(self) -> None:
        self._changes_at_ns = self._now_ns + CHANGES_NS
        self._call(self._changes, self._changed, "changes", self._change)

    def _changed(self, result: object) -> None:
        assert isinstance(result, Changed)
        first, newest = self._newest is None, self._newest or {}
        self._newest, self._change = newest, result.after
        for note in result.notes:
            if note.event != CHANGED:
                continue
            change = newest[note.schedule] = Change(
                note.schedule, note.task, note.digest, note.at_ns, note.entry, note.before
            )
            if not first and any(self._followers.values()):
                self._out.append(TellChange(change))
        for peer, told in self._followers.items():
            if not told:
                self._followers[peer] = True
                self._out.append(actions.TellChanges(peer, list(newest.values())))


def _note(mark: ProgressMark) -> ProgressNote:
    return ProgressNote(mark.id, mark.fraction, mark.text)
