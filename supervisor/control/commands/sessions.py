"""Commands about sessions on control.sock: list them, forget or reset one.

Nobody sees what they hold.
"""

from msgspec import structs

from musterd.ipc.secrets.sessions import Unreadable, read_head
from musterd.ipc.wire.messages import SESSION_PREFIX
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import SessionList, SessionStatus
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.ledger import STATE
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindFact

_UNKNOWN = "no such session: {!r}: see musterctl sessions"


class SessionCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def methods(self) -> Methods:
        return {
            rpc.ListSessions: self._list,
            rpc.ForgetSession: self._forget,
            rpc.ResetSession: self._reset,
        }

    def _list(self, params: rpc.ListSessions) -> Pending | SessionList:
        """Look them up one after the other: each may be large, and they are not needed at once."""
        pending, found = Pending(), list[SessionStatus]()
        names = sorted(self._shell.fleet.policy.sessions)
        if params.held:
            every = [self._live(name) for name in names]
            return SessionList(sessions=[each for each in every if each.held_seconds])

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

    def _live(self, name: str) -> SessionStatus:
        """Return what the core knows of a session."""
        places = self._shell.fleet.sessions.get(name)
        if places is None:
            return SessionStatus(name=name)
        now_ns, breaker = self._shell.now_ns(), places.breaker
        held = places.is_held(now_ns)
        return SessionStatus(
            name=name,
            running=places.bulkhead.used,
            waiting=places.waiting.tasks,
            login_task=places.login,
            login_failures=breaker.failures,
            login_problem=places.problem,
            held_seconds=(breaker.open_until_ns - now_ns) / 1e9 if held else 0.0,
        )

    def _status(self, name: str, value: bytes | None) -> SessionStatus:
        status = self._live(name)
        if value is None:
            return status
        now_ns = self._shell.wall_ns()
        try:
            head = read_head(value)
        except Unreadable as error:
            return structs.replace(status, kept=True, bytes=len(value), problem=str(error))
        return structs.replace(
            status,
            kept=True,
            site=head.site,
            bytes=len(value),
            login_seconds=_since(head.login_wall_ns, now_ns),
            saved_seconds=_since(head.saved_wall_ns, now_ns),
        )

    def _reset(self, params: rpc.ResetSession) -> SessionStatus:
        if params.name not in self._shell.fleet.policy.sessions:
            raise rpc.RpcError(rpc.NO_SUCH_NAME, _UNKNOWN.format(params.name))
        self._shell.feed(events.SessionReset(params.name))
        return self._live(params.name)

    def _forget(self, params: rpc.ForgetSession) -> Pending:
        pending = Pending()

        def found(value: bytes | None) -> None:
            if value is None and params.name not in self._shell.fleet.policy.sessions:
                pending.fail(rpc.RpcError(rpc.NO_SUCH_NAME, _UNKNOWN.format(params.name)))
                return
            self._shell.feed(events.SessionForgotten(params.name))
            pending.resolve(SessionStatus(name=params.name))

        fact = FindFact(STATE, f"{SESSION_PREFIX}{params.name}")
        self._shell.store_requests.ask(fact, found, pending.unreadable)
        return pending


def _since(then_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / 1e9) if then_ns else 0.0
