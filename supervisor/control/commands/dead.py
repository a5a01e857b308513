"""What people ask about failed tasks on control.sock: list them, run them again, forget them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from musterd.ipc.wire.messages import FAILED as TASK_FAILED
from musterd.ipc.wire.messages import Rejection
from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import FAILED, INVALID_PARAMS, RpcError
from musterd.supervisor.api.status import (
    PurgeResult,
    RefusedTask,
    RetryResult,
    TaskList,
    task_status,
)
from musterd.supervisor.control.connection import Pending, unreadable
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.core.tasks.manual_retry import NO_SUCH_TASK, NOT_ENDED, NOT_FAILED
from musterd.supervisor.store.interface import Purged, StoredTask
from musterd.supervisor.store.requests import StoreRequests
from musterd.supervisor.views import fleet as fleet_view

PEER_PREFIX = b"control:retry:"  # of those who wait for an answer of the core


class Office(Protocol):
    """What these commands need of the daemon."""

    fleet: Fleet

    @property
    def store_requests(self) -> StoreRequests: ...
    def feed(self, event: object) -> None: ...
    def wall_ns(self) -> int: ...


class DeadCommands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._retries: dict[bytes, tuple[Pending, list[str]]] = {}
        self._purges: list[Pending] = []
        self._peers = 0

    def methods(self) -> dict[type, Callable[[Any], object]]:
        return {
            rpc.ListDead: self._list,
            rpc.RetryTasks: self._retry,
            rpc.PurgeTasks: self._purge,
        }

    def _list(self, params: rpc.ListDead) -> object:
        pending = Pending()

        def found(stored: list[StoredTask]) -> None:
            tasks = [task_status(fleet_view.stored_view(each), with_value=False) for each in stored]
            pending.resolve(TaskList(tasks=tasks[: params.limit], more=len(tasks) > params.limit))

        self._office.store_requests.list_finished(
            TASK_FAILED, params.pool or None, params.limit + 1, found, unreadable(pending)
        )
        return pending

    # -- running again ------------------------------------------------------------------------

    def _retry(self, params: rpc.RetryTasks) -> object:
        self._peers += 1
        peer = PEER_PREFIX + str(self._peers).encode()
        pending = Pending(on_abandoned=lambda: self._retries.pop(peer, None))
        ids = list(dict.fromkeys(params.ids))
        self._retries[peer] = (pending, ids)
        self._office.feed(events.RetryRequested(peer, 0, ids, self._office.wall_ns()))
        return pending

    def acknowledged(self, peer: bytes, rejected: list[Rejection]) -> None:
        """The core's answer, which is on disk."""
        pending, ids = self._retries.pop(peer, (None, []))
        if pending is None:
            return
        refused = {each.id: RefusedTask(each.id, each.code, each.message) for each in rejected}
        pending.resolve(
            RetryResult(
                retried=[id_ for id_ in ids if id_ not in refused],
                refused=[refused[id_] for id_ in ids if id_ in refused],
            )
        )

    # -- forgetting ---------------------------------------------------------------------------

    def _purge(self, params: rpc.PurgeTasks) -> object:
        if bool(params.ids) + params.all + bool(params.older_than) != 1:
            raise RpcError(
                INVALID_PARAMS, "parameters of tasks.purge: give either ids, all or older_than"
            )
        pending = Pending()
        self._purges = [each for each in self._purges if not each.abandoned]
        self._purges.append(pending)
        now_ns = self._office.wall_ns()
        if params.ids:
            self._purge_named(pending, list(dict.fromkeys(params.ids)), now_ns)
        else:
            before_ns = now_ns - round(params.older_than * 1e9)
            self._purge_some(pending, None, before_ns, [])
        return pending

    def _purge_named(self, pending: Pending, ids: list[str], now_ns: int) -> None:
        def found(stored: list[StoredTask]) -> None:
            states = {each.spec.id: each.state for each in stored}
            refused = [
                _refusal(id_, states.get(id_)) for id_ in ids if states.get(id_) != TASK_FAILED
            ]
            failed = [id_ for id_ in ids if states.get(id_) == TASK_FAILED]
            self._purge_some(pending, failed, now_ns, refused)

        self._office.store_requests.find(ids, found, partial(self._purge_failed, pending))

    def _purge_some(
        self,
        pending: Pending,
        ids: list[str] | None,
        before_ns: int,
        refused: list[RefusedTask],
    ) -> None:
        def purged(answer: Purged) -> None:
            if pending in self._purges:  # else the daemon is about to exit
                self._purges.remove(pending)
                pending.resolve(PurgeResult(purged=answer.count, refused=refused))

        failed = partial(self._purge_failed, pending)
        self._office.store_requests.purge(ids, before_ns, purged, failed)

    def _purge_failed(self, pending: Pending) -> None:
        if pending in self._purges:
            self._purges.remove(pending)
            unreadable(pending)()

    def ending(self) -> None:
        gone = RpcError(FAILED, "the daemon is shutting down")
        for pending, _ in self._retries.values():
            pending.fail(gone)
        for pending in self._purges:
            pending.fail(gone)
        self._retries, self._purges = {}, []


def _refusal(id_: str, state: str | None) -> RefusedTask:
    if state is None:
        return RefusedTask(id_, NO_SUCH_TASK, f"no such task: '{id_}'")
    code = NOT_FAILED if state in ("succeeded", "cancelled", "expired") else NOT_ENDED
    return RefusedTask(id_, code, f"task '{id_}' is {state}: only failed tasks are purged")
