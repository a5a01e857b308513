"""What is kept of a session when its block ends, in a worker that is opened inside the test."""

import time
from typing import Any

import pytest

from musterd import Context, TaskFailed, Worker, task
from musterd.testing import OpenWorker
from musterd.workers.authoring.session import COOKIES_MAX, ORIGINS_MAX


class Shop(Worker):
    @task(max_retries=0)
    def put(
        self, ctx: Context, cookies: list[dict[str, Any]], storage: dict[str, dict[str, str]]
    ) -> None:
        with ctx.session() as session:
            for each in cookies:
                session.set_cookie(**each)
            session.storage |= storage

    @task(max_retries=0)
    def many(self, ctx: Context, cookies: int, sites: int, chars: int = 1) -> None:
        with ctx.session() as session:
            for number in range(cookies):
                session.set_cookie(f"c{number}", "v", "shop.example")
            for number in range(sites):
                session.storage[f"https://s{number}.example"] = {"token": "x" * chars}

    @task
    def clear(self, ctx: Context) -> None:
        with ctx.session() as session:
            session.clear()

    @task
    def look(self, ctx: Context) -> tuple[list[str], list[str]]:
        with ctx.session() as session:
            return sorted(each.name for each in session.cookies), sorted(session.storage)


def cookie(name: str, domain: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": "v", "domain": domain, **more}


def opened(musterd_worker: OpenWorker, **session: Any) -> Any:
    return musterd_worker(Shop, config={"sessions": {"acme": session}})


def ask(worker: Any, name: str, **args: Any) -> Any:
    return worker.submit(name, args, session="acme").result()


def test_only_what_belongs_to_its_sites_is_kept(musterd_worker: OpenWorker) -> None:
    worker = opened(musterd_worker, sites=["Acme.example", "::1"])
    hosts = ("acme.example", ".acme.example", "www.ACME.example", "evilacme.example", "other")
    storage = ("https://acme.example:8443", "https://www.acme.example", "http://[::1]:80")
    ask(
        worker,
        "put",
        cookies=[cookie(host, host) for host in hosts],
        storage={origin: {"k": "v"} for origin in (*storage, "https://other", "http://[::1")},
    )
    assert ask(worker, "look") == [sorted(hosts[:3]), sorted(storage)]


def test_expired_cookies_and_empty_storage_are_left_out(musterd_worker: OpenWorker) -> None:
    worker = opened(musterd_worker)
    now = time.time()
    dates = {"old": now - 1, "new": now + 3600, "endless": 1e300, "session": 0, "unknown": -1}
    cookies = [cookie(name, "acme.example", expires=at) for name, at in dates.items()]
    ask(worker, "put", cookies=cookies, storage={"https://acme.example": {}})
    assert ask(worker, "look") == [["endless", "new", "session", "unknown"], []]


def test_what_is_cleared_is_gone(musterd_worker: OpenWorker) -> None:
    worker = opened(musterd_worker)
    ask(worker, "many", cookies=2, sites=2)
    assert [len(each) for each in ask(worker, "look")] == [2, 2]
    ask(worker, "clear")
    assert ask(worker, "look") == [[], []]


@pytest.mark.parametrize(
    ("cookies", "sites", "chars", "why"),
    [
        (COOKIES_MAX + 1, 0, 1, "1001 cookies"),
        (0, ORIGINS_MAX + 1, 1, "storage of 101 sites"),
        (0, 2, 600_000, "over the limit of 1047552"),
    ],
)
def test_more_than_a_session_may_have_is_an_error_that_names_the_limit(
    musterd_worker: OpenWorker, cookies: int, sites: int, chars: int, why: str
) -> None:
    worker = opened(musterd_worker)
    with pytest.raises(TaskFailed, match=why) as failed:
        ask(worker, "many", cookies=cookies, sites=sites, chars=chars)
    assert "[sessions.acme] sites = [...]" in str(failed.value)
    assert ask(worker, "look") == [[], []]
    ask(worker, "many", cookies=COOKIES_MAX, sites=ORIGINS_MAX)
    assert [len(each) for each in ask(worker, "look")] == [COOKIES_MAX, ORIGINS_MAX]
