"""What people ask on control.sock about tasks that are to end: `musterctl cancel`."""

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import FAILED, RpcError
from musterd.supervisor.api.status import TaskList, task_status
from musterd.supervisor.control.connection import Pending, unreadable
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.store.interface import StoredTask
from musterd.supervisor.store.requests import StoreRequests
from musterd.supervisor.views import fleet as fleet_view

PEER_PREFIX = b"control:cancel:"  # of those who wait for an answer of the core


class Office(Protocol):
    """What these commands need of the daemon."""

    fleet: Fleet

    @property
    def store_requests(self) -> StoreRequests: ...
    def feed(self, event: object) -> None: ...
    def now_ns(self) -> int: ...


class Cancel(Struct):
    """A caller that cancelled tasks."""

    pending: Pending
    params: rpc.CancelTasks
    noted: bool = False  # on disk: it holds also if the daemon dies now


class CancelCommands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._cancels: dict[bytes, Cancel] = {}
        self._peers = 0

    def methods(self) -> dict[type, Callable[[Any], object]]:
        return {rpc.CancelTasks: self._cancel}

    def _cancel(self, params: rpc.CancelTasks) -> object:
        self._peers += 1
        peer = PEER_PREFIX + str(self._peers).encode()
        pending = Pending(on_abandoned=lambda: self._cancels.pop(peer, None))
        self._cancels[peer] = Cancel(pending, params)
        self._office.feed(events.CancelRequested(params.ids, peer))
        return pending

    def acknowledged(self, peer: bytes) -> None:
        """The core's answer, which is on disk."""
        cancel = self._cancels.get(peer)
        if cancel is not None:
            cancel.noted = True

    def settle(self) -> None:
        """Answer those whose tasks have ended, or who did not want to wait for that."""
        alive = self._office.fleet.alive
        for peer, cancel in list(self._cancels.items()):
            params = cancel.params
            if cancel.noted and (params.no_block or not any(alive(id_) for id_ in params.ids)):
                del self._cancels[peer]
                self._answer(cancel)

    def _answer(self, cancel: Cancel) -> None:
        tasks, ids = self._office.fleet.tasks, cancel.params.ids
        now_ns = self._office.now_ns()
        live = [
            task_status(fleet_view.live_view(tasks[id_], now_ns)) for id_ in ids if id_ in tasks
        ]
        rest = [id_ for id_ in ids if id_ not in tasks]

        def found(stored: list[StoredTask]) -> None:
            ended = [task_status(fleet_view.stored_view(each), with_value=False) for each in stored]
            known = {each.id for each in ended}
            cancel.pending.resolve(
                TaskList(tasks=live + ended, missing=[id_ for id_ in rest if id_ not in known])
            )

        self._office.store_requests.find(rest, found, unreadable(cancel.pending))

    def ending(self) -> None:
        for cancel in self._cancels.values():
            cancel.pending.fail(RpcError(FAILED, "the daemon is shutting down"))
        self._cancels = {}
