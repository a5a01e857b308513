"""Huey with worker processes: on Redis, or on SQLite when BENCH_HUEY says so.

Redis has priorities, and results are pushed. SQLite syncs every commit; results are polled, every
10 ms. Crashed workers are looked for every second instead of every ten.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import huey as library
import peer
import tasks
from huey.exceptions import ResultTimeout

POLL_SECONDS = 0.01
URGENT = 100

if os.environ.get("BENCH_HUEY") == "sqlite":
    huey: Any = library.SqliteHuey(
        "bench", filename=str(peer.FOLDER / "huey.db"), fsync=True, store_none=True
    )
else:
    huey = library.PriorityRedisHuey(
        "bench", url=peer.PATIENT_REDIS, notify_result=True, store_none=True
    )
TASKS: dict[str, Callable[..., Any]] = {
    each.__name__: huey.task(name=each.__name__)(each) for each in tasks.ALL
}


class HueyPeer(peer.Peer):
    version = f"Huey {version('huey')}"

    def start(self, workers: int) -> None:
        self.spawn(
            *("huey_consumer", "huey_peer.huey", "--worker-type", "process"),
            *("--workers", str(workers), "--no-periodic", "--quiet"),
            *("--delay", str(POLL_SECONDS), "--max-delay", str(POLL_SECONDS)),
            *("--health-check-interval", "1"),
        )

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return TASKS[name](*arguments, priority=URGENT) if urgent else TASKS[name](*arguments)

    def result(self, handle: Any, seconds: float) -> Any:
        try:
            return handle.get(blocking=True, timeout=seconds, backoff=1, max_delay=POLL_SECONDS)
        except ResultTimeout as error:
            raise TimeoutError from error


if __name__ == "__main__":
    peer.serve(HueyPeer())
