"""Check the states and locks that handlers of several nodes share.

A lock has one holder, as long as the leases of the nodes are valid: of two nodes whose leases are
valid by their own clocks, one has it at most. A wait for a lock is answered in time. A save that
was answered has reached the engine, and no load that is asked for later returns anything older. The
engine takes no save of an attempt after another attempt of its task was granted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events
from musterd.supervisor.core.tasks.handler_requests import TRY_NS
from simulation.profile import MS

if TYPE_CHECKING:
    from simulation.cluster import ClusterWorld, Node

LATE_NS = 1 * MS


class SharedWatch:
    """What all nodes have together."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._values = 0
        self._written: dict[str, list[bytes | None]] = {}  # by key, as the engine took them
        self._safe: dict[str, int] = {}  # the index in it that a handler was told of
        self.nodes: dict[int, NodeWatch] = {}
        self.locks_given = self.locks_refused = self.saves = self.loads = 0

    def new_value(self) -> bytes:
        self._values += 1
        return b"%d" % self._values

    def written(self, key: str) -> list[bytes | None]:
        return self._written.setdefault(key, [None])

    def wrote(self, key: str, value: bytes | None) -> None:
        """The engine has saved or cleared a state."""
        self.written(key).append(value)

    def floor(self, key: str) -> int:
        return self._safe.get(key, 0)

    def check_saved(self, key: str, value: bytes | None, since: int) -> None:
        written = self.written(key)
        places = [n for n in range(since, len(written)) if written[n] == value]
        assert places, f"state {key}: {value!r} was answered, and is not in {written[since:]}"
        self._safe[key] = max(places[0], self.floor(key))
        self.saves += 1

    def check_loaded(self, key: str, value: bytes | None, since: int) -> None:
        found = self.written(key)[since:]
        assert value in found, f"state {key} is {value!r}, and not one of {found}"
        self.loads += 1

    def check_given(self, node: Node, name: str, lease: int) -> None:
        for other in self.nodes.values():
            holder = other.holders.get(name)
            if holder is not None and (other.node is node or other.is_member):
                raise AssertionError(
                    f"lock {name} goes to lease {lease} of {node.name} while lease {holder} of "
                    f"{other.node.name} has it"
                )


class NodeWatch:
    """What one node asks for, in one life."""

    def __init__(self, node: Node, shared: SharedWatch) -> None:
        self.node = node
        self._shared = shared
        shared.nodes[node.number] = self
        self.holders: dict[str, int] = {}  # of locks: the leases of this node
        self._states: dict[tuple[int, int], tuple[str, Any, int]] = {}
        self._locks: dict[tuple[int, int], tuple[str, int, int]] = {}  # name, lease, deadline
        self.excused_ns = 0  # the supervisor was stopped until then

    @property
    def is_member(self) -> bool:
        """Whether the lease is valid, by the clock of this machine."""
        node = self.node
        return node.up and node.tenure != 0 and node.now_ns < node.until_ns

    def new_value(self) -> bytes:
        return self._shared.new_value()

    # -- the truth ----------------------------------------------------------------------------

    def gave_back(self, lease: int, name: str) -> None:
        if self.holders.get(name) == lease:
            del self.holders[name]
        self._forget(lambda asked, of: (asked, of) == (name, lease))

    def let_go(self, lease: int) -> None:
        for name in [name for name, holder in self.holders.items() if holder == lease]:
            del self.holders[name]
        self._forget(lambda _, of: of == lease)

    def _forget(self, over: Any) -> None:
        for asked, (name, lease, _) in list(self._locks.items()):
            if over(name, lease):
                del self._locks[asked]

    def lost_tenure(self) -> None:
        """What its attempts hold is not theirs any more."""
        self.holders.clear()

    # -- the core -----------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        match event:
            case events.StateWanted(worker, request, key):
                self._states[worker, request] = (key, None, self._shared.floor(key))
            case events.StateGiven(worker, request, key, value):
                since = len(self._shared.written(key))
                self._states[worker, request] = (key, (value,), since)
            case events.LockWanted(worker, lease, request, name, timeout_ns):
                slot = self.node.fleet._state.workers.get(worker)
                if slot is not None and lease in slot.leases:
                    until_ns = self.node.now_ns + (timeout_ns or TRY_NS)
                    self._locks[worker, request] = (name, lease, until_ns)
            case events.LockReturned(_, lease, name):
                self.gave_back(lease, name)
            case events.LeasesCompleted() | events.LeasesReturned():
                for lease in event.leases:
                    self.let_go(lease)
            case events.WorkerExited(worker):
                for asked, (_, lease, _) in list(self._locks.items()):
                    if asked[0] == worker:
                        self.let_go(lease)

    def handled(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, act.AnswerState):
                self._state_answered(action)
            elif isinstance(action, act.AnswerLock):
                self._lock_answered(action)
        now_ns = self.node.now_ns
        for name, lease, until_ns in self._locks.values():
            late = now_ns > max(until_ns, self.excused_ns) + LATE_NS
            assert not late, f"lease {lease} of {self.node.name} waits for lock {name}"

    def _state_answered(self, action: act.AnswerState) -> None:
        key, saved, since = self._states.pop((action.worker, action.request))
        if action.error:
            return
        if saved is None:
            self._shared.check_loaded(key, action.value, since)
        else:
            self._shared.check_saved(key, saved[0], since)

    def _lock_answered(self, action: act.AnswerLock) -> None:
        asked = self._locks.pop((action.worker, action.request), None)
        if asked is None:
            return  # its handler is over, and the core does not know yet
        name, lease, _ = asked
        if not action.taken:
            self._shared.locks_refused += 1
            return
        assert self.is_member or self.node.until_ns == 0, f"lock {name} is given without a lease"
        self._shared.check_given(self.node, name, lease)
        self._shared.locks_given += 1
        worker = self.node.workers[action.worker]
        if worker.alive and worker.running is not None and worker.running.lease == lease:
            self.holders[name] = lease
