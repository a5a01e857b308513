"""Commands about sessions on control.sock: list them, forget or reset one.

Nobody sees what they hold.
"""

from msgspec import structs

from musterd.ipc.wire.messages import SESSION_PREFIX
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import SessionList, SessionStatus, session_kept
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.ledger import STATE
from musterd.supervisor.shell import Shell
from musterd.supervisor.store.interface import FindFact

_UNKNOWN = "no such session: {!r}: see musterctl sessions"

_SHARED = "the logins of {0!r} are counted by the cluster: musterctl --cluster sessions reset {0}"


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
        if params.held:  # for alerts: of those that all nodes hold, one node tells
            every = [self._live(name) for name in names if self._tells(name)]
            return SessionList(sessions=[each for each in every if each.held_seconds])

        def look() -> None:
            if len(found) == len(names) or pending.abandoned:
                pending.resolve(SessionList(sessions=found))
                return
            key = f"{SESSION_PREFIX}{names[len(found)]}"
            self._shell.store_requests.ask(FindFact(STATE, key), note, pending.unreadable)

        def note(value: bytes | None) -> None:
            live = self._live(names[len(found)])
            found.append(session_kept(live, value, self._shell.wall_ns()))
            look()

        look()
        return pending

    def _tells(self, name: str) -> bool:
        cluster = self._shell.fleet.cluster
        return name not in cluster.logins or cluster.holds(name)

    def _live(self, name: str) -> SessionStatus:
        """Return what the core knows of a session."""
        places, now_ns = self._shell.fleet.sessions.get(name), self._shell.now_ns()
        status = SessionStatus(name=name)
        if places is not None:
            status = SessionStatus(
                name=name,
                running=places.bulkhead.used,
                waiting=places.waiting.tasks,
                login_task=places.login,
                login_failures=places.breaker.failures,
                login_problem=places.problem,
                held_seconds=_until(places.breaker.open_until_ns, now_ns, places.is_held(now_ns)),
            )
        shared = self._shell.fleet.cluster.logins.get(name)
        if shared is None or status.held_seconds:
            return status
        return structs.replace(
            status,
            login_failures=shared.failures,
            login_problem=shared.problem,
            held_seconds=_until(shared.until_ns, now_ns, now_ns < shared.until_ns),
        )

    def _reset(self, params: rpc.ResetSession) -> SessionStatus:
        if params.name not in self._shell.fleet.policy.sessions:
            raise rpc.RpcError(rpc.NO_SUCH_NAME, _UNKNOWN.format(params.name))
        places = self._shell.fleet.sessions.get(params.name)
        if params.name in self._shell.fleet.cluster.logins and (
            places is None or places.breaker.as_new
        ):
            raise rpc.RpcError(rpc.FAILED, _SHARED.format(params.name))
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


def _until(then_ns: int, now_ns: int, holds: bool) -> float:
    return (then_ns - now_ns) / 1e9 if holds else 0.0
