"""Sites that are watched, with a real daemon and a real site: a change has its content, everywhere,
and none is lost over a kill -9."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from musterd import AsyncClient, UnknownSchedule
from support.daemon import Muster, Musters
from support.waiting import wait_for

PAGE = "<html><body><h1>Kites</h1><p class=price>{}</p><p class=time>{}</p></body></html>"
YEARLY = "0 0 1 1 *"  # tests run schedules by hand


class Shop:
    """A shop on loopback whose price changes."""

    def __init__(self) -> None:
        shop = self
        self.page = ""
        self.visits = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shop.visits += 1
                body = shop.page.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/kites"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def show(self, price: str) -> None:
        self.page = PAGE.format(price, self.visits)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    try:
        yield shop
    finally:
        shop.close()


@pytest.fixture
def kites(muster: Musters, shop: Shop) -> Callable[..., Muster]:
    """Make a daemon that watches the shop: kites(**keys of the schedule)."""

    def make(**keys: Any) -> Muster:
        schedule = {
            "task": "parser.extract",
            "args": {"url": shop.url, "select": {"price": ".price"}},
            "cron": YEARLY,
            "notify": "task.changed",
            "max_retries": 0,
            **keys,
        }
        return muster({"parser": {"size": 1}}, schedule__kites=schedule)

    return make


def run(daemon: Muster, state: str = "succeeded") -> str:
    """Run the schedule now; return the id of the run."""
    done = daemon.ctl("schedule", "run", "kites")
    assert done.returncode == 0, done.stderr
    id_ = done.stdout.strip()
    wait_for(f"the run has {state}", lambda: _state(daemon, id_) == state, 60)
    return id_


def _state(daemon: Muster, id_: str) -> str:
    return str(json.loads(daemon.ctl("--json", "task", id_).stdout)["state"])


def told(daemon: Muster, *words: str) -> list[dict[str, Any]]:
    """Return the changes that musterctl shows."""
    done = daemon.ctl("--json", "changes", *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def events(daemon: Muster, kind: str) -> list[dict[str, Any]]:
    lines = daemon.ctl("--json", "events", "--kind", kind).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_a_change_has_its_content_everywhere(kites, shop):
    daemon = kites()
    client = daemon.client()
    shop.show("49.00 €")
    run(daemon)
    changes = client.changes("kites", timeout=60)
    run(daemon)
    assert told(daemon) == []
    assert daemon.ctl("changes").stdout == "no changes yet\n"
    shop.show("39.00 €")
    found = run(daemon)

    change = next(changes)
    assert change.task.id == found
    assert (change.before, change.after) == ({"price": "49.00 €"}, {"price": "39.00 €"})
    assert {name: (each.before, each.after) for name, each in change.fields.items()} == {
        "price": ("49.00 €", "39.00 €")
    }
    assert '+  "price": "39.00 €"' in change.diff
    assert change.summary == "price 49.00 € → 39.00 €"
    assert not change.cut
    assert not change.again

    [event] = wait_for("it is told", lambda: events(daemon, "task.changed"))
    assert event["summary"] == "price 49.00 € → 39.00 €"
    assert (event["before"], event["after"]) == ({"price": "49.00 €"}, {"price": "39.00 €"})
    assert event["changed_at"] == pytest.approx(change.at, abs=0.001)
    [shown] = told(daemon, "kites")
    assert (shown["task"], shown["summary"]) == (found, "price 49.00 € → 39.00 €")
    assert shown["fields"] == {"price": {"before": "49.00 €", "after": "39.00 €"}}
    [line] = daemon.ctl("changes").stdout.splitlines()
    assert line.endswith("  kites  price 49.00 € → 39.00 €")
    assert len(line) <= 80
    assert '    -  "price": "49.00 €"' in daemon.ctl("changes", "--diff").stdout.splitlines()

    kept = client.history("kites")
    assert [(each.value["price"], each.changed) for each in kept] == [
        ("49.00 €", False),
        ("39.00 €", True),
    ]
    assert client.history("kites", 1) == kept[1:]
    lines = daemon.ctl("history", "kites").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2*"]
    listed = json.loads(daemon.ctl("--json", "history", "kites", "-n", "1").stdout)
    assert [each["value"] for each in listed["entries"]] == [{"price": "39.00 €"}]
    with pytest.raises(UnknownSchedule, match="no schedule 'boats'"):
        client.history("boats")
    refused = daemon.ctl("history", "boats")
    assert refused.returncode == 4
    assert "there are kites" in refused.stderr


def test_rules_say_what_counts_and_nothing_found_is_no_change(kites, shop):
    daemon = kites(
        args={"url": shop.url, "select": {"price": ".price", "time": ".time"}},
        watch=["price"],
        below=40,
        stale=2,
    )
    for price in ("1.299,00 €", "41,00 €", "59,90 €"):
        shop.show(price)
        run(daemon)
    assert told(daemon) == []
    shop.page = "<html><body><form>Log in</form></body></html>"
    failed = [run(daemon, "failed") for _ in range(2)]
    assert "NothingFound" in daemon.ctl("task", failed[0]).stdout
    [stale] = wait_for("it is stale", lambda: events(daemon, "watch.stale"))
    assert (stale["schedule"], stale["count"]) == ("kites", 2)
    why = f"kites: its last 2 runs failed: musterctl task {failed[1]}"
    assert why in daemon.ctl("schedule").stdout
    shop.show("sold out")
    assert "NotANumber" in daemon.ctl("task", run(daemon, "failed")).stdout
    shop.show("39,00 €")
    run(daemon)
    [change] = told(daemon)
    assert change["summary"] == "price 1.299,00 € → 39,00 €"
    assert len(wait_for("it is well", lambda: events(daemon, "watch.recovered"))) == 1
    assert [each.value["price"] for each in daemon.client().history("kites")] == [
        "1.299,00 €",
        "41,00 €",
        "59,90 €",
        "39,00 €",
    ]


def test_no_change_is_lost_over_a_kill(kites, shop):
    daemon = kites(keep=5)
    client = daemon.client()
    shop.show("0 €")
    run(daemon)
    changes = client.changes(timeout=60)
    client.submit("parser.extract", {"url": shop.url}).result(60)  # by now the client follows
    heard = []
    for number in range(1, 7):
        shop.show(f"{number} €")
        run(daemon)
        daemon.kill()  # perhaps before it could tell
        daemon.start()
        wait_for("it is on record", lambda number=number: _newest(daemon) == f"{number} €", 60)
        change = next(changes)  # those of earlier lives, told again, are no news to the client
        heard.append((change.before["price"], change.after["price"]))
    assert heard == [(f"{number - 1} €", f"{number} €") for number in range(1, 7)]
    # What was not surely told is kept until it is.
    wait_for("the oldest are dropped", lambda: len(client.history("kites")) == 5)
    assert [each["summary"] for each in told(daemon, "-n", "2")] == [
        "price 4 € → 5 €",
        "price 5 € → 6 €",
    ]


def _newest(daemon: Muster) -> str:
    found = told(daemon, "-n", "1")
    return str(found[0]["after"]["price"]) if found else ""


def test_changes_are_followed_by_loops_and_by_people(kites, shop):
    daemon = kites()
    shop.show("1 €")
    run(daemon)
    shop.show("2 €")
    run(daemon)

    async def main() -> tuple[Any, list[Any]]:
        async with AsyncClient(daemon.tasks_socket) as client:
            changes = client.changes("kites", timeout=60)
            url = {"url": shop.url}
            await (await client.submit("parser.extract", url)).result(60)  # by now it follows
            shop.show("3 €")
            await asyncio.to_thread(run, daemon)
            change = await anext(changes)
            with pytest.raises(UnknownSchedule):
                await client.history("boats")
            with pytest.raises(ValueError, match="from 1 to 1000"):
                await client.history("kites", 0)
            return change, await client.history("kites", 2)

    change, kept = asyncio.run(main())
    assert change.fields["price"].after == "3 €"
    assert [each.value["price"] for each in kept] == ["2 €", "3 €"]
    command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
    with subprocess.Popen([*command, "changes", "-f"], stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        assert shown.stdout.readline().rstrip().endswith("price 1 € → 2 €")
        assert shown.stdout.readline().rstrip().endswith("price 2 € → 3 €")
        shop.show("4 €")
        run(daemon)
        assert shown.stdout.readline().rstrip().endswith("price 3 € → 4 €")
        shown.send_signal(signal.SIGINT)
        assert shown.wait(60) == 0
