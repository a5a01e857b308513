"""Lists of tasks on control.sock, page by page, and the search that commands in bulk share."""

from collections.abc import Callable, Iterable
from heapq import nlargest

import msgspec
from msgspec import Struct

from musterd.ipc.wire.messages import CANCELLED, EXPIRED, FAILED, QUEUED
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import INVALID_PARAMS, NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import TaskList, TaskStatus, task_status
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.core.model.task import Task, TaskState
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import Listed, ListFinished, ListLive, StoredTask
from musterd.supervisor.views import fleet as fleet_view

DEAD_STATES = (FAILED, EXPIRED, CANCELLED)  # of tasks that can be retried
# Queries for one answer. A list of few tasks among many goes on with the next request.
ROUNDS_MAX = 100
NAMES_SHOWN_MAX = 10
LIVE, ENDED = "live", "ended"  # the parts of a list: cursors begin with them


class Place(Struct, frozen=True):
    """Where a page begins: in the tasks that have not ended, below a seq; or in the others, below
    a number. 0 is the newest."""

    part: str
    below: int = 0

    def __str__(self) -> str:
        return f"{self.part}:{self.below}"


class Search:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def begin(self, where: Selection, after: str) -> Place:
        """Return where to begin; RpcError if there is no such cursor."""
        if not after:
            return Place(ENDED if where.ended else LIVE)
        part, _, below = after.partition(":")
        if part not in (LIVE, ENDED):
            raise RpcError(INVALID_PARAMS, f"no such cursor: {after!r}: give that of an answer")
        return Place(part, int(below))

    def ended(
        self,
        where: Selection,
        below: int,
        limit: int,
        then: Callable[[Listed], None],
        otherwise: Callable[[], None],
        *,
        dead: bool = False,
    ) -> None:
        """Find finished tasks; fewer than `limit` are not always all."""
        tasks: list[StoredTask] = []
        tops: list[int] = []

        def found(listed: Listed) -> None:
            tasks.extend(listed.tasks)
            tops.append(listed.top)
            if listed.below and len(tasks) < limit and len(tops) < ROUNDS_MAX:
                look(listed.below)
            else:
                then(Listed(tasks, listed.below, tops[0]))

        def look(below: int) -> None:
            query = ListFinished(where, limit - len(tasks), dead, below)
            self._shell.store_requests.ask(query, found, otherwise)

        look(below)

    def live(
        self,
        where: Selection,
        below: int,
        limit: int,
        then: Callable[[list[Task | StoredTask], int], None],
        otherwise: Callable[[], None],
        *,
        wanted: Callable[[Task], bool] = lambda _: True,
    ) -> None:
        """Find tasks that have not ended, those that are only on disk among them. `then` gets them
        and the seq below which others are, 0 for none."""

        stored: list[StoredTask] = []
        rounds = 0

        def found(listed: Listed) -> None:
            nonlocal rounds
            rounds += 1
            stored.extend(listed.tasks)
            # What is in memory is looked at last: meanwhile a page may have come from disk.
            on_disk = self._shell.fleet.on_disk
            tasks: list[Task | StoredTask] = [task for task in stored if task.spec.id in on_disk]
            tasks += nlargest(limit + 1, self._in_memory(where, below, listed.below, wanted), _seq)
            if listed.below and len(tasks) <= limit and rounds < ROUNDS_MAX:
                look(listed.below)
                return
            tasks.sort(key=_seq, reverse=True)
            cut = len(tasks) > limit
            then(tasks[:limit], tasks[limit - 1].seq if cut else listed.below)

        def look(below: int) -> None:
            query = ListLive(where, limit + 1, below)
            self._shell.store_requests.ask(query, found, otherwise)

        if self._shell.fleet.on_disk and where.state in ("", QUEUED):
            look(below)
        else:
            found(Listed([], 0, 0))

    def _in_memory(
        self, where: Selection, below: int, least: int, wanted: Callable[[Task], bool]
    ) -> Iterable[Task]:
        for task in self._shell.fleet.tasks.values():
            if (
                (not below or task.seq < below)
                and task.seq >= least
                and where.fits(task.spec, task.submitted_wall_ns)
                and where.fits_state(fleet_view.shown_state(task))
                and wanted(task)
            ):
                yield task

    def check_names(self, where: Selection) -> None:
        """Raise RpcError if nothing can fit, because there is no such pool or schedule."""
        fleet = self._shell.fleet
        if where.pool and where.pool not in fleet.pools and where.pool not in fleet.stranded:
            raise _unknown("pool", where.pool, fleet.pools)
        if where.schedule and where.schedule not in fleet.schedules:
            raise _unknown("schedule", where.schedule, fleet.schedules)


def _seq(task: Task | StoredTask) -> int:
    return task.seq


def _unknown(what: str, name: str, known: Iterable[str]) -> RpcError:
    names = sorted(known)
    shown = ", ".join(names[:NAMES_SHOWN_MAX]) or "none"
    more = ", ..." if len(names) > NAMES_SHOWN_MAX else ""
    return RpcError(NO_SUCH_NAME, f"no such {what}: '{name}': there are {shown}{more}")


def dead_only(where: Selection) -> Selection:
    """Return a selection of tasks that can be retried; RpcError if it names another state."""
    if where.state not in ("", *DEAD_STATES):
        states = f"{', '.join(DEAD_STATES[:-1])} or {DEAD_STATES[-1]}"
        raise RpcError(INVALID_PARAMS, f"state '{where.state}': give {states}")
    return msgspec.structs.replace(where, state=where.state or FAILED)


def is_node(shell: Shell) -> bool:
    """Whether this machine is a node of a cluster, which knows only what runs here."""
    return any(pool.clustered for pool in shell.fleet.policy.pools)


def listed(stored: StoredTask) -> TaskStatus:
    return task_status(fleet_view.stored_view(stored), with_value=False)


class ListCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._search = Search(shell)

    def methods(self) -> Methods:
        return {rpc.ListTasks: self._tasks, rpc.ListDead: self._dead}

    def _tasks(self, params: rpc.ListTasks) -> Pending:
        where = params.where
        where = msgspec.structs.replace(
            where, state=params.state or where.state, pool=params.pool or where.pool
        )
        return self._list(where, params.after, params.limit, dead=False)

    def _dead(self, params: rpc.ListDead) -> Pending:
        where = msgspec.structs.replace(params.where, pool=params.pool or params.where.pool)
        where = dead_only(where)
        return self._list(where, params.after, params.limit, dead=where.state == FAILED)

    def _list(self, where: Selection, after: str, limit: int, *, dead: bool) -> Pending:
        place, pending, now_ns = self._search.begin(where, after), Pending(), self._shell.now_ns()
        rows: list[TaskStatus] = []

        def tell(rest: Place | None) -> None:
            if not rows and rest is None and not after:
                try:
                    self._search.check_names(where)
                except RpcError as error:
                    pending.fail(error)
                    return
            pending.resolve(
                TaskList(
                    tasks=rows,
                    more=rest is not None,
                    cursor="" if rest is None else str(rest),
                    cluster=is_node(self._shell),
                )
            )

        def live(tasks: list[Task | StoredTask], below: int) -> None:
            for task in tasks:
                if isinstance(task, Task):
                    rows.append(task_status(fleet_view.live_view(task, now_ns)))
                else:
                    rows.append(listed(task))
            if below:
                tell(Place(LIVE, below))
            elif where.live:
                tell(None)
            else:
                look(0)

        def ended(found: Listed) -> None:
            most = limit - len(rows)
            rows.extend([listed(task) for task in found.tasks[:most]])
            if len(found.tasks) > most:  # the last one is the first of the next page
                tell(Place(ENDED, (found.below or 1) + 1))
            else:
                tell(Place(ENDED, found.below) if found.below else None)

        def look(below: int) -> None:
            most = limit - len(rows) + 1
            self._search.ended(where, below, most, ended, pending.unreadable, dead=dead)

        if place.part == LIVE and not where.ended:
            self._search.live(where, place.below, limit, live, pending.unreadable)
        else:
            look(place.below)
        return pending


def can_be_cancelled(task: Task) -> bool:
    """Whether a cancel in bulk means this task: it is not cancelled, and not the cluster's."""
    return not task.cancelled and task.state != TaskState.ENDING and task.claim is None
