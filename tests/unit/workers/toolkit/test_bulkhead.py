"""bulkhead: limits the calls under a name, in threads and coroutines together, in order."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from musterd.workers.toolkit import BulkheadFull, bulkhead

SECONDS = 30.0  # more than anything here takes


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def waiting(name: str) -> int:
    state = bulkhead.states().get(name)
    return state.waiting if state else 0


class Meter:
    """Counter of the calls inside: now, and at most."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = self.most = self.calls = 0

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            self.calls += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1


def test_threads_and_coroutines_share_the_limit() -> None:
    meter = Meter()

    @bulkhead("shared", limit=3)
    def in_thread() -> None:
        with meter:
            time.sleep(0.001)

    @bulkhead("shared", limit=3)
    async def in_loop() -> None:
        with meter:
            await asyncio.sleep(0.001)

    async def many() -> None:
        await asyncio.gather(*(in_loop() for _ in range(40)))

    with ThreadPoolExecutor(10) as pool:
        jobs = [pool.submit(in_thread) for _ in range(60)]
        jobs += [pool.submit(asyncio.run, many()) for _ in range(2)]
        for job in jobs:
            job.result(SECONDS)
    assert (meter.most, meter.calls, meter.inside) == (3, 140, 0)
    assert bulkhead.states() == {}


def test_the_documented_kinds_do_not_starve_each_other() -> None:
    limits = {"critical": 20, "normal": 10, "background": 5}
    end = threading.Event()
    with ThreadPoolExecutor(60) as pool:
        for name, limit in limits.items():
            work = bulkhead(name, limit)(lambda: end.wait(SECONDS))
            for _ in range(limit + 1):
                pool.submit(work)
        wait_until(lambda: all(waiting(name) == 1 for name in limits))
        used = {name: (state.used, state.limit) for name, state in bulkhead.states().items()}
        end.set()
    assert used == {name: (limit, limit) for name, limit in limits.items()}


@pytest.fixture
def occupied() -> Any:
    """Hold the only place of the bulkhead `one` until the event is set."""
    began, end = threading.Event(), threading.Event()

    @bulkhead("one", 1)
    def hold() -> None:
        began.set()
        end.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(SECONDS)
    yield end
    end.set()
    thread.join(SECONDS)


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_no_place_in_time_is_bulkhead_full(occupied: threading.Event, timeout: float) -> None:
    full = bulkhead("one", 1, timeout=timeout)(lambda: None)
    with pytest.raises(BulkheadFull, match=r"'one' is full: 1 at once"):
        full()

    @bulkhead("one", 1, timeout=timeout)
    async def coroutine() -> None: ...

    with pytest.raises(BulkheadFull):
        asyncio.run(coroutine())
    assert waiting("one") == 0, "who gave up does not wait any more"


def test_who_comes_first_is_let_in_first(occupied: threading.Event) -> None:
    order: list[int] = []

    @bulkhead("one", 1)
    def work(n: int) -> None:
        order.append(n)

    @bulkhead("one", 1)
    async def async_work(n: int) -> None:
        order.append(n)

    threads = []
    for n in range(6):
        if n % 2:
            thread = threading.Thread(target=asyncio.run, args=(async_work(n),))
        else:
            thread = threading.Thread(target=work, args=(n,))
        threads.append(thread)
        thread.start()
        wait_until(lambda n=n: waiting("one") == n + 1)  # type: ignore[misc]
    occupied.set()
    for thread in threads:
        thread.join(SECONDS)
    assert order == list(range(6))


def test_a_cancelled_coroutine_gives_up_its_claim(occupied: threading.Event) -> None:
    @bulkhead("one", 1)
    async def work() -> str:
        return "done"

    async def main() -> str:
        first, second = asyncio.create_task(work()), asyncio.create_task(work())
        while waiting("one") < 2:
            await asyncio.sleep(0)
        first.cancel()
        occupied.set()
        async with asyncio.timeout(SECONDS):
            return await second

    assert asyncio.run(main()) == "done"
    assert bulkhead.states() == {}


def test_a_coroutine_cancelled_when_it_was_just_let_in_passes_the_place_on() -> None:
    async def main() -> None:
        release = asyncio.Event()

        @bulkhead("loop", 1)
        async def work(event: asyncio.Event | None = None) -> None:
            if event:
                await event.wait()

        holder = asyncio.create_task(work(release))
        await asyncio.sleep(0)
        granted = asyncio.create_task(work())
        while waiting("loop") < 1:
            await asyncio.sleep(0)
        release.set()
        while waiting("loop"):  # the place is given, but the coroutine has not run yet
            await asyncio.sleep(0)
        granted.cancel()
        await asyncio.wait([holder, granted])
        async with asyncio.timeout(SECONDS):
            await work()

    asyncio.run(main())
    assert bulkhead.states() == {}


def test_an_error_gives_the_place_back() -> None:
    work = bulkhead("errors", 1, timeout=0)(lambda: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            work()
    assert bulkhead.states() == {}


def test_a_waiter_whose_loop_is_gone_is_passed_over(occupied: threading.Event) -> None:
    @bulkhead("one", 1)
    async def lost() -> None: ...

    loop = asyncio.new_event_loop()
    coroutine = lost()
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    assert waiting("one") == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    last = threading.Thread(target=bulkhead("one", 1)(lambda: None))
    last.start()
    wait_until(lambda: waiting("one") == 2)
    occupied.set()
    last.join(SECONDS)
    assert not last.is_alive()
    wait_until(lambda: bulkhead.states() == {})
    coroutine.close()


def test_the_name_may_be_made_of_the_arguments() -> None:
    seen: list[str] = []

    @bulkhead(lambda site: f"site {site}", 2)
    def work(site: str) -> None:
        seen.extend(bulkhead.states())

    work("a.example")
    assert seen == ["site a.example"]


def test_the_same_name_with_another_limit_is_refused(occupied: threading.Event) -> None:
    with pytest.raises(ValueError, match="'one' is in use with a limit of 1, not 2"):
        bulkhead("one", 2)(lambda: None)()


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_a_whole_number_of_at_least_one(limit: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="limit"):
        bulkhead("x", limit)
