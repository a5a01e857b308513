"""What is done in threads, and what happens when there is none to be had."""

import select
import threading

import pytest

from musterd.supervisor.system.background_calls import Errands


def settled(errands: Errands) -> None:
    assert select.select([errands], [], [], 30)[0], "nothing came back"
    errands.settle()


def test_an_errand_that_finds_no_thread_is_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    errands = Errands()
    found: list[int] = []
    start = threading.Thread.start

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    errands.run("one", lambda: 1, found.append)
    errands.begin()
    monkeypatch.setattr(threading.Thread, "start", start)
    errands.begin()
    settled(errands)
    errands.run("two", lambda: 2, found.append)
    settled(errands)
    assert found == [1, 2]
    errands.close()
