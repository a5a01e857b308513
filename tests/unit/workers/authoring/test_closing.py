"""The end of a worker: clean-ups run last first, each within its share of the time."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from musterd import on_close
from musterd.workers.authoring import closing
from musterd.workers.authoring.base import Worker


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)
    closing._registered.clear()


def run(
    close: Callable[[], Any] | None = None, *, since: int = 0, seconds: float = 30.0
) -> BaseException | None:
    def finish(value: Any) -> Any:
        return asyncio.run(value) if asyncio.iscoroutine(value) else value

    end = closing.Closing(finish, int(seconds * 1e9))
    return end.run(since=since, close=close or (lambda: None))


def test_the_last_registered_is_called_first_and_close_between_open_and_import() -> None:
    called: list[str] = []
    on_close(called.append, "import 1")
    on_close(called.append, "import 2")
    since = closing.count()
    worker = Worker()
    worker.on_close(called.append, "open")
    worker.on_close(called.append, "handler")
    run(lambda: called.append("close"), since=since)
    assert called == ["handler", "open", "close", "import 2", "import 1"]


def test_async_callbacks_are_awaited_and_keywords_are_passed() -> None:
    called: list[object] = []

    async def later(*, value: int) -> None:
        await asyncio.sleep(0)
        called.append(value)

    assert on_close(later, value=7) is later
    run()
    assert called == [7]


@pytest.mark.parametrize("error", [ValueError("no luck"), SystemExit(3), KeyboardInterrupt()])
def test_one_that_raises_is_logged_and_does_not_keep_the_others(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def fails() -> None:
        raise error

    on_close(called.append, "first")
    on_close(fails)
    on_close(called.append, "last")
    assert run(lambda: called.append("close")) is None
    assert called == ["last", "first", "close"]
    assert "fails failed" in caplog.text
    assert type(error).__name__ in caplog.text


def test_what_close_raises_is_told() -> None:
    def close() -> None:
        raise ValueError("still open")

    called: list[str] = []
    on_close(called.append, "after it")
    error = run(close, since=1)
    assert isinstance(error, ValueError)
    assert called == ["after it"]


def test_one_that_hangs_is_interrupted_and_the_others_have_their_turn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shares are exact.
    monkeypatch.setattr(closing.SystemClock, "now_ns", lambda _: 10**12)
    called: list[str] = []

    def hangs() -> None:
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001 - people write this, and it must not help here
            called.append("swallowed")

    on_close(called.append, "first")
    on_close(hangs)
    assert run(lambda: called.append("close"), seconds=0.6 / closing.USABLE_SHARE) is None
    assert called == ["first", "close"]
    assert "hangs took longer than its share of 0.2 s" in caplog.text, "a third of it"


def test_an_async_one_that_hangs_is_interrupted_too() -> None:
    called: list[str] = []

    async def hangs() -> None:
        await asyncio.sleep(60)

    on_close(called.append, "first")
    on_close(hangs)
    run(seconds=0.6)
    assert called == ["first"]


def test_registering_without_end_is_refused_with_what_to_do() -> None:
    for _ in range(closing.CALLBACKS_MAX):
        on_close(sys.gettrace)
    with pytest.raises(RuntimeError, match=r"once, in open\(\)"):
        on_close(sys.gettrace)


def test_only_functions_can_be_registered() -> None:
    with pytest.raises(TypeError, match="give a function"):
        on_close("not a function")  # type: ignore[type-var]
