"""timeout: callers are released in time; calls that cannot be stopped are counted and bounded."""

import asyncio
import contextvars
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from musterd.workers.authoring.base import TaskTimeout
from musterd.workers.toolkit import CallTimeout, timeout
from musterd.workers.toolkit.timeout import ABANDONED_MAX
from support.waiting import wait_for

MODULE = sys.modules["musterd.workers.toolkit.timeout"]
SECONDS = 30.0


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """Return an event that is set at the end, so that no thread is left behind."""
    event = threading.Event()
    yield event
    event.set()
    wait_for("no call is left", lambda: not MODULE._abandoned)


def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    cancelled = False

    @timeout(0.01)
    async def slow() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(CallTimeout, match=r"slow took longer than its timeout of 0.01 s"):
        asyncio.run(slow())
    assert cancelled


def test_a_function_that_takes_too_long_is_not_waited_for(end: threading.Event) -> None:
    slow = timeout(0.01)(lambda: end.wait(SECONDS))
    with pytest.raises(CallTimeout, match="its thread runs on until it ends"):
        slow()
    assert len(MODULE._abandoned) == 1


def test_what_is_in_time_returns_or_raises_as_it_is() -> None:
    assert timeout(SECONDS)(lambda *, n: n + 1)(n=1) == 2
    with pytest.raises(ZeroDivisionError):
        timeout(SECONDS)(lambda: 1 / 0)()
    with pytest.raises(SystemExit):
        timeout(SECONDS)(sys.exit)()

    @timeout(SECONDS)
    async def double(n: int) -> int:
        return 2 * n

    assert asyncio.run(double(2)) == 4
    assert not MODULE._abandoned


def test_the_functions_own_timeout_error_stays_its_own() -> None:
    @timeout(SECONDS)
    async def coroutine() -> None:
        raise TimeoutError("of the library")

    def function() -> None:
        raise TimeoutError("of the library")

    for call in (lambda: asyncio.run(coroutine()), timeout(SECONDS)(function)):
        with pytest.raises(TimeoutError, match="of the library") as raised:
            call()
        assert not isinstance(raised.value, CallTimeout)


def test_the_functions_thread_sees_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default="")
    variable.set("of the caller")
    assert timeout(SECONDS)(variable.get)() == "of the caller"


def test_the_number_of_abandoned_threads_is_bounded(end: threading.Event) -> None:
    slow = timeout(0.001)(lambda: end.wait(SECONDS))
    for _ in range(ABANDONED_MAX):
        with pytest.raises(CallTimeout):
            slow()
    with pytest.raises(CallTimeout, match=f"was not called: {ABANDONED_MAX} calls"):
        timeout(SECONDS)(lambda: None)()
    end.set()
    wait_for("no call is left", lambda: not MODULE._abandoned)
    assert timeout(SECONDS)(lambda: "again")() == "again"


def test_a_task_timeout_that_strikes_the_waiting_thread_passes(end: threading.Event) -> None:
    """Raise a task's timeout as the runtime does: in the main thread, from a signal handler."""

    def strike(*_: Any) -> None:
        raise TaskTimeout("over")

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        main = threading.main_thread().ident
        assert main is not None
        for moment in (0.0, 0.02):  # while the thread starts, and while its end is awaited

            def work(moment: float = moment) -> None:
                end.wait(moment)
                signal.pthread_kill(main, signal.SIGUSR1)
                end.wait(SECONDS)

            with pytest.raises(TaskTimeout):
                timeout(SECONDS)(work)()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(MODULE._abandoned) == 2


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), "5", None])
def test_wrong_values_are_refused_at_once(seconds: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="seconds"):
        timeout(seconds)
