"""A slow browser on a busy machine, and a stuck one."""

import asyncio
from typing import Any

import pytest

from musterd.workers.browser import worker
from musterd.workers.browser.worker import in_time


class Slow:
    """A browser whose processes are as busy as the test says: seconds of processor at each look."""

    def __init__(self, *work: float) -> None:
        self._work = list(work)
        self._used = 100.0
        self.looks = 0

    def processor_seconds(self) -> dict[int, float]:
        self.looks += 1
        self._used += self._work.pop(0) if self._work else 0.0
        return {1000: self._used}


def outcome(browser: Any, seconds: float) -> str:
    """Open a page that needs so many seconds, within a tenth of a second."""

    async def story() -> str:
        try:
            async with in_time(browser, 0.1):
                await asyncio.sleep(seconds)
        except TimeoutError:
            return "stuck"
        return "open"

    return asyncio.run(story())


def test_a_browser_in_time_is_not_even_looked_at() -> None:
    browser = Slow()
    assert outcome(browser, 0) == "open"
    assert browser.looks == 0


def test_a_browser_that_does_nothing_is_stuck() -> None:
    browser = Slow()
    assert outcome(browser, 3600) == "stuck"
    assert browser.looks == 2


def test_a_browser_that_works_gets_more_time() -> None:
    browser = Slow(*[1.0] * 1000)
    assert outcome(browser, 0.4) == "open"
    assert browser.looks > 2


def test_a_browser_that_stops_working_is_stuck_then() -> None:
    browser = Slow(1.0, 1.0, 1.0, worker.WORK_SECONDS / 2)
    assert outcome(browser, 3600) == "stuck"
    assert browser.looks == 4


def test_no_browser_works_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BUSY_SECONDS", 0.2)
    assert outcome(Slow(*[1.0] * 1000), 3600) == "stuck"


def test_processes_that_come_and_go_count_for_what_they_did() -> None:
    looks = iter([{1: 5.0, 2: 80.0}, {1: 5.0, 3: 0.2}, {1: 5.0}])

    class Changing:
        processor_seconds = staticmethod(lambda: next(looks))

    assert outcome(Changing(), 3600) == "stuck"
    assert next(looks, None) is None, "the new process has worked, the end of another is no work"
