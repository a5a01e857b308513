"""One task on its way through the fleet.

    NEW ──────────► QUEUED ──lease──► LEASED ──result──► ENDING ──stored──► (forgotten)
                      ▲  ▲               │  │
                      │  └─ready─ WAITING ◄─┘ retry after a pause
                      └────── given back: crash, recall, shutdown

ENDING waits for the disk, and NEW may: nobody is told of a task, or of its end, before that is
committed. A task may run before that (`early`, core/tasks/intake.py).
JOINED, instead of QUEUED, waits for the task that has the same key (core/tasks/coalescing.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from musterd.ipc.resilience.policy import BackoffPolicy
from musterd.ipc.wire.messages import LOW, NOT_GIVEN, Failure, Outcome, TaskSpec

if TYPE_CHECKING:
    from musterd.supervisor.core.model.gates import Debtors, Gate
    from musterd.supervisor.core.model.lanes import Lane
    from musterd.supervisor.core.model.pool import Pool
    from musterd.supervisor.core.model.slot import Slot

# Connections that wait for one task; one that broke is not always noticed. Beyond that the one that
# asked longest ago is told nothing: a client that hears nothing asks again before long.
WATCHERS_MAX = 1000
# What a submit may leave out and the supervisor fills in as @task declares it.
FILLED_IN = ("target", "key", "cache_ns", "debounce_ns")


class TaskState:
    """Plain numbers: a member of an enum takes ten times as long to look up, per task and step."""

    NEW: Final = 0
    QUEUED: Final = 1
    WAITING: Final = 2
    LEASED: Final = 3
    ENDING: Final = 4
    JOINED: Final = 5


class Route(Struct):
    """Where tasks of one name go, what is declared about them, and what they cost."""

    pool: Pool
    name: str
    method: str
    timeout_ns: int  # as declared, 0 if not
    max_retries: int  # as declared, or NOT_GIVEN
    cost_ns: int  # measured run time, smoothed; UNKNOWN_COST_NS before the first result
    fallback_on: str = ""  # as declared
    cache_ns: int = 0  # as declared, or AS_CONFIGURED; 0 if not
    debounce_ns: int = 0


class Mark(Struct, gc=False):
    """How far a task says that it is."""

    reported_ns: int  # when `musterctl events` was told of it
    fraction: float = 0.0
    text: str = ""


class Debt(Struct, gc=False):
    """Why a task waits whose next attempt is more than its site's share of retries."""

    debtors: Debtors
    failure: Failure  # of its last attempt


class Task(Struct, gc=False):
    # gc=False: its cycles (with its slot and its lane) are always cut when it leaves them.
    seq: int
    spec: TaskSpec
    route: Route
    submitted_wall_ns: int
    peer: bytes  # who submitted it and waits; b"" for nobody
    state: int = TaskState.NEW
    queued_ns: int = 0  # when it became ready
    lane: Lane | None = None  # while it is queued
    gate: Gate | None = None
    early: bool = False  # it need not wait for the disk, and has not been there yet
    attempt: int = 0  # attempts begun so far
    crashes: int = 0
    interruptions: int = 0
    expires_at_ns: int = 0
    lease: int = 0
    leased_ns: int = 0
    slot: Slot | None = None
    begun_recorded: bool = False
    cancelled: bool = False
    cancel_noted: bool = False  # as a fact in the store, until it has ended
    watchers: dict[bytes, None] | None = None  # others who wait, besides `peer`
    outcome: Outcome | None = None
    progress: Mark | None = None
    urged: int = LOW  # a more urgent task waits for this one: it is queued at that level
    follows: str = ""  # id of the task with the same key whose result it is to get
    probe: int = 0  # the half-open round of its site that this lease probes for, 0 for none
    counted: bool = False  # a failure of it has been told to the breaker
    behind: bool = False  # its place is on the shelf of its lane
    earned: bool = False  # its first attempt has been counted for the retry budget of its site
    debt: Debt | None = None  # its next attempt has to be paid for by that budget
    put_off_ns: int = 0  # until when it waits for that
    alone: bool = False  # it ran beside others when their worker was lost: never again

    @property
    def priority(self) -> int:
        own = self.spec.priority
        return own if own < self.urged else self.urged

    @property
    def timeout_ns(self) -> int:
        """Of the submit, else the declaration, else the target, else the class, else the pool."""
        gate = self.gate
        return (
            self.spec.timeout_ns
            or self.route.timeout_ns
            or (gate.timeout_ns if gate is not None else 0)
            or self.route.pool.policy.task_timeout_ns
        )

    @property
    def max_retries(self) -> int:
        for given in (
            self.spec.max_retries,
            self.route.max_retries,
            self.gate.max_retries if self.gate is not None else NOT_GIVEN,
        ):
            if given != NOT_GIVEN:
                return given
        return self.route.pool.retry.max_retries

    @property
    def on_open(self) -> str:
        """What it wants while its site is shut: wait, fail or fallback."""
        gate = self.gate
        return self.spec.on_open or (gate.on_open if gate is not None else "") or "wait"

    @property
    def fallback_on(self) -> str:
        """When it falls back: while its site is shut (open), or also when it has failed."""
        gate = self.gate
        return (
            self.spec.fallback_on
            or self.route.fallback_on
            or (gate.fallback_on if gate is not None else "")
            or "open"
        )

    @property
    def wants_fallback(self) -> bool:
        spec = self.spec
        if spec.fallback is not None or self.fallback_on == "failure":
            return True
        return (self.gate is not None or spec.on_open != "") and self.on_open == "fallback"

    @property
    def backoff(self) -> BackoffPolicy:
        gate = self.gate
        own = gate.backoff if gate is not None else None
        return own or self.route.pool.retry.backoff


def same_task(known: TaskSpec, sent: TaskSpec) -> bool:
    """Whether this is the task that is known by its id.

    What the supervisor filled in for a submit that did not say it (sockets/targets.py) may not have
    been known at the first one, when the worker class was not loaded yet, or another one was.
    """
    if known == sent:
        return True
    filled = {
        name: getattr(sent, name)
        for name in FILLED_IN
        if not getattr(known, name) or not getattr(sent, name)
    }
    return bool(filled) and structs.replace(known, **filled) == sent


def add_watcher(watchers: dict[bytes, None], peer: bytes) -> None:
    """One more who waits; where there are too many, the one that came first is let go."""
    watchers.pop(peer, None)
    watchers[peer] = None
    if len(watchers) > WATCHERS_MAX:
        del watchers[next(iter(watchers))]
