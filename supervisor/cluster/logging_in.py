"""Logins of sessions, over all nodes: login tasks, and logins that fail. Part of the contract.

A session is used by one claim at a time, so its attempts say one after the other what became of a
login.

Where the session has a login task, an attempt that finds nobody logged in goes back untouched and
wants a login. Then the login task is submitted, unless one is under way, and nothing else of the
session is granted until that has ended. What has waited for it is granted with what became of it:
it begins `again`, or it has failed (`login_error`).

After some logins in a row that failed none is tried for a while: attempts that are granted in that
time are ended by their node (grants.py). Then the next attempt may try; if its login fails, too,
the pause is twice as long. A login that works, or a person, begins anew.

What holds (how many, how long, which login task) comes with each verdict: [sessions] is the same on
all nodes.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from musterd.ipc.wire import node_messages as wire
from musterd.ipc.wire.messages import HIGH, TaskSpec
from musterd.supervisor.core.model.held import LOGIN_WAIT_NS, PROBLEM_CHARS, login_failed_why

SESSIONS_MAX = wire.LOGINS_MAX  # in one answer
LOGIN_PREFIX = "login-"  # of the ids of login tasks


def login_spec(id_: str, session: str, name: str, args: bytes) -> TaskSpec:
    """Return a login task."""
    return TaskSpec(
        id_,
        name,
        args,
        priority=HIGH,
        max_retries=0,
        expires_ns=LOGIN_WAIT_NS,
        session=session,
    )


def login_error(session: str, task: str, problem: str) -> str:
    """Say why an attempt has failed that has waited for a login task."""
    return login_failed_why(session, task, problem)[:PROBLEM_CHARS]


class LoginView(Struct, frozen=True):
    """Logins of a session that have failed in a row."""

    session: str
    failures: int
    left_ns: int  # for so long none is tried; 0: the next attempt may
    problem: str  # why the last one failed
    node: str  # where it failed


class SessionView(Struct, frozen=True):
    """A session that is kept, or used by live tasks."""

    session: str
    kept_bytes: int  # 0: nothing is kept
    running: int
    waiting: int  # counted up to 1,000
    login: str = ""  # the login task that is under way


class LoginEngine(Protocol):
    def logins(self, sessions: Sequence[str] | None = None) -> list[LoginView]:
        """Return whose logins have failed: of these, or of all sessions."""

    def reset_login(self, session: str) -> bool:
        """Forget failed logins; return whether there were any."""

    def sessions(self) -> list[SessionView]:
        """Return the sessions by name."""

    def session(self, name: str) -> bytes | None:
        """Return what is kept of a session, as handlers have encrypted it."""

    def forget_session(self, name: str) -> bool:
        """Forget what is kept of a session; return whether there was anything."""


class KnownLogins:
    """What the supervisor knows of failed logins."""

    def __init__(self) -> None:
        self._told: tuple[tuple[str, int, str, bool], ...] = ()

    def news(
        self, logins: Sequence[LoginView], node: str, called_ns: int
    ) -> wire.LoginsTold | None:
        """Return what to tell after a heartbeat; None: nothing has changed."""
        now = tuple([(each.session, each.failures, each.node, each.left_ns > 0) for each in logins])
        if now == self._told:
            return None
        self._told = now
        return wire.LoginsTold(
            [
                wire.SessionLogins(
                    each.session,
                    each.failures,
                    called_ns + each.left_ns if each.left_ns else 0,
                    each.problem,
                    each.node == node,
                )
                for each in logins
            ]
        )
