"""World around a worker under test: the real core, in the place of a whole daemon.

The core decides all that it decides in a daemon: which task runs next, what a failure means, how
long the pause before the next attempt is, who has a lock. This module carries its actions out in
the process of the test, as supervisor/loop/perform.py does in a daemon: the store is in memory, and
the messages of the one worker (process.py) become events at once.

Nothing runs beside the test. Code of the worker runs when the test waits for a task, or lets time
pass. While that code waits, the world goes on: step() moves the clock to the next deadline (of the
core, of the worker's alarm, of something that the test wants at a certain time) and does what is
due there.
"""

import heapq
import logging
import math
import signal
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType, TracebackType
from typing import Any, Protocol, cast

from msgspec import Struct, structs

from musterd.ipc.errors import MusterdError
from musterd.ipc.wire.codec import decode_worker, encode
from musterd.ipc.wire.messages import (
    CRASH,
    Assign,
    CancelLease,
    Completion,
    Failure,
    Lease,
    LockAnswer,
    Outcome,
    ProgressNote,
    Recall,
    Rejection,
    StateAnswer,
    Stop,
    TaskDeclaration,
    TaskSpec,
    TaskView,
    WaitAnswer,
    WorkerHello,
)
from musterd.supervisor.config.redact import Redaction
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.sockets.declarations import Declarations
from musterd.supervisor.sockets.workers import event_of
from musterd.supervisor.store.interface import FindFact
from musterd.supervisor.store.memory import MemoryStore
from musterd.supervisor.store.requests import StoreRequests
from musterd.supervisor.views.fleet import shown_state
from musterd.supervisor.views.task import look_at
from musterd.testing.clock import VirtualClock
from musterd.testing.outside import Outside
from musterd.testing.settings import ELSEWHERE, HOLDS_AT_ONCE, Middle, Settings

PEER = b"test"
CLOCK_READ_NS = 1_000_000_000  # the core reads the time of day so often
TURNS_MAX = 1_000_000  # while somebody waits for one thing: more is an endless loop
HOLD_NS = 30 * 24 * 3600 * 10**9  # a lock is held elsewhere for so long at most

Entry = tuple[int, int, Callable[[], object]]  # of the agenda: when, in which order, and what

log = logging.getLogger("musterd.testing")


class Stuck(MusterdError):
    """What the test waits for cannot happen any more."""


class WorkerKilled(BaseException):
    """Unwinds the code of a worker that was killed; what it does meanwhile reaches nobody.

    In life nothing is unwound: the process is gone.
    """


class Attempt(Struct, frozen=True):
    """One run of a handler, as it ended. Times are in seconds by the clock of the worker."""

    began: float  # since the worker was opened
    seconds: float
    pause: float = 0.0  # since the end of the attempt before
    failure: Failure | None = None  # None: it succeeded

    @property
    def error(self) -> str:
        """The failure in one line; "" if the attempt succeeded."""
        failure = self.failure
        if failure is None:
            return ""
        return ": ".join(part for part in (failure.type or failure.kind, failure.message) if part)


class Story(Struct):
    """What the world has heard of one task."""

    ending: Outcome | Rejection | None = None
    attempts: list[Attempt] = []
    notes: list[ProgressNote] = []
    raised: tuple[BaseException, TracebackType | None] | None = None  # by the last attempt


class Process(Protocol):
    """The worker, as the world needs it."""

    number: int
    dead: bool  # it was killed
    running: bool  # its code runs

    def obey(self, frame: bytes) -> None:
        """Take a message of the supervisor."""

    def strike(self, frame: FrameType | None) -> None:
        """Look at the messages now, as at a signal that struck code of this frame."""

    def kill(self) -> None:
        """End as by SIGKILL."""

    def read_board(self) -> events.BoardRead: ...
    def nudge(self) -> None:
        """Come back to who called, if nothing runs."""


class World:
    def __init__(
        self,
        settings: Settings,
        declarations: tuple[TaskDeclaration, ...],
        patience: float | None,
    ) -> None:
        self.settings = settings
        self.clock = VirtualClock()
        self.now_ns, self.wall_ns = self.clock.now_ns, self.clock.wall_ns
        self.began_ns = self.now_ns()
        self.thread = threading.get_ident()
        self.outside = Outside()
        self.patience = math.inf if patience is None else patience
        self.store = MemoryStore(self.wall_ns)
        self.store_requests = StoreRequests(self.store)
        self.fleet = Fleet(settings.policy, Middle(0))
        self.stories: dict[str, Story] = {}
        self.process: Process | None = None
        self.spawns: list[int] = []  # workers that are to be opened
        self.within = 0  # the world is at work: nothing may be raised in it from outside
        self._declared = {
            settings.pool: declarations,
            ELSEWHERE: (TaskDeclaration("hold", timeout_ns=HOLD_NS),),
        }
        self._declarations = Declarations()
        self._redaction = Redaction(settings.redact)
        self._inbox: list[object] = []
        self._feeding = False
        self._requests = count(1)
        self._leases: dict[int, Lease] = {}
        self._elsewhere = 0  # number of the worker that holds locks
        self._holds: dict[str, int] = {}  # leases of its tasks, by task
        self._locked: LockAnswer | None = None
        self._agenda: list[Entry] = []
        self._order = count()
        self._read_ns = 0
        self._struck = False  # a message that cannot wait is there
        self._done: Callable[[], bool] = bool
        self._limit_ns = math.inf
        self._table = self._make_table()
        self.feed(events.Started())
        self._read_clock()

    # -- time ---------------------------------------------------------------------------------

    def next_due_ns(self) -> float:
        """Return when step() has something to do; math.inf for never."""
        due = self.clock.alarm_ns, self.fleet.next_deadline()
        due_ns = min((each for each in due if each is not None), default=math.inf)
        if self._agenda:
            due_ns = min(due_ns, self._agenda[0][0])
        return min(due_ns, self._limit_ns) if self._limit_ns > self.now_ns() else due_ns

    def pass_time(self, until_ns: float) -> None:
        """Move the clock to that time, which is not after next_due_ns(), and do what is due."""
        self.step(until_ns, None)

    def step(self, until_ns: float, frame: FrameType | None) -> None:
        """Do pass_time() for code of a worker in this frame, in which may be raised what is due."""
        self.within += 1
        try:
            if until_ns == math.inf:
                raise Stuck(self._why_stuck())
            self.clock.move_to(int(until_ns))
            self._do_due(frame)
        finally:
            self.within -= 1
        self._check()

    def sleep(self, seconds: float, frame: FrameType) -> None:
        """Let code of the worker sleep, as time.sleep() does."""
        end_ns = self.now_ns() + round(seconds * 1e9)
        while True:
            self.step(min(end_ns, self.next_due_ns()), frame)
            if self.now_ns() >= end_ns:
                return

    def catch_up(self, frame: FrameType | None) -> None:
        """Do what is due because code of the worker has blocked for so long, in real time."""
        passed_ns, patient = self.clock.uncounted_ns, self.clock.still_ns < self.patience * 1e9
        due_ns = self.next_due_ns()
        if due_ns <= self.now_ns() + passed_ns or (due_ns < math.inf and not patient):
            self.step(due_ns, frame)

    def at(self, seconds: float, call: Callable[[], object]) -> Entry:
        """Call this in so many seconds, unless the entry is dropped before."""
        entry = (self.now_ns() + round(seconds * 1e9), next(self._order), call)
        heapq.heappush(self._agenda, entry)
        return entry

    def drop(self, entry: Entry) -> None:
        if entry in self._agenda:
            self._agenda.remove(entry)
            heapq.heapify(self._agenda)

    def _do_due(self, frame: FrameType | None) -> None:
        now_ns = self.now_ns()
        if now_ns - self._read_ns >= CLOCK_READ_NS:
            self._read_clock()
        deadline_ns = self.fleet.next_deadline()
        if deadline_ns is not None and deadline_ns <= now_ns:
            self.feed(events.Ticked())
        while self._agenda and self._agenda[0][0] <= now_ns:
            heapq.heappop(self._agenda)[2]()
        if self.process is not None and self.process.dead and self.process.running:
            raise WorkerKilled
        clock = self.clock
        if clock.alarm_ns is not None and clock.alarm_ns <= now_ns:
            clock.alarm_ns = None
            if clock.handler is not None:
                clock.handler(signal.SIGALRM, frame)
        self.strike(frame)

    def strike(self, frame: FrameType | None) -> None:
        """Have the worker look at a message that cannot wait, if there is one."""
        if self._struck and self.process is not None:
            self._struck = False
            self.process.strike(frame)

    def _read_clock(self) -> None:
        self._read_ns = self.now_ns()
        self.feed(events.ClockRead(self.wall_ns()))

    # -- waiting ------------------------------------------------------------------------------

    def wait(
        self, done: Callable[[], bool], turn: Callable[[], None], limit_ns: float = math.inf
    ) -> bool:
        """Let the world go on by turns until done() holds; return False if the time is over."""
        self._done, self._limit_ns = done, limit_ns
        try:
            for _ in range(TURNS_MAX):
                if done():
                    return True
                if self.now_ns() >= limit_ns:
                    return False
                if self._is_stuck():
                    raise Stuck(self._why_stuck())
                turn()
            raise Stuck(f"{TURNS_MAX} turns have not brought about what is waited for")
        finally:
            self._done, self._limit_ns = bool, math.inf

    @property
    def over(self) -> bool:
        """Whether nobody waits any more."""
        return self._done() or self.now_ns() >= self._limit_ns

    def _is_stuck(self) -> bool:
        """Tell whether the worker has nothing to do, and nothing will bring anything."""
        idle = not self.fleet.pools[self.settings.pool].leased and not self.spawns
        return idle and self.next_due_ns() == math.inf

    def _check(self) -> None:
        if self.process is not None and self.over:
            self.process.nudge()

    def _why_stuck(self) -> str:
        pool = self.fleet.pools[self.settings.pool]
        slot = pool.slots[0]
        state = f"{slot.name} is {slot.shown_state}" + (f" ({slot.reason})" if slot.reason else "")
        tasks = [
            f"task {task.spec.id} ({task.spec.name}) is {shown_state(task)}"
            for task in self.fleet.tasks.values()
            if task.route.pool is pool
        ]
        return f"nothing more will happen: {'; '.join([state, *tasks])}"

    # -- the core -----------------------------------------------------------------------------

    def feed(self, event: object) -> None:
        """Hand an event to the core and perform its actions, as a daemon does."""
        self._inbox.append(event)
        if self._feeding:
            return
        self._feeding = True
        self.within += 1
        try:
            while self._inbox:
                for action in self.fleet.handle(self.now_ns(), self._inbox.pop(0)):
                    self._table[type(action)](action)
        finally:
            self._feeding = False
            self.within -= 1
        self._check()

    def submit(self, spec: TaskSpec) -> Story:
        """Submit a task as a client does; the story tells what becomes of it."""
        story = self.stories[spec.id] = Story()
        event = events.TasksSubmitted(PEER, next(self._requests), [spec], self.wall_ns())
        event = self._redaction.refuse(event)
        self.feed(structs.replace(event, tasks=self._declarations.fill_in(event.tasks)))
        return story

    def cancel(self, task_id: str) -> None:
        self.feed(events.CancelRequested([task_id]))

    def look_at(self, task_id: str) -> TaskView | None:
        """Return a task as the daemon shows it."""
        found: list[TaskView | None] = []
        # It needs of the shell what this class has.
        look_at(cast(Any, self), task_id, found.append, lambda: None)
        self.store_requests.answer()
        return found[0]

    # -- the worker ---------------------------------------------------------------------------

    def hear(self, worker: int, frame: bytes) -> None:
        """Take a message of the worker."""
        message = decode_worker(frame)
        if isinstance(message, WorkerHello):
            self.feed(events.WorkerReady(worker, message.width))
            return
        event = event_of(worker, message)
        if isinstance(event, events.LeasesCompleted):
            for completion in event.completions:
                self._note(completion)
        self.feed(event)

    def exited(self, event: events.WorkerExited, began: dict[int, int]) -> None:
        """Take the end of the worker, whose leases had begun at these times."""
        self.process = None
        self._struck = False
        failure = Failure(CRASH, message=event.detail or "the worker was killed")
        for lease, since_ns in began.items():
            self._note(Completion(lease, self.now_ns() - since_ns, failure=failure))
        self.feed(event)

    def raised(self, task_id: str, error: BaseException) -> None:
        """Keep what an attempt has raised, and where: the worker forgets that."""
        if task_id in self.stories:
            self.stories[task_id].raised = error, error.__traceback__

    def _note(self, completion: Completion) -> None:
        """Note the end of an attempt for the test."""
        lease = self._leases.pop(completion.lease, None)
        story = self.stories.get(lease.id) if lease is not None else None
        if story is None:
            return
        began = (self.now_ns() - completion.run_ns - self.began_ns) / 1e9
        seconds, pause = completion.run_ns / 1e9, 0.0
        if story.attempts:
            last = story.attempts[-1]
            pause = round(began - last.began - last.seconds, 9)
        story.attempts.append(Attempt(began, seconds, pause, completion.failure))

    # -- locks of others ----------------------------------------------------------------------

    def hold_lock(self, name: str) -> Callable[[], None]:
        """Take a lock for another worker; return what gives it back."""
        task_id = f"hold-{next(self._requests)}"
        self.submit(TaskSpec(task_id, f"{ELSEWHERE}.hold", b"\x80"))
        lease = self._holds[task_id]
        self._locked = None
        self.feed(events.LockWanted(self._elsewhere, lease, next(self._requests), name, 0))
        taken = cast("LockAnswer | None", self._locked)

        def give_back() -> None:
            self.feed(events.LeasesCompleted(self._elsewhere, [Completion(lease, 0, b"\xc0")]))

        if taken is None or not taken.taken:
            give_back()
            raise RuntimeError(
                f"lock {name!r} cannot be held: {taken.holder if taken else 'nobody'} has it"
            )
        return give_back

    # -- actions ------------------------------------------------------------------------------

    def _make_table(self) -> dict[type, Callable[[Any], object]]:
        ignored = (
            *(actions.KeepSpares, actions.StopForkServer, actions.ForgetPicture),
            *(actions.TellChanges, actions.TellMissing, actions.TerminateWorker),
        )
        return {
            **dict.fromkeys(ignored, lambda _: None),
            actions.Persist: self._persist,
            actions.Acknowledge: self._acknowledge,
            actions.Deliver: self._deliver,
            actions.TellProgress: lambda a: self.stories[a.note.id].notes.append(a.note),
            actions.FindState: self._find_state,
            actions.AnswerState: lambda a: self._tell(
                a.worker, StateAnswer(a.request, a.value, a.error)
            ),
            actions.AnswerLock: self._answer_lock,
            actions.AnswerWait: lambda a: self._tell(
                a.worker, WaitAnswer(a.request, a.ids, a.reason), now=True
            ),
            actions.StartForkServer: lambda a: self._inbox.append(
                events.ForkServerReady(a.pool, self._declared[a.pool], a.build)
            ),
            actions.Declare: lambda a: self._declarations.declare(a.pool, a.declarations),
            actions.SpawnWorker: self._spawn,
            actions.AssignLeases: self._assign,
            actions.RecallLeases: lambda a: self._tell(a.worker, Recall(), now=True),
            actions.CancelRunning: lambda a: self._tell(a.worker, CancelLease(a.lease), now=True),
            actions.StopWorker: lambda a: self._tell(
                a.worker, Stop(self.fleet.policy.stop_timeout_ns), now=True
            ),
            actions.KillWorker: self._kill,
            actions.ReadBoard: self._read_board,
            actions.Report: self._report,
        }

    def _persist(self, action: actions.Persist) -> None:
        self.store.write(action)
        self._inbox.append(events.Persisted(action.ticket))

    def _acknowledge(self, action: actions.Acknowledge) -> None:
        for rejection in action.rejected:
            self.stories[rejection.id].ending = rejection

    def _deliver(self, action: actions.Deliver) -> None:
        for outcome in action.outcomes:
            self.stories[outcome.id].ending = outcome

    def _find_state(self, action: actions.FindState) -> None:
        def found(value: bytes | None) -> None:
            self._tell(action.worker, StateAnswer(action.request, value))

        self.store_requests.ask(FindFact(action.kind, action.key), found)
        self.store_requests.answer()

    def _answer_lock(self, a: actions.AnswerLock) -> None:
        answer = LockAnswer(a.request, a.taken, a.holder, a.error)
        if a.worker == self._elsewhere:
            self._locked = answer
        else:
            self._tell(a.worker, answer)

    def _spawn(self, action: actions.SpawnWorker) -> None:
        if action.pool == ELSEWHERE:
            self._elsewhere = action.worker
            self._inbox.append(events.WorkerReady(action.worker, HOLDS_AT_ONCE))
        else:
            self.spawns.append(action.worker)

    def _assign(self, action: actions.AssignLeases) -> None:
        if action.worker == self._elsewhere:
            self._holds |= {lease.id: lease.lease for lease in action.leases}
        else:
            self._leases |= {lease.lease: lease for lease in action.leases}
            self._tell(action.worker, Assign(action.leases))

    def _kill(self, action: actions.KillWorker) -> None:
        if self.process is not None and self.process.number == action.worker:
            self.process.kill()

    def _read_board(self, action: actions.ReadBoard) -> None:
        if self.process is not None and self.process.number == action.worker:
            self._inbox.append(self.process.read_board())

    def _tell(self, worker: int, message: Struct, *, now: bool = False) -> None:
        """Send the worker a message; `now`: in a daemon a signal follows."""
        if self.process is not None and self.process.number == worker:
            self.process.obey(encode(message))
            self._struck |= now

    def _report(self, action: actions.Report) -> None:
        fields = [
            f"{name}={value}"
            for name in ("worker", "task", "attempt", "target", "session", "reason", "seconds")
            if (value := getattr(action, name))
        ]
        level = logging.getLevelNamesMapping().get(action.level.upper(), logging.INFO)
        log.log(level, "%s %s", action.event, " ".join(fields))

    def close(self) -> None:
        self.store.close()
