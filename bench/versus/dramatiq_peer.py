"""Dramatiq: Redis as broker and as result backend, one thread in each process.

Messages are acknowledged when they are done, the default. Urgent tasks have a priority and a
separate queue, because priorities only order the messages that a worker has fetched.
"""

from importlib.metadata import version
from typing import Any

import dramatiq
import peer
import tasks
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results, ResultTimeout
from dramatiq.results.backends import RedisBackend

broker = RedisBroker(url=peer.REDIS)
broker.add_middleware(Results(backend=RedisBackend(url=peer.PATIENT_REDIS), store_results=True))
dramatiq.set_broker(broker)
ACTORS = {each.__name__: dramatiq.actor(each, priority=10) for each in tasks.ALL}
URGENT = {
    each.__name__: dramatiq.actor(
        each, actor_name=f"urgent_{each.__name__}", queue_name="urgent", priority=0
    )
    for each in tasks.ALL
}


class DramatiqPeer(peer.Peer):
    version = f"Dramatiq {version('dramatiq')}"

    def start(self, workers: int) -> None:
        self.spawn("dramatiq", "--processes", str(workers), "--threads", "1", "dramatiq_peer")

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return (URGENT if urgent else ACTORS)[name].send(*arguments)

    def result(self, handle: Any, seconds: float) -> Any:
        try:
            return handle.get_result(block=True, timeout=int(seconds * 1000))
        except ResultTimeout as error:
            raise TimeoutError from error


if __name__ == "__main__":
    peer.serve(DramatiqPeer())
