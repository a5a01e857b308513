"""Procrastinate: PostgreSQL alone, notified of new jobs, as its manual sets it up.

Tasks are coroutines, many at once in each worker, its fast way. Jobs are submitted by
`batch_defer`. It keeps no results: a job's end is its status, which the client asks for.
"""

import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import peer
import procrastinate
import tasks
from procrastinate.jobs import Status

POSTGRES = os.environ["BENCH_POSTGRES"]
AT_ONCE = 10  # jobs of a worker
BATCH = 1000
LOOK_SECONDS = 0.001
ENDED = (Status.SUCCEEDED, Status.FAILED)

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=POSTGRES))


def _coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(arguments: list[Any]) -> Any:
        return function(*arguments)

    return run


TASKS = {each.__name__: app.task(name=each.__name__)(_coroutine(each)) for each in tasks.ALL}


class ProcrastinatePeer(peer.Peer):
    version = f"Procrastinate {version('procrastinate')}"
    priorities = False

    def start(self, workers: int) -> None:
        app.open()
        app.schema_manager.apply_schema()
        for _ in range(workers):
            self.spawn(
                *("procrastinate", "--app", "procrastinate_peer.app", "worker"),
                *("--concurrency", str(AT_ONCE)),
            )

    def submit(self, name: str, *arguments: Any, urgent: bool = False) -> Any:
        return TASKS[name].defer(arguments=list(arguments))

    def submit_all(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        handles: list[Any] = []
        for start in range(0, len(each), BATCH):
            batch = [{"arguments": list(arguments)} for arguments in each[start : start + BATCH]]
            handles += TASKS[name].batch_defer(*batch)
        return handles

    def result(self, handle: Any, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while (status := app.job_manager.get_job_status(handle)) not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(LOOK_SECONDS)
        return status == Status.SUCCEEDED

    def run_all(self, count: int) -> int:
        """Wait for the job that was submitted last, then for the others: to ask for each of them
        would slow the workers down."""
        handles = self.submit_all("echo", [(tasks.ARGUMENT,)] * count)
        self.result(handles[-1], peer.measures.ANSWER_SECONDS)
        while self._jobs(Status.TODO) or self._jobs(Status.DOING):
            time.sleep(LOOK_SECONDS)
        return count - self._jobs(Status.FAILED)

    def _jobs(self, status: Status) -> int:
        return len(list(app.job_manager.list_jobs(status=status.value)))

    def stop(self) -> None:
        super().stop()
        app.close()


if __name__ == "__main__":
    peer.serve(ProcrastinatePeer())
