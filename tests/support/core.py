"""A fleet without processes: tests tell the core what happened and keep its answers."""

from random import Random
from typing import Any, TypeVar

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS, BackoffPolicy, RetryPolicy
from musterd.ipc.wire.messages import Completion, Failure, Lease, TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import FleetPolicy, PoolPolicy, RestartPolicy
from musterd.supervisor.core.model.slot import Slot

A = TypeVar("A")

PEER = b"client"
EXACT = BackoffPolicy(base_ns=SECOND_NS, factor=2.0, max_ns=60 * SECOND_NS, jitter=0.0)


# Health checks are off unless a test asks for them.
NO_HEALTH_CHECKS = {"heartbeat_timeout_ns": 0, "health_timeout_ns": 0}


class Muster:
    """A fleet of one pool `p` with the task `p.x`; its disk answers at once while `disk_works`."""

    def __init__(self, size: int = 1, *, max_retries: int = 3, **pool: Any) -> None:
        restart = RestartPolicy(backoff=EXACT, limit=3)
        self.policy = FleetPolicy(
            pools=(PoolPolicy("p", size, **{"restart": restart, **NO_HEALTH_CHECKS, **pool}),),
            retry=RetryPolicy(max_retries, EXACT),
        )
        self.fleet = Fleet(self.policy, Random(1))
        self.now_ns = 1000 * SECOND_NS
        self.disk_works = True
        self.ticket = 0  # of the last page that was written
        self._request = 0

    @property
    def slots(self) -> list[Slot]:
        return self.fleet.pools["p"].slots

    def tell(self, event: Any) -> list[Any]:
        """Tell the core an event; return its answer, with what follows from the disk's answer."""
        answer = self.fleet.handle(self.now_ns, event)
        self.fleet.validate()
        for page in [each for each in answer if isinstance(each, actions.Persist)]:
            self.ticket = page.ticket
            if self.disk_works:
                answer += self.tell(events.Persisted(page.ticket))
        return answer

    def commit(self) -> list[Any]:
        return self.tell(events.Persisted(self.ticket))

    def wait(self, nanoseconds: int) -> list[Any]:
        """Let time pass and keep every deadline on the way; return the answers."""
        until_ns, answer = self.now_ns + nanoseconds, []
        while (deadline_ns := self.fleet.next_deadline()) is not None and deadline_ns <= until_ns:
            self.now_ns = max(self.now_ns, deadline_ns)
            answer += self.tell(events.Ticked())
        self.now_ns = until_ns
        return answer

    def start(self) -> list[Any]:
        """Bring up the fork server and all workers, numbered from 1."""
        answer = self.tell(events.Started())
        answer += self.tell(
            events.ForkServerReady("p", (TaskDeclaration("x"), TaskDeclaration("y")))
        )
        for spawn in of(actions.SpawnWorker, answer):
            answer += self.bring_up(spawn.worker)
        return answer

    def bring_up(self, worker: int) -> list[Any]:
        return [
            *self.tell(events.WorkerForked(worker, 5000 + worker)),
            *self.tell(events.WorkerReady(worker)),
        ]

    def submit(self, *specs: TaskSpec, peer: bytes = PEER, resend: bool = False) -> list[Any]:
        self._request += 1
        return self.tell(events.TasksSubmitted(peer, self._request, list(specs), 10**18, resend))

    def learn_tiny(self, runs: int = 1, worker: int = 1) -> None:
        """Run `p.x` for 10 µs, so that the core leases it in windows from now on."""
        for run in range(runs):
            answer = self.submit(TaskSpec(f"learn{run}", "p.x", b""))
            self.complete(worker, leases_of(answer)[0].lease, run_ns=10_000)

    def complete(self, worker: int, *leases: int, run_ns: int = MILLISECOND_NS) -> list[Any]:
        done = [Completion(lease, run_ns, b"value") for lease in leases]
        return self.tell(events.LeasesCompleted(worker, done))

    def fail(self, worker: int, lease: int, kind: str = "error", **failure: Any) -> list[Any]:
        done = Completion(lease, MILLISECOND_NS, b"", Failure(kind, **failure))
        return self.tell(events.LeasesCompleted(worker, [done]))

    def exit(self, worker: int, lease: int = 0, code: int = -11) -> list[Any]:
        return self.tell(events.WorkerExited(worker, code, lease))


def of(kind: type[A], answer: list[Any]) -> list[A]:
    """Return the actions of this kind."""
    return [each for each in answer if isinstance(each, kind)]


def leases_of(answer: list[Any]) -> list[Lease]:
    """Return the leases that workers are given."""
    return [lease for each in of(actions.AssignLeases, answer) for lease in each.leases]
