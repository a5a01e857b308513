"""Check that retries of a site are a share of its traffic, over all lives of the supervisor.

In each life, the retries that began and were not paid for in an earlier life are at most the sum of
three: what was left of the budget at its start, a share of the first attempts that began since, and
what the time is worth. The remainder that is written is never more than that either: the next life
cannot get too much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from musterd.supervisor.core.model.actions import AssignLeases, Persist
from musterd.supervisor.core.model.events import TasksRecovered
from musterd.supervisor.core.model.ledger import UNPAID
from musterd.supervisor.core.model.limits import RETRY_UNITS
from musterd.supervisor.core.model.policy import TargetPolicy
from musterd.supervisor.core.tasks.gatekeeper import BUDGET

if TYPE_CHECKING:
    from simulation.world import World


class RetryWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self._since_ns = 0  # start of this life
        self._left: dict[str, int] = {}  # at the start of this life, by target, in units
        self._firsts: dict[str, dict[str, None]] = {}  # ids, by target
        self._retries: dict[str, dict[tuple[str, int], None]] = {}  # ids and attempts, by target
        self._paid: dict[str, int] = {}  # by id: the last attempt that an earlier life paid for

    def new_life(self) -> None:
        facts = self._world.store.facts(BUDGET)
        self._left = {target: msgspec.msgpack.decode(value) for target, value in facts}
        self._firsts, self._retries, self._paid = {}, {}, {}
        self._since_ns = self._world.now_ns

    def recovered(self, event: TasksRecovered) -> None:
        unpaid = dict(self._world.store.facts(UNPAID))
        for old in event.tasks:
            if old.spec.id not in unpaid:
                self._paid[old.spec.id] = old.attempt + (not old.begun)

    def _policy(self, target: str) -> TargetPolicy:
        return self._world.policy.targets.get(target, self._world.policy.target)

    def _allowed(self, target: str) -> float:
        policy = self._policy(target)
        left = self._left.get(target, policy.retry_reserve * RETRY_UNITS)
        assert policy.retry_share is not None
        firsts = len(self._firsts.get(target, ()))
        every_ns = policy.retry_every_ns if policy.retry_share else 0
        times = (self._world.now_ns - self._since_ns) / every_ns if every_ns else 0.0
        return left + (policy.retry_share * firsts + times) * RETRY_UNITS

    def begins_anew(self, id_: str) -> None:
        """Count the attempts of a task from one again, because a person retries it."""
        self._paid.pop(id_, None)
        for target, ids in self._firsts.items():
            if id_ in ids:
                ids[f"{id_} before {len(ids)}"] = None
                del ids[id_]
                retries = self._retries.get(target, {})
                for key in [key for key in retries if key[0] == id_]:
                    del retries[key]
                    retries[f"{id_} before {len(ids)}", key[1]] = None

    def handled(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, AssignLeases):
                for lease in action.leases:
                    self._begins(lease.id, lease.attempt)
            elif isinstance(action, Persist):
                for fact in action.facts:
                    if fact.kind == BUDGET and fact.value is not None:
                        self._check_written(fact.key, msgspec.msgpack.decode(fact.value))

    def _begins(self, id_: str, attempt: int) -> None:
        target = self._world.fleet.tasks[id_].spec.target
        if not target:
            return
        if attempt == 1:
            self._firsts.setdefault(target, {})[id_] = None
        elif attempt > self._paid.get(id_, 0):
            self._retries.setdefault(target, {})[id_, attempt] = None
            self._check(target, 0)

    def _check(self, target: str, left: int) -> None:
        spent = len(self._retries.get(target, ())) * RETRY_UNITS
        allowed = self._allowed(target)
        assert spent + left <= allowed + 1, f"{target}: {spent} and {left} of {allowed}"

    def _check_written(self, target: str, left: int) -> None:
        """Check the written remainder: retries paid for but not begun lower it."""
        self._check(target, left)
