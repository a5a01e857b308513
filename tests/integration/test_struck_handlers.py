"""A timeout is heard: ordinary handlers do not swallow it, and those that do hear it again."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from worker_standin import Fleet

from musterd.ipc.wire.messages import (
    CANCEL,
    ERROR,
    PERMANENT,
    TIMEOUT,
    CancelLease,
    LoadState,
    StateAnswer,
)

SECOND = 10**9
SHORT = SECOND // 20

STRUCK = '''
    import asyncio, contextlib, os, time
    from musterd import TaskInterrupted, TaskTimeout, Worker, task

    def until(path):
        while not os.path.exists(path): time.sleep(0.005)

    class Struck(Worker):
        @task
        def ordinary(self, ctx):
            while True:
                try: time.sleep(60)
                except Exception: pass
        @task
        def of_a_request(self, ctx):
            while True:
                try: time.sleep(60)
                except TimeoutError: pass
        @task
        def bare(self, ctx, times: int):
            for _ in range(times):
                try: time.sleep(60)
                except: pass
            time.sleep(60)
        @task
        @task
        def wrapped(self, ctx):
            try: time.sleep(60)
            except BaseException as error: raise ValueError("of a library") from error
        @task
        def in_a_generator(self, ctx):
            def pages():
                for _ in range(3):
                    try: time.sleep(60)
                    except BaseException: yield
                while True: yield time.sleep(0.01)
            for _ in pages(): pass
        @task
        def cleans_up(self, ctx, seconds: float, how: str):
            """Takes several times as long as swallowed ones are left alone."""
            @contextlib.contextmanager
            def manager():
                try: yield
                finally:
                    time.sleep(seconds)
                    self.cleaned = True
            self.cleaned = False
            if how == "manager":
                with manager(): time.sleep(60)
            try: time.sleep(60)
            except ZeroDivisionError: pass
            finally:
                try: 1 / 0
                except ZeroDivisionError: time.sleep(seconds)
                self.cleaned = True
        @task
        def was_cleaned(self, ctx): return self.cleaned
        @task
        def saves(self, ctx):
            try: time.sleep(60)
            finally: ctx.state.load()
        @task
        def on_purpose(self, ctx, seconds: float):
            try: time.sleep(60)
            except TaskTimeout as error:
                time.sleep(seconds)
                return "as far as it got"
        @task
        def cancelled(self, ctx, path: str):
            heard = 0
            until(path)
            while heard < 3:
                try: time.sleep(60)
                except: heard += 1
            return heard
        @task(retry_on=(TimeoutError,))
        def named(self, ctx): time.sleep(60)
        @task(retry_on=(Exception,))
        def any_error(self, ctx): time.sleep(60)
        @task(retry_on=(TaskTimeout,))
        def by_name(self, ctx): time.sleep(60)
        @task(retry_on=(KeyError,))
        def another(self, ctx): time.sleep(60)
        @task
        async def a_bare(self, ctx, times: int):
            for _ in range(times):
                try: await asyncio.sleep(60)
                except: pass
            await asyncio.sleep(60)
        @task
        async def a_wrapped(self, ctx):
            try: await asyncio.sleep(60)
            except BaseException as error: raise ValueError("of a library") from error
        @task
        async def a_says_why(self, ctx):
            try: await asyncio.sleep(60)
            except BaseException: raise ValueError("the browser is stuck") from None
        @task
        async def a_cleans_up(self, ctx, seconds: float):
            self.cleaned = False
            try: await asyncio.sleep(60)
            finally:
                await asyncio.sleep(seconds)
                self.cleaned = True
        @task
        async def a_own(self, ctx):
            async with asyncio.timeout(0.01): await asyncio.sleep(60)
        @task
        async def a_cancelled(self, ctx, path: str):
            heard = 0
            while not os.path.exists(path): await asyncio.sleep(0.005)
            while heard < 2:
                try: await asyncio.sleep(60)
                except BaseException: heard += 1
            return heard
'''


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, {"struck": STRUCK})
    fleet.start("struck:Struck")
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("ordinary", {}),
        ("of_a_request", {}),
        ("bare", {"times": 4}),
        ("wrapped", {}),
        ("in_a_generator", {}),
        ("a_bare", {"times": 1}),
        ("a_wrapped", {}),
    ],
)
def test_a_timeout_is_heard_in_the_end(fleet: Fleet, method: str, arguments: dict) -> None:
    failure = fleet.failure(method, arguments, timeout_ns=SHORT)
    assert (failure.kind, failure.type) == (TIMEOUT, "musterd.TaskTimeout")


@pytest.mark.parametrize("how", ["manager", "finally"])
def test_a_handler_that_has_heard_is_left_to_clean_up(fleet: Fleet, how: str) -> None:
    failure = fleet.failure("cleans_up", {"seconds": 0.5, "how": how}, timeout_ns=SHORT)
    assert failure.kind == TIMEOUT
    assert fleet.value("was_cleaned") is True
    failure = fleet.failure("a_cleans_up", {"seconds": 0.5}, timeout_ns=SHORT)
    assert failure.kind == TIMEOUT
    assert fleet.value("was_cleaned") is True


def test_a_handler_may_ask_for_something_while_it_cleans_up(fleet: Fleet) -> None:
    lease = fleet.lease("saves", timeout_ns=SHORT)
    fleet.assign(lease)
    question = fleet.receive()
    assert isinstance(question, LoadState)
    time.sleep(0.3)  # several times the pause after a swallowed timeout
    fleet.send(StateAnswer(question.request))
    failure = fleet.completions(1)[0].failure
    assert failure is not None
    assert failure.kind == TIMEOUT


def test_who_means_to_catch_it_can(fleet: Fleet) -> None:
    value = fleet.value("on_purpose", {"seconds": 0.5}, timeout_ns=SHORT)
    assert value == "as far as it got"


@pytest.mark.parametrize(
    ("method", "kind"),
    [("named", TIMEOUT), ("any_error", TIMEOUT), ("by_name", TIMEOUT), ("another", PERMANENT)],
)
def test_who_retries_on_timeouts_means_this_one_too(fleet: Fleet, method: str, kind: str) -> None:
    failure = fleet.failure(method, timeout_ns=SHORT)
    assert (failure.kind, failure.unwell) == (kind, True)


def test_a_handler_may_say_why_it_took_so_long(fleet: Fleet) -> None:
    failure = fleet.failure("a_says_why", timeout_ns=SHORT)
    assert (failure.kind, failure.type) == (ERROR, "ValueError")


def test_a_timeout_of_the_handlers_own_is_not_the_tasks(fleet: Fleet) -> None:
    failure = fleet.failure("a_own", timeout_ns=60 * SECOND)
    assert (failure.kind, failure.type) == (ERROR, "TimeoutError")


@pytest.mark.parametrize(("method", "heard"), [("cancelled", 3), ("a_cancelled", 2)])
def test_a_cancellation_that_is_swallowed_comes_again(
    fleet: Fleet, tmp_path: Path, method: str, heard: int
) -> None:
    lease = fleet.lease(method, {"path": str(tmp_path / "go")})
    fleet.assign(lease)
    fleet.begun(lease)
    (tmp_path / "go").touch()
    fleet.command(CancelLease(lease.lease))
    completion = fleet.completions(1)[0]
    if completion.failure is None:
        assert msgspec.msgpack.decode(completion.value) == heard
    else:
        assert completion.failure.kind == CANCEL
