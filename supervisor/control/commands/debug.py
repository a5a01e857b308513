"""The command `debug` on control.sock: a person and the debugger of a task talk to each other.

The connection itself is the session: a terminal that dies ends its connection, and with it the
session (core/tasks/debugging.py). Only callers who may control get here (access.py).
"""

from msgspec import Struct

from musterd.supervisor.api.debugging import DebugBegun, DebugResult, DebugText
from musterd.supervisor.api.rpc import FAILED, Debug, DebugLine, RpcError
from musterd.supervisor.api.status import expand, means
from musterd.supervisor.control.answers import Dialogue
from musterd.supervisor.core.model import debug_events
from musterd.supervisor.core.tasks.debugging import DebugSession
from musterd.supervisor.shell import Shell
from musterd.supervisor.sockets.listen import Caller

NAMED_MAX = 5  # waiting slots that an error names


class DebugCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._dialogues: dict[int, Dialogue] = {}  # by worker

    def begin(self, params: Debug, caller: Caller) -> object:
        """Return the dialogue with the debugger of the named task that waits for one."""
        session = self._wanted(params.names)
        worker, name = session.worker, session.slot.name
        task = session.slot.leases[session.lease]
        opening = DebugBegun(
            debugging=name,
            task=task.spec.id,
            name=task.spec.name,
            attempt=task.attempt,
            where=session.where,
        )

        def heard(params: Struct) -> None:
            if isinstance(params, DebugLine):
                self._shell.feed(debug_events.DebuggerTyped(worker, params.line))
            else:
                self._shell.feed(debug_events.DebuggerInterrupted(worker))

        over = DebugResult(name=name, reason="the daemon is shutting down")
        dialogue = Dialogue(opening, heard, lambda: self._gone(worker), over)
        self._dialogues[worker] = dialogue
        who = f"uid {caller.uid}, process {caller.pid}"
        self._shell.feed(debug_events.DebuggerAttached(worker, who))
        return dialogue

    def _wanted(self, names: list[str]) -> DebugSession:
        """Return the one named session that waits; RpcError if there is none, or several."""
        fleet = self._shell.fleet
        expand(names, {p.name: [s.index for s in p.slots] for p in fleet.pools.values()})
        found = [
            each for each in fleet.debugged.values() if not names or means(names, each.slot.name)
        ]
        waiting = [each for each in found if not each.who]
        if len(waiting) == 1:
            return waiting[0]
        if waiting:
            several = _shown(waiting)
            raise RpcError(FAILED, f"several tasks wait for a debugger: name one of {several}")
        if found:
            who = ", ".join(f"{each.slot.name} by {each.who}" for each in found[:NAMED_MAX])
            raise RpcError(FAILED, f"it is debugged already: {who}")
        others = [each for each in fleet.debugged.values() if not each.who]
        if others:
            raise RpcError(FAILED, f"no task waits for a debugger there, but in {_shown(others)}")
        refusing = [
            pool.name
            for pool in fleet.pools.values()
            if not pool.policy.debug and (not names or means(names, f"{pool.name}/0"))
        ]
        hint = f"; pool {refusing[0]} does not allow it: debug = true" if refusing else ""
        why = f"no task waits for a debugger: put breakpoint() into its handler{hint}"
        raise RpcError(FAILED, why)

    def show(self, worker: int, text: str, prompt: str | None) -> None:
        """Show the person what the debugger says."""
        dialogue = self._dialogues.get(worker)
        if dialogue is not None:
            dialogue.say(DebugText(text, prompt))

    def close(self, worker: int, reason: str) -> None:
        """Tell the person that it is over."""
        dialogue = self._dialogues.pop(worker, None)
        if dialogue is not None:
            name = dialogue.opening.debugging if isinstance(dialogue.opening, DebugBegun) else ""
            dialogue.resolve(DebugResult(name=name, reason=reason))

    def _gone(self, worker: int) -> None:
        """Have the task go on: the person's connection has ended."""
        if self._dialogues.pop(worker, None) is not None:
            self._shell.feed(debug_events.DebuggerDetached(worker))


def _shown(sessions: list[DebugSession]) -> str:
    names = [each.slot.name for each in sessions]
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"
