"""Habits of people who write workers: a bare `@retry`, timedelta for seconds, generators."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from musterd.workers.authoring.base import Context, Retry, task, task_options
from musterd.workers.metrics import metrics
from musterd.workers.toolkit import (
    BreakerOpen,
    BulkheadFull,
    CallTimeout,
    breaker,
    bulkhead,
    cached,
    counts,
    loading,
    locks,
    retry,
    timeout,
)

SHORT = timedelta(milliseconds=20)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    breaker.reset()
    metrics.take()
    counts._known.clear()
    yield
    breaker.reset()


def test_retry_without_parentheses_is_the_usual_one() -> None:
    calls: list[int] = []

    @retry
    def once(number: int) -> int:
        """Its own words."""
        calls.append(number)
        return number

    @retry
    async def later(number: int) -> int:
        return number

    assert (once(3), asyncio.run(later(4)), calls) == (3, 4, [3])
    assert (once.__name__, once.__doc__) == ("once", "Its own words.")
    from musterd.workers.toolkit import retry as module

    assert callable(module)


def test_retry_without_parentheses_does_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    failures = iter([ConnectionError(), ConnectionError()])

    @retry
    def flaky() -> str:
        for error in failures:
            raise error
        return "done"

    assert flaky() == "done"


@pytest.mark.parametrize(
    "bare",
    [
        timeout,
        bulkhead,
        lambda function: breaker("key")("no function"),
        lambda function: retry("3"),
    ],
)
def test_another_decorator_without_its_arguments_says_what_to_write(bare: Any) -> None:
    def fetch() -> None: ...

    with pytest.raises(TypeError, match=r"write @|give a whole number"):
        bare(fetch)


def test_seconds_may_be_a_timedelta() -> None:
    @timeout(SHORT)
    async def slow() -> None:
        await asyncio.sleep(30)

    with pytest.raises(CallTimeout, match=r"0\.02 s"):
        asyncio.run(slow())

    @retry(1, base=timedelta(0), max=timedelta(seconds=1))
    def broken() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        broken()

    @breaker("shop", failures=1, open=timedelta(minutes=5))
    def shop() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        shop()
    with pytest.raises(BreakerOpen) as refused:
        shop()
    assert 200 < refused.value.retry_after <= 360
    with locks.acquire("x", SHORT), locks.acquire_rlock("x", SHORT):
        assert locks.run_locked("y", abs, -1, timeout=SHORT) == 1
    with locks.holding(threading.Lock(), SHORT) as held:
        assert held

    @bulkhead("narrow", 1, timeout=SHORT)
    def narrow() -> str:
        return narrow()

    with pytest.raises(BulkheadFull):
        narrow()
    with loading("tea", show=lambda *_: None, every=SHORT):
        pass
    assert Retry(after=timedelta(seconds=2)).after == 2.0


def test_seconds_of_a_task_and_of_its_lock_may_be_a_timedelta() -> None:
    @task(timeout=SHORT, cache=timedelta(minutes=1), debounce=timedelta(seconds=1))
    def fetch(ctx: Context) -> None: ...

    options = task_options(fetch)
    assert options is not None
    assert options.timeout_ns == 20_000_000
    assert (options.cache_ns, options.debounce_ns) == (60_000_000_000, 1_000_000_000)

    class RequestChannel:
        def lock(self, lease: object, name: str, seconds: float) -> tuple[str, float]:
            return name, seconds

    ctx: Any = Context("a")
    ctx._channel, ctx._lease = RequestChannel(), object()
    assert ctx.lock("x", timedelta(seconds=3)) == ("x", 3.0)


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generator, async_generator])
@pytest.mark.parametrize(
    "decorator",
    [retry, retry(), breaker("k"), bulkhead("k", 1), timeout(1), cached, loading("x")],
    ids=["bare retry", "retry", "breaker", "bulkhead", "timeout", "cached", "loading"],
)
def test_a_generator_is_refused_with_what_to_wrap_instead(
    decorator: Callable[..., Any], function: Any
) -> None:
    with pytest.raises(TypeError, match="wrap what makes a single item"):
        decorator(function)


# -- metrics of the toolkit itself --------------------------------------------------------------


def told() -> dict[tuple[str, ...], float]:
    return {
        (each.name, *(each.labels[key] for key in sorted(each.labels))): each.value
        for each in metrics.take()
    }


def test_retries_breakers_and_bulkheads_are_counted() -> None:
    @retry(2, base=0)
    def flaky() -> None:
        raise ConnectionError

    @breaker("shop", failures=1)
    def shop() -> None:
        raise ConnectionError

    inside, done = threading.Event(), threading.Event()

    @bulkhead("narrow", limit=1, timeout=0)
    def narrow() -> None:
        inside.set()
        done.wait(30)

    for function in (flaky, shop):
        with pytest.raises(ConnectionError):
            function()
    with pytest.raises(BreakerOpen):
        shop()
    thread = threading.Thread(target=narrow)
    thread.start()
    assert inside.wait(30)
    with pytest.raises(BulkheadFull):
        narrow()
    done.set()
    thread.join()
    name = flaky.__qualname__
    assert told() == {
        ("toolkit_retries", name[:64]): 2,
        ("toolkit_breaker_changes", "shop", "open"): 1,
        ("toolkit_breaker_open", "shop"): 1,
        ("toolkit_breaker_refused", "shop"): 1,
        ("toolkit_bulkhead_calls", "narrow"): 1,
        ("toolkit_bulkhead_refused", "narrow"): 1,
    }


def test_coroutines_are_counted_likewise() -> None:
    @retry(2, base=0)
    async def flaky() -> None:
        raise ConnectionError

    @breaker("shop", failures=1)
    async def shop() -> None:
        raise ConnectionError

    @bulkhead("narrow", limit=1, timeout=0)
    async def narrow(full: asyncio.Event) -> None:
        await full.wait()

    async def main() -> None:
        for function in (flaky, shop):
            with pytest.raises(ConnectionError):
                await function()
        with pytest.raises(BreakerOpen):
            await shop()
        full = asyncio.Event()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(narrow(full))
            await asyncio.sleep(0)
            with pytest.raises(BulkheadFull):
                await narrow(full)
            full.set()

    asyncio.run(main())
    assert told() == {
        ("toolkit_retries", flaky.__qualname__[:64]): 2,
        ("toolkit_breaker_changes", "shop", "open"): 1,
        ("toolkit_breaker_open", "shop"): 1,
        ("toolkit_breaker_refused", "shop"): 1,
        ("toolkit_bulkhead_calls", "narrow"): 1,
        ("toolkit_bulkhead_refused", "narrow"): 1,
    }


@pytest.mark.parametrize("how", ["reset", "all", "forgotten"])
def test_a_breaker_that_is_forgotten_is_told_as_closed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @breaker(lambda site: site, failures=1)
    def fetch(site: str) -> None:
        if site == "shop":
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fetch("shop")
    assert told()["toolkit_breaker_open", "shop"] == 1
    if how == "reset":
        assert breaker.reset("shop")
        assert not breaker.reset("shop")
    elif how == "all":
        assert breaker.reset()
        assert not breaker.reset()
    else:
        monkeypatch.setattr(sys.modules["musterd.workers.toolkit.breaker"], "BREAKERS_MAX", 1)
        fetch("other")
    assert told() == {
        ("toolkit_breaker_changes", "shop", "closed"): 1,
        ("toolkit_breaker_open", "shop"): 0,
    }


def test_a_breaker_that_closes_says_so() -> None:
    from musterd.workers.toolkit import breaker as guard

    errors = [ConnectionError()]
    during: list[dict[tuple[str, ...], float]] = []

    @guard("shop", failures=1, open=0.001, successes=1)
    def shop() -> None:
        if errors:
            raise errors.pop()
        during.append(told())

    with pytest.raises(ConnectionError):
        shop()
    deadline = threading.Event()
    for _ in range(1000):
        try:
            shop()
            break
        except BreakerOpen:
            deadline.wait(0.005)
    assert guard.states()["shop"].state == "closed"
    (probe,) = during
    assert probe["toolkit_breaker_changes", "shop", "half-open"] == 1
    assert probe["toolkit_breaker_open", "shop"] == 1, "it is not closed"
    found = told()
    assert found["toolkit_breaker_open", "shop"] == 0
    assert found["toolkit_breaker_changes", "shop", "closed"] == 1


def test_many_names_do_not_push_out_the_metrics_of_the_worker() -> None:
    for number in range(100):
        counts.breaker_refused(f"site{number}")
    found = told()
    assert len(found) == counts.NAMES_MAX + 1
    assert found["toolkit_breaker_refused", "other"] == 100 - counts.NAMES_MAX
