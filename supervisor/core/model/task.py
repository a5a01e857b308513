"""Task: one task on its way through the fleet.

    NEW ──────────► QUEUED ──lease──► LEASED ──result──► ENDING ──stored──► (forgotten)
                      ▲  ▲               │  │
                      │  └─ready─ WAITING ◄─┘ retry after a pause
                      └────── given back: crash, recall, shutdown

ENDING waits for the disk, and NEW may: no client is told of a task, or of its end, before the
commit. A task may run before its commit (`early`, core/tasks/intake.py).
JOINED, instead of QUEUED, waits for the task that has the same key (core/tasks/coalescing.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from musterd.ipc.resilience.policy import BackoffPolicy
from musterd.ipc.wire.messages import LOW, NOT_GIVEN, Failure, Fetching, Outcome, TaskSpec, View
from musterd.ipc.wire.node_messages import LoginVerdict

if TYPE_CHECKING:
    from musterd.supervisor.core.model.gates import Debtors, Gate
    from musterd.supervisor.core.model.lanes import Lane
    from musterd.supervisor.core.model.pool import Pool
    from musterd.supervisor.core.model.slot import Slot

# Connections that wait for one task; a broken one is not always noticed. Beyond this the oldest is
# told nothing: a client that hears nothing asks again before long.
WATCHERS_MAX = 1000
# Fields that a submit may leave out; the supervisor fills them in as @task declares.
FILLED_IN = ("target", "key", "cache_ns", "debounce_ns")


class TaskState:
    """Plain numbers: the lookup of an enum member takes ten times as long, per task and step."""

    NEW: Final = 0
    QUEUED: Final = 1
    WAITING: Final = 2
    LEASED: Final = 3
    ENDING: Final = 4
    JOINED: Final = 5


class Route(Struct):
    """Where tasks of one name go, what @task declares about them, and what they cost."""

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
    """The progress that a task reports."""

    reported_ns: int  # when the progress was last in `musterctl events`
    fraction: float = 0.0
    text: str = ""


class Debt(Struct, gc=False):
    """Why a task waits: its next attempt exceeds its site's share of retries."""

    debtors: Debtors
    failure: Failure  # of the last attempt


class Claim(Struct, gc=False):
    """What an attempt of the cluster brings along (core/tasks/claims.py).

    Its site, key and budget are decided by the engine, so the spec of its task names none of them.
    """

    number: int  # fences its end, together with the node's tenure
    attempt: int  # as the engine counts
    target: str
    backoff: BackoffPolicy
    counts: tuple[str, ...] | None  # exceptions that its site's breaker counts
    keeps: bool  # its result is of use as the last good one
    falls_back: bool = False  # a failure for good ends with its last good result or a default
    lost: bool = False  # it is not ours any more: its end is told to nobody
    login: LoginVerdict | None = None  # what its end says about a login
    fetching: Fetching | None = None  # what its target says about fetching


class Task(Struct, gc=False):
    # gc=False: cycles with slot and lane are always cut when the task leaves them.
    seq: int
    spec: TaskSpec
    route: Route
    submitted_wall_ns: int
    peer: bytes  # the client that submitted the task and waits; b"" for none
    state: int = TaskState.NEW
    queued_ns: int = 0  # when the task became ready
    lane: Lane | None = None  # while the task is queued
    gate: Gate | None = None
    early: bool = False  # it need not wait for the disk, and is not on disk yet
    attempt: int = 0  # attempts begun so far
    crashes: int = 0
    interruptions: int = 0
    expires_at_ns: int = 0
    lease: int = 0
    leased_ns: int = 0
    slot: Slot | None = None
    begun_recorded: bool = False
    cancelled: bool = False
    cancel_noted: bool = False  # as a fact in the store, until the task has ended
    watchers: dict[bytes, None] | None = None  # clients that wait, besides `peer`
    outcome: Outcome | None = None
    progress: Mark | None = None
    urged: int = LOW  # queued at this level, because a more urgent task waits for it
    follows: str = ""  # id of the task with the same key whose result it will get
    probe: int = 0  # the half-open round of the site that this lease probes, 0 for none
    login_probe: int = 0  # the half-open round of its session's logins, 0 for none
    login_seen: int = 0  # logins of its session when its lease began
    sent_back: bool = False  # this attempt begins anew, after a login task
    counted: bool = False  # the breaker has counted a failure of this task
    behind: bool = False  # its place is in the disk tail of its lane
    earned: bool = False  # the retry budget of the site has counted its first attempt
    debt: Debt | None = None  # the budget has yet to pay for its next attempt
    put_off_ns: int = 0  # until when the task waits for that
    alone: bool = False  # its worker was lost while it ran beside others: never again beside
    claim: Claim | None = None  # an attempt of the cluster; None: a local task
    view: View | None = None  # of its own result, where a schedule watches it

    @property
    def priority(self) -> int:
        own = self.spec.priority
        return own if own < self.urged else self.urged

    @property
    def timeout_ns(self) -> int:
        """Return the timeout of the submit, declaration, target, class or pool: the first given."""
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
        """Return what the task does while its site is shut: wait, fail or fallback."""
        gate = self.gate
        return self.spec.on_open or (gate.on_open if gate is not None else "") or "wait"

    @property
    def fallback_on(self) -> str:
        """Return when the task falls back: while its site is shut (open), or also on failure."""
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
        if self.claim is not None:
            return self.claim.backoff
        gate = self.gate
        own = gate.backoff if gate is not None else None
        return own or self.route.pool.retry.backoff


def same_task(known: TaskSpec, sent: TaskSpec) -> bool:
    """Whether two submits of one id are the same task.

    They may differ in fields that the supervisor fills in (sockets/declarations.py): at the first
    submit the worker class may not have been loaded yet, or another class was.
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
    """Add a client that waits; beyond WATCHERS_MAX drop the oldest."""
    watchers.pop(peer, None)
    watchers[peer] = None
    if len(watchers) > WATCHERS_MAX:
        del watchers[next(iter(watchers))]
