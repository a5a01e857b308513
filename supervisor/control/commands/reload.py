"""What people ask about the configuration on control.sock: reread, reload, update."""

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import FAILED, NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import KeyChange, PoolReload, ReloadResult
from musterd.supervisor.control.connection import Pending
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.service.reload import Refused, Reloading
from musterd.supervisor.settings.diff import ADDED, REMOVED, Difference, PoolChange

SETTLED = (SlotState.RUNNING, SlotState.FATAL, SlotState.BACKOFF, SlotState.STOPPED)


class Office(Protocol):
    """What these commands need of the daemon."""

    fleet: Fleet
    reloading: Reloading


class Wait(Struct):
    """A caller that is answered when every pool is where the new configuration wants it."""

    pending: Pending
    difference: Difference


class ReloadCommands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._waits: list[Wait] = []

    def methods(self) -> dict[type, Callable[[Any], object]]:
        return {rpc.Reread: self._reread, rpc.Reload: self._reload, rpc.Update: self._reload}

    def _reread(self, _params: rpc.Reread) -> object:
        pending = Pending()

        def then(answer: Difference | Refused) -> None:
            if isinstance(answer, Refused):
                pending.fail(_refusal(answer))
            else:
                pools = [PoolReload(each.name, each.effect) for each in answer.pools]
                pending.resolve(ReloadResult(_changes(answer), pools, answer.restart, done=False))

        self._office.reloading.read(then)
        return pending

    def _reload(self, params: rpc.Reload | rpc.Update) -> object:
        names = params.names if isinstance(params, rpc.Reload) else []
        self._check(names)
        pending = Pending()

        def then(answer: Difference | Refused) -> None:
            if isinstance(answer, Refused):
                pending.fail(_refusal(answer))
                return
            wait = Wait(pending, answer)
            if params.no_block:
                pools = [PoolReload(each.name, each.effect) for each in answer.pools]
                pending.resolve(ReloadResult(_changes(answer), pools, answer.restart, done=False))
            elif not self._settle(wait):
                self._waits.append(wait)

        self._office.reloading.reload(then, tuple(names))
        return pending

    def _check(self, names: list[str]) -> None:
        pools = self._office.fleet.pools
        for name in names:
            if name not in pools:
                known = ", ".join(sorted(pools)) or "none"
                raise RpcError(NO_SUCH_NAME, f"no such pool: {name!r}: there are {known}")

    # -- waiting ------------------------------------------------------------------------------

    def settle(self) -> None:
        """After each turn of the loop: answer whoever has got what it waits for."""
        if self._waits:
            self._waits = [wait for wait in self._waits if not self._settle(wait)]

    def ending(self) -> None:
        """The daemon is about to exit."""
        for wait in self._waits:
            wait.pending.fail(RpcError(FAILED, "the daemon is shutting down"))
        self._waits = []

    def _settle(self, wait: Wait) -> bool:
        if wait.pending.abandoned:
            return True
        outcomes = [self._outcome(each) for each in wait.difference.pools]
        settled = [each for each in outcomes if each is not None]
        if len(settled) < len(outcomes):
            return False
        difference = wait.difference
        wait.pending.resolve(ReloadResult(_changes(difference), settled, difference.restart))
        return True

    def _outcome(self, change: PoolChange) -> PoolReload | None:
        """None as long as there is something to wait for."""
        fleet = self._office.fleet
        pool = fleet.pools.get(change.name)
        wanted = any(each.name == change.name for each in fleet.policy.pools)
        if wanted:
            return _outcome(change, pool) if pool is not None and _is_settled(pool) else None
        if pool is not None:
            return None
        return PoolReload(change.name, REMOVED, stranded=fleet.stranded.get(change.name, 0))


def _is_settled(pool: Pool) -> bool:
    under_way = pool.rollout is not None or pool.arriving
    return not under_way and all(slot.state in SETTLED for slot in pool.slots)


def _outcome(change: PoolChange, pool: Pool) -> PoolReload:
    problem = pool.rollout_problem or (pool.reason if change.effect == ADDED else "")
    return PoolReload(change.name, change.effect, ok=not problem, reason=problem)


def _refusal(refused: Refused) -> RpcError:
    return RpcError(FAILED, f"the configuration was refused, nothing changed:\n{refused.reason}")


def _changes(difference: Difference) -> list[KeyChange]:
    return [
        KeyChange(change.key, change.old, change.new, change.effect)
        for change in difference.changes
    ]
