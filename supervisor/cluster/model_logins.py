"""Logins that fail, and sessions, in the engine in memory."""

from collections.abc import Sequence

from musterd.ipc.wire.messages import QUEUE_FULL, QUEUED, RUNNING, SESSION_PREFIX, TaskSpec
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.cluster.engine import Verdict
from musterd.supervisor.cluster.logging_in import (
    LOGIN_PREFIX,
    SESSIONS_MAX,
    LoginView,
    SessionView,
    login_error,
    login_spec,
)
from musterd.supervisor.cluster.model_intake import SESSION_MARK, Base
from musterd.supervisor.cluster.model_records import FailedLogins, LoginTask, Task
from musterd.supervisor.core.model.held import LOGIN_WAIT_NS


class Logins(Base):
    # -- login tasks --------------------------------------------------------------------------

    def login_wanted(self, task: Task, verdict: LoginVerdict) -> None:
        """Let a task wait for the login task of its session, which begins if none is under way."""
        task.wanted = True
        known = self.board.logging_in.get(verdict.session)
        if known is None or known.ok is not None:
            id_ = f"{LOGIN_PREFIX}{self.rng.getrandbits(64):016x}"
            login = LoginTask(id_, verdict.task, verdict.args, self.clock())
            self.board.logging_in[verdict.session] = login

    def begin_logins(self) -> None:
        """Submit login tasks that are wanted, and give up those that nobody runs."""
        for session, login in self.board.logging_in.items():
            if login.ok is not None or login.task in self.board.live:
                continue
            if self.clock() - login.since_ns >= LOGIN_WAIT_NS:
                self.login_over(session, login.task, "nobody has run it")
                continue
            spec = login_spec(login.task, session, login.name, login.args)
            (verdict,) = self.submit([spec], resend=True)
            refused = verdict.rejection
            if refused is not None and refused.code != QUEUE_FULL:
                self.login_over(session, login.task, f"it is not accepted: {refused.message}")

    def submit(
        self, tasks: Sequence[TaskSpec], *, waiter: int = 0, resend: bool = False
    ) -> list[Verdict]:
        raise NotImplementedError

    def login_over(self, session: str, task: str, problem: str = "") -> None:
        """Note the end of a login task; "": it has worked."""
        login = self.board.logging_in.get(session)
        if login is not None and login.task == task and login.ok is None:
            login.ok, login.problem = not problem, problem

    def admits_session(self, task: Task) -> bool:
        """Return whether nobody uses the session of a task, and no login comes before it."""
        session, login = task.spec.session, self.board.logging_in.get(task.spec.session)
        if login is not None and login.ok is None and login.task != task.spec.id:
            return False
        return not any(each.spec.session == session for each in self.board.claimed())

    def login_of(self, task: Task) -> tuple[bool, str]:
        """Return what became of the login task that a task has waited for."""
        login = self.board.logging_in.get(task.spec.session) if task.wanted else None
        if login is None or login.ok is None:
            return False, ""
        session = task.spec.session
        return login.ok, "" if login.ok else login_error(session, login.task, login.problem)

    # -- logins that fail ---------------------------------------------------------------------

    def login_said(self, verdict: LoginVerdict, node: str) -> None:
        """Count what an attempt says about a login."""
        now_ns, known = self.clock(), self.board.logins.get(verdict.session)
        if verdict.said == "worked":
            self.board.logins.pop(verdict.session, None)
            return
        if known is None:
            known = self.board.logins[verdict.session] = FailedLogins()
        elif now_ns < known.until_ns:
            return  # it was granted before
        known.failures += 1
        known.problem, known.node = verdict.problem, node
        if known.pauses or known.failures >= verdict.failures:
            pause_ns = verdict.pause_ns << min(known.pauses, 40)
            known.until_ns = now_ns + min(pause_ns, verdict.pause_max_ns)
            known.pauses += 1

    def logins(self, sessions: Sequence[str] | None = None) -> list[LoginView]:
        now_ns = self.clock()
        return [
            LoginView(name, each.failures, max(0, each.until_ns - now_ns), each.problem, each.node)
            for name, each in sorted(self.board.logins.items())
            if sessions is None or name in sessions
        ][:SESSIONS_MAX]

    def held(self, session: str) -> LoginView | None:
        found = self.logins([session]) if session else []
        return found[0] if found and found[0].left_ns else None

    def reset_login(self, session: str) -> bool:
        return self.board.logins.pop(session, None) is not None

    def sessions(self) -> list[SessionView]:
        now_ns, live = self.clock(), list(self.board.live.values())
        kept = {
            key.removeprefix(SESSION_PREFIX): len(value)
            for key, (value, until_ns) in self.board.state.items()
            if key.startswith(SESSION_PREFIX) and not 0 < until_ns <= now_ns
        }
        used = {each.spec.session for each in live if each.spec.session}
        return [
            SessionView(
                name,
                kept.get(name, 0),
                sum(t.spec.session == name and t.state == RUNNING for t in live),
                sum(t.class_ == f"{SESSION_MARK}{name}" and t.state == QUEUED for t in live),
                self._login_under_way(name),
            )
            for name in sorted(kept.keys() | used)
        ][:SESSIONS_MAX]

    def session(self, name: str) -> bytes | None:
        value, until_ns = self.board.state.get(f"{SESSION_PREFIX}{name}", (None, 0))
        return None if 0 < until_ns <= self.clock() else value

    def forget_session(self, name: str) -> bool:
        kept = self.session(name) is not None
        self.board.state.pop(f"{SESSION_PREFIX}{name}", None)
        return kept

    def _login_under_way(self, session: str) -> str:
        login = self.board.logging_in.get(session)
        return login.task if login is not None and login.ok is None else ""
