"""Who is logged in to the sessions of the world, and what attempts say about that.

At first nobody is. A login task that succeeds logs in, and now and then a site forgets who is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from musterd.ipc.wire.messages import (
    CANCEL,
    ERROR,
    LOGIN_FAILED,
    LOGIN_WANTED,
    NO_LOGIN,
    Failure,
    Lease,
)
from simulation.profile import LOGIN_SESSIONS, LOGIN_TASK

if TYPE_CHECKING:
    from simulation.world import World

WRONG = Failure(ERROR, "Sim", "wrong password")
NOBODY = Failure(ERROR, "LoggedOut", "nobody is logged in")


class Logins:
    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, None] = {}  # sessions in which somebody is logged in
        self.done = 0  # logins that worked
        self.wanted = 0  # attempts that found nobody logged in

    def ended(self, pool: str, lease: Lease, failure: Failure | None) -> tuple[Failure | None, int]:
        """Return how an attempt ends, and what it says about the login of its session."""
        world, name = self._world, lease.session
        if not world.profile.logins or name not in LOGIN_SESSIONS:
            return failure, NO_LOGIN
        if failure is not None and failure.kind == CANCEL:
            return failure, NO_LOGIN
        lucky = world.is_calm or world.rng.random() < 0.7
        if f"{pool}.{lease.method}" == LOGIN_TASK:
            if failure is not None or not lucky:
                return failure or WRONG, LOGIN_FAILED
            self._known[name] = None
            self.done += 1
            return None, NO_LOGIN
        if not lucky and world.rng.random() < 0.3:
            self._known.pop(name, None)
        if name in self._known:
            return failure, NO_LOGIN
        self.wanted += 1
        return NOBODY, LOGIN_WANTED
