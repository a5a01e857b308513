"""Poll the daemon once for all open pages, and push changes to them.

While a page is open, the fleet is polled every second, memory and breakers every two, the rest less
often, and tasks only after some have ended. While none is open, the fleet is polled every few
seconds for the plots. A slow page gets a whole snapshot when it reads again: no page has more than
one message under way.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import (
    BreakerList,
    BreakerStatus,
    FleetStatus,
    ScheduleList,
    TaskList,
)
from musterd.supervisor.api.verdict import unreachable, verdict
from musterd.supervisor.web import snapshot
from musterd.supervisor.web.feed import Feed
from musterd.supervisor.web.snapshot import FIELDS, History, Instants, Snapshots
from musterd.supervisor.web.stories import Stories

WATCHED_SECONDS = 1.0
UNWATCHED_SECONDS = 5.0
BREAKERS_EVERY = 2  # polls of the fleet; memory with them
TASKS_EVERY = 2
SCHEDULES_EVERY = 5
DEAD_EVERY = 30  # also when none has failed: some may have been purged
STREAMS_MAX = 24  # open pages; each has one of the 64 connections (protocol.ANSWERED_MAX)
TASKS_SHOWN = 100


class TooManyPages(MusterdError):
    """STREAMS_MAX pages are open."""


class _Page:
    """An open page."""

    __slots__ = ("address", "over")

    def __init__(self, address: str) -> None:
        self.address = address
        self.over = False  # it gives way to another


class Live:
    def __init__(self, feed: Feed, stories: Stories, *, actions: bool) -> None:
        self._feed = feed
        self._stories = stories
        self._actions = actions
        self._snapshots = Snapshots()
        self._history = History()
        self._instants = Instants()
        self._pages: dict[_Page, None] = {}  # the oldest first
        self._looks = 0
        self._wanted = asyncio.Event()  # a look is wanted before its time
        self._told = asyncio.Event()  # replaced by _wake()
        self._ended = False
        self._counted: dict[str, int] = {}  # tasks that had ended when a list was last read
        self._memory: MemoryStatus | None = None
        self._breakers: list[BreakerStatus] = []
        self._schedules = ScheduleList(schedules=[])

    # -- pages --------------------------------------------------------------------------------

    async def follow(self, address: str) -> AsyncIterator[bytes]:
        """Snapshots as JSON: a whole one, then changes, until end()."""
        page = _Page(address)
        self._pages[page] = None
        try:
            if len(self._pages) == 1:
                self.look()
            number = -1
            while not self._ended and not page.over:
                told = self._told
                newest = self._snapshots.number
                if newest and newest != number:
                    in_time = newest == number + 1
                    number = newest
                    points = [] if in_time else self._history.points()
                    yield self._snapshots.change() if in_time else self._snapshots.whole(points)
                else:
                    await told.wait()
        finally:
            del self._pages[page]

    def admit(self, address: str) -> None:
        """Make room for a page, where an address with more of them has taken all places."""
        pages = [page for page in self._pages if not page.over]
        if len(pages) < STREAMS_MAX:
            return
        counts = Counter(page.address for page in pages)
        most = max(counts.values())
        if counts[address] + 1 >= most:  # neither is to drive out the other in turn
            raise TooManyPages(f"{STREAMS_MAX} pages are open: close one")
        first = next(page for page in pages if counts[page.address] == most)
        first.over = True
        self._wake()

    def _wake(self) -> None:
        """Have all pages look at what there is."""
        told, self._told = self._told, asyncio.Event()
        told.set()

    def look(self) -> None:
        """Poll now: a page was opened, or an action was done."""
        self._counted.clear()
        self._wanted.set()

    def end(self) -> None:
        self._ended = True
        self._told.set()

    # -- the daemon ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            began = time.monotonic()
            await self._turn()
            pause = WATCHED_SECONDS if self._pages else UNWATCHED_SECONDS
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.1, began + pause - time.monotonic())):
                    await self._wanted.wait()

    async def _turn(self) -> None:
        try:
            sections, point = await self._ask()
        except (MusterdError, msgspec.DecodeError) as error:
            sections, point = {"health": unreachable(str(error))}, None
            self._counted.clear()
        sections["at"] = round(time.time(), 3)
        self._snapshots.put(sections, point)
        self._wake()

    async def _ask(self) -> tuple[dict[str, Any], list[float]]:
        fleet = await self._get(rpc.Status(), FleetStatus)
        at = time.time()
        self._looks += 1
        sections: dict[str, Any] = {"fields": FIELDS, "actions": self._actions}
        if self._pages:
            await self._ask_more(fleet, sections)
            rows = snapshot.breaker_rows(self._breakers, at, self._instants)
            sections["breakers"] = rows
            sections["schedules"] = snapshot.schedule_rows(self._schedules.schedules)
            sections["more_schedules"] = self._schedules.more
            sections["events"] = self._stories.newest()
        sections["daemon"] = self._daemon(fleet, at)
        sections["pools"] = snapshot.pool_rows(fleet)
        sections["workers"] = snapshot.worker_rows(fleet, at, self._instants)
        sections["cluster"] = snapshot.cluster_section(fleet.cluster, at, self._instants)
        self._instants.turn()
        sections["health"] = verdict(fleet, self._memory, self._breakers)
        return sections, self._history.add(at, fleet, self._memory)

    def _daemon(self, fleet: FleetStatus, at: float) -> dict[str, Any]:
        return {
            "version": fleet.version,
            "pid": fleet.pid,
            "state": fleet.state,
            "started_at": self._instants.of("up", str(fleet.pid), at - fleet.uptime_seconds),
            "containment": fleet.containment,
        }

    async def _ask_more(self, fleet: FleetStatus, sections: dict[str, Any]) -> None:
        if self._due("breakers", BREAKERS_EVERY):
            self._memory = await self._get(rpc.ShowMemory(), MemoryStatus)
            sections["memory"] = snapshot.memory_section(self._memory)
            self._breakers = (await self._get(rpc.ListBreakers(), BreakerList)).breakers
        if self._due("schedules", SCHEDULES_EVERY):
            self._schedules = await self._get(rpc.ListSchedules(), ScheduleList)
        ended = sum(p.succeeded + p.failed + p.cancelled + p.expired for p in fleet.pools)
        if self._looks % TASKS_EVERY == 0 or "tasks" not in self._counted:
            if self._counted.get("tasks") != ended:
                listed = rpc.ListTasks(state="finished", limit=TASKS_SHOWN)
                sections["tasks"] = await self._list(listed)
                self._counted["tasks"] = ended
            failed = sum(p.failed for p in fleet.pools)
            if self._counted.get("dead") != failed or self._looks % DEAD_EVERY == 0:
                sections["dead"] = await self._list(rpc.ListDead(limit=TASKS_SHOWN))
                self._counted["dead"] = failed

    def _due(self, name: str, every: int) -> bool:
        due = name not in self._counted or self._looks % every == 0
        self._counted[name] = 0
        return due

    async def _list(self, params: rpc.Params) -> dict[str, Any]:
        """List tasks; say so where we may not: members of view_group see no tasks."""
        try:
            found = await self._get(params, TaskList)
        except rpc.RpcError as error:
            if error.code != rpc.NOT_ALLOWED:
                raise
            return {"rows": [], "more": False, "refused": "this web process may not list tasks"}
        return {"rows": [snapshot.task_row(task) for task in found.tasks], "more": found.more}

    async def _get(self, params: rpc.Params, kind: type[Any]) -> Any:
        return msgspec.json.decode(await self._feed.ask(params), type=kind)

    async def running(self) -> list[dict[str, Any]]:
        """Return running tasks as rows, from the workers' state: cheaper than a search."""
        fleet = await self._get(rpc.Status(), FleetStatus)
        now = time.time()
        found = []
        for pool in fleet.pools:
            for worker in (*pool.workers, *pool.leaving):
                if worker.task_id:
                    row = {"id": worker.task_id, "name": f"{pool.name}.{worker.method}"}
                    began = {"state": "running", "began_at": round(now - worker.task_seconds, 1)}
                    found.append({**row, **began, "worker": worker.name})
        return found
