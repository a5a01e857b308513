"""The disk: it commits in groups, in order, after a while; committed data survives everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from musterd.ipc.wire.messages import SUCCEEDED, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import (
    AttemptRecord,
    CheckResent,
    FindEnded,
    FindStranded,
    LookUp,
    Persist,
    ReadDiskTasks,
    ReopenRecord,
    Withdraw,
)
from musterd.supervisor.core.model.events import (
    DiskTasksRead,
    EndedFound,
    EndedTask,
    EndedUnknown,
    LookedUp,
    OnDisk,
    Persisted,
    Recovered,
    ResendChecked,
    ResendUnknown,
    StoreFailing,
    StoreRecovered,
    StrandedFound,
    TasksRecovered,
    TasksWithdrawn,
)
from simulation.clients import CALLER
from simulation.profile import MS, US

if TYPE_CHECKING:
    from simulation.world import World

READ_NS = (50 * US, 20 * MS)
ANSWER_NS = (10 * US, 10 * MS)  # until the loop hears of a commit
RETRY_NS = (300 * MS, 1200 * MS)  # after a failed commit
TORN = 0.3  # share of failed commits that are complete in the log


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
        self.full = False  # nothing fits for a while
        self._failing = False  # and the supervisor knows
        self._withdrawn: dict[int, None] = {}
        self._chance = Random(world.seed)  # separate, so that other random choices stay the same
        self._torn: list[tuple[int, Persist]] = []  # failed to sync, but may be in the log
        self._doubtful = 0  # the largest seq of those
        self._former: dict[str, int] = {}  # the seq of a finished task
        self.attempts: dict[int, list[AttemptRecord]] = {}  # failed attempts, by seq
        self.live: dict[int, Row] = {}
        self.live_ids: dict[str, int] = {}
        self.finished: dict[str, Outcome] = {}
        self._facts: dict[tuple[str, str], tuple[bytes, int]] = {}  # with its expiry, 0 for never
        self.last_seq = 0
        self.stuck = False  # writes nothing more in this life
        self._waiting: list[tuple[int, Persist]] = []
        self._busy = False
        self._unsaid = 0  # pages whose Persisted has not arrived
        self._said_ns = 0  # Persisted events arrive in the order of the commits ...
        self._read_ns = 0  # ... and reads in their own order, beside the writes

    @property
    def settled(self) -> bool:
        """Tell whether everything written is on disk and reported."""
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
        """Commit one transaction: from here on it is on disk, whether or not it is reported."""
        world = self._world
        if self.stuck:
            return
        if self.full:
            self._failing = True
            self._tear(group)
            world.in_life(world.delay(*ANSWER_NS), self._say_failing)
            world.in_life(world.delay(*RETRY_NS), self._commit, group)
            return
        self._works_again()
        self._torn = []  # it is overwritten
        for asked_ns, page in group:
            self._apply(asked_ns, page)
        self._said_ns = max(self._said_ns, world.now_ns + world.delay(*ANSWER_NS))
        world.in_life(self._said_ns - world.now_ns, self._say, group[-1][1].ticket, len(group))
        self._busy = False
        if self._waiting:
            self._start_group()

    def _tear(self, group: list[tuple[int, Persist]]) -> None:
        """Let some commits fail only at their sync, with everything written."""
        if self._chance.random() < TORN:
            seqs = [new.seq for _, page in group for new in page.news()]
            kept = [seq for seq in seqs if seq not in self._withdrawn]
            if kept == seqs:  # else the transaction has changed
                self._torn = group
                self._doubtful = max([self._doubtful, *seqs])

    def _say_failing(self) -> None:
        if self._failing:
            self._world.tell(StoreFailing("the disk is full"))

    def _works_again(self) -> None:
        if self._failing:
            self._failing = False
            self._world.tell(StoreRecovered())

    def withdraw(self, action: Withdraw) -> None:
        self._world.in_life(self._world.delay(*RETRY_NS), self._withdraw, action)

    def _withdraw(self, action: Withdraw) -> None:
        """Leave out withdrawn tasks whose seq is beyond the last one written."""
        gone = [seq for seq in action.seqs if seq > max(self.last_seq, self._doubtful)]
        self._withdrawn.update(dict.fromkeys(gone))
        world = self._world
        # Reported before any commit that leaves them out.
        self._said_ns = max(self._said_ns, world.now_ns + world.delay(*ANSWER_NS))
        world.in_life(self._said_ns - world.now_ns, world.tell, TasksWithdrawn(gone))

    def _say(self, ticket: int, pages: int) -> None:
        """Report the whole group at once."""
        self._unsaid -= pages
        self._world.tell(Persisted(ticket))

    def _apply(self, asked_ns: int, page: Persist) -> None:
        for reopened in page.reopened:
            if reopened.seq not in self._withdrawn:
                self._reopen(reopened)
        for new in page.news():
            id_ = new.spec.id
            if new.seq in self._withdrawn:
                self._world.watch.withdrawn(new)
                self.last_seq = new.seq
                continue
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
            assert change.seq not in self._withdrawn, f"seq {change.seq} is changed, yet withdrawn"
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
            self._former[final.outcome.id] = final.seq
        for failed in page.failed:
            attempts = self.attempts.setdefault(failed.seq, [])
            assert failed.ordinal == len(attempts) + 1, f"{failed} after {len(attempts)} others"
            attempts.append(failed)
        for final in page.finished:
            self._world.watch.stored_end(final, self.attempts.pop(final.seq, []))
        for fact in page.facts:
            if fact.value is None:
                self._facts.pop((fact.kind, fact.key), None)
            else:
                end_ns = asked_ns + fact.ttl_ns if fact.ttl_ns else 0
                self._facts[fact.kind, fact.key] = (fact.value, end_ns)

    def _reopen(self, reopened: ReopenRecord) -> None:
        outcome = self.finished.pop(reopened.id, None)
        assert outcome is not None, f"{reopened.id} is reopened and has not ended"
        assert outcome.state != SUCCEEDED, f"{reopened.id} is reopened and has succeeded"
        assert self._former.pop(reopened.id) == reopened.former_seq, reopened

    # -- reading ------------------------------------------------------------------------------

    def check_resent(self, action: CheckResent) -> None:
        self._read(self._check, action)

    def find_stranded(self, action: FindStranded) -> None:
        self._read(self._find_stranded, action)

    def _find_stranded(self, action: FindStranded) -> None:
        world = self._world
        rows = [row for row in self.live.values() if row.spec.name.startswith(f"{action.pool}.")]
        rows = sorted([row for row in rows if row.seq > action.after_seq], key=lambda row: row.seq)
        size = world.rng.choice((1, 7, 1000))
        tasks = [self._recovered(row) for row in rows[:size]]
        after_seq = rows[size - 1].seq if len(rows) > size else 0
        answer = StrandedFound(action.pool, action.request, tasks, after_seq)
        world.in_life(world.delay(*ANSWER_NS), self._say_stranded, answer)

    def _say_stranded(self, answer: StrandedFound) -> None:
        self._world.watch.recovered(answer)
        self._world.tell(answer)

    def look_up(self, action: LookUp) -> None:
        self._read(self._find, action)

    def _read(self, call: Callable[[Any], None], action: Any) -> None:
        world = self._world
        self._read_ns = max(self._read_ns, world.now_ns + world.delay(*READ_NS))
        world.in_life(self._read_ns - world.now_ns, call, action)

    def unreadable(self) -> bool:
        """Tell whether this answer cannot be read."""
        share = 0.0 if self._world.is_calm else self._world.profile.unreadable
        return bool(share) and self._chance.random() < share

    def _check(self, action: CheckResent) -> None:
        submitted, world = action.submitted, self._world
        if self.unreadable():
            world.in_life(world.delay(*ANSWER_NS), world.tell, ResendUnknown(submitted))
            return
        finished = frozenset(each.id for each in submitted.tasks if each.id in self.finished)
        live = {
            spec.id: self.live[self.live_ids[spec.id]].spec
            for spec in submitted.tasks
            if spec.id in self.live_ids
        }
        answer = ResendChecked(submitted, finished, frozenset(live), live)
        world.in_life(world.delay(*ANSWER_NS), self._say_checked, answer)

    def _say_checked(self, answer: ResendChecked) -> None:
        """Report the lookup, unless the client is gone."""
        peer = answer.submitted.peer
        if not peer.startswith(CALLER) and self._world.client_of(peer) is None:
            answer = replace(answer, submitted=replace(answer.submitted, peer=b""))
        self._world.tell(answer)

    def find_ended(self, action: FindEnded) -> None:
        self._read(self._find_ended, action)

    def _find_ended(self, action: FindEnded) -> None:
        world = self._world
        if self.unreadable():
            unknown = EndedUnknown(action.requested, action.ids, action.rejected)
            world.in_life(world.delay(*ANSWER_NS), world.tell, unknown)
            return
        ended = [
            EndedTask(self._former[id_], world.watch.specs[id_], self.finished[id_].state)
            for id_ in action.ids
            if id_ in self.finished
        ]
        answer = EndedFound(action.requested, action.ids, ended, action.rejected)
        world.in_life(world.delay(*ANSWER_NS), world.tell, answer)

    def read_disk_tasks(self, action: ReadDiskTasks) -> None:
        world = self._world
        missing = [id_ for id_ in action.ids if id_ not in self.live_ids]
        assert not missing, f"{missing} are to be read and not on disk"
        world.in_life(world.delay(*READ_NS), self._read_page, action)

    def _read_page(self, action: ReadDiskTasks) -> None:
        """Read a page; the loop hears of it at once, with the commits before it."""
        ids = action.ids
        unread = []
        if self._world.rng.random() < 0.2:  # its tasks are large
            ids, unread = ids[:1], ids[1:]
        rows = [self.live[self.live_ids[id_]] for id_ in ids if id_ in self.live_ids]
        if self._world.rng.random() < 0.2:  # in any order
            self._world.rng.shuffle(rows)
        tasks = OnDisk()
        for row in rows:
            tasks.add(row.seq, row.spec, row.submitted_ns + self._world.wall_offset_ns)
            changes = row.attempt + row.crashes + row.interruptions + row.begun
            # A task that is to be cancelled may have become due while it was read.
            there = row.spec.id in self._world.fleet.on_disk
            assert not (changes and there), f"{row} was not to be in the disk queue"
        self._world.tell(DiskTasksRead(action.ticket, tasks, unread))

    def _find(self, action: LookUp) -> None:
        if self.unreadable():
            self._world.drop_connection(action.peer)
            return
        found = [self.finished[id_] for id_ in action.ids if id_ in self.finished]
        self._world.send_outcomes(action.peer, found)
        rest = [id_ for id_ in action.ids if id_ not in self.finished]
        live = [self.live[self.live_ids[id_]].spec for id_ in rest if id_ in self.live_ids]
        absent = [id_ for id_ in rest if id_ not in self.live_ids]
        if rest:
            unfinished = [(spec.id, spec.name.partition(".")[0]) for spec in live]
            self._world.tell(LookedUp(action.peer, unfinished, absent))

    def fact(self, kind: str, key: str) -> bytes | None:
        value, end_ns = self._facts.get((kind, key), (None, 0))
        return None if 0 < end_ns <= self._world.now_ns else value

    def facts(self, kind: str) -> list[tuple[str, bytes]]:
        found = [(key, self.fact(kind, key)) for of, key in sorted(self._facts) if of == kind]
        return [(key, value) for key, value in found if value is not None]

    # -- between two lives --------------------------------------------------------------------

    def lose_power(self) -> None:
        """End the supervisor: uncommitted data is gone, or is complete in the log."""
        if self._torn and self._chance.random() < 0.5:
            torn = [new.seq for _, page in self._torn for new in page.news()]
            refused = [seq for seq in torn if seq in self._withdrawn]
            assert not refused, f"{refused} were refused and are in the log"
            for asked_ns, page in self._torn:
                self._apply(asked_ns, page)
        self._torn = []
        self._waiting = []
        self._busy = self.stuck = self._failing = False
        self._withdrawn.clear()
        self._unsaid = 0

    def recover(self) -> list[TasksRecovered]:
        """Return all live tasks, in pages."""
        tasks = [self._recovered(row) for row in self.live.values()]
        size = self._world.rng.choice((1, 7, 1000))
        pages = [tasks[start : start + size] for start in range(0, len(tasks), size)]
        return [*(TasksRecovered(page, more=True) for page in pages), TasksRecovered([])]

    def _recovered(self, row: Row) -> Recovered:
        return Recovered(
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
