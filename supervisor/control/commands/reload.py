"""Commands about the configuration on control.sock: reread, reload, update."""

from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import FAILED, NO_SUCH_NAME, RpcError
from musterd.supervisor.api.status import KeyChange, PoolReload, ReloadResult
from musterd.supervisor.control.answers import LaterAnswers, Methods, Pending
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import SlotState
from musterd.supervisor.service.reload import Answer, Refused, Reloading
from musterd.supervisor.settings.diff import ADDED, REMOVED, Difference, PoolChange
from musterd.supervisor.shell import Shell

SETTLED = (SlotState.RUNNING, SlotState.FATAL, SlotState.BACKOFF, SlotState.STOPPED)


class ReloadCommands:
    def __init__(self, shell: Shell, answers: LaterAnswers, reloading: Reloading) -> None:
        self._shell = shell
        self._answers = answers
        self._reloading = reloading

    def methods(self) -> Methods:
        return {rpc.Reread: self._reread, rpc.Reload: self._reload, rpc.Update: self._reload}

    def _reread(self, _params: rpc.Reread) -> Pending:
        pending = Pending()

        def then(answer: Answer | Refused) -> None:
            pending.resolve(_refusal(answer) if isinstance(answer, Refused) else _planned(answer))

        self._reloading.read(then)
        return pending

    def _reload(self, params: rpc.Reload | rpc.Update) -> Pending:
        names, code = (params.names, params.code) if isinstance(params, rpc.Reload) else ([], False)
        self._check(names)
        pending = Pending()

        def then(answer: Answer | Refused) -> None:
            if isinstance(answer, Refused):
                pending.fail(_refusal(answer))
            elif params.no_block:
                pending.resolve(_planned(answer))
            else:
                self._answers.wait(pending, lambda: self._tell(pending, answer))

        self._reloading.reload(then, tuple(names), code=code)
        return pending

    def _check(self, names: list[str]) -> None:
        pools = self._shell.fleet.pools
        for name in names:
            if name not in pools:
                known = ", ".join(sorted(pools)) or "none"
                raise RpcError(NO_SUCH_NAME, f"no such pool: {name!r}: there are {known}")

    def _tell(self, pending: Pending, answer: Answer) -> bool:
        """Answer once every pool is where the new configuration wants it; whether it did."""
        difference = answer.difference
        outcomes = [self._outcome(each) for each in difference.pools]
        settled = [each for each in outcomes if each is not None]
        if len(settled) < len(outcomes):
            return False
        pending.resolve(
            ReloadResult(_changes(difference), settled, difference.restart, newer=answer.newer)
        )
        return True

    def _outcome(self, change: PoolChange) -> PoolReload | None:
        """Return what became of the pool; None while its workers are still being replaced."""
        fleet = self._shell.fleet
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


def _planned(answer: Answer) -> ReloadResult:
    """Return what a reload will do, before it is done."""
    difference = answer.difference
    pools = [PoolReload(each.name, each.effect) for each in difference.pools]
    return ReloadResult(_changes(difference), pools, difference.restart, False, answer.newer)


def _changes(difference: Difference) -> list[KeyChange]:
    return [
        KeyChange(change.key, change.old, change.new, change.effect)
        for change in difference.changes
    ]
