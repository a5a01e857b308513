"""So many a second, and some saved up: what keeps a flood out of the log."""


class Allowance:
    def __init__(self, per_second: float, burst: int) -> None:
        self._per_ns = per_second / 1e9
        self._burst = burst
        self._saved = float(burst)
        self._since_ns = 0

    def take(self, now_ns: int) -> bool:
        if self._since_ns:
            earned = (now_ns - self._since_ns) * self._per_ns
            self._saved = min(self._burst, self._saved + earned)
        self._since_ns = now_ns
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
