"""The engine on PostgreSQL: ends that say something of a login, and sessions that are held."""

from collections.abc import Sequence
from typing import Any, Protocol

import psycopg
from msgspec import structs

from musterd.ipc.wire.messages import QUEUE_FULL, TaskSpec
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.cluster.columns import possible
from musterd.supervisor.cluster.engine import EngineError, Grant, Verdict
from musterd.supervisor.cluster.logging_in import (
    LoginView,
    SessionView,
    login_error,
    login_spec,
)
from musterd.supervisor.cluster.rows import Row, Wakes
from musterd.supervisor.core.model.held import LOGIN_WAIT_NS

SAID = {"worked": 0, "failed": 1, "wanted": 2}


class LoginCalls(Protocol):
    """What PostgresEngine does about logins."""

    def _call(self, function: str, *parameters: object) -> list[Row]: ...
    def _connected(self) -> psycopg.Connection[Row]: ...
    def _refusal(self, error: psycopg.Error) -> EngineError: ...

    def _wake(self, wakes: Wakes) -> None: ...
    def _submit(
        self, tasks: Sequence[TaskSpec], waiter: int, resend: bool, wakes: Wakes
    ) -> list[Verdict]: ...

    def _finish(
        self, tenure: int, columns: Sequence[object], verdicts: dict[str, LoginVerdict]
    ) -> list[Row]:
        """End attempts, and hear what those that have counted say of logins, by their ids."""
        if not verdicts:
            return self._call("finish_1", tenure, *columns)
        try:
            with self._connected().transaction():
                rows = self._call("finish_1", tenure, *columns)
                alive = {row[0]: row[2] == 0 for row in rows}
                said = {
                    id_: verdicts[id_]
                    for id_, waits in alive.items()
                    if id_ in verdicts and (waits or verdicts[id_].said != "wanted")
                }
                if said:
                    self._say(tenure, said)
        except psycopg.Error as error:
            raise self._refusal(error) from error
        return rows

    def _say(self, tenure: int, said: dict[str, LoginVerdict]) -> None:
        verdicts = list(said.values())
        self._call(
            "login_said_1",
            tenure,
            list(said),
            [each.session for each in verdicts],
            [SAID[each.said] for each in verdicts],
            [each.failures for each in verdicts],
            [each.pause_ns for each in verdicts],
            [each.pause_max_ns for each in verdicts],
            [each.problem.replace("\0", "") for each in verdicts],
            [each.task for each in verdicts],
            [each.args for each in verdicts],
        )

    def _begin_logins(self) -> None:
        """Submit login tasks that are wanted; those that nobody runs are over."""
        for session, task, name, args in self._call("logins_due_1", LOGIN_WAIT_NS):
            wakes = Wakes()
            (verdict,) = self._submit([login_spec(task, session, name, args)], 0, True, wakes)
            refused = verdict.rejection
            if refused is not None and refused.code != QUEUE_FULL:
                why = f"it is not accepted: {refused.message}".replace("\0", "")
                self._call("login_over_1", session, task, why)
            self._wake(wakes)

    def _with_logins(self, grants: list[Grant]) -> list[Grant]:
        """Say what attempts of sessions have to know of logins."""
        ids = [each.id for each in grants if each.spec.session]
        if not ids:
            return grants
        known = {row[0]: row[1:] for row in self._call("granted_logins_1", ids)}
        return [_granted(each, *known[each.id]) if each.id in known else each for each in grants]

    def logins(self, sessions: Sequence[str] | None = None) -> list[LoginView]:
        asked = possible(sessions) if sessions is not None else None
        return [LoginView(*row) for row in self._call("logins_1", asked)]

    def reset_login(self, session: str) -> bool:
        return any(self._call("reset_login_1", each)[0][0] for each in possible([session]))

    def sessions(self) -> list[SessionView]:
        return [SessionView(*row) for row in self._call("sessions_1")]

    def session(self, name: str) -> bytes | None:
        found = [self._call("session_load_1", each)[0][0] for each in possible([name])]
        return found[0] if found else None

    def forget_session(self, name: str) -> bool:
        return any(self._call("forget_session_1", each)[0][0] for each in possible([name]))


def _granted(grant: Grant, again: bool, session: str, task: str, error: str, *hold: Any) -> Grant:
    failures, left_ns, problem, node = hold
    held = LoginView(session, failures, max(1, left_ns), problem, node) if failures else None
    why = login_error(session, task, error) if error is not None else ""
    return structs.replace(grant, held=held, again=again, login_error=why)
