"""Decide when the store forgets finished tasks: once a minute, and sooner after many."""

from musterd.supervisor.config.schema import StoreConfig
from musterd.supervisor.store.interface import Store

INTERVAL_NS = 60_000_000_000
ENDED_MAX = 100_000  # tasks since the last trim: a busy minute has millions, which fill a disk


class Trimming:
    def __init__(self, store: Store, now_ns: int) -> None:
        self._store = store
        self._due_ns = now_ns + INTERVAL_NS
        self._ended = store.ended

    def look(self, now_ns: int, keep: StoreConfig, by_age: bool) -> None:
        """Trim if that is due; called once a second. `by_age`: the time of day can be trusted."""
        ended = self._store.ended
        if now_ns >= self._due_ns or ended - self._ended >= ENDED_MAX:
            self._due_ns, self._ended = now_ns + INTERVAL_NS, ended
            self._store.trim(keep.keep_results_ns if by_age else None, keep.keep_results_max)
