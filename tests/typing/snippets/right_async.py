"""Calls of AsyncClient that are right, with the types that they have."""

from collections.abc import AsyncIterator
from typing import Any, assert_type

from shop import Offer, Promos, Sales, double, halve

from musterd import AsyncClient, AsyncTaskHandle, Call, Secret, TaskStatus, call


async def submits(client: AsyncClient, worker: Promos) -> None:
    assert_type(await client.submit(Promos.check, shop="aurora", price=14.9), AsyncTaskHandle[bool])
    assert_type(await client.submit(Promos.check, shop="aurora"), AsyncTaskHandle[bool])
    assert_type(await client.submit(Promos.check, "aurora", 14.9), AsyncTaskHandle[bool])
    assert_type(await client.submit(Promos.check, "aurora", price=14.9), AsyncTaskHandle[bool])
    assert_type(await client.submit(Promos.order, item="tea"), AsyncTaskHandle[dict[str, int]])
    assert_type(
        await client.submit(Promos.best, offers=[Offer("a", 1)]), AsyncTaskHandle[Offer | None]
    )
    assert_type(await client.submit(Promos.tidy), AsyncTaskHandle[None])
    assert_type(await client.submit(Promos.anything, limit=2, more="x"), AsyncTaskHandle[int])
    assert_type(
        await client.submit(Sales.check, shop="aurora", season="autumn"), AsyncTaskHandle[bool]
    )
    assert_type(await client.submit(worker.check, shop="aurora"), AsyncTaskHandle[bool])
    assert_type(await client.submit(double, number=2), AsyncTaskHandle[int])
    assert_type(await client.submit(halve, number=2), AsyncTaskHandle[float])
    assert_type(await (await client.submit(halve, 2)).result(timeout=5), float)


async def names_of_options_are_the_handlers_own(client: AsyncClient) -> None:
    task = await client.submit(Promos.named, timeout=1, key="k", pool="p", name="n", args=2)
    assert_type(task, AsyncTaskHandle[str])
    beside = call(Promos.named, timeout=1, key="k", pool="p", name="n", args=2)
    assert_type(beside, Call[str])
    assert_type(
        await client.submit(beside, timeout=30, key="other", pool="eu"), AsyncTaskHandle[str]
    )


async def a_secret_stands_for_a_text(client: AsyncClient) -> None:
    assert_type(await client.submit(Promos.log_in, "me", Secret("PASSWORD")), AsyncTaskHandle[bool])


async def options(client: AsyncClient) -> None:
    check = call(Promos.check, shop="aurora")
    assert_type(await client.submit(check, priority="high", wait=True), AsyncTaskHandle[bool])
    assert_type(await client.submit(check, fallback=None), AsyncTaskHandle[bool | None])
    assert_type(
        await client.submit(check.options(key="aurora", fallback=0)), AsyncTaskHandle[bool | int]
    )
    assert_type(
        await client.submit(check, on_done=lambda done: print(done.result())), AsyncTaskHandle[bool]
    )


async def several(client: AsyncClient) -> None:
    shops = ["aurora", "boreal"]
    checks = [call(Promos.check, shop=shop) for shop in shops]
    assert_type(await client.submit_many(checks), list[AsyncTaskHandle[bool]])
    urgent = [checks[0], checks[1].options(priority="high", pool="eu")]
    assert_type(await client.submit_many(urgent), list[AsyncTaskHandle[bool]])
    async for done in client.map((call(Promos.order, item=shop) for shop in shops), priority="low"):
        assert_type(done, AsyncTaskHandle[dict[str, int]])
    async for each in client.map(Promos.check, [{"shop": shop} for shop in shops], pool="eu"):
        assert_type(each, AsyncTaskHandle[bool])
    async for half in client.map(halve, [{"number": 2}]):
        assert_type(await half.result(), float)
    assert_type(client.map(checks, fallback=None), AsyncIterator[AsyncTaskHandle[bool | None]])
    async for ended in client.as_completed(await client.submit_many(checks)):
        assert_type(ended, AsyncTaskHandle[bool])


async def by_name(client: AsyncClient) -> None:
    assert_type(
        await client.submit("promos.check", {"shop": "aurora"}, key="a"), AsyncTaskHandle[Any]
    )
    assert_type(await client.submit(name="promos.check", args={"shop": "a"}), AsyncTaskHandle[Any])
    many = [("promos.check", {"shop": "a"}), ("promos.check", None)]
    assert_type(await client.submit_many(many), list[AsyncTaskHandle[Any]])
    several = [("promos.check", {"shop": "a"}, {"priority": "low"})]
    assert_type(await client.submit_many(several), list[AsyncTaskHandle[Any]])
    assert_type(
        client.map("promos.check", [{"shop": "a"}], timeout=5), AsyncIterator[AsyncTaskHandle[Any]]
    )
    plain: AsyncTaskHandle = await client.task("0192f3a1b2c")
    assert_type(await plain.result(), Any)
    assert_type(await plain.status(), TaskStatus)


async def handles_are_covariant(client: AsyncClient) -> None:
    task: AsyncTaskHandle[object] = await client.submit(Promos.check, shop="aurora")
    wider: AsyncTaskHandle[bool | None] = await client.submit(Promos.check, shop="aurora")
    print(task, wider)
