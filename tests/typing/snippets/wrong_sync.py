"""Calls that checkers refuse: in each line that says so, and in no other."""

from shop import Promos, Sales, double, halve

from musterd import Client, TaskHandle, call


def arguments(client: Client, worker: Promos) -> None:
    client.submit(Promos.check)  # error
    client.submit(Promos.check, shop=1)  # error
    client.submit(Promos.check, shop="aurora", prize=14.9)  # error
    client.submit(Promos.check, "aurora", shop="aurora")  # error: pyright
    client.submit(Promos.check, "aurora", 14.9, "more")  # error
    client.submit(Promos.check, {"shop": "aurora"})  # error
    client.submit(Promos.order, item=1)  # error
    client.submit(Promos.order, item="tea", count="1")  # error
    client.submit(Promos.best, offers=["aurora"])  # error
    client.submit(Promos.tidy, 1)  # error
    client.submit(Promos.tidy, shop="aurora")  # error
    client.submit(Promos.anything, limit="1")  # error
    client.submit(Promos.named, 1, "k", "p", "n", 2)  # error
    client.submit(Sales.check, shop="aurora", season=4)  # error
    client.submit(worker.check, shop=1)  # error
    client.submit(worker.check)  # error
    client.submit(double)  # error
    client.submit(double, number="2")  # error
    client.submit(double, digit=2)  # error
    client.submit(halve)  # error
    client.submit(halve, number="2")  # error


def options_are_not_arguments(client: Client) -> None:
    client.submit(Promos.check, shop="aurora", priority="high")  # error
    client.submit(double, number=2, timeout=3)  # error
    client.submit(halve, number=2, wait=True)  # error


def calls(client: Client) -> None:
    call(Promos.check, shop=1)  # error
    call(Promos.check, shop="aurora", priority="high")  # error
    call(double)  # error
    call("promos.check", shop="aurora")  # error
    check = call(Promos.check, shop="aurora")
    client.submit(check, shop="boreal")  # error
    client.submit(check, prio="high")  # error
    client.submit(check, priority=["high"])  # error
    client.submit(check, "high")  # error
    check.options(prio="high")  # error
    check.options(timeout="soon")  # error
    client.submit_many([call(Promos.check, shop=1)])  # error
    client.submit_many([Promos.check])  # error
    client.map([call(Promos.check, shop=1)])  # error
    client.map([Promos.check])  # error
    client.map([check], prio="high")  # error
    client.map(Promos.check, [1])  # error


def by_name(client: Client) -> None:
    client.submit("promos.check", shop="aurora")  # error
    client.submit("promos.check", {"shop": "aurora"}, pool="eu")  # error
    client.submit("promos.check", {"shop": "aurora"}, "high")  # error
    client.submit(3)  # error


def results(client: Client) -> None:
    text: str = client.submit(Promos.check, shop="aurora").result()  # error
    number: int = client.submit(halve, number=2).result()  # error
    task: TaskHandle[str] = client.submit(Promos.check, shop="aurora")  # error
    best = client.submit(Promos.best, offers=[]).result()
    print(best.shop)  # error
    print(task.spec)  # error
    print(task.acknowledged)  # error
    print(text, number)
