"""An engine under test, with a clock that the test moves, and short words for what tests do."""

from collections.abc import Callable, Sequence
from itertools import count

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import (
    ERROR,
    Failure,
    Outcome,
    TaskDeclaration,
    TaskSpec,
    TaskView,
)
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    End,
    EndKind,
    Engine,
    Grant,
    NodeCard,
    PoolCard,
    Told,
    Want,
)

TASKS = ("extract", "fetch")
UNWELL = Failure(ERROR, "ConnectionError", "refused", unwell=True)
SICK = Failure(ERROR, "ValueError", "no price")


class Rig:
    """One engine. `pass_time` moves its clock; `restart` is a crash of the server that forgets the
    claims of these tasks."""

    def __init__(
        self,
        engine: Engine,
        pass_ns: Callable[[int], None],
        restart: Callable[[Sequence[str]], None],
    ) -> None:
        self.engine = engine
        self._pass_ns = pass_ns
        self.restart = restart
        self._ids = count(1)

    def pass_time(self, seconds: float) -> None:
        self._pass_ns(round(seconds * SECOND_NS))

    def join(
        self,
        name: str = "a",
        *pools: PoolCard,
        identity: str = "",
        lease: int = 30,
        redact: tuple[str, ...] = (),
    ) -> int:
        """Join with pools, by default with one named `p`; return the tenure."""
        card = NodeCard(
            identity or f"id-{name}", name, lease * SECOND_NS, "0.1", pools or (pool(),), redact
        )
        return self.engine.join(card).tenure

    def submit(self, *specs: TaskSpec, waiter: int = 0) -> list[str]:
        """Submit tasks that have to be accepted or joined; return their ids."""
        verdicts = self.engine.submit(specs, waiter=waiter)
        assert {each.state for each in verdicts} <= {"accepted", "joined"}, verdicts
        return [each.id for each in verdicts]

    def task(self, method: str = "extract", *, pool: str = "p", **options: object) -> TaskSpec:
        given = {"id": f"t{next(self._ids):04d}", "name": f"{pool}.{method}", "args": b"\x80"}
        return TaskSpec(**{**given, **options})  # type: ignore[arg-type]

    def tasks(self, number: int, **options: object) -> list[TaskSpec]:
        return [self.task(**options) for _ in range(number)]  # type: ignore[arg-type]

    def claim(self, tenure: int, number: int = 1, pool: str = "p") -> list[Grant]:
        return self.engine.claim(tenure, [want(number, pool)])

    def claim_one(self, tenure: int, pool: str = "p") -> Grant:
        grants = self.claim(tenure, 1, pool)
        assert len(grants) == 1, grants
        return grants[0]

    def finish(self, tenure: int, *grants: Grant, **how: object) -> list[Told]:
        return self.engine.finish(tenure, [end(grant, **how) for grant in grants])

    def apply(self, policy: ClusterPolicy) -> int:
        return self.engine.apply(policy, self.engine.policy().version)

    def outcome(self, id_: str) -> Outcome | None:
        found = self.engine.look_up([id_])
        return found[0] if found else None

    def ended(self, id_: str) -> Outcome:
        outcome = self.outcome(id_)
        assert outcome is not None, self.engine.view(id_)
        return outcome

    def view(self, id_: str) -> TaskView:
        view = self.engine.view(id_)
        assert view is not None, id_
        return view

    def drained(self, tenure: int) -> list[str]:
        """Claim and finish everything; return the ids in the order of the grants."""
        order: list[str] = []
        while grants := self.claim(tenure, 10):
            order += [grant.id for grant in grants]
            self.finish(tenure, *grants)
        return order


def pool(name: str = "p", tasks: Sequence[str] = TASKS, **limits: object) -> PoolCard:
    declared = tuple(TaskDeclaration(method) for method in tasks)
    return PoolCard(name, 10, declared, **limits)  # type: ignore[arg-type]


def want(number: int, pool: str = "p", tasks: Sequence[str] = TASKS) -> Want:
    return Want(pool, number, tuple(f"{pool}.{method}" for method in tasks))


def end(grant: Grant, kind: EndKind = "succeeded", **how: object) -> End:
    if kind == "failed":
        how.setdefault("failure", SICK)
    elif kind == "succeeded":
        how.setdefault("value", b"\x01")
    return End(grant.id, grant.claim, kind, **how)  # type: ignore[arg-type]
