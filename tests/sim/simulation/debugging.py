"""Handlers at breakpoints, the people who debug them, and what must hold for both.

No task is late while it is debugged, however long that takes, and its worker gets no other. A
handler at a breakpoint hears within the time of its pool that somebody came, or that nobody will;
at once where the pool does not allow it, or where its worker is to stop. A person who has gone, or
died, leaves nobody behind. All else goes on: the other invariants check that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.messages import Lease
from musterd.supervisor.core.model.actions import (
    AnswerDebugger,
    AssignLeases,
    BreakIntoHandler,
    CloseDebugger,
    KillWorker,
    Report,
    ShowDebugger,
)
from musterd.supervisor.core.model.debug_events import (
    BreakpointHit,
    DebuggerAsked,
    DebuggerAttached,
    DebuggerDetached,
    DebuggerEnded,
    DebuggerInterrupted,
    DebuggerTyped,
)
from musterd.supervisor.core.tasks.leases import HARD_GRACE_NS
from simulation.profile import MS, SEC

if TYPE_CHECKING:
    from simulation.workers import Worker
    from simulation.world import World

LATE_NS = 1 * MS  # a poll wakes up a little late; this is far more
# The core hears of a breakpoint later than the worker stops, and the worker of its end later than
# the core; messages may be late several times.
SLACK_NS = 1 * SEC
LINES = ("n", "n", "p price", "c", "q", None)  # None: Ctrl-D
LINES_MAX = 12  # then the person has seen enough


class Breakpoints:
    """One worker's side."""

    def __init__(self, world: World, worker: Worker) -> None:
        self._world = world
        self._worker = worker
        self._request = 0
        self.lease: Lease | None = None  # whose handler has stopped, or is debugged
        self._asks = False  # an answer is awaited
        self._attached = False
        self._postponed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        # When the worker stood: from, to (0: it still does).
        self.stood: list[tuple[int, int]] = []

    def began(self, lease: Lease, run_ns: int) -> None:
        world = self._world
        chance = world.profile.breakpoints
        if chance and not world.is_calm and run_ns > 1 * MS and world.rng.random() < chance:
            world.in_life(world.delay(0, run_ns), self._hit, lease)

    def _hit(self, lease: Lease) -> None:
        worker, world = self._worker, self._world
        if not worker.alive or worker.frozen_ns or lease not in [each for each, _ in worker.runs]:
            return
        if self.lease is not None:
            return  # the whole worker stands
        self.lease = lease
        self.stood.append((world.now_ns, 0))
        self._ask(lambda request: BreakpointHit(worker.number, lease.lease, request, "shop.py:1"))
        if world.profile.lies and world.rng.random() < world.profile.lies:
            worker.send(BreakpointHit(worker.number, lease.lease + 1, 0, "of another lease"))
            worker.send(DebuggerEnded(worker.number, lease.lease + 1, "of another lease"))

    def _ask(self, question: Callable[[int], Any]) -> None:
        self._request += 1
        self._asks = True
        self._worker.send(question(self._request))

    def postpones(self, call: Callable[..., None], *args: Any) -> bool:
        """Tell whether something cannot happen now, because the worker stands."""
        if self.lease is None or (self._attached and not self._asks):
            return False
        self._postponed.append((call, args))
        return True

    def over(self, lease: Lease) -> None:
        """The run has ended: so has the debugger."""
        if lease is self.lease:
            self._go_on()

    def _go_on(self) -> None:
        world = self._world
        self.lease = None
        self._asks = self._attached = False
        self.stood[-1] = (self.stood[-1][0], world.now_ns)
        self._catch_up()

    def _catch_up(self) -> None:
        """Let happen what was postponed."""
        world = self._world
        postponed, self._postponed = self._postponed, []
        for call, args in postponed:
            world.in_life(world.delay(0, 10 * MS), call, *args)

    # -- orders -------------------------------------------------------------------------------

    def answered(self, request: int, line: str | None) -> None:
        worker, lease = self._worker, self.lease
        if lease is None or request != self._request or not self._asks:
            return
        self._asks = False
        if line is None and not self._attached:
            self._go_on()
        elif line in (None, "q"):
            self._leave()
        elif line == "c":
            self._catch_up()
        else:
            self._attached = True
            self._world.in_life(self._world.delay(10, 50 * MS), self._prompt, lease)
        assert worker.alive

    def _prompt(self, lease: Lease) -> None:
        worker = self._worker
        if not worker.alive or worker.frozen_ns or self.lease is not lease or self._asks:
            return
        self._ask(
            lambda request: DebuggerAsked(worker.number, lease.lease, request, "-> x\n", "(Pdb) ")
        )

    def _leave(self) -> None:
        lease = self.lease
        assert lease is not None
        self._worker.send(DebuggerEnded(self._worker.number, lease.lease, "bye\n"))
        self._go_on()

    def break_in(self, number: int, leave: bool) -> None:
        lease = self.lease
        if lease is None or lease.lease != number or self._asks:
            return
        if leave:
            self._leave()
        else:
            self._prompt(lease)


class People:
    """The people with terminals: they come, type, go and die when they like."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = 0
        self._at: dict[int, int] = {}  # worker -> who
        self._lines: dict[int, int] = {}  # worker -> lines typed
        self.came = 0

    def new_life(self) -> None:
        self._at.clear()

    def look(self) -> None:
        """Somebody sees that a task waits, or wants to debug one that does not."""
        world = self._world
        if not world.up:
            return
        waiting = [each.worker for each in world.fleet.debugged.values() if not each.who]
        if world.rng.random() < 0.1:
            waiting += list(world.workers)
        if not waiting:
            return
        worker = world.rng.choice(waiting)
        if worker in self._at:
            return
        self._number += 1
        self.came += 1
        self._at[worker], self._lines[worker] = self._number, 0
        world.tell(DebuggerAttached(worker, f"uid {self._number}"))
        world.in_life(world.delay(0, 15 * SEC), self._go, worker, self._number)

    def shown(self, action: ShowDebugger) -> None:
        who = self._at.get(action.worker)
        assert who is not None, f"nobody is there to read {action}"
        world = self._world
        if action.prompt is None:
            return
        slowly = not world.is_calm and world.rng.random() < 0.3
        thinks_ns = world.delay(1 * SEC, 12 * SEC) if slowly else world.delay(1 * MS, 300 * MS)
        world.in_life(thinks_ns, self._type, action.worker, who)

    def _type(self, worker: int, who: int) -> None:
        if self._at.get(worker) != who:
            return
        world = self._world
        self._lines[worker] += 1
        enough = world.is_calm or self._lines[worker] >= LINES_MAX
        line = "q" if enough else world.rng.choice(LINES)
        world.tell(DebuggerTyped(worker, line))
        if line == "c" and world.rng.random() < 0.8:
            world.in_life(world.delay(0, 100 * MS), self._press, worker, who)

    def _press(self, worker: int, who: int) -> None:
        if self._at.get(worker) == who:
            self._world.tell(DebuggerInterrupted(worker))

    def _go(self, worker: int, who: int) -> None:
        """The terminal is closed, or dies."""
        if self._at.get(worker) == who:
            del self._at[worker]
            self._world.tell(DebuggerDetached(worker))

    def closed(self, action: CloseDebugger) -> None:
        assert self._at.pop(action.worker, None) is not None, f"nobody is there: {action}"


class DebugWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.debugged = self.spared = 0
        self.new_life()

    def new_life(self) -> None:
        # (worker, request) -> lease, and when it has to be answered
        self._hits: dict[tuple[int, int], tuple[int, int]] = {}

    def handled(self, event: Any, actions: list[Any]) -> None:
        world = self._world
        if isinstance(event, BreakpointHit):
            self._note_hit(event, actions)
        elif isinstance(event, DebuggerDetached):
            told = [type(each) for each in actions]
            assert AnswerDebugger in told or BreakIntoHandler in told or not self._lives(event)
        for action in actions:
            if isinstance(action, AnswerDebugger):
                self._hits.pop((action.worker, action.request), None)
                self.debugged += action.line == ""
            elif isinstance(action, KillWorker):
                self._check_kill(action)
            elif isinstance(action, AssignLeases):
                slot = world.fleet._state.workers[action.worker]
                assert not slot.debugged_ns, f"{slot.name} is debugged and was given more"
        for hit, (lease, until_ns) in list(self._hits.items()):
            slot = world.fleet._state.workers.get(hit[0])
            if slot is None or lease not in slot.leases:
                del self._hits[hit]  # the attempt is over
                continue
            assert world.now_ns <= until_ns, f"{slot.name} waits in vain at a breakpoint"
        if not world.fleet._state.intake_open:
            waiting = [each.slot.name for each in world.fleet.debugged.values() if not each.who]
            assert not waiting, f"{waiting} wait for a debugger during the shutdown"

    def _lives(self, event: DebuggerDetached) -> bool:
        """Tell whether the handler that was debugged is still there, as far as the core knows."""
        return event.worker in self._world.fleet.debugged

    def _note_hit(self, event: BreakpointHit, actions: list[Any]) -> None:
        slot = self._world.fleet._state.workers.get(event.worker)
        if slot is None or event.lease not in slot.leases:
            assert not any(isinstance(each, Report) for each in actions), "a lie is believed"
            return
        policy = slot.pool.policy
        if not policy.debug:
            answer = AnswerDebugger(event.worker, event.request)
            assert answer in actions, f"{slot.name} waits and may not"
        else:
            until_ns = self._world.now_ns + policy.debug_wait_ns + LATE_NS
            self._hits[event.worker, event.request] = (event.lease, until_ns)

    def stood_ns(self, worker: Worker, since_ns: int) -> int:
        """Return for how long the time of a run stood that began then; a worker that is stopped
        does not debug."""
        now_ns = worker.frozen_ns or self._world.now_ns
        spans = [(max(begin, since_ns), end or now_ns) for begin, end in worker.breakpoints.stood]
        return sum(end - begin for begin, end in spans if end > begin)

    def _check_kill(self, action: KillWorker) -> None:
        """Check that nothing is late because somebody debugs it."""
        world = self._world
        slot = world.fleet._state.workers.get(action.worker)
        worker = world.workers[action.worker]
        if slot is None or not action.dump:
            return
        if "did not stop at its timeout" in slot.killed_for:
            for lease, since_ns in worker.runs if worker.alive else ():
                if lease.lease == slot.killed_lease:
                    stood_ns = self.stood_ns(worker, since_ns)
                    ran_ns = world.now_ns - since_ns - stood_ns
                    self.spared += stood_ns > HARD_GRACE_NS
                    # A reload may have shortened it since the task began.
                    timeout_ns = min(lease.timeout_ns, slot.leases[lease.lease].timeout_ns)
                    least_ns = timeout_ns + HARD_GRACE_NS - SLACK_NS
                    assert ran_ns >= least_ns, f"{worker.name} is debugged and killed"

    def over(self) -> None:
        sessions = self._world.fleet.debugged
        assert not sessions, f"still debugged: {[each.slot.name for each in sessions.values()]}"
        assert not self._world.fleet._state.suspended
