"""Parsl's HighThroughputExecutor on this machine, without encryption, which loopback does not need.

Tasks are retried, as its manual says for tasks whose worker may die. Its queue is in memory, and it
has no priorities.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import parsl
import peer
import tasks
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider


class ParslPeer(peer.Peer):
    version = f"Parsl {version('parsl')}"
    in_process = True
    queues_alone = False
    priorities = False

    def __init__(self) -> None:
        super().__init__()
        self._kernel: Any = None

    def start(self, workers: int) -> None:
        os.environ["PYTHONPATH"] = str(peer.HERE)
        executor = HighThroughputExecutor(
            label="bench",
            address="127.0.0.1",
            max_workers_per_node=workers,
            cores_per_worker=0.1,
            encrypted=False,
            provider=LocalProvider(init_blocks=1, max_blocks=1),
        )
        config = parsl.Config(
            executors=[executor],
            retries=2,
            strategy="none",
            run_dir=str(peer.FOLDER / "parsl"),
            initialize_logging=False,
        )
        self._kernel = parsl.load(config)
        self._apps: dict[str, Callable[..., Any]] = {
            each.__name__: parsl.python_app(each) for each in tasks.ALL
        }

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return self._apps[name](*arguments)

    def result(self, handle: Any, seconds: float) -> Any:
        return handle.result(seconds)

    def mains(self) -> list[int]:
        return [os.getpid()]

    def stop(self) -> None:
        if self._kernel is not None:
            self._kernel.cleanup()
            parsl.clear()
            self._kernel = None


if __name__ == "__main__":
    peer.serve(ParslPeer())
