"""Tests of workers that checkers refuse: in each line that says so, and in no other."""

from shop import Promos, double

from musterd import call
from musterd.testing import LocalWorker, OpenWorker, StartDaemon


def opening(musterd_worker: OpenWorker, musterd_daemon: StartDaemon) -> None:
    musterd_worker(Promos, option={"a": 1})  # error
    musterd_worker(Promos, secrets={"A": 1})  # error
    musterd_worker(3)  # error
    musterd_daemon(pool={"promos": {}})  # error


def running(promos: LocalWorker[Promos]) -> None:
    promos.run(Promos.check)  # error
    promos.run(Promos.check, shop=1)  # error
    promos.run(Promos.check, shop="aurora", priority="high")  # error
    promos.run(double, number="2")  # error
    promos.submit(Promos.order, item=1)  # error
    promos.submit(call(Promos.check, shop="aurora"), prio="high")  # error
    promos.submit("check", {"shop": "aurora"}, prio="high")  # error
    text: str = promos.run(Promos.check, shop="aurora")  # error
    promos.instance.anything_else()  # error
    promos.crash("now")  # error
    print(text)
