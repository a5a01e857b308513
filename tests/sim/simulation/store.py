"""The disk: commits in groups, in order, after a while; what was committed survives everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from musterd.ipc.messages import Outcome, TaskSpec
from musterd.supervisor.core.actions import CheckResent, LookUp, Persist
from musterd.supervisor.core.events import Persisted, Recovered, ResendChecked, TasksRecovered
from simulation.profile import MS, US

if TYPE_CHECKING:
    from simulation.world import World

READ_NS = (50 * US, 20 * MS)
ANSWER_NS = (10 * US, 10 * MS)  # until the loop hears of it


@dataclass
class Row:
    seq: int
    spec: TaskSpec
    submitted_ns: int
    ready_ns: int
    attempt: int = 0
    crashes: int = 0
    interruptions: int = 0
    begun: bool = False

    @property
    def expires_at_ns(self) -> int:
        return self.submitted_ns + self.spec.expires_ns if self.spec.expires_ns else 0


class Store:
    def __init__(self, world: World) -> None:
        self._world = world
        self.live: dict[int, Row] = {}
        self.live_ids: dict[str, int] = {}
        self.finished: dict[str, Outcome] = {}
        self.last_seq = 0
        self.stuck = False  # it writes nothing any more in this life
        self._waiting: list[tuple[int, Persist]] = []
        self._busy = False
        self._unsaid = 0  # pages whose Persisted has not arrived
        self._said_ns = 0  # Persisted arrive in the order of the commits ...
        self._read_ns = 0  # ... and reads are done in their order, but beside the writes

    @property
    def settled(self) -> bool:
        """Whether everything written is on disk and said to be."""
        return not self._unsaid

    # -- writing ------------------------------------------------------------------------------

    def write(self, page: Persist) -> None:
        self._waiting.append((self._world.now_ns, page))
        self._unsaid += 1
        if not self._busy:
            self._start_group()

    def _start_group(self) -> None:
        world = self._world
        self._busy = True
        group, self._waiting = self._waiting, []
        world.in_life(world.delay(*world.profile.disk_ns), self._commit, group)

    def _commit(self, group: list[tuple[int, Persist]]) -> None:
        """One transaction: from here on it is on disk, whether or not anybody hears of it."""
        world = self._world
        if self.stuck:
            return
        for asked_ns, page in group:
            self._apply(asked_ns, page)
        self._said_ns = max(self._said_ns, world.now_ns + world.delay(*ANSWER_NS))
        world.in_life(self._said_ns - world.now_ns, self._say, group[-1][1].ticket, len(group))
        self._busy = False
        if self._waiting:
            self._start_group()

    def _say(self, ticket: int, pages: int) -> None:
        """One word for the whole group."""
        self._unsaid -= pages
        self._world.tell(Persisted(ticket))

    def _apply(self, asked_ns: int, page: Persist) -> None:
        for new in page.added:
            id_ = new.spec.id
            assert new.seq > self.last_seq, f"seq {new.seq} was used before ({self.last_seq})"
            assert id_ not in self.live_ids, f"task {id_} was added twice"
            assert id_ not in self.finished, f"task {id_} was added after its end"
            self.last_seq = new.seq
            self.live_ids[id_] = new.seq
            submitted_ns = new.submitted_wall_ns - self._world.wall_offset_ns
            self.live[new.seq] = Row(
                new.seq, new.spec, submitted_ns, submitted_ns + new.spec.delay_ns
            )
        for change in page.changed:
            row = self.live.get(change.seq)
            assert row is not None, f"seq {change.seq} was changed but is not live"
            row.attempt = change.attempt
            row.crashes = change.crashes
            row.interruptions = change.interruptions
            row.begun = change.begun
            row.ready_ns = asked_ns + change.wait_ns
        for final in page.finished:
            row = self.live.pop(final.seq, None)
            assert row is not None, f"task {final.spec.id} (seq {final.seq}) ended but is not live"
            assert row.spec == final.spec, f"task {final.spec.id} ended with another body"
            assert final.outcome.id not in self.finished, f"task {final.spec.id} ended twice"
            del self.live_ids[final.outcome.id]
            self.finished[final.outcome.id] = final.outcome

    # -- reading ------------------------------------------------------------------------------

    def check_resent(self, action: CheckResent) -> None:
        self._read(self._check, action)

    def look_up(self, action: LookUp) -> None:
        self._read(self._find, action)

    def _read(self, call: Callable[[Any], None], action: CheckResent | LookUp) -> None:
        world = self._world
        self._read_ns = max(self._read_ns, world.now_ns + world.delay(*READ_NS))
        world.in_life(self._read_ns - world.now_ns, call, action)

    def _check(self, action: CheckResent) -> None:
        ids = [spec.id for spec in action.submitted.tasks]
        known = frozenset(id_ for id_ in ids if id_ in self.finished)
        world = self._world
        answer = ResendChecked(action.submitted, known)
        world.in_life(world.delay(*ANSWER_NS), world.tell, answer)

    def _find(self, action: LookUp) -> None:
        missing = [id_ for id_ in action.ids if id_ not in self.finished]
        self._world.watch.missing(missing)
        found = [self.finished[id_] for id_ in action.ids if id_ in self.finished]
        self._world.send_outcomes(action.peer, found)
        self._world.send_missing(action.peer, missing)

    # -- between two lives --------------------------------------------------------------------

    def lose_power(self) -> None:
        """The supervisor is gone: what was not committed never happened."""
        self._waiting = []
        self._busy = self.stuck = False
        self._unsaid = 0

    def recover(self) -> TasksRecovered:
        return TasksRecovered(
            [
                Recovered(
                    row.seq,
                    row.spec,
                    row.submitted_ns + self._world.wall_offset_ns,
                    row.ready_ns,
                    row.expires_at_ns,
                    row.attempt,
                    row.crashes,
                    row.interruptions,
                    row.begun,
                )
                for row in self.live.values()
            ]
        )
