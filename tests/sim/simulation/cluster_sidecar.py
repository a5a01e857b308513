"""A cluster sidecar in the simulation: the real claimer and scheduler, and what goes wrong there.

Messages are those of node.sock (sockets/node.py makes them), and come in order. Calls of the engine
are made by threads: those of one thread one after the other, the others as it happens. A call may
be lost before its effect or its answer after it. The call of a sidecar that is dead may still take
effect: the server has read it. It does so before the calls of the next sidecar, which ends the
sessions of the former first (cluster/checks.py: be_alone).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import msgspec

from musterd.ipc.wire.messages import TaskSpec
from musterd.ipc.wire.node_messages import NewsTold, SharedPolicy, SidecarMessage
from musterd.supervisor.cluster.claimer import Claimer
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    DueSchedule,
    EngineAway,
    Fenced,
    Grant,
    NodeCard,
    Settled,
    Want,
)
from musterd.supervisor.cluster.gateway import Figures as GatewayFigures
from musterd.supervisor.cluster.reports import figures, notice
from musterd.supervisor.cluster.scheduler import Scheduler
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EngineAnswered,
    EngineFailed,
    Leave,
    NodeNotified,
    PoolsNotified,
    Standing,
    Tell,
)
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.sockets.node import event_of, messages_of
from simulation.profile import MS, SEC, US

if TYPE_CHECKING:
    from simulation.cluster import Node

LEASE_NS = 3 * SEC
WIRE_NS = (20 * US, 1 * MS)
CALL_NS = (300 * US, 8 * MS)  # of the engine, and back
FORBIDDEN = b"\x81\xa8password\x01"  # arguments that a node refuses to run with
THREADS = {  # of calls that one thread makes; each of the others has its own
    **dict.fromkeys(("finish", "begun", "progress"), "ends"),
    **dict.fromkeys(("states", "locks"), "handlers"),
}
SLOW = 0.05  # of the calls for handlers: their sidecar may die meanwhile
SLOW_NS = (100 * MS, 2 * SEC)


class Sidecar:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._world = node.world
        node.sidecars += 1
        self.number = node.sidecars
        self.alive = True
        card = NodeCard(f"identity{node.number}", node.name, LEASE_NS, "")
        self._claimer = Claimer(card, Random(node.rng.random()), problems=_problems)
        self._scheduler = Scheduler(Random(node.rng.random()), ZoneInfo)
        self._standing: Standing | None = None  # as the scheduler knows it
        self._arrival_ns = self._departure_ns = 0
        self._free_ns: dict[str, int] = {}  # when a thread has done its last call
        self._stopped_until_ns = 0
        self._waiting: list[tuple[Any, Claimer | Scheduler | None]] = []  # while it is stopped
        self._woken_ns: int | None = None
        self._counted: object = None

    @property
    def tenure(self) -> int:
        return self._claimer.tenure

    def stop(self, for_ns: int) -> None:
        """Do nothing for a while; what comes waits."""
        self._stopped_until_ns = max(self._stopped_until_ns, self._world.now_ns + for_ns)

    # -- the supervisor -----------------------------------------------------------------------

    def hear(self, action: Any) -> None:
        world = self._world
        for message in messages_of(action):
            self._arrival_ns = max(self._arrival_ns + 1, world.now_ns + world.delay(*WIRE_NS))
            world.after(self._arrival_ns - world.now_ns, self._feed, message)

    def _say(self, message: SidecarMessage) -> None:
        world, event = self._world, _event_of(message)
        self._departure_ns = max(self._departure_ns + 1, world.now_ns + world.delay(*WIRE_NS))
        delay_ns = self._departure_ns - world.now_ns
        self._node.in_life(delay_ns, self._node.hear_from_sidecar, self, event)

    # -- the claimer and the scheduler --------------------------------------------------------

    def _feed(self, event: Any, of: Claimer | Scheduler | None = None) -> None:
        """Feed an event to the one whose call it answers, or to those whom it concerns."""
        if not self.alive:
            return
        world = self._world
        if world.now_ns < self._stopped_until_ns:
            if not self._waiting:
                world.after(self._stopped_until_ns - world.now_ns, self._go_on)
            self._waiting.append((event, of))
            return
        world.trace.append((world.now_ns, f"{self._node.name} =>", event))
        both = isinstance(event, Leave | events.Ticked)
        of = self._scheduler if isinstance(event, NewsTold) else of
        for core in (self._claimer, self._scheduler):
            if core is (of or self._claimer) or both:
                self._do(core, core.handle(self._node.now_ns, event))
        if isinstance(event, events.Ticked):
            self._tell_figures()
        self._claimer.validate()
        standing = self._claimer.standing
        if standing is not None and standing != self._standing:
            self._standing = standing
            self._feed(standing, self._scheduler)
        self._come_back()

    def _tell_figures(self) -> None:
        policy = self._claimer.policy or 0
        counted = figures(self._claimer.figures, GatewayFigures(), refusing=False, policy=policy)
        if counted != self._counted:
            self._counted = counted
            self._say(counted)

    def _go_on(self) -> None:
        """Hear what came while the process was stopped, in the order in which it came."""
        if self._world.now_ns < self._stopped_until_ns:  # stopped once more meanwhile
            self._world.after(self._stopped_until_ns - self._world.now_ns, self._go_on)
            return
        waiting, self._waiting = self._waiting, []
        for event, of in waiting:
            self._feed(event, of)

    def _do(self, core: Claimer | Scheduler, actions: Any) -> None:
        for action in actions:
            self._world.trace.append((self._world.now_ns, f"{self._node.name} ==", action))
            if isinstance(action, Call):
                self._call(action, core)
            elif isinstance(action, Tell):
                self._say(action.message)
            elif isinstance(action, Report) and core is self._claimer:
                self._say(notice(action))

    def _come_back(self) -> None:
        deadlines = (self._claimer.next_deadline(), self._scheduler.next_deadline())
        due = [each for each in deadlines if each is not None]
        if not due:
            return
        due_ns = max(min(due) - self._node.offset_ns, self._world.now_ns)
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

    def _call(self, call: Call, core: Claimer | Scheduler) -> None:
        world = self._world
        thread = THREADS.get(call.method, call.method)
        slow = thread == "handlers" and world.rng.random() < SLOW
        begin_ns = max(world.now_ns, self._free_ns.get(thread, 0))
        arrive_ns = begin_ns + world.delay(*(SLOW_NS if slow else CALL_NS)) // 2
        answer_ns = arrive_ns + world.delay(*CALL_NS) // 2
        self._free_ns[thread] = answer_ns
        world.after(arrive_ns - world.now_ns, self._arrive, call, core, answer_ns)

    def _arrive(self, call: Call, core: Claimer | Scheduler, answer_ns: int) -> None:
        """The call reaches the engine, or not; so does the answer."""
        world, node = self._world, self._node
        if not self.alive and (node.caller > self.number or world.rng.random() < 0.5):
            return
        lost = 0.0 if world.is_calm else world.faults.lost
        event: EngineAnswered | EngineFailed
        if node.cut or world.rng.random() < lost / 2:
            unsent = world.rng.random() < 0.5
            event = EngineFailed(call.ticket, "before its effect", unsent=unsent)
        else:
            node.caller = max(node.caller, self.number)
            try:
                event = EngineAnswered(call.ticket, self._effect(call))
            except Fenced as error:
                world.fenced += 1
                event = EngineFailed(call.ticket, str(error), fenced=True)
            except EngineAway as error:
                event = EngineFailed(call.ticket, str(error))
            if world.rng.random() < lost / 2:
                event = EngineFailed(call.ticket, "after its effect")
        world.after(answer_ns - world.now_ns, self._feed, event, core)

    def _effect(self, call: Call) -> object:
        world = self._world
        held = {(task.spec.id, task.claim) for task in world.engine.board.claimed()}
        result: object = getattr(world.engine, call.method)(*call.arguments, **call.options)
        match call.method, call.arguments, result:
            case "claim", (_, wants), list(grants):
                world.check_places()
                world.check_keys()
                _check_grants(wants, grants)  # type: ignore[arg-type]
                world.logins.granted(grants)
            case "finish", (_, list(ends)), list(told):
                world.finished(
                    ends, {pair for pair in held if pair[0] in {each.id for each in told}}
                )
            case "reap", _, list(reaped):
                world.reaped += len(reaped)
            case "settle", (DueSchedule() as due, runs), _:
                assert result is None or isinstance(result, Settled)
                world.timetable.settled(due, list(runs), result)  # type: ignore[call-overload]
        return result


def _problems(specs: list[TaskSpec]) -> dict[str, str]:
    return {spec.id: "it holds a secret" for spec in specs if spec.args == FORBIDDEN}


def _check_grants(wants: list[Want], grants: list[Grant]) -> None:
    wanted = sum(want.count for want in wants)
    assert len(grants) <= wanted, f"{len(grants)} grants for {wanted} wanted"


def _event_of(message: SidecarMessage) -> object:
    """Return the event that the supervisor makes of a message; a policy comes in one part."""
    if isinstance(message, SharedPolicy):
        assert not message.more
        policy = msgspec.msgpack.decode(message.part, type=ClusterPolicy)
        return events.PolicyShared(message.version, policy)
    return event_of(message)
