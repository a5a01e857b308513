"""Decide what kind of world a seed makes: how much work, which faults, how slow a disk.

The seed chooses one of PROFILES by its remainder and then varies it, so that any run of
consecutive seeds covers every kind evenly.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from msgspec import structs

from musterd.ipc.resilience.policy import (
    MILLISECOND_NS,
    SECOND_NS,
    BackoffPolicy,
    BreakerPolicy,
    RetryPolicy,
)
from musterd.supervisor.core.model.policy import (
    CachePolicy,
    FleetPolicy,
    GatePolicy,
    MemoryPolicy,
    PoolPolicy,
    RestartPolicy,
    ScalingPolicy,
    SessionPolicy,
    TargetPolicy,
)

US = 1_000
MS = MILLISECOND_NS
SEC = SECOND_NS

METHODS = ("tiny", "short", "long")
# How long a run of each method takes when all goes well: from, to.
DURATIONS_NS = {
    "tiny": (15 * US, 400 * US),
    "short": (2 * MS, 60 * MS),
    "long": (300 * MS, 4 * SEC),
}
CALM_DURATION_MAX_NS = 20 * MS
HEARTBEAT_NS = 3 * SEC
BEAT_NS = 500 * MS  # how often an idle worker stamps its board
HEALTH_NS = 2 * SEC


@dataclass(frozen=True)
class Profile:
    name: str
    faults_ns: int = 8 * SEC  # how long clients, faults and operators are active, before the calm
    pools: int = 1
    slots: tuple[int, int] = (1, 3)
    tasks: int = 60
    batch: int = 8
    clients: int = 2
    queue_size: int = 1000
    targets: int = 3
    weights: tuple[int, int, int] = (2, 2, 1)  # of METHODS
    disk_ns: tuple[int, int] = (200 * US, 5 * MS)
    # Chances, per task.
    delay: float = 0.08
    expiry: float = 0.08
    own_timeout: float = 0.2
    cancel: float = 0.06
    repeat: float = 0.05  # submitted once more, or twice in one batch
    unknown: float = 0.02
    poison: float = 0.0  # kills every worker that runs it
    # Chances, per run.
    surprise: float = 0.02  # a tiny task that takes long
    fail: float = 0.08
    hang: float = 0.0
    crash: float = 0.0
    wedge: float = 0.0  # it stops forever between two tasks, and ignores everything
    # Chances, per start of a worker or a fork server.
    spawn_fails: float = 0.0
    open_fails: float = 0.0
    slow_start: float = 0.0
    leaves: float = 0.0  # its last worker left processes: they are ended before the fork
    fork_server_fails: float = 0.0
    fork_server_exits: float = 0.0
    fork_server_hangs: float = 0.0  # it never finishes loading the worker class
    # Chances, per message or command.
    lost: float = 0.3  # messages of a dead worker
    late: float = 0.05  # a message of a worker is late, but in order
    deaf: float = 0.05  # an order (stop, terminate, cancel) is ignored
    # How often, over the whole time of faults.
    kills: int = 0  # a worker gets SIGKILL, idle or not
    recycles: bool = False  # workers are replaced after a few tasks, or seconds
    freezes: int = 0  # a worker is stopped (SIGSTOP), or a loop in C holds its interpreter
    sick: int = 0  # an idle worker's healthy() says no, or never answers
    fork_server_kills: int = 0
    fork_server_stalls: int = 0  # it lives but forks nothing any more
    reconnects: int = 1  # a client loses its connection
    orders: int = 2  # of an operator
    crashes: int = 0  # of the supervisor
    shutdowns: int = 0
    stuck_disk: float = 0.0  # chance that the disk writes nothing more during a shutdown
    full_disks: int = 0  # times the disk is full for a while
    retries_by_hand: int = 0  # times the operator retries finished tasks
    pauses: int = 0  # times the operator pauses, drains or resumes something
    breaker_orders: int = 0  # times the operator commands a breaker
    forgets: int = 0  # times the operator forgets a session
    calls: int = 0  # times a person submits a task with musterctl
    unreadable: float = 0.0  # chance that the store cannot read an answer
    keys: int = 0  # that tasks of one name share, with debounce, cache and fallbacks; 0: none
    breakpoints: float = 0.0  # chance that a run stops at a breakpoint
    looks: int = 0  # times somebody looks for a task to debug
    asks: float = 0.0  # chance that a run uses ctx.state, ctx.lock and ctx.progress
    locks: tuple[str, ...] = ("a", "b", "c")  # few, so that workers compete for them
    waits: float = 0.0  # chance that a run waits for another task, and ends with that
    lies: float = 0.0  # chance that a worker sends something untrue instead
    reloads: int = 0  # times the operator reloads, each time with another policy
    gates: bool = False  # breakers that open, bulkheads, rates, classes
    logins: bool = False  # the sessions have login tasks, which may fail
    sessions: bool = False  # tasks use sessions, of which each has one place or two
    scaling: bool = False  # pools that scale by themselves
    disk_queue: bool = False  # few tasks are kept in memory
    alike: float = 0.0  # chance that tasks of a submit differ in their ids only
    memory: bool = False  # memory gets tight now and then
    width: int = 1  # the most tasks a worker runs at once: each draws its own number


CALM = Profile("calm", orders=0, fail=0.02, deaf=0.0)
PROFILES = (
    CALM,
    Profile(
        "crashy",
        tasks=50,
        poison=0.04,
        crash=0.08,
        hang=0.03,
        wedge=0.01,
        spawn_fails=0.1,
        open_fails=0.1,
        slow_start=0.05,
        leaves=0.1,
        fork_server_exits=0.1,
        kills=6,
        fork_server_kills=2,
        orders=4,
    ),
    Profile(
        "slow-disk",
        tasks=50,
        disk_ns=(5 * MS, 900 * MS),
        kills=2,
        crash=0.02,
        crashes=1,
        shutdowns=1,
        stuck_disk=0.3,
    ),
    Profile(
        "tiny-tasks",
        tasks=150,
        batch=40,
        faults_ns=2 * SEC,
        weights=(20, 1, 0),
        surprise=0.03,
        crash=0.01,
        kills=2,
        disk_ns=(100 * US, 2 * MS),
    ),
    Profile(
        "long-tasks",
        tasks=30,
        batch=4,
        faults_ns=20 * SEC,
        weights=(0, 1, 5),
        hang=0.05,
        kills=3,
        orders=5,
        own_timeout=0.5,
    ),
    Profile(
        "many-targets", tasks=120, batch=60, targets=24, weights=(1, 3, 0), slots=(1, 2), kills=1
    ),
    Profile("tiny-queue", tasks=60, batch=12, queue_size=20, weights=(1, 3, 1), crash=0.03),
    Profile(
        "restarts", pools=2, tasks=50, crashes=4, hang=0.02, crash=0.02, poison=0.03, cancel=0.1
    ),
    Profile("shutdowns", pools=2, tasks=50, shutdowns=3, hang=0.02, crash=0.02, orders=6, deaf=0.2),
    Profile(
        "operators",
        pools=2,
        tasks=50,
        orders=25,
        slow_start=0.05,
        fork_server_fails=0.1,
        fork_server_exits=0.1,
        fork_server_kills=2,
        crash=0.03,
        kills=3,
    ),
    Profile(
        "everything",
        pools=3,
        tasks=80,
        targets=6,
        poison=0.03,
        crash=0.04,
        hang=0.03,
        wedge=0.005,
        spawn_fails=0.05,
        open_fails=0.05,
        slow_start=0.03,
        fork_server_fails=0.03,
        fork_server_exits=0.05,
        kills=4,
        fork_server_kills=1,
        reconnects=3,
        orders=8,
        crashes=2,
        shutdowns=1,
        queue_size=40,
        disk_ns=(200 * US, 100 * MS),
    ),
)


# Later profiles have seeds of their own, so that the corpus keeps its meaning.
LATER_SEED = 1_000_000
LATER_PROFILES = (
    Profile("gates", gates=True, targets=4, pools=2, fail=0.3, kills=1, crashes=1),
    Profile(
        "gates-crashy",
        gates=True,
        targets=6,
        pools=2,
        fail=0.3,
        crash=0.05,
        hang=0.03,
        kills=4,
        crashes=2,
        orders=4,
        weights=(4, 2, 1),
    ),
    Profile("keys", keys=3, cancel=0.2, expiry=0.15, delay=0.1, clients=3, fail=0.15),
    Profile("keys-tiny", keys=2, tasks=120, batch=40, faults_ns=2 * SEC, weights=(10, 1, 0)),
    Profile(
        "keys-crashy",
        keys=2,
        pools=2,
        tasks=80,
        cancel=0.2,
        expiry=0.15,
        poison=0.05,
        crash=0.05,
        hang=0.03,
        kills=4,
        crashes=4,
        shutdowns=1,
        reconnects=3,
        orders=4,
        queue_size=20,
        disk_ns=(200 * US, 300 * MS),
    ),
    Profile(
        "full-disk",
        full_disks=4,
        clients=3,
        tasks=80,
        batch=10,
        cancel=0.1,
        reconnects=3,
        crashes=2,
        repeat=0.3,
        queue_size=30,
        disk_ns=(200 * US, 100 * MS),
        faults_ns=30 * SEC,
    ),
    Profile(
        "by-hand",
        retries_by_hand=30,
        fail=0.4,
        poison=0.1,
        cancel=0.2,
        expiry=0.2,
        repeat=0.2,
        reconnects=3,
        kills=2,
        crashes=2,
        queue_size=30,
    ),
    Profile(
        "all-at-once",
        keys=2,
        gates=True,
        targets=3,
        full_disks=3,
        retries_by_hand=20,
        fail=0.3,
        poison=0.05,
        crash=0.05,
        cancel=0.15,
        expiry=0.1,
        delay=0.1,
        repeat=0.2,
        reconnects=3,
        kills=2,
        crashes=3,
        shutdowns=1,
        stuck_disk=0.3,
        orders=4,
        faults_ns=20 * SEC,
        disk_ns=(200 * US, 100 * MS),
    ),
    Profile(
        "handler-requests",
        asks=0.7,
        tasks=40,
        weights=(1, 3, 2),
        slots=(2, 4),
        fail=0.2,
        kills=4,
        crashes=2,
    ),
    Profile(
        "handler-requests-crashy",
        tasks=40,
        asks=0.7,
        pools=2,
        weights=(1, 3, 3),
        slots=(2, 4),
        fail=0.2,
        crash=0.08,
        hang=0.03,
        kills=6,
        crashes=4,
        shutdowns=2,
        orders=6,
        cancel=0.15,
        own_timeout=0.4,
        disk_ns=(200 * US, 300 * MS),
    ),
    Profile("pauses", pauses=20, pools=2, tasks=80, queue_size=40, kills=3, crashes=2, orders=6),
    Profile(
        "pauses-crashy",
        pauses=30,
        keys=2,
        gates=True,
        targets=3,
        pools=2,
        weights=(6, 2, 1),
        fail=0.2,
        crash=0.05,
        hang=0.02,
        poison=0.03,
        kills=4,
        crashes=3,
        shutdowns=1,
        orders=8,
        retries_by_hand=5,
        full_disks=1,
        disk_ns=(200 * US, 100 * MS),
    ),
    Profile("keys-gates", keys=2, gates=True, targets=3, fail=0.3, crashes=2, kills=2, cancel=0.15),
    Profile(
        "fork_servers",
        pools=2,
        tasks=40,
        kills=8,
        crash=0.05,
        slow_start=0.05,
        leaves=0.3,
        spawn_fails=0.05,
        fork_server_hangs=0.3,
        fork_server_exits=0.2,
        fork_server_fails=0.05,
        fork_server_kills=3,
        fork_server_stalls=4,
        orders=8,
        crashes=1,
        shutdowns=1,
    ),
    Profile(
        "scaling",
        scaling=True,
        slots=(1, 1),
        pools=3,
        tasks=90,
        batch=20,
        weights=(1, 3, 3),
        faults_ns=20 * SEC,
        orders=1,
        kills=2,
    ),
    Profile(
        "scaling-crashy",
        scaling=True,
        disk_queue=True,
        slots=(1, 1),
        pools=3,
        tasks=80,
        batch=20,
        weights=(2, 3, 3),
        faults_ns=20 * SEC,
        orders=10,
        kills=6,
        crash=0.05,
        hang=0.02,
        poison=0.02,
        spawn_fails=0.05,
        open_fails=0.05,
        slow_start=0.05,
        fork_server_exits=0.05,
        fork_server_fails=0.03,
        fork_server_kills=2,
        crashes=2,
        shutdowns=1,
        gates=True,
        targets=4,
    ),
    Profile(
        "disk-queue",
        disk_queue=True,
        tasks=150,
        batch=60,
        slots=(1, 2),
        faults_ns=2 * SEC,
        cancel=0.1,
    ),
    Profile(
        "disk-queue-gates",
        disk_queue=True,
        gates=True,
        keys=2,
        tasks=150,
        batch=60,
        slots=(1, 2),
        fail=0.3,
        cancel=0.2,
        crash=0.05,
        kills=3,
        crashes=3,
        shutdowns=1,
        repeat=0.2,
        reconnects=3,
        retries_by_hand=10,
        full_disks=2,
        orders=4,
    ),
    Profile(
        "reloads-disk-queue",
        reloads=10,
        disk_queue=True,
        gates=True,
        pools=2,
        tasks=120,
        batch=60,
        slots=(1, 2),
        fail=0.2,
        cancel=0.1,
        kills=2,
        crashes=2,
        repeat=0.2,
        reconnects=2,
    ),
    Profile(
        "reloads-recycles",
        reloads=10,
        recycles=True,
        pools=2,
        tasks=100,
        batch=20,
        kills=4,
        crash=0.03,
        spawn_fails=0.05,
        open_fails=0.05,
        slow_start=0.05,
        fork_server_kills=3,
        orders=6,
        crashes=1,
        shutdowns=1,
    ),
    Profile(
        "reloads-scaling",
        reloads=8,
        scaling=True,
        slots=(1, 1),
        pools=3,
        tasks=60,
        batch=20,
        weights=(1, 3, 3),
        kills=2,
        orders=4,
        faults_ns=15 * SEC,
    ),
    Profile(
        "reloads", reloads=8, pools=3, tasks=60, kills=1, fork_server_kills=1, weights=(2, 3, 2)
    ),
    Profile(
        "reloads-crashy",
        reloads=12,
        pools=3,
        tasks=60,
        keys=3,
        gates=True,
        targets=4,
        weights=(2, 3, 2),
        fail=0.15,
        crash=0.04,
        hang=0.02,
        cancel=0.1,
        expiry=0.15,
        delay=0.15,
        repeat=0.15,
        spawn_fails=0.05,
        open_fails=0.05,
        slow_start=0.05,
        fork_server_fails=0.1,
        fork_server_exits=0.1,
        fork_server_hangs=0.05,
        fork_server_kills=3,
        fork_server_stalls=1,
        kills=4,
        reconnects=3,
        orders=8,
        crashes=2,
        shutdowns=1,
        full_disks=1,
        faults_ns=15 * SEC,
        disk_ns=(200 * US, 100 * MS),
    ),
)


LATER_PROFILES += (
    Profile(
        "lame",
        pools=2,
        faults_ns=20 * SEC,
        tasks=40,
        freezes=6,
        sick=6,
        crash=0.03,
        hang=0.02,
        kills=2,
        orders=4,
        crashes=1,
        shutdowns=1,
        weights=(4, 3, 1),
    ),
    Profile(
        "worn",
        recycles=True,
        pools=2,
        tasks=80,
        slots=(1, 4),
        weights=(6, 4, 1),
        kills=1,
        orders=3,
        faults_ns=8 * SEC,
    ),
    Profile(
        "worn-crashy",
        recycles=True,
        pools=2,
        tasks=80,
        slots=(1, 4),
        poison=0.02,
        crash=0.03,
        hang=0.02,
        wedge=0.005,
        spawn_fails=0.1,
        open_fails=0.1,
        slow_start=0.05,
        fork_server_exits=0.1,
        fork_server_fails=0.03,
        fork_server_kills=2,
        fork_server_stalls=1,
        freezes=3,
        sick=2,
        kills=4,
        orders=8,
        crashes=2,
        shutdowns=1,
        cancel=0.1,
        deaf=0.1,
        faults_ns=15 * SEC,
    ),
    Profile(
        "worn-scaling",
        recycles=True,
        scaling=True,
        slots=(1, 1),
        pools=2,
        tasks=120,
        batch=30,
        weights=(2, 4, 1),
        crash=0.02,
        kills=3,
        orders=6,
        crashes=1,
        shutdowns=1,
        faults_ns=15 * SEC,
    ),
    Profile(
        "worn-tight",
        recycles=True,
        memory=True,
        pools=2,
        tasks=80,
        slots=(1, 5),
        weights=(3, 4, 2),
        crash=0.02,
        kills=2,
        orders=4,
        crashes=1,
        faults_ns=20 * SEC,
    ),
    Profile("lame-idle", faults_ns=20 * SEC, tasks=12, freezes=8, sick=8, orders=2, slots=(1, 4)),
)


MEMORY_SEED = 2_000_000
MEMORY_PROFILES = (
    Profile("memory", memory=True, pools=3, slots=(1, 6), faults_ns=60 * SEC, tasks=80, orders=0),
    Profile(
        "memory-crashy",
        memory=True,
        recycles=True,
        pools=3,
        slots=(1, 6),
        tasks=80,
        weights=(2, 2, 3),
        faults_ns=60 * SEC,
        poison=0.03,
        crash=0.05,
        hang=0.03,
        wedge=0.005,
        deaf=0.2,
        spawn_fails=0.05,
        open_fails=0.05,
        slow_start=0.05,
        fork_server_exits=0.05,
        kills=6,
        fork_server_kills=2,
        fork_server_stalls=1,
        orders=12,
        crashes=2,
        shutdowns=1,
    ),
    Profile(
        "memory-scaling",
        memory=True,
        recycles=True,
        scaling=True,
        pools=3,
        slots=(1, 1),
        faults_ns=60 * SEC,
        tasks=80,
        orders=4,
        kills=3,
        crash=0.03,
        crashes=1,
    ),
)


# Workers that run several tasks at once; those of one pool may differ, as during a reload.
WIDE_SEED = 3_000_000
WIDE_PROFILES = (
    Profile("wide", width=4, weights=(1, 3, 2), tasks=80, orders=2),
    Profile(
        "wide-crashy",
        width=4,
        pools=2,
        tasks=80,
        weights=(1, 3, 2),
        poison=0.04,
        crash=0.06,
        hang=0.03,
        wedge=0.01,
        deaf=0.2,
        cancel=0.1,
        spawn_fails=0.05,
        open_fails=0.05,
        freezes=3,
        sick=2,
        kills=6,
        fork_server_kills=1,
        orders=6,
        crashes=1,
        shutdowns=1,
        faults_ns=15 * SEC,
    ),
    Profile(
        "wide-gated",
        width=3,
        gates=True,
        keys=3,
        tasks=80,
        weights=(2, 3, 1),
        crash=0.03,
        kills=2,
        pauses=3,
        crashes=1,
    ),
    Profile(
        "wide-worn",
        width=4,
        recycles=True,
        scaling=True,
        slots=(1, 1),
        pools=2,
        tasks=100,
        weights=(2, 4, 1),
        crash=0.03,
        kills=3,
        orders=4,
        disk_queue=True,
        shutdowns=1,
        faults_ns=15 * SEC,
    ),
    Profile(
        "wide-reloaded",
        width=4,
        pools=2,
        tasks=80,
        reloads=4,
        crash=0.03,
        kills=2,
        crashes=1,
        faults_ns=15 * SEC,
    ),
)


# Bulk submits: taken at once where possible, and put in the disk queue while they are written.
ALIKE_SEED = 4_000_000
_ALIKE = Profile(
    "alike",
    alike=0.95,
    disk_queue=True,
    tasks=200,
    batch=40,
    slots=(1, 2),
    targets=2,
    weights=(4, 2, 0),
    faults_ns=2 * SEC,
    cancel=0.1,
    repeat=0.1,
    unknown=0.0,
)
ALIKE_PROFILES = (
    _ALIKE,
    replace(_ALIKE, name="alike-slow-disk", disk_ns=(5 * MS, 900 * MS), crashes=1, shutdowns=1),
    replace(_ALIKE, name="alike-full-disk", full_disks=4, disk_ns=(5 * MS, 200 * MS), cancel=0.3),
    replace(_ALIKE, name="alike-crashy", crash=0.05, kills=4, crashes=3, reconnects=4, fail=0.3),
    replace(_ALIKE, name="alike-reloads", reloads=10, pools=2, kills=2, crashes=1, orders=4),
)


# Workers that lie: they return leases that they go on running, or report about the leases of other
# workers.
RUDE_SEED = 5_000_000
RUDE_PROFILES = (
    Profile("rude", lies=0.3, asks=0.8, tasks=40, weights=(1, 3, 2), slots=(2, 4), fail=0.1),
    Profile(
        "rude-everything",
        lies=0.3,
        asks=0.8,
        pools=2,
        tasks=50,
        weights=(2, 3, 2),
        slots=(1, 3),
        hang=0.03,
        crash=0.03,
        cancel=0.1,
        kills=3,
        crashes=1,
        late=0.1,
    ),
)


# Handlers that wait for other tasks: in their own pool, in others, in circles.
NESTED_SEED = 6_000_000
NESTED_PROFILES = (
    Profile("nested", waits=0.5, tasks=40, weights=(0, 3, 1), slots=(1, 3), faults_ns=4 * SEC),
    Profile(
        "nested-pools",
        waits=0.6,
        pools=3,
        tasks=50,
        weights=(0, 3, 1),
        slots=(1, 2),
        faults_ns=4 * SEC,
    ),
    Profile(
        "nested-everything",
        waits=0.4,
        pools=2,
        tasks=60,
        weights=(2, 3, 1),
        slots=(1, 3),
        fail=0.1,
        crash=0.02,
        hang=0.02,
        kills=3,
        crashes=1,
        cancel=0.1,
        late=0.1,
    ),
)


# A store that is unreadable now and then, people who submit tasks and command breakers.
UNREADABLE_SEED = 7_000_000
_UNREADABLE = Profile(
    "unreadable",
    unreadable=0.3,
    calls=10,
    clients=3,
    tasks=60,
    repeat=0.4,
    reconnects=4,
    crashes=1,
    retries_by_hand=5,
    fail=0.2,
)
UNREADABLE_PROFILES = (
    _UNREADABLE,
    Profile(
        "breakers-by-hand", gates=True, breaker_orders=20, targets=4, pools=2, fail=0.3, crashes=1
    ),
    replace(
        _UNREADABLE,
        name="unreadable-everything",
        gates=True,
        breaker_orders=10,
        targets=4,
        keys=2,
        asks=0.5,
        disk_queue=True,
        full_disks=2,
        cancel=0.1,
        crash=0.03,
        kills=2,
        crashes=2,
        shutdowns=1,
        pauses=4,
        disk_ns=(200 * US, 100 * MS),
    ),
)


# Sessions: few, so that tasks of all pools and sites want the same one.
SESSION_SEED = 8_000_000
SESSIONS = {"acme": SessionPolicy(), "shop": SessionPolicy(), "wide": SessionPolicy(2)}
SESSION_PROFILES = (
    Profile("sessions", sessions=True, pools=3, targets=3, tasks=60, kills=2, crashes=1),
    Profile(
        "sessions-tiny", sessions=True, tasks=120, batch=40, pools=2, weights=(10, 1, 0), crashes=1
    ),
    Profile(
        "sessions-crashy",
        sessions=True,
        forgets=5,
        gates=True,
        disk_queue=True,
        asks=0.5,
        keys=2,
        width=4,
        pools=2,
        targets=4,
        tasks=60,
        fail=0.2,
        crash=0.05,
        hang=0.03,
        wedge=0.01,
        cancel=0.1,
        expiry=0.1,
        reloads=3,
        lies=0.02,
        pauses=3,
        kills=4,
        crashes=2,
        shutdowns=1,
        orders=4,
    ),
)


# Login tasks: nobody is logged in at first, and now and then sites forget who is.
LIMIT = BreakerPolicy(failures=3, open_ns=2 * SEC, open_max_ns=8 * SEC, successes=1)
LOGIN_SEED = 9_000_000
LOGIN_TASK = "pool0.tiny"
LOGIN_SESSIONS = {
    name: structs.replace(each, login_task=LOGIN_TASK, logins=LIMIT)
    for name, each in SESSIONS.items()
}
LOGIN_PROFILES = tuple(
    replace(each, name=each.name.replace("sessions", "logins"), logins=True)
    for each in SESSION_PROFILES
)


# Handlers that stop at breakpoints, and people who debug them, or do not come.
DEBUG_SEED = 10_000_000
_DEBUGGED = Profile(
    "debugged",
    breakpoints=0.4,
    looks=60,
    tasks=40,
    weights=(1, 3, 2),
    hang=0.05,
    own_timeout=0.5,
    cancel=0.1,
    pauses=3,
    faults_ns=30 * SEC,
)
DEBUG_PROFILES = (
    _DEBUGGED,
    replace(_DEBUGGED, name="debugged-wide", width=4, tasks=60),
    replace(
        _DEBUGGED,
        name="debugged-worn",
        recycles=True,
        scaling=True,
        slots=(1, 2),
        pools=2,
        reloads=4,
        weights=(2, 3, 1),
    ),
    replace(
        _DEBUGGED,
        name="debugged-crashy",
        pools=2,
        lies=0.05,
        crash=0.04,
        wedge=0.005,
        deaf=0.2,
        late=0.1,
        lost=0.3,
        freezes=2,
        kills=5,
        orders=8,
        crashes=1,
        shutdowns=2,
        asks=0.3,
    ),
)


def profile_of(seed: int, rng: Random) -> Profile:
    if seed >= DEBUG_SEED:
        profile = DEBUG_PROFILES[(seed - DEBUG_SEED) % len(DEBUG_PROFILES)]
    elif seed >= LOGIN_SEED:
        profile = LOGIN_PROFILES[(seed - LOGIN_SEED) % len(LOGIN_PROFILES)]
    elif seed >= SESSION_SEED:
        profile = SESSION_PROFILES[(seed - SESSION_SEED) % len(SESSION_PROFILES)]
    elif seed >= UNREADABLE_SEED:
        profile = UNREADABLE_PROFILES[(seed - UNREADABLE_SEED) % len(UNREADABLE_PROFILES)]
    elif seed >= NESTED_SEED:
        profile = NESTED_PROFILES[(seed - NESTED_SEED) % len(NESTED_PROFILES)]
    elif seed >= RUDE_SEED:
        profile = RUDE_PROFILES[(seed - RUDE_SEED) % len(RUDE_PROFILES)]
    elif seed >= ALIKE_SEED:
        profile = ALIKE_PROFILES[(seed - ALIKE_SEED) % len(ALIKE_PROFILES)]
    elif seed >= WIDE_SEED:
        profile = WIDE_PROFILES[(seed - WIDE_SEED) % len(WIDE_PROFILES)]
    elif seed >= MEMORY_SEED:
        profile = MEMORY_PROFILES[(seed - MEMORY_SEED) % len(MEMORY_PROFILES)]
    elif seed >= LATER_SEED:
        profile = LATER_PROFILES[(seed - LATER_SEED) % len(LATER_PROFILES)]
    else:
        profile = PROFILES[seed % len(PROFILES)]
    return replace(
        profile,
        tasks=max(4, int(profile.tasks * rng.uniform(0.3, 1.1))),
        faults_ns=int(profile.faults_ns * rng.uniform(0.3, 1.2)),
        batch=rng.randint(1, profile.batch),
        targets=rng.randint(1, profile.targets),
        clients=rng.randint(1, profile.clients),
        pools=rng.randint(1, profile.pools),
    )


def policy_of(profile: Profile, rng: Random) -> FleetPolicy:
    """Make an operator's policy with short times, so that a scenario reaches their ends."""
    backoff = BackoffPolicy(base_ns=100 * MS, factor=2.0, max_ns=3 * SEC, jitter=0.1)
    restart = RestartPolicy(
        backoff=backoff, reset_ns=5 * SEC, limit=rng.randint(3, 10), window_ns=20 * SEC
    )
    bounded = profile.scaling and not profile.reloads
    return FleetPolicy(
        pools=tuple(
            PoolPolicy(
                name=f"pool{number}",
                size=rng.randint(*profile.slots),
                queue_size=profile.queue_size,
                aging_ns=rng.choice((50 * MS, 500 * MS, 5 * SEC)),
                task_timeout_ns=rng.choice((1, 5)) * SEC,
                start_timeout_ns=2 * SEC,
                heartbeat_timeout_ns=HEARTBEAT_NS if profile.freezes else 0,
                health_timeout_ns=HEALTH_NS if profile.sick else 0,
                restart=restart,
                max_crashes=rng.randint(1, 3),
                scaling=scaling_of(rng) if profile.scaling else None,
                **({"resident_tasks": rng.choice((0, 2, 10))} if profile.disk_queue else {}),
                **(_limits(rng, profile.memory) if profile.recycles else {}),
                sacrifice=profile.memory and rng.random() < 0.5,
                sessions=tuple(SESSIONS) if profile.sessions else (),
                **(_debug(rng) if profile.breakpoints else {}),
            )
            for number in range(profile.pools)
        ),
        retry=RetryPolicy(max_retries=rng.randint(0, 3), backoff=backoff),
        drain_timeout_ns=rng.choice((1, 3)) * SEC,
        stop_timeout_ns=1 * SEC,
        page_tasks=rng.choice((1, 3, 8)) if profile.disk_queue else 1024,
        **(_gates(rng) if profile.gates else {}),
        **({"cache": _cache(rng)} if profile.keys else {}),
        **(
            {"sessions": LOGIN_SESSIONS if profile.logins else SESSIONS} if profile.sessions else {}
        ),
        **({"workers_max": rng.choice((0, 5, 8))} if bounded else {}),
        **({"memory": _memory(rng)} if profile.memory else {}),
    )


def scaling_of(rng: Random) -> ScalingPolicy | None:
    """Return bounds around one worker, the size with which profiles that scale begin."""
    if rng.random() < 0.2:
        return None
    return ScalingPolicy(
        rng.randint(0, 1),
        rng.randint(2, 6),
        wait_ns=rng.choice((50, 300)) * MS,
        idle_ns=rng.choice((500, 3000)) * MS,
    )


def _limits(rng: Random, memory: bool) -> dict[str, int]:
    """Return the limits at which a worker is worn."""
    return {
        "max_tasks": rng.choice((0, 1, 3, 20)),
        "max_age_ns": rng.choice((0, 500 * MS, 3 * SEC)),
        **({"max_memory_bytes": rng.choice((0, 50, 200)) * 2**20} if memory else {}),
    }


def _debug(rng: Random) -> dict[str, Any]:
    """Return whether a pool may be debugged, and how long its handlers wait for somebody."""
    return {
        "debug": rng.random() < 0.8,
        "debug_wait_ns": rng.choice((200 * MS, 3 * SEC, 12 * SEC)),
    }


def _memory(rng: Random) -> MemoryPolicy:
    return MemoryPolicy(calm_ns=rng.choice((1, 3)) * SEC, patience_ns=rng.choice((2, 4)) * SEC)


def _cache(rng: Random) -> CachePolicy:
    return CachePolicy(
        enabled=rng.random() < 0.9, entries=rng.choice((1, 3, 1000)), bytes=rng.choice((700, 10**6))
    )


def _gates(rng: Random) -> dict[str, Any]:
    """Return limits low enough to be reached."""
    breaker = BreakerPolicy(
        failures=rng.randint(1, 3),
        open_ns=rng.choice((50, 500)) * MS,
        open_max_ns=2 * SEC,
        successes=rng.randint(1, 2),
        probes=rng.randint(1, 2),
        window=rng.choice((0, 10)),
        window_calls_min=4,
        failure_rate=0.5,
        slow_ns=50 * MS,
        slow_rate=0.9,
    )
    few, on_open = rng.randint(1, 2), rng.choice(("fail", "fallback"))
    return {
        "breaker": breaker,
        "classes": {
            "few": GatePolicy("few", max_concurrent=few),
            "hasty": GatePolicy(
                "hasty",
                on_open=on_open,
                fallback_on="failure" if on_open == "fallback" else "",
                max_retries=1,
                timeout_ns=2 * SEC,
            ),
        },
        "targets": {
            "site0": TargetPolicy(max_concurrent=1, retry_share=0.5, retry_reserve=1.0),
            "site1": TargetPolicy(
                rate=rng.choice((5.0, 50.0)),
                burst=rng.randint(1, 3),
                max_retries=2,
                on_open="fail",
            ),
            "site2": TargetPolicy(
                policy="few",
                retry_share=0.1,
                retry_reserve=1.0,
                retry_every_ns=SEC,
            ),
        },
    }
