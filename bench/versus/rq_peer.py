"""RQ: `rq worker-pool` with its default worker, which forks a process for each job.

Jobs are retried, as its manual says for jobs that must not be lost. Urgent jobs go to a queue that
the workers read first. Results are awaited without polling.
"""

import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import peer
import redis
import rq
import tasks

BATCH = 1000
RETRY = rq.Retry(max=3)
FUNCTIONS = {each.__name__: each for each in tasks.ALL}


class RqPeer(peer.Peer):
    version = f"RQ {version('rq')}"

    def __init__(self) -> None:
        super().__init__()
        connection = redis.Redis.from_url(peer.PATIENT_REDIS)
        self._high = rq.Queue("high", connection=connection)
        self._default = rq.Queue("default", connection=connection)

    def start(self, workers: int) -> None:
        self.spawn(
            *("rq", "worker-pool", "high", "default", "--num-workers", str(workers)),
            *("--url", peer.REDIS, "--logging-level", "WARNING"),
        )

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        queue = self._high if urgent else self._default
        return queue.enqueue(FUNCTIONS[name], args=arguments, retry=RETRY)

    def submit_all(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        jobs: list[Any] = []
        for start in range(0, len(each), BATCH):
            jobs += self._default.enqueue_many(
                [
                    rq.Queue.prepare_data(FUNCTIONS[name], args=arguments, retry=RETRY)
                    for arguments in each[start : start + BATCH]
                ]
            )
        return jobs

    def result(self, handle: Any, seconds: float) -> Any:
        found = handle.latest_result(timeout=math.ceil(seconds))
        if found is None:
            raise TimeoutError
        if found.type != found.Type.SUCCESSFUL:
            raise RuntimeError(found.exc_string)
        return found.return_value


if __name__ == "__main__":
    peer.serve(RqPeer())
