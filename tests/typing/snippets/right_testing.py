"""Tests of workers that checkers accept, with the types of what they return."""

from typing import Any, assert_type

import shop
from shop import Offer, Promos, Sales, double, halve

from musterd import Client, TaskStatus, Worker, call
from musterd.testing import (
    LocalDaemon,
    LocalTask,
    LocalWorker,
    OpenWorker,
    StartDaemon,
    open_worker,
    start_daemon,
)


def opening(musterd_worker: OpenWorker) -> None:
    assert_type(musterd_worker(Promos), LocalWorker[Promos])
    assert_type(musterd_worker(Promos).instance, Promos)
    assert_type(musterd_worker(shop, concurrency=2), LocalWorker[Worker])
    assert_type(musterd_worker("shop:Promos", patience=0.1), LocalWorker[Worker])
    with open_worker(Sales, config={"retry": {"max_retries": 1}}, secrets={"A": "b"}) as sales:
        assert_type(sales, LocalWorker[Sales])
    with open_worker(shop, config=["a.toml", "b.toml"]) as functions:
        assert_type(functions, LocalWorker[Worker])


def running(promos: LocalWorker[Promos]) -> None:
    assert_type(promos.run(Promos.check, shop="aurora", price=14.9), bool)
    assert_type(promos.run(Promos.check, "aurora"), bool)
    assert_type(promos.run(Promos.order, item="tea"), dict[str, int])
    assert_type(promos.run(Promos.best, offers=[]), Offer | None)
    assert_type(promos.run(halve, number=2), float)
    assert_type(promos.run(double, number=2), int)
    assert_type(promos.run("check", shop="aurora"), Any)


def submitting(promos: LocalWorker[Promos]) -> None:
    check = promos.submit(Promos.check, shop="aurora")
    assert_type(check, LocalTask[bool])
    assert_type(check.result(timeout=3), bool)
    assert_type(check.status(), TaskStatus)
    assert_type(check.pauses, list[float])
    assert_type([each.error for each in check.attempts], list[str])
    assert_type(promos.submit(Promos.order, "tea"), LocalTask[dict[str, int]])
    assert_type(promos.submit(call(Promos.check, shop="aurora"), key="k"), LocalTask[bool])
    assert_type(
        promos.submit(call(Promos.check, shop="aurora"), fallback=None), LocalTask[bool | None]
    )
    assert_type(promos.submit("check", {"shop": "aurora"}, priority="high"), LocalTask[Any])
    promos.after(3, check.cancel)
    with promos.hold_lock("a"):
        promos.advance(3.5)


def daemons(musterd_daemon: StartDaemon) -> None:
    daemon = musterd_daemon("musterd.toml", pools={"promos": {"worker": Promos}}, keep=["http"])
    assert_type(daemon, LocalDaemon)
    assert_type(daemon.client(), Client)
    with start_daemon(pools={"promos": {"worker": "shop:Promos"}}, secrets={"A": "b"}) as other:
        assert_type(other.ctl("status").stdout, str)
