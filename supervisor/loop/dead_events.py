"""Tells those who follow events of tasks that have failed for good: `task.dead`.

The log has a line for it already (task_log.py). Of a storm, a few are told one by one, and how
many more there were of each pool once a second, in one event with a count.
"""

import time
from collections.abc import Callable

from musterd.ipc.wire.messages import FAILED
from musterd.supervisor.core.model.actions import FinalRecord, Report
from musterd.supervisor.log.token_bucket import Allowance

EVENT = "task.dead"
PER_SECOND = 5
BURST = 20
POOLS_MAX = 1000  # of which the others are counted; more than there can be
REASON_CHARS_MAX = 300


class DeadTasks:
    def __init__(self, publish: Callable[[Report], None]) -> None:
        self._publish = publish
        self._allowed = Allowance(PER_SECOND, BURST)
        self._others: dict[str, int] = {}

    def take(self, finished: list[FinalRecord]) -> None:
        for record in finished:
            if record.outcome.state != FAILED:
                continue
            pool = record.spec.name.partition(".")[0]
            if self._allowed.take(time.monotonic_ns()):
                self._publish(_report(record, pool))
            elif pool in self._others or len(self._others) < POOLS_MAX:
                self._others[pool] = self._others.get(pool, 0) + 1

    def count(self) -> None:
        """Once a second, and at the end: of how many nothing was told."""
        for pool, count in self._others.items():
            self._publish(Report(EVENT, "error", pool=pool, count=count))
        self._others = {}


def _report(record: FinalRecord, pool: str) -> Report:
    failure = record.outcome.failure
    reason = f"{failure.type or failure.kind}: {failure.message}" if failure is not None else ""
    return Report(
        EVENT,
        "error",
        pool=pool,
        task=record.spec.id,
        attempt=record.outcome.attempts,
        target=record.spec.target,
        reason=reason[:REASON_CHARS_MAX],
    )
