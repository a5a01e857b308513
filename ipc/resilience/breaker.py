"""Circuit breaker: keeps tasks away from a site that is unwell.

                failures reached, or a rate of the window
      CLOSED ───────────────────────────────────────────► OPEN
        ▲                                                 │   ▲
        │ successes reached                  open is over │   │ a probe failed: open longer
        └──────────────────── HALF_OPEN ◄─────────────────┘   │
                                  └───────────────────────────┘
      A person sets FORCED_OPEN and DISABLED, and a person ends them.

The caller decides which failures mean that the site is unwell, and reports only these. In HALF_OPEN
a limited number of probes runs; a probe that never reports (its worker died, it was cancelled) is
given back with `forget`, so the breaker cannot get stuck. A task that began before the breaker
opened and ends afterwards changes nothing: a late result never extends OPEN.
"""

from collections import deque
from enum import StrEnum
from random import Random

from musterd.ipc.resilience.backoff import pause_ns
from musterd.ipc.resilience.policy import BackoffPolicy, BreakerPolicy

WINDOW_MAX = 1000  # calls remembered for the rates


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    FORCED_OPEN = "forced-open"
    DISABLED = "disabled"


class Breaker:
    __slots__ = (
        "failed",
        "failures",
        "open_until_ns",
        "policy",
        "probes",
        "reopenings",
        "state",
        "successes",
        "window",
    )

    def __init__(self, policy: BreakerPolicy) -> None:
        self.policy = policy
        self.state = BreakerState.CLOSED if policy.enabled else BreakerState.DISABLED
        self.failed = 0  # all reported failures, while not DISABLED
        # Consecutive failures, or those of the window that opened the breaker; while OPEN, the
        # reason.
        self.failures = 0
        self.successes = 0  # consecutive, while HALF_OPEN
        self.probes = 0  # running, while HALF_OPEN
        self.reopenings = 0  # times it opened without having closed in between
        self.open_until_ns = 0
        self.window: deque[tuple[bool, bool]] = deque(maxlen=policy.window or 1)  # (failed, slow)

    # -- asking -------------------------------------------------------------------------------

    def admits(self, now_ns: int) -> bool:
        """Whether one more task may begin now. OPEN becomes HALF_OPEN when its time is over."""
        state = self.state
        if state in (BreakerState.CLOSED, BreakerState.DISABLED):
            return True
        if state == BreakerState.OPEN and now_ns >= self.open_until_ns:
            self.state = state = BreakerState.HALF_OPEN
            self.successes = 0
            self.probes = 0
        return state == BreakerState.HALF_OPEN and self.probes < self.policy.probes

    def begin(self) -> bool:
        """Begin a task; return whether it is a probe, which `record` or `forget` must end."""
        if self.state != BreakerState.HALF_OPEN:
            return False
        self.probes += 1
        return True

    # -- telling ------------------------------------------------------------------------------

    def record(
        self,
        now_ns: int,
        rng: Random,
        *,
        ok: bool,
        probe: bool,
        slow: bool = False,
        retry_after_ns: int = 0,
    ) -> None:
        """End a task that says something about the site."""
        self.failed += not ok and self.state != BreakerState.DISABLED
        if self.state == BreakerState.CLOSED:
            self._while_closed(now_ns, rng, ok, slow, retry_after_ns)
        elif self.state == BreakerState.HALF_OPEN and probe:
            self.probes -= 1
            self.failures = 0 if ok else self.failures + 1
            if not ok:
                self._open(now_ns, rng, retry_after_ns)
                return
            self.successes += 1
            if self.successes >= self.policy.successes:
                self.close()

    def forget(self, *, probe: bool) -> None:
        """End a task that says nothing about the site."""
        if probe and self.state == BreakerState.HALF_OPEN:
            self.probes -= 1

    def _while_closed(
        self, now_ns: int, rng: Random, ok: bool, slow: bool, retry_after_ns: int
    ) -> None:
        policy = self.policy
        self.failures = 0 if ok else self.failures + 1
        if policy.failures and self.failures >= policy.failures:
            self._open(now_ns, rng, retry_after_ns)
            return
        if not policy.window:
            return
        self.window.append((not ok, slow))
        count = len(self.window)
        if count < policy.window_calls_min:
            return
        failed = sum(entry[0] for entry in self.window)
        slowly = sum(entry[1] for entry in self.window)
        if (policy.failure_rate and failed >= policy.failure_rate * count) or (
            policy.slow_rate and slowly >= policy.slow_rate * count
        ):
            self.failures = max(self.failures, failed)
            self._open(now_ns, rng, retry_after_ns)

    def _open(self, now_ns: int, rng: Random, retry_after_ns: int) -> None:
        self.reopenings += 1
        policy = self.policy
        growth = BackoffPolicy(
            policy.open_ns,
            policy.open_factor,
            policy.open_max_ns,
            policy.open_jitter if self.reopenings > 1 else 0.0,
        )
        pause = max(pause_ns(growth, self.reopenings, rng), retry_after_ns)
        self.state = BreakerState.OPEN
        self.open_until_ns = now_ns + pause
        self.probes = 0
        self.window.clear()

    # -- a person's word ----------------------------------------------------------------------

    def reset(self) -> None:
        """Return to the state of a new breaker with this policy."""
        self.close()
        if not self.policy.enabled:
            self.state = BreakerState.DISABLED

    def follow(self, policy: BreakerPolicy) -> None:
        """Use another policy from now on."""
        rests = self.as_new
        self.policy = policy
        self.window = deque(self.window, maxlen=policy.window or 1)
        if rests:
            self.reset()

    @property
    def as_new(self) -> bool:
        """Whether nothing would be lost by replacing the breaker with a new one."""
        rest = BreakerState.CLOSED if self.policy.enabled else BreakerState.DISABLED
        return self.state == rest and not (self.failures or self.reopenings or self.window)

    def close(self) -> None:
        """Close the breaker and forget its history."""
        self.state = BreakerState.CLOSED
        self.failures = self.successes = self.probes = self.reopenings = 0
        self.open_until_ns = 0
        self.window.clear()

    def force_open(self) -> None:
        self.state = BreakerState.FORCED_OPEN

    def disable(self) -> None:
        self.state = BreakerState.DISABLED
