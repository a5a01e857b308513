"""musterd: durability "full", or BENCH_DURABILITY.

A task is on disk before it is acknowledged, and its result before it is told. Tasks are submitted
in batches, or one by one with BENCH_SUBMIT.
"""

import inspect
import os
from collections.abc import Sequence
from typing import Any

import peer
import tasks
from fleet import Fleet

from musterd import __version__

BATCH = 1000
WORKER = "bench.versus.musterd_tasks"
NAMES = {each.__name__: list(inspect.signature(each).parameters) for each in tasks.ALL}


class MusterdPeer(peer.Peer):
    version = f"musterd {__version__}"
    queues_alone = False

    def __init__(self) -> None:
        super().__init__()
        self._fleet: Fleet | None = None

    def start(self, workers: int) -> None:
        if self._fleet is not None:  # after a kill: the same store
            self._fleet.start()
            return
        durability = os.environ.get("BENCH_DURABILITY", "full")
        self._fleet = Fleet(peer.FOLDER / "fleet", durability, {"bench": (WORKER, workers)})
        self._fleet.folder.mkdir(mode=0o700)
        self._fleet.start()
        self._client = self._fleet.client()

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        priority = "critical" if urgent else "low"
        return self._client.submit(
            f"bench.{name}", dict(zip(NAMES[name], arguments, strict=True)), priority=priority
        )

    def submit_all(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        if os.environ.get("BENCH_SUBMIT") == "single":
            handles = super().submit_all(name, each)
        else:
            handles = self._submit_batches(name, each)
        if name != "echo":  # the results of echo are waited for anyway
            self._client.flush()
        return handles

    def _submit_batches(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        options = {"priority": "low"}
        handles: list[Any] = []
        for start in range(0, len(each), BATCH):
            handles += self._client.submit_many(
                [
                    (f"bench.{name}", dict(zip(NAMES[name], arguments, strict=True)), options)
                    for arguments in each[start : start + BATCH]
                ]
            )
        return handles

    def result(self, handle: Any, seconds: float) -> Any:
        return handle.result(seconds)

    def worker_pid(self, told: int) -> int:
        """Ask the daemon for the pid: workers see only the pid of their own namespace."""
        assert self._fleet is not None
        return self._fleet.worker("bench/0").pid

    def mains(self) -> list[int]:
        assert self._fleet is not None
        return [self._fleet.pid]

    def stop(self) -> None:
        if self._fleet is not None:
            self._client.close()
            self._fleet.stop()
            self._fleet = None


if __name__ == "__main__":
    peer.serve(MusterdPeer())
