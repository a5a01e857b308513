"""Open the store that `store.durability` names: full, normal or memory.

A new engine implements `Store` (interface.py) and is added here.
"""

import time
from pathlib import Path

from musterd.supervisor.store.departure import refuse_in_doubt
from musterd.supervisor.store.file import STOP
from musterd.supervisor.store.interface import Store, WallTime
from musterd.supervisor.store.memory import MemoryStore
from musterd.supervisor.store.sqlite import SqliteStore


def open_store(
    path: Path, durability: str, on_corrupt: str = STOP, wall_ns: WallTime = time.time_ns
) -> Store:
    """Open the store; `path` and `on_corrupt` matter to a store on disk only."""
    if durability == "memory":
        return MemoryStore(wall_ns)
    refuse_in_doubt(path)
    return SqliteStore(path, durability, on_corrupt, wall_ns)
