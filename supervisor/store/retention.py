"""Decide when the store forgets finished tasks: once a minute, and sooner after many.

What a busy minute leaves would make the file large for good: it does not shrink, and uses again
what becomes free. So the store forgets, too, when as many tasks have ended as it is to keep.
"""

from musterd.supervisor.config.schema import StoreConfig
from musterd.supervisor.store.interface import Store

INTERVAL_NS = 60_000_000_000
# Tasks since the last trim, between these: a trim that finds little costs something, too.
ENDED_MIN, ENDED_MAX = 1_000, 100_000


class Trimming:
    def __init__(self, store: Store, now_ns: int) -> None:
        self._store = store
        self._due_ns = now_ns + INTERVAL_NS
        self._ended = store.ended

    def look(self, now_ns: int, keep: StoreConfig, by_age: bool) -> None:
        """Trim if that is due; called once a second. `by_age`: the time of day can be trusted."""
        ended = self._store.ended
        many = min(ENDED_MAX, max(ENDED_MIN, keep.keep_results_max))
        if now_ns >= self._due_ns or ended - self._ended >= many:
            self._due_ns, self._ended = now_ns + INTERVAL_NS, ended
            self._store.trim(keep.keep_results_ns if by_age else None, keep.keep_results_max)
