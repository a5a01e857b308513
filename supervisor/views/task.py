"""One task, wherever it is: what the core knows of it, and what only the store remembers."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from musterd.ipc.wire.messages import TaskSpec, TaskView
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.store.interface import StoredTask
from musterd.supervisor.store.requests import StoreRequests
from musterd.supervisor.views import fleet as fleet_view
from musterd.supervisor.views.policy import applied_policy


class Office(Protocol):
    """What is needed of the daemon."""

    fleet: Fleet

    @property
    def store_requests(self) -> StoreRequests: ...
    def now_ns(self) -> int: ...


def look_at(
    office: Office,
    id_: str,
    then: Callable[[TaskView | None], None],
    otherwise: Callable[[], None],
) -> None:
    """Tell what is known of a task, now or later; None if nothing is."""
    view = live_view_of(office, id_)
    if view is not None:
        then(view)
        return

    def found(stored: list[StoredTask]) -> None:
        then(view_of(office, id_, stored))

    office.store_requests.find([id_], found, otherwise, attempts=True)


def live_view_of(office: Office, id_: str) -> TaskView | None:
    """What the core alone knows of a task; None if the store has to be asked."""
    task = office.fleet.tasks.get(id_)
    if task is None or task.attempt + task.crashes:
        return None
    # Nothing can have gone wrong yet.
    return _with_policy(office, fleet_view.live_view(task, office.now_ns()), task.spec)


def view_of(office: Office, id_: str, stored: list[StoredTask]) -> TaskView | None:
    """What is known of a task, with what the store has found of it."""
    view = fleet_view.stored_view(stored[0]) if stored else None
    task = office.fleet.tasks.get(id_)  # it may have come, or gone, while the store looked
    if task is not None:
        live = fleet_view.live_view(task, office.now_ns())
        attempts = view.attempts if view is not None else []
        return _with_policy(office, msgspec.structs.replace(live, attempts=attempts), task.spec)
    if view is None:
        return None
    place = office.fleet.on_disk.get(id_)
    pool = office.fleet.pools.get(view.name.partition(".")[0])
    if place is not None and pool is not None:
        waits_for = fleet_view.why_queued(pool, place.lane, office.now_ns())
        view = msgspec.structs.replace(view, waits_for=waits_for)
    return _with_policy(office, view, stored[0].spec)


def _with_policy(office: Office, view: TaskView, spec: TaskSpec) -> TaskView:
    policy = applied_policy(office.fleet, spec)
    return msgspec.structs.replace(view, policy=policy, args=spec.args)
