"""client.changes() with a real daemon: each change is told once, also across a kill -9."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from musterd import AsyncClient
from support.daemon import Musters

WATCH = """
from pathlib import Path
from musterd import Worker, task

class Watch(Worker):
    @task
    def read(self, ctx, path: str) -> str:
        return Path(path).read_text()
"""
PAGES = ("tea", "salt")


@pytest.fixture
def watch(muster: Musters, short_folder: Path) -> Any:
    """Make a daemon with a schedule for each page; tests run the schedules by hand."""
    schedules = {
        f"schedule__{name}": {
            "task": "watch.read",
            "args": {"path": str(short_folder / name)},
            "cron": "0 0 1 1 *",
            "notify": "task.changed",
        }
        for name in PAGES
    }
    daemon = muster({"watch": {"worker": "watch:Watch", "size": 1}}, start=False, **schedules)
    (daemon.folder / "watch.py").write_text(WATCH)
    return daemon.start()


@pytest.fixture
def turn(watch: Any, short_folder: Path) -> Callable[[str, str], None]:
    """Change the text of a page and wait until its schedule has seen it: turn(page, text)."""

    def write(name: str, text: str) -> None:
        (short_folder / name).write_text(text)
        done = watch.ctl("schedule", "run", name)
        assert done.returncode == 0, done.stderr
        assert watch.client().task(done.stdout.strip()).result(30) == text

    return write


def test_each_change_comes_once_and_what_changed_unheard_comes_later(watch, turn):
    client = watch.client()
    for name in PAGES:
        turn(name, "one")
    turn("tea", "two")  # before any client follows
    every, tea = client.changes(timeout=30), client.changes("tea", timeout=30)
    client.submit("watch.read", {"path": str(watch.config_path)}).result(30)  # now both follow
    for name, text in (("salt", "two"), ("tea", "two"), ("tea", "three")):
        turn(name, text)
    heard = [next(every) for _ in range(2)]
    assert [(each.schedule, each.task.result(30)) for each in heard] == [
        ("salt", "two"),
        ("tea", "three"),
    ]
    assert next(tea).task.id == heard[1].task.id

    watch.kill()
    tea.close()
    watch.start()
    turn("tea", "four")
    after = next(every)
    assert (after.schedule, after.task.result(30)) == ("tea", "four")
    every.close()
    turn("tea", "five")
    with pytest.raises(TimeoutError, match="the next change"):
        next(client.changes(timeout=0.3))


def test_a_loop_reads_changes_beside_its_other_work(watch, turn):
    turn("tea", "one")

    async def main() -> list[str]:
        async with AsyncClient(watch.tasks_socket) as client:
            changes = client.changes(timeout=30)
            page = {"path": str(watch.config_path)}
            await (await client.submit("watch.read", page)).result(30)  # by now both clients follow
            heard = []
            for text in ("two", "three"):
                await asyncio.to_thread(turn, "tea", text)
                change = await anext(changes)
                heard.append(await change.task.result(30))
            return heard

    assert asyncio.run(main()) == ["two", "three"]


MISSED = ("two", "three", "four", "three")


def test_every_change_of_a_disconnect_comes_in_order_and_once(watch, turn):
    client = watch.client()
    turn("tea", "one")
    turn("salt", "one")
    changes = client.changes(timeout=30)
    client.submit("watch.read", {"path": str(watch.config_path)}).result(30)  # now it follows
    turn("salt", "two")
    assert next(changes).schedule == "salt"
    with client._driver.lock:  # its thread does not connect meanwhile
        watch.kill()
        watch.start()
        for text in MISSED[:2]:
            turn("tea", text)
        watch.kill()
        watch.start()
        for text in MISSED[2:]:
            turn("tea", text)
        turn("salt", "three")
    heard = [next(changes) for _ in range(len(MISSED) + 1)]
    tea = [each for each in heard if each.schedule == "tea"]
    assert [each.after for each in tea] == list(MISSED)
    assert [each.before for each in tea] == ["one", *MISSED[:-1]]
    assert [each.task.result(30) for each in tea] == list(MISSED)
    assert [each.after for each in heard if each.schedule == "salt"] == ["three"]
    turn("tea", "five")
    assert next(changes).after == "five"


def test_a_loop_that_was_away_gets_every_change(watch, turn):
    turn("tea", "one")

    async def main() -> list[str]:
        async with AsyncClient(watch.tasks_socket) as client:
            changes = client.changes("tea", timeout=30)
            page = {"path": str(watch.config_path)}
            await (await client.submit("watch.read", page)).result(30)
            # Not in a thread: the loop must not connect meanwhile.
            watch.kill()
            watch.start()
            for text in MISSED:
                turn("tea", text)
            return [(await anext(changes)).after for _ in MISSED]

    assert asyncio.run(main()) == list(MISSED)
