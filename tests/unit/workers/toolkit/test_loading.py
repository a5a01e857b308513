"""`loading`, which tells what is under way and for how long; `locks.holding`, for any lock."""

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from musterd.workers.toolkit import loading, locks

WAIT = 30.0


class Screen:
    """A screen that keeps what it is told to show."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float]] = []
        self.changed = threading.Event()

    def show(self, text: str, seconds: float) -> None:
        self.lines.append((text, seconds))
        self.changed.set()

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys(text for text, _ in self.lines))

    def wait(self, count: int) -> None:
        while len(self.lines) < count:
            self.changed.clear()
            assert self.changed.wait(WAIT), self.lines


class Ctx:
    """Stand-in for the context of a task."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []

    def progress(self, fraction: float, text: str = "") -> None:
        self.told.append((fraction, text))


def test_a_block_is_shown_at_once_again_and_again_and_at_its_end() -> None:
    screen = Screen()
    with loading("prices", show=screen.show, every=0.01) as shown:
        screen.wait(4)
        shown.update("more prices")
        screen.wait(6)
    count = len(screen.lines)
    assert screen.texts == ["prices", "more prices"]
    times = [seconds for _, seconds in screen.lines]
    assert times == sorted(times)
    assert times[-1] > times[0] >= 0
    assert not any(thread.name == "loading" for thread in threading.enumerate())
    assert len(screen.lines) == count


def test_a_block_of_a_coroutine_is_shown_too() -> None:
    screen = Screen()

    async def main() -> None:
        async with asyncio.timeout(WAIT), loading("prices", show=screen.show, every=0.01):
            while len(screen.lines) < 4:
                await asyncio.sleep(0.005)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert screen.texts == ["prices"]


def test_the_context_of_the_task_shows_text_time_and_fraction() -> None:
    ctx = Ctx()
    with loading("page", ctx=ctx) as shown:
        shown.update(fraction=0.5)
        shown.update("last page", fraction=1)
    told = [(fraction, text.partition(" (")[0]) for fraction, text in ctx.told]
    assert list(dict.fromkeys(told)) == [(0.0, "page"), (0.5, "page"), (1.0, "last page")]
    assert all(re.fullmatch(r".*page \(\d+ s\)", text) for _, text in ctx.told)
    with loading("page", ctx=ctx) as shown, pytest.raises(ValueError, match="fraction=2"):
        shown.update(fraction=2)


def test_the_time_is_how_long_it_has_been_running(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    module = sys.modules["musterd.workers.toolkit.loading"]  # the package's `loading` is the class
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    ctx = Ctx()
    with loading("page", ctx=ctx, every=600) as shown:
        now[0] += 75.5
        shown.update()
        now[0] += 1
    assert [text for _, text in ctx.told] == ["page (0 s)", "page (75 s)", "page (76 s)"]


def test_a_function_is_shown_through_the_context_of_its_call() -> None:
    shown: list[int] = []

    @loading(lambda url: f"fetching {url}", every=600)
    def fetch(ctx: Any, url: str) -> str:
        shown.append(len(ctx.told))
        return url.upper()

    @loading("fetching", every=600)
    async def fetch_async(ctx: Any, url: str) -> str:
        shown.append(len(ctx.told))
        return url.upper()

    one, other = Ctx(), Ctx()
    assert (fetch(one, "a"), asyncio.run(fetch_async(other, "b"))) == ("A", "B")
    assert shown == [1, 1], "it begins before the function and ends after it"
    assert (len(one.told), len(other.told)) == (2, 2)
    assert one.told[0][1].startswith("fetching a (")
    assert other.told[0][1].startswith("fetching (")
    assert fetch.__name__ == "fetch"


def test_many_calls_may_be_under_way_at_once() -> None:
    screen = Screen()

    @loading("one of many", show=screen.show, every=10)
    async def work() -> None:
        await asyncio.sleep(0.01)

    async def main() -> None:
        await asyncio.gather(*[work() for _ in range(10)])

    asyncio.run(main())
    assert len(screen.lines) == 20


def test_an_error_passes_and_a_broken_show_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def broken(text: str, seconds: float) -> None:
        raise OSError("no screen")

    with pytest.raises(KeyError), loading("prices", show=broken):
        raise KeyError("x")
    assert "loading: prices cannot be shown: OSError('no screen')" in caplog.text


def test_nobody_to_show_it_to_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(TypeError, match="give ctx=ctx, or show=function"), loading("prices"):
        pass

    @loading("prices")
    def alone() -> None: ...

    with pytest.raises(TypeError, match="give ctx=ctx"):
        alone()
    shown = loading("x", show=print)
    with shown, pytest.raises(RuntimeError, match="make one for each operation"), shown:
        pass


# -- locks that the caller made -------------------------------------------------------------------


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Semaphore])
@pytest.mark.parametrize("timeout", [0, 0.02])
def test_a_lock_of_ones_own_says_whether_it_was_taken(
    make: Callable[[], Any], timeout: float
) -> None:
    lock = make()
    found: list[bool] = []

    def take() -> None:
        with locks.holding(lock, timeout) as held:
            found.append(held)

    with locks.holding(lock, timeout=5) as held:
        assert held
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(WAIT)
    take()
    assert found == [False, True]


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_of_ones_own_is_waited_for(make: Callable[[], Any]) -> None:
    lock, taken = make(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            threading.Event().wait(0.05)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(WAIT)
    with locks.holding(lock, WAIT) as held:
        assert held
    thread.join(WAIT)


def test_a_lock_is_given_back_after_an_error_and_an_rlock_counts() -> None:
    lock = threading.Lock()
    with pytest.raises(KeyError), locks.holding(lock):
        raise KeyError
    assert lock.acquire(blocking=False)
    again = threading.RLock()
    with locks.holding(again) as outer, locks.holding(again, 0) as inner:
        assert outer
        assert inner


def test_what_is_no_lock_of_threads_is_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match="is no lock"), locks.holding("name"):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match=r"asyncio\.timeout"), locks.holding(asyncio.Lock()):
        pass
