"""The supervisor of a node, as local.sock and tasks.sock show it: a model of what the core does.

It keeps its tasks whatever becomes of the sidecar. Unit tests hold the core to the same answers
(tests/unit/supervisor/core/tasks/test_reception.py).
"""

from collections.abc import Callable
from random import Random

from musterd.ipc.wire import messages as wire
from musterd.ipc.wire.messages import (
    CANCELLED,
    ELSEWHERE,
    QUEUE_FULL,
    SUCCEEDED,
    Outcome,
    Rejection,
    TaskSpec,
    TaskView,
)

Send = Callable[[wire.ServerMessage], None]


class Connection:
    """A connection that the supervisor has accepted; `direct`: over tasks.sock."""

    def __init__(self, session: int, send: Send, *, direct: bool) -> None:
        self.session = session
        self.send = send
        self.direct = direct
        self.over = False  # it is not read any more


class LocalSide:
    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.pools: tuple[str, ...] = ("q",)
        self.live: dict[str, TaskSpec] = {}
        self.done: dict[str, Outcome] = {}
        self.refusing = False  # of tasks that are the cluster's, while there is no sidecar
        self._watchers: dict[str, list[Connection]] = {}
        self._sessions: dict[int, Connection] = {}

    def greet(self, connection: Connection) -> None:
        """A connection says hello, which ends the one before of that client."""
        before = self._sessions.get(connection.session)
        if before is not None:
            before.over = True
        self._sessions[connection.session] = connection

    def has(self, id_: str) -> bool:
        return id_ in self.live or id_ in self.done

    def hear(self, connection: Connection, message: wire.ClientMessage) -> None:
        if connection.over:
            return
        match message:
            case wire.Submit(request, tasks, resend):
                self._submitted(connection, request, tasks, resend)
            case wire.Watch(ids):
                self._watch(connection, [id_ for id_ in ids if self.has(id_)])
                missing = [id_ for id_ in ids if not self.has(id_)]
                if missing and not connection.direct:
                    connection.send(wire.Missing(missing))
            case wire.Cancel(ids):
                for id_ in ids:
                    if id_ in self.live:
                        self.end(id_, CANCELLED)
            case wire.Inspect(request, id_):
                view = TaskView(id_, "q.extract", "queued", "normal") if self.has(id_) else None
                if view is not None or not connection.direct:
                    connection.send(wire.Inspected(request, view))

    def _submitted(
        self, connection: Connection, request: int, tasks: list[TaskSpec], resend: bool
    ) -> None:
        rejected: list[Rejection] = []
        for spec in tasks:
            if self.has(spec.id):
                continue
            if spec.name.partition(".")[0] not in self.pools:
                rejected.append(Rejection(spec.id, ELSEWHERE, ""))
            elif self.rng.random() < 0.05:
                rejected.append(Rejection(spec.id, QUEUE_FULL, ""))
            else:
                self.live[spec.id] = spec
        refused = {each.id for each in rejected}
        self._watch(connection, [spec.id for spec in tasks if spec.id not in refused])
        if connection.direct and any(each.code == ELSEWHERE for each in rejected):
            if resend or not self.refusing:
                return  # nobody here can answer
            rejected = [Rejection(each.id, QUEUE_FULL, "") for each in rejected]
        connection.send(wire.Accepted(request, rejected))

    def _watch(self, connection: Connection, ids: list[str]) -> None:
        for id_ in ids:
            if id_ in self.done:
                connection.send(wire.Results([self.done[id_]]))
            else:
                self._watchers.setdefault(id_, []).append(connection)

    def work(self, number: int) -> None:
        """Run some tasks to their end."""
        for id_ in list(self.live)[:number]:
            self.end(id_, SUCCEEDED)

    def end(self, id_: str, state: str) -> None:
        del self.live[id_]
        outcome = self.done[id_] = Outcome(id_, state, b"\xc0")
        for connection in self._watchers.pop(id_, ()):
            if not connection.over:
                connection.send(wire.Results([outcome]))
