"""Kinds of events that alerts can be about, and which of them are conditions with an end.

An event opens a condition, and another event about the same subject ends it: a worker is ready
again, a breaker closes. Ends without an event (a slot was removed, the daemon was restarted) are
found by a *survey*, which compares each condition with the daemon's status.
"""

from enum import Enum
from fnmatch import fnmatchcase

from msgspec import Struct

from musterd.supervisor.api.cluster import DOWN, ClusterStatus

# The field of an event that names its subject.
WORKER, POOL, TARGET, SCHEDULE, NOBODY = "worker", "pool", "target", "schedule", ""
SESSION = "session"  # of [sessions]
NODE = "node"  # of the cluster
CHANGED = "task.changed"  # no incident: see changes.py


class Kind(Struct, frozen=True):
    subject: str = NOBODY
    ends: tuple[str, ...] = ()  # events that end it
    lasts: bool = False  # a condition: it ends, by an event or a survey


def _lasting(subject: str, *ends: str) -> Kind:
    return Kind(subject, ends, lasts=True)


_MEMORY = _lasting(NOBODY, "memory.normal")
_LOST = _lasting(WORKER, "worker.ready")

KINDS: dict[str, Kind] = {
    # Raised by the alerts process.
    "daemon.silent": _lasting(NOBODY, "daemon.answers"),
    "daemon.answers": Kind(),
    "daemon.crashed": Kind(),
    # The daemon.
    "daemon.leftovers": Kind(),
    "shutdown.phase": Kind(),
    "shutdown.kill": Kind(),
    "cleanup.done": Kind(),
    "cleanup.failed": Kind(),
    "command.ignored": Kind(),
    "store.failing": _lasting(NOBODY, "store.recovered"),
    "store.recovered": Kind(),
    "clock.doubted": _lasting(NOBODY, "clock.trusted"),
    "clock.trusted": Kind(),
    "sockets.lost": _lasting(NOBODY),
    "door.shut": _lasting(NOBODY, "door.open"),
    "door.open": Kind(),
    # The web process.
    "web.ready": Kind(),
    "web.crashed": _lasting(NOBODY, "web.ready"),
    "web.fatal": _lasting(NOBODY, "web.ready"),
    # The publisher of events.
    "events.ready": Kind(),
    "events.crashed": Kind(),
    "events.fatal": Kind(),
    # The cluster.
    "cluster.ready": Kind(),
    "cluster.crashed": _lasting(NOBODY, "cluster.ready"),
    "cluster.fatal": _lasting(NOBODY, "cluster.ready"),
    "cluster.unreachable": _lasting(NOBODY, "cluster.reachable"),
    "cluster.reachable": Kind(),
    "cluster.lease_over": Kind(),
    "cluster.fenced": Kind(),
    "cluster.locks_over": Kind(),
    "cluster.locks_lost": Kind(),
    "cluster.refused": Kind(),
    "cluster.warning": Kind(),
    "cluster.policy_differs": Kind(),
    "cluster.policy_missing": Kind(),
    "cluster.policy_unread": Kind(),
    "cluster.draining": _lasting(NOBODY, "cluster.resumed"),
    "cluster.resumed": Kind(),
    "cluster.node_lost": _lasting(NODE, "cluster.node_back"),
    "cluster.node_back": Kind(NODE),
    "cluster.vacuum_stalled": _lasting(NOBODY, "cluster.vacuum_resumed"),
    "cluster.vacuum_resumed": Kind(),
    # Memory.
    "memory.warning": _MEMORY,
    "memory.critical": _MEMORY,
    "memory.sacrifice": _MEMORY,
    "memory.kill": _MEMORY,
    "memory.recovering": Kind(),
    "memory.normal": Kind(),
    "memory.held": Kind(POOL),
    # Pools.
    "pool.fatal": _lasting(POOL, "worker.ready", "pool.removed"),
    "pool.paused": _lasting(POOL, "pool.resumed", "pool.removed"),
    "pool.drained": _lasting(POOL, "pool.resumed", "pool.removed"),
    "pool.resumed": Kind(POOL),
    "pool.scaled": Kind(POOL),
    "pool.added": Kind(POOL),
    "pool.removed": Kind(POOL),
    "pool.rolling": Kind(POOL),
    "pool.rolled": Kind(POOL),
    "pool.roll_failed": _lasting(POOL, "pool.rolled", "pool.removed"),
    "forkserver.crashed": Kind(POOL),
    # Workers.
    "worker.crashed": _LOST,
    "worker.hung": _LOST,
    "worker.fatal": _LOST,
    "worker.ready": Kind(WORKER),
    "worker.killed": Kind(WORKER),
    "worker.leftovers": Kind(POOL),
    "worker.recycled": Kind(WORKER),
    "worker.not_recycled": Kind(WORKER),
    "worker.paused": _lasting(WORKER, "worker.resumed"),
    "worker.drained": _lasting(WORKER, "worker.resumed"),
    "worker.resumed": Kind(WORKER),
    # Tasks: their pool is the subject, so that a thousand failures are one incident.
    "task.dead": Kind(POOL),
    "task.quarantined": Kind(POOL),
    "task.fallback": Kind(POOL),
    "task.retry": Kind(POOL),
    "task.crashed": Kind(POOL),
    "task.deadlock": Kind(POOL),
    "task.hung": Kind(POOL),
    "task.interrupted": Kind(POOL),
    "task.stranded": Kind(POOL),
    "task.unreadable": Kind(POOL),
    CHANGED: Kind(SCHEDULE),
    # Sites.
    "breaker.open": _lasting(TARGET, "breaker.closed", "breaker.disabled"),
    "breaker.forced_open": _lasting(TARGET, "breaker.closed", "breaker.disabled"),
    "breaker.half_open": Kind(TARGET),
    "breaker.closed": Kind(TARGET),
    "breaker.disabled": Kind(TARGET),
    "session.held": _lasting(SESSION, "session.resumed"),
    "session.resumed": Kind(SESSION),
    "session.no_key": Kind(POOL),
    "session.no_login": Kind(SESSION),
    # Schedules.
    "schedule.paused": _lasting(SCHEDULE, "schedule.resumed"),
    "schedule.resumed": Kind(SCHEDULE),
    "schedule.skipped": Kind(SCHEDULE),
    "schedule.reset": Kind(SCHEDULE),
    "schedule.put": Kind(SCHEDULE),
    "schedule.deleted": Kind(SCHEDULE),
    "schedule.unusable": Kind(SCHEDULE),
    "watch.stale": _lasting(SCHEDULE, "watch.recovered"),
    "watch.recovered": Kind(SCHEDULE),
}

# Conditions that each event ends.
ENDED_BY: dict[str, tuple[str, ...]] = {
    event: tuple(name for name, kind in KINDS.items() if event in kind.ends)
    for event in {event for kind in KINDS.values() for event in kind.ends}
}

# Events of an alert that names none.
USUAL = (
    "memory.critical",
    "worker.fatal",
    "pool.fatal",
    "breaker.open",
    "session.held",
    "task.dead",
    "store.failing",
    "daemon.silent",
    "daemon.crashed",
    "cluster.unreachable",
    "cluster.fatal",
    "cluster.node_lost",
    "cluster.vacuum_stalled",
)


def matching(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds that names and globs match. A glob matches no good news: the end of a
    condition is reported anyway, and a ready worker only where it is named."""
    return tuple(
        name
        for name in KINDS
        if name in patterns
        or (
            name not in ENDED_BY
            and any(fnmatchcase(name, pattern) for pattern in patterns if _is_glob(pattern))
        )
    )


def _is_glob(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


class Happening(Struct, frozen=True):
    """An event, reduced to what alerts need."""

    kind: str
    pool: str = ""
    worker: str = ""
    target: str = ""
    schedule: str = ""
    text: str = ""
    at: float = 0.0  # wall-clock time, shown only
    count: int = 1  # number of occurrences
    node: str = ""
    session: str = ""

    def subject_of(self, kind: str) -> str:
        """Return the subject of a condition of this kind in this event."""
        field = KINDS[kind].subject
        subject: str = getattr(self, field) if field else ""
        return subject


# -- surveys ----------------------------------------------------------------------------------


class Finding(Enum):
    HOLDS = "holds"
    OVER = "over"
    UNKNOWN = "unknown"


_UP = frozenset({"RUNNING", "BUSY", "DRAINING"})
_OPEN = {"breaker.open": ("open", "half-open"), "breaker.forced_open": ("forced-open",)}
_LEVELS = {"normal": 0, "half": 1, "one": 2, "sacrifice": 3, "kill": 4}
_MEMORY_STAGES = {
    "memory.warning": 1,
    "memory.critical": 2,
    "memory.sacrifice": 3,
    "memory.kill": 4,
}


class Survey(Struct, frozen=True):
    """The daemon's state at one moment."""

    pools: dict[str, str] = {}  # name -> state
    workers: dict[str, str] = {}
    pauses: dict[str, str] = {}  # of pools and workers: "paused" or "drained"
    reasons: dict[str, str] = {}  # of pools and workers
    breakers: dict[str, str] = {}  # target -> state
    paused: frozenset[str] = frozenset()  # schedules
    stale: frozenset[str] = frozenset()  # schedules whose runs fail
    held: frozenset[str] = frozenset()  # sessions whose logins fail
    stage: str = "normal"  # of memory
    problem: str = ""  # of the daemon
    web: str = ""  # the state of the web process
    cluster: ClusterStatus | None = None

    def finding(self, kind: str, subject: str) -> Finding:
        """Return whether this condition holds."""
        area, _, what = kind.partition(".")
        match area:
            case "worker":
                found = self._state(what, subject, self.workers.get(subject))
            case "pool":
                found = self._state(what, subject, self.pools.get(subject))
            case "breaker":
                found = _sure(self.breakers.get(subject, "closed") in _OPEN[kind])
            case "memory":  # over only when memory is normal again
                found = _sure(self.stage != "normal")
            case "schedule":
                found = _sure(subject in self.paused)
            case "watch":
                found = _sure(subject in self.stale)
            case "session":
                found = _sure(subject in self.held)
            case "web":
                up = self.web in ("", "up")  # "": there is no web process
                found = Finding.OVER if up else Finding.UNKNOWN
            case "cluster":
                found = self._of_cluster(what, subject)
            case "daemon":  # not silent: it has just answered
                found = Finding.OVER
            case _:
                found = Finding.UNKNOWN if self.problem else Finding.OVER
        return found

    def _of_cluster(self, what: str, subject: str) -> Finding:
        cluster = self.cluster
        if cluster is None:
            return Finding.OVER
        holds = {
            "unreachable": cluster.unreachable,
            "draining": cluster.draining,
            "vacuum_stalled": cluster.stalled,
            "node_lost": any(
                node.name == subject and node.state in ("silent", "gone") for node in cluster.nodes
            ),
        }
        unseen = cluster.seen_seconds is None and what in ("node_lost", "vacuum_stalled")
        if unseen or (what not in holds and cluster.state == DOWN):
            return Finding.UNKNOWN
        return _sure(holds.get(what, False))

    def _state(self, what: str, name: str, state: str | None) -> Finding:
        """Return whether this is so of a worker or a pool; one that is gone is in no state."""
        if state is None:
            return Finding.OVER
        if what in ("paused", "drained"):
            return _sure(self.pauses.get(name) == what)
        if what == "roll_failed":
            return Finding.UNKNOWN
        if state == "FATAL":
            return Finding.HOLDS
        return Finding.OVER if state in _UP or state == "STOPPED" else Finding.UNKNOWN

    def standing(self) -> list[Happening]:
        """Return the conditions that hold, whether events reported them or not."""
        found: list[Happening] = []
        given_up = set()
        for name, state in self.workers.items():
            pool, reason = name.partition("/")[0], self.reasons.get(name, "")
            if state == "FATAL" and reason and reason == self.reasons.get(pool):
                given_up.add(pool)  # the pool, not this worker, is the problem
            elif state == "FATAL":
                found.append(Happening("worker.fatal", pool, name, text=reason))
        found += [
            Happening("pool.fatal", name, text=self.reasons[name]) for name in sorted(given_up)
        ]
        for name, halt in self.pauses.items():
            pool, slash, _ = name.partition("/")
            if slash:
                found.append(Happening(f"worker.{halt}", pool, name))
            else:
                found.append(Happening(f"pool.{halt}", pool))
        found += [
            Happening(kind, target=target)
            for kind, states in _OPEN.items()
            for target, state in self.breakers.items()
            if state in states
        ]
        found += [Happening("schedule.paused", schedule=name) for name in sorted(self.paused)]
        found += [Happening("watch.stale", schedule=name) for name in sorted(self.stale)]
        found += [Happening("session.held", session=name) for name in sorted(self.held)]
        if self.cluster is not None and self.cluster.unreachable:  # lost nodes: others tell of them
            found.append(Happening("cluster.unreachable", text=self.cluster.reason))
        reached = _LEVELS.get(self.stage, 0)
        found += [Happening(kind) for kind, stage in _MEMORY_STAGES.items() if stage == reached]
        return found


def _sure(holds: bool) -> Finding:
    return Finding.HOLDS if holds else Finding.OVER
