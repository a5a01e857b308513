"""The event `task.dead`, for those who follow events: a task has failed for good.

The log has a line of its own (task_log.py). In a storm of failures a few tasks are told one by one;
the others are counted, and one event per pool and second tells how many.
"""

import time
from collections.abc import Callable

from musterd.ipc.wire.messages import FAILED
from musterd.supervisor.core.model.actions import FinalRecord, Report
from musterd.supervisor.log.token_bucket import Allowance

EVENT = "task.dead"
PER_SECOND = 5
BURST = 20
POOLS_MAX = 1000  # pools whose others are counted; more than there can be
REASON_CHARS_MAX = 300


class DeadTasks:
    def __init__(self, publish: Callable[[Report], None]) -> None:
        self._publish = publish
        self._allowed = Allowance(PER_SECOND, BURST)
        self._others: dict[str, int] = {}

    def take(self, finished: list[FinalRecord]) -> None:
        for record in finished:
            outcome = record.outcome
            if outcome.state != FAILED or (outcome.failure is not None and outcome.failure.refused):
                continue
            self.tell(_report(record, record.spec.name.partition(".")[0]))

    def tell(self, report: Report) -> None:
        """Publish the report of a dead task, or count it."""
        if self._allowed.take(time.monotonic_ns()):
            self._publish(report)
        elif report.pool in self._others or len(self._others) < POOLS_MAX:
            self._others[report.pool] = self._others.get(report.pool, 0) + 1

    def count(self) -> None:
        """Tell how many tasks of each pool had no event of their own; once a second."""
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
