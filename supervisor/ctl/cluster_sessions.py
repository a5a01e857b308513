"""What `musterctl --cluster sessions` answers: sessions of shared pools, and logins that fail."""

import time

from msgspec import structs

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import SessionList, SessionStatus, session_kept
from musterd.supervisor.cluster.engine import Engine


def listed(engine: Engine) -> SessionList:
    """Return all sessions; each is looked up by itself, because it may be large."""
    found = {
        each.session: SessionStatus(
            name=each.session,
            bytes=each.kept_bytes,
            running=each.running,
            waiting=each.waiting,
            login_task=each.login,
        )
        for each in engine.sessions()
    }
    for name, status in found.items():
        if status.bytes:
            found[name] = session_kept(status, engine.session(name), time.time_ns())
    for login in engine.logins():
        status = found.get(login.session) or SessionStatus(name=login.session)
        found[login.session] = structs.replace(
            status,
            login_failures=login.failures,
            login_problem=login.problem,
            held_seconds=login.left_ns / 1e9,
        )
    return SessionList(sessions=[found[name] for name in sorted(found)])


def forget(engine: Engine, name: str) -> SessionStatus:
    if not engine.forget_session(name):
        raise rpc.RpcError(rpc.NO_SUCH_NAME, f"the cluster keeps no session {name!r}")
    return SessionStatus(name=name)


def reset(engine: Engine, name: str) -> SessionStatus:
    """Let tasks of a session log in again; a session whose logins work is as it should be."""
    known = engine.reset_login(name) or name in {each.session for each in engine.sessions()}
    if not known:
        raise rpc.RpcError(rpc.NO_SUCH_NAME, f"the cluster knows no session {name!r}")
    return SessionStatus(name=name)
