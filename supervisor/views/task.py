"""The view of one task: what the core knows of it, completed by what the store has."""

from collections.abc import Callable

import msgspec

from musterd.ipc.wire.messages import TaskSpec, TaskView
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindTasks, StoredTask
from musterd.supervisor.views import fleet as fleet_view
from musterd.supervisor.views.policy import applied_policy


def look_at(
    shell: Shell,
    id_: str,
    then: Callable[[TaskView | None], None],
    otherwise: Callable[[], None],
) -> None:
    """Call `then` with the view of a task, now or later, or with None if there is no such task."""
    view = live_view_of(shell, id_)
    if view is not None:
        then(view)
        return

    def found(stored: list[StoredTask]) -> None:
        then(view_of(shell, id_, stored))

    shell.store_requests.ask(FindTasks([id_], attempts=True), found, otherwise)


def live_view_of(shell: Shell, id_: str) -> TaskView | None:
    """Return the view of a task without failed attempts; None if the store has to be asked."""
    task = shell.fleet.tasks.get(id_)
    if task is None or task.attempt + task.crashes:
        return None
    # It has no failed attempt, which only the store would know.
    return _with_policy(shell, fleet_view.live_view(task, shell.now_ns()), task.spec)


def view_of(shell: Shell, id_: str, stored: list[StoredTask]) -> TaskView | None:
    """Return the view of a task, with what the store has found of it; None if nobody has it."""
    view = fleet_view.stored_view(stored[0]) if stored else None
    task = shell.fleet.tasks.get(id_)  # the task may have come, or gone, while the store looked
    if task is not None:
        live = fleet_view.live_view(task, shell.now_ns())
        attempts = view.attempts if view is not None else []
        return _with_policy(shell, msgspec.structs.replace(live, attempts=attempts), task.spec)
    if view is None:
        return None
    place = shell.fleet.on_disk.get(id_)
    pool = shell.fleet.pools.get(view.name.partition(".")[0])
    if place is not None and pool is not None:
        waits_for = fleet_view.why_queued(pool, place.lane, shell.now_ns())
        view = msgspec.structs.replace(view, waits_for=waits_for)
    return _with_policy(shell, view, stored[0].spec)


def _with_policy(shell: Shell, view: TaskView, spec: TaskSpec) -> TaskView:
    policy = applied_policy(shell.fleet, spec)
    return msgspec.structs.replace(view, policy=policy, args=spec.args)
