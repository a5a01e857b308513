"""Hooks: news for parts of the core that are made later than the part with the news.

The ledger, the leases and the gatekeeper are made before the parts that wait for their news. They
call these hooks; `Fleet` implements the hooks and passes each call on (fleet.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from musterd.ipc.wire.messages import Failure, Outcome, TaskSpec
from musterd.supervisor.core.model.gates import Site
from musterd.supervisor.core.model.task import Task

if TYPE_CHECKING:
    from musterd.supervisor.core.model.ledger import UnwrittenBulk


class Hooks(Protocol):
    def stored(self, tasks: list[Task]) -> None:
        """New tasks are on disk."""

    def written(self, written: list[UnwrittenBulk]) -> None:
        """Bulk submits that went straight to the disk queue are on disk."""

    def ended(self, task: Task, outcome: Outcome) -> None:
        """A task has ended; `outcome` is its own, before a fallback."""

    def last_good(self, spec: TaskSpec) -> bytes | None:
        """Return the last good result for the key of a task, or None."""

    def schedule_ended(self, task: Task) -> None:
        """A task that a schedule made has ended."""

    def schedule_retried(self, id_: str, alive: bool) -> None:
        """A task that a schedule made is alive again, or is not after all."""

    def session_ended(self, task: Task, outcome: Outcome | None) -> None:
        """A task of a session has ended; without an outcome it is gone with its pool."""

    def login_failed(self, task: Task, failure: Failure) -> None:
        """A queued task has waited for a login in vain."""

    def earned(self, site: Site) -> None:
        """A site can afford more retries."""

    def owes(self, task: Task, ready_ns: int) -> bool:
        """Whether a retry has to wait until the budget of its site can pay for it."""

    def claim_begun(self, task: Task) -> None:
        """An attempt of the cluster runs."""

    def claim_ended(self, task: Task, state: str, failure: Failure | None, run_ns: int) -> None:
        """An attempt of the cluster has ended without a result."""
