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
