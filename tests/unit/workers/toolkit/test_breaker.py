"""breaker: one for each key, opened by failures that count, closed by probes, never stuck."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from musterd.ipc.resilience.policy import SECOND_NS, BreakerPolicy
from musterd.workers.authoring.base import Permanent, Retry
from musterd.workers.toolkit import BreakerOpen, BulkheadFull, breaker
from musterd.workers.toolkit.breaker import BREAKERS_MAX

MODULE = sys.modules["musterd.workers.toolkit.breaker"]


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**15

    def __call__(self) -> int:
        return self.now_ns

    def pass_seconds(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(MODULE, "monotonic_ns", clock)
    breaker.reset()
    yield clock
    breaker.reset()


@pytest.fixture(params=["sync", "async"])
def calling(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return calling(guard, error or None), which calls once through the guard."""

    def call(guard: Any, error: BaseException | None = None) -> str:
        if request.param == "sync":

            @guard
            def function() -> str:
                if error:
                    raise error
                return "fine"

            return str(function())

        @guard
        async def coroutine() -> str:
            if error:
                raise error
            return "fine"

        return str(asyncio.run(coroutine()))

    return call


def fail(calling: Any, guard: breaker, times: int) -> None:
    for _ in range(times):
        with pytest.raises(ConnectionError):
            calling(guard, ConnectionError())


def test_three_failures_open_it_for_five_minutes_and_two_successes_close_it(
    calling: Any, clock: Clock
) -> None:
    guard = breaker("site")
    fail(calling, guard, 3)
    with pytest.raises(BreakerOpen, match=r"'site' is open; come back in 300.0 s") as refused:
        calling(guard)
    assert refused.value.retry_after == 300
    clock.pass_seconds(299)
    with pytest.raises(BreakerOpen):
        calling(guard)
    clock.pass_seconds(1)
    assert calling(guard) == "fine"
    assert breaker.states()["site"].state == "half-open"
    assert calling(guard) == "fine"
    assert breaker.states()["site"].state == "closed"


def test_a_failed_probe_opens_it_again_for_longer(calling: Any, clock: Clock) -> None:
    guard = breaker("site", failures=1, open=10)
    fail(calling, guard, 1)
    clock.pass_seconds(10)
    fail(calling, guard, 1)
    assert 18 <= breaker.states()["site"].retry_after <= 22


def test_a_success_in_between_begins_the_count_anew(calling: Any) -> None:
    guard = breaker("site")
    fail(calling, guard, 2)
    calling(guard)
    fail(calling, guard, 2)
    assert breaker.states()["site"].state == "closed"


@pytest.mark.parametrize(
    "error",
    [Permanent(), Retry(), BulkheadFull("b", 1, 0), KeyError(), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
def test_what_says_nothing_about_the_site_changes_nothing(
    calling: Any, clock: Clock, error: BaseException
) -> None:
    guard = breaker(
        "site", failures=1, open=10, on=(ConnectionError, Permanent, Retry, BulkheadFull)
    )
    with pytest.raises(type(error)):
        calling(guard, error)
    assert breaker.states()["site"].state == "closed"
    fail(calling, guard, 1)
    clock.pass_seconds(10)
    for _ in range(3):  # a probe without a verdict is given back
        with pytest.raises(type(error)):
            calling(guard, error)
    assert breaker.states()["site"].state == "half-open"
    calling(guard)
    calling(guard)
    assert breaker.states()["site"].state == "closed"


def test_the_key_may_be_made_of_the_arguments() -> None:
    class Site:
        @breaker(key=lambda url: urlsplit(url).netloc, failures=1)
        def fetch(self, ctx: object, url: str, *, broken: bool = False) -> str:
            if broken:
                raise ConnectionError
            return url

    site = Site()
    with pytest.raises(ConnectionError):
        site.fetch(None, "http://a.example/x", broken=True)
    with pytest.raises(BreakerOpen, match=r"a\.example"):
        site.fetch(None, url="http://a.example/y")
    assert site.fetch(None, "http://b.example/") == "http://b.example/"
    assert {key: each.state for key, each in breaker.states().items()} == {
        "a.example": "open",
        "b.example": "closed",
    }


def test_a_key_function_that_does_not_fit_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"asks for uri, but .*fetch has url"):

        @breaker(key=lambda uri: uri)
        def fetch(url: str) -> None: ...

    with pytest.raises(TypeError, match="returned 7"):
        breaker(key=lambda *_: 7)(len)("x")  # type: ignore[arg-type, return-value]


def test_functions_with_the_same_key_share_a_breaker(calling: Any) -> None:
    fail(calling, breaker("site"), 2)
    fail(calling, breaker("site"), 1)
    with pytest.raises(BreakerOpen):
        calling(breaker("site"))


def test_the_same_key_with_other_values_is_refused(calling: Any) -> None:
    calling(breaker("site"))
    with pytest.raises(ValueError, match="'site' exists with another policy"):
        calling(breaker("site", failures=5))


def test_reset_closes_one_or_all(calling: Any) -> None:
    guard = breaker("a", failures=1)
    fail(calling, guard, 1)
    assert not breaker.reset("b")
    assert breaker.reset("a")
    assert calling(guard) == "fine"
    assert breaker.reset()
    assert breaker.states() == {}


def test_the_sites_retry_after_keeps_it_open_longer(calling: Any) -> None:
    error = ConnectionError()
    error.retry_after = 1000  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError):
        calling(breaker("site", failures=1), error)
    assert breaker.states()["site"].retry_after == 1000


def test_a_policy_gives_the_rates_too(calling: Any, clock: Clock) -> None:
    policy = BreakerPolicy(
        failures=0, window=4, window_calls_min=4, slow_ns=SECOND_NS, slow_rate=0.5
    )

    @breaker("slow", policy=policy)
    def work(seconds: float) -> None:
        clock.pass_seconds(seconds)

    for seconds in (0, 0, 2, 2):
        work(seconds)
    with pytest.raises(BreakerOpen):
        work(0)


def test_a_disabled_policy_lets_everything_through(calling: Any) -> None:
    guard = breaker("site", policy=BreakerPolicy(enabled=False))
    fail(calling, guard, 10)
    assert calling(guard) == "fine"


def test_only_one_probe_at_a_time_and_a_lost_one_does_not_hold_it_for_ever(
    calling: Any, clock: Clock
) -> None:
    guard = breaker("site", failures=1, open=10, successes=1)
    fail(calling, guard, 1)
    clock.pass_seconds(10)
    began, end = threading.Event(), threading.Event()

    @guard
    def hang() -> None:
        began.set()
        end.wait(30)

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        assert began.wait(30)
        with pytest.raises(BreakerOpen, match="half-open"):
            calling(guard)
        clock.pass_seconds(10)
        assert calling(guard) == "fine"
        assert breaker.states()["site"].state == "closed"
        fail(calling, guard, 1)
        clock.pass_seconds(20)
        calling(guard)
    finally:
        end.set()
        thread.join(30)
    assert breaker.states()["site"].state == "closed"


def test_late_probes_of_an_earlier_round_do_not_count(clock: Clock) -> None:
    policy = BreakerPolicy(failures=1, open_ns=10 * SECOND_NS, open_jitter=0, probes=2)
    end = [threading.Event(), threading.Event()]
    began = threading.Barrier(3)

    @breaker("site", policy=policy)
    def work(n: int = -1) -> None:
        if n < 0:
            raise ConnectionError
        began.wait(30)
        end[n].wait(30)
        if n == 0:
            raise ConnectionError

    def ignoring(n: int) -> None:
        try:
            work(n)
        except ConnectionError:
            return

    with pytest.raises(ConnectionError):
        work()
    clock.pass_seconds(10)
    threads = [threading.Thread(target=ignoring, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    began.wait(30)  # two probes are out
    end[0].set()
    threads[0].join(30)
    clock.pass_seconds(20)  # half-open again at the next call
    with pytest.raises(ConnectionError):
        work()
    assert breaker.states()["site"].state == "open"
    end[1].set()
    threads[1].join(30)
    assert breaker.states()["site"].state == "open"


def test_the_registry_is_bounded(calling: Any) -> None:
    @breaker(key=lambda name: name)
    def touch(name: str) -> None: ...

    touch("first")
    for n in range(BREAKERS_MAX - 1):
        touch(str(n))
    touch("first")
    touch("one more")
    states = breaker.states()
    assert len(states) == BREAKERS_MAX
    assert "first" in states
    assert "0" not in states


def test_many_threads_count_every_failure() -> None:
    guard = breaker("site", failures=800)

    @guard
    def work() -> None:
        raise ConnectionError

    def run() -> None:
        for _ in range(100):
            with pytest.raises(ConnectionError):
                work()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert breaker.states()["site"].state == "open"


@pytest.mark.parametrize("wrong", [{"failures": 0}, {"open": 0}, {"successes": 0}])
def test_wrong_values_are_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        breaker("site", **wrong)
