"""Commands about sessions on control.sock: list them, forget one. Nobody sees what they hold."""

from musterd.ipc.secrets.sessions import Unreadable, read_head
from musterd.ipc.wire.messages import SESSION_PREFIX
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import SessionList, SessionStatus
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.ledger import STATE
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindFact


class SessionCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def methods(self) -> Methods:
        return {rpc.ListSessions: self._list, rpc.ForgetSession: self._forget}

    def _list(self, _params: rpc.ListSessions) -> Pending:
        """Look them up one after the other: each may be large, and they are not needed at once."""
        pending, found = Pending(), list[SessionStatus]()
        names = sorted(self._shell.fleet.policy.sessions)

        def look() -> None:
            if len(found) == len(names) or pending.abandoned:
                pending.resolve(SessionList(sessions=found))
                return
            key = f"{SESSION_PREFIX}{names[len(found)]}"
            self._shell.store_requests.ask(FindFact(STATE, key), note, pending.unreadable)

        def note(value: bytes | None) -> None:
            found.append(self._status(names[len(found)], value))
            look()

        look()
        return pending

    def _status(self, name: str, value: bytes | None) -> SessionStatus:
        places = self._shell.fleet.sessions.get(name)
        used = places.bulkhead.used if places is not None else 0
        waiting = places.waiting.tasks if places is not None else 0
        status = SessionStatus(name=name, running=used, waiting=waiting)
        if value is None:
            return status
        now_ns = self._shell.wall_ns()
        try:
            head = read_head(value)
        except Unreadable as error:
            return SessionStatus(
                name=name, kept=True, bytes=len(value), running=used, problem=str(error)
            )
        return SessionStatus(
            name=name,
            kept=True,
            site=head.site,
            bytes=len(value),
            login_seconds=_since(head.login_wall_ns, now_ns),
            saved_seconds=_since(head.saved_wall_ns, now_ns),
            running=used,
            waiting=waiting,
        )

    def _forget(self, params: rpc.ForgetSession) -> Pending:
        pending = Pending()

        def found(value: bytes | None) -> None:
            if value is None and params.name not in self._shell.fleet.policy.sessions:
                why = f"no such session: {params.name!r}: see musterctl sessions"
                pending.fail(rpc.RpcError(rpc.NO_SUCH_NAME, why))
                return
            self._shell.feed(events.SessionForgotten(params.name))
            pending.resolve(SessionStatus(name=params.name))

        fact = FindFact(STATE, f"{SESSION_PREFIX}{params.name}")
        self._shell.store_requests.ask(fact, found, pending.unreadable)
        return pending


def _since(then_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / 1e9) if then_ns else 0.0
