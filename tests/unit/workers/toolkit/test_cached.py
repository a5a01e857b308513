"""`cached`: equal arguments get the same result, for a while."""

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from musterd.workers.authoring import settings
from musterd.workers.authoring.base import Context, TaskTimeout, task, task_options
from musterd.workers.toolkit import cached as make_cached
from musterd.workers.toolkit.cached import cached

WAIT = 30.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that the test sets."""
    now = [1000.0]
    module = sys.modules["musterd.workers.toolkit.cached"]  # the package's `cached` is the function
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    yield
    settings.use({}, 0, 0)


class Calls:
    """Counter of calls, sync or async."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def plain(self, value: Any, more: int = 0) -> Any:
        self.made.append(value)
        return (value, len(self.made))


def test_a_result_is_remembered_for_its_time(clock: list[float]) -> None:
    calls = Calls()
    rate = cached(ttl=10)(calls.plain)
    assert rate("EUR") == rate("EUR") == ("EUR", 1)
    assert rate("USD") == ("USD", 2)
    clock[0] += 9.9
    assert rate("EUR") == ("EUR", 1)
    clock[0] += 0.2
    assert rate("EUR") == ("EUR", 3)
    assert rate.status().misses == 3


def test_an_async_function_is_remembered_too() -> None:
    calls = Calls()

    @cached(ttl=timedelta(minutes=1))
    async def rate(currency: str) -> Any:
        await asyncio.sleep(0)
        return calls.plain(currency)

    async def main() -> None:
        found = await asyncio.gather(*[rate("EUR") for _ in range(10)])
        assert set(found) == {("EUR", 1)}
        assert await rate("EUR") == ("EUR", 1)
        rate.invalidate("EUR")
        assert await rate("EUR") == ("EUR", 2)

    asyncio.run(main())
    assert asyncio.run(rate("EUR")) == ("EUR", 2), "in another loop as well"


def test_the_longest_unused_goes_first() -> None:
    calls = Calls()
    rate = cached(size=2)(calls.plain)
    for value in ("a", "b", "a", "c", "a", "b"):
        rate(value)
    assert calls.made == ["a", "b", "c", "b"]
    assert rate.status().entries == 2


def test_arguments_are_the_same_however_they_are_given() -> None:
    calls = Calls()
    rate = cached(calls.plain)
    assert rate("a") == rate(value="a") == rate("a", 0) == rate("a", more=0)
    assert rate("a", 1) != rate("a")
    assert [rate(1)[0], rate(1.0)[0], rate(True)[0]] == [1, 1.0, True]
    assert len(calls.made) == 5


def test_the_context_of_a_task_is_no_argument() -> None:
    calls = Calls()

    @cached
    def rate(ctx: Any, currency: str) -> Any:
        return calls.plain(currency)

    assert rate(Context("task-1"), "EUR") == rate(Context("task-2"), "EUR")
    rate.invalidate(None, "EUR")
    assert rate(Context("task-3"), "EUR") == ("EUR", 2)


def test_results_are_forgotten_one_by_one_or_all() -> None:
    calls = Calls()
    rate = cached(calls.plain)
    for value in ("a", "b"):
        rate(value)
    rate.invalidate("a")
    rate("a")
    rate("b")
    assert calls.made == ["a", "b", "a"]
    rate.clear()
    rate("b")
    assert calls.made == ["a", "b", "a", "b"]


def test_methods_remember_for_each_instance_and_keep_none_alive() -> None:
    import weakref

    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name
            self.asked = 0

        @cached
        def price(self, item: str) -> str:
            self.asked += 1
            return f"{self.name} {item} {self.asked}"

    one, two = Shop("one"), Shop("two")
    assert [one.price("tea"), two.price("tea"), one.price("tea")] == [
        "one tea 1",
        "two tea 1",
        "one tea 1",
    ]
    Shop.price.invalidate(one, "tea")
    assert one.price("tea") == "one tea 2"
    gone = weakref.ref(two)
    del two
    gc.collect()
    assert gone() is None


def test_what_is_raised_is_not_remembered() -> None:
    answers: list[Any] = [ConnectionError("down"), "up"]

    @cached
    def ask() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ConnectionError):
        ask()
    assert ask() == ask() == "up"


def test_defaults_are_those_of_the_configuration(clock: list[float]) -> None:
    calls = Calls()
    rate = cached(calls.plain)
    settings.use({}, 5.0, 1)
    rate("a")
    clock[0] += 4
    rate("a")
    clock[0] += 2
    rate("a")
    rate("b")
    assert rate.status().entries == 1
    assert calls.made == ["a", "a", "b"]


# -- at the same moment -------------------------------------------------------------------------


class Slow:
    """Function whose calls begin and end when a test says so."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.calls = 0
        self.error: BaseException | None = None

    def __call__(self, value: str) -> str:
        self.calls += 1
        number = self.calls
        self.begun.release()
        assert self.go.wait(WAIT)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return f"{value} {number}"


def in_threads(count: int, work: Callable[[], Any]) -> tuple[list[Any], list[threading.Thread]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - for the test to see
            found.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return found, threads


def wait_for_hits(rate: Any, hits: int) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if rate.status().hits >= hits:
            return
        pause.wait(0.01)
    raise AssertionError(f"{rate.status()} instead of {hits} hits")


def test_threads_that_ask_at_once_share_one_call() -> None:
    slow = Slow()
    rate = cached(slow)
    found, threads = in_threads(8, lambda: rate("a"))
    assert slow.begun.acquire(timeout=WAIT)
    wait_for_hits(rate, 7)
    slow.go.set()
    for thread in threads:
        thread.join(WAIT)
    assert found == ["a 1"] * 8
    assert slow.calls == 1


def test_who_waited_gets_the_error_and_the_next_one_tries_again() -> None:
    slow = Slow()
    slow.error = ConnectionError("down")
    rate = cached(slow)
    found, threads = in_threads(3, lambda: rate("a"))
    assert slow.begun.acquire(timeout=WAIT)
    wait_for_hits(rate, 2)
    slow.go.set()
    for thread in threads:
        thread.join(WAIT)
    assert [type(each) for each in found] == [ConnectionError] * 3
    assert rate("a") == "a 2"


def test_the_end_of_one_task_is_not_that_of_the_others() -> None:
    slow = Slow()
    slow.error = TaskTimeout("its time is over")
    rate = cached(slow)
    found, threads = in_threads(3, lambda: rate("a"))
    assert slow.begun.acquire(timeout=WAIT)
    wait_for_hits(rate, 2)
    slow.go.set()
    for thread in threads:
        thread.join(WAIT)
    assert sorted(map(str, found)) == ["a 2", "a 2", "its time is over"]


@pytest.mark.parametrize("one", [True, False])
def test_what_was_begun_before_an_invalidation_is_not_remembered(one: bool) -> None:
    slow = Slow()
    rate = cached(slow)
    found, threads = in_threads(1, lambda: rate("a"))
    assert slow.begun.acquire(timeout=WAIT)
    if one:
        rate.invalidate("a")
    else:
        rate.clear()
    slow.go.set()
    threads[0].join(WAIT)
    assert found == ["a 1"]
    assert rate("a") == "a 2"


def test_a_coroutine_that_is_cancelled_leaves_the_call_to_the_others() -> None:
    async def main() -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        go = asyncio.Event()
        calls = 0

        @cached
        async def rate(value: str) -> str:
            nonlocal calls
            calls += 1
            number = calls
            await go.wait()
            return f"{value} {number}"

        tasks = [asyncio.create_task(rate("a")) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()  # a task that waits: the others do not notice
        await asyncio.sleep(0)
        tasks[0].cancel()  # the task that computes: another one takes over
        await asyncio.sleep(0.01)
        go.set()
        assert await tasks[2] == "a 2"
        assert await rate("a") == "a 2"
        del tasks
        gc.collect()
        assert told == [], "nobody is told of an error that nobody waited for"

    asyncio.run(main())


def test_a_call_of_itself_is_an_error_instead_of_waiting_for_ever() -> None:
    @cached
    def round_and_round(value: int) -> int:
        return int(round_and_round(value))

    found, threads = in_threads(1, lambda: round_and_round(1))
    threads[0].join(WAIT)
    assert [type(each) for each in found] == [RuntimeError]
    assert "calls itself with the same arguments" in str(found[0])

    @cached
    def count_down(value: int) -> int:
        return 0 if value == 0 else int(count_down(value - 1)) + 1

    assert count_down(5) == 5


# -- keys -------------------------------------------------------------------------------------


def test_arguments_that_cannot_be_a_key_are_named() -> None:
    @cached
    def total(items: list[int]) -> int:
        return sum(items)

    with pytest.raises(TypeError, match=r"argument 'items' of .*total is of type list"):
        total([1, 2])

    @cached(key=lambda items: (*items, "items"))
    def counted(items: list[int], more: int = 0) -> int:
        return sum(items)

    assert counted([1, 2]) == counted([1, 2], more=5) == 3
    assert counted.status().misses == 1


def test_more_arguments_by_name_are_part_of_the_key() -> None:
    calls = Calls()

    @cached
    def ask(**more: int) -> Any:
        return calls.plain(tuple(sorted(more.items())))

    assert ask(a=1, b=2) == ask(b=2, a=1) != ask(a=1)


@pytest.mark.parametrize(
    "wrong", [{"ttl": 0}, {"ttl": -1}, {"ttl": "1"}, {"size": 0}, {"size": "1"}]
)
def test_wrong_values_are_refused_at_once(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"cached: {next(iter(wrong))}"):
        cached(**wrong)


def test_it_goes_below_and_above_a_task() -> None:
    @task(timeout=5)
    @cached
    def below(ctx: Any, url: str) -> str:
        return url

    @cached
    @task(timeout=5)
    def above(ctx: Any, url: str) -> str:
        return url

    for function in (below, above):
        assert task_options(function) is not None
        assert function(None, "x") == "x"
    assert make_cached is cached
