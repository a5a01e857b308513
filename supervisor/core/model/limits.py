"""Limits of a site: rate (token bucket), concurrency (bulkhead) and retries (retry budget)."""

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.policy import TargetPolicy

AGING_TURN = 16  # at most one of so many turns goes to a task that waits for long
RETRY_UNITS = 1_000_000  # of a RetryBudget, for one retry


class TokenBucket:
    """At most `rate` beginnings per second in the long run, `burst` of them at once.

    Credit is kept in nanoseconds, so it needs no fractions and never drifts: one beginning costs
    `cost_ns`, credit grows with time up to a full bucket.
    """

    __slots__ = ("_credit_ns", "_full_ns", "_then_ns", "burst", "cost_ns")

    def __init__(self, rate: float, burst: int, now_ns: int) -> None:
        assert rate > 0, rate
        assert burst >= 1, burst
        self.burst = burst
        self.cost_ns = max(1, round(SECOND_NS / rate))
        self._full_ns = burst * self.cost_ns
        self._credit_ns = self._full_ns
        self._then_ns = now_ns

    def _refill(self, now_ns: int) -> None:
        self._credit_ns = min(self._full_ns, self._credit_ns + now_ns - self._then_ns)
        self._then_ns = now_ns

    def full(self, now_ns: int) -> bool:
        self._refill(now_ns)
        return self._credit_ns == self._full_ns

    def ready_ns(self, now_ns: int) -> int:
        """Return when the next task may begin: now, or later."""
        self._refill(now_ns)
        return now_ns + max(0, self.cost_ns - self._credit_ns)

    def take(self, now_ns: int) -> None:
        """Pay for a beginning; only when it is ready."""
        self._refill(now_ns)
        assert self._credit_ns >= self.cost_ns, "taken before it was ready"
        self._credit_ns -= self.cost_ns


class Bulkhead:
    """A named number of places for tasks that run at once."""

    __slots__ = ("limit", "name", "used")

    def __init__(self, name: str, limit: int) -> None:
        assert limit >= 1, limit
        self.name = name
        self.limit = limit
        self.used = 0

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)  # a reload may have lowered the limit

    def enter(self) -> None:
        assert self.used < self.limit, f"bulkhead {self.name} is full"
        self.used += 1

    def leave(self) -> None:
        assert self.used > 0, f"bulkhead {self.name} is empty"
        self.used -= 1


class RetryBudget:
    """Retries of a target as a share of its traffic: a broken site gets no more requests than a
    sound one. Every first attempt earns `retry_share` of a retry, up to `retry_reserve` saved
    retries. Time earns retries, too: a site with a task every few minutes would earn too few.

    The budget is kept in whole units, RETRY_UNITS to a retry, so that it never drifts.
    """

    __slots__ = ("_earned_ns", "_every_ns", "_full", "_share", "units")

    def __init__(self, policy: TargetPolicy, now_ns: int) -> None:
        self._set(policy)
        self.units = round(policy.retry_reserve * RETRY_UNITS)
        self._earned_ns = now_ns  # until when time has earned

    def _set(self, policy: TargetPolicy) -> None:
        self._share = round((policy.retry_share or 0.0) * RETRY_UNITS)
        # One retry can be saved up in any case.
        self._full = max(round(policy.retry_reserve * RETRY_UNITS), RETRY_UNITS)
        self._every_ns = policy.retry_every_ns if policy.retry_share else 0

    @property
    def full(self) -> bool:
        return self.units >= self._full

    @property
    def affords(self) -> bool:
        """Whether a retry may happen now."""
        return self.units >= RETRY_UNITS

    def follow(self, policy: TargetPolicy, now_ns: int) -> None:
        """Take over changed limits."""
        self.pass_time(now_ns)
        self._set(policy)
        self.units = min(self.units, self._full)

    def earn(self) -> None:
        self.units = min(self._full, self.units + self._share)

    def pass_time(self, now_ns: int) -> None:
        """Earn retries for the time up to now."""
        if not self._every_ns or self.full:
            self._earned_ns = now_ns
            return
        units = (now_ns - self._earned_ns) * RETRY_UNITS // self._every_ns
        self._earned_ns += -(-units * self._every_ns // RETRY_UNITS)
        self.units = min(self._full, self.units + units)

    def affords_at_ns(self) -> int:
        """Return when time alone will have earned the next retry; 0 for never."""
        if not self._every_ns:
            return 0
        missing = max(0, RETRY_UNITS - self.units)
        return self._earned_ns + -(-missing * self._every_ns // RETRY_UNITS)

    def spend(self) -> bool:
        """Pay for a retry; False if the budget cannot."""
        if not self.affords:
            return False
        self.units -= RETRY_UNITS
        return True

    def restore(self, units: int) -> None:
        """Restore the units from before a restart, within the limits of the policy now."""
        self.units = max(0, min(units, self._full))
