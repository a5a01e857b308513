"""arq: one process per worker, each with up to ten coroutines at once, the default.

Client and worker poll: every 10 ms here, instead of every 500. arq has no program that restarts its
workers, and no priorities.
"""

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import arq
import peer
import tasks

POLL_SECONDS = 0.01
AT_ONCE = 100  # submits of the client at once
QUIET = {"version": 1, "loggers": {"arq": {"level": "WARNING"}}}  # no two lines for every job


async def echo(ctx: Any, data: str) -> str:
    return tasks.echo(data)


async def nap(ctx: Any, seconds: float) -> None:
    await asyncio.sleep(seconds)


async def stamp(ctx: Any) -> int:
    return tasks.stamp()


async def hold(ctx: Any, path: str, seconds: float) -> None:
    tasks.hold(path, seconds)


async def note(ctx: Any, path: str, number: int, seconds: float) -> None:
    await asyncio.sleep(seconds)
    tasks.note(path, number, 0.0)


class WorkerSettings:
    functions = (echo, nap, stamp, hold, note)
    redis_settings = arq.connections.RedisSettings.from_dsn(peer.REDIS)
    poll_delay = POLL_SECONDS
    log_results = False


class ArqPeer(peer.Peer):
    version = f"arq {version('arq')}"
    priorities = False

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._pool = self._run(arq.create_pool(WorkerSettings.redis_settings))

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def start(self, workers: int) -> None:
        for _ in range(workers):
            self.spawn("arq", "--custom-log-dict", "arq_peer.QUIET", "arq_peer.WorkerSettings")

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return self._run(self._pool.enqueue_job(name, *arguments))

    def submit_all(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._run(self._submit_all(name, each))

    async def _submit_all(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        jobs: list[Any] = []
        for start in range(0, len(each), AT_ONCE):
            part = each[start : start + AT_ONCE]
            jobs += await asyncio.gather(*(self._pool.enqueue_job(name, *some) for some in part))
        return jobs

    def result(self, handle: Any, seconds: float) -> Any:
        return self._run(handle.result(timeout=seconds, poll_delay=POLL_SECONDS))


if __name__ == "__main__":
    peer.serve(ArqPeer())
