"""A person retries everything that did not succeed, step by step, as musterctl does.

Checked: a step leaves room in the queues, refuses only where there is none, and what is told as
retried is on disk. When the supervisor dies, the command is typed again, and goes on.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from musterd.ipc.wire.messages import QUEUE_FULL, SUCCEEDED, Rejection
from musterd.supervisor.core.model.actions import Acknowledge, Persist
from musterd.supervisor.core.model.events import EndedFound, RetryRequested
from musterd.supervisor.core.model.queue import BULK_PERCENT
from musterd.supervisor.core.tasks.manual_retry import NOT_KNOWN
from musterd.supervisor.core.tasks.pauses import DRAINED
from simulation.profile import MS, SEC

if TYPE_CHECKING:
    from simulation.world import World

COMMANDS_MAX = 3
STEP_TASKS = 3


class BulkRetry:
    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = Random(world.seed + 1)  # separate, so that other choices stay the same
        self._left: list[str] = []
        self._asked: list[str] = []
        self._peer = b""  # of the step under way
        self._reopened: dict[str, None] = {}
        self._held: dict[str, int] = {}  # before a step, by pool
        self._full: dict[str, bool] = {}  # pools after it
        self.ended = 0  # commands that came to their end
        self.waits = 0  # steps that found a queue full

    def plan(self) -> None:
        world = self._world
        if world.profile.retries_by_hand:
            for _ in range(self._chance.randint(0, COMMANDS_MAX)):
                world.after(int(self._chance.random() * world.profile.faults_ns), self._begin)

    def new_life(self) -> None:
        if self._peer or self._left:
            self._world.in_life(self._delay(), self._begin)
        self._peer, self._left = b"", []

    def _delay(self) -> int:
        return int(1 * MS + self._chance.random() * SEC)

    def _begin(self) -> None:
        world = self._world
        if not world.up or world.is_calm or self._peer or self._left:
            return
        ended = reversed(world.store.finished.items())
        self._left = [id_ for id_, outcome in ended if outcome.state != SUCCEEDED]
        self._step()

    def _step(self) -> None:
        world = self._world
        if world.is_calm:  # nobody empties a queue that is full for good
            self._left = []
        if not self._left:
            self.ended += 1
            return
        self._asked, self._peer = self._left[:STEP_TASKS], world.new_caller()
        self._reopened.clear()
        wall_ns = world.now_ns + world.wall_offset_ns
        world.tell(RetryRequested(self._peer, 0, self._asked, wall_ns, in_bulk=True))

    # -- checks -------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        self._held = {}
        if isinstance(event, EndedFound) and event.requested.in_bulk:
            self._held = {name: pool.held for name, pool in self._world.fleet.pools.items()}

    def handled(self, event: Any, actions: list[Any]) -> None:
        added = dict.fromkeys(self._held, 0)
        for action in actions:
            if isinstance(action, Persist) and self._held:
                self._reopened.update((each.id, None) for each in action.reopened)
                for new in action.added:
                    added[new.pool] += 1
        if self._held:
            self._check_room(added)
        for action in actions:
            if isinstance(action, Acknowledge) and self._peer == action.peer != b"":
                self._answered(action.rejected)

    def _check_room(self, added: dict[str, int]) -> None:
        for name, pool in self._world.fleet.pools.items():
            limit = max(1, pool.policy.queue_size * BULK_PERCENT // 100)
            held = self._held[name] + added[name]
            assert held <= max(self._held[name], limit), f"{name} has no room for programs"
            self._full[name] = held >= limit or pool.halt == DRAINED

    def _answered(self, rejected: list[Rejection]) -> None:
        world, store = self._world, self._world.store
        why = {each.id: each for each in rejected}
        for id_ in self._asked:
            if id_ not in why:
                assert id_ in self._reopened, f"{id_} is told as retried and is not"
                there = id_ in store.live_ids or id_ in store.finished
                assert there, f"{id_} is told as retried and is not on disk"
            elif why[id_].message.endswith("is full"):
                pool = world.watch.specs[id_].name.partition(".")[0]
                assert self._full[pool], f"{id_} is refused, and {pool} has room"
        passes = (QUEUE_FULL, NOT_KNOWN)
        again = [id_ for id_ in self._asked if id_ in why and why[id_].code in passes]
        self.waits += bool(again)
        self._left = again + self._left[len(self._asked) :]
        self._peer = b""
        world.in_life(self._delay() if again else 0, self._step)
