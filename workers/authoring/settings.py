"""Configured settings for a worker's own code: sizes of its executors and caches.

The runtime sets them once, before the worker is made. Outside of a worker, as in a test of a
handler, the defaults hold.
"""

import msgspec
from msgspec import Struct

from musterd.ipc.secrets.sessions import SessionAccess, decode_access
from musterd.ipc.wire.artefacts import Keep

CACHE_SECONDS = 30.0  # what a shop says stays true for about so long
CACHE_ENTRIES = 1000


class Settings(Struct, frozen=True):
    threads: dict[str, int] = {}  # of each executor whose size is configured
    cache_seconds: float = CACHE_SECONDS
    cache_entries: int = CACHE_ENTRIES
    sessions: SessionAccess = SessionAccess()
    artefacts: Keep | None = None  # None: none are kept


_settings = Settings()


def settings() -> Settings:
    """Return the settings of this process."""
    return _settings


def use(
    threads: dict[str, int],
    cache_seconds: float,
    cache_entries: int,
    sessions: bytes = b"",
    artefacts: bytes = b"",
) -> None:
    """Replace the settings; 0 means the default."""
    exchange(made(threads, cache_seconds, cache_entries, sessions, artefacts))


def exchange(new: Settings) -> Settings:
    """Use these settings; return the former ones."""
    global _settings
    former, _settings = _settings, new
    return former


def made(
    threads: dict[str, int],
    cache_seconds: float,
    cache_entries: int,
    sessions: bytes = b"",
    artefacts: bytes = b"",
) -> Settings:
    """Return the settings that a worker is told; 0 means the default."""
    return Settings(
        threads,
        cache_seconds or CACHE_SECONDS,
        cache_entries or CACHE_ENTRIES,
        decode_access(sessions) if sessions else SessionAccess(),
        msgspec.msgpack.decode(artefacts, type=Keep) if artefacts else None,
    )
