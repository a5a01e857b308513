"""What is done in threads, and what happens when there is none to be had."""

import select
import threading

import pytest

from musterd.supervisor.system.background_calls import BackgroundCalls


def settled(background_calls: BackgroundCalls) -> None:
    assert select.select([background_calls], [], [], 30)[0], "nothing came back"
    background_calls.settle()


def test_an_errand_that_finds_no_thread_is_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    background_calls = BackgroundCalls()
    found: list[int] = []
    start = threading.Thread.start

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    background_calls.run("one", lambda: 1, found.append)
    background_calls.begin()
    monkeypatch.setattr(threading.Thread, "start", start)
    background_calls.begin()
    settled(background_calls)
    background_calls.run("two", lambda: 2, found.append)
    settled(background_calls)
    assert found == [1, 2]
    background_calls.close()
