"""The queue of a pool: strict priority, fair lanes, bounded aging, reserved places."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS, RetryPolicy
from musterd.ipc.wire.messages import CRITICAL, HIGH, LOW, NORMAL, TaskSpec
from musterd.supervisor.core.model.policy import PoolPolicy
from musterd.supervisor.core.model.pool import Pool
from musterd.supervisor.core.model.queue import (
    AGING_TURN,
    SWEEP_MIN,
    TINY_NS,
    UNKNOWN_COST_NS,
    PoolQueue,
)
from musterd.supervisor.core.model.task import Route, Task, TaskState

AGING_NS = 60 * SECOND_NS
BUDGET_NS = 5 * MILLISECOND_NS
numbers: Iterator[int] = itertools.count(1)


@pytest.fixture
def queue() -> PoolQueue:
    return PoolQueue(1000, AGING_NS)


def make_task(priority: int = NORMAL, target: str = "", cost_ns: int = UNKNOWN_COST_NS) -> Task:
    pool = Pool(PoolPolicy("p", 1), RetryPolicy())
    seq = next(numbers)
    route = Route(pool, "p.x", "x", SECOND_NS, 0, cost_ns)
    return Task(seq, TaskSpec(str(seq), "p.x", b"", priority, target), route, 0, b"")


def put(queue: PoolQueue, *tasks: Task, now_ns: int = 0) -> None:
    for task in tasks:
        queue.push(task, now_ns)


def take_one(queue: PoolQueue, now_ns: int = 0) -> Task:
    (task,) = queue.take(now_ns, 1, BUDGET_NS, idle=True)
    task.state = TaskState.LEASED
    queue.validate()
    return task


def test_the_more_urgent_goes_first_whatever_came_first(queue: PoolQueue) -> None:
    tasks = [make_task(priority) for priority in (LOW, NORMAL, HIGH, CRITICAL)]
    put(queue, *tasks)
    assert [take_one(queue) for _ in tasks] == tasks[::-1]
    assert queue.size == 0


def test_within_a_site_first_come_is_first_served(queue: PoolQueue) -> None:
    tasks = [make_task(target="a") for _ in range(5)]
    put(queue, *tasks)
    assert [take_one(queue) for _ in tasks] == tasks


def test_sites_take_turns_however_much_each_has(queue: PoolQueue) -> None:
    put(queue, *[make_task(target="big") for _ in range(50)])
    put(queue, *[make_task(target="small") for _ in range(2)])
    put(queue, make_task(target="one"))
    order = [take_one(queue).spec.target for _ in range(7)]
    assert order == ["big", "small", "one", "big", "small", "big", "big"]


def test_seventeen_sites_share_evenly_while_nothing_is_aged(queue: PoolQueue) -> None:
    """The search for aged tasks at every 16th dispatch once took a turn from one lane each time."""
    sites = [f"site{number}" for number in range(17)]
    for _ in range(20):
        put(queue, *[make_task(target=site) for site in sites])
    served = [take_one(queue).spec.target for _ in range(17 * 10)]
    assert {served.count(site) for site in sites} == {10}


def test_what_comes_back_goes_before_those_that_came_after_it(queue: PoolQueue) -> None:
    tasks = [make_task(target="a") for _ in range(3)]
    put(queue, *tasks)
    first = take_one(queue)
    queue.push_front(first)
    assert [take_one(queue) for _ in tasks] == tasks


def test_one_in_sixteen_goes_to_an_aged_task_of_a_lower_level(queue: PoolQueue) -> None:
    put(queue, *[make_task(LOW) for _ in range(10)])
    put(queue, *[make_task(HIGH) for _ in range(200)], now_ns=AGING_NS)
    served = [take_one(queue, AGING_NS).spec.priority for _ in range(64)]
    assert served.count(LOW) == 64 // AGING_TURN
    assert [served.index(LOW)] == [AGING_TURN - 1]


def test_a_young_task_never_goes_before_a_more_urgent_one(queue: PoolQueue) -> None:
    put(queue, *[make_task(LOW) for _ in range(10)])
    put(queue, *[make_task(HIGH) for _ in range(200)])
    served = [take_one(queue, AGING_NS - 1).spec.priority for _ in range(64)]
    assert served.count(LOW) == 0


def test_aged_levels_share_the_turns(queue: PoolQueue) -> None:
    for level in (LOW, NORMAL, HIGH):
        put(queue, *[make_task(level) for _ in range(20)])
    put(queue, *[make_task(CRITICAL) for _ in range(400)])
    served = [take_one(queue, AGING_NS).spec.priority for _ in range(AGING_TURN * 9)]
    assert [served.count(level) for level in (HIGH, NORMAL, LOW)] == [3, 3, 3]


def test_an_aged_task_too_big_for_a_window_keeps_its_turn_for_an_idle_worker(
    queue: PoolQueue,
) -> None:
    put(queue, make_task(LOW, cost_ns=SECOND_NS))
    put(queue, *[make_task(HIGH, cost_ns=10_000) for _ in range(100)])
    busy = queue.take(AGING_NS, 100, BUDGET_NS, idle=False)
    assert len(busy) == AGING_TURN - 1
    assert queue.take(AGING_NS, 100, BUDGET_NS, idle=False) == []
    (big,) = queue.take(AGING_NS, 100, BUDGET_NS, idle=True)
    assert big.spec.priority == LOW


def test_a_discarded_task_is_never_served(queue: PoolQueue) -> None:
    tasks = [make_task(target="a") for _ in range(3)]
    put(queue, *tasks)
    queue.discard(tasks[0])
    queue.discard(tasks[1])
    queue.validate()
    assert queue.size == 1
    assert take_one(queue) is tasks[2]
    assert queue.size == 0


def test_discarded_tasks_do_not_pile_up_even_with_a_site_of_their_own(queue: PoolQueue) -> None:
    """A stopped pool must not grow while tasks of ever more sites expire."""
    for number in range(20 * SWEEP_MIN):
        task = make_task(target=f"site{number}")
        put(queue, task)
        queue.discard(task)
        assert len(queue.levels[NORMAL].lanes) <= SWEEP_MIN
    queue.validate()


def test_sweeping_keeps_the_order_of_what_is_left(queue: PoolQueue) -> None:
    tasks = [make_task(target=f"site{number % 3}") for number in range(4 * SWEEP_MIN)]
    put(queue, *tasks)
    for task in tasks[: 3 * SWEEP_MIN]:
        queue.discard(task)
    queue.validate()
    assert queue.levels[NORMAL].dead < SWEEP_MIN
    left = tasks[3 * SWEEP_MIN :]
    assert sorted(take_one(queue).seq for _ in left) == [task.seq for task in left]


@pytest.mark.parametrize(
    ("level", "places"), [(CRITICAL, 100), (HIGH, 98), (NORMAL, 95), (LOW, 95)]
)
def test_the_last_places_are_kept_for_the_urgent(level: int, places: int) -> None:
    queue = PoolQueue(100, AGING_NS)
    assert queue.room(level, places - 1)
    assert not queue.room(level, places)


def test_an_idle_worker_gets_one_task_of_unknown_cost(queue: PoolQueue) -> None:
    tasks = [make_task() for _ in range(3)]
    put(queue, *tasks)
    assert queue.take(0, 10, BUDGET_NS, idle=True) == tasks[:1]
    assert queue.take(0, 10, BUDGET_NS, idle=False) == []


def test_tiny_tasks_fill_a_window_up_to_its_budget(queue: PoolQueue) -> None:
    put(queue, *[make_task(cost_ns=TINY_NS) for _ in range(10)])
    assert len(queue.take(0, 10, BUDGET_NS, idle=True)) == BUDGET_NS // TINY_NS
    assert len(queue.take(0, 2, BUDGET_NS, idle=True)) == 2


def test_a_long_task_ends_a_window(queue: PoolQueue) -> None:
    tiny = [make_task(cost_ns=10_000) for _ in range(3)]
    put(queue, *tiny, make_task(cost_ns=TINY_NS + 1), make_task(cost_ns=10_000))
    assert queue.take(0, 10, BUDGET_NS, idle=True) == tiny
    assert len(queue.take(0, 10, BUDGET_NS, idle=True)) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from("pfdt"), st.integers(CRITICAL, LOW), st.integers(0, 4)),
        max_size=200,
    )
)
def test_nothing_is_lost_or_served_twice(steps: list[tuple[str, int, int]]) -> None:
    queue = PoolQueue(1000, AGING_NS)
    waiting: dict[int, Task] = {}
    for now_ns, (what, priority, site) in enumerate(steps):
        if what in "pf":
            task = make_task(priority, f"site{site}")
            if what == "p":
                queue.push(task, now_ns)
            else:
                queue.push_front(task)
            waiting[task.seq] = task
        elif what == "d" and waiting:
            queue.discard(waiting.pop(next(iter(waiting))))
        elif what == "t" and waiting:
            top = min(each.spec.priority for each in waiting.values())
            task = take_one(queue, now_ns)
            assert task.spec.priority == top
            del waiting[task.seq]
        queue.validate()
        assert queue.size == len(waiting)


@given(
    alone=st.integers(0, 100),
    window=st.integers(2, 40),
    discarded=st.sets(st.integers(0, 99)),
    then=st.lists(st.tuples(st.integers(CRITICAL, LOW), st.booleans()), max_size=60),
)
def test_a_window_is_what_single_turns_would_have_given(
    alone: int, window: int, discarded: set[int], then: list[tuple[int, bool]]
) -> None:
    """A window taken from the only lane moves no turns: later tasks, aged ones included, are served
    as if each task had been taken alone."""
    served = []
    for count in (1, window):
        queue = PoolQueue(1000, AGING_NS)
        order = []
        tasks = [make_task(cost_ns=1) for _ in range(alone)]
        put(queue, *tasks)
        for number in discarded & set(range(alone)):
            queue.discard(tasks[number])
        while queue.size:
            order += queue.take(AGING_NS, count, BUDGET_NS, idle=True)
            queue.validate()
        for priority, old in then:
            put(queue, make_task(priority, cost_ns=1), now_ns=0 if old else AGING_NS)
        while queue.size:
            order.append(take_one(queue, AGING_NS))
        first = min((task.seq for task in order), default=0)
        served.append([task.seq - first for task in order])
    assert served[0] == served[1]
