"""Commands in bulk on a real daemon: by site, error, key, schedule and time."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.wire.messages import FAILED, Failure, Outcome, TaskSpec
from musterd.ipc.wire.selection import Selection
from musterd.supervisor.api import rpc
from musterd.supervisor.core.model.actions import FinalRecord, NewRecord, Persist
from musterd.supervisor.store.sqlite import SqliteStore
from support.daemon import Muster, Musters, slowest_turn
from support.terminal import CtlTerminal
from support.waiting import wait_for

WORKER = """
from musterd import Worker, task

class Shop(Worker):
    @task(max_retries=0)
    def order(self, ctx, number: int = 0) -> int:
        if number < 0:
            raise ConnectionError(f"gateway {number} is down")
        return number
"""
TURN_SECONDS_MAX = 0.05  # of processor time
LONG = pytest.mark.long
ARGS = b"\x81\xa6number\x01"
HOUR_NS = 3600 * 10**9

Shop = Callable[..., Muster]


@pytest.fixture
def shop(muster: Musters) -> Shop:
    def make(*, dead: int = 0, durability: str = "full", **pool: Any) -> Muster:
        pools = {"shop": {"worker": "shop:Shop", "size": 1, **pool}}
        every = {"task": "shop.order", "args": {"number": -9}, "cron": "0 0 1 1 *"}
        settings: dict[str, Any] = {"store__durability": durability, "schedule__nightly": every}
        daemon = muster(pools, start=False, **settings)
        (daemon.folder / "shop.py").write_text(WORKER)
        bury(daemon, dead)
        return daemon.start()

    return make


def crowding() -> float:
    """Return how many want each processor: their caches are shared, and cold."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def bury(daemon: Muster, count: int) -> None:
    """Store failed tasks: every third is of b.example and an hour older; 7 errors."""
    daemon.state.mkdir(exist_ok=True)
    now_ns = time.time_ns()
    ages = {"a.example": 0, "b.example": HOUR_NS}
    for site, age_ns in reversed(ages.items()):
        wall_ns = now_ns - age_ns
        store = SqliteStore(daemon.state / "store.db", "normal", wall_ns=lambda at=wall_ns: at)
        seq = store.last_seq()
        of_site = [n for n in range(count) if (n % 3 == 0) == (site == "b.example")]
        for start in range(0, len(of_site), 1000):
            ends = []
            for number in of_site[start : start + 1000]:
                seq += 1
                spec = TaskSpec(f"dead-{number}", "shop.order", ARGS, target=site)
                failure = Failure("error", "ConnectionError", f"gateway {number % 7} is down")
                outcome = Outcome(spec.id, FAILED, b"", failure, 1)
                ends.append(FinalRecord(seq, spec, wall_ns, outcome, 0))
            added = [NewRecord(end.seq, end.spec, wall_ns, "shop") for end in ends]
            store.write(Persist(start + 1, added, [], ends, [], [], [], False, []))
        store.close()


def rows(daemon: Muster, *words: str) -> list[dict[str, Any]]:
    done = daemon.ctl("--json", *words)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["tasks"]
    return found


def count(daemon: Muster, *words: str) -> int:
    return len(rows(daemon, *words, "--limit", "200000"))


def settled(daemon: Muster) -> None:
    def is_over() -> bool:
        states = ("queued", "waiting", "running")
        return not any(daemon.ask(rpc.ListTasks(state=each, limit=1))["tasks"] for each in states)

    wait_for("all tasks have ended", is_over, 60)


@pytest.mark.parametrize("dead", [8_000, pytest.param(50_000, marks=LONG)])
def test_many_dead_tasks_are_found_by_site_and_retried_by_one_command(
    shop: Shop, dead: int
) -> None:
    daemon = shop(dead=dead, queue_size=2 * dead)
    of_site = dead - len(range(0, dead, 3))
    done = daemon.ctl("retry", "--target", "a.example")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{of_site} failed tasks of site a.example: to run them again, add --yes" in done.stderr
    done = daemon.ctl("retry", "--target", "a.example", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{of_site} failed tasks of site a.example queued again\n"
    left = rows(daemon, "dead", "--limit", str(dead))
    assert (len(left), {each["target"] for each in left}) == (dead - of_site, {"b.example"})
    done = daemon.ctl("purge", "--error", "GATEWAY 3", "--yes")
    assert (
        done.stdout
        == f"{len(range(3, dead, 21))} failed tasks with the error 'GATEWAY 3' deleted\n"
    )
    settled(daemon)
    assert count(daemon, "tasks", "--state", "succeeded", "--target", "a.example") == of_site
    assert slowest_turn(daemon.log()) <= TURN_SECONDS_MAX * crowding()


def test_a_command_that_a_kill_interrupted_goes_on_when_it_is_typed_again(shop: Shop) -> None:
    daemon = shop(dead=3000, queue_size=10_000)
    daemon.ask(rpc.Pause(names=["shop"]))
    step = daemon.ask(rpc.RetryTasks(where=Selection(target="a.example")))
    assert (step["done"], bool(step["cursor"])) == (rpc.BULK_MAX, True)
    daemon.kill()
    daemon.start()
    daemon.ask(rpc.Resume(names=["shop"]))
    done = daemon.ctl("retry", "--target", "a.example", "--yes")
    assert done.stdout == f"{2000 - rpc.BULK_MAX} failed tasks of site a.example queued again\n"
    settled(daemon)
    assert count(daemon, "tasks", "--state", "succeeded") == 2000
    assert count(daemon, "dead") == 1000


def test_musterctl_says_how_far_it_came_when_the_daemon_dies(shop: Shop) -> None:
    daemon = shop(dead=300, queue_size=100)
    daemon.ask(rpc.Pause(names=["shop"]))
    with ThreadPoolExecutor(1) as person:
        typed = person.submit(daemon.ctl, "retry", "--all", "--yes")
        wait_for("the queue is full", lambda: sum(daemon.pool("shop").queued.values()) == 75)
        daemon.kill()
        done = typed.result()
    assert done.returncode in (1, 7)
    assert "75 of 300 queued again: type the command again to go on" in done.stderr
    daemon.start()
    daemon.ask(rpc.Resume(names=["shop"]))
    assert daemon.ctl("retry", "--all", "--yes").stdout == "225 failed tasks queued again\n"
    settled(daemon)
    assert count(daemon, "tasks", "--state", "succeeded") == 300


def test_a_full_queue_is_waited_for_and_has_room_for_programs(shop: Shop) -> None:
    daemon = shop(dead=300, queue_size=100)
    daemon.ask(rpc.Pause(names=["shop"]))
    done = daemon.ctl("retry", "--all", "--yes", "--no-block")
    assert (done.returncode, done.stdout) == (1, "75 failed tasks queued again\n")
    assert "queues are full: type the command again later" in done.stderr
    with daemon.client() as client:  # a quarter of the queue is left for programs
        handle = client.submit("shop.order", {"number": 5})
        handle.ack(30)
        daemon.ask(rpc.Resume(names=["shop"]))
        done = daemon.ctl("retry", "--all", "--yes")
        assert (done.returncode, done.stdout) == (0, "225 failed tasks queued again\n")
        assert handle.result(30) == 5
    settled(daemon)
    assert count(daemon, "tasks", "--state", "succeeded") == 301
    assert daemon.pool("shop").submitted == 301
    figures = daemon.ask(rpc.Metrics())["pools"][0]
    assert figures["rejected"] == 0  # nobody's submit was refused


def test_a_person_is_asked_first(shop: Shop, tmp_path: Path) -> None:
    daemon = shop(dead=30)
    words = ("-s", daemon.control_socket, "purge", "--target", "a.example", "--error", "Gateway")
    with closing(CtlTerminal(tmp_path, *words, columns=120)) as terminal:
        asked = "Delete 20 failed tasks of site a.example with the error 'Gateway'? [y/N]"
        terminal.wait("it asks", lambda lines: any(asked in line for line in lines))
        terminal.press("n\n")
        assert terminal.exit_code() == 1
    assert count(daemon, "dead") == 30
    with closing(CtlTerminal(tmp_path, *words, columns=120)) as terminal:
        terminal.wait("it asks", lambda lines: any(asked in line for line in lines))
        terminal.press("y\n")
        terminal.wait("it is done", lambda lines: any("'Gateway' deleted" in x for x in lines))
        assert terminal.exit_code() == 0
    assert count(daemon, "dead") == 10


def test_tasks_that_fail_again_are_retried_once(shop: Shop) -> None:
    daemon = shop()
    with daemon.client() as client:
        for handle in client.submit_many([("shop.order", {"number": -1})] * 1200):
            handle.outcome(60)
    assert daemon.ctl("retry", "--all", "--yes").stdout == "1200 failed tasks queued again\n"
    settled(daemon)
    assert daemon.pool("shop").failed == 2400
    assert count(daemon, "dead") == 1200


@pytest.mark.parametrize(
    ("durability", "thousands"),
    [
        ("full", 12),
        pytest.param("full", 30, marks=LONG),
        ("memory", 3),
        pytest.param("memory", 30, marks=LONG),
    ],
)
def test_queued_tasks_are_cancelled_by_site_in_memory_and_on_disk(
    shop: Shop, durability: str, thousands: int
) -> None:
    daemon = shop(durability=durability, queue_size=200_000)
    daemon.ask(rpc.Pause(names=["shop"]))
    with daemon.client() as client:
        for _ in range(thousands):
            for site in ("a.example", "b.example"):
                client.submit_many([("shop.order", {}, {"target": site})] * 1000)
            client.flush()
        assert daemon.ctl("cancel", "--target", "a.example").returncode == 2
        done = daemon.ctl("cancel", "--target", "a.example", "--yes")
        assert done.stdout == f"{thousands}000 unfinished tasks of site a.example cancelled\n"
        assert {each["target"] for each in rows(daemon, "tasks", "--limit", "60000", "--state",
            "queued")} == {"b.example"}  # fmt: skip
        assert daemon.ctl("--json", "cancel", "--pool", "shop", "--yes").returncode == 0
        wait_for("nothing waits", lambda: sum(daemon.pool("shop").queued.values()) == 0, 60)
        assert daemon.pool("shop").cancelled == 2000 * thousands
    assert slowest_turn(daemon.log()) <= TURN_SECONDS_MAX * crowding()


def test_each_option_finds_its_tasks(shop: Shop) -> None:
    daemon = shop(dead=30)
    daemon.ask(rpc.RunSchedule(name="nightly"))
    with daemon.client() as client:
        client.submit("shop.order", {"number": -2}, key="promo").outcome(30)
        client.submit("shop.order", {"number": 2}, key="promo-2").outcome(30)
        wait_for("the run has failed", lambda: count(daemon, "dead", "--schedule", "nightly") == 1)
    (scheduled,) = rows(daemon, "dead", "--schedule", "nightly")
    assert scheduled["id"].startswith("@nightly.")
    assert count(daemon, "dead") == 32
    assert count(daemon, "dead", "--pool", "shop", "--target", "b.example") == 10
    assert count(daemon, "dead", "--since", "30m") == 22
    assert count(daemon, "dead", "--since", "2020-01-01") == 32
    assert count(daemon, "dead", "--error", "connectionerror: gateway -2") == 1
    assert count(daemon, "dead", "--state", "cancelled") == 0
    (keyed,) = rows(daemon, "tasks", "--key", "promo")
    assert keyed["state"] == "failed"
    assert count(daemon, "tasks", "--state", "succeeded") == 1
    assert count(daemon, "tasks", "--error", "nothing of that kind") == 0
    done = daemon.ctl("purge", "--target", "b.example", "--older-than", "2h", "--yes")
    assert done.stdout.startswith("no tasks: 0 failed tasks of site b.example before ")
    done = daemon.ctl("purge", "--target", "b.example", "--older-than", "30m", "--yes")
    assert done.stdout.startswith("10 failed tasks of site b.example before ")
    done = daemon.ctl("--json", "retry", "--key", "promo", "--yes")
    assert json.loads(done.stdout) == {
        "matched": 1, "done": 1, "full": 0, "refused": [], "cursor": "", "cluster": False
    }  # fmt: skip


def test_cursors_lead_through_lists_of_any_length(shop: Shop) -> None:
    daemon = shop(dead=2500)
    daemon.ask(rpc.Pause(names=["shop"]))
    with daemon.client() as client:
        client.submit_many([("shop.order", {})] * 5)
        client.flush()
    ids: list[str] = []
    cursor, requests = "", 0
    while cursor or not requests:
        page = daemon.ask(rpc.ListTasks(limit=1000, after=cursor))
        ids += [each["id"] for each in page["tasks"]]
        assert page["more"] == bool(page["cursor"])
        cursor, requests = page["cursor"], requests + 1
    assert (len(ids), len(set(ids)), requests) == (2505, 2505, 3)
    assert [each["id"] for each in rows(daemon, "tasks", "--limit", "5000")] == ids
    done = daemon.ctl("dead", "--limit", "2499")
    assert done.stdout.endswith("... and more: see --limit\n")
    assert not daemon.ctl("dead", "--limit", "2500").stdout.endswith("--limit\n")


def test_one_request_looks_behind_a_long_queue(shop: Shop) -> None:
    daemon = shop(dead=1, queue_size=200_000)
    daemon.ask(rpc.Pause(names=["shop"]))
    with daemon.client() as client:
        client.submit("shop.order", {}, target="b.example").ack(30)
        for _ in range(30):
            client.submit_many([("shop.order", {}, {"target": "a.example"})] * 1000)
        client.flush()
    page = daemon.ask(rpc.ListTasks(where=Selection(target="b.example"), limit=10))
    assert [each["state"] for each in page["tasks"]] == ["queued", "failed"]
    assert (page["more"], page["cursor"]) == (False, "")
    assert daemon.ctl("cancel", "--all", "--yes").returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["dead", "--pool", "shpo"], 4, "no such pool: 'shpo': there are shop"),
        (["retry", "--pool", "shpo", "--yes"], 4, "no such pool: 'shpo': there are shop"),
        (["cancel", "--schedule", "x"], 4, "no such schedule: 'x': there are nightly"),
        (["retry"], 2, "give either ID..., or which tasks: --pool"),
        (["retry", "some-id", "--pool", "shop"], 2, "give either ID..., or which tasks"),
        (["purge", "some-id", "--pool", "shop"], 2, "give either ID..., --all or --older-than"),
        (["dead", "--since", "yesterday"], 2, "give how long ago, such as 30m, 2h or 3d"),
        (["dead", "--since", "2999-01-01"], 2, "is not in the past"),
        (["retry", "--state", "queued"], 2, "'queued' is not one of"),
        (["cancel", "--error", "x", "--yes"], 2, "only tasks that have not ended"),
        (["retry", "--target", "c.example"], 0, ""),
    ],
)
def test_bad_words_are_told(one_shop: Muster, words: list[str], code: int, says: str) -> None:
    done = one_shop.ctl(*words)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


@pytest.fixture
def one_shop(shop: Shop) -> Muster:
    return shop()


def test_parameters_that_contradict_each_other_are_refused(one_shop: Muster) -> None:
    for params in (
        rpc.RetryTasks(),
        rpc.RetryTasks(ids=["a"], where=Selection()),
        rpc.PurgeTasks(all=True, where=Selection()),
        rpc.CancelTasks(where=Selection(state="failed")),
        rpc.RetryTasks(where=Selection(state="running")),
        rpc.ListTasks(after="nowhere:1"),
    ):
        with pytest.raises(rpc.RpcError) as caught:
            one_shop.ask(params)
        assert caught.value.code == rpc.INVALID_PARAMS, params
