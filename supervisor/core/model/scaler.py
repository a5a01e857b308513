"""How many workers a pool should have, between its `min` and its `max`.

    scaler.wish(now_ns, load) -> Wish        what it would like, by what is seen now
    scaler.changed(now_ns, before, after)    what it was given: the pauses begin

Up when tasks wait: one has waited for `wait`, or what is queued is more than each worker gets done
in DRAIN_WAITS of that, by the measured run times. It grows to what gets all of that done within
`wait`, by one at least, at most to twice its size, and not before those are up that it asked for
last.

Down when workers are idle: those beyond the most that were busy at once within the last `idle`.
(Not "this worker did nothing": tasks are spread over all workers, so that each gets a little.) At
most a quarter at once, and only workers that have nothing to do at the moment.

Damped: a pause after each step, a longer one before the direction changes; none of both where
anything is unclear, as while workers start or crash. The first worker of an empty pool never waits
for any of this. Whether memory and the other pools allow a growth is decided in
core/workers/autoscale.py.
"""

from collections import deque

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.policy import ScalingPolicy

UP_PAUSE_NS = 2 * SECOND_NS  # to see what the last growth has done
DOWN_PAUSE_NS = 5 * SECOND_NS
TURN_PAUSE_NS = 5 * SECOND_NS  # after a step down, before one up; after one up it is `idle`
DRAIN_WAITS = 2  # so much work may be queued for each worker, in times of `wait`
GROWTH = 2  # at most so many times its size at once ...
SHRINK_PART = 4  # ... and down by one of so many: a worker too few is worse than one too many
# Of a task whose run time is not measured yet: none like it has ended since it was queued.
UNKNOWN_RUN_NS = 1 * SECOND_NS
NO_LEVEL = 1 << 8  # less urgent than every priority


class Load(Struct, frozen=True):
    """What a pool looks like at one moment."""

    size: int  # workers it is asked to have
    running: int  # those that can work
    starting: int = 0  # those on their way
    failing: int = 0  # those that crashed and wait for their next start
    fatal: int = 0  # those that crashed too often
    halted: int = 0  # those that a person stopped or paused
    held: int = 0  # those that memory holds back
    idle: int = 0  # those that have nothing to do now
    busy_most: int = 0  # the most that were busy at once since the last look
    queued: int = 0  # tasks
    ready: int = 0  # those of them that would begin if there were a worker
    waited_ns: int = 0  # by the one that waits for longest
    work_ns: int = 0  # that they will take together, as measured
    level: int = NO_LEVEL  # the most urgent of their priorities


class Wish(Struct, frozen=True):
    size: int
    reason: str = ""  # why it is not as it is; "" when it is to stay


class Scaler:
    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self.manual = False  # a person has said how many
        self.why = ""  # of the last change, for people
        self.held = ""  # why it did not grow at the last look although it wants to
        self._busy = Most(policy.idle_ns)
        self._watched_since_ns = -1  # without a gap
        self._up_ns: int | None = None
        self._down_ns: int | None = None

    def wake(self, now_ns: int) -> None:
        """From now on it is asked at every interval."""
        self._watched_since_ns = now_ns
        self._busy.clear()

    def changed(self, now_ns: int, before: int, after: int) -> None:
        """The pool has another size now, whoever wanted it."""
        if after > before:
            self._up_ns = now_ns
        elif after < before:
            self._down_ns = now_ns

    def wish(self, now_ns: int, load: Load) -> Wish:
        """The size it would like to have, by this look and those before."""
        policy = self.policy
        self._busy.add(now_ns, load.busy_most)
        if load.halted:
            return Wish(load.size)  # a person is at it
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
            return stay  # these come first
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
        enough = -(-load.work_ns // policy.wait_ns)  # so many begin all of it within `wait`
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
            return stay  # a slot that is made anew would know nothing of these crashes
        if _within(now_ns, self._up_ns, TURN_PAUSE_NS) or _within(
            now_ns, self._down_ns, DOWN_PAUSE_NS
        ):
            return stay
        most = self._busy.most(now_ns)
        if load.held and most >= load.running:
            return stay  # those that are held back may have been needed
        unused = size - max(most, policy.min)
        # Those that memory holds back have nothing to do either.
        fewer = min(unused, max(1, size // SHRINK_PART), load.idle + size - load.running)
        if fewer <= 0:
            return stay
        return Wish(size - fewer, f"{unused} unused for {policy.idle_ns / SECOND_NS:g} s")


def _within(now_ns: int, then_ns: int | None, pause_ns: int) -> bool:
    return then_ns is not None and now_ns - then_ns < pause_ns


class Most:
    """The largest of the numbers that were added within a stretch of time.

    Only those are kept that are larger than all that came after them: for numbers of workers never
    more than a pool's size.
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
