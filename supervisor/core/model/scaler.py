"""Scaler: how many workers a pool should have, between its `min` and its `max`.

    scaler.wish(now_ns, load) -> Wish        the wanted size, by the load now
    scaler.changed(now_ns, before, after)    the size has changed: the pauses begin

Up when tasks wait: one has waited for `wait`, or by the measured run times the queue holds more
than each worker gets done in DRAIN_WAITS times `wait`. The pool grows to the size that would begin
all queued work within `wait`: by one at least, at most to twice its size, and not before the
workers it asked for last are up.

Down when workers are idle: those beyond the most that were busy at once within the last `idle`.
(Not "this worker did nothing": tasks are spread over all workers, so that each gets a few.) At most
a quarter at once, and only workers that have nothing to do at the moment.

Damped: a pause after each step, a longer pause before the direction changes, and no step while
anything is unclear, as while workers start or crash. The first worker of an empty pool never waits
for any of this. core/workers/autoscale.py decides whether memory and the other pools allow growth.
"""

from collections import deque

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.policy import ScalingPolicy

UP_PAUSE_NS = 2 * SECOND_NS  # to see the effect of the last growth
DOWN_PAUSE_NS = 5 * SECOND_NS
TURN_PAUSE_NS = 5 * SECOND_NS  # after a step down, before a step up; after a step up it is `idle`
DRAIN_WAITS = 2  # work that may be queued per worker, in multiples of `wait`
GROWTH = 2  # at most this many times the size in one step ...
SHRINK_PART = 4  # ... and down by this part: a worker too few is worse than one too many
# Of a task whose run time is not measured yet: no task of its name has ended.
UNKNOWN_RUN_NS = 1 * SECOND_NS
NO_LEVEL = 1 << 8  # less urgent than any priority


class Backlog(Struct, frozen=True):
    """What is ready for a clustered pool at this node: its part of the tasks of all nodes."""

    at_ns: int  # when it was counted
    ready: int
    waited_ns: int  # by the task that waits for longest, at any node
    level: int  # the most urgent of them
    cost_ns: int  # run time of a task, measured here


class Load(Struct, frozen=True):
    """The load of a pool at one moment; counts of workers unless said otherwise."""

    size: int  # that the pool is asked to have
    running: int  # that can work
    starting: int = 0  # on their way
    failing: int = 0  # that crashed and wait for their next start
    fatal: int = 0  # that crashed too often
    halted: int = 0  # that an operator stopped or paused
    held: int = 0  # that memory holds back
    idle: int = 0  # that have nothing to do now
    busy_most: int = 0  # busy at once, the most since the last look
    queued: int = 0  # tasks
    ready: int = 0  # tasks that would begin if there were a worker
    waited_ns: int = 0  # by the task that waits for longest
    work_ns: int = 0  # measured run time of the queued tasks together
    level: int = NO_LEVEL  # the most urgent priority of the queued tasks


class Wish(Struct, frozen=True):
    size: int
    reason: str = ""  # why the size should change; "" if it should not


class Scaler:
    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self.manual = False  # an operator has set the size
        self.why = ""  # of the last change, for people
        self.held = ""  # why the pool could not grow at the last look
        self._busy = Most(policy.idle_ns)
        self._watched_since_ns = -1  # without a gap
        self._up_ns: int | None = None
        self._down_ns: int | None = None

    def wake(self, now_ns: int) -> None:
        """Begin to watch: from now on `wish` is called at every interval."""
        self._watched_since_ns = now_ns
        self._busy.clear()

    def changed(self, now_ns: int, before: int, after: int) -> None:
        """Note that the size has changed, for whatever reason."""
        if after > before:
            self._up_ns = now_ns
        elif after < before:
            self._down_ns = now_ns

    def wish(self, now_ns: int, load: Load) -> Wish:
        """Return the wanted size, by this load and those before."""
        policy = self.policy
        self._busy.add(now_ns, load.busy_most)
        if load.halted:
            return Wish(load.size)  # an operator is at work
        if load.size < policy.min:
            return Wish(policy.min, f"min is {policy.min}")
        if load.size > policy.max:
            return Wish(policy.max, f"max is {policy.max}")
        if load.ready:
            return self._larger(now_ns, load)
        return self._smaller(now_ns, load) if not load.queued else Wish(load.size)

    # -- up -----------------------------------------------------------------------------------

    def _larger(self, now_ns: int, load: Load) -> Wish:
        size, policy = load.size, self.policy
        if not size and policy.max:
            return Wish(1, "a task waits and there is no worker")
        stay = Wish(size)
        if size >= policy.max or load.starting or load.failing or not load.running:
            return stay
        if load.held:
            return stay  # the held workers come first
        if _within(now_ns, self._up_ns, UP_PAUSE_NS) or _within(
            now_ns, self._down_ns, TURN_PAUSE_NS
        ):
            return stay
        drain_ns = DRAIN_WAITS * policy.wait_ns
        each_ns = load.work_ns // load.running
        if load.waited_ns >= policy.wait_ns:
            reason = f"queue waits {load.waited_ns / SECOND_NS:.1f} s"
        elif each_ns >= drain_ns:
            reason = f"{each_ns / SECOND_NS:.1f} s of work queued for each worker"
        else:
            return stay
        enough = -(-load.work_ns // policy.wait_ns)  # this many begin all of it within `wait`
        more = min(load.ready, max(1, enough - load.running))
        return Wish(min(size + more, size * GROWTH, policy.max), reason)

    # -- down ---------------------------------------------------------------------------------

    def _smaller(self, now_ns: int, load: Load) -> Wish:
        size, policy = load.size, self.policy
        stay = Wish(size)
        since_ns = max(self._watched_since_ns, self._up_ns or 0)
        if load.starting or now_ns - since_ns < policy.idle_ns:
            return stay
        if load.failing or load.fatal:
            return stay  # a new slot would not know of these crashes
        if _within(now_ns, self._up_ns, TURN_PAUSE_NS) or _within(
            now_ns, self._down_ns, DOWN_PAUSE_NS
        ):
            return stay
        most = self._busy.most(now_ns)
        if load.held and most >= load.running:
            return stay  # the held workers may have been needed
        unused = size - max(most, policy.min)
        # Workers that memory holds back have nothing to do either.
        fewer = min(unused, max(1, size // SHRINK_PART), load.idle + size - load.running)
        if fewer <= 0:
            return stay
        return Wish(size - fewer, f"{unused} unused for {policy.idle_ns / SECOND_NS:g} s")


def _within(now_ns: int, then_ns: int | None, pause_ns: int) -> bool:
    return then_ns is not None and now_ns - then_ns < pause_ns


class Most:
    """The largest number that was added within a stretch of time.

    Only numbers larger than all later ones are kept: at most as many as a pool has workers.
    """

    def __init__(self, stretch_ns: int) -> None:
        self._stretch_ns = stretch_ns
        self._kept: deque[tuple[int, int]] = deque()  # (when, number): numbers get smaller

    def add(self, now_ns: int, number: int) -> None:
        while self._kept and self._kept[-1][1] <= number:
            self._kept.pop()
        self._kept.append((now_ns, number))

    def most(self, now_ns: int) -> int:
        while self._kept and self._kept[0][0] < now_ns - self._stretch_ns:
            self._kept.popleft()
        return self._kept[0][1] if self._kept else 0

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
