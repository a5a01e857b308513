"""retry: how often, after which pauses, on which errors, until when, and over restarts."""

import asyncio
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, RetryPolicy
from musterd.workers.authoring.base import Context, Permanent, Retry, TaskTimeout
from musterd.workers.toolkit import BreakerOpen, MemoryState, retry
from musterd.workers.toolkit.retry import retry_with


class Ctx(Context):
    """Context with state, as the runtime gives it."""

    def __init__(
        self,
        task_id: str = "t1",
        *,
        deadline: float = math.inf,
        state: MemoryState | None = None,
    ) -> None:
        super().__init__(task_id, deadline=deadline)
        self.state = state or MemoryState()


class Flaky:
    """A function that raises the given errors one by one, then returns how often it was called."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def run(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


@pytest.fixture(params=["sync", "async"])
def calling(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return calling(decorator, flaky, *args), through a sync or an async function."""

    def call(decorator: Any, flaky: Flaky, *args: Any) -> Any:
        if request.param == "sync":
            return decorator(lambda *_: flaky.run())(*args)

        async def function(*_: Any) -> int:
            return flaky.run()

        return asyncio.run(decorator(function)(*args))

    return call


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record sleeps without sleeping."""
    slept: list[float] = []
    module = sys.modules["musterd.workers.toolkit.retry"]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    class Time:
        sleep = slept.append
        monotonic = time.monotonic

    class Loop:
        pass

    Loop.sleep = staticmethod(sleep)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "time", Time)
    monkeypatch.setattr(module, "asyncio", Loop)
    return slept


def test_a_function_that_recovers_is_called_until_it_does(calling: Any, pauses: Any) -> None:
    flaky = Flaky(ValueError("1"), ValueError("2"))
    assert calling(retry(jitter=0), flaky) == 3
    assert pauses == [1.0, 2.0]


def test_after_the_last_retry_its_error_is_raised(calling: Any, pauses: Any) -> None:
    flaky = Flaky(*(ValueError(str(n)) for n in range(9)))
    with pytest.raises(ValueError, match=r"^3$"):
        calling(retry(jitter=0), flaky)
    assert (flaky.calls, pauses) == (4, [1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strategy": "linear", "base": 2}, [2, 4, 6, 8]),
        ({"strategy": "fixed", "base": 7}, [7, 7, 7, 7]),
        ({"factor": 3, "max": 10}, [1, 3, 9, 10]),
        ({"backoff": lambda attempt, error: attempt * 10.0, "max": 25}, [10, 20, 25, 25]),
    ],
)
def test_pauses_follow_the_strategy(
    calling: Any, pauses: list[float], options: Any, expected: list[float]
) -> None:
    flaky = Flaky(*(ConnectionError() for _ in range(4)))
    assert calling(retry(4, jitter=0, **options), flaky) == 5
    assert pauses == expected


def test_jitter_spreads_the_pauses(calling: Any, pauses: list[float]) -> None:
    calling(retry(50, strategy="fixed", jitter=0.5), Flaky(*(ConnectionError() for _ in range(50))))
    assert len(set(pauses)) > 45
    assert all(0.5 <= pause <= 1.5 for pause in pauses)


@pytest.mark.parametrize("error", [KeyError("x"), Permanent("no"), Retry(after=1), TaskTimeout()])
def test_what_does_not_pass_is_raised_at_once(calling: Any, error: Exception) -> None:
    flaky = Flaky(error)
    with pytest.raises(type(error)):
        calling(retry(on=(ConnectionError, Permanent, Retry)), flaky)
    assert flaky.calls == 1


def test_a_wrapped_timeout_of_the_task_is_not_retried(calling: Any) -> None:
    wrapped = ConnectionError("the library's own")
    wrapped.__cause__ = TaskTimeout("over")
    flaky = Flaky(wrapped)
    with pytest.raises(ConnectionError, match="own"):
        calling(retry(), flaky)
    assert flaky.calls == 1


def test_a_function_may_say_which_errors_pass(calling: Any, pauses: Any) -> None:
    flaky = Flaky(ConnectionError("soon"), ConnectionError("never"))
    with pytest.raises(ConnectionError, match="never"):
        calling(retry(on=lambda error: "soon" in str(error)), flaky)
    assert flaky.calls == 2


def test_cancellation_is_never_retried() -> None:
    calls = 0

    @retry(base=0)
    async def function() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(math.inf)

    async def main() -> None:
        task = asyncio.create_task(function())
        while not calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert calls == 1


def test_retry_after_is_honoured_up_to_max_and_left_to_the_supervisor_beyond(
    calling: Any, pauses: list[float]
) -> None:
    busy = ConnectionError("busy")
    busy.retry_after = 20  # type: ignore[attr-defined]
    away = ConnectionError("away")
    away.retry_after = 61.0  # type: ignore[attr-defined]
    flaky = Flaky(busy, away)
    with pytest.raises(ConnectionError, match="away"):
        calling(retry(jitter=0), flaky)
    assert (flaky.calls, pauses) == (2, [20.0])


@pytest.mark.parametrize("nonsense", [-5, math.nan, math.inf, "soon", None])
def test_a_nonsensical_retry_after_is_ignored(
    calling: Any, pauses: list[float], nonsense: object
) -> None:
    error = ConnectionError()
    error.retry_after = nonsense  # type: ignore[attr-defined]
    assert calling(retry(jitter=0), Flaky(error)) == 2
    assert pauses == [1.0]


def test_an_open_breaker_is_not_waited_for(calling: Any) -> None:
    flaky = Flaky(BreakerOpen("site", "open", 300.0))  # type: ignore[arg-type]
    with pytest.raises(BreakerOpen):
        calling(retry(), flaky)
    assert flaky.calls == 1


def test_no_pause_goes_beyond_the_deadline(calling: Any, pauses: list[float]) -> None:
    flaky = Flaky(ConnectionError("1"), ConnectionError("2"), ConnectionError("3"))
    with pytest.raises(ConnectionError, match="2"):
        calling(retry(jitter=0), flaky, Ctx(deadline=time.monotonic() + 1.5))
    assert pauses == [1.0]


def test_the_context_is_found_by_its_name_too(pauses: list[float]) -> None:
    class Fake:
        deadline = time.monotonic() - 1

    flaky = Flaky(ConnectionError())

    @retry()
    def function(url: str, ctx: Any) -> int:
        return flaky.run()

    with pytest.raises(ConnectionError):
        function("u", Fake())
    flaky = Flaky(ConnectionError())
    with pytest.raises(ConnectionError):
        function("u", ctx=Fake())
    assert pauses == []


def test_on_retry_is_told_attempt_error_and_pause(calling: Any, pauses: Any) -> None:
    told: list[Any] = []
    first, second = ConnectionError("1"), ConnectionError("2")
    calling(retry(jitter=0, on_retry=lambda *all_: told.append(all_)), Flaky(first, second))
    assert told == [(1, first, 1.0), (2, second, 2.0)]


def test_on_retry_may_be_async(pauses: Any) -> None:
    told = []

    async def on_retry(attempt: int, error: Exception, pause: float) -> None:
        told.append(attempt)

    flaky = Flaky(ConnectionError())

    @retry(on_retry=on_retry)
    async def function() -> int:
        return flaky.run()

    assert asyncio.run(function()) == 2
    assert told == [1]


def test_a_policy_of_the_core_can_be_used(calling: Any, pauses: list[float]) -> None:
    policy = RetryPolicy(1, BackoffPolicy(base_ns=9 * SECOND_NS, jitter=0))
    with pytest.raises(ConnectionError):
        calling(retry_with(policy), Flaky(ConnectionError(), ConnectionError()))
    assert pauses == [9.0]


def test_it_really_sleeps(calling: Any) -> None:
    began = time.monotonic()
    calling(retry(base=0.02, jitter=0), Flaky(ConnectionError(), ConnectionError()))
    assert time.monotonic() - began >= 0.06


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_retries": -1},
        {"strategy": "quadratic"},
        {"base": -1},
        {"max": math.inf},
        {"factor": 0.5},
        {"jitter": 2},
    ],
)
def test_wrong_values_are_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        retry(**wrong)


def test_wrong_uses_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="max_retries"):
        retry("3")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="Exception"):
        retry(on=(KeyboardInterrupt,))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="generator"):
        retry()(_generator)
    with pytest.raises(TypeError, match="staticmethod"):
        retry()(staticmethod(len))  # type: ignore[arg-type]


def _generator() -> Any:
    yield 1


def test_a_backoff_that_returns_nonsense_is_named() -> None:
    flaky = Flaky(ConnectionError())
    with pytest.raises(ValueError, match=r"backoff\(1, ...\) returned -1"):
        retry(backoff=lambda attempt, error: -1)(flaky.run)()


# -- state ----------------------------------------------------------------------------------------


class Killed(BaseException):
    """The death of the worker."""


def test_the_count_of_failures_outlives_the_worker(calling: Any, pauses: list[float]) -> None:
    state = MemoryState()
    kept = retry(3, jitter=0, state="prices")
    with pytest.raises(Killed):
        calling(kept, Flaky(ConnectionError("1"), ConnectionError("2"), Killed()), Ctx(state=state))
    assert state.load("retry:prices:t1") == {"failures": 2, "error": "ConnectionError"}

    flaky = Flaky(ConnectionError("3"), ConnectionError("4"), ConnectionError("5"))
    with pytest.raises(ConnectionError, match="4"):
        calling(kept, flaky, Ctx(state=state))
    assert pauses == [1.0, 2.0, 4.0]
    assert state.kept == {}, "used up: the supervisor's next attempt begins anew"


def test_success_clears_the_state(calling: Any, pauses: list[float]) -> None:
    state = MemoryState()
    with pytest.raises(Killed):
        calling(retry(state="x"), Flaky(ConnectionError(), Killed()), Ctx(state=state))
    assert len(state.kept) == 1
    assert calling(retry(state="x"), Flaky(), Ctx(state=state)) == 1
    assert state.kept == {}


def test_a_permanent_error_clears_the_state(calling: Any, pauses: list[float]) -> None:
    state = MemoryState()
    with pytest.raises(Permanent):
        calling(retry(state="x"), Flaky(ConnectionError(), Permanent()), Ctx(state=state))
    assert state.kept == {}


def test_a_deadline_keeps_the_state_for_the_next_attempt(calling: Any, pauses: Any) -> None:
    state = MemoryState()
    late = Ctx(state=state, deadline=time.monotonic() + 0.5)
    with pytest.raises(ConnectionError):
        calling(retry(jitter=0, state="x"), Flaky(ConnectionError()), late)
    assert state.load("retry:x:t1")["failures"] == 1  # type: ignore[index]


def test_each_task_has_its_own_count(calling: Any, pauses: Any) -> None:
    state = MemoryState()
    with pytest.raises(Killed):
        calling(retry(1, state="x"), Flaky(ConnectionError(), Killed()), Ctx("t1", state=state))
    assert calling(retry(1, state="x"), Flaky(ConnectionError()), Ctx("t2", state=state)) == 2


def test_the_name_may_be_made_of_the_arguments(pauses: Any) -> None:
    state = MemoryState()

    @retry(state=lambda url: f"fetch {url}")
    def fetch(ctx: Ctx, url: str) -> None:
        raise Killed if state.kept else ConnectionError(url)

    with pytest.raises(Killed):
        fetch(Ctx(state=state), "a.example")
    assert list(state.kept) == ["retry:fetch a.example:t1"]


def test_foreign_state_is_not_trusted(calling: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = MemoryState()
    state.save({"pages": 3}, "retry:x:t1")
    assert calling(retry(state="x"), Flaky(), Ctx(state=state)) == 1
    assert "counting from 0" in caplog.text


def test_state_without_a_context_is_a_clear_error(calling: Any) -> None:
    with pytest.raises(TypeError, match="ctx"):
        calling(retry(state="x"), Flaky())
    with pytest.raises(TypeError, match="asks for uri"):
        retry(state=lambda uri: uri)(Flaky().run)
