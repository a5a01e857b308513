"""Calls in background threads, and what happens when no thread can be had."""

import select
import threading

import pytest

from musterd.supervisor.system.background_calls import CALLS_MAX, BackgroundCalls


def settled(background_calls: BackgroundCalls) -> None:
    assert select.select([background_calls], [], [], 30)[0], "nothing came back"
    background_calls.settle()


def test_a_call_that_finds_no_thread_is_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_more_calls_wait_for_a_thread_than_are_ever_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    background_calls = BackgroundCalls()
    for _ in range(CALLS_MAX):
        background_calls.run("one", lambda: 1, lambda _: None)
    with pytest.raises(AssertionError, match="calls wait for a thread"):
        background_calls.run("one", lambda: 1, lambda _: None)
    background_calls.close()
