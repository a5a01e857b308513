"""Reception: who serves tasks.sock on a node of a cluster.

Its sidecar does, and asks the supervisor over local.sock about the tasks of this machine. While
there is no sidecar, the supervisor serves tasks.sock itself, so that pools that are not shared can
be reached: at once when the sidecar has given up, else TAKE_OVER_NS after its end, because the next
one is there sooner as a rule.

Alone, the supervisor speaks for its own tasks only. A submit with new tasks of shared pools waits
for the sidecar. If none is there after REFUSE_NS, or the sidecar has given up, such tasks are
refused: submit again later. A submit that was sent before gets no answer, because the cluster may
have accepted it. When a sidecar is there, the connections of tasks.sock end, and their clients ask
it.
"""

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import ELSEWHERE, Rejection
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.actions import DropRequest, ServeClients
from musterd.supervisor.core.model.ledger import Ledger
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.tasks.refusals import no_cluster

TAKE_OVER_NS = 2 * SECOND_NS  # less than a client waits for a connection
REFUSE_NS = 30 * SECOND_NS  # what a sidecar may take to start (core/workers/sidecar.py)

RETURNED = "the cluster sidecar is there: ask it"
GONE = "its client is gone"
NOT_RUNNING = "the cluster sidecar does not run"


class _Waiting(Struct, frozen=True):
    """A submit with tasks that are ELSEWHERE; the others are accepted or refused."""

    event: events.TasksSubmitted
    rejected: list[Rejection]


class Reception:
    def __init__(self, state: State, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self.shares = False  # this machine is a node of a cluster
        self.alone = False  # the supervisor serves tasks.sock
        self.refusing = False  # new tasks of shared pools, because there is no sidecar
        self._reason = ""  # why there is no sidecar
        self._connected = False
        self._wait = 0  # the number of the last wait for a sidecar
        self._waiting: dict[bytes, list[_Waiting]] = {}  # by client
        self.follow()

    def follow(self) -> None:
        """Take over a changed policy."""
        policy = self._state.policy
        self.shares = bool(policy.cluster) or any(pool.clustered for pool in policy.pools)

    def started(self) -> None:
        if self.shares:
            self._wait_for_it()

    def connected(self, _event: events.ClusterConnected) -> None:
        self._connected, self.refusing = True, False
        if not self.alone:
            return
        self.alone = False
        self._state.report("cluster.serves", reason="clients reach the cluster again")
        for peer in list(self._waiting):
            self._drop(peer, RETURNED)
        self._state.out.append(ServeClients(False))

    def disconnected(self, _event: events.ClusterDisconnected) -> None:
        self._connected = False
        self._wait_for_it()

    def sidecar_exited(self, reason: str, *, fatal: bool) -> None:
        self._reason = reason
        if fatal:
            self._connected = False
            self._take_over()
            self._refuse()

    def _wait_for_it(self) -> None:
        self._wait += 1
        now_ns, timers = self._state.now_ns, self._state.timers
        timers.at(now_ns + TAKE_OVER_NS, self._overdue, self._wait)
        timers.at(now_ns + REFUSE_NS, self._late, self._wait)

    def _overdue(self, wait: int) -> None:
        if wait == self._wait and not self._connected:
            self._take_over()

    def _late(self, wait: int) -> None:
        if wait == self._wait and not self._connected:
            self._refuse()

    def _take_over(self) -> None:
        if self.alone or not self.shares or not self._state.intake_open:
            return
        self.alone = True
        why = f"{self._reason or NOT_RUNNING}: clients reach the pools of this machine only"
        self._state.report("cluster.local_only", "warning", reason=why)
        self._state.out.append(ServeClients(True))

    # -- submits that the cluster has to answer -------------------------------------------------

    def keeps(self, event: events.TasksSubmitted, rejected: list[Rejection]) -> bool:
        """Keep a submit without an answer if it has tasks that only the cluster can answer."""
        if not self.alone or not any(each.code == ELSEWHERE for each in rejected):
            return False
        waiting = _Waiting(event, rejected)
        if self.refusing and not event.resend:
            self._answer(waiting)
        else:
            self._waiting.setdefault(event.peer, []).append(waiting)
        return True

    def _refuse(self) -> None:
        """Refuse what waits for the cluster, unless it may be accepted there."""
        self.refusing = True
        for peer, waiting in list(self._waiting.items()):
            kept = [each for each in waiting if each.event.resend]
            for each in waiting:
                if not each.event.resend:
                    self._answer(each)
            if kept:
                self._waiting[peer] = kept
            else:
                del self._waiting[peer]

    def _answer(self, waiting: _Waiting) -> None:
        event, specs = waiting.event, {spec.id: spec for spec in waiting.event.tasks}
        why = self._reason or NOT_RUNNING
        rejected = [
            no_cluster(specs[each.id], why) if each.code == ELSEWHERE else each
            for each in waiting.rejected
        ]
        nothing = len(rejected) - len(event.rejected) == len(event.tasks)
        self._ledger.acknowledge(event.peer, event.request, rejected, event.tasks, at_once=nothing)

    def peer_lost(self, event: events.PeerLost) -> None:
        self._drop(event.peer, GONE)

    def _drop(self, peer: bytes, why: str) -> None:
        for each in self._waiting.pop(peer, ()):
            self._state.out.append(DropRequest(peer, each.event.request, why))

    def validate(self) -> None:
        assert self.alone or not self._waiting, self._waiting
        waiting = [each for some in self._waiting.values() for each in some]
        assert not self.refusing or all(each.event.resend for each in waiting), waiting
