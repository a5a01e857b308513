"""Task ids: made by the client, unique across processes, growing with time.

    0192f3a1b2c  9f86d081e4  000002a
    ms of time   process     counter        28 hexadecimal digits

Time comes first so that the store's index grows at its right edge. The middle is random and drawn
again in a forked child, so two processes never share it. The counter separates the ids of one
process. The clock only orders: ids stay unique when the clock jumps.
"""

import os
import time
from itertools import count

_PROCESS_BYTES = 5
_COUNTER_MASK = 0xFFFFFFF  # 7 digits: 268 million ids before it wraps, and by then the time differs

_process = os.urandom(_PROCESS_BYTES).hex()
_next = count().__next__  # one C call, so atomic between threads


def _draw_again() -> None:
    global _process
    _process = os.urandom(_PROCESS_BYTES).hex()


os.register_at_fork(after_in_child=_draw_again)


def new_id() -> str:
    """Return a new task id."""
    return f"{time.time_ns() // 1_000_000:011x}{_process}{_next() & _COUNTER_MASK:07x}"
