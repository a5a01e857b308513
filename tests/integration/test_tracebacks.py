"""Where an error was raised: in the exception of the client, and in the log."""

import asyncio
import json
import traceback
from pathlib import Path

import pytest

from musterd import AsyncClient, Secret, TaskCancelled, TaskFailed
from support.daemon import Muster, Musters

SHOP = """
import asyncio, time
from musterd import Retry, Worker, task

def price_of(page):
    return int(page["price"])                           # raises

def deep(number):
    return deep(number - 1) if number else price_of({})

class Shop(Worker):
    @task(max_retries=0)
    def check(self, ctx, page: dict) -> int:
        return price_of(page)                           # calls

    @task(max_retries=0)
    async def acheck(self, ctx, page: dict) -> int:
        await asyncio.sleep(0)
        return price_of(page)

    @task(max_retries=0)
    def wrapped(self, ctx) -> int:
        try:
            ctx.lock("", timeout=0).__enter__()
        except Exception as error:
            raise RuntimeError("the shop is odd") from error

    @task(max_retries=0)
    def several(self, ctx) -> None:
        errors = []
        for page in ({}, {"price": "x"}):
            try:
                price_of(page)
            except Exception as error:
                errors.append(error)
        raise ExceptionGroup("pages", errors)

    @task(max_retries=0, timeout=0.2)
    def slow(self, ctx) -> None:
        time.sleep(60)                                  # too long

    @task(max_retries=0)
    def long(self, ctx) -> None:
        raise ValueError("x" * 100_000)

    @task(max_retries=0)
    def login(self, ctx, password: str) -> None:
        raise ValueError(f"{password} is wrong")

    @task(max_retries=0)
    def look_up(self, ctx) -> None:
        ctx.secret("NOT_THERE")                         # asks

    @task(max_retries=1)
    def again(self, ctx) -> None:
        if ctx.attempt == 1:
            raise Retry("not yet", after=0)

    @task
    def nap(self, ctx) -> None:
        ctx.progress(0.5)
        time.sleep(60)
"""


@pytest.fixture
def shop(muster: Musters):
    def make(**settings) -> Muster:
        pool = {"worker": "shop:Shop", "env": {"SHOP_PASSWORD": "hunter2hunter2"}}
        made = muster({"shop": pool}, start=False, **settings)
        Path(made.folder, "shop.py").write_text(SHOP)
        return made.start()

    return make


def shown(error: BaseException) -> str:
    """Return the error as Python prints it to a user."""
    return "".join(traceback.format_exception_only(error))


def check_traceback(error: TaskFailed, folder: Path) -> None:
    text = shown(error)
    assert "KeyError: 'price'" in text.splitlines()[0], "the message comes first"
    assert f'File "{folder}/shop.py"' in text
    assert 'return int(page["price"])' in text
    assert "return price_of(page)" in text
    assert "musterd/workers/runtime" not in text
    assert "musterd/workers/authoring" not in text


@pytest.mark.parametrize("method", ["check", "acheck"])
def test_the_error_of_a_client_shows_where_the_worker_raised(shop, method):
    daemon = shop()
    with daemon.client() as client:
        with pytest.raises(TaskFailed) as caught:
            client.submit(f"shop.{method}", {"page": {}}).result(30)
        check_traceback(caught.value, daemon.folder)
        (handle,) = client.map(f"shop.{method}", [{"page": {}}])
        with pytest.raises(TaskFailed) as caught:
            handle.result()
        check_traceback(caught.value, daemon.folder)
    heard = []
    with daemon.client() as client:
        client.submit(
            f"shop.{method}", {"page": {}}, on_done=lambda done: heard.append(tried(done))
        ).outcome(30)
    check_traceback(heard[0], daemon.folder)


def tried(handle) -> BaseException:
    with pytest.raises(TaskFailed) as caught:
        handle.result()
    return caught.value


def test_the_error_of_an_async_client_shows_it_too(shop):
    daemon = shop()

    async def main() -> list[TaskFailed]:
        errors = []

        async def on_done(handle) -> None:
            try:
                await handle.result()
            except TaskFailed as error:
                errors.append(error)

        async with AsyncClient(daemon.tasks_socket) as client:
            task = await client.submit("shop.check", {"page": {}}, on_done=on_done)
            await on_done(task)
            async for each in client.map("shop.acheck", [{"page": {}}]):
                await on_done(each)
        return errors

    errors = asyncio.run(main())
    assert len(errors) == 3
    for error in errors:
        check_traceback(error, daemon.folder)


def test_frames_of_the_runtime_are_left_out_of_causes_groups_and_timeouts(shop):
    daemon = shop()
    with daemon.client() as client:
        errors = {
            name: shown(tried(done))
            for name in ("wrapped", "several", "slow", "look_up")
            if (done := client.submit(f"shop.{name}")) and done.outcome(30)
        }
    for name, text in errors.items():
        assert "shop.py" in text, name
        assert "/musterd/" not in text, (name, text)
    assert "the direct cause of the following" in errors["wrapped"]
    assert errors["several"].count("# raises") == 2
    assert "time.sleep(60)" in errors["slow"]
    assert "# asks" in errors["look_up"]


def test_the_note_is_bounded_and_has_no_secrets(shop):
    daemon = shop()
    with daemon.client() as client:
        done = client.submit("shop.long")
        done.outcome(30)
        text = shown(tried(done))
        assert "In the worker:" in text
        assert len(text) < 12_000
        done = client.submit("shop.login", {"password": Secret("SHOP_PASSWORD")})
        done.outcome(30)
        text = shown(tried(done))
        assert "In the worker:" in text
        assert "***SHOP_PASSWORD*** is wrong" in text
        assert "hunter2" not in text
        assert "hunter2" not in daemon.log()


def test_other_ends_have_no_note(shop):
    daemon = shop()
    with daemon.client() as client:
        wrong = client.submit("shop.check", {"page": 7})
        wrong.outcome(30)
        assert not hasattr(tried(wrong), "__notes__"), "the handler was not called"
        nap = client.submit("shop.nap")
        assert next(nap.progress(30)).fraction == 0.5
        nap.cancel()
        with pytest.raises(TaskCancelled) as caught:
            nap.result(30)
        assert not hasattr(caught.value, "__notes__")
    log = daemon.log()
    assert "task is cancelled" in log
    assert "Traceback" not in log


def test_the_log_shows_it_with_the_failure(shop, waiting):
    daemon = shop()
    with daemon.client() as client:
        client.submit("shop.check", {"page": {}}).outcome(30)
        client.submit("shop.again").outcome(30)
    waiting("the second task is told", lambda: "name=shop.again" in daemon.log())
    log = daemon.log()
    (line,) = [line for line in log.splitlines() if "task is dead" in line]
    assert " warning task is dead" in line
    below = log.partition(line)[2]
    assert below.startswith("\nTraceback (most recent call last):\n")
    assert 'return int(page["price"])' in below
    assert "/musterd/" not in below
    assert "not yet" in log
    assert "Retry" in log
    assert log.count("Traceback") == 1, "an attempt that is tried again is one line"


def test_at_level_debug_the_log_shows_each_failed_attempt(shop, waiting):
    daemon = shop(supervisor__log_level="debug", supervisor__log_format="json")
    with daemon.client() as client:
        client.submit("shop.again").outcome(30)
    lines = [json.loads(line) for line in daemon.log().splitlines()]
    (retry,) = [each for each in lines if each.get("event") == "task.retry"]
    assert retry["traceback"].startswith("Traceback")
    assert "shop.py" in retry["traceback"]
    events = daemon.ctl("--json", "events").stdout
    assert "task.retry" in events
    assert "Traceback" not in events
