"""What the parts of the core tell each other beside their arguments.

The ledger, the leases and the gatekeeper are made before the parts that wait for their news. They
are given these hooks; `Fleet` implements them and passes each call on (fleet.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from musterd.ipc.wire.messages import Outcome, TaskSpec
from musterd.supervisor.core.model.gates import Site
from musterd.supervisor.core.model.task import Task

if TYPE_CHECKING:
    from musterd.supervisor.core.model.ledger import UnwrittenRun


class Hooks(Protocol):
    def stored(self, tasks: list[Task]) -> None:
        """New tasks are on disk."""

    def written(self, runs: list[UnwrittenRun]) -> None:
        """Bulk submits that went straight to the disk queue are on disk."""

    def ended(self, task: Task, outcome: Outcome) -> None:
        """A task has ended, by itself like this; its fallback may have changed that for others."""

    def last_good(self, spec: TaskSpec) -> bytes | None:
        """Return the last good result of such a task, or None."""

    def schedule_ended(self, task: Task) -> None:
        """A task that a schedule made has ended."""

    def schedule_retried(self, id_: str, alive: bool) -> None:
        """A task that a schedule made is alive again, or is not after all."""

    def earned(self, site: Site) -> None:
        """A site can afford more retries."""

    def owes(self, task: Task, ready_ns: int) -> bool:
        """Whether the retry of a task has to be paid for first; then it waits."""
