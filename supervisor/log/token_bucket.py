"""Token bucket for log lines."""


class Allowance:
    """Allows `per_second` lines on average, and `burst` at once."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_ns = per_second / 1e9
        self._burst = burst
        self._saved = float(burst)
        self._since_ns = 0

    def take(self, now_ns: int) -> bool:
        """Take a token; return False if none is left."""
        if self._since_ns:
            earned = (now_ns - self._since_ns) * self._per_ns
            self._saved = min(self._burst, self._saved + earned)
        self._since_ns = now_ns
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
