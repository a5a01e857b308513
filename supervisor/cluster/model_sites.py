"""Sites and classes of the engine in memory: breakers, rates, retry budgets and places.

The engine on PostgreSQL does the same in SQL (schema/0001.sql), where a site without limits and
with a breaker as new has no row. Here every site has an object.
"""

from collections.abc import Iterable
from random import Random

from musterd.ipc.resilience.breaker import Breaker, BreakerState
from musterd.ipc.resilience.policy import BreakerPolicy
from musterd.ipc.wire.messages import Failure
from musterd.supervisor.cluster.engine import ClusterPolicy, SiteView
from musterd.supervisor.core.model.limits import RetryBudget, TokenBucket
from musterd.supervisor.core.model.policy import TargetPolicy


class Site:
    def __init__(self, target: str, policy: ClusterPolicy, class_: str, now_ns: int) -> None:
        self.target = target
        self.class_ = class_  # whose breaker it has, if the target has none of its own
        self.policy = TargetPolicy()
        self.bucket: TokenBucket | None = None
        self.budget: RetryBudget | None = None
        self.breaker = Breaker(self._breaker_of(policy))
        self.round = 0  # half-open rounds: a probe counts in its own round only
        self.follow(policy, now_ns)

    def _breaker_of(self, policy: ClusterPolicy) -> BreakerPolicy:
        known = policy.targets.get(self.target, policy.target)
        name = known.policy or self.class_
        return known.breaker or policy.class_breakers.get(name, policy.breaker)

    def follow(self, policy: ClusterPolicy, now_ns: int) -> None:
        """Take over another policy."""
        known = policy.targets.get(self.target, policy.target)
        before, self.policy = self.policy, known
        switched = self.breaker.policy.enabled != self._breaker_of(policy).enabled
        self.breaker.follow(self._breaker_of(policy))
        if switched and self.breaker.state != BreakerState.FORCED_OPEN:
            self.breaker.reset()
        if (before.rate, before.burst) != (known.rate, known.burst) or self.bucket is None:
            self.bucket = TokenBucket(known.rate, known.burst, now_ns) if known.rate else None
        if known.retry_share is None:
            self.budget = None
        elif self.budget is None:
            self.budget = RetryBudget(known, now_ns)
        else:
            self.budget.follow(known, now_ns)

    def allows(self, now_ns: int, inside: int) -> int:
        """Return how many tasks may begin now, as far as the site is concerned."""
        before = self.breaker.state
        if not self.breaker.admits(now_ns):
            return 0
        self.round += self.breaker.state != before
        allowed = 1 << 30
        if self.breaker.state == BreakerState.HALF_OPEN:
            allowed = self.breaker.policy.probes - self.breaker.probes
        if self.policy.max_concurrent:
            allowed = min(allowed, self.policy.max_concurrent - inside)
        if self.bucket is not None and self.bucket.ready_ns(now_ns) > now_ns:
            return 0
        return allowed

    def enter(self, now_ns: int, *, first: bool) -> int:
        """Let a task begin; return the round that it probes, 0 for none."""
        if self.bucket is not None:
            self.bucket.take(now_ns)
        if first and self.budget is not None:
            self.budget.pass_time(now_ns)
            self.budget.earn()
        return self.round if self.breaker.begin() else 0

    def leave(
        self,
        now_ns: int,
        rng: Random,
        *,
        probed: int,
        ok: bool | None,
        run_ns: int = 0,
        failure: Failure | None = None,
    ) -> None:
        """Fold what an attempt says about the site; `ok` is None if it says nothing."""
        probe = probed != 0 and probed == self.round
        if ok is None:
            self.breaker.forget(probe=probe)
            return
        slow_ns = self.breaker.policy.slow_ns
        self.breaker.record(
            now_ns,
            rng,
            ok=ok,
            probe=probe,
            slow=bool(slow_ns) and run_ns > slow_ns,
            retry_after_ns=failure.retry_after_ns if failure is not None else 0,
        )

    def shut(self, now_ns: int) -> bool:
        """Whether the breaker admits nothing for a while: on_open then applies."""
        state = self.breaker.state
        if state == BreakerState.OPEN:
            return now_ns < self.breaker.open_until_ns
        return state == BreakerState.FORCED_OPEN

    def pays(self, now_ns: int) -> bool:
        """Pay for a retry, if the budget can."""
        if self.budget is None:
            return True
        self.budget.pass_time(now_ns)
        return self.budget.spend()

    def view(self, now_ns: int, inside: int, waiting: int) -> SiteView | None:
        """Return what people see; None if there is nothing to see."""
        breaker = self.breaker
        if breaker.as_new and not (self.policy.max_concurrent or self.policy.rate):
            return None
        open_for = breaker.open_until_ns - now_ns if breaker.state == BreakerState.OPEN else 0
        return SiteView(
            self.target,
            str(breaker.state),
            max(0, open_for),
            breaker.failures,
            inside,
            breaker.reopenings,
            waiting,
        )


class Sites:
    def __init__(self) -> None:
        self._sites: dict[str, Site] = {}

    def get(self, target: str, class_: str, policy: ClusterPolicy, now_ns: int) -> Site:
        site = self._sites.get(target)
        if site is None:
            site = self._sites[target] = Site(target, policy, class_, now_ns)
        return site

    def all(self) -> Iterable[Site]:
        return self._sites.values()
