"""A changed policy for a running fleet: pools that come and go, limits that change in place."""

from random import Random
from typing import Any

import msgspec

from musterd.ipc.resilience.breaker import BreakerState
from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, BreakerPolicy, RetryPolicy
from musterd.ipc.wire.messages import Completion, Failure, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import (
    CachePolicy,
    FleetPolicy,
    GatePolicy,
    MemoryPolicy,
    PoolPolicy,
    SchedulePolicy,
    TargetPolicy,
)
from musterd.supervisor.core.model.timing import Every
from support.core import of

PEER = b"client"
WALL_NS = 10**18


class World:
    """A fleet of the pools `p` and `q`, each with one worker, and a disk that answers at once."""

    def __init__(self, **policy: Any) -> None:
        self.policy = FleetPolicy(
            pools=(PoolPolicy("p", 1), PoolPolicy("q", 1)),
            retry=RetryPolicy(1, BackoffPolicy(base_ns=SECOND_NS, jitter=0.0)),
            **policy,
        )
        self.fleet = Fleet(self.policy, Random(1))
        self.now_ns = 1000 * SECOND_NS
        self.requests = 0
        self.tell(events.ClockRead(WALL_NS))
        answer = self.tell(events.Started())
        for start in of(actions.StartForkServer, answer):
            answer += self.tell(events.ForkServerReady(start.pool, ()))
            self.fleet.pools[start.pool].declarations = None  # every name is a task
        for spawn in of(actions.SpawnWorker, answer):
            self.bring_up(spawn.worker)

    def tell(self, event: Any) -> list[Any]:
        answer = self.fleet.handle(self.now_ns, event)
        self.fleet.validate()
        for page in of(actions.Persist, answer):
            answer += self.tell(events.Persisted(page.ticket))
        return answer

    def wait(self, nanoseconds: int) -> list[Any]:
        until_ns, answer = self.now_ns + nanoseconds, []
        while (due_ns := self.fleet.next_deadline()) is not None and due_ns <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            answer += self.tell(events.Ticked())
        self.now_ns = until_ns
        return answer

    def bring_up(self, worker: int) -> list[Any]:
        self.tell(events.WorkerForked(worker, 5000 + worker))
        return self.tell(events.WorkerReady(worker))

    def submit(self, *specs: TaskSpec) -> list[Any]:
        self.requests += 1
        return self.tell(events.TasksSubmitted(PEER, self.requests, list(specs), WALL_NS))

    def reload(self, **changes: Any) -> list[Any]:
        self.policy = msgspec.structs.replace(self.policy, **changes)
        return self.tell(events.PolicyChanged(self.policy))

    def leases(self, answer: list[Any]) -> list[str]:
        return [lease.id for each in of(actions.AssignLeases, answer) for lease in each.leases]


def task(id_: str, pool: str = "p", **options: Any) -> TaskSpec:
    return TaskSpec(id_, f"{pool}.x", b"", **options)


def recovered(spec: TaskSpec, seq: int) -> events.Recovered:
    return events.Recovered(seq, spec, WALL_NS, 0, 0, 0, 0, 0, begun=False)


# -- pools that go and come -------------------------------------------------------------------


def test_a_removed_pool_drains_and_leaves_its_tasks_to_the_store() -> None:
    w = World()
    w.submit(task("runs"), task("waits"), task("later", delay_ns=SECOND_NS), task("other", "q"))
    answer = w.reload(pools=w.policy.pools[1:])
    assert of(actions.StopForkServer, answer) == [actions.StopForkServer("p")]
    assert of(actions.StopWorker, answer) == [actions.StopWorker(1)]
    (refused,) = of(actions.Acknowledge, w.submit(task("new")))
    assert [each.code for each in refused.rejected] == ["UnknownTask"]
    done = events.LeasesCompleted(1, [Completion(1, 10, b"v")])
    (delivered,) = of(actions.Deliver, w.tell(done))
    assert delivered.outcomes[0].id == "runs"
    answer = w.tell(events.WorkerExited(1, 0, 0))
    (report,) = of(actions.Report, answer)
    assert (report.event, report.pool, report.count) == ("pool.removed", "p", 2)
    assert list(w.fleet.pools) == ["q"]
    assert list(w.fleet.tasks) == ["other"]
    assert not of(actions.Persist, answer), "what is on disk stays as it is"
    assert not of(actions.AssignLeases, w.wait(60 * SECOND_NS))


def test_a_removed_pool_waits_until_its_last_task_is_on_disk() -> None:
    """Otherwise the pool could return, and read the store, before the task is there."""
    w = World()
    w.tell(events.PauseRequested((("p", -1),)))
    submitted = events.TasksSubmitted(PEER, 1, [task("queued")], WALL_NS)
    (page,) = of(actions.Persist, w.fleet.handle(w.now_ns, submitted))
    w.fleet.handle(w.now_ns, events.PolicyChanged(FleetPolicy(pools=w.policy.pools[1:])))
    answer = w.fleet.handle(w.now_ns, events.WorkerExited(1, 0, 0))
    assert not of(actions.Report, answer)
    assert "p" in w.fleet.pools
    answer = w.tell(events.Persisted(page.ticket))
    (report,) = of(actions.Report, answer)
    assert (report.event, report.count) == ("pool.removed", 1)
    assert list(w.fleet.pools) == ["q"]


def test_a_pool_that_comes_back_begins_with_what_the_store_holds() -> None:
    w = World()
    w.submit(task("runs"), task("waits"))
    pools = w.policy.pools
    w.reload(pools=pools[1:])
    w.tell(events.WorkerExited(1, -9, 0))
    (find,) = of(actions.FindStranded, w.reload(pools=pools))
    assert find.pool == "p"
    assert "p" not in w.fleet.pools, "nothing is accepted before its tasks are there"
    page = [recovered(task("runs"), 1)]
    answer = w.tell(events.StrandedFound("p", find.request, page, 1))
    (find,) = of(actions.FindStranded, answer)
    assert find.after_seq == 1
    (refused,) = of(actions.Acknowledge, w.submit(task("new")))
    assert refused.rejected
    answer = w.tell(events.StrandedFound("p", find.request, [recovered(task("waits"), 2)]))
    assert of(actions.StartForkServer, answer) == [actions.StartForkServer("p")]
    assert sorted(w.fleet.tasks) == ["runs", "waits"]
    answer = w.tell(events.ForkServerReady("p", ()))
    (spawn,) = of(actions.SpawnWorker, answer)
    assert w.leases(w.bring_up(spawn.worker)) == ["runs"]
    # A client that waited before the reloads is told.
    done = events.LeasesCompleted(spawn.worker, [Completion(2, 10, b"v")])
    (delivered,) = of(actions.Deliver, w.tell(done))
    assert (delivered.peer, delivered.outcomes[0].id) == (PEER, "runs")


def test_an_answer_to_an_older_question_is_not_taken() -> None:
    w = World()
    pools = (*w.policy.pools, PoolPolicy("r", 1))
    (first,) = of(actions.FindStranded, w.reload(pools=pools))
    (second,) = of(actions.FindStranded, w.reload(pools=pools))
    assert w.tell(events.StrandedFound("r", first.request, [])) == []
    assert "r" not in w.fleet.pools
    w.tell(events.StrandedFound("r", second.request, []))
    assert "r" in w.fleet.pools


def test_a_pool_that_is_not_wanted_any_more_when_the_answer_comes_is_not_made() -> None:
    w = World()
    pools = w.policy.pools
    (find,) = of(actions.FindStranded, w.reload(pools=(*pools, PoolPolicy("r", 1))))
    w.reload(pools=pools)
    assert w.tell(events.StrandedFound("r", find.request, [])) == []
    assert sorted(w.fleet.pools) == ["p", "q"]


def test_a_pool_that_comes_back_while_it_drains_stays() -> None:
    w = World()
    w.submit(task("runs"), task("waits"))
    pools = w.policy.pools
    w.reload(pools=pools[1:])
    answer = w.reload(pools=pools)
    assert not of(actions.FindStranded, answer)
    w.tell(events.ForkServerReady("p", ()))
    answer = w.tell(events.WorkerExited(1, 0, 0))
    (spawn,) = of(actions.SpawnWorker, answer)
    w.bring_up(spawn.worker)
    assert sorted(w.fleet.tasks) == ["runs", "waits"]


def test_what_the_store_does_not_have_is_missing_unless_it_has_come_to_life_since() -> None:
    w = World()
    w.submit(task("runs"), task("waits"))
    answer = w.tell(events.LookedUp(b"late", [("waits", "p")], ["runs", "nobody"]))
    assert of(actions.TellMissing, answer) == [actions.TellMissing(b"late", ["nobody"])]
    for id_ in ("runs", "waits"):
        assert list(w.fleet.tasks[id_].watchers or ()) == [b"late"]


def test_who_asks_for_a_stranded_task_is_told_when_its_pool_is_back() -> None:
    w = World()
    pools = w.policy.pools
    w.reload(pools=pools[1:])
    w.tell(events.WorkerExited(1, 0, 0))
    w.tell(events.LookedUp(b"late", [("t", "p")]))
    (find,) = of(actions.FindStranded, w.reload(pools=pools))
    answer = w.tell(events.StrandedFound("p", find.request, [recovered(task("t"), 9)]))
    answer += w.tell(events.ForkServerReady("p", ()))
    (spawn,) = of(actions.SpawnWorker, answer)
    w.bring_up(spawn.worker)
    done = events.LeasesCompleted(spawn.worker, [Completion(1, 10, b"v")])
    (delivered,) = of(actions.Deliver, w.tell(done))
    assert delivered.peer == b"late"


def test_a_new_size_scales_and_a_size_set_by_hand_is_left_alone() -> None:
    w = World()
    p, q = w.policy.pools
    answer = w.reload(pools=(msgspec.structs.replace(p, size=3), q))
    assert [each.index for each in of(actions.SpawnWorker, answer)] == [1, 2]
    w.tell(events.ScaleRequested("q", 2))
    w.reload(pools=(msgspec.structs.replace(p, size=2), q))
    assert (w.fleet.pools["p"].size, w.fleet.pools["q"].size) == (2, 2)


def test_nothing_is_taken_over_during_a_shutdown() -> None:
    w = World()
    w.tell(events.ShutdownRequested("asked"))
    (report,) = w.reload(pools=())
    assert report.event == "command.ignored"
    assert sorted(w.fleet.pools) == ["p", "q"]


# -- limits -----------------------------------------------------------------------------------


def test_a_bulkhead_of_a_target_comes_and_goes_while_tasks_are_inside() -> None:
    w = World()
    w.submit(task("a", target="s"), task("b", "q", target="s"), task("c", target="s"))
    w.reload(targets={"s": TargetPolicy(max_concurrent=1)})
    site = w.fleet.sites["s"]
    assert site.places is not None
    assert (site.places.bulkhead.used, site.places.bulkhead.free) == (2, 0)
    answer = w.tell(events.LeasesCompleted(1, [Completion(1, 10, b"v")]))
    assert w.leases(answer) == [], "one is inside still, and there is one place"
    assert w.leases(w.reload(targets={})) == ["c"]


def test_a_bulkhead_of_a_class_comes_while_tasks_are_inside() -> None:
    w = World(classes={"k": GatePolicy("k")})
    w.submit(task("a", policy="k"), task("b", policy="k"))
    w.reload(classes={"k": GatePolicy("k", max_concurrent=1)})
    answer = w.tell(events.LeasesCompleted(1, [Completion(1, 10, b"v")]))
    assert w.leases(answer) == ["b"]
    w.submit(task("c", "q", policy="k"))
    assert w.fleet.tasks["c"].state == 1
    assert w.leases(w.reload(classes={"k": GatePolicy("k", max_concurrent=2)})) == ["c"]


def test_a_class_that_is_gone_does_not_hold_up_what_is_queued() -> None:
    w = World(classes={"k": GatePolicy("k", max_concurrent=1)})
    w.submit(task("a", policy="k"), task("b", "q", policy="k"))
    assert w.leases(w.reload(classes={})) == ["b"]
    (refused,) = of(actions.Acknowledge, w.submit(task("c", policy="k")))
    assert [each.code for each in refused.rejected] == ["InvalidTask"]


def test_a_breaker_that_is_switched_off_lets_its_site_go() -> None:
    w = World(breaker=BreakerPolicy(failures=1, open_ns=600 * SECOND_NS))
    w.tell(events.BreakerCommanded("held", "open"))
    w.submit(task("a", target="s", max_retries=0), task("b", target="s"))
    failed = Completion(1, 10, b"", Failure("error", unwell=True))
    w.tell(events.LeasesCompleted(1, [failed]))
    assert w.fleet.sites["s"].breaker.state == BreakerState.OPEN
    answer = w.reload(breaker=BreakerPolicy(enabled=False))
    assert w.leases(answer) == ["b"]
    assert w.fleet.sites["held"].breaker.state == BreakerState.FORCED_OPEN, "a person's word"


def test_what_a_class_says_of_shut_sites_counts_for_what_is_queued() -> None:
    w = World(classes={"k": GatePolicy("k", on_open="wait")})
    w.tell(events.BreakerCommanded("s", "open"))
    w.submit(
        task("inherits", target="s", policy="k"),
        task("insists", target="s", policy="k", on_open="wait"),
    )
    w.reload(classes={"k": GatePolicy("k", on_open="fail")})
    assert list(w.fleet.tasks) == ["insists"]


def test_what_a_target_says_of_shut_sites_counts_for_what_is_queued() -> None:
    w = World()
    w.tell(events.BreakerCommanded("s", "open"))
    w.submit(task("inherits", target="s"), task("insists", target="s", on_open="wait"))
    w.reload(targets={"s": TargetPolicy(on_open="fail")})
    assert list(w.fleet.tasks) == ["insists"]


def test_a_rate_holds_from_now_on() -> None:
    w = World()
    w.submit(task("a", target="s"))
    w.reload(targets={"s": TargetPolicy(rate=0.1)})
    w.submit(task("b", "q", target="s"), task("c", target="s"))
    w.tell(events.LeasesCompleted(1, [Completion(1, 10, b"v")]))
    assert w.fleet.tasks["c"].state == 1
    assert w.leases(w.reload(targets={})) == ["c"]


def test_queues_and_caches_follow() -> None:
    w = World()
    p, q = w.policy.pools
    w.reload(pools=(msgspec.structs.replace(p, queue_size=1), q), cache=CachePolicy(enabled=False))
    answers = [w.submit(task(str(n))) for n in range(3)]
    rejected = [of(actions.Acknowledge, answer)[0].rejected for answer in answers]
    assert [bool(each) for each in rejected] == [False, False, True]


def test_memory_settings_follow() -> None:
    w = World()
    w.reload(memory=MemoryPolicy(warning=0.2, critical=0.3))
    assert w.fleet.memory.policy.warning == 0.2


# -- schedules --------------------------------------------------------------------------------


def schedule(every_s: int, **options: Any) -> SchedulePolicy:
    return SchedulePolicy("s", "p.x", Every(every_s * SECOND_NS), **options)


def tick(w: World, seconds: int) -> list[Any]:
    answer = []
    for _ in range(seconds):
        answer += w.wait(SECOND_NS)
        answer += w.tell(events.ClockRead(WALL_NS + w.now_ns - 1000 * SECOND_NS))
    return answer


def test_schedules_come_change_and_go() -> None:
    w = World()
    w.reload(schedules=(schedule(10),))
    assert len(w.leases(tick(w, 11))) == 1
    before, turn = w.fleet.schedules["s"].record.last_ns, w.fleet.schedules["s"].record.turn
    w.reload(schedules=(schedule(10, priority=0),))
    assert w.fleet.schedules["s"].record.last_ns == before, "the same plan goes on where it is"
    w.reload(schedules=(schedule(2),))
    assert w.fleet.schedules["s"].record.turn == turn + 1, "another plan begins anew"
    assert w.fleet.schedules["s"].alive, "and its last run still counts"
    (page,) = of(actions.Persist, w.reload(schedules=()))
    assert [(fact.kind, fact.key, fact.value) for fact in page.facts] == [("schedule", "s", None)]
    assert not any(page.added for page in of(actions.Persist, tick(w, 20)))
