"""Celery: prefork, Redis as broker and as result backend.

The settings are those of its manual for tasks that must not be lost: acknowledged late, returned
when their process dies. Priorities are those for Redis: a list for each priority, read in order.
The client follows the manual's first steps: `apply_async`, then `get`. No events, no gossip.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import celery
import peer
import tasks

URGENT, USUAL = 0, 6  # 0 is the highest with Redis

app = celery.Celery("bench", broker=peer.REDIS, backend=peer.REDIS)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_priority=USUAL,
    broker_transport_options={"queue_order_strategy": "priority"},
    broker_connection_retry_on_startup=True,
)
TASKS: dict[str, Callable[..., Any]] = {
    each.__name__: app.task(name=each.__name__)(each) for each in tasks.ALL
}


class CeleryPeer(peer.Peer):
    version = f"Celery {version('celery')}"

    def start(self, workers: int) -> None:
        self.spawn(
            *("celery", "-A", "celery_peer", "worker", "--pool", "prefork"),
            *("--concurrency", str(workers), "--loglevel", "WARNING"),
            *("--without-gossip", "--without-mingle"),
        )

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return TASKS[name].apply_async(arguments, priority=URGENT if urgent else USUAL)

    def result(self, handle: Any, seconds: float) -> Any:
        try:
            return handle.get(timeout=seconds)
        except celery.exceptions.TimeoutError as error:
            raise TimeoutError from error


if __name__ == "__main__":
    peer.serve(CeleryPeer())
