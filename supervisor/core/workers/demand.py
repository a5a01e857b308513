"""Demand: what a pool has to do and which workers it has, from its queue and its slots.

Only tasks count that would begin if there were a worker: a task that waits for a breaker, a rate or
a bulkhead is no reason for more workers. The look is bounded, and changes nothing but
`busy_most`, which begins anew.

The queue of a clustered pool is the cluster's. Here are some attempts that workers will begin next;
`Pool.backlog` has the node's part of the others. Those count only while all workers are busy:
workers that have room get what there is for them, so the rest cannot begin here.
"""

from itertools import islice

from musterd.ipc.resilience.breaker import BreakerState
from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.gates import Gate, Places, Site
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.queue import UNKNOWN_COST_NS
from musterd.supervisor.core.model.scaler import NO_LEVEL, UNKNOWN_RUN_NS, Backlog, Load
from musterd.supervisor.core.model.slot import SlotState

BACKLOG_NS = 60 * SECOND_NS  # a cluster that was not seen for longer may have another backlog
LANES_MAX = 1000  # looked at per level: this many lanes justify any growth

UNLIMITED = 1 << 40

# How many more tasks may begin at a site or in a bulkhead, beside those counted already.
Left = dict[Site | Places, int]


def load_of(pool: Pool, now_ns: int) -> Load:
    """Return the load of a pool, for its scaler."""
    states = [slot.state for slot in pool.slots if not (slot.removed or slot.held)]
    running = [slot for slot in pool.slots if slot.state == SlotState.RUNNING]
    busy_most = pool.busy_most
    pool.busy_most = pool.busy
    ready = waited_ns = work_ns = 0
    level_found = NO_LEVEL
    left: Left = {}
    for level in pool.queue.levels:
        for lane in islice(level.ring, LANES_MAX):
            count = lane.alive
            if count and lane.gate is not None:
                count = _may_begin(lane.gate, count, now_ns, left)
            if not count:
                continue
            head = next((task for task in lane.tasks if task.lane is lane), None)
            ready += count
            run_ns = UNKNOWN_RUN_NS
            if head is not None:  # else all its tasks are on disk, and being read
                waited_ns = max(waited_ns, now_ns - head.queued_ns)
                if head.route.cost_ns != UNKNOWN_COST_NS:
                    run_ns = head.route.cost_ns
            work_ns += count * run_ns
            level_found = min(level_found, level.number)
    shared = shared_backlog(pool, now_ns, busy_most)
    if shared is not None:
        ready += shared.ready
        waited_ns = max(waited_ns, shared.waited_ns)
        known = shared.cost_ns != UNKNOWN_COST_NS
        work_ns += shared.ready * (shared.cost_ns if known else UNKNOWN_RUN_NS)
        level_found = min(level_found, shared.level)
    return Load(
        size=pool.size,
        running=len(running),
        starting=states.count(SlotState.STARTING),
        failing=states.count(SlotState.BACKOFF),
        fatal=states.count(SlotState.FATAL),
        halted=max(1, pool.size) if pool.halt else _halted(pool),
        held=sum(slot.held for slot in pool.slots),
        idle=sum(not slot.leases for slot in running),
        busy_most=busy_most,
        queued=pool.queue.size + (shared.ready if shared is not None else 0),
        ready=ready,
        waited_ns=waited_ns,
        work_ns=work_ns // pool.width,
        level=level_found,
    )


def shared_backlog(pool: Pool, now_ns: int, busy: int) -> Backlog | None:
    """Return what the cluster has for this pool beside its queue here, `busy` workers at once."""
    shared = pool.backlog
    if shared is None or not shared.ready or now_ns - shared.at_ns >= BACKLOG_NS:
        return None
    running = sum(slot.state == SlotState.RUNNING for slot in pool.slots)
    return shared if busy >= running else None


def _halted(pool: Pool) -> int:
    return sum(
        bool(slot.halt) or (slot.state == SlotState.STOPPED and not slot.held)
        for slot in pool.slots
    )


def _may_begin(gate: Gate, count: int, now_ns: int, left: Left) -> int:
    """Return how many of `count` tasks behind this gate could begin soon."""
    limits: list[Site | Places] = [gate.site] if gate.site is not None else []
    if gate.site is not None and gate.site.places is not None:
        limits.append(gate.site.places)
    if gate.shared is not None:
        limits.append(gate.shared)
    if gate.session is not None:
        limits.append(gate.session)
    for limit in limits:
        if limit not in left:
            left[limit] = _vacancies(limit, now_ns)
        count = min(count, left[limit])
    for limit in limits:
        left[limit] -= count
    return count


def _vacancies(limit: Site | Places, now_ns: int) -> int:
    """Return how many more tasks may begin there now, or with a rate within a second."""
    if isinstance(limit, Places):
        return limit.bulkhead.free
    breaker = limit.breaker
    match breaker.state:
        case BreakerState.FORCED_OPEN:
            vacancies = 0
        case BreakerState.OPEN:
            vacancies = breaker.policy.probes if now_ns >= breaker.open_until_ns else 0
        case BreakerState.HALF_OPEN:
            vacancies = breaker.policy.probes - breaker.probes
        case _:
            vacancies = UNLIMITED
    if vacancies and limit.bucket is not None:
        ready = limit.bucket.ready_ns(now_ns) <= now_ns
        vacancies = min(vacancies, max(1, SECOND_NS // limit.bucket.cost_ns)) if ready else 0
    return vacancies
