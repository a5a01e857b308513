"""A cluster sidecar in the simulation: the real claimer, and what goes wrong around it.

Messages are those of node.sock (sockets/node.py makes them), and come in order. Calls of the engine
are made by threads: those of one thread one after the other, the others as it happens. A call may
be lost before its effect or its answer after it. The call of a sidecar that is dead may still take
effect: the server has read it. It does so before the calls of the next sidecar, which ends the
sessions of the former first (cluster/checks.py: be_alone).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from musterd.supervisor.cluster.claimer import Claimer, Leave, Tell
from musterd.supervisor.cluster.engine import EngineAway, Fenced, Grant, NodeCard, Want
from musterd.supervisor.cluster.gateway import Figures as GatewayFigures
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EngineAnswered,
    EngineFailed,
    NodeNotified,
    PoolsNotified,
)
from musterd.supervisor.cluster.translate import figures, notice
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.sockets.node import event_of, messages_of
from simulation.profile import MS, SEC, US

if TYPE_CHECKING:
    from simulation.cluster import Node

LEASE_NS = 3 * SEC
WIRE_NS = (20 * US, 1 * MS)
CALL_NS = (300 * US, 8 * MS)  # of the engine, and back
ENDS = ("finish", "begun", "progress")  # one thread makes these


class Sidecar:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._world = node.world
        self.alive = True
        card = NodeCard(f"identity{node.number}", node.name, LEASE_NS, "")
        self._claimer = Claimer(card, Random(node.rng.random()))
        self._arrival_ns = self._departure_ns = 0
        self._free_ns: dict[str, int] = {}  # when a thread has done its last call
        self._stopped_until_ns = 0
        self._woken_ns: int | None = None
        self._counted: object = None

    @property
    def tenure(self) -> int:
        return self._claimer.tenure

    def stop(self, for_ns: int) -> None:
        """Do nothing for a while; what comes waits."""
        self._stopped_until_ns = self._world.now_ns + for_ns

    # -- the supervisor -----------------------------------------------------------------------

    def hear(self, action: Any) -> None:
        world = self._world
        for message in messages_of(action):
            self._arrival_ns = max(self._arrival_ns + 1, world.now_ns + world.delay(*WIRE_NS))
            world.after(self._arrival_ns - world.now_ns, self._feed, message)

    def _say(self, event: Any) -> None:
        world = self._world
        self._departure_ns = max(self._departure_ns + 1, world.now_ns + world.delay(*WIRE_NS))
        delay_ns = self._departure_ns - world.now_ns
        self._node.in_life(delay_ns, self._node.hear_from_sidecar, self, event)

    # -- the claimer --------------------------------------------------------------------------

    def _feed(self, event: Any) -> None:
        if not self.alive:
            return
        world, claimer = self._world, self._claimer
        if world.now_ns < self._stopped_until_ns:
            # In the order in which it came: those that wait have lower numbers.
            world.after(self._stopped_until_ns - world.now_ns, self._feed, event)
            return
        world.trace.append((world.now_ns, f"{self._node.name} =>", event))
        actions = claimer.handle(self._node.now_ns, event)
        claimer.validate()
        for action in actions:
            world.trace.append((world.now_ns, f"{self._node.name} ==", action))
            if isinstance(action, Call):
                self._call(action)
            elif isinstance(action, Tell):
                self._say(event_of(action.message))
            elif isinstance(action, Report):
                self._say(event_of(notice(action)))
        if isinstance(event, events.Ticked):
            self._tell_figures()
        self._come_back()

    def _tell_figures(self) -> None:
        counted = figures(self._claimer.figures, GatewayFigures(), refusing=False)
        if counted != self._counted:
            self._counted = counted
            self._say(event_of(counted))

    def _come_back(self) -> None:
        due_ns = self._claimer.next_deadline()
        if due_ns is None:
            return
        due_ns = max(due_ns - self._node.offset_ns, self._world.now_ns)
        if self._woken_ns is None or due_ns < self._woken_ns:
            self._woken_ns = due_ns
            self._world.after(due_ns - self._world.now_ns, self._wake, due_ns)

    def _wake(self, due_ns: int) -> None:
        if due_ns == self._woken_ns:
            self._woken_ns = None
            self._feed(events.Ticked())

    def notify(self, event: PoolsNotified | NodeNotified) -> None:
        self._world.after(self._world.delay(*CALL_NS), self._feed, event)

    def leave(self) -> None:
        """The node has shut down."""
        self._feed(Leave())

    # -- the engine ---------------------------------------------------------------------------

    def _call(self, call: Call) -> None:
        world = self._world
        thread = "ends" if call.method in ENDS else call.method
        begin_ns = max(world.now_ns, self._free_ns.get(thread, 0))
        arrive_ns = begin_ns + world.delay(*CALL_NS) // 2
        answer_ns = arrive_ns + world.delay(*CALL_NS) // 2
        self._free_ns[thread] = answer_ns
        world.after(arrive_ns - world.now_ns, self._arrive, call, answer_ns)

    def _arrive(self, call: Call, answer_ns: int) -> None:
        """The call reaches the engine, or not; so does the answer."""
        world = self._world
        if not self.alive and (self._node.sidecar is not None or world.rng.random() < 0.5):
            return
        lost = 0.0 if world.is_calm else world.faults.lost
        event: EngineAnswered | EngineFailed
        if self._node.cut or world.rng.random() < lost / 2:
            unsent = world.rng.random() < 0.5
            event = EngineFailed(call.ticket, "before its effect", unsent=unsent)
        else:
            try:
                event = EngineAnswered(call.ticket, self._effect(call))
            except Fenced as error:
                world.fenced += 1
                event = EngineFailed(call.ticket, str(error), fenced=True)
            except EngineAway as error:
                event = EngineFailed(call.ticket, str(error))
            if world.rng.random() < lost / 2:
                event = EngineFailed(call.ticket, "after its effect")
        world.after(answer_ns - world.now_ns, self._feed, event)

    def _effect(self, call: Call) -> object:
        world = self._world
        held = {(task.spec.id, task.claim) for task in world.engine.board.claimed()}
        result: object = getattr(world.engine, call.method)(*call.arguments, **call.options)
        match call.method, call.arguments, result:
            case "claim", (_, wants), list(grants):
                world.check_places()
                _check_grants(wants, grants)  # type: ignore[arg-type]
            case "finish", (_, list(ends)), list(told):
                world.finished(
                    ends, {pair for pair in held if pair[0] in {each.id for each in told}}
                )
            case "reap", _, list(reaped):
                world.reaped += len(reaped)
        return result


def _check_grants(wants: list[Want], grants: list[Grant]) -> None:
    wanted = sum(want.count for want in wants)
    assert len(grants) <= wanted, f"{len(grants)} grants for {wanted} wanted"
