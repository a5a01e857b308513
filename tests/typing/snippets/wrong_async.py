"""Calls that checkers refuse: in each line that says so, and in no other."""

from shop import Promos, Sales, double, halve

from musterd import AsyncClient, AsyncTaskHandle, call


async def arguments(client: AsyncClient, worker: Promos) -> None:
    await client.submit(Promos.check)  # error
    await client.submit(Promos.check, shop=1)  # error
    await client.submit(Promos.check, shop="aurora", prize=14.9)  # error
    await client.submit(Promos.check, "aurora", shop="aurora")  # error: pyright
    await client.submit(Promos.check, "aurora", 14.9, "more")  # error
    await client.submit(Promos.check, {"shop": "aurora"})  # error
    await client.submit(Promos.order, item=1)  # error
    await client.submit(Promos.order, item="tea", count="1")  # error
    await client.submit(Promos.best, offers=["aurora"])  # error
    await client.submit(Promos.tidy, 1)  # error
    await client.submit(Promos.tidy, shop="aurora")  # error
    await client.submit(Promos.anything, limit="1")  # error
    await client.submit(Promos.named, 1, "k", "p", "n", 2)  # error
    await client.submit(Sales.check, shop="aurora", season=4)  # error
    await client.submit(worker.check, shop=1)  # error
    await client.submit(worker.check)  # error
    await client.submit(double)  # error
    await client.submit(double, number="2")  # error
    await client.submit(double, digit=2)  # error
    await client.submit(halve)  # error
    await client.submit(halve, number="2")  # error


async def options_are_not_arguments(client: AsyncClient) -> None:
    await client.submit(Promos.check, shop="aurora", priority="high")  # error
    await client.submit(double, number=2, timeout=3)  # error
    await client.submit(halve, number=2, wait=True)  # error


async def calls(client: AsyncClient) -> None:
    call(Promos.check, shop=1)  # error
    call(Promos.check, shop="aurora", priority="high")  # error
    call(double)  # error
    call("promos.check", shop="aurora")  # error
    check = call(Promos.check, shop="aurora")
    await client.submit(check, shop="boreal")  # error
    await client.submit(check, prio="high")  # error
    await client.submit(check, priority=["high"])  # error
    await client.submit(check, "high")  # error
    check.options(prio="high")  # error
    check.options(timeout="soon")  # error
    await client.submit_many([call(Promos.check, shop=1)])  # error
    await client.submit_many([Promos.check])  # error
    client.map([call(Promos.check, shop=1)])  # error
    client.map([Promos.check])  # error
    client.map([check], prio="high")  # error
    client.map(Promos.check, [1])  # error


async def by_name(client: AsyncClient) -> None:
    await client.submit("promos.check", shop="aurora")  # error
    await client.submit("promos.check", {"shop": "aurora"}, pool="eu")  # error
    await client.submit("promos.check", {"shop": "aurora"}, "high")  # error
    await client.submit(3)  # error


async def results(client: AsyncClient) -> None:
    text: str = await (await client.submit(Promos.check, shop="aurora")).result()  # error
    number: int = await (await client.submit(halve, number=2)).result()  # error
    task: AsyncTaskHandle[str] = await client.submit(Promos.check, shop="aurora")  # error
    best = await (await client.submit(Promos.best, offers=[])).result()
    print(best.shop)  # error
    print(task.spec)  # error
    print(task.acknowledged)  # error
    print(text, number)
