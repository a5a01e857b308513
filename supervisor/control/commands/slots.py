"""What people ask of pools and slots on control.sock: start, stop, scale, hold back, signal."""

import os
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from musterd.supervisor.api import convert, rpc
from musterd.supervisor.api.rpc import FAILED, RpcError
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
from musterd.supervisor.control.connection import Pending
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.slot import Slot, SlotState
from musterd.supervisor.core.tasks.pauses import DRAINED
from musterd.supervisor.log.worker_output import Outputs

Names = tuple[tuple[str, int], ...]
Answer = Callable[[], list[SlotResult] | None]


class Office(Protocol):
    """What these commands need of the daemon."""

    fleet: Fleet

    @property
    def outputs(self) -> Outputs: ...
    def feed(self, event: object) -> None: ...
    def signal_worker(self, worker: int, number: int) -> None: ...


class Wait(Struct):
    """A caller that is answered when what it named is where it wants it."""

    pending: Pending
    answer: Answer  # None as long as there is something to wait for


class SlotCommands:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._waits: list[Wait] = []

    def methods(self) -> dict[type, Callable[[Any], object]]:
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
        """The pools and slots these names mean; RpcError if one means none."""
        pools = self._office.fleet.pools
        return expand(
            names, {name: [slot.index for slot in pool.slots] for name, pool in pools.items()}
        )

    def _slots(self, names: Names) -> list[Slot]:
        found: dict[Slot, None] = {}
        for pool_name, index in names:
            pool = self._office.fleet.pools.get(pool_name)
            for slot in pool.slots if pool is not None else ():  # else a reload has removed it
                if index in (WHOLE_POOL, slot.index):
                    found[slot] = None
        return list(found)

    def _named(self, names: Names) -> list[Pool | Slot]:
        """Pools as such, unlike _slots(); a slot that was removed meanwhile is left out."""
        found: list[Pool | Slot] = []
        for pool_name, index in names:
            pool = self._office.fleet.pools.get(pool_name)
            if pool is None:  # a reload has removed it
                continue
            if index == WHOLE_POOL:
                found.append(pool)
            else:
                found += [slot for slot in pool.slots if slot.index == index]
        return found

    # -- workers ------------------------------------------------------------------------------

    def _start(self, params: rpc.Start) -> object:
        names = self.expand(params.names)
        self._office.feed(events.StartRequested(names))
        return self._wait_for(names, params.no_block, _is_up, _is_down)

    def _stop(self, params: rpc.Stop) -> object:
        names = self.expand(params.names)
        self._office.feed(events.StopRequested(names))
        why = "it was started meanwhile"
        return self._wait_for(names, params.no_block, _is_stopped, _is_started_again, why=why)

    def _restart(self, params: rpc.Restart) -> object:
        names = self.expand(params.names)
        before = {slot.name: slot.worker for slot in self._slots(names)}
        self._office.feed(events.RestartRequested(names))
        return self._wait_for(names, params.no_block, _is_up, _is_down, workers=before)

    def _reset(self, params: rpc.Reset) -> object:
        names = self.expand(params.names)
        self._office.feed(events.ResetRequested(names))
        return self._wait_for(names, params.no_block, _is_settled, _is_down)

    def _scale(self, params: rpc.Scale) -> object:
        pool = self._office.fleet.pools.get(params.pool)
        if pool is None:
            self.expand([params.pool])  # says which names there are
            known = ", ".join(self._office.fleet.pools)
            raise RpcError(
                rpc.NO_SUCH_NAME,
                f"no such pool: {params.pool!r}: scale takes the name of one pool, of {known}",
            )
        if params.size == "auto":
            self._office.feed(events.AutoscaleRequested(params.pool))
        else:
            bound = self._office.fleet.bound(pool)
            if params.size > max(bound, pool.size):
                raise RpcError(
                    rpc.FAILED,
                    f"{params.pool} may have {max(0, bound)} workers beside those of the other "
                    f"pools: supervisor.workers_max is {self._office.fleet.policy.workers_max}",
                )
            self._office.feed(events.ScaleRequested(params.pool, params.size))
        return self._wait_for(
            ((params.pool, WHOLE_POOL),),
            params.no_block,
            lambda slot: not slot.removed and _is_up(slot),
            _is_down,
        )

    def _signal(self, params: rpc.Signal) -> object:
        number = convert.signal_number(params.signal)
        results = []
        for slot in self._slots(self.expand(params.names)):
            if slot.pid:
                self._office.signal_worker(slot.worker, number)
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
        outputs = self._office.outputs
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
        self._office.feed(events.PauseRequested(names))
        return CommandResult(slots=[_held(each) for each in self._named(names)])

    def _resume(self, params: rpc.Resume) -> object:
        names = self.expand(params.names or ["all"])
        self._office.feed(events.ResumeRequested(names))
        return CommandResult(slots=[_resumed(each) for each in self._named(names)])

    def _drain(self, params: rpc.Drain) -> object:
        names = self.expand(params.names or ["all"])
        self._office.feed(events.DrainRequested(names))
        if params.no_block:
            return CommandResult(slots=[_held(each) for each in self._named(names)], done=False)

        def answer() -> list[SlotResult] | None:
            held = self._named(names)
            if any(each.halt == DRAINED and _runs(each) for each in held):
                return None
            return [_drained(each) for each in held]

        return self._wait(answer)

    # -- waiting for the outcome --------------------------------------------------------------

    def _wait_for(
        self,
        names: Names,
        no_block: bool,
        reached: Callable[[Slot], bool],
        failed: Callable[[Slot], bool],
        *,
        workers: dict[str, int] | None = None,  # for a restart: those that must be gone
        why: str = "",  # it failed; "": the slot knows
    ) -> object:
        if no_block:
            slots = self._slots(names)
            return CommandResult(slots=[_result(slot, True) for slot in slots], done=False)

        def answer() -> list[SlotResult] | None:
            results = []
            for slot in self._slots(names):
                still_old = (workers or {}).get(slot.name) == slot.worker != 0
                if not still_old and reached(slot):
                    results.append(_result(slot, True))
                elif not still_old and failed(slot):
                    results.append(_result(slot, False, why or slot.reason))
                else:
                    return None
            return results

        return self._wait(answer)

    def _wait(self, answer: Answer) -> Pending:
        wait = Wait(Pending(), answer)
        if not self._settle(wait):
            self._waits.append(wait)
        return wait.pending

    def _settle(self, wait: Wait) -> bool:
        """Answer if there is nothing left to wait for; whether it did."""
        if wait.pending.abandoned:
            return True
        results = wait.answer()
        if results is None:
            return False
        wait.pending.resolve(CommandResult(slots=results))
        return True

    def settle(self) -> None:
        """After each turn of the loop: answer whoever has got what it waits for."""
        if self._waits:
            self._waits = [wait for wait in self._waits if not self._settle(wait)]

    def ending(self) -> None:
        for wait in self._waits:
            wait.pending.fail(RpcError(FAILED, "the daemon is shutting down"))
        self._waits = []


def _is_up(slot: Slot) -> bool:
    return slot.state == SlotState.RUNNING


def _is_down(slot: Slot) -> bool:
    return slot.state in (SlotState.FATAL, SlotState.BACKOFF, SlotState.STOPPED)


def _is_stopped(slot: Slot) -> bool:
    return slot.state == SlotState.STOPPED


def _is_settled(slot: Slot) -> bool:
    return slot.state in (SlotState.RUNNING, SlotState.STOPPED)


def _is_started_again(slot: Slot) -> bool:
    """It was told to stop, and then somebody else wanted it."""
    return _is_up(slot) or (slot.state == SlotState.DRAINING and slot.restart_after_stop)


def _result(slot: Slot, ok: bool, reason: str = "") -> SlotResult:
    return SlotResult(name=slot.name, ok=ok, state=slot.shown_state, pid=slot.pid, reason=reason)


def _runs(held: Pool | Slot) -> int:
    """How many tasks are with its workers."""
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
