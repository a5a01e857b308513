"""The decorators in every order, on functions, methods and tasks; and what type checkers see."""

import asyncio
import inspect
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.workers import toolkit
from musterd.workers.authoring.base import task, task_options
from musterd.workers.runtime.handlers import load
from musterd.workers.toolkit import (
    BreakerOpen,
    BulkheadFull,
    breaker,
    bulkhead,
    retry,
    timeout,
)

DECORATORS = {
    "retry": retry(2, base=0, jitter=0),
    "breaker": breaker("together", failures=50),
    "bulkhead": bulkhead("together", 1),
    "timeout": timeout(30),
}
ORDERS = list(itertools.permutations(DECORATORS))


def test_everything_of_the_toolkit_is_there() -> None:
    for name in toolkit.__all__:
        assert getattr(toolkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = toolkit.nothing  # type: ignore[attr-defined]


def test_http_is_not_loaded_before_it_is_used() -> None:
    code = "import sys, musterd.workers.toolkit; print('aiohttp' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order_works_for_sync_and_async(order: tuple[str, ...]) -> None:
    failures = 0

    def function(ctx: object, n: int, *, plus: int = 0) -> int:
        """Doubles."""
        nonlocal failures
        failures += 1
        if failures % 3:
            raise ConnectionError
        return 2 * n + plus

    async def coroutine(ctx: object, n: int, *, plus: int = 0) -> int:
        await asyncio.sleep(0)
        return function(ctx, n, plus=plus)

    decorated: Any = function
    decorated_async: Any = coroutine
    for name in order:
        decorated, decorated_async = DECORATORS[name](decorated), DECORATORS[name](decorated_async)
    assert decorated(None, 2, plus=1) == 5
    assert asyncio.run(decorated_async(None, n=3)) == 6
    assert not inspect.iscoroutinefunction(decorated)
    assert inspect.iscoroutinefunction(decorated_async)
    assert decorated.__doc__ == "Doubles."
    assert inspect.signature(decorated) == inspect.signature(function)
    assert bulkhead.states() == {}


def test_a_breaker_outside_of_retry_counts_its_tries_once_and_inside_each() -> None:
    breaker.reset()

    def fail() -> None:
        raise ConnectionError

    outside = breaker("outside", failures=2)(retry(2, base=0)(fail))
    with pytest.raises(ConnectionError):
        outside()
    assert breaker.states()["outside"].failures == 1

    inside = retry(9, base=0)(breaker("inside", failures=2)(fail))
    with pytest.raises(BreakerOpen):
        inside()
    breaker.reset()


def test_a_full_bulkhead_is_retried() -> None:
    told: list[Exception] = []

    @retry(1, base=0, on_retry=lambda attempt, error, pause: told.append(error))
    @bulkhead("nested", 1, timeout=0)
    def inner() -> None: ...

    @bulkhead("nested", 1, timeout=0)
    def outer() -> None:
        inner()

    with pytest.raises(BulkheadFull):
        outer()
    assert [type(error) for error in told] == [BulkheadFull]


def test_tasks_may_be_decorated_below_and_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decorated_tasks.py").write_text(
        textwrap.dedent("""
        from __future__ import annotations
        from musterd import Worker, task
        from musterd.workers.toolkit import breaker, bulkhead, retry, timeout

        class Shop(Worker):
            @task(timeout=5)
            @retry(base=0)
            @breaker(key=lambda url: url)
            async def below(self, ctx, url: str) -> str:
                return url

            @bulkhead("x", 2)
            @task(target="url")
            @timeout(5)
            def around(self, ctx, url: str, n: int = 1) -> str:
                return url * n
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    handlers = {each.method: each for each in load("decorated_tasks:Shop").handlers}
    assert handlers["below"].is_async
    assert not handlers["around"].is_async
    assert handlers["around"].options.target == "url"
    assert handlers["around"].signature == "around(url, n=...)"
    arguments = handlers["around"].decode(msgspec.msgpack.encode({"url": "u", "n": 2}))
    assert handlers["around"].function(object(), object(), **arguments) == "uu"
    with pytest.raises(msgspec.ValidationError):
        handlers["below"].decode(msgspec.msgpack.encode({"url": 7}))


def test_a_decorated_task_stays_a_task() -> None:
    @retry()
    @task
    def handler(ctx: object) -> None: ...

    assert task_options(handler) is not None


@pytest.mark.parametrize("name", [*DECORATORS, "cached", "loading"])
def test_a_stop_iteration_of_the_function_stays_one(name: str) -> None:
    others: dict[str, Any] = {
        "cached": toolkit.cached,
        "loading": toolkit.loading("x", show=lambda *_: None),
    }

    def first(items: tuple[int, ...]) -> int:
        return next(iter(items))

    wrapped: Any = {**DECORATORS, **others}[name](first)
    assert wrapped((1,)) == 1
    with pytest.raises(StopIteration):
        wrapped(())


def test_a_runtime_error_because_of_a_stop_iteration_stays_one() -> None:
    error = RuntimeError("the list is empty")
    error.__cause__ = StopIteration()

    @breaker("runtime error")
    def first() -> int:
        raise error

    with pytest.raises(RuntimeError, match="the list is empty"):
        first()
