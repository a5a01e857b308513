"""locks: one for each name, never without a timeout, re-entered only where asked for."""

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from musterd.workers.toolkit import LockTimeout, locks

SECONDS = 30.0
MODULE: Any = locks


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Hold the lock `mine` in a thread named `miner` until the event is set."""
    began, end = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.acquire("mine"):
            began.set()
            end.wait(SECONDS)

    thread = threading.Thread(target=hold, name="miner")
    thread.start()
    assert began.wait(SECONDS)
    yield end
    end.set()
    thread.join(SECONDS)


def test_only_one_thread_at_a_time_is_inside() -> None:
    inside = total = 0

    def work() -> None:
        nonlocal inside, total
        for _ in range(50):
            with locks.acquire("counter", SECONDS):
                inside += 1
                assert inside == 1
                before = total
                time.sleep(0)
                total = before + 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert total == 400
    assert MODULE._gates.status() == {}, "locks nobody holds are not kept"


@pytest.mark.parametrize("take", [locks.acquire, locks.acquire_rlock])
@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_lock_that_cannot_be_had_names_its_holder(
    held: threading.Event, take: Any, timeout: float
) -> None:
    with (
        pytest.raises(LockTimeout, match=r"'mine' was not free .* thread miner has it") as told,
        take("mine", timeout),
    ):
        pytest.fail("never inside")
    assert (told.value.name, told.value.holder) == ("mine", "miner")
    assert isinstance(told.value, TimeoutError)


def test_a_lock_is_had_as_soon_as_it_is_given_back(held: threading.Event) -> None:
    threading.Timer(0.01, held.set).start()
    with locks.acquire("mine", SECONDS):
        assert held.is_set()


def test_taking_a_lock_twice_fails_at_once_instead_of_waiting_for_oneself() -> None:
    with (
        locks.acquire("self"),
        pytest.raises(LockTimeout, match="use acquire_rlock"),
        locks.acquire("self", SECONDS),
    ):
        pytest.fail("never inside")


def test_an_rlock_may_be_taken_again_and_is_held_until_the_outermost_ends() -> None:
    def is_free() -> bool:
        free = []

        def ask() -> None:
            try:
                with locks.acquire("again", 0):
                    free.append(True)
            except LockTimeout:
                free.append(False)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(SECONDS)
        return free[0]

    with locks.acquire_rlock("again"):
        with locks.acquire_rlock("again", 0):
            assert not is_free()
        assert not is_free()
    assert is_free()
    with locks.acquire("again"), locks.acquire_rlock("again", 0):
        assert not is_free()
    assert is_free()


def test_run_locked_passes_arguments_result_and_errors() -> None:
    assert locks.run_locked("name", divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        locks.run_locked("name", divmod, 7, 0, timeout=1)
    assert MODULE._gates.status() == {}


def test_an_error_inside_gives_the_lock_back() -> None:
    with pytest.raises(KeyError), locks.acquire("name"):
        raise KeyError
    with locks.acquire("name", 0):
        pass


def test_an_exception_that_strikes_the_waiting_thread_leaves_no_claim(
    held: threading.Event,
) -> None:
    """Raise a task's timeout as the runtime does: in the main thread, from a signal handler."""

    def strike(*_: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, strike)

    def send() -> None:
        end = time.monotonic() + SECONDS
        while MODULE._gates.status()["mine"].waiting == 0 and time.monotonic() < end:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(InterruptedError), locks.acquire("mine", SECONDS):
            pytest.fail("never inside")
    finally:
        sender.join(SECONDS)
        signal.signal(signal.SIGUSR1, before)
    assert MODULE._gates.status()["mine"].waiting == 0


@pytest.mark.parametrize("timeout", [None, -1, float("inf")])
def test_a_lock_needs_a_timeout(timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout"), locks.acquire("x", timeout):
        pytest.fail("never inside")
