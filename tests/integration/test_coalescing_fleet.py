"""Keys, debounce, cache and fallbacks, with a real daemon."""

import asyncio
from pathlib import Path

import pytest

from musterd import AsyncClient, Client, InvalidTask
from support.daemon import Jobs
from support.waiting import Waiting


def runs(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_tasks_of_one_key_run_once_and_all_get_the_result(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=2)
    told = daemon.folder / "told"
    client = daemon.client()
    args = {"seconds": 0.3, "tell": str(told)}
    first = client.submit("jobs.nap", args, key="nap")
    waiting("it runs", lambda: runs(told))
    others = [daemon.client().submit("jobs.nap", args, key="nap") for _ in range(5)]
    others[0].ack()
    view = others[0].status()
    assert (view.state, view.waits_for) == ("waiting", f"task {first.id}, which has the same key")
    value = first.result(10)
    assert [other.result(10) for other in others] == [value] * 5
    assert not first.cached
    assert all(other.cached for other in others)
    assert len(runs(told)) == 1
    assert others[0].status().state == "succeeded"  # a separate task in the store


def test_a_key_in_use_by_another_kind_of_task_is_an_error(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    client = daemon.client()
    first = client.submit("jobs.nap", {"seconds": 60}, key="k")
    first.ack()
    with pytest.raises(InvalidTask, match="key 'k' is in use by task"):
        client.submit("jobs.echo", {}, key="k").result(10)
    first.cancel()


def test_the_next_in_line_runs_when_the_first_is_cancelled(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=1)
    told = daemon.folder / "told"
    client = daemon.client()
    first = client.submit("jobs.nap", {"seconds": 60, "tell": str(told)}, key="k")
    second = client.submit("jobs.nap", {"seconds": 0, "tell": str(told)}, key="k")
    third = client.submit("jobs.nap", {"seconds": 0, "tell": str(told)}, key="k")
    waiting("it runs", lambda: runs(told))
    client.flush()
    first.cancel()
    assert first.outcome(10).state == "cancelled"
    assert (second.result(10), third.result(10)) == (0, 0)
    assert (second.cached, third.cached) == (False, True)
    assert [line.split()[0] for line in runs(told)] == [first.id, second.id]


def test_joined_tasks_survive_the_death_of_the_daemon(jobs: Jobs, waiting: Waiting) -> None:
    daemon = jobs(size=1)
    told, spared = daemon.folder / "told", daemon.folder / "spared"
    client = daemon.client()
    first = client.submit("jobs.nap", {"seconds": 1, "tell": str(told)}, key="k")
    others = [client.submit("jobs.nap", {"seconds": 1}, key="k") for _ in range(3)]
    client.flush()
    waiting("it runs", lambda: runs(told))
    daemon.kill()
    spared.touch()
    daemon.start()
    assert {handle.result(20) for handle in [first, *others]} == {0}
    assert [other.cached for other in others] == [True] * 3
    assert {line.split()[0] for line in runs(told)} == {first.id}


def test_cache_and_debounce_answer_without_running(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    client = daemon.client()
    stamp = client.submit("jobs.stamp", key="s").result(10)
    cached = client.submit("jobs.stamp", key="s", cache=60)
    assert (cached.result(10), cached.cached) == (stamp, True)
    debounced = client.submit("jobs.stamp", key="s", debounce=60)
    assert (debounced.result(10), debounced.outcome().cached) == (stamp, True)
    assert client.submit("jobs.stamp", key="s").result(10) != stamp
    assert client.submit("jobs.stamp", key="other", cache=60).result(10) != stamp


def test_without_a_key_name_and_arguments_are_the_key(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    client = daemon.client()
    first = client.submit("jobs.echo", {"value": {"a": 1, "b": 2}}, cache=60)
    first.result(10)
    same = client.submit("jobs.echo", {"value": {"b": 2, "a": 1}}, cache=60)
    assert (same.result(10), same.cached) == ({"a": 1, "b": 2}, True)
    other = client.submit("jobs.echo", {"value": {"b": 3}}, cache=60)
    assert (other.result(10), other.cached) == ({"b": 3}, False)


def test_invalidated_results_are_made_anew(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    client = daemon.client()

    def ask(key: str) -> bool:
        handle = client.submit("jobs.stamp", key=key, cache=60)
        handle.result(10)
        return handle.cached

    for key in ("promo:1", "promo:2", "news"):
        assert [ask(key), ask(key)] == [False, True]
    client.invalidate("promo:1")
    assert [ask("promo:1"), ask("promo:2")] == [False, True]
    client.invalidate(prefix="promo:")
    assert [ask("promo:1"), ask("promo:2"), ask("news")] == [False, False, True]
    client.invalidate(prefix="")
    assert not ask("news")
    with Client(daemon.tasks_socket) as short:  # does nothing else
        short.invalidate("news")
    assert not ask("news")
    for wrong in ({}, {"key": "a", "prefix": "b"}):
        with pytest.raises(ValueError, match="give a key, or a prefix"):
            client.invalidate(**wrong)  # type: ignore[arg-type]


def test_the_async_client_does_the_same(jobs: Jobs) -> None:
    daemon = jobs(size=1)

    async def run() -> None:
        async with AsyncClient(daemon.tasks_socket) as client:
            handles = [await client.submit("jobs.stamp", key="s", cache=60) for _ in range(3)]
            stamps = {await handle.result(10) for handle in handles}
            assert len(stamps) == 1
            assert [handle.cached for handle in handles] == [False, True, True]
            await client.invalidate("s")
            again = await client.submit("jobs.stamp", key="s", cache=60)
            assert await again.result(10) not in stamps
            assert (again.cached, again.stale) == (False, False)

    asyncio.run(run())


def test_the_cache_can_be_switched_off(jobs: Jobs) -> None:
    daemon = jobs(size=1, cache__enabled=False)
    client = daemon.client()
    stamp = client.submit("jobs.stamp", key="s").result(10)
    assert client.submit("jobs.stamp", key="s", cache=60, debounce=60).result(10) != stamp


def test_musterctl_submits_with_a_key_and_clears_the_cache(jobs: Jobs) -> None:
    daemon = jobs(size=1)

    def submit(*options: str) -> str:
        done = daemon.ctl("submit", "jobs.stamp", "--wait", *options)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    stamp = submit("--key", "promo:1")
    assert submit("--key", "promo:1", "--cache", "60") == stamp
    assert submit("--key", "promo:1", "--debounce", "60") == stamp
    derived = submit("--cache", "60")
    assert submit("--cache", "60") == derived != stamp
    assert daemon.ctl("cache", "clear", "news*").stdout == "0 forgotten\n"
    assert daemon.ctl("cache", "clear", "promo:*").stdout == "1 forgotten\n"
    assert submit("--key", "promo:1", "--cache", "60") != stamp
    assert submit("--cache", "60") == derived
    assert daemon.ctl("cache", "clear").stdout == "2 forgotten\n"
    assert daemon.ctl("cache", "clear", "promo:1").stdout == "0 forgotten\n"
    assert submit("--cache", "60") != derived


def test_a_last_good_result_survives_a_restart(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    client = daemon.client()
    value = client.submit("jobs.echo", {"value": "good"}, key="k", fallback="default").result(10)
    assert value == "good"
    assert daemon.stop() == 0
    daemon.start()
    # The last good result is kept: clearing it counts 1.
    assert daemon.ctl("cache", "clear", "k").stdout == "1 forgotten\n"
    assert daemon.stop() == 0
    daemon.start()
    assert daemon.ctl("cache", "clear", "k").stdout == "0 forgotten\n"


def test_a_shut_site_is_answered_with_the_last_good_result_or_the_fallback(jobs: Jobs) -> None:
    daemon = jobs(size=1)
    client = daemon.client()
    options = {"target": "site.example", "key": "k"}
    fresh = client.submit("jobs.echo", {"value": "good"}, **options)
    assert (fresh.result(10), fresh.stale) == ("good", False)
    assert daemon.ctl("breaker", "open", "site.example").returncode == 0
    last = client.submit("jobs.echo", {"value": "new"}, on_open="fallback", **options)
    assert (last.result(10), last.stale) == ("good", True)
    default = client.submit("jobs.echo", target="site.example", fallback=["nothing"])
    assert default.result(10) == ["nothing"]
    assert (default.stale, default.fallback) == (False, True)
    assert daemon.ctl("breaker", "close", "site.example").returncode == 0
    again = client.submit("jobs.echo", {"value": "new"}, on_open="fallback", **options)
    assert (again.result(10), again.stale) == ("new", False)
