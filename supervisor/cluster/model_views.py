"""The engine in memory: what people look at."""

from collections import Counter
from collections.abc import Iterator

from msgspec import structs

from musterd.ipc.resilience.breaker import BreakerState
from musterd.ipc.wire.messages import (
    FAILED,
    FINAL_STATES,
    QUEUED,
    SUCCEEDED,
    WAITING,
    Failure,
    TaskView,
)
from musterd.supervisor.cluster.engine import (
    DEAD,
    FINISHED,
    RECENT_NS_MAX,
    SITES_SEEN_MAX,
    UNSUCCESSFUL,
    Backlog,
    Count,
    Recent,
    SiteView,
    TaskFilter,
)
from musterd.supervisor.cluster.model_ends import Ends
from musterd.supervisor.cluster.model_records import JOINED, Task
from musterd.supervisor.cluster.model_sites import Site


class Views(Ends):
    def view(self, id_: str) -> TaskView | None:
        task, done = self.board.live.get(id_), self.board.done.get(id_)
        if task is not None:
            return task.view(self.board.name_of(task.tenure), self.wall_ns)
        return done.view(self.wall_ns) if done is not None else None

    def find(self, which: TaskFilter) -> list[TaskView]:
        live = [each for each in self.board.live.values() if self._fits(each, which)]
        live.sort(key=lambda each: -each.seq)
        done = [each for each in self.board.done.values() if self._fits(each.task, which)]
        done.sort(key=lambda each: -each.number)
        views = [self.view(task.spec.id) for task in [*live, *(each.task for each in done)]]
        return [
            structs.replace(view, args=b"", value=b"")
            for view in views
            if view is not None and _is_in(view.state, view.failure, which.state)
        ][: which.limit]

    def _fits(self, task: Task, which: TaskFilter) -> bool:
        return (
            which.pool in ("", task.pool)
            and which.target in ("", task.spec.target)
            and which.key in ("", task.spec.key)
            and which.error in task.error
            and (not which.schedule or task.spec.id.startswith(f"@{which.schedule}."))
        )

    def purge(self, which: TaskFilter) -> int:
        chosen = [
            id_
            for id_, each in self.board.done.items()
            if self._fits(each.task, which)
            and _is_in(each.outcome.state, each.outcome.failure, which.state)
            and (which.ids is None or id_ in which.ids)
            and each.finished_ns <= self.clock() - which.older_ns
        ]
        for id_ in chosen:
            del self.board.done[id_]
        return len(chosen)

    def recent(self, span_ns: int) -> list[Recent]:
        since_ns = self.clock() - min(span_ns, RECENT_NS_MAX)
        found = []
        for pool in sorted(self.board.pools):
            ended = [each for each in self.board.done.values() if each.task.pool == pool]
            lately = [each.outcome.state for each in ended if each.finished_ns > since_ns]
            dead = sum(_is_in(each.outcome.state, each.outcome.failure, DEAD) for each in ended)
            found.append(Recent(pool, lately.count(SUCCEEDED), lately.count(FAILED), dead))
        return found

    def counts(self) -> list[Count]:
        numbers: dict[tuple[str, int, str], int] = {}
        for task in self.board.live.values():
            key = (task.pool, task.level, WAITING if task.state == JOINED else task.state)
            numbers[key] = numbers.get(key, 0) + 1
        return [Count(*key, number) for key, number in sorted(numbers.items())]

    def backlogs(self) -> Iterator[Backlog]:
        """Yield what would begin, by pool and level."""
        now_ns, shut = self.clock(), {site.target for site in self.sites_.all() if self._shut(site)}
        found: dict[tuple[str, int], list[int]] = {}
        for task in self.board.live.values():
            if task.state == QUEUED and task.spec.target not in shut:
                found.setdefault((task.pool, task.level), []).append(now_ns - task.queued_ns)
        for key, waits in sorted(found.items()):
            yield Backlog(*key, len(waits), max(waits))

    def _shut(self, site: Site) -> bool:
        places = site.policy.max_concurrent
        full = bool(places) and self.inside(site.target) >= places
        return full or site.shut(self.clock())

    def sites(self) -> list[SiteView]:
        live = self.board.live.values()
        waiting = Counter(task.spec.target for task in live if task.state == QUEUED)
        views = [
            site.view(self.clock(), self.inside(site.target), waiting[site.target])
            for site in self.sites_.all()
        ]
        known = sorted(
            (view for view in views if view is not None),
            key=lambda view: (view.breaker == BreakerState.CLOSED, view.target),
        )
        return sorted(known[:SITES_SEEN_MAX], key=lambda view: view.target)


def _is_in(state: str, failure: Failure | None, wanted: str) -> bool:
    if wanted == DEAD:
        return state == FAILED and not (failure is not None and failure.refused)
    if wanted == FINISHED:
        return state in FINAL_STATES
    if wanted == UNSUCCESSFUL:
        return state in FINAL_STATES and state != SUCCEEDED
    return wanted in ("", state)
