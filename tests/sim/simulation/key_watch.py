"""Check tasks that share a key, from outside of the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import structs

from musterd.ipc.wire.keys import derived_key
from musterd.ipc.wire.messages import FAILED, SUCCEEDED, Lease, Outcome, TaskSpec
from musterd.supervisor.core.model.actions import FinalRecord, Persist
from musterd.supervisor.core.model.events import InvalidateRequested
from musterd.supervisor.core.tasks.coalescing import GOOD

if TYPE_CHECKING:
    from simulation.workers import Worker
    from simulation.world import World

VALUE = b"value of "


@dataclass
class End:
    """The end of a task that ran itself."""

    step: int
    when_ns: int
    leased_ns: int
    submitted_ns: int
    outcome: Outcome


class KeyWatch:
    def __init__(self, world: World) -> None:
        self._world = world
        self._specs: dict[str, TaskSpec] = {}
        self._submitted: dict[str, tuple[int, int]] = {}  # by id: step and time
        self._leased_ns: dict[str, int] = {}
        self._ends: dict[tuple[str, str], list[End]] = {}
        self._living: dict[str, dict[str, None]] = {}  # ids by key
        self._running: dict[str, tuple[str, Worker]] = {}  # by key
        self._invalidated: list[tuple[int, InvalidateRequested]] = []
        self.joined = self.answered = 0  # so that a run can tell whether it saw any

    def new_life(self) -> None:
        self._running.clear()
        self._living.clear()
        for row in self._world.store.live.values():
            if row.spec.key:
                self._living.setdefault(row.spec.key, {})[row.spec.id] = None

    # -- runs ---------------------------------------------------------------------------------

    def leased(self, lease: Lease, holders: dict[str, Worker]) -> None:
        """Check that no two tasks of a key are with workers at once."""
        self._leased_ns[lease.id] = self._world.now_ns
        key = self._specs[lease.id].key
        for other in self._living.get(key, ()) if key else ():
            holder = holders.get(other)
            assert other == lease.id or holder is None or not holder.alive, (
                f"{lease.id} is leased while {other} of the same key {key} is"
            )

    def began(self, worker: Worker, lease: Lease) -> None:
        key = self._specs[lease.id].key
        if not key:
            return
        id_, other = self._running.get(key, (lease.id, worker))
        runs = other.alive and id_ in [each.id for each, _ in other.runs]
        assert id_ == lease.id or not runs, f"{lease.id} runs while {id_} of key {key} does"
        self._running[key] = (lease.id, worker)

    def lied(self, lease: Lease) -> None:
        """Note that a worker returned a lease and goes on with it: others of its key may run."""
        key = self._specs[lease.id].key
        if self._running.get(key, ("",))[0] == lease.id:
            del self._running[key]

    # -- pages --------------------------------------------------------------------------------

    def handled(self, event: Any, pages: list[Persist], step: int) -> None:
        if isinstance(event, InvalidateRequested):
            self._invalidated.append((self._world.now_ns, event))
        ended: dict[str, None] = {}
        for page in pages:
            for new in page.news():
                self._specs[new.spec.id] = new.spec
                self._submitted[new.spec.id] = (step, self._world.now_ns)
                if new.spec.key:
                    self._living.setdefault(new.spec.key, {})[new.spec.id] = None
            for final in page.finished:
                self._check_final(final, step)
                key, outcome = final.spec.key, final.outcome
                if key:
                    self._living.get(key, {}).pop(final.spec.id, None)
                    if not outcome.cached and outcome.state in (SUCCEEDED, FAILED):
                        ended[key] = None
            for fact in page.facts:
                if fact.kind == GOOD and fact.value is not None:
                    self._check_good(fact.key, fact.value)
        for key in ended:
            living = self._living.get(key)
            assert not living, f"{living} did not get the result of {key}"

    def withdrawn(self, ids: list[str]) -> None:
        """Forget withdrawn tasks: they wait for the store's answer and nothing else."""
        for id_ in ids:
            self._living.get(self._specs[id_].key, {}).pop(id_, None)

    def _check_final(self, final: FinalRecord, step: int) -> None:
        spec, outcome = final.spec, final.outcome
        submitted_step, submitted_ns = self._submitted[spec.id]
        if outcome.stale:
            self._check_good(_name(spec), outcome.value)
        ends = self._ends.setdefault((spec.name, spec.key), [])
        if not outcome.cached:
            leased_ns = self._leased_ns.get(spec.id, -1)
            own = by_itself(outcome)
            ends.append(End(step, self._world.now_ns, leased_ns, submitted_ns, own))
            return
        assert spec.key, f"{spec.id} got the result of another and has no key"
        assert outcome.state in (SUCCEEDED, FAILED), f"{spec.id} shares the end {outcome}"
        sources = [
            end
            for end in ends
            if structs.replace(end.outcome, id=spec.id, cached=True) == by_itself(outcome)
        ]
        assert sources, f"{spec.id} ended as {outcome}, and no task of its key did"
        if sources[-1].step == step:
            self.joined += 1
            return
        self.answered += 1
        assert submitted_step == step, f"{spec.id} joined a task and ended without it"
        assert any(self._may_answer(spec, end) for end in sources), (
            f"{spec.id} got an answer that is older than it may be: {sources[-1]}"
        )

    def _may_answer(self, spec: TaskSpec, end: End) -> bool:
        now_ns = self._world.now_ns
        young = end.outcome.state == SUCCEEDED and now_ns - end.when_ns < spec.cache_ns
        soon = now_ns - end.submitted_ns < spec.debounce_ns
        return (young or soon) and not any(
            when_ns > end.leased_ns
            and (spec.key.startswith(event.key) if event.prefix else spec.key == event.key)
            for when_ns, event in self._invalidated
        )

    def _check_good(self, name: str, value: bytes) -> None:
        """Check that a last good result has that name and key."""
        assert value.startswith(VALUE), value
        source = self._specs[value.removeprefix(VALUE).decode()]
        assert name == _name(source), f"{source.id} is no good result of {name}"


def by_itself(outcome: Outcome) -> Outcome:
    """Return the outcome of a task before its fallback: a failed one is a failure."""
    if outcome.state == SUCCEEDED and outcome.failure is not None:
        return structs.replace(outcome, state=FAILED, value=b"", stale=False, fallback=False)
    return outcome


def _name(spec: TaskSpec) -> str:
    key = spec.key or derived_key(spec.name, spec.args + spec.session.encode())
    return f"{spec.name} {key}"
