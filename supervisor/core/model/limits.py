"""Limits on how much runs at once and how often something begins."""

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.policy import TargetPolicy

RETRY_UNITS = 1_000_000  # of a RetryBudget, for one retry


class TokenBucket:
    """At most `rate` beginnings per second in the long run, `burst` of them at once.

    Kept in nanoseconds of credit, so that it needs no fractions and never drifts: one beginning
    costs `cost_ns`, credit grows with time and is never more than a full bucket.
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
        """When the next one may begin: now, or later."""
        self._refill(now_ns)
        return now_ns + max(0, self.cost_ns - self._credit_ns)

    def take(self, now_ns: int) -> None:
        """One begins. Only when it may."""
        self._refill(now_ns)
        assert self._credit_ns >= self.cost_ns, "taken before it was ready"
        self._credit_ns -= self.cost_ns


class Bulkhead:
    """A named number of places; what has none waits."""

    __slots__ = ("limit", "name", "used")

    def __init__(self, name: str, limit: int) -> None:
        assert limit >= 1, limit
        self.name = name
        self.limit = limit
        self.used = 0

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)  # the limit may have been lowered meanwhile

    def enter(self) -> None:
        assert self.used < self.limit, f"bulkhead {self.name} is full"
        self.used += 1

    def leave(self) -> None:
        assert self.used > 0, f"bulkhead {self.name} is empty"
        self.used -= 1


class RetryBudget:
    """Retries of a target as a share of its traffic, so that a broken site is not asked more often
    than a sound one: every first attempt earns `retry_share` of a retry, up to `retry_reserve`
    saved ones. Time earns some, too: a site that is asked every few minutes would earn none else.

    Kept in whole units, RETRY_UNITS to a retry, so that it never drifts.
    """

    __slots__ = ("_earned_ns", "_every_ns", "_full", "_share", "units")

    def __init__(self, policy: TargetPolicy, now_ns: int) -> None:
        self._set(policy)
        self.units = round(policy.retry_reserve * RETRY_UNITS)
        self._earned_ns = now_ns  # until when time has been paid for

    def _set(self, policy: TargetPolicy) -> None:
        self._share = round((policy.retry_share or 0.0) * RETRY_UNITS)
        # One can be saved up in any case.
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
        """These limits hold from now on."""
        self.pass_time(now_ns)
        self._set(policy)
        self.units = min(self.units, self._full)

    def earn(self) -> None:
        self.units = min(self._full, self.units + self._share)

    def pass_time(self, now_ns: int) -> None:
        """Earn what the time up to now is worth."""
        if not self._every_ns or self.full:
            self._earned_ns = now_ns
            return
        units = (now_ns - self._earned_ns) * RETRY_UNITS // self._every_ns
        self._earned_ns += -(-units * self._every_ns // RETRY_UNITS)
        self.units = min(self._full, self.units + units)

    def affords_at_ns(self) -> int:
        """When time alone will have earned the next retry; 0 for never."""
        if not self._every_ns:
            return 0
        missing = max(0, RETRY_UNITS - self.units)
        return self._earned_ns + -(-missing * self._every_ns // RETRY_UNITS)

    def spend(self) -> bool:
        """Whether a retry may happen now."""
        if not self.affords:
            return False
        self.units -= RETRY_UNITS
        return True

    def restore(self, units: int) -> None:
        """As it was before a restart; the policy may be another one by now."""
        self.units = max(0, min(units, self._full))
