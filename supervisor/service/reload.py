"""Read the configuration again while the daemon runs, and apply what is different.

A thread reads the files. The new configuration is taken or refused as a whole; if it is refused,
the daemon keeps the one it has. One request at a time; the others wait in line.
"""

from collections import deque
from collections.abc import Callable

from msgspec import Struct

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.api.status import NewerCode
from musterd.supervisor.config.load import Loaded
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import Config
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.core.model.schedule_events import AddedSchedule
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.log import log
from musterd.supervisor.service.newer_code import (
    CodeChecks,
    CodeOf,
    RunningCode,
    newer_code,
    running_code,
)
from musterd.supervisor.service.systemd_status import SystemdStatus
from musterd.supervisor.settings.added_schedules import read_added
from musterd.supervisor.settings.diff import (
    AT_ONCE,
    ROLLS,
    SCALES,
    Difference,
    PoolChange,
    compare,
)
from musterd.supervisor.settings.policy import fleet_policy
from musterd.supervisor.shell import Shell
from musterd.supervisor.system.background_calls import BackgroundCalls

# Requests in line. A caller that goes away leaves its request behind, and each one reads all files
# anew. More than this are refused.
WAITING_MAX = 64

Reread = Callable[[], Loaded]


class Refused(Struct, frozen=True):
    """The answer if the new configuration cannot be used."""

    reason: str


class Read(Struct, frozen=True):
    """A configuration that was read and can be used."""

    loaded: Loaded
    difference: Difference
    policy: FleetPolicy
    added: dict[str, AddedSchedule]  # what it makes of the schedules that were added
    newer: list[NewerCode]  # what has changed beside the configuration
    again: tuple[str, ...]  # pools whose workers are replaced although no key changed
    replaced: dict[str, int]


class Answer(Struct, frozen=True):
    difference: Difference
    newer: list[NewerCode]


Then = Callable[[Answer | Refused], None]


class Request(Struct, frozen=True):
    apply: bool
    again: tuple[str, ...]
    then: Then
    code: bool = False  # replace also the workers of pools whose code on disk is newer


class Reloading:
    def __init__(
        self,
        shell: Shell,
        loaded: Loaded,
        reread: Reread,
        *,
        adopt: Callable[[Config], None],
        calls: BackgroundCalls,
        systemd_status: SystemdStatus,
        code_of: CodeOf,
    ) -> None:
        """`adopt` has the shell use another configuration; the core is told by an event."""
        self._shell = shell
        self._adopt = adopt
        self._calls = calls
        self._systemd_status = systemd_status
        self._code_of = code_of
        self.code = CodeChecks(self.running_code, calls)
        self._loaded = loaded  # the configuration in force
        self._reread = reread
        self._waiting: deque[Request] = deque()
        self._busy = False
        self._replaced: dict[
            str, int
        ] = {}  # how often, by pool, its workers were replaced by request
        self._builds: dict[tuple[str, str], PoolConfig] = {}
        self._note_builds(fleet_policy(loaded.config))

    @property
    def config(self) -> Config:
        return self._loaded.config

    def pool_config(self, pool: str, build: str) -> PoolConfig:
        """Return the configuration that workers of this build are made from."""
        return self._builds[pool, build]

    def read(self, then: Then) -> None:
        """Call `then` with what is different; change nothing."""
        self._ask(Request(False, (), then))

    def reload(self, then: Then, again: tuple[str, ...] = (), *, code: bool = False) -> None:
        """Apply what is different, and replace the workers of `again` in any case; with `code` also
        those of pools whose code on disk is newer."""
        self._ask(Request(True, again, then, code))

    def running_code(self) -> list[RunningCode]:
        """Return what the workers are made of, beside the configuration."""
        return running_code(self._shell.fleet, self._code_of, self.config)

    def _ask(self, request: Request) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self._refuse(request, Refused(f"{WAITING_MAX} reloads wait already: try again later"))
            return
        self._waiting.append(request)
        self._next()

    def _refuse(self, request: Request, refused: Refused) -> None:
        if request.apply:
            log.note("config.refused", "error", reason=refused.reason)
        request.then(refused)

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        request = self._waiting.popleft()
        if request.apply:
            self._systemd_status.reloading()
        before, reread, replaced = self._loaded, self._reread, dict(self._replaced)
        sections = dict(self._shell.fleet.added.sections)
        running = self.running_code()
        loading = [each for each in self._shell.fleet.pools if self._is_loading(each)]

        def read() -> Read | Refused:
            newer = newer_code(running)
            again = request.again
            if request.code:
                # What a pool is loading just now may have been read before it was changed.
                others = [*(each.pool for each in newer if each.files), *loading]
                again = tuple(dict.fromkeys((*again, *others)))
            for pool in again:
                replaced[pool] = replaced.get(pool, 0) + 1
            try:
                loaded = reread()
                difference = compare(before, loaded)
                config = difference.in_force
                policy = fleet_policy(config, replaced, loaded.origins)
                added = {name: read_added(config, name, each) for name, each in sections.items()}
            except ConfigurationError as error:
                return Refused(str(error))
            return Read(loaded, difference, policy, added, newer, again, replaced)

        def answer(result: Read | Refused) -> None:
            self._busy = False
            if request.apply and self._shell.fleet.phase != Phase.UP:
                result = Refused("the daemon is shutting down")
            if isinstance(result, Read) and request.apply:
                self._replaced = result.replaced
                request.then(Answer(self._apply(result), result.newer))
            elif isinstance(result, Read):
                request.then(Answer(result.difference, result.newer))
            else:
                self._refuse(request, result)
            if request.apply:
                self._systemd_status.reloaded()
            self._next()

        self._calls.run("reload", read, answer)

    def _is_loading(self, name: str) -> bool:
        rollout = self._shell.fleet.pools[name].rollout
        return rollout is not None and self._code_of(name, rollout.build) is None

    def _apply(self, read: Read) -> Difference:
        difference, again = read.difference, read.again
        in_force = difference.in_force
        self._loaded = Loaded(in_force, read.loaded.origins)
        self._note_builds(read.policy)
        self._adopt(in_force)
        log.note(
            "config.reloaded",
            changes=", ".join(change.key for change in difference.changes) or "none",
            needs_restart=", ".join(difference.restart) or "none",
        )
        # Some may have been put while the thread read.
        sections = self._shell.fleet.added.sections
        late = {
            name: read_added(in_force, name, section)
            for name, section in sections.items()
            if name not in read.added or read.added[name].section != section
        }
        added = [late.get(name) or read.added[name] for name in sections]
        self._shell.feed(events.PolicyChanged(read.policy, added))
        # A pool whose last replacement was given up is tried again, changed or not.
        tried = [n for n, pool in self._shell.fleet.pools.items() if pool.rollout is not None]
        rolling = dict.fromkeys((*again, *tried))
        pools = [
            PoolChange(change.name, ROLLS)
            if change.name in rolling and change.effect in (SCALES, AT_ONCE)
            else change
            for change in difference.pools
        ]
        known = {change.name for change in pools}
        extra = [PoolChange(name, ROLLS) for name in rolling if name not in known]
        return Difference(difference.changes, [*pools, *extra], in_force)

    def _note_builds(self, policy: FleetPolicy) -> None:
        """Remember what each build is made of; forget builds of which no worker will be made."""
        config = self.config
        wanted = {(each.name, each.build): config.pools[each.name] for each in policy.pools}
        used = set()
        for name, pool in self._shell.fleet.pools.items():
            used.add((name, pool.build))
            if pool.rollout is not None:
                used.add((name, pool.rollout.build))
        kept = {key: made for key, made in self._builds.items() if key in used}
        self._builds = {**kept, **wanted}
