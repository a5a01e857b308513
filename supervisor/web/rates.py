"""How often one caller may ask for what costs more than a look."""

import time
from collections import OrderedDict

from musterd.supervisor.log.token_bucket import Allowance

CALLERS_MAX = 256  # addresses that are remembered


class Rates:
    """So many a second of each address, and some saved up."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._callers: OrderedDict[str, Allowance] = OrderedDict()

    def take(self, caller: str) -> bool:
        allowance = self._callers.get(caller)
        if allowance is None:
            allowance = self._callers[caller] = Allowance(self._per_second, self._burst)
            if len(self._callers) > CALLERS_MAX:
                self._callers.popitem(last=False)
        self._callers.move_to_end(caller)
        return allowance.take(time.monotonic_ns())
