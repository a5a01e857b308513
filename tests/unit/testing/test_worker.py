"""A worker that is opened inside a test."""

import asyncio
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import pytest

from musterd import (
    ConfigurationError,
    Context,
    InvalidTask,
    Secret,
    TaskCancelled,
    TaskFailed,
    TaskTimeout,
    UnknownTask,
    Worker,
    call,
    on_close,
    task,
)
from musterd.ipc.wire.signals import INTERRUPT_SIGNAL
from musterd.testing import LocalWorker, OpenWorker, Stuck, clock, open_worker
from musterd.testing.world import WorkerKilled
from musterd.workers.runtime.handlers import WorkerLoadError
from musterd.workers.toolkit import cached, retry
from musterd.workers.toolkit.breaker import BreakerOpen, breaker

CALLS: list[str] = []  # what the workers of a test have done


@pytest.fixture(autouse=True)
def _calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine that is busy for a moment look as others do."""
    monkeypatch.setattr(clock, "STILL_NS", 60 * 10**9)


class Sleeper(Worker):
    @task(timeout=60, max_retries=2)
    def nap(self, ctx: Context, seconds: float) -> float:
        before = time.monotonic()
        sleep(seconds)  # as it was imported
        return time.monotonic() - before

    @task(timeout=60)
    async def anap(self, ctx: Context, seconds: float) -> float:
        before = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time() - before

    @task
    def fail(self, ctx: Context) -> None:
        raise ConnectionError("no luck")

    @task(timeout=10)
    def ignore(self, ctx: Context) -> str:
        while True:
            try:
                time.sleep(60)
            except TaskTimeout:
                CALLS.append("ignored")

    @task
    def times(self, ctx: Context) -> dict[str, float]:
        return {"deadline": ctx.deadline - monotonic(), "wall": time.time(), "at": monotonic()}


# -- the clock ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("unhurried")
def test_pauses_take_no_time_and_count(musterd_worker: OpenWorker) -> None:
    began = time.perf_counter()
    worker = musterd_worker(Sleeper)
    assert worker.run(Sleeper.nap, seconds=50.0) == pytest.approx(50)
    assert worker.run(Sleeper.anap, seconds=50.0) == pytest.approx(50)
    nap = worker.submit("nap", {"seconds": 3600})
    with pytest.raises(TaskFailed, match="timeout of 60 s"):
        nap.result()
    assert nap.pauses == [1, 2]
    assert [each.seconds for each in nap.attempts] == [60, 60, 60]
    assert worker.elapsed == 50 + 50 + 60 + 1 + 60 + 2 + 60
    assert time.perf_counter() - began < 30, "of the ten minutes that it was by its clock"


def test_pauses_are_those_without_jitter(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(
        Sleeper, config={"retry": {"base": "3s", "factor": 3, "max": "20s", "jitter": 0.5}}
    )
    failing = worker.submit("fail", max_retries=4)
    assert failing.outcome().attempts == 5
    assert failing.pauses == [3, 9, 20, 20]


def test_a_worker_sees_its_own_time_and_the_test_the_real_one(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)
    first = worker.run("times")
    worker.advance(86400)
    second = worker.run("times")
    assert second["at"] - first["at"] == pytest.approx(86400, abs=60)
    assert second["wall"] - first["wall"] == pytest.approx(86400, abs=60)
    assert first["deadline"] == second["deadline"] == pytest.approx(120, abs=1)
    assert monotonic() - first["at"] < 3600
    assert abs(time.time() - first["wall"]) < 3600


@pytest.mark.usefixtures("unhurried")
def test_a_delay_and_a_cached_result_go_by_that_clock(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)
    late = worker.submit("times", delay=3600)
    assert not late.done()
    worker.advance(3599)
    assert late.state == "accepted"
    assert late.status().waits_for == "delay in 1.0 s"
    late.result()
    assert worker.elapsed == 3600
    first, second = (worker.submit("times", cache=60) for _ in range(2))
    assert first.result() == second.result()
    assert second.cached
    worker.advance(61)
    third = worker.submit("times", cache=60)
    assert third.result() != first.result()


@pytest.mark.usefixtures("unhurried")
def test_the_toolkit_goes_by_that_clock(musterd_worker: OpenWorker) -> None:
    class Tools(Worker):
        @task
        def often(self, ctx: Context) -> int:
            return self.try_often()

        @retry(max_retries=3, base=10, factor=1, jitter=0)
        def try_often(self) -> int:
            CALLS.append("tried")
            if len(CALLS) < 4:
                raise OSError("again")
            return len(CALLS)

        @task
        def remember(self, ctx: Context) -> int:
            return self.compute()

        @cached(ttl=60)
        def compute(self) -> int:
            CALLS.append("computed")
            return len(CALLS)

        @task(max_retries=0)
        def guarded(self, ctx: Context) -> None:
            self.guard()

        @breaker("site", failures=1, open=300)
        def guard(self) -> None:
            raise OSError("down")

    worker = musterd_worker(Tools)
    assert worker.run("often") == 4
    assert worker.elapsed == 30
    CALLS.clear()
    assert [worker.run("remember"), worker.run("remember")] == [1, 1]
    worker.advance(61)
    assert worker.run("remember") == 2
    worker.crash()
    assert worker.run("remember") == 3, "a new process has an empty cache"
    types = [worker.submit("guarded").outcome().failure for _ in range(2)]
    assert [each and each.type.rpartition(".")[2] for each in types] == ["OSError", "BreakerOpen"]
    worker.advance(301)
    assert "OSError" in worker.submit("guarded").outcome().error
    worker.crash()
    assert "OSError" in worker.submit("guarded").outcome().error, "nor an open breaker"
    assert BreakerOpen


@pytest.mark.usefixtures("unhurried")
def test_something_happens_in_the_middle_of_a_handler(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)
    for name in ("nap", "anap"):
        nap = worker.submit(name, {"seconds": 30})
        began = worker.elapsed
        worker.after(12.5, nap.cancel)
        with pytest.raises(TaskCancelled):
            nap.result()
        assert worker.elapsed - began == 12.5


@pytest.mark.usefixtures("unhurried")
def test_a_result_that_does_not_come_in_time_is_a_timeout_by_that_clock(
    musterd_worker: OpenWorker,
) -> None:
    worker = musterd_worker(Sleeper)
    late = worker.submit("nap", {"seconds": 1}, delay=100)
    with pytest.raises(TimeoutError, match=r"\(sleeper.nap\) did not come within 5 s"):
        late.result(timeout=5)
    assert worker.elapsed == 5
    assert late.result(timeout=100) == pytest.approx(1)


@pytest.mark.usefixtures("unhurried")
def test_a_handler_that_ignores_its_timeout_is_killed(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)
    ignoring = worker.submit("ignore", max_retries=0)
    with pytest.raises(TaskFailed, match="did not stop at its timeout of 10 s"):
        ignoring.result()
    assert worker.elapsed == 15, "five seconds after its timeout"
    assert CALLS == ["ignored"] * 50, "it hears of it every 100 ms"
    assert worker.run("nap", seconds=1) == pytest.approx(1), "another worker is there"


# -- crashes, life and end ------------------------------------------------------------------------


class Living(Worker):
    well: bool | str | None = True
    fails_to: str = ""

    def open(self) -> None:
        CALLS.append("open")
        self.count = 0
        self.on_close(CALLS.append, "on_close")
        if self.fails_to == "open in time":
            time.sleep(3600)
        if self.fails_to == "open":
            raise ValueError("no browser here")

    def healthy(self) -> Any:
        CALLS.append("healthy")
        if self.well == "hangs":
            time.sleep(3600)
        if self.well == "raises":
            raise OSError("ill")
        return self.well

    def close(self) -> None:
        CALLS.append("close")
        if self.fails_to == "close":
            raise ValueError("cannot close")
        if self.fails_to == "close in time":
            time.sleep(3600)

    @task
    def work(self, ctx: Context) -> int:
        self.count += 1
        return self.count

    @task
    def die(self, ctx: Context) -> str:
        died = ctx.state.load("died", default=0)
        if died:
            return f"died {died} times"
        ctx.state.save(1, "died")
        try:
            self.crash()
        except BaseException:
            with pytest.raises(WorkerKilled):
                ctx.state.save(100, "died")
            ctx.progress(1, "not dead yet")
            raise
        finally:
            CALLS.append("unwound")
        return "alive"

    def crash(self) -> None:
        """Crash; tests put something here."""


def test_open_and_close_are_called_and_what_they_register(musterd_worker: OpenWorker) -> None:
    with open_worker(Living) as worker:
        assert CALLS == ["open"]
        assert worker.run(Living.work) == worker.instance.count == 1
    assert CALLS == ["open", "on_close", "close"]
    with pytest.raises(RuntimeError, match="is closed"):
        worker.run("work")


def test_an_idle_worker_that_crashes_is_opened_again(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Living)
    before = worker.instance
    assert [worker.run("work"), worker.run("work")] == [1, 2]
    worker.crash()
    assert worker.run("work") == 1
    assert worker.instance is not before
    assert CALLS == ["open", "open"], "and nothing was closed"


def test_nothing_is_left_of_a_worker_that_was_killed(musterd_worker: OpenWorker) -> None:
    """What it held open is closed with it, and not at some time with a warning."""
    for kind in (Living, Sleeper):
        worker: LocalWorker[Any] = musterd_worker(kind)
        worker.advance(1)
        killed = weakref.ref(worker.instance)
        worker.crash()
        assert killed() is None


def test_a_worker_that_is_killed_says_nothing_any_more(
    musterd_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = musterd_worker(Living)
    monkeypatch.setattr(Living, "crash", lambda _: worker.crash())
    dying = worker.submit("die")
    assert dying.result() == "died 1 times"
    assert CALLS == ["open", "unwound", "open"]
    assert not list(dying.progress())
    assert [each.failure and each.failure.kind for each in dying.attempts] == ["crash", None]
    assert dying.status().crashes == 1


def test_health_is_looked_at_as_time_passes_and_at_a_word(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Living)
    worker.advance(150)
    assert CALLS.count("healthy") == 2, "once a minute"
    assert worker.check_health()
    for answer in (False, "raises", "hangs"):
        worker.instance.well = answer
        assert not worker.check_health()
        assert worker.run("work") == 1, "another one is there"
    worker.instance.well = False
    worker.advance(61)
    assert worker.instance.well is True
    assert worker.instance.count == 0


def test_what_open_raises_reaches_the_test(
    musterd_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Living, "fails_to", "open")
    with pytest.raises(ValueError, match="no browser here"):
        musterd_worker(Living)
    assert CALLS == ["open", "on_close"]
    monkeypatch.setattr(Living, "fails_to", "open in time")
    with pytest.raises(TimeoutError, match=r"open\(\) took longer than start_timeout, 30 s"):
        musterd_worker(Living)


def test_what_close_raises_reaches_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Living, "fails_to", "close")
    with pytest.raises(ValueError, match="cannot close"), open_worker(Living):
        pass
    monkeypatch.setattr(Living, "fails_to", "close in time")
    with pytest.raises(BaseException, match="took longer than its share"), open_worker(Living):
        pass


def test_a_worker_that_cannot_be_opened_any_more_is_told(
    musterd_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = musterd_worker(Living)
    monkeypatch.setattr(Living, "fails_to", "open")
    worker.crash()
    with pytest.raises(Stuck, match=r"open\(\) has failed 5 times in a row: no browser here"):
        worker.run("work")


def test_clean_ups_are_those_of_each_worker(musterd_worker: OpenWorker) -> None:
    class Other(Worker):
        def open(self) -> None:
            on_close(CALLS.append, "other")

        @task
        def nothing(self, ctx: Context) -> None: ...

    with open_worker(Living), open_worker(Other):
        pass
    assert CALLS == ["open", "other", "on_close", "close"]


# -- several at once ------------------------------------------------------------------------------


class Wide(Worker):
    @task
    async def die(self, ctx: Context) -> int:
        died: int = await ctx.state.aload("died", default=0)
        await ctx.state.asave(died + 1, "died")
        if not died:
            self.crash()
        return died

    def crash(self) -> None:
        """Crash; tests put something here."""

    @task
    async def nap(self, ctx: Context, seconds: float) -> float:
        CALLS.append(f"begins {seconds:g}")
        await asyncio.sleep(seconds)
        CALLS.append(f"ends {seconds:g}")
        return seconds


@pytest.mark.usefixtures("unhurried")
def test_tasks_run_at_once_and_can_be_left_in_the_middle(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Wide, concurrency=2)
    naps = [worker.submit("nap", {"seconds": seconds}) for seconds in (30, 10, 5)]
    worker.advance(12)
    assert CALLS == ["begins 30", "begins 10", "ends 10", "begins 5"]
    naps[0].cancel()
    with pytest.raises(TaskCancelled):
        naps[0].result()
    assert naps[2].result() == 5
    assert worker.elapsed == 15


def test_a_crash_takes_along_what_runs_beside(
    musterd_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = musterd_worker(Wide, concurrency=3)
    monkeypatch.setattr(Wide, "crash", lambda _: worker.crash())
    nap, dying = worker.submit(Wide.nap, seconds=30.0), worker.submit(Wide.die)
    assert (dying.result(), nap.result()) == (1, 30)
    assert CALLS.count("begins 30") == 2
    assert CALLS.count("ends 30") == 1
    for each in (dying, nap):
        assert [run.failure and run.failure.kind for run in each.attempts] == ["crash", None]


def test_a_child_that_a_handler_forks_is_no_worker(musterd_worker: OpenWorker) -> None:
    class Forks(Worker):
        @task
        def fork(self, ctx: Context) -> int:
            child = os.fork()
            if child == 0:
                return 3  # it ends here, and says nothing
            return os.waitpid(child, 0)[1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
        assert musterd_worker(Forks).run(Forks.fork) == 0


def test_two_workers_are_open_side_by_side(musterd_worker: OpenWorker) -> None:
    first, second = musterd_worker(Sleeper), musterd_worker(Sleeper, pool="others")
    first.run("nap", seconds=40)
    second.run("anap", seconds=7)
    assert (first.elapsed, second.elapsed) == (40, 7)
    assert second.submit("nap", {"seconds": 1}).name == "others.nap"


# -- messages -------------------------------------------------------------------------------------


def test_a_failure_shows_the_lines_of_the_handler(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)
    with pytest.raises(TaskFailed) as failed:
        worker.submit("fail", max_retries=0).result()
    cause = failed.value.__cause__
    assert isinstance(cause, ConnectionError)
    assert cause.__traceback__ is not None
    assert cause.__traceback__.tb_frame.f_code.co_name == "fail"
    assert cause.__traceback__.tb_next is None


def test_what_a_worker_does_not_have_is_told(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)
    with pytest.raises(UnknownTask, match="it has: anap, fail"):
        worker.run("sleep")
    with pytest.raises(UnknownTask, match=r"Wide.nap is no task of .*Sleeper, which has anap"):
        worker.run(Wide.nap, seconds=1.0)
    with pytest.raises(InvalidTask, match="must be float, not str"):
        worker.submit(Sleeper.nap, seconds="long")  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match=r"options stand beside a call: submit\(call"):
        worker.submit(Sleeper.nap, seconds=1.0, timeout=3)  # type: ignore[call-arg]
    with pytest.raises(WorkerLoadError, match="has no tasks"):
        musterd_worker(Worker)
    with pytest.raises(WorkerLoadError, match=r"3 is no worker: give a class"):
        musterd_worker(3)  # type: ignore[call-overload]
    with pytest.raises(WorkerLoadError, match=r"write class dict\(Worker\)"):
        musterd_worker(dict)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="by their names"):
        worker.run("nap", 1.0)  # type: ignore[call-overload]
    with pytest.raises(WorkerLoadError, match="has tasks that are not async"):
        musterd_worker(Sleeper, concurrency=2)


def test_typed_tasks_return_what_their_handlers_are_annotated_with(
    musterd_worker: OpenWorker,
) -> None:
    @dataclass
    class Offer:
        name: str
        price: float

    class Offers(Worker):
        @task
        async def best(self, ctx: Context, of: list[Offer]) -> Offer:
            return min(of, key=lambda each: each.price)

    worker = musterd_worker(Offers)
    given = [Offer("tea", 4.0), Offer("mate", 3.0)]
    assert (
        worker.run(Offers.best, given) == worker.submit(Offers.best, of=given).result() == given[1]
    )
    assert worker.submit(call(Offers.best, of=given), priority="high").result() == given[1]
    assert worker.run("best", of=given) == {"name": "mate", "price": 3.0}


def test_what_can_never_happen_is_told(musterd_worker: OpenWorker) -> None:
    for kind in (Sleeper, Living):
        worker = musterd_worker(kind)
        with pytest.raises(Stuck, match=r"nothing more will happen: .*/0 is RUNNING"):
            worker.wait(lambda: False)
        assert not worker.wait(lambda: False, timeout=100)


def test_a_handler_cannot_wait_for_tasks_of_its_worker(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)

    def ask() -> None:
        with pytest.raises(RuntimeError, match="let the test itself wait"):
            worker.run("nap", seconds=1)
        CALLS.append("asked")

    worker.after(5, ask)
    worker.run("nap", seconds=10)
    assert CALLS == ["asked"]


def test_an_async_test_is_told_to_be_a_plain_one(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker(Sleeper)

    async def test() -> None:
        with pytest.raises(RuntimeError, match="write `def test_"):
            worker.run("anap", seconds=1)

    asyncio.run(test())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.fail.Exception("wrong page")])
def test_what_is_meant_for_the_test_is_no_failure_of_the_task(error: BaseException) -> None:
    class Pages(Worker):
        @task
        def fetch(self, ctx: Context) -> None:
            raise error

    with open_worker(Pages) as worker:
        fetch = worker.submit("fetch")
        with pytest.raises(type(error)):
            fetch.result()
        assert not fetch.attempts


# -- secrets, sites, sessions, artefacts -----------------------------------------------------------


class Account(Worker):
    @task(max_retries=0)
    def sign(self, ctx: Context, api_key: str) -> str:
        ctx.log.info("signing with %s", api_key)
        ctx.artefact("page.html", f"signed with {api_key}", always=True)
        raise ConnectionError(f"refused {api_key}")

    @task
    def visits(self, ctx: Context) -> list[str]:
        with ctx.session("shop") as session:
            return [each.value for each in session.cookies]


def log_in(session: Any, user: str) -> None:
    CALLS.append(f"login of {user}")
    session.set_cookie("sid", f"cookie of {user}", "shop.example")


def test_secrets_are_in_no_message_of_the_worker(
    musterd_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "of the machine")
    worker = musterd_worker(Account, secrets={"SHOP_KEY": "k3y-of-the-shop"})
    sign = worker.submit("sign", {"api_key": Secret("SHOP_KEY")})
    with pytest.raises(TaskFailed, match=r"refused \*\*\*SHOP_KEY\*\*\*"):
        sign.result()
    assert any("signing with ***SHOP_KEY***" in line for line in worker.log)
    assert sign.artefacts == {"attempt-1.page.html": b"signed with ***SHOP_KEY***"}
    assert os.environ["SHOP_KEY"] == "of the machine"


def test_sessions_are_made_by_their_login_and_kept(musterd_worker: OpenWorker) -> None:
    config = {"sessions": {"shop": {"login": f"{__name__}:log_in", "args": {"user": "ada"}}}}
    worker = musterd_worker(Account, config=config)
    with pytest.MonkeyPatch.context() as patch:
        import sys

        patch.setitem(sys.modules, __name__, sys.modules.get(__name__, sys))
        patch.setattr(sys.modules[__name__], "log_in", log_in, raising=False)
        visits = [worker.submit("visits", session="shop").result() for _ in range(2)]
        worker.crash()
        visits.append(worker.submit("visits", session="shop").result())
    assert visits == [["cookie of ada"]] * 3
    assert CALLS == ["login of ada"]


# -- the configuration ----------------------------------------------------------------------------


def test_the_section_of_its_pool_holds(musterd_worker: OpenWorker, tmp_path: Any) -> None:
    config = tmp_path / "musterd.toml"
    config.write_text(
        f"""
        [pools.others]
        worker = "elsewhere:Worker"
        [pools.sleepers]
        worker = "{Sleeper.__module__}:Sleeper"
        size = 3
        min = 2
        max = 4
        task_timeout = "7s"
        options = {{colour = "blue", sizes = [1]}}
        [http]
        listen = "127.0.0.1:1"
        [[schedule]]
        name = "often"
        task = "sleepers.fail"
        every = "1s"
        """
    )
    worker = musterd_worker(Sleeper, config=config, options={"sizes": [2]})
    assert worker.settings.pool == "sleepers"
    assert worker.instance.options == {"colour": "blue", "sizes": [2]}
    assert worker.submit("times").result()["deadline"] == pytest.approx(7, abs=1)
    worker.advance(30)
    assert not worker.submit("times").status().failure, "no schedule runs"


def test_a_configuration_that_is_wrong_is_told_with_its_place(
    musterd_worker: OpenWorker, tmp_path: Any
) -> None:
    config = tmp_path / "musterd.toml"
    config.write_text("[retry]\nmax_retrys = 1\n")
    with pytest.raises(ConfigurationError, match=r"musterd.toml: key 'retry.max_retrys'"):
        musterd_worker(Sleeper, config=config)
    with pytest.raises(ConfigurationError, match=r"there is no configuration nothing\.toml"):
        musterd_worker(Sleeper, config="nothing.toml")
    with pytest.raises(ConfigurationError, match="must be plain data"):
        musterd_worker(Sleeper, options={"what": object()})
    twice = {name: {"worker": f"{Sleeper.__module__}:Sleeper"} for name in ("a", "b")}
    with pytest.raises(ConfigurationError, match=r"pools a, b run .*say which one is meant"):
        musterd_worker(Sleeper, config={"pools": twice})
    assert musterd_worker(Sleeper, config={"pools": twice}, pool="b").settings.pool == "b"


# -- what is left of it ---------------------------------------------------------------------------


def test_nothing_of_it_is_left_in_the_process(tmp_path: Any) -> None:
    import logging

    def state() -> list[Any]:
        return [
            time.sleep,
            time.time,
            time.monotonic,
            globals()["sleep"],
            globals()["monotonic"],
            asyncio.new_event_loop,
            ThreadPoolExecutor.submit,
            threading.Thread.start,
            dict(os.environ),
            signal.getsignal(INTERRUPT_SIGNAL),
            signal.getsignal(signal.SIGALRM),
            signal.getitimer(signal.ITIMER_REAL)[1],
            logging.getLogger().level,
            list(logging.getLogger().handlers),
            logging.getLogger("musterd").level,
            sorted(os.listdir("/proc/self/fd")),
            sorted(each.name for each in threading.enumerate() if each.name != "musterd-testing"),
        ]

    with open_worker(Sleeper) as worker:  # what is imported and made once
        worker.run("anap", seconds=1)
    before = state()
    with open_worker(Sleeper) as worker, open_worker(Wide, concurrency=2) as wide:
        worker.run("nap", seconds=1)
        worker.crash()
        worker.run("anap", seconds=1)
        wide.run("nap", seconds=1)
        folders = [worker.folder, wide.folder]
    assert state() == before
    assert not any(each.exists() for each in folders)


def test_a_worker_is_known_by_its_name_too(musterd_worker: OpenWorker) -> None:
    worker = musterd_worker("musterd.workers.parser:ParserWorker")
    assert isinstance(worker, LocalWorker)
    assert worker.settings.pool == "parser_worker"
    with pytest.raises(TaskFailed, match="SiteUnreachable"):
        worker.submit("fetch", {"url": "http://127.0.0.1:1/"}, max_retries=0).result()
