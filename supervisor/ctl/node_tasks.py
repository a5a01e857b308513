"""Tasks of a cluster, asked for on one of its nodes without --cluster.

The daemon knows the attempts that run here. For any other task the node's tasks.sock is asked,
which the cluster sidecar serves: it needs no access to PostgreSQL.
"""

import time
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from musterd.ipc.client.sync_client import Client
from musterd.ipc.errors import ConfigurationError, MusterdError, NotConnected, TaskMissing
from musterd.ipc.wire.messages import FINAL_STATES, TaskView
from musterd.ipc.wire.paths import find_control_socket
from musterd.supervisor.api.status import TaskStatus, task_status
from musterd.supervisor.ctl.app import ANSWER_SECONDS, Settings

TASKS_SOCKET = "tasks.sock"  # beside control.sock
POLL_SECONDS = 0.2


class NotAsked(MusterdError):
    """The cluster could not be asked: by this user, or now."""


class NodeTasks:
    """Ask the sidecar of this node, as a client."""

    def __init__(self, settings: Settings) -> None:
        self._seconds = settings.timeout or ANSWER_SECONDS
        try:
            control = settings.socket or str(find_control_socket())
            self._client = Client(Path(control).with_name(TASKS_SOCKET), self._seconds)
        except (ConfigurationError, NotConnected) as error:
            raise NotAsked(str(error)) from error

    def __enter__(self) -> "NodeTasks":
        return self

    def __exit__(self, *_exc: object) -> None:
        with suppress(MusterdError):
            self._client.close()

    def find(self, id_: str, *, with_value: bool = True) -> TaskStatus | None:
        """Return a task of the cluster; None if there is none."""
        view = self._view(id_)
        if view is None:
            return None
        status = task_status(view, with_value=with_value)
        # In the answer of the engine, the worker is the node.
        return structs.replace(status, worker="", node=view.worker)

    def _view(self, id_: str) -> TaskView | None:
        try:
            return self._client.task(id_).status(self._seconds)
        except TaskMissing:
            return None
        except (NotConnected, TimeoutError) as error:
            raise NotAsked(str(error)) from error

    def cancel(self, ids: list[str], *, wait: bool) -> tuple[list[TaskStatus], list[str]]:
        """Cancel tasks; return them, and the ids that nobody knows."""
        known = [id_ for id_ in ids if self._view(id_) is not None]
        for id_ in known:
            self._client.task(id_).cancel()
        while True:
            found = [self.find(id_, with_value=False) for id_ in known]
            tasks = [each for each in found if each is not None]
            if not wait or all(each.state in FINAL_STATES for each in tasks):
                return tasks, [id_ for id_ in ids if id_ not in known]
            time.sleep(POLL_SECONDS)
