"""Debugging: handlers that wait at a breakpoint for a person with a debugger.

    hit ──► waiting ── a person comes ──► attached ── the person goes ──► leaving ──► over
               │                             │                                        ▲
               └── nobody comes ─────────────┴── the attempt ends, the worker ends ───┘

A breakpoint is refused, with a report that says how to allow it, where the pool does not allow
debugging or its worker is being stopped. Nobody waits for long: after the pool's `debug_wait` the
handler goes on, and at once if its worker is to stop.

A debugger stops the whole worker. So from the hit to the end no task of this worker can be late:
the time does not count (`State.suspended`), deadlines are not looked at, and the worker gets no
other tasks. All else goes on: a cancelled task is interrupted, a stop ends after its time, and a
shutdown ends as ever, because it knows how long it waits for any task.

What the debugger says and what the person types only passes through here, one prompt at a time.
"""

from collections.abc import Iterator

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model import debug_events, events
from musterd.supervisor.core.model.actions import (
    AnswerDebugger,
    BreakIntoHandler,
    CloseDebugger,
    ShowDebugger,
)
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task
from musterd.supervisor.core.tasks.leases import Leases
from musterd.supervisor.core.tasks.pauses import DRAINED

NOBODY = "nobody has come"
DETACHED = "the terminal has gone"
LEFT = "the debugger was left"
ATTEMPT_OVER = "the attempt has ended"
WORKER_GONE = "the worker has ended"
STOPPING = "its worker is to stop"
CANCELLED = "the task was cancelled"


class DebugSession(Struct, eq=False):
    """A handler at a breakpoint, and the person who debugs it."""

    slot: Slot
    worker: int
    lease: int
    where: str
    until_ns: int  # how long it waits for somebody
    since_ns: int
    request: int  # of the handler, not answered yet; 0 for none
    who: str = ""  # the person; "": nobody yet
    leaving: bool = False  # the person has gone, and the handler has not said so yet
    warned: bool = False  # the person knows that the worker is to stop


class Debugging:
    def __init__(self, state: State, leases: Leases) -> None:
        self._state = state
        self._leases = leases
        self.sessions: dict[int, DebugSession] = {}  # by worker
        self._due_ns = 0  # when the first wait for somebody is over, 0 for none

    # -- the handler --------------------------------------------------------------------------

    def hit(self, event: debug_events.BreakpointHit) -> None:
        slot = self._state.workers.get(event.worker)
        task = slot.leases.get(event.lease) if slot is not None else None
        if slot is None or task is None:
            return  # of an attempt that is over
        why = self._refusal(slot, task)
        if why:
            self._answer(event.worker, event.request)
            reason = f"{event.where}: {why}"
            self._state.report("debug.refused", "warning", slot=slot, task=task, reason=reason)
            return
        now_ns, wait_ns = self._state.now_ns, slot.pool.policy.debug_wait_ns
        self.sessions[slot.worker] = DebugSession(
            slot, slot.worker, event.lease, event.where, now_ns + wait_ns, now_ns, event.request
        )
        slot.debugged_ns = now_ns
        self._leases.feed(slot)  # it takes no other task
        self._look_at(now_ns + wait_ns)
        seconds = wait_ns / SECOND_NS
        reason = f"{event.where}: type musterctl debug {slot.name} within {seconds:g} s"
        self._state.report("debug.waiting", "warning", slot=slot, task=task, reason=reason)

    def _refusal(self, slot: Slot, task: Task) -> str:
        """Return why a handler must not wait for a debugger; "" if it may."""
        name = slot.pool.name
        if slot.worker in self.sessions:
            return "a debugger is at work in this worker already"
        if not slot.pool.policy.debug:
            return (
                f"pool {name} allows no debugging: set pools.{name}.debug = true, or "
                "debug.enabled = true for all pools, as --profile development does, and reload"
            )
        if task.cancelled:
            return CANCELLED
        return STOPPING if self._stops(slot) else ""

    def _stops(self, slot: Slot) -> bool:
        """Whether somebody waits for the worker to finish its tasks."""
        return (
            slot.state != SlotState.RUNNING
            or bool(slot.killed_for)
            or DRAINED in (slot.halt, slot.pool.halt)
            or not self._state.intake_open
        )

    def asked(self, event: debug_events.DebuggerAsked) -> None:
        session = self._session(event.worker, event.lease)
        if session is None or not session.who or session.leaving:
            self._answer(event.worker, event.request)
            return
        session.request = event.request
        self._state.out.append(ShowDebugger(event.worker, event.text, event.prompt))

    def ended(self, event: debug_events.DebuggerEnded) -> None:
        """End a session, because the handler goes on."""
        session = self._session(event.worker, event.lease)
        if session is not None:
            if event.text and session.who and not session.leaving:
                self._state.out.append(ShowDebugger(event.worker, event.text))
            self._end(session, self._why_left(session))

    def _why_left(self, session: DebugSession) -> str:
        task = session.slot.leases[session.lease]
        if session.leaving:
            return DETACHED
        if task.cancelled:
            return CANCELLED
        return STOPPING if session.slot.terminated else LEFT

    def leases_over(self, event: events.LeasesCompleted | events.LeasesReturned) -> None:
        session = self.sessions.get(event.worker)
        if session is not None and session.lease in event.leases:
            self._end(session, ATTEMPT_OVER)
        if self._state.suspended:
            self._forget(event.worker, event.leases)

    def worker_exited(self, event: events.WorkerExited) -> None:
        session = self.sessions.get(event.worker)
        if session is not None:
            self._end(session, WORKER_GONE)
        if self._state.suspended:
            self._forget(event.worker, list(self._state.suspended))

    def _forget(self, worker: int, leases: list[int]) -> None:
        """Forget for how long the time of these leases stood, if they are the worker's."""
        slot = self._state.workers.get(worker)
        for lease in leases:
            if slot is not None and lease in slot.leases:
                self._state.suspended.pop(lease, None)

    def _session(self, worker: int, lease: int) -> DebugSession | None:
        session = self.sessions.get(worker)
        return session if session is not None and session.lease == lease else None

    def _answer(self, worker: int, request: int, line: str | None = None) -> None:
        self._state.out.append(AnswerDebugger(worker, request, line))

    # -- the person ---------------------------------------------------------------------------

    def attached(self, event: debug_events.DebuggerAttached) -> None:
        session = self.sessions.get(event.worker)
        if session is None or session.who or session.leaving:
            self._state.out.append(CloseDebugger(event.worker, "the task does not wait any more"))
            return
        session.who = event.who
        self._answer(event.worker, session.request, "")
        session.request = 0
        self._report(session, "debug.attached", event.who)

    def typed(self, event: debug_events.DebuggerTyped) -> None:
        session = self.sessions.get(event.worker)
        if session is not None and session.who and session.request:
            request, session.request = session.request, 0
            self._answer(event.worker, request, event.line)

    def interrupted(self, event: debug_events.DebuggerInterrupted) -> None:
        session = self.sessions.get(event.worker)
        if session is not None and session.who and not session.request:
            self._state.out.append(BreakIntoHandler(event.worker, session.lease))

    def detached(self, event: debug_events.DebuggerDetached) -> None:
        """Let the handler go on: the terminal was closed, or died."""
        session = self.sessions.get(event.worker)
        if session is None or session.leaving:
            return
        session.leaving = True
        self._go_on(session)  # a handler that does not listen is late from here on
        if session.request:
            request, session.request = session.request, 0
            self._answer(event.worker, request)
        else:
            leave = BreakIntoHandler(event.worker, session.lease, leave=True)
            self._state.out.append(leave)

    # -- the end ------------------------------------------------------------------------------

    def _end(self, session: DebugSession, why: str) -> None:
        del self.sessions[session.worker]
        self._go_on(session)
        self._report(session, "debug.over", why)
        if session.who and not session.leaving:
            self._state.out.append(CloseDebugger(session.worker, why))

    def _go_on(self, session: DebugSession) -> None:
        """Let the time of the worker's tasks count again."""
        slot = session.slot
        if slot.worker != session.worker or not slot.debugged_ns:
            return
        now_ns, suspended = self._state.now_ns, self._state.suspended
        for lease, task in slot.leases.items():
            stood_ns = now_ns - max(slot.debugged_ns, task.leased_ns)
            suspended[lease] = suspended.get(lease, 0) + stood_ns
        slot.debugged_ns = 0
        self._leases.resume(slot)

    def _give_up(self, session: DebugSession, why: str) -> None:
        """Let a handler go on that waits for somebody."""
        self._answer(session.worker, session.request)
        session.request = 0
        self._end(session, why)

    def advance(self) -> None:
        """After every event, where anybody debugs: nobody is waited for in a worker that is to
        stop, and a person there hears of it."""
        for session in list(self.sessions.values()):
            slot = session.slot
            if session.leaving or not self._stops(slot):
                continue
            if not session.who:
                self._give_up(session, STOPPING)
            elif not session.warned:
                session.warned = True
                text = f"{STOPPING}: the task is interrupted if it does not end in time\n"
                self._state.out.append(ShowDebugger(session.worker, text))

    def _look_at(self, when_ns: int) -> None:
        """Set one timer for all who wait."""
        if not self._due_ns or when_ns < self._due_ns:
            self._due_ns = when_ns
            self._state.timers.at(when_ns, self._overdue, when_ns)

    def _overdue(self, when_ns: int) -> None:
        if when_ns != self._due_ns:
            return  # a sooner timer took its place
        self._due_ns = 0
        for session in list(self._waiting()):
            if session.until_ns <= self._state.now_ns:
                self._give_up(session, NOBODY)
            else:
                self._look_at(session.until_ns)

    def _waiting(self) -> Iterator[DebugSession]:
        return (each for each in self.sessions.values() if not each.who and not each.leaving)

    def _report(self, session: DebugSession, event: str, reason: str) -> None:
        slot = session.slot
        task = slot.leases.get(session.lease)
        seconds = (self._state.now_ns - session.since_ns) / SECOND_NS
        self._state.report(event, slot=slot, task=task, reason=reason, seconds=seconds)

    def validate(self) -> None:
        """Check that a session belongs to a lease under way, and that time stands for no others."""
        for worker, session in self.sessions.items():
            slot = self._state.workers.get(worker)
            assert slot is session.slot and session.lease in slot.leases, worker
            assert bool(slot.debugged_ns) == (not session.leaving), slot.name
            assert slot not in slot.pool.free_slots or session.leaving, slot.name
        assert self._due_ns or not any(self._waiting())
        for worker, slot in self._state.workers.items():
            assert not slot.debugged_ns or worker in self.sessions, slot.name
        leases = {lease for slot in self._state.workers.values() for lease in slot.leases}
        assert leases.issuperset(self._state.suspended), self._state.suspended
