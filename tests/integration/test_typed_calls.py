"""Typed calls on a real daemon: from both clients, with the pool found out, and refused in time."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import msgspec
import pytest

from musterd import (
    AsyncClient,
    Client,
    InvalidResult,
    InvalidTask,
    NotConnected,
    Secret,
    TaskFailed,
    UnknownTask,
    call,
)
from musterd.ipc.client import sync_submit
from support.daemon import Muster, Musters
from support.waiting import Waiting

SECONDS = 60
SHOP = """
from dataclasses import dataclass

from musterd import Client, Context, Permanent, Worker, task


@dataclass
class Offer:
    shop: str
    price: float


class Promos(Worker):
    @task
    def check(self, ctx, shop: str, price: float = 1.0) -> bool:
        return price < 10

    @task
    async def best(self, ctx, offers: list[Offer]) -> Offer | None:
        return min(offers, key=lambda offer: offer.price, default=None)

    @task
    def named(self, ctx, *, timeout: int, key: str, name: str, args: int, wait: str) -> str:
        return f"{timeout} {key} {name} {args} {wait}"

    @task
    def where(self, ctx) -> str:
        return self.pool

    @task
    def outer(self, ctx) -> str:
        with Client() as musterd:
            return musterd.submit(self.where).result(timeout=30)

    @task
    def lies(self, ctx) -> bool:
        return "yes"

    @task
    def log_in(self, ctx, user: str, password: str) -> int:
        return len(password)


@task
def double(ctx, number: int) -> int:
    return 2 * number


@task
async def halve(ctx: Context, number: int) -> float:
    return number / 2
"""
WAITS = """
import time
from pathlib import Path

while not Path("go").exists():
    time.sleep(0.01)

from {shop} import Promos
"""


class Place:
    """Modules of a daemon, which the tests import as well."""

    def __init__(self, muster: Musters, name: str, pools: dict[str, dict[str, Any]]) -> None:
        self.name = name
        pools = {
            pool: {**section, "worker": section["worker"].format(shop=name)}
            for pool, section in pools.items()
        }
        self.daemon = muster(pools, start=False)
        (self.daemon.folder / f"{name}.py").write_text(SHOP)
        (self.daemon.folder / "waits.py").write_text(WAITS.format(shop=name))

    def shop(self) -> ModuleType:
        return importlib.import_module(self.name)


@pytest.fixture
def place(
    muster: Musters, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Make a daemon with these pools, and import their module: place({...}) -> daemon, module."""
    names: list[str] = []

    def make(pools: dict[str, dict[str, Any]], *, start: bool = True) -> tuple[Muster, Any]:
        name = f"typed_shop_{os.getpid()}_{id(request)}_{len(names)}"
        names.append(name)
        made = Place(muster, name, pools)
        monkeypatch.syspath_prepend(str(made.daemon.folder))
        module = made.shop()
        return made.daemon.start() if start else made.daemon, module

    yield make
    for name in names:
        sys.modules.pop(name, None)


PROMOS = {"promos": {"worker": "{shop}:Promos", "size": 1}, "tools": {"worker": "{shop}"}}


def test_methods_and_functions_are_submitted_with_their_types(place: Any) -> None:
    daemon, shop = place(PROMOS)
    offers = [shop.Offer("a", 2), shop.Offer("b", 1)]
    with daemon.client() as client:
        assert client.submit(shop.Promos.check, shop="aurora", price=14.9).result(SECONDS) is False
        assert client.submit(shop.Promos.check, "aurora").result(SECONDS) is True
        assert client.submit(shop.Promos.best, offers=offers).result(SECONDS) == offers[1]
        assert client.submit(shop.Promos.best, []).result(SECONDS) is None
        assert client.submit(shop.double, number=2).result(SECONDS) == 4
        assert client.submit(shop.halve, 4).result(SECONDS) == 2.0
        said = client.submit(shop.Promos.named, timeout=1, key="k", name="n", args=2, wait="w")
        assert said.result(SECONDS) == "1 k n 2 w"
        handle = client.submit(shop.double, number=2)
        assert handle.name == "tools.double"


def test_options_stand_beside_a_call(place: Any) -> None:
    daemon, shop = place(PROMOS)
    done: list[Any] = []
    ended = threading.Event()

    def note(handle: Any) -> None:
        done.append(handle.result())
        ended.set()

    with daemon.client() as client:
        check = call(shop.Promos.check, shop="aurora", price=3.0)
        handle = client.submit(check, key="aurora", priority="high", wait=True, on_done=note)
        assert handle.result(SECONDS) is True
        assert handle.status(SECONDS).priority == "high"
        assert ended.wait(SECONDS)
        assert done == [True]
        options = check.options(priority="low", on_done=lambda each: done.append(each.id))
        [one, two] = client.submit_many([options, check])
        assert [one.result(SECONDS), two.result(SECONDS)] == [True, True]
        assert (one.status(SECONDS).priority, two.status(SECONDS).priority) == ("low", "normal")
        cached = client.submit(check, cache=60)
        assert cached.result(SECONDS) is True
        by_name = client.submit("promos.check", {"shop": "aurora", "price": 3.0}, cache=60)
        assert by_name.result(SECONDS) is True
        assert by_name.cached


def test_many_calls_are_submitted_and_mapped(place: Any) -> None:
    daemon, shop = place(PROMOS)
    prices = [float(number) for number in range(20)]
    with daemon.client() as client:
        calls = [call(shop.Promos.check, shop="a", price=price) for price in prices]
        handles = client.submit_many(calls)
        assert [handle.result(SECONDS) for handle in handles] == [price < 10 for price in prices]
        mixed = client.submit_many([calls[0], ("tools.double", {"number": 4}), calls[19]])
        assert [handle.result(SECONDS) for handle in mixed] == [True, 8, False]
        doubled = client.map((call(shop.double, number) for number in range(30)), priority="low")
        assert sorted(each.result() for each in doubled) == [2 * number for number in range(30)]
        halved = client.map(shop.halve, ({"number": number} for number in range(4)))
        assert sorted(each.result() for each in halved) == [0.0, 0.5, 1.0, 1.5]
        told: SimpleQueue[Any] = SimpleQueue()
        for each in client.map([calls[0].options(on_done=told.put)]):
            assert told.get(timeout=SECONDS) is each
        ended = client.as_completed(client.submit_many(calls[:3]), timeout=SECONDS)
        assert [each.result() for each in ended] == [True] * 3


def test_the_async_client_does_the_same(place: Any) -> None:
    daemon, shop = place(PROMOS)

    async def work() -> None:
        async with AsyncClient(daemon.tasks_socket) as client:
            check = call(shop.Promos.check, shop="aurora", price=3.0)
            first = await client.submit(shop.Promos.check, shop="aurora", price=14.9)
            assert await first.result(SECONDS) is False
            best = await client.submit(shop.Promos.best, offers=[shop.Offer("b", 1)])
            assert await best.result(SECONDS) == shop.Offer("b", 1.0)
            high = await client.submit(check, priority="high", wait=True)
            status = await high.status(SECONDS)
            assert (status.priority, status.args) == ("high", {"shop": "aurora", "price": 3.0})
            named = await client.submit(name="tools.double", args={"number": 2}, wait=True)
            assert await named.result(SECONDS) == 4
            many = await client.submit_many([check, check.options(key="k")])
            assert [await each.result(SECONDS) for each in many] == [True, True]
            doubled = client.map(call(shop.double, number) for number in range(10))
            assert sorted([await each.result() async for each in doubled]) == [*range(0, 20, 2)]
            halved = client.map(shop.halve, [{"number": 3}])
            assert [await each.result() async for each in halved] == [1.5]
            with pytest.raises(InvalidTask, match="must be str"):
                await client.submit(shop.Promos.check, shop=1)
            with pytest.raises(InvalidResult):
                await (await client.submit(shop.Promos.lies)).result(SECONDS)

    asyncio.run(work())


def test_what_does_not_fit_is_refused_before_anything_is_sent(place: Any) -> None:
    daemon, shop = place(PROMOS)
    check = call(shop.Promos.check, shop="aurora")
    wrong = [
        lambda client: client.submit(shop.Promos.check, shop=1),
        lambda client: client.submit(shop.Promos.check),
        lambda client: client.submit(shop.Promos.check, shop="a", key="k"),
        lambda client: client.submit(check, prio="high"),
        lambda client: client.submit_many([check, (shop.Promos.check, {})]),
        lambda client: client.submit_many([check, check.options(prio="high")]),
        lambda client: next(client.map(shop.Promos.check, [{"shop": 1}])),
        lambda client: next(client.map([shop.Promos.check])),
    ]
    with daemon.client() as client:
        for submit in wrong:
            with pytest.raises(InvalidTask):
                submit(client)
        client.flush(SECONDS)
        assert daemon.pool("promos").submitted == 0
        # By name the worker refuses it, in the same words.
        with pytest.raises(TaskFailed) as caught:
            client.submit("promos.check", {"shop": 1}).result(SECONDS)
        with pytest.raises(InvalidTask) as refused:
            client.submit(shop.Promos.check, shop=1)
    fault = "the arguments do not fit check(shop, price=...): "
    fault += "shop must be str, not int"
    assert fault in str(caught.value)
    assert fault in str(refused.value)


def test_a_result_that_is_not_as_annotated_is_an_error_and_still_there(place: Any) -> None:
    daemon, shop = place(PROMOS)
    with daemon.client() as client:
        task = client.submit(shop.Promos.lies)
        with pytest.raises(InvalidResult, match="the result must be bool, not str"):
            task.result(SECONDS)
        assert task.outcome(SECONDS).result == "yes"
        assert client.submit("promos.lies").result(SECONDS) == "yes"


def test_a_secret_is_given_for_the_text_that_the_worker_gets(place: Any) -> None:
    env = {"env": {"SHOP_PASSWORD": "correct horse"}, "secrets": ["SHOP_*"]}
    daemon, shop = place({"promos": {**PROMOS["promos"], **env}})
    with daemon.client() as client:
        password = Secret("SHOP_PASSWORD")
        task = client.submit(shop.Promos.log_in, user="me", password=password)
        assert task.result(SECONDS) == len("correct horse")
        assert task.status(SECONDS).args == {"user": "me", "password": password}


# -- which pool -----------------------------------------------------------------------------------


TWO = {"eu": {"worker": "{shop}:Promos", "size": 2}, "us": {"worker": "{shop}:Promos", "size": 2}}


def test_a_class_in_two_pools_needs_to_be_told_which(place: Any) -> None:
    daemon, shop = place(TWO)
    with daemon.client() as client:
        with pytest.raises(InvalidTask, match=r"several pools \(eu, us\): say which one, as in "):
            client.submit(shop.Promos.where)
        assert client.submit(call(shop.Promos.where), pool="us").result(SECONDS) == "us"
        where = call(shop.Promos.where)
        calls = [where.options(pool="eu"), where.options(pool="us")]
        assert [each.result(SECONDS) for each in client.submit_many(calls)] == ["eu", "us"]
        assert [each.result() for each in client.map([where] * 2, pool="eu")] == ["eu", "eu"]
        # A handler's own methods are those of its pool.
        assert client.submit(call(shop.Promos.outer), pool="us").result(SECONDS) == "us"
        with pytest.raises(UnknownTask, match="there is no pool 'uk'"):
            client.submit(where, pool="uk").result(SECONDS)


def test_a_function_that_no_pool_runs_is_unknown(place: Any) -> None:
    broken = {"worker": "nowhere:Promos", "size": 1}
    daemon, shop = place({"tools": PROMOS["tools"], "broken": broken}, start=False)
    daemon.start(wait=False)
    with daemon.client(connect_timeout=SECONDS) as client:
        assert client.submit(shop.double, 2).result(SECONDS) == 4
        with pytest.raises(UnknownTask) as caught:
            client.submit(shop.Promos.check, shop="aurora")
    told = str(caught.value)
    assert f"no pool runs {shop.__name__}:Promos.check (pools: tools, broken; broken cannot" in told
    assert f"give one the worker '{shop.__name__}:Promos'" in told


def test_while_pools_load_their_workers_a_call_waits_and_goes_to_the_right_one(
    place: Any, waiting: Waiting
) -> None:
    pools = {"now": PROMOS["promos"], "later": {"worker": "waits:Promos", "size": 1}}
    daemon, shop = place(pools, start=False)
    daemon.start(wait=False)
    with daemon.client(connect_timeout=SECONDS) as client, ThreadPoolExecutor(1) as pool:
        waiting("one pool is there", lambda: daemon.answers() and daemon.pool("now").running == 1)
        submitted = pool.submit(client.submit, shop.Promos.where)
        assert client.submit("now.where").result(SECONDS) == "now"
        assert not submitted.done(), "the other pool may have it, too"
        (daemon.folder / "go").touch()
        with pytest.raises(InvalidTask, match=r"several pools \(later, now\)"):
            submitted.result(SECONDS)


def test_a_pool_that_never_loads_is_waited_for_as_long_as_a_daemon(
    place: Any, waiting: Waiting
) -> None:
    pools = {"now": PROMOS["promos"], "later": {"worker": "waits:Promos", "size": 1}}
    daemon, shop = place(pools, start=False)
    daemon.start(wait=False)
    with daemon.client(connect_timeout=SECONDS) as client:
        client.submit("now.where").result(SECONDS)
    with daemon.client(connect_timeout=0.2) as client:
        client.submit("now.where").result(SECONDS)  # it is connected
        assert client.submit(shop.Promos.where).result(SECONDS) == "now"
        with pytest.raises(UnknownTask, match="later has not loaded its worker yet"):
            client.submit(shop.double, 2)
    (daemon.folder / "go").touch()


def test_a_pool_of_another_name_is_found_after_a_reload(place: Any) -> None:
    daemon, shop = place(PROMOS)
    config = msgspec.json.decode(daemon.config_path.read_bytes())
    with daemon.client() as client:
        assert client.submit(shop.Promos.where).result(SECONDS) == "promos"
        config["pools"]["renamed"] = config["pools"].pop("promos")
        daemon.config_path.write_bytes(msgspec.json.encode(config))
        assert daemon.ctl("reload").returncode == 0
        with pytest.raises(UnknownTask):
            client.submit(shop.Promos.where).result(SECONDS)
        assert client.submit(shop.Promos.where).result(SECONDS) == "renamed"


def test_after_a_restart_pools_are_asked_for_again(place: Any) -> None:
    daemon, shop = place(PROMOS)
    config = msgspec.json.decode(daemon.config_path.read_bytes())
    with daemon.client(connect_timeout=SECONDS) as client:
        assert client.submit(shop.Promos.where).result(SECONDS) == "promos"
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.kill()
        config["pools"]["renamed"] = config["pools"].pop("promos")
        daemon.config_path.write_bytes(msgspec.json.encode(config))
        daemon.start()
        assert client.submit("renamed.where").result(SECONDS) == "renamed"  # it has come back
        assert client.submit(shop.Promos.where).result(SECONDS) == "renamed"


def test_a_known_pool_is_submitted_to_while_the_daemon_is_away(place: Any) -> None:
    daemon, shop = place(PROMOS)
    with daemon.client() as client:
        assert client.submit(shop.Promos.where).result(SECONDS) == "promos"
        daemon.kill()
        task = client.submit(shop.Promos.where)
        assert task.name == "promos.where"
        daemon.start()
        assert task.result(SECONDS) == "promos"


def test_without_a_daemon_a_call_needs_its_pool(place: Any, tmp_path: Path) -> None:
    _, shop = place(PROMOS, start=False)
    client = Client(tmp_path / "tasks.sock", connect_timeout=0.05)
    with pytest.raises(NotConnected):
        client.submit(shop.Promos.where)
    handle = client.submit(call(shop.Promos.where), pool="promos")
    assert (handle.name, handle.state) == ("promos.where", "sending")
    with pytest.raises(NotConnected):
        client.close()


def test_a_daemon_that_does_not_answer_is_said(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, shop = place(PROMOS)
    with daemon.client(connect_timeout=0.2) as client:
        client.submit("tools.double", {"number": 1}).result(SECONDS)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(NotConnected, match="is not known: the daemon did not answer"):
                client.submit(shop.Promos.where)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        monkeypatch.setattr(sync_submit, "LOADING_SECONDS", 0.01)
        assert client.submit(call(shop.Promos.where), pool="promos").result(SECONDS) == "promos"


MAIN = """

if __name__ == "__main__":
    with Client() as musterd:
        print(musterd.submit(Promos.check, shop="aurora").result(timeout=30))
        print(musterd.submit(double, number=2).result(timeout=30))
"""


@pytest.mark.parametrize("how", [["{name}.py"], ["-m", "{name}"]])
def test_handlers_may_stand_in_the_program_that_submits_them(place: Any, how: list[str]) -> None:
    daemon, shop = place(PROMOS)
    with (daemon.folder / f"{shop.__name__}.py").open("a") as file:
        file.write(MAIN)
    done = subprocess.run(
        [sys.executable, *(word.format(name=shop.__name__) for word in how)],
        cwd=daemon.folder,
        env={**os.environ, "MUSTERD_TASKS": daemon.tasks_socket},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout == "True\n4\n", done.stderr
