"""Long results of many schedules are listed and told without holding up the supervisor."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from musterd.supervisor.api import rpc
from support.daemon import Muster, Musters, slowest_turn

# Numbers are the worst: each is a line of its JSON.
DRAWS = """
import random
from musterd import Worker, task

class Draws(Worker):
    @task
    def draw(self, ctx) -> list[int]:
        return random.choices(range(100), k=250_000)
"""
SCHEDULES = 7
RUNS = 4  # 1 MiB of each schedule
TURN_SECONDS_MAX = 0.05  # of processor time


@pytest.fixture
def draws(muster: Musters) -> Muster:
    schedules: dict[str, Any] = {
        f"schedule__s{number}": {
            "task": "draws.draw",
            "cron": "0 0 1 1 *",
            "notify": "task.changed",
        }
        for number in range(SCHEDULES)
    }
    daemon = muster({"draws": {"worker": "draws:Draws", "size": 2}}, start=False, **schedules)
    (daemon.folder / "draws.py").write_text(DRAWS)
    return daemon.start()


def test_no_turn_takes_long_for_twenty_changes_of_long_results(draws: Muster) -> None:
    with draws.client() as client:
        for _ in range(RUNS):
            handles = [client.schedules.run(f"s{number}") for number in range(SCHEDULES)]
            for each in handles:
                each.result(60)
    told = SCHEDULES * (RUNS - 1)  # a result is told when it is in history

    def listed(_: int = 0) -> list[dict[str, Any]]:
        changes: list[dict[str, Any]] = draws.ask(rpc.ListChanges(limit=100))["changes"]
        return changes

    assert len(listed()) == told
    with ThreadPoolExecutor(2) as people:
        answers = list(people.map(listed, range(2)))
    for changes in answers:
        assert [each["at"] for each in changes] == sorted(each["at"] for each in changes)
        assert all(" lines" in each["summary"] for each in changes)
    history = draws.ask(rpc.ShowHistory(name="s0", limit=100))["entries"]
    assert [each["number"] for each in history] == [1, 2, 3, 4]
    assert len(history[-1]["value"]) == 250_000
    assert slowest_turn(draws.log()) <= TURN_SECONDS_MAX
