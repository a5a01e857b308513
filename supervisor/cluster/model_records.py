"""What the engine in memory keeps: tasks, lanes, nodes, pools, keys."""

from collections.abc import Iterator

from msgspec import Struct, field

from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.keys import derived_key
from musterd.ipc.wire.messages import (
    FAILED,
    PRIORITY_NAMES,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    WAITING,
    FailedAttempt,
    Outcome,
    TaskDeclaration,
    TaskSpec,
    TaskView,
    View,
)
from musterd.supervisor.cluster.engine import NodeCard, PoolCard, ScheduleCard
from musterd.supervisor.cluster.watching import ChangeNote, SeenRun

JOINED = "joined"  # waits for the task that has the same key; people see "waiting"
LaneKey = tuple[str, int, str, str, str]  # pool, level, site, class, on_open


class Task(Struct, eq=False):
    spec: TaskSpec
    seq: int
    pool: str
    class_: str
    level: int
    state: str
    submitted_ns: int
    queued_ns: int
    waiter: int = 0
    ready_ns: int = 0
    expires_ns: int = 0
    tenure: int = 0
    claim: int = 0
    begun: bool = False
    attempt: int = 0
    crashes: int = 0
    interruptions: int = 0
    cancel: bool = False
    earned: bool = False  # the site's budget has counted its first attempt
    counted: bool = False  # the breaker has counted a failure of it
    probe: int = 0
    give_up_ns: int = 0  # until when the next attempt waits for the budget; 0: it is paid for
    node: str = ""  # that ran it last, when it has ended
    ran: bool = False  # an attempt of it was granted: what it returns may be remembered
    error: str = ""
    failures: list[FailedAttempt] = field(default_factory=list)
    fraction: float = 0.0
    text: str = ""
    said: bool = False  # how far it is
    seen: View | None = None  # what of its result is watched
    asked: bool = False  # a run of a schedule that a person asked for or retried
    wanted: bool = False  # it has waited for a login task

    @property
    def retrying(self) -> bool:
        """Return whether it was attempted, and waits for another attempt."""
        return self.state == WAITING and self.attempt > 0

    @property
    def lane(self) -> LaneKey:
        return (self.pool, self.level, self.spec.target, self.class_, self.spec.on_open)

    @property
    def memory_name(self) -> str:
        """Return the name under which results are remembered. A task's name has no space."""
        spec = self.spec
        key = spec.key or derived_key(spec.name, spec.args + spec.session.encode())
        return f"{spec.name} {key}"

    def view(self, node: str, wall_ns: int) -> TaskView:
        """Return what people see of it. `wall_ns` is what to add for wall-clock time."""
        return TaskView(
            id=self.spec.id,
            name=self.spec.name,
            state=WAITING if self.state == JOINED else self.state,
            priority=PRIORITY_NAMES[self.spec.priority],
            target=self.spec.target,
            attempt=self.attempt,
            crashes=self.crashes,
            worker=node,
            submitted_at=(self.submitted_ns + wall_ns) / 1e9,
            attempts=self.failures,
            progress=self.fraction,
            progress_text=self.text,
            args=self.spec.args,
        )


class Done(Struct, eq=False):
    task: Task
    outcome: Outcome
    number: int  # in the order of the ends
    finished_ns: int

    def view(self, wall_ns: int) -> TaskView:
        shown, outcome = self.task.view(self.task.node, wall_ns), self.outcome
        return TaskView(
            id=shown.id,
            name=shown.name,
            state=outcome.state,
            priority=shown.priority,
            target=shown.target,
            attempt=outcome.attempts,
            crashes=shown.crashes,
            worker=shown.worker,
            submitted_at=shown.submitted_at,
            finished_at=(self.finished_ns + wall_ns) / 1e9,
            run_seconds=outcome.run_seconds,
            failure=outcome.failure,
            value=outcome.value,
            source=outcome.source,
            attempts=shown.attempts,
            args=shown.args,
        )


class Node(Struct, eq=False):
    card: NodeCard
    tenure: int  # 0: it has left, or was reaped
    beat_ns: int
    epoch: str
    draining: bool = False
    lost: bool = False  # it was reaped


class Pool(Struct, eq=False):
    card: PoolCard
    counted: int = 0  # live tasks, when they were counted last
    grants: int = 0


class Group(Struct, eq=False):
    """The live tasks of one key."""

    name: str
    leader: str
    since_ns: int  # when its first task was submitted
    joined: list[str] = field(default_factory=list)
    forget: bool = False  # the key was invalidated after the leader was granted


class Recent(Struct, frozen=True):
    """How the last leader of a key ended."""

    last: Outcome
    since_ns: int
    good: Outcome | None
    good_ns: int


class Schedule(Struct, eq=False):
    card: ScheduleCard
    turn: int = 0
    last_ns: int = 0
    next_ns: int | None = 0
    memory: bytes = b""
    task: str = ""  # the newest run
    ran_ns: int = 0
    runs: int = 0
    skipped: int = 0
    paused: bool = False
    added: bool = False
    section: bytes = b""


class FailedLogins(Struct, eq=False):
    """Logins of a session that have failed in a row."""

    failures: int = 0
    pauses: int = 0
    until_ns: int = 0  # no login is tried before
    problem: str = ""
    node: str = ""


class LoginTask(Struct, eq=False):
    """The last login task of a session."""

    task: str
    name: str
    args: bytes
    since_ns: int
    ok: bool | None = None  # None: it is under way
    problem: str = ""


class Lock(Struct, frozen=True):
    """A node that has a lock, or waits for it."""

    token: int
    tenure: int
    holder: str


class Board(Struct, eq=False):
    """Everything that is remembered."""

    live: dict[str, Task] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)  # by identity
    pools: dict[str, Pool] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    recent: dict[str, Recent] = field(default_factory=dict)
    good: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    state: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    locks: dict[str, list[Lock]] = field(default_factory=dict)  # the first one has it
    logins: dict[str, FailedLogins] = field(default_factory=dict)  # by session
    logging_in: dict[str, LoginTask] = field(default_factory=dict)  # by session
    changes: list[ChangeNote] = field(default_factory=list)
    announced: dict[int, int] = field(default_factory=dict)  # changes, and whose token took them
    noted_ns: dict[int, int] = field(default_factory=dict)  # when they were made, or taken
    retaken: dict[int, None] = field(default_factory=dict)  # taken over from others
    told: dict[int, None] = field(default_factory=dict)
    seen: list[tuple[str, SeenRun]] = field(default_factory=list)  # by schedule, to be judged
    seen_number: int = 0
    watched: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # turn and record
    history: dict[str, dict[int, HistoryEntry]] = field(default_factory=dict)
    seq: int = 0
    ends: int = 0

    def declared(self, name: str) -> TaskDeclaration | None:
        """Return what a node says about a task; None if no node has it."""
        pool, _, method = name.partition(".")
        for node in self.nodes.values():
            for card in node.card.pools:
                for task in card.tasks if card.name == pool else ():
                    if task.method == method:
                        return task
        return None

    def of(self, tenure: int) -> Node | None:
        return next((n for n in self.nodes.values() if n.tenure == tenure), None)

    def name_of(self, tenure: int) -> str:
        """Return the name of a node; "" for none."""
        node = self.of(tenure) if tenure else None
        return node.card.name if node is not None else ""

    def claimed(self) -> Iterator[Task]:
        return (task for task in self.live.values() if task.state == RUNNING)

    def queued(self, pool: str) -> Iterator[Task]:
        return (t for t in self.live.values() if t.state == QUEUED and t.pool == pool)


def own(outcome: Outcome) -> bool:
    """Whether an outcome is a task's own result, good or bad."""
    return outcome.state in (SUCCEEDED, FAILED) and not outcome.source
