"""Commands about pools and slots on control.sock: start, stop, scale, pause, drain, signal."""

import os
from collections.abc import Callable

from musterd.ipc.wire.messages import Rejection
from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import RpcError
from musterd.supervisor.api.status import (
    WHOLE_POOL,
    CommandResult,
    OutputLine,
    PidResult,
    SlotPid,
    SlotResult,
    TailResult,
    WorkerOutput,
    expand,
    means,
)
from musterd.supervisor.control.answers import LaterAnswers, Methods, Pending
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.tasks.pauses import DRAINED
from musterd.supervisor.service.newer_code import Check
from musterd.supervisor.service.reload import Reloading
from musterd.supervisor.shell import Shell

Names = tuple[tuple[str, int], ...]


class SlotCommands:
    def __init__(self, shell: Shell, answers: LaterAnswers, reloading: Reloading) -> None:
        self._shell = shell
        self._answers = answers
        self._reloading = reloading

    def methods(self) -> Methods:
        return {
            rpc.Start: self._start,
            rpc.Stop: self._stop,
            rpc.Restart: self._restart,
            rpc.Reset: self._reset,
            rpc.Scale: self._scale,
            rpc.Pause: self._pause,
            rpc.Drain: self._drain,
            rpc.Resume: self._resume,
            rpc.Signal: self._signal,
            rpc.Pid: self._pid,
            rpc.Tail: self._tail,
            rpc.Events: lambda params: self.expand(params.names),  # the ControlServer does the rest
        }

    # -- names --------------------------------------------------------------------------------

    def expand(self, names: list[str]) -> Names:
        """Return the pools and slots that these names mean; RpcError if one means none."""
        pools = self._shell.fleet.pools
        return expand(
            names, {name: [slot.index for slot in pool.slots] for name, pool in pools.items()}
        )

    def _slots(self, names: Names) -> list[Slot]:
        found: dict[Slot, None] = {}
        for pool_name, index in names:
            pool = self._shell.fleet.pools.get(pool_name)
            for slot in (
                pool.slots if pool is not None else ()
            ):  # else a reload has removed the pool
                if index in (WHOLE_POOL, slot.index):
                    found[slot] = None
        return list(found)

    def _named(self, names: Names) -> list[Pool | Slot]:
        """Return pools and slots, without those that were removed meanwhile."""
        found: list[Pool | Slot] = []
        for pool_name, index in names:
            pool = self._shell.fleet.pools.get(pool_name)
            if pool is None:  # a reload has removed the pool
                continue
            if index == WHOLE_POOL:
                found.append(pool)
            else:
                found += [slot for slot in pool.slots if slot.index == index]
        return found

    # -- workers ------------------------------------------------------------------------------

    def _start(self, params: rpc.Start) -> object:
        names = self.expand(params.names)
        self._shell.feed(events.StartRequested(names))
        return self._wait_for(names, params.no_block, _is_up, _is_down)

    def _stop(self, params: rpc.Stop) -> object:
        names = self.expand(params.names)
        self._shell.feed(events.StopRequested(names))
        why = "it was started meanwhile"
        return self._wait_for(names, params.no_block, _is_stopped, _is_started_again, why=why)

    def _restart(self, params: rpc.Restart) -> object:
        names = self.expand(params.names)
        before = {slot.name: slot.worker for slot in self._slots(names)}
        code = self._reloading.code.ask({pool for pool, _ in names})
        self._shell.feed(events.RestartRequested(names))
        return self._wait_for(names, params.no_block, _is_up, _is_down, workers=before, code=code)

    def _reset(self, params: rpc.Reset) -> object:
        names = self.expand(params.names)
        self._shell.feed(events.ResetRequested(names))
        return self._wait_for(names, params.no_block, _is_settled, _is_down)

    def _scale(self, params: rpc.Scale) -> object:
        pool = self._shell.fleet.pools.get(params.pool)
        if pool is None:
            self.expand([params.pool])  # raises with the names there are
            known = ", ".join(self._shell.fleet.pools)
            raise RpcError(
                rpc.NO_SUCH_NAME,
                f"no such pool: {params.pool!r}: scale takes the name of one pool, of {known}",
            )

        def scaled(rejected: list[Rejection]) -> None:
            if rejected:
                pending.fail(RpcError(rpc.FAILED, rejected[0].message))
            else:
                self._wait_for(
                    ((params.pool, WHOLE_POOL),),
                    params.no_block,
                    lambda slot: not slot.removed and _is_up(slot),
                    _is_down,
                    pending=pending,
                )

        if params.size == "auto":
            pending = Pending()
            self._shell.feed(events.AutoscaleRequested(params.pool))
            scaled([])
        else:
            token, pending = self._answers.begin(scaled)
            self._shell.feed(events.ScaleRequested(params.pool, params.size, token))
        return pending

    def _signal(self, params: rpc.Signal) -> object:
        number = convert.signal_number(params.signal)
        results = []
        for slot in self._slots(self.expand(params.names)):
            if slot.pid:
                self._shell.signal_worker(slot.worker, number)
            results.append(_result(slot, bool(slot.pid), "" if slot.pid else "it has no process"))
        return CommandResult(slots=results)

    def _pid(self, params: rpc.Pid) -> object:
        slots = self._slots(self.expand(params.names)) if params.names else []
        return PidResult(
            supervisor=os.getpid(),
            workers=[SlotPid(slot.name, slot.pid) for slot in slots if slot.pid],
        )

    def _tail(self, params: rpc.Tail) -> object:
        if params.names:
            self.expand(params.names)
        outputs = self._shell.outputs
        names = [name for name in outputs.names if not params.names or means(params.names, name)]
        return TailResult(
            workers=[
                WorkerOutput(
                    name=name,
                    lines=[OutputLine(s.at, s.text) for s in outputs.tail(name, params.lines)],
                )
                for name in sorted(names)
            ]
        )

    # -- holding back -------------------------------------------------------------------------

    def _pause(self, params: rpc.Pause) -> object:
        names = self.expand(params.names)
        self._shell.feed(events.PauseRequested(names))
        return CommandResult(slots=[_held(each) for each in self._named(names)])

    def _resume(self, params: rpc.Resume) -> object:
        names = self.expand(params.names or ["all"])
        self._shell.feed(events.ResumeRequested(names))
        return CommandResult(slots=[_resumed(each) for each in self._named(names)])

    def _drain(self, params: rpc.Drain) -> object:
        names = self.expand(params.names or ["all"])
        self._shell.feed(events.DrainRequested(names))
        if params.no_block:
            return CommandResult(slots=[_held(each) for each in self._named(names)], done=False)

        def results() -> list[SlotResult] | None:
            held = self._named(names)
            if any(each.halt == DRAINED and _runs(each) for each in held):
                return None
            return [_drained(each) for each in held]

        return self._wait(Pending(), results)

    # -- waiting for the outcome --------------------------------------------------------------

    def _wait_for(
        self,
        names: Names,
        no_block: bool,
        reached: Callable[[Slot], bool],
        failed: Callable[[Slot], bool],
        *,
        workers: dict[str, int] | None = None,  # for a restart: those that must be gone
        why: str = "",  # the reason of a failure; "": the slot knows
        pending: Pending | None = None,
        code: Check | None = None,  # to be told with the outcome
    ) -> Pending:
        """Answer when each slot has reached or failed what was asked for."""
        pending = pending or Pending()
        if no_block:
            slots = self._slots(names)
            pending.resolve(
                CommandResult(slots=[_result(slot, True) for slot in slots], done=False)
            )
            return pending

        def results() -> list[SlotResult] | None:
            found = []
            for slot in self._slots(names):
                still_old = (workers or {}).get(slot.name) == slot.worker != 0
                if not still_old and reached(slot):
                    found.append(_result(slot, True))
                elif not still_old and failed(slot):
                    found.append(_result(slot, False, why or slot.reason))
                else:
                    return None
            return found

        return self._wait(pending, results, code)

    def _wait(
        self,
        pending: Pending,
        results: Callable[[], list[SlotResult] | None],
        code: Check | None = None,
    ) -> Pending:
        """Answer with `results`, which returns None while there is something to wait for."""

        def attempt() -> bool:
            slots = results()
            if slots is None or (code is not None and not code.over):
                return False
            newer = code.result if code is not None else []
            pending.resolve(CommandResult(slots=slots, newer=newer))
            return True

        return self._answers.wait(pending, attempt)


def _is_up(slot: Slot) -> bool:
    return slot.state == SlotState.RUNNING


def _is_down(slot: Slot) -> bool:
    return slot.state in (SlotState.FATAL, SlotState.BACKOFF, SlotState.STOPPED)


def _is_stopped(slot: Slot) -> bool:
    return slot.state == SlotState.STOPPED


def _is_settled(slot: Slot) -> bool:
    return slot.state in (SlotState.RUNNING, SlotState.STOPPED)


def _is_started_again(slot: Slot) -> bool:
    """Whether another command has started the slot after it was stopped."""
    return _is_up(slot) or (slot.state == SlotState.DRAINING and slot.restart_after_stop)


def _result(slot: Slot, ok: bool, reason: str = "") -> SlotResult:
    return SlotResult(name=slot.name, ok=ok, state=slot.shown_state, pid=slot.pid, reason=reason)


def _runs(held: Pool | Slot) -> int:
    """Return how many tasks its workers have."""
    return held.leased if isinstance(held, Pool) else len(held.leases)


def _held(held: Pool | Slot) -> SlotResult:
    running = _runs(held)
    reason = f"{running} still running" if running else ""
    return SlotResult(name=held.name, ok=True, state=held.halt, reason=reason)


def _drained(held: Pool | Slot) -> SlotResult:
    if held.halt != DRAINED:
        state, reason = held.halt or "resumed", "it was resumed meanwhile"
        return SlotResult(name=held.name, ok=False, state=state, reason=reason)
    kept = held.held if isinstance(held, Pool) else 0
    reason = f"{kept} tasks wait in its queue" if kept else ""
    return SlotResult(name=held.name, ok=True, state=held.halt, reason=reason)


def _resumed(held: Pool | Slot) -> SlotResult:
    if isinstance(held, Slot) and held.pool.halt:
        pool = held.pool
        reason = f"its pool is {pool.halt}: musterctl resume {pool.name}"
        return SlotResult(name=held.name, ok=False, state=pool.halt, reason=reason)
    return SlotResult(name=held.name, ok=True, state="resumed")
