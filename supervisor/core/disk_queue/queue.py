"""The shelf: queued tasks that are only on disk. A million of them must not be a million objects.

When a pool holds more than `resident_tasks` tasks (or `resident_bytes` of arguments) in memory, a
task that is queued goes on the shelf of its lane: an ordered list of ids, behind the tasks of that
lane that are in memory. What stays of it is its id, its lane and who waits for it.

    push ──► [ tasks in memory ]  ◄── a page is read ── [ ids on the shelf ] ◄── push, from then on

The next page of a lane is ordered when few of its tasks are left in memory, so the disk is read
while workers work. A lane that has nothing left before its page arrives leaves the ring, as if at a
closed gate. Order within a lane is kept: what must stay in memory (a task with a key, a time to
expire, or a history) keeps its place on the shelf by its id, and only its place.

What is on the shelf has never run and has not changed since it was stored, so what is read is
always what was shelved.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from musterd.ipc.wire.messages import CANCELLED
from musterd.supervisor.core.disk_queue.tasks import is_plain, make_all
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import ReadDiskTasks
from musterd.supervisor.core.model.gates import WaitingRoom
from musterd.supervisor.core.model.lanes import Lane, Level, Place
from musterd.supervisor.core.model.ledger import RUN_PREFIX
from musterd.supervisor.core.model.queue import PoolQueue
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Task, TaskState, add_watcher

PAGES_AHEAD = 2  # what a lane has in memory when the next one is ordered: it takes its time too
PAGED_MAX = 10_000  # tasks of a page of each lane: with many lanes they are smaller ...
PAGE_MIN = 4  # ... but not a read for each task


class Portion(Struct, gc=False):
    """The next ids of one lane, on their way from the disk."""

    lane: Lane
    ids: list[str]
    asked: list[str]  # those of them that are only on disk


class DiskQueue:
    def __init__(self, state: State, end: Callable[[Task, str], None]) -> None:
        self._state = state
        self._end = end
        self.places: dict[str, Place] = {}  # of all that are only on disk, by their ids
        self._last: Place | None = None  # that was given
        self.watchers: dict[str, dict[bytes, None]] = {}  # others who wait
        self.used = 0  # lanes with something on their shelf
        self._page_max = state.policy.page_tasks
        self._page = self._page_max
        self._wanted: dict[Lane, None] = {}  # lanes that need their next page
        self.room = WaitingRoom()  # lanes that have nothing to do before it arrives
        self._ticket = 0
        self.reading: dict[int, list[Portion]] = {}  # by the ticket of the read
        self._cancelling: dict[int, events.CancelRequested] = {}

    # -- onto it ------------------------------------------------------------------------------

    def put(self, lane: Lane, task: Task) -> None:
        """Behind everything that is in this lane."""
        spec = task.spec
        self._open(lane).append(spec.id)
        lane.behind += 1
        if lane.alive == lane.behind:
            self.check(lane)
        if not is_plain(task):
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

    def put_run(self, lane: Lane, tasks: list[Task], now_ns: int) -> None:
        """The same for tasks that are new and have no key, which are counted in their lane."""
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
        lane.level.queue.out_of_memory(count, size)
        if lane.alive == lane.behind:
            self.check(lane)

    def put_new(self, lane: Lane, places: dict[str, Place]) -> None:
        """The same for what is being written, and was never a task."""
        self._open(lane).extend(places)
        self.places.update(places)
        lane.behind += len(places)
        lane.level.count(lane, len(places))
        lane.level.queue.on_disk += len(places)

    def forget(self, id_: str) -> dict[bytes, None] | None:
        """It is no more here. Others who wait for it."""
        del self.places[id_]
        return self.watchers.pop(id_, None)

    def leave(self, lane: Lane, count: int) -> None:
        """So many were forgotten, and have no place here any more."""
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
        """Its shelf."""
        if not lane.disk_queue:
            lane.disk_queue = deque()
            self._count_lanes(1)
        return lane.disk_queue

    def _count_lanes(self, change: int) -> None:
        self.used += change
        page = max(PAGE_MIN, PAGED_MAX // max(1, self.used))
        self._page = min(page, self._page_max)

    def check(self, lane: Lane) -> None:
        """Order the next page of a lane if few of its tasks are left in memory."""
        left = lane.alive - lane.behind
        if lane.disk_queue and not lane.reading and left <= PAGES_AHEAD * self._page:
            self._wanted[lane] = None

    def clear(self, lane: Lane) -> None:
        """Nothing alive is left in this lane: drop what is on its shelf."""
        if lane.disk_queue:
            lane.level.dead -= len(lane.disk_queue)
            lane.disk_queue = None
            self._count_lanes(-1)

    def sweep(self, lane: Lane) -> int:
        """Drop the dead entries; how many there were."""
        if not lane.disk_queue:
            return 0
        left = deque([id_ for id_ in lane.disk_queue if self._alive(lane, id_)])
        dropped = len(lane.disk_queue) - len(left)
        lane.disk_queue = left
        if not left:
            lane.disk_queue = None
            self._count_lanes(-1)
        return dropped

    def _alive(self, lane: Lane, id_: str) -> bool:
        return self.is_place(lane, id_) or self.kept(lane, id_) is not None

    def is_place(self, lane: Lane, id_: str) -> bool:
        """Whether it is only on disk, and in this lane."""
        place = self.places.get(id_)
        return place is not None and place.lane is lane

    def kept(self, lane: Lane, id_: str) -> Task | None:
        """The task in memory that has its place here."""
        task = self._state.tasks.get(id_)
        return task if task is not None and task.behind and task.lane is lane else None

    # -- and back -----------------------------------------------------------------------------

    def turn(self) -> bool:
        """Have read what is wanted; whether something came back at once."""
        if not self._wanted:
            return False
        wanted, self._wanted = self._wanted, {}
        portions: list[Portion] = []
        count, at_once = 0, False
        for lane in wanted:
            if not lane.disk_queue:
                continue  # what was there has ended since
            portion = self._take(lane)
            if not portion.ids:  # not on disk yet
                continue
            if not portion.asked:  # all of it is in memory, or gone
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
        """The next page: nothing, if that is not on disk yet."""
        disk_queue, places = lane.disk_queue, self.places
        assert disk_queue and not lane.reading, lane.key
        ids = asked = list(islice(disk_queue, self._page))
        if lane.kept or lane.level.dead or not places[ids[-1]].written:
            ids, asked = self._sort_out(lane, ids)
        for _ in ids:
            disk_queue.popleft()
        lane.reading = bool(ids)
        if not disk_queue:
            lane.disk_queue = None
            self._count_lanes(-1)
        return Portion(lane, ids, asked)

    def _sort_out(self, lane: Lane, ids: list[str]) -> tuple[list[str], list[str]]:
        """Those before the first that is not on disk yet; and which of them are only there."""
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
        """What ReadShelved asked for. What is left to do if it was for a cancel."""
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

    def _made(self, found: events.OnDisk) -> dict[str, Task]:
        """Tasks of those that are still on the shelf, by id."""
        here = events.OnDisk()
        peers: list[bytes] = []
        for seq, spec, wall_ns in zip(found.seqs, found.specs, found.submits_wall_ns, strict=True):
            place = self.places.get(spec.id)
            if place is not None:
                here.add(seq, spec, wall_ns)
                peers.append(place.peer)
        return {task.spec.id: task for task in make_all(self._state, here, None, peers)}

    def _arrive_whole(self, portion: Portion, found: events.OnDisk) -> bool:
        """As is usual: what was asked for has come, in its order, and nothing has happened to it
        meanwhile. False if that is not so."""
        lane, ids = portion.lane, portion.ids
        if self.watchers or [spec.id for spec in found.specs] != ids:
            return False
        places = [self.places.get(id_) for id_ in ids]
        if any(place is None or place.lane is not lane for place in set(places)):
            return False
        peers = [place.peer for place in places if place is not None]
        tasks = make_all(self._state, found, lane, peers)
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
                lane.level.dead -= 1  # its former self has ended meanwhile
        self._arrived(lane, brought, size)

    def _arrived(self, lane: Lane, count: int, size: int) -> None:
        """So many of this lane, with arguments of that size, are in memory again."""
        lane.reading = False
        lane.behind -= count
        lane.level.queue.back_in_memory(count, size)
        if not self.let_in(lane) and lane.gate is not None and lane.level.queue.keeper is not None:
            lane.level.queue.keeper.pushed(lane.gate)  # they may not want to wait for their site
        self.check(lane)

    def let_in(self, lane: Lane) -> bool:
        """It has something in memory: whether it had to wait until then."""
        if lane.room is not self.room:
            return False
        self.room.remove(lane)
        lane.level.list_again(lane)
        return True

    def _put_back(self, lane: Lane, ids: list[str]) -> None:
        self._open(lane).extendleft(reversed(ids))

    def _arrive_from_memory(self, lane: Lane, id_: str) -> None:
        """What had only its place on the shelf, if it has not ended meanwhile."""
        kept = self.kept(lane, id_)
        if kept is None:
            lane.level.dead -= 1
        else:
            kept.behind = False
            lane.behind -= 1
            lane.kept -= 1
            lane.tasks.append(kept)

    def _lose(self, lane: Lane, id_: str) -> None:
        """It is on disk, and cannot be read."""
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
        """Somebody waits for a task that is on the shelf."""
        if not peer:
            return
        place = self.places[id_]
        if not place.peer and place.written:
            self.places[id_] = self._place(place.lane, peer)
        elif place.peer != peer:
            add_watcher(self.watchers.setdefault(id_, {}), peer)

    def forget_peers(self, id_: str, lost: dict[bytes, None]) -> None:
        """None of these waits for a task that is on the shelf."""
        place = self.places.get(id_)
        if place is not None and place.peer in lost:
            place.peer = b""  # for all that came with it
        watchers = self.watchers.get(id_)
        if watchers is not None and not watchers.keys().isdisjoint(lost):
            self.watchers[id_] = left = {each: None for each in watchers if each not in lost}
            if not left:
                del self.watchers[id_]

    def cancel(self, event: events.CancelRequested) -> None:
        """End tasks that are on the shelf: page by page, as they are read."""
        self._ticket += 1
        self._cancelling[self._ticket] = event
        self._state.out.append(ReadDiskTasks(self._ticket, event.ids[: self._page_max]))

    def _cancel_read(
        self, event: events.CancelRequested, made: dict[str, Task], unread: frozenset[str]
    ) -> events.CancelRequested:
        """What is left to do: those not read yet, and those that came to their turn meanwhile."""
        left = event.ids[self._page_max :]
        for id_ in event.ids[: self._page_max]:
            place = self.places.get(id_)
            if place is None or id_ in unread:
                left.append(id_)
            else:
                self._withdraw(place.lane, id_, made.get(id_))
        return replace(event, ids=left)

    def _withdraw(self, lane: Lane, id_: str, task: Task | None) -> None:
        lane.level.dead += 1  # its place on the shelf, or on the way from it
        if task is None:
            self._lose(lane, id_)
        else:
            task.watchers = self.forget(id_)
            self._state.tasks[id_] = task
            lane.level.queue.back_in_memory(1, len(task.spec.args))
            lane.behind -= 1
            lane.level.count(lane, -1)
            task.cancelled = True
            self._end(task, CANCELLED)
        if not lane.alive:
            lane.level.emptied(lane)
        else:
            self.check(lane)

    def drop(self, queue: PoolQueue) -> dict[str, dict[bytes, None]]:
        """The pool goes: what is on the shelves of its queue stays in the store. All ids, each with
        who waits for it."""
        dropped: dict[str, dict[bytes, None]] = {}
        here = [id_ for id_, at in self.places.items() if at.lane.level.queue is queue]
        for id_ in here:
            peer = self.places.pop(id_).peer
            dropped[id_] = {**({peer: None} if peer else {}), **self.watchers.pop(id_, {})}
        for lane in [lane for level in queue.levels for lane in level.lanes.values()]:
            self._wanted.pop(lane, None)
            if lane.disk_queue:
                lane.disk_queue = None
                self._count_lanes(-1)
        for portions in self.reading.values():
            portions[:] = [each for each in portions if each.lane.level.queue is not queue]
        queue.on_disk = 0
        return dropped

    @property
    def cancels(self) -> bool:
        """Whether something that is to be cancelled is being read."""
        return bool(self._cancelling)

    def dead_in(self, level: Level) -> int:
        """Entries of a level that stand for nothing any more; for validate()."""
        entries = sum(len(lane.disk_queue or ()) - lane.behind for lane in level.lanes.values())
        for portions in self.reading.values():
            entries += sum(len(each.ids) for each in portions if each.lane.level is level)
        return entries
