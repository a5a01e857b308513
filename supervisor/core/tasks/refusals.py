"""Refusals of submits: each says why, and what to do about it."""

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.ipc.wire.messages import (
    ELSEWHERE,
    INVALID_TASK,
    PRIORITY_NAMES,
    QUEUE_FULL,
    SHUTTING_DOWN,
    UNKNOWN_TASK,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.core.model.pool import QUEUE_BYTES_MAX, Pool
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.pauses import DRAINED

QUEUE_FULL_RETRY_NS = 100 * MILLISECOND_NS  # after which a refused submit may try again
STORE_FAILS_RETRY_NS = 1 * SECOND_NS  # ... while the disk is full or broken
CLUSTER_RETRY_NS = 5 * SECOND_NS  # ... while there is no cluster sidecar
DRAINED_RETRY_NS = 1 * SECOND_NS  # ... while a person has to resume the pool first
NAMES_SHOWN_MAX = 10
UNREADABLE = "the store cannot be read: see the problem in `musterctl status`, and try again later"


def id_taken(spec: TaskSpec) -> Rejection:
    """Refuse a task whose id belongs to another task."""
    return Rejection(
        spec.id,
        INVALID_TASK,
        f"task id '{spec.id}' is in use by a task with another body: submit with a new id",
    )


def unknown_task(spec: TaskSpec, pool: Pool | None, state: State) -> Rejection:
    """Refuse a task whose pool, or whose method in the pool, does not exist."""
    if pool is None:
        name = spec.name.partition(".")[0]
        pools = [each.name for each in state.pools.values() if each.is_open]
        known = ", ".join(sorted(pools)[:NAMES_SHOWN_MAX]) or "none"
        why = f"there is no pool '{name}' (pools: {known})"
    else:
        methods = ", ".join(sorted(pool.declarations or ())[:NAMES_SHOWN_MAX])
        why = f"pool '{pool.name}' has no such task (it has: {methods})"
    return Rejection(
        spec.id, UNKNOWN_TASK, f"unknown task '{spec.name}': {why}; tasks are named POOL.METHOD"
    )


def elsewhere(spec: TaskSpec) -> Rejection:
    """Tell the cluster sidecar that a task is not of this machine, and not known here."""
    return Rejection(spec.id, ELSEWHERE, f"'{spec.name}' is a task of the cluster")


def no_cluster(spec: TaskSpec, reason: str) -> Rejection:
    """Refuse for now a task that is not of this machine: nobody here speaks to the cluster."""
    return Rejection(
        spec.id,
        QUEUE_FULL,
        f"'{spec.name}' was not accepted: it is no task of this machine alone, and the cluster "
        f"cannot be reached ({reason}): submit again later or with wait=True",
        CLUSTER_RETRY_NS,
    )


def unknown_name(spec: TaskSpec, pool: Pool, state: State) -> Rejection | None:
    """Refuse a task with a class that does not exist, or a session that is not for its pool."""
    if spec.policy and spec.policy not in state.policy.classes:
        known = ", ".join(sorted(state.policy.classes)[:NAMES_SHOWN_MAX]) or "none"
        why = f"there is no class '{spec.policy}' in [classes] (known: {known})"
    elif not spec.session or spec.session in pool.policy.sessions:
        return None
    elif spec.session in state.policy.sessions:
        why = f"session '{spec.session}' is not for pool '{pool.name}': see its key sessions"
    else:
        known = ", ".join(sorted(state.policy.sessions)[:NAMES_SHOWN_MAX]) or "none"
        why = f"there is no session '{spec.session}' in [sessions] (known: {known})"
    return Rejection(spec.id, INVALID_TASK, f"'{spec.name}' was not accepted: {why}")


def store_fails(spec: TaskSpec, problem: str) -> Rejection:
    return Rejection(
        spec.id,
        QUEUE_FULL,
        f"'{spec.name}' was not accepted: it cannot be stored ({problem}): submit again later or "
        f"with wait=True",
        STORE_FAILS_RETRY_NS,
    )


def not_known(spec: TaskSpec) -> Rejection:
    """Refuse for now a task that may have been accepted before: the store cannot be read."""
    return Rejection(
        spec.id,
        QUEUE_FULL,
        f"whether '{spec.name}' ({spec.id}) was accepted before is not known: {UNREADABLE}; submit "
        "it again with the same id",
        STORE_FAILS_RETRY_NS,
    )


def not_now(spec: TaskSpec, pool: Pool, state: State) -> Rejection:
    """Refuse for now: the daemon ends, the disk fails, the pool is drained or its queue full."""
    pool.counters.rejected += 1
    retry_ns = QUEUE_FULL_RETRY_NS
    if not state.intake_open:
        return Rejection(
            spec.id, SHUTTING_DOWN, f"'{spec.name}' was not accepted: the daemon is shutting down"
        )
    if state.store_problem:
        return store_fails(spec, state.store_problem)
    if pool.halt == DRAINED:
        retry_ns = DRAINED_RETRY_NS
        why = (
            f"pool '{pool.name}' is drained until somebody says musterctl resume {pool.name}: "
            f"submit again later or with wait=True"
        )
    elif pool.queue.bytes + len(spec.args) > QUEUE_BYTES_MAX:
        why = (
            f"the tasks of pool '{pool.name}' take {pool.queue.bytes} bytes of memory, the limit "
            f"is {QUEUE_BYTES_MAX}: submit again later or with wait=True, or put large data into "
            f"files"
        )
    else:
        why = (
            f"the queue of pool '{pool.name}' holds {pool.held} of {pool.policy.queue_size} tasks "
            f"and has no room for {PRIORITY_NAMES[spec.priority]}: submit again later or with "
            f"wait=True"
        )
    return Rejection(spec.id, QUEUE_FULL, f"'{spec.name}' was not accepted: {why}", retry_ns)
