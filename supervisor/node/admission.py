"""What the nodes of a cluster declare, applied to the submits of a program without a node.

The sidecar of a node does the same with what its own supervisor declares (process.py). A task that
several nodes declare is taken from the first; names in `redact` are those of all nodes that have
the pool.
"""

from collections.abc import Iterable, Mapping

from msgspec import structs

from musterd.ipc.wire.messages import INVALID_TASK, Rejection, TaskDeclaration, TaskSpec
from musterd.supervisor.cluster.engine import NodeCard
from musterd.supervisor.config.redact import Redaction
from musterd.supervisor.core.model import events
from musterd.supervisor.sockets.declarations import Declarations


def session_problems(
    specs: list[TaskSpec], sessions: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return which tasks have a session that this node cannot use, and why, by their ids.

    `sessions`: by pool of this node, those that its tasks may use. Other nodes know their own.
    """
    problems = {}
    for spec in specs:
        pool = spec.name.partition(".")[0]
        if spec.session and spec.session not in sessions.get(pool, (spec.session,)):
            problems[spec.id] = (
                f"session '{spec.session}' is not for pool '{pool}', which this node shares with a "
                "cluster: that takes a key_secret or key_file of [sessions] which is the same on "
                "all machines, a login_task, if any, of a pool that is shared, too, and the "
                "session among the pool's sessions"
            )
    return problems


class Admission:
    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._declarations = Declarations()
        self._redactions: dict[str, Redaction] = {}

    def learn(self, cards: Iterable[NodeCard]) -> None:
        """Replace what is known of the nodes."""
        tasks: dict[str, dict[str, TaskDeclaration]] = {}
        redact: dict[str, dict[str, None]] = {}
        for card in cards:
            for pool in card.pools:
                for declared in pool.tasks:
                    tasks.setdefault(pool.name, {}).setdefault(declared.method, declared)
                redact.setdefault(pool.name, {}).update(dict.fromkeys(card.redact))
        self._declarations = Declarations()
        for name, methods in tasks.items():
            self._declarations.declare(name, methods.values())
        self._names = frozenset(f"{pool}.{method}" for pool in tasks for method in tasks[pool])
        self._redactions = {pool: Redaction(tuple(names)) for pool, names in redact.items()}

    def knows(self, specs: list[TaskSpec]) -> bool:
        """Whether a node has declared all of these."""
        return self._names.issuperset([spec.name for spec in specs])

    def admit(self, event: events.TasksSubmitted) -> events.TasksSubmitted:
        """Refuse tasks that hold a literal secret; complete the others by what is declared."""
        pools: dict[str, list[TaskSpec]] = {}
        for spec in event.tasks:
            pools.setdefault(spec.name.partition(".")[0], []).append(spec)
        problems: dict[str, str] = {}
        for pool, specs in pools.items():
            if pool in self._redactions:
                problems |= self._redactions[pool].problems(specs)
        tasks = [spec for spec in event.tasks if spec.id not in problems]
        rejected = [Rejection(id_, INVALID_TASK, why) for id_, why in problems.items()]
        return structs.replace(
            event,
            tasks=self._declarations.fill_in(tasks),
            rejected=[*event.rejected, *rejected],
        )
