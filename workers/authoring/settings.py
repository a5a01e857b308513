"""What the configuration says of a worker's own code: how large its executors and caches are.

The runtime sets it once, before the worker is made. Outside of a worker, as in a test of a handler,
the defaults hold.
"""

from msgspec import Struct

CACHE_SECONDS = 30.0  # what a shop says is true for about so long
CACHE_ENTRIES = 1000


class Settings(Struct, frozen=True):
    threads: dict[str, int] = {}  # of each executor that has another size than usual
    cache_seconds: float = CACHE_SECONDS
    cache_entries: int = CACHE_ENTRIES


_settings = Settings()


def settings() -> Settings:
    """Those of this process."""
    return _settings


def use(threads: dict[str, int], cache_seconds: float, cache_entries: int) -> None:
    """These hold from now on; 0 is for the default."""
    global _settings
    _settings = Settings(threads, cache_seconds or CACHE_SECONDS, cache_entries or CACHE_ENTRIES)
