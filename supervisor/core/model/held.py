"""Logins of sessions: how long a login task is waited for, and what tasks are told of failures."""

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import ERROR, SHUT, Failure

HELD_TYPE = "SessionHeld"  # Failure.type of a task whose session is held
LOGIN_FAILED_TYPE = "LoginFailed"  # Failure.type of an attempt whose login task failed
LOGIN_WAIT_NS = 300 * SECOND_NS  # for a worker that runs a login task
PROBLEM_CHARS = 500  # of the error of a login, as people are told


def held_why(session: str, left_ns: int, failures: int, problem: str, *, cluster: bool) -> str:
    """Say for how long no login of a session is tried, why, and what to do."""
    words = "musterctl --cluster sessions" if cluster else "musterctl sessions"
    return (
        f"session '{session}' is held for {max(0, left_ns) / SECOND_NS:.0f} s more: {failures} "
        f"logins in a row failed ({problem}); mend the login, then: {words} reset {session}"
    )


def held_failure(why: str) -> Failure:
    """Return how a task ends whose session is held."""
    return Failure(SHUT, HELD_TYPE, why)


def login_failed_why(session: str, task: str, error: str) -> str:
    """Say why an attempt has failed that has waited for a login task."""
    return f"nobody is logged in: login task {task} of session '{session}' did not work: {error}"


def login_failure(why: str) -> Failure:
    """Return how such an attempt ends."""
    return Failure(ERROR, LOGIN_FAILED_TYPE, why[:PROBLEM_CHARS])
