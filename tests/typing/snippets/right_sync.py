"""Calls of Client that are right, with the types that they have."""

from collections.abc import Iterator
from typing import Any, assert_type

from shop import Offer, Promos, Sales, double, halve

from musterd import Call, Client, Secret, TaskHandle, TaskStatus, call


def submits(client: Client, worker: Promos) -> None:
    assert_type(client.submit(Promos.check, shop="aurora", price=14.9), TaskHandle[bool])
    assert_type(client.submit(Promos.check, shop="aurora"), TaskHandle[bool])
    assert_type(client.submit(Promos.check, "aurora", 14.9), TaskHandle[bool])
    assert_type(client.submit(Promos.check, "aurora", price=14.9), TaskHandle[bool])
    assert_type(client.submit(Promos.order, item="tea"), TaskHandle[dict[str, int]])
    assert_type(client.submit(Promos.best, offers=[Offer("a", 1)]), TaskHandle[Offer | None])
    assert_type(client.submit(Promos.tidy), TaskHandle[None])
    assert_type(client.submit(Promos.anything, limit=2, more="x"), TaskHandle[int])
    assert_type(client.submit(Sales.check, shop="aurora", season="autumn"), TaskHandle[bool])
    assert_type(client.submit(worker.check, shop="aurora"), TaskHandle[bool])
    assert_type(client.submit(double, number=2), TaskHandle[int])
    assert_type(client.submit(halve, number=2), TaskHandle[float])
    assert_type(client.submit(halve, 2).result(timeout=5), float)


def names_of_options_are_the_handlers_own(client: Client) -> None:
    task = client.submit(Promos.named, timeout=1, key="k", pool="p", name="n", args=2)
    assert_type(task, TaskHandle[str])
    beside = call(Promos.named, timeout=1, key="k", pool="p", name="n", args=2)
    assert_type(beside, Call[str])
    assert_type(client.submit(beside, timeout=30, key="other", pool="eu"), TaskHandle[str])


def a_secret_stands_for_a_text(client: Client) -> None:
    assert_type(client.submit(Promos.log_in, "me", Secret("PASSWORD")), TaskHandle[bool])


def options(client: Client) -> None:
    check = call(Promos.check, shop="aurora")
    assert_type(client.submit(check, priority="high", wait=True), TaskHandle[bool])
    assert_type(client.submit(check, fallback=None), TaskHandle[bool | None])
    assert_type(client.submit(check.options(key="aurora", fallback=0)), TaskHandle[bool | int])
    assert_type(client.submit(check, on_done=lambda done: print(done.result())), TaskHandle[bool])


def several(client: Client) -> None:
    shops = ["aurora", "boreal"]
    checks = [call(Promos.check, shop=shop) for shop in shops]
    assert_type(client.submit_many(checks), list[TaskHandle[bool]])
    urgent = [checks[0], checks[1].options(priority="high", pool="eu")]
    assert_type(client.submit_many(urgent), list[TaskHandle[bool]])
    for done in client.map((call(Promos.order, item=shop) for shop in shops), priority="low"):
        assert_type(done, TaskHandle[dict[str, int]])
    for each in client.map(Promos.check, [{"shop": shop} for shop in shops], pool="eu"):
        assert_type(each, TaskHandle[bool])
    for half in client.map(halve, [{"number": 2}]):
        assert_type(half.result(), float)
    assert_type(client.map(checks, fallback=None), Iterator[TaskHandle[bool | None]])
    for ended in client.as_completed(client.submit_many(checks)):
        assert_type(ended, TaskHandle[bool])


def by_name(client: Client) -> None:
    assert_type(client.submit("promos.check", {"shop": "aurora"}, key="a"), TaskHandle[Any])
    assert_type(client.submit(name="promos.check", args={"shop": "a"}), TaskHandle[Any])
    many = [("promos.check", {"shop": "a"}), ("promos.check", None)]
    assert_type(client.submit_many(many), list[TaskHandle[Any]])
    several = [("promos.check", {"shop": "a"}, {"priority": "low"})]
    assert_type(client.submit_many(several), list[TaskHandle[Any]])
    assert_type(client.map("promos.check", [{"shop": "a"}], timeout=5), Iterator[TaskHandle[Any]])
    plain: TaskHandle = client.task("0192f3a1b2c")
    assert_type(plain.result(), Any)
    assert_type(plain.status(), TaskStatus)


def handles_are_covariant(client: Client) -> None:
    task: TaskHandle[object] = client.submit(Promos.check, shop="aurora")
    wider: TaskHandle[bool | None] = client.submit(Promos.check, shop="aurora")
    print(task, wider)
