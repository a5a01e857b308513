"""The disk queue: queued tasks that are only on disk. A million of them are not a million objects.

A pool keeps at most `resident_tasks` tasks (or `resident_bytes` of arguments) in memory. A task
queued beyond that joins the disk tail of its lane: an ordered list of ids (`Lane.disk_ids`) behind
the lane's tasks in memory.

    push ──► [ Lane.tasks, in memory ] ◄── page ── [ Lane.disk_ids ] ◄── push, once there is a tail

What is kept of a task. Its id in the tail, and a `Place`: its lane and the client that waits. One
Place serves all tasks of a lane from one client, so the cost is about an id and a dict entry.
Further clients are in `watchers`. Everything else is in the task's row in the store.

Which tasks may go. Only plain ones (`_is_plain`): never run, unchanged since they were stored. So a
read always returns what was put. A task with a key, an expiry or a history stays in memory, and
only its id stands in the tail (`Task.behind`, counted in `Lane.kept`): the order of a lane holds.

The way back. When few tasks of a lane are left in memory (PAGES_AHEAD pages), `check` puts the lane
on the list of wanted pages. At the end of the event `turn` takes the next ids from each such lane,
a Portion, and asks the store for all of them (ReadDiskTasks). The store reads while workers work;
its answer appends the tasks to the lane. A lane that runs dry before its page arrives leaves the
ring and waits, as at a closed gate. With many lanes the pages are smaller, so that memory
stays bounded (PAGED_MAX).

Tasks still being written are in the tail too (unwritten.py): a page ends before the first of them.

Dead entries. A task that ends while its id is in the tail, or on its way from there, leaves the id
behind. `Level.dead` counts such entries; they are skipped on the way back, or swept.

What is counted, and checked by `validate`:

    Lane.alive       tasks in the lane
    Lane.behind      those in the tail or on their way from it, `Lane.kept` of them in memory
    PoolQueue.on_disk  those of the pool that are only on disk
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from musterd.ipc.wire.messages import CANCELLED, LOW, NOT_GIVEN
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import ReadDiskTasks
from musterd.supervisor.core.model.gates import WaitingLanes
from musterd.supervisor.core.model.lanes import Lane, Level, Place
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.core.model.queue import UNKNOWN_COST_NS, PoolQueue
from musterd.supervisor.core.model.runs import RUN_PREFIX
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Route, Task, TaskState, add_watcher

PAGES_AHEAD = 2  # a lane with no more pages in memory orders the next one: a read takes time
PAGED_MAX = 10_000  # tasks in the pages of all lanes: with many lanes, pages are smaller ...
PAGE_MIN = 4  # ... but never one read per task


class Portion(Struct, gc=False):
    """The next ids of one lane, on their way from the disk."""

    lane: Lane
    ids: list[str]
    asked: list[str]  # those that are only on disk


class DiskQueue:
    def __init__(self, state: State, end: Callable[[Task, str], None]) -> None:
        self._state = state
        self._end = end
        self.places: dict[str, Place] = {}  # by id: all tasks that are only on disk
        self._last: Place | None = None  # the last one made, for the next task alike
        self.watchers: dict[str, dict[bytes, None]] = {}  # by id: clients besides Place.peer
        self.used = 0  # lanes with a disk tail
        self._page_max = state.policy.page_tasks
        self._page = self._page_max
        self._wanted: dict[Lane, None] = {}  # lanes that need their next page
        self.waiting = WaitingLanes()  # lanes that ran dry before their page arrived
        self._ticket = 0
        self.reading: dict[int, list[Portion]] = {}  # by the ticket of the read
        self._cancelling: dict[int, events.CancelRequested] = {}

    # -- to disk ------------------------------------------------------------------------------

    def put(self, lane: Lane, task: Task) -> None:
        """Append a task to the disk tail of its lane."""
        spec = task.spec
        self._open(lane).append(spec.id)
        lane.behind += 1
        if lane.alive == lane.behind:
            self.check(lane)
        if not _is_plain(task):
            task.behind = True
            lane.kept += 1
            return
        assert not task.early, spec.id
        queue = lane.level.queue
        queue.on_disk += 1
        queue.leaves_memory(spec)
        self.places[spec.id] = self._place(lane, task.peer)
        task.lane = task.gate = None
        del self._state.tasks[spec.id]

    def put_many(self, lane: Lane, tasks: list[Task], now_ns: int) -> None:
        """Append new tasks without keys, which the lane has counted already."""
        known, places, put = self._state.tasks, self.places, self._open(lane).append
        place = self._place(lane, b"")
        count = size = 0
        for task in tasks:
            id_ = task.spec.id
            put(id_)
            if task.watchers or id_[0] == RUN_PREFIX:
                task.state, task.queued_ns = TaskState.QUEUED, now_ns
                task.lane, task.behind = lane, True
                lane.kept += 1
                continue
            if task.peer != place.peer:
                place = self._place(lane, task.peer)
            places[id_] = place
            del known[id_]
            count += 1
            size += len(task.spec.args)
        lane.behind += len(tasks)
        lane.level.queue.went_to_disk(count, size)
        if lane.alive == lane.behind:
            self.check(lane)

    def put_unwritten(self, lane: Lane, places: dict[str, Place]) -> None:
        """Append tasks that are still being written and were never objects."""
        self._open(lane).extend(places)
        self.places.update(places)
        lane.behind += len(places)
        lane.level.count(lane, len(places))
        lane.level.queue.on_disk += len(places)

    def forget(self, id_: str) -> dict[bytes, None] | None:
        """Drop the place of a task; return its further watchers."""
        del self.places[id_]
        return self.watchers.pop(id_, None)

    def leave(self, lane: Lane, count: int) -> None:
        """Uncount tasks of a lane whose places were dropped."""
        level = lane.level
        level.dead += count
        level.queue.on_disk -= count
        lane.behind -= count
        level.count(lane, -count)
        if not lane.alive:
            level.emptied(lane)
        else:
            self.check(lane)

    def _place(self, lane: Lane, peer: bytes) -> Place:
        last = self._last
        if last is None or last.lane is not lane or last.peer != peer:
            last = self._last = Place(lane, peer)
        return last

    def _open(self, lane: Lane) -> deque[str]:
        """Return the disk tail of a lane, a new one if there is none."""
        if not lane.disk_ids:
            lane.disk_ids = deque()
            self._count_lanes(1)
        return lane.disk_ids

    def _count_lanes(self, change: int) -> None:
        self.used += change
        page = max(PAGE_MIN, PAGED_MAX // max(1, self.used))
        self._page = min(page, self._page_max)

    def check(self, lane: Lane) -> None:
        """Order the next page of a lane if few of its tasks are left in memory."""
        left = lane.alive - lane.behind
        if lane.disk_ids and not lane.reading and left <= PAGES_AHEAD * self._page:
            self._wanted[lane] = None

    def clear(self, lane: Lane) -> None:
        """Drop the disk tail of a lane in which nothing is alive."""
        if lane.disk_ids:
            lane.level.dead -= len(lane.disk_ids)
            lane.disk_ids = None
            self._count_lanes(-1)

    def sweep(self, lane: Lane) -> int:
        """Drop the dead entries of a lane; return their number."""
        if not lane.disk_ids:
            return 0
        left = deque([id_ for id_ in lane.disk_ids if self._alive(lane, id_)])
        dropped = len(lane.disk_ids) - len(left)
        lane.disk_ids = left
        if not left:
            lane.disk_ids = None
            self._count_lanes(-1)
        return dropped

    def _alive(self, lane: Lane, id_: str) -> bool:
        return self.is_place(lane, id_) or self.kept(lane, id_) is not None

    def is_place(self, lane: Lane, id_: str) -> bool:
        """Whether the task is only on disk, and in this lane."""
        place = self.places.get(id_)
        return place is not None and place.lane is lane

    def kept(self, lane: Lane, id_: str) -> Task | None:
        """Return the task in memory that keeps its place in this tail by its id."""
        task = self._state.tasks.get(id_)
        return task if task is not None and task.behind and task.lane is lane else None

    # -- and back to memory -------------------------------------------------------------------

    def turn(self) -> bool:
        """Order the wanted pages; return whether some tasks came back at once."""
        if not self._wanted:
            return False
        wanted, self._wanted = self._wanted, {}
        portions: list[Portion] = []
        count, at_once = 0, False
        for lane in wanted:
            if not lane.disk_ids:
                continue  # all of it has ended since
            portion = self._take(lane)
            if not portion.ids:  # the next task is still being written
                continue
            if not portion.asked:  # all of these are in memory, or gone
                self._arrive(portion, {}, frozenset())
                at_once = True
                continue
            portions.append(portion)
            count += len(portion.asked)
            if count >= self._page_max:
                self._read(portions)
                portions, count = [], 0
        if portions:
            self._read(portions)
        return at_once

    def _take(self, lane: Lane) -> Portion:
        """Take the next page from a lane: empty while its first task is being written."""
        disk_ids, places = lane.disk_ids, self.places
        assert disk_ids and not lane.reading, lane.key
        ids = asked = list(islice(disk_ids, self._page))
        if lane.kept or lane.level.dead or not places[ids[-1]].written:
            ids, asked = self._sort_out(lane, ids)
        for _ in ids:
            disk_ids.popleft()
        lane.reading = bool(ids)
        if not disk_ids:
            lane.disk_ids = None
            self._count_lanes(-1)
        return Portion(lane, ids, asked)

    def _sort_out(self, lane: Lane, ids: list[str]) -> tuple[list[str], list[str]]:
        """Return the ids before the first unwritten one, and those that are only on disk."""
        asked: list[str] = []
        for number, id_ in enumerate(ids):
            if self.is_place(lane, id_):
                if not self.places[id_].written:
                    return ids[:number], asked
                asked.append(id_)
        return ids, asked

    def _read(self, portions: list[Portion]) -> None:
        self._ticket += 1
        self.reading[self._ticket] = portions
        ids = [id_ for portion in portions for id_ in portion.asked]
        self._state.out.append(ReadDiskTasks(self._ticket, ids))

    def read(self, event: events.DiskTasksRead) -> events.CancelRequested | None:
        """Take the answer to ReadDiskTasks; return what is left of a cancel, if it was for one."""
        unread = frozenset(event.unread)
        cancel = self._cancelling.pop(event.ticket, None)
        if cancel is not None:
            return self._cancel_read(cancel, self._made(event.tasks), unread)
        portions = self.reading.pop(event.ticket)
        if len(portions) != 1 or not self._arrive_whole(portions[0], event.tasks):
            made = self._made(event.tasks)
            for portion in portions:
                self._arrive(portion, made, unread)
        return None

    def _made(self, found: OnDisk) -> dict[str, Task]:
        """Make tasks of those that are still only on disk, by id."""
        here = OnDisk()
        peers: list[bytes] = []
        for seq, spec, wall_ns in zip(found.seqs, found.specs, found.submits_wall_ns, strict=True):
            place = self.places.get(spec.id)
            if place is not None:
                here.add(seq, spec, wall_ns)
                peers.append(place.peer)
        return {task.spec.id: task for task in _make_all(self._state, here, None, peers)}

    def _arrive_whole(self, portion: Portion, found: OnDisk) -> bool:
        """Append a page that came as it was asked for, untouched meanwhile; False if it did not."""
        lane, ids = portion.lane, portion.ids
        if self.watchers or [spec.id for spec in found.specs] != ids:
            return False
        places = [self.places.get(id_) for id_ in ids]
        if any(place is None or place.lane is not lane for place in set(places)):
            return False
        peers = [place.peer for place in places if place is not None]
        tasks = _make_all(self._state, found, lane, peers)
        self._state.tasks.update(zip(ids, tasks, strict=True))
        lane.tasks.extend(tasks)
        for id_ in ids:
            del self.places[id_]
        self._arrived(lane, len(ids), sum([len(spec.args) for spec in found.specs]))
        return True

    def _arrive(self, portion: Portion, made: dict[str, Task], unread: frozenset[str]) -> None:
        lane, ids, places = portion.lane, portion.ids, self.places
        brought = size = 0
        for number, id_ in enumerate(ids):
            task, place = made.get(id_), places.get(id_)
            if place is None or place.lane is not lane:
                self._arrive_from_memory(lane, id_)
            elif task is not None:
                task.lane, task.gate = lane, lane.gate
                task.watchers = self.forget(id_)
                self._state.tasks[id_] = task
                lane.tasks.append(task)
                brought += 1
                size += len(task.spec.args)
            elif id_ in unread:
                self._put_back(lane, ids[number:])
                break
            elif id_ in portion.asked:
                self._lose(lane, id_)
            else:
                lane.level.dead -= 1  # the task ended; its id is back, from another submit
        self._arrived(lane, brought, size)

    def _arrived(self, lane: Lane, count: int, size: int) -> None:
        """Count tasks of a lane that are in memory again, with `size` bytes of arguments."""
        lane.reading = False
        lane.behind -= count
        lane.level.queue.came_from_disk(count, size)
        if not self.let_in(lane) and lane.gate is not None and lane.level.queue.keeper is not None:
            lane.level.queue.keeper.pushed(lane.gate)  # tasks may not want to wait for their site
        self.check(lane)

    def let_in(self, lane: Lane) -> bool:
        """Return a lane that has tasks in memory to its ring; whether it waited for them."""
        if lane.waits_among is not self.waiting:
            return False
        self.waiting.remove(lane)
        lane.level.list_again(lane)
        return True

    def _put_back(self, lane: Lane, ids: list[str]) -> None:
        self._open(lane).extendleft(reversed(ids))

    def _arrive_from_memory(self, lane: Lane, id_: str) -> None:
        """Append a task that kept only its place in the tail, unless it has ended."""
        kept = self.kept(lane, id_)
        if kept is None:
            lane.level.dead -= 1
        else:
            kept.behind = False
            lane.behind -= 1
            lane.kept -= 1
            lane.tasks.append(kept)

    def _lose(self, lane: Lane, id_: str) -> None:
        """Drop a task that is on disk and cannot be read."""
        self.forget(id_)
        queue = lane.level.queue
        queue.on_disk -= 1
        lane.behind -= 1
        lane.level.count(lane, -1)
        pool = next(each for each in self._state.pools.values() if each.queue is queue)
        pool.live -= 1
        reason = f"task {id_} cannot be read; it is left in the store"
        self._state.report("task.unreadable", "error", pool=pool, reason=reason)

    # -- what clients ask ---------------------------------------------------------------------

    def watch(self, id_: str, peer: bytes) -> None:
        """Note that a client waits for a task that is only on disk."""
        if not peer:
            return
        place = self.places[id_]
        if not place.peer and place.written:
            self.places[id_] = self._place(place.lane, peer)
        elif place.peer != peer:
            add_watcher(self.watchers.setdefault(id_, {}), peer)

    def forget_peers(self, id_: str, lost: dict[bytes, None]) -> None:
        """Forget clients that waited for a task that is only on disk."""
        place = self.places.get(id_)
        if place is not None and place.peer in lost:
            place.peer = b""  # for all tasks that share the place
        watchers = self.watchers.get(id_)
        if watchers is not None and not watchers.keys().isdisjoint(lost):
            self.watchers[id_] = left = {each: None for each in watchers if each not in lost}
            if not left:
                del self.watchers[id_]

    def cancel(self, event: events.CancelRequested) -> None:
        """Cancel tasks that are only on disk: page by page, as they are read."""
        self._ticket += 1
        self._cancelling[self._ticket] = event
        self._state.out.append(ReadDiskTasks(self._ticket, event.ids[: self._page_max]))

    def _cancel_read(
        self, event: events.CancelRequested, made: dict[str, Task], unread: frozenset[str]
    ) -> events.CancelRequested:
        """Cancel what was read; return the rest: not read yet, or in memory meanwhile."""
        left = event.ids[self._page_max :]
        for id_ in event.ids[: self._page_max]:
            place = self.places.get(id_)
            if place is None or id_ in unread:
                left.append(id_)
            else:
                self._withdraw(place.lane, id_, made.get(id_))
        return replace(event, ids=left)

    def _withdraw(self, lane: Lane, id_: str, task: Task | None) -> None:
        lane.level.dead += 1  # its id in the tail, or on the way from there
        if task is None:
            self._lose(lane, id_)
        else:
            task.watchers = self.forget(id_)
            self._state.tasks[id_] = task
            lane.level.queue.came_from_disk(1, len(task.spec.args))
            lane.behind -= 1
            lane.level.count(lane, -1)
            task.cancelled = True
            self._end(task, CANCELLED)
        if not lane.alive:
            lane.level.emptied(lane)
        else:
            self.check(lane)

    def drop(self, queue: PoolQueue) -> dict[str, dict[bytes, None]]:
        """Leave the disk tails of a removed pool to the store; return ids and their watchers."""
        dropped: dict[str, dict[bytes, None]] = {}
        here = [id_ for id_, at in self.places.items() if at.lane.level.queue is queue]
        for id_ in here:
            peer = self.places.pop(id_).peer
            dropped[id_] = {**({peer: None} if peer else {}), **self.watchers.pop(id_, {})}
        for lane in [lane for level in queue.levels for lane in level.lanes.values()]:
            self._wanted.pop(lane, None)
            if lane.disk_ids:
                lane.disk_ids = None
                self._count_lanes(-1)
        for portions in self.reading.values():
            portions[:] = [each for each in portions if each.lane.level.queue is not queue]
        queue.on_disk = 0
        return dropped

    @property
    def cancels(self) -> bool:
        """Whether tasks are being read in order to cancel them."""
        return bool(self._cancelling)

    def dead_in(self, level: Level) -> int:
        """Count the dead entries of a level; for validate()."""
        entries = sum(len(lane.disk_ids or ()) - lane.behind for lane in level.lanes.values())
        for portions in self.reading.values():
            entries += sum(len(each.ids) for each in portions if each.lane.level is level)
        return entries

    def validate(self) -> None:
        """Check everything that must always hold; for tests and the simulation."""
        on_the_way: dict[Lane, list[str]] = {}
        for portions in self.reading.values():
            for portion in portions:
                on_the_way.setdefault(portion.lane, []).extend(portion.ids)
                assert all(self.places[id_].written for id_ in portion.asked if id_ in self.places)
        tasks = self._state.tasks
        assert not any(id_ in tasks for id_ in self.places)
        assert all(id_ in self.places for id_ in self.watchers)
        behind = self._behind()
        used = 0
        for pool in self._state.pools.values():
            on_disk = 0
            for level in pool.queue.levels:
                for lane in level.lanes.values():
                    used += bool(lane.disk_ids)
                    assert lane.behind == behind.pop(lane, 0), lane.key
                    assert bool(lane.reading) == (lane in on_the_way), lane.key
                    ids = {*(lane.disk_ids or ()), *on_the_way.get(lane, ())}
                    here = [id_ for id_ in ids if self.is_place(lane, id_)]
                    kept = [id_ for id_ in ids if self.kept(lane, id_) is not None]
                    assert len(here) + len(kept) == lane.behind, lane.key
                    assert len(kept) == lane.kept, lane.key
                    on_disk += len(here)
                    moves = lane.alive > lane.behind or lane.reading or self._first_unwritten(lane)
                    assert moves or not lane.behind, lane.key
                    waits = lane.waits_among is self.waiting
                    assert not waits or lane.alive == lane.behind, f"{lane.key} waits for nothing"
            assert on_disk == pool.queue.on_disk, (pool.name, on_disk, pool.queue.on_disk)
        assert not behind, behind
        assert used == self.used, (used, self.used)

    def _behind(self) -> dict[Lane, int]:
        """Count the tasks of each lane in its disk tail, or on their way from there."""
        behind: dict[Lane, int] = {}
        for place in self.places.values():
            behind[place.lane] = behind.get(place.lane, 0) + 1
        for task in self._state.tasks.values():
            if task.behind:
                assert task.lane is not None and task.state == TaskState.QUEUED, task.spec.id
                behind[task.lane] = behind.get(task.lane, 0) + 1
        return behind

    def _first_unwritten(self, lane: Lane) -> bool:
        """Whether the first live task of the disk tail is still being written."""
        for id_ in lane.disk_ids or ():
            if self.is_place(lane, id_):
                return not self.places[id_].written
            if self.kept(lane, id_) is not None:
                return False
        return False


def _is_plain(task: Task) -> bool:
    """Whether the row of a task, and one client that waits, is all there is to know of it."""
    spec = task.spec
    return not (
        task.attempt
        or task.crashes
        or task.interruptions
        or task.expires_at_ns
        or task.cancelled
        or task.watchers
        or task.urged != LOW
        or spec.key
        or spec.id.startswith(RUN_PREFIX)
    )


def _make_all(state: State, found: OnDisk, lane: Lane | None, peers: Iterable[bytes]) -> list[Task]:
    """Make tasks of rows, each for its client in `peers`; queued in `lane`, if one is given."""
    now_ns, offset_ns = state.now_ns, state.wall_offset_ns
    if offset_ns is None:  # the wall clock cannot tell since when tasks wait
        offset_ns = -now_ns
    gate = lane.gate if lane is not None else None
    specs, walls = found.specs, found.submits_wall_ns
    routes = {name: _route(state, name) for name in {spec.name for spec in specs}}
    queued = TaskState.QUEUED
    return [
        Task(
            seq,
            spec,
            routes[spec.name],
            wall_ns,
            peer,
            queued,
            since_ns if (since_ns := wall_ns + spec.delay_ns - offset_ns) < now_ns else now_ns,
            lane,
            gate,
        )
        for seq, spec, wall_ns, peer in zip(found.seqs, specs, walls, peers, strict=True)
    ]


def _route(state: State, name: str) -> Route:
    pool = state.pools[name.partition(".")[0]]
    route = pool.route(name)
    if route is None:  # the worker class has changed meanwhile: the worker has the last word
        route = Route(pool, name, name.partition(".")[2], 0, NOT_GIVEN, UNKNOWN_COST_NS)
    return route
