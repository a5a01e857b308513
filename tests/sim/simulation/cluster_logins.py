"""A session of a simulated cluster: who is logged in, and how many logins have failed in a row.

A worker whose attempt finds nobody logged in logs in itself, as part of the attempt, which may
fail; now and then the site forgets who is. In half of the worlds a login task does it. An account
of our own, kept from the ends that have counted, checks that

- the engine counts each failed login once, wherever it was;
- no attempt of the session begins while that is held;
- one task at a time uses it, and while a login task is there, that one;
- what has waited for a login is told what became of it, and nothing else is: it begins once more
  if that has worked, and fails if nobody is logged in then either.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from musterd.ipc.resilience.policy import BreakerPolicy
from musterd.ipc.wire.messages import (
    CANCEL,
    ERROR,
    LOGGED_IN,
    LOGIN_FAILED,
    LOGIN_WANTED,
    NO_LOGIN,
    SUCCEEDED,
    Failure,
    Lease,
)
from musterd.supervisor.cluster.engine import End, Grant
from musterd.supervisor.cluster.logging_in import LOGIN_PREFIX
from musterd.supervisor.core.model.policy import SessionPolicy
from simulation.profile import METHODS, SEC

if TYPE_CHECKING:
    from simulation.cluster import ClusterWorld

SESSION = "acme"
LOGIN_TASK = METHODS[0]
FAILURES, PAUSE_NS, PAUSE_MAX_NS = 2, 1 * SEC, 3 * SEC
LIMIT = BreakerPolicy(failures=FAILURES, open_ns=PAUSE_NS, open_max_ns=PAUSE_MAX_NS, successes=1)
WRONG = Failure(ERROR, "Sim", "wrong password")
NOBODY = Failure(ERROR, "LoggedOut", "nobody is logged in")


class Logins:
    def __init__(self, world: ClusterWorld, *, used: bool, by_task: bool) -> None:
        self._world = world
        self.used = used
        self.by_task = by_task
        self._login = ""  # the last login task
        self._waited: dict[str, None] = {}  # tasks that have waited for one
        self._told: dict[tuple[str, int], bool] = {}  # attempts: whether it has worked
        self._rng = Random(world.seed + 2)
        self._known = False  # somebody is logged in
        self._failures = self._pauses = 0
        self._until_ns = 0
        self.failed = self.held = self.holds = self.told = 0
        self.wanted = self.again = self.refused = 0

    @property
    def policies(self) -> dict[str, SessionPolicy]:
        task = f"{self._world.pool}.{LOGIN_TASK}" if self.by_task else ""
        return {SESSION: SessionPolicy(login_task=task, logins=LIMIT)} if self.used else {}

    def session(self) -> str:
        """Return the session of a new task."""
        return SESSION if self.used and self._rng.random() < 0.3 else ""

    def plan(self) -> None:
        for _ in range(self._rng.randrange(3) if self.used else 0):
            self._world.after(self._rng.randrange(8 * SEC), self._reset)

    def _reset(self) -> None:
        """A person says that the login is mended."""
        known = self._world.engine.reset_login(SESSION)
        assert known == (self._failures > 0)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._failures = self._pauses = self._until_ns = 0

    # -- workers ------------------------------------------------------------------------------

    def ended(
        self, _pool: str, lease: Lease, failure: Failure | None
    ) -> tuple[Failure | None, int]:
        """Return how an attempt ends, and what it says about the login of its session."""
        cut_short = failure is not None and failure.kind == CANCEL
        if lease.session != SESSION or cut_short:
            return failure, NO_LOGIN
        lucky = self._world.is_calm or self._rng.random() < 0.5
        if self.by_task and lease.id.startswith(LOGIN_PREFIX):
            self._known = lucky and failure is None
            return (None, NO_LOGIN) if self._known else (failure or WRONG, LOGIN_FAILED)
        if self._known and (lucky or self._rng.random() < 0.5):
            return failure, NO_LOGIN
        if self.by_task:
            self._known = False
            return NOBODY, LOGIN_WANTED
        self._known = lucky
        return (failure, LOGGED_IN) if lucky else (WRONG, LOGIN_FAILED)

    def began(self, lease: Lease) -> None:
        if lease.session == SESSION:
            assert not self._is_held, f"{lease.id} begins, and its session is held"
            task = self._world.engine.board.live.get(lease.id)
            claim = task.claim if task is not None else 0
            assert self._told.get((lease.id, claim), True), f"{lease.id} begins without its login"

    # -- the engine ---------------------------------------------------------------------------

    @property
    def _is_held(self) -> bool:
        return self._world.now_ns < self._until_ns

    def granted(self, grants: list[Grant]) -> None:
        """Check that an attempt of a session that is held is granted as such, and no other."""
        mine = [grant for grant in grants if grant.spec.session == SESSION]
        live = self._world.engine.board.claimed()
        assert sum(task.spec.session == SESSION for task in live) <= 1, "two use the session"
        logins = [id_ for id_ in self._world.engine.board.live if id_.startswith(LOGIN_PREFIX)]
        assert len(logins) <= 1, "two logins race"
        for grant in mine:
            assert grant.id in logins or not logins, f"{grant} before {logins}"
            self._check_waited(grant)
            assert (grant.held is not None) == self._is_held, (grant, self._until_ns)
            self.held += grant.held is not None

    def _check_waited(self, grant: Grant) -> None:
        done = self._world.engine.board.done.get(self._login)
        worked = done is not None and done.outcome.state == SUCCEEDED
        waited = grant.id in self._waited
        assert grant.again == (waited and worked), grant
        assert bool(grant.login_error) == (waited and not worked), grant
        if waited:
            self._told[grant.id, grant.claim] = worked
        self.again += grant.again
        self.refused += grant.login_error != ""

    def said(self, end: End) -> None:
        """Account for what an attempt that has counted said about its login."""
        verdict = end.login
        if end.kind == "failed":
            self._waited.pop(end.id, None)
        if verdict is None:
            return
        if verdict.said == "wanted":
            assert end.kind == "untouched", end
            assert (end.id, end.claim) not in self._told, f"{end} wants a second login"
            self.wanted += 1
            if end.id in self._world.engine.board.live:
                self._waited[end.id] = None
                self._login = self._world.engine.board.logging_in[SESSION].task
        elif verdict.said == "worked":
            self._begin_anew()
        else:
            assert not self._is_held, "a login was tried while the session was held"
            self.failed += 1
            self._failures += 1
            if self._pauses or self._failures >= FAILURES:
                self._until_ns = self._world.now_ns + min(PAUSE_NS << self._pauses, PAUSE_MAX_NS)
                self._pauses += 1
                self.holds += 1
        found = [each.failures for each in self._world.engine.logins()]
        assert found == [self._failures] * bool(self._failures), (found, self._failures)
