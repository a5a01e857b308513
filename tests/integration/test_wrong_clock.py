"""A daemon that starts with a wrong clock forgets nothing until a person confirms the clock.

A test cannot set the clock of a machine, so it shifts the times in the store. For a daemon whose
store is of next year, the clock is a year behind; with a store of last year, a year ahead.
"""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest

from musterd.supervisor.core.model.clock import CLOCK, Anchor
from support.daemon import Muster, Musters
from support.waiting import Waiting

SECONDS = 60
INTERVAL_NS = 2 * 10**9  # between two trims; a minute in production
DAY_NS = 24 * 3600 * 10**9
YEAR_NS = 365 * DAY_NS
SEASON_NS = 90 * DAY_NS  # a store from before 2026 would look like one of an unset clock

KEEPER = """
from musterd import Worker, task

class Keeper(Worker):
    @task
    def save(self, ctx, name: str) -> str:
        ctx.state.save({"name": name}, ttl=2 * 24 * 3600)
        return name

    @task
    def load(self, ctx, name: str) -> object:
        return ctx.state.load()

    @task(max_retries=0)
    def fail(self, ctx) -> None:
        raise ValueError("no")
"""


def shift(daemon: Muster, by_ns: int) -> None:
    """Shift all times in the store of a stopped daemon."""
    with closing(sqlite3.connect(daemon.state / "store.db")) as connection:
        for table in ("finished", "results"):
            connection.execute(f"UPDATE {table} SET finished_at = finished_at + ?", (by_ns,))
        connection.execute("UPDATE live SET submitted_at = submitted_at + ?", (by_ns,))
        connection.execute("UPDATE attempts SET at = at + ?", (by_ns,))
        connection.execute(
            "UPDATE facts SET expires_at = expires_at + ? WHERE expires_at", (by_ns,)
        )
        ((value,),) = connection.execute("SELECT value FROM facts WHERE kind = ?", (CLOCK,))
        anchor = msgspec.msgpack.decode(value, type=Anchor)
        moved = Anchor("another boot", anchor.boot_ns, anchor.wall_ns + by_ns)
        connection.execute(
            "UPDATE facts SET value = ? WHERE kind = ?", (msgspec.msgpack.encode(moved), CLOCK)
        )
        connection.commit()


@pytest.fixture
def keeper(muster: Musters) -> Callable[[], Any]:
    def make() -> Any:
        daemon = muster({"keeper": {"worker": "keeper:Keeper", "size": 1}}, start=False)
        (daemon.folder / "keeper.py").write_text(KEEPER)
        daemon.tune("musterd.supervisor.store.retention", INTERVAL_NS=INTERVAL_NS)
        return daemon.start()

    return make


class History:
    """What a daemon did before its clock went wrong."""

    def __init__(self, daemon: Muster) -> None:
        self.daemon = daemon
        with daemon.client() as client:
            self.saved = client.submit("keeper.save", {"name": "a"}, key="note").id
            assert client.task(self.saved).result(SECONDS) == "a"
            self.dead = client.submit("keeper.fail").id
            with pytest.raises(Exception, match="no"):
                client.task(self.dead).result(SECONDS)
            daemon.ctl("pause", "keeper")
            waits = client.submit("keeper.save", {"name": "b"}, expires=3 * 24 * 3600)
            waits.ack(SECONDS)
            self.waits = waits.id
        assert daemon.stop() == 0

    def known(self) -> dict[str, str]:
        found = {}
        for name in ("saved", "dead", "waits"):
            done = self.daemon.ctl("--json", "task", getattr(self, name))
            found[name] = msgspec.json.decode(done.stdout).get("state", "gone")
        return found


WHOLE = {"saved": "succeeded", "dead": "failed", "waits": "queued"}


@pytest.mark.timeout(300)
def test_a_wrong_clock_deletes_nothing_until_a_person_says_that_it_is_right(
    keeper: Callable[[], Any], waiting: Waiting
) -> None:
    behind, ahead, accepted, right = (History(keeper()) for _ in range(4))
    shift(behind.daemon, YEAR_NS)
    shift(ahead.daemon, -SEASON_NS)
    shift(accepted.daemon, -SEASON_NS)
    shift(right.daemon, -2 * DAY_NS)  # a machine that was off over the weekend
    for history in (behind, ahead, accepted, right):
        history.daemon.start()
    sides = ((behind, 365, "behind"), (ahead, 90, "ahead of"), (accepted, 90, "ahead of"))
    for history, days, side in sides:
        daemon = history.daemon
        waiting("it is told", lambda d=daemon: "musterctl clock accept" in d.status().problem)
        assert f"{days}.0 days {side}" in daemon.status().problem
        done = daemon.ctl("clock")
        assert (done.returncode, side in done.stdout) == (1, True)
    assert right.daemon.status().problem == ""
    assert right.daemon.ctl("clock").returncode == 0
    assert accepted.daemon.ctl("clock", "accept").returncode == 0
    waiting("the problem is over", lambda: accepted.daemon.status().problem == "")
    assert "clock.accepted" in accepted.daemon.log()

    gone = {**WHOLE, "saved": "gone", "dead": "gone"}
    waiting("what is old is forgotten", lambda: right.known() == gone)
    waiting("here too", lambda: accepted.known()["dead"] == "gone")
    time.sleep(2 * INTERVAL_NS / 1e9)  # the others trim within the same seconds
    for history in (behind, ahead):
        assert history.known() == WHOLE
        assert history.daemon.stop() == 0
        history.daemon.start()
        assert history.known() == WHOLE, "a restart ends no doubt"
        waiting("it is told", lambda h=history: h.daemon.ctl("clock").returncode == 1)
