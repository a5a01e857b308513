"""Tasks that submit tasks: a worker's own Client() finds its daemon, and a wait that can never end
is an error within a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from musterd import TaskFailed
from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.tasks.waits import LOOK_NS
from support.daemon import Muster, Musters

NESTED = """
import asyncio, threading, time
from musterd import AsyncClient, Client, Permanent, Worker, WouldDeadlock, task

class Nested(Worker):
    @task
    def child(self, ctx, value: int = 1) -> int:
        return value

    @task(max_retries=0, timeout=60)
    def parent(self, ctx, pool: str, how: str = "result") -> list:
        with Client() as musterd:
            began = time.monotonic()
            try:
                if how == "result":
                    found = [musterd.submit(f"{pool}.child").result()]
                elif how == "map":
                    found = [each.result() for each in musterd.map(f"{pool}.child", [{}, {}])]
                elif how == "completed":
                    handles = [musterd.submit(f"{pool}.child") for _ in range(2)]
                    found = [each.result() for each in musterd.as_completed(handles)]
                elif how == "progress":
                    found = list(musterd.submit(f"{pool}.child").progress())
                elif how == "thread":
                    found = []
                    child = musterd.submit(f"{pool}.child")
                    wait = lambda: found.append(child.result(30))
                    thread = threading.Thread(target=wait)
                    thread.start()
                    thread.join(2)
                    return found  # its own end lets the child run
                return found
            except WouldDeadlock as error:
                return [str(error), error.tasks, time.monotonic() - began]

    @task(max_retries=0)
    def uncaught(self, ctx, pool: str) -> int:
        with Client() as musterd:
            return musterd.submit(f"{pool}.child").result()

    @task(max_retries=0)
    def together(self, ctx, pool: str, depth: int) -> int:
        if not depth:
            return 0
        with Client() as musterd:
            arguments = {"pool": pool, "depth": depth - 1}
            return 1 + musterd.submit(f"{pool}.together", arguments).result()

class Async(Worker):
    @task
    async def child(self, ctx, value: int = 1) -> int:
        return value

    @task(max_retries=0, timeout=60)
    async def parent(self, ctx, pool: str, how: str = "result") -> list:
        async with AsyncClient() as musterd:
            try:
                if how == "map":
                    done = musterd.map(f"{pool}.child", [{}])
                    return [await each.result() async for each in done]
                return [await (await musterd.submit(f"{pool}.child")).result()]
            except WouldDeadlock as error:
                return [str(error), error.tasks]
"""
PATIENCE = 50.0
TIMEOUT_SECONDS = 60  # of `parent`


def test_a_deadlock_is_looked_for_several_times_a_second() -> None:
    """The daemon adds at most two looks, and one that was just over, to the time of the messages.

    A busy machine may need longer for the messages, so the tests below assert no seconds."""
    assert 3 * LOOK_NS < SECOND_NS


@pytest.fixture
def pools(muster: Musters) -> Callable[..., Any]:
    def make(**pools: Any) -> Any:
        made = muster(
            {name: {"worker": "nested:Nested", **more} for name, more in pools.items()},
            start=False,
            supervisor__log_format="json",
        )
        Path(made.folder, "nested.py").write_text(NESTED)
        return made.start()

    return make


def run(daemon: Muster, name: str, **arguments: Any) -> Any:
    with daemon.client() as client:
        return client.submit(name, arguments).result(PATIENCE)


def test_a_client_in_a_worker_finds_its_own_daemon(pools):
    daemon = pools(a={"size": 1}, b={"size": 1})
    assert run(daemon, "a.parent", pool="b") == [1]
    assert run(daemon, "a.parent", pool="b", how="map") == [1, 1]
    assert run(daemon, "a.parent", pool="b", how="completed") == [1, 1]
    assert run(daemon, "a.parent", pool="b", how="progress") == []


@pytest.mark.parametrize("how", ["result", "map", "completed", "progress"])
def test_who_waits_for_its_own_pool_in_vain_gets_an_error_at_once(pools, how):
    daemon = pools(a={"size": 1})
    text, ids, _ = run(daemon, "a.parent", pool="a", how=how)
    assert "which can never run: every worker of a runs a task that waits so" in text
    assert "another pool" in text
    assert ids
    assert all(id_ in text for id_ in ids[:1])
    with daemon.client() as client:  # the inner tasks run afterwards
        assert [client.task(id_).result(PATIENCE) for id_ in ids] == [1] * len(ids)


def test_two_pools_that_wait_for_each_other_are_found(pools, waiting):
    daemon = pools(a={"size": 1}, b={"size": 1})
    with daemon.client() as client:
        first = client.submit("a.together", {"pool": "b", "depth": 0})
        assert first.result(PATIENCE) == 0
        with pytest.raises(TaskFailed, match="WouldDeadlock"):
            client.submit("a.uncaught", {"pool": "a"}).result(PATIENCE)
        with pytest.raises(TaskFailed, match="WouldDeadlock"):
            client.submit("a.together", {"pool": "a", "depth": 1}).result(PATIENCE)
    events = [json.loads(line)["event"] for line in daemon.log().splitlines()]
    assert events.count("task.deadlock") == 2


def test_room_is_no_deadlock(pools):
    daemon = pools(a={"size": 3})
    assert run(daemon, "a.together", pool="a", depth=2) == 2
    assert "task.deadlock" not in daemon.log()


def test_a_thread_that_waits_does_not_speak_for_its_handler(pools):
    daemon = pools(a={"size": 1})
    assert run(daemon, "a.parent", pool="a", how="thread") == []
    assert "task.deadlock" not in daemon.log()


@pytest.mark.parametrize("how", ["result", "map"])
@pytest.mark.parametrize("more", [{"size": 1}, {"size": 1, "concurrency": 2}])
def test_async_handlers_are_told_too(pools, more, how):
    daemon = pools(a={"worker": "nested:Async", **more})
    with daemon.client() as client:
        parent = ("a.parent", {"pool": "a", "how": how}, {})
        parents = client.submit_many([parent] * more.get("concurrency", 1))  # they begin together
        found = [each.result(PATIENCE) for each in parents]
    vain = [each for each in found if each != [1]]
    assert len(vain) == 1
    assert "which can never run" in vain[0][0]
