"""Submits to the engine in memory: checks, keys, remembered results."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from random import Random
from typing import Any, Literal

import msgspec
from msgspec import structs

from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    CRITICAL,
    FAILED,
    HIGH,
    INVALID_TASK,
    QUEUE_FULL,
    QUEUED,
    SUCCEEDED,
    UNKNOWN_TASK,
    VIEW_BYTES_MAX,
    WAITING,
    Outcome,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.cluster.engine import (
    BATCH_MAX,
    JOINED_MAX,
    QUEUE_FULL_RETRY_NS,
    ClusterPolicy,
    Verdict,
)
from musterd.supervisor.cluster.model_records import JOINED, Board, Done, Group, Pool, Task
from musterd.supervisor.cluster.model_sites import Site, Sites
from musterd.supervisor.cluster.watching import SeenRun
from musterd.supervisor.core.model.queue import CRITICAL_RESERVE_PERCENT, HIGH_RESERVE_PERCENT
from musterd.supervisor.core.model.runs import RUN_PREFIX, is_by_hand

# Before the name of a session that stands in place of a class, and of its login task's.
SESSION_MARK, LOGIN_MARK = "\x02", "\x03"


class Base:
    """What all parts of the engine in memory share."""

    def __init__(self, clock: Callable[[], int], rng: Random, wall_ns: int) -> None:
        self.clock = clock
        self.rng = rng
        self.wall_ns = wall_ns  # what to add to the clock for wall-clock time
        self.board = Board()
        self.rules = ClusterPolicy()
        self.sites_ = Sites()

    def site_of(self, task: Task) -> Site:
        return self.sites_.get(task.spec.target, task.class_, self.rules, self.clock())

    def inside(self, target: str) -> int:
        return sum(task.spec.target == target for task in self.board.claimed())

    def class_limit(self, class_: str) -> int:
        known = self.rules.classes.get(class_)
        return known.max_concurrent if known is not None else 0

    def policy_of(self, spec: TaskSpec) -> str:
        """Return the resilience class of a task."""
        known = self.rules.targets.get(spec.target, self.rules.target)
        return spec.policy or (known.policy if spec.target else "")

    def class_of(self, spec: TaskSpec) -> str:
        """Return the class of a task's lane: its session, else its resilience class."""
        if not spec.session:
            return self.policy_of(spec)
        login = self.board.logging_in.get(spec.session)
        logs_in = login is not None and login.ok is None and login.task == spec.id
        return f"{LOGIN_MARK if logs_in else SESSION_MARK}{spec.session}"

    def followers(self, task: Task) -> list[Task]:
        group = self.board.groups.get(task.spec.key) if task.spec.key else None
        if group is None or group.leader != task.spec.id:
            return []
        return [self.board.live[id_] for id_ in group.joined]


class Intake(Base):
    def submit(
        self, tasks: Sequence[TaskSpec], *, waiter: int = 0, resend: bool = False
    ) -> list[Verdict]:
        assert len(tasks) <= BATCH_MAX, len(tasks)
        seen: set[str] = set()
        verdicts = []
        for spec in tasks:
            verdicts.append(self._submit(spec, waiter, resend or spec.id in seen))
            seen.add(spec.id)
        return verdicts

    def _submit(self, spec: TaskSpec, waiter: int, resend: bool) -> Verdict:
        known = self.board.live.get(spec.id)
        done = self.board.done.get(spec.id) if resend else None
        if known is None and done is not None:
            known = done.task
        if known is not None:
            if (known.spec.name, known.spec.args) != (spec.name, spec.args):
                why = f"task id '{spec.id}' is in use by a task with another body"
                return _rejected(spec, INVALID_TASK, f"{why}: submit with a new id")
            if not known.waiter:
                known.waiter = waiter
            return Verdict(spec.id, "known", outcome=done.outcome if done is not None else None)
        return self.take(spec, waiter)

    def take(self, spec: TaskSpec, waiter: int, *, fresh: bool = False) -> Verdict:
        """Create a task, or say why not. `fresh`: no remembered result will do."""
        pool = self.board.pools.get(spec.name.partition(".")[0])
        refused = self._refused(spec, pool)
        if refused is not None:
            return refused
        assert pool is not None
        group = self.board.groups.get(spec.key) if spec.key else None
        answer = None if fresh or not spec.key else self._remembered(spec, pool, group is not None)
        if answer is not None:
            return self._answer(spec, waiter, answer)
        full = _full(spec, pool, group)
        if full:
            return _rejected(spec, QUEUE_FULL, full, QUEUE_FULL_RETRY_NS)
        task = self._make(spec, waiter)
        task.asked = fresh or (spec.id.startswith(RUN_PREFIX) and is_by_hand(spec.id))
        self.board.live[spec.id] = task
        if group is not None:
            task.state = JOINED
            group.joined.append(spec.id)
            leader = self.board.live[group.leader]
            leader.level = min(leader.level, spec.priority)
            return Verdict(spec.id, "joined")
        if spec.key:
            self.board.groups[spec.key] = Group(spec.name, spec.id, task.submitted_ns)
        self.patience(task)
        return Verdict(spec.id, "accepted")

    def _make(self, spec: TaskSpec, waiter: int) -> Task:
        now_ns = self.clock()
        self.board.seq += 1
        return Task(
            spec,
            self.board.seq,
            spec.name.partition(".")[0],
            self.class_of(spec),
            spec.priority,
            WAITING if spec.delay_ns else QUEUED,
            now_ns,
            now_ns,
            waiter,
            now_ns + spec.delay_ns,
            now_ns + spec.expires_ns if spec.expires_ns else 0,
        )

    def patience(self, task: Task) -> None:
        """End a queued task that does not wait for a shut site."""
        raise NotImplementedError

    def _refused(self, spec: TaskSpec, pool: Pool | None) -> Verdict | None:
        try:
            msgspec.convert(structs.astuple(spec), TaskSpec)
        except msgspec.ValidationError as error:
            return _rejected(spec, INVALID_TASK, f"'{spec.id}' was not accepted: {error}")
        if pool is None:
            return _rejected(spec, UNKNOWN_TASK, f"no node has a pool for '{spec.name}'")
        if self.board.declared(spec.name) is None:
            return _rejected(spec, UNKNOWN_TASK, f"no node has a task '{spec.name}'")
        if spec.policy and spec.policy not in self.rules.classes:
            return _rejected(spec, INVALID_TASK, f"there is no class '{spec.policy}'")
        group = self.board.groups.get(spec.key) if spec.key else None
        if group is not None and group.name != spec.name:
            why = f"key '{spec.key}' is in use by a '{group.name}'"
            return _rejected(spec, INVALID_TASK, f"{why}: give each kind of task its own keys")
        return None

    def _remembered(self, spec: TaskSpec, pool: Pool, alive: bool) -> Outcome | None:
        if not self.rules.cache.enabled or not (spec.cache_ns or spec.debounce_ns):
            return None
        recent = self.board.recent.get(f"{spec.name} {spec.key}")
        declared = self.board.declared(spec.name)
        if recent is None or declared is None:
            return None
        now_ns = self.clock()
        cache_ns = _age_ns(spec.cache_ns, declared.cache_ns, pool.card.cache_ns)
        if recent.good is not None and now_ns - recent.good_ns < cache_ns:
            return recent.good
        debounce_ns = _age_ns(spec.debounce_ns, declared.debounce_ns, pool.card.debounce_ns)
        if not alive and self.rules.cache.debounce and now_ns - recent.since_ns < debounce_ns:
            return recent.last
        return None

    def _answer(self, spec: TaskSpec, waiter: int, answer: Outcome) -> Verdict:
        outcome = structs.replace(answer, id=spec.id, cached=True)
        task = self._make(spec, waiter)
        self.note_done(task, outcome)
        return Verdict(spec.id, "answered", outcome)

    def note_done(self, task: Task, outcome: Outcome) -> None:
        self.board.ends += 1
        self.board.done[task.spec.id] = Done(task, outcome, self.board.ends, self.clock())
        if task.spec.id.startswith("@"):
            self._note_run(task, outcome)

    def _note_run(self, task: Task, outcome: Outcome) -> None:
        """Note how a run has ended, if its schedule wants to know."""
        schedule = self.board.schedules.get(task.spec.id[1:].rpartition(".")[0])
        if schedule is None or not schedule.card.notify:
            return
        if outcome.state == SUCCEEDED and not (outcome.stale or outcome.fallback):
            value, view = outcome.value, None if outcome.cached else task.seen
            self.note_seen(
                schedule.card.name,
                "good",
                task=task.spec.id,
                digest=sha256(value).hexdigest(),
                value=value if len(value) <= VIEW_BYTES_MAX else None,
                view=view,
                watch=task.spec.watch,
            )
        elif outcome.state in (SUCCEEDED, FAILED) or outcome.attempts:
            error = task.error or outcome.error
            watch = task.spec.watch
            self.note_seen(
                schedule.card.name, "failed", task=task.spec.id, watch=watch, error=error
            )

    def note_seen(
        self, name: str, kind: Literal["good", "failed", "anew"], *, task: str = "", **how: Any
    ) -> None:
        self.board.seen_number += 1
        at_ns = self.clock() + self.wall_ns
        run = SeenRun(self.board.seen_number, kind, task, at_ns, **how)
        self.board.seen.append((name, run))

    def good(self, task: Task) -> bytes | None:
        """Return the last good result of such a task, however old; None if there is none."""
        value, until_ns = self.board.good.get(task.memory_name, (None, 0))
        if value is not None and until_ns > self.clock():
            return value
        recent = self.board.recent.get(task.memory_name) if task.spec.key else None
        return recent.good.value if recent is not None and recent.good is not None else None

    def invalidate(self, key: str, *, prefix: bool = False) -> None:
        def hit(other: str) -> bool:
            return other.startswith(key) if prefix else other == key

        for memory in (self.board.recent, self.board.good):
            for name in [name for name in memory if hit(name.partition(" ")[2])]:
                del memory[name]
        for other, group in self.board.groups.items():
            if hit(other) and self.board.live[group.leader].ran:
                group.forget = True


def _rejected(spec: TaskSpec, code: str, why: str, retry_ns: int = 0) -> Verdict:
    return Verdict(spec.id, "rejected", rejection=Rejection(spec.id, code, why, retry_ns))


def _full(spec: TaskSpec, pool: Pool, group: Group | None) -> str:
    """Say why there is no room for a task, or ""."""
    if group is not None and len(group.joined) >= JOINED_MAX:
        return f"{JOINED_MAX} tasks wait already for the result of key '{spec.key}'"
    if _has_room(pool, spec.priority):
        return ""
    return f"the queue of pool '{pool.card.name}' is full"


def _has_room(pool: Pool, priority: int) -> bool:
    size = pool.card.queue_size
    percent = HIGH_RESERVE_PERCENT
    if priority <= HIGH:
        percent = 0 if priority == CRITICAL else CRITICAL_RESERVE_PERCENT
    return pool.counted < size - size * percent // 100


def _age_ns(asked_ns: int, declared_ns: int, of_pool_ns: int) -> int:
    """Return how old a result may be: as the submit says, else the task, else the pool."""
    if asked_ns != AS_CONFIGURED:
        return asked_ns
    return declared_ns if declared_ns > 0 else of_pool_ns
