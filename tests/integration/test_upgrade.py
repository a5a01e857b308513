"""This release reads a store and a configuration that an earlier release wrote.

upgrade/store-3.sql is a dump of the store of a daemon that was killed with -9, of schema version 3.
The tests move its times to today.
"""

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from musterd import TaskFailed
from musterd.supervisor.api import rpc

OLD = Path(__file__).parent / "upgrade"
WRITTEN_NS = 1_794_977_864 * 10**9  # when that daemon was killed
APPLICATION_ID, SCHEMA_VERSION = 1836413812, 3
DONE, DONE_TOGETHER = "1a1ed04988dc53952ed9e0000000", "1a1ed04988dc53952ed9e000000f"
FAILED = "1a1ed0498c8c53952ed9e0000047"
HIGH, LOW, COUNT = (f"1a1ed04a2{rest}" for rest in (
    "308440c7b6760000000", "398440c7b6760000009", "398440c7b6760000066"
))  # fmt: skip


def of_today(dump: str) -> str:
    """Move every time in the dump by the age of the dump: in columns and inside blobs."""
    age_ns = time.time_ns() - WRITTEN_NS
    dump = re.sub(r"\b17\d{17}\b", lambda found: str(int(found[0]) + age_ns), dump)
    return re.sub(r"cf(18e90a\w{10})", lambda found: f"cf{int(found[1], 16) + age_ns:016x}", dump)


@pytest.fixture
def upgraded(muster: Callable[..., Any]) -> Any:
    made = muster({}, start=False)
    made.state.mkdir(mode=0o700)
    store = made.state / "store.db"
    with sqlite3.connect(store) as database:
        database.executescript(of_today((OLD / "store-3.sql").read_text()))
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        database.execute("PRAGMA journal_mode = wal")
    database.close()
    store.chmod(0o600)
    for name in ("musterd.toml", "upgrade_jobs.py"):
        shutil.copy(OLD / name, made.folder)
    made.config_path = made.folder / "musterd.toml"
    made.popen_options = {
        "env": {
            **os.environ,
            "MUSTERD_SUPERVISOR__RUNTIME_DIR": str(made.runtime),
            "MUSTERD_SUPERVISOR__STATE_DIR": str(made.state),
        }
    }
    return made.start()


def test_nothing_of_an_earlier_release_is_lost(upgraded: Any) -> None:
    client = upgraded.client()
    assert client.task(DONE).result(10) == 0
    assert client.task(DONE_TOGETHER).result(10) == 210
    with pytest.raises(TaskFailed, match="as it was told"):
        client.task(FAILED).result(10)
    assert [each["id"] for each in upgraded.ask(rpc.ListDead(limit=10))["tasks"]] == [FAILED]
    assert upgraded.ask(rpc.GetTask(FAILED))["attempts"]

    pool = upgraded.pool("jobs")
    assert sum(pool.queued.values()) == 103, "the pool is still paused, its tasks wait"
    assert "paused" in upgraded.ctl("schedule").stdout
    assert "forced-open" in upgraded.ctl("breaker").stdout

    assert upgraded.ctl("resume", "jobs").returncode == 0
    assert client.task(HIGH).result(30) == 2000
    assert client.task(LOW).result(30) == 2 * 2007
    assert client.task(COUNT).result(30) == 2, "the state of the task counts on"
    assert client.submit("jobs.double", {"n": 5}, key="promo:42", cache=1000).result(30) == 10


def test_the_configuration_of_an_earlier_release_is_good(upgraded: Any) -> None:
    assert upgraded.ask(rpc.Reread())["pools"] == []
