"""Alerts about changes, with a real daemon, a shop and a web hook on loopback, and kills: each
change is told, with its content."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd.supervisor.api import rpc
from support.daemon import Muster, Musters
from support.loopback import Loopback
from support.waiting import wait_for

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLE = README[README.index("# watch.toml\n") :].partition("```")[0]
SHOP = "https://shop.example/kites"
KEEP = "import sys; open('heard.json', 'a').write(sys.stdin.read())"
YEARLY = "0 0 1 1 *"  # tests run schedules by hand


@pytest.fixture
def site() -> Iterator[Loopback]:
    made = Loopback()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def kites(muster: Musters, site: Loopback) -> Callable[..., Muster]:
    """Make a daemon that watches the shop and tells the web hook: kites(**keys of the alert)."""

    def make(schedule: dict[str, Any] | None = None, **alert: Any) -> Muster:
        watched = {
            "task": "parser.extract",
            "args": {"url": site.url, "select": {"price": ".price"}},
            "cron": YEARLY,
            "notify": "task.changed",
            "max_retries": 0,
            **(schedule or {}),
        }
        told = {"on": ["task.changed"], "group": "100ms", "url": site.hook, **alert}
        if "command" in told:
            del told["url"]
        made = muster({"parser": {"size": 1}}, schedule__kites=watched, alerts__me=told)
        wait_for("alerts are sent", lambda: speaks(made))
        return made

    return make


def speaks(muster: Muster) -> dict[str, Any] | None:
    status = muster.ask(rpc.ListAlerts())
    return status["alerts"][0] if status["pid"] else None


def alerts_process(muster: Muster) -> psutil.Process:
    pid = muster.ask(rpc.ListAlerts())["pid"]
    return psutil.Process(pid)


def run(muster: Muster, state: str = "succeeded") -> None:
    done = muster.ctl("schedule", "run", "kites")
    assert done.returncode == 0, done.stderr
    id_ = done.stdout.strip()
    wait_for(f"the run has {state}", lambda: state_of(muster, id_) == state)


def state_of(muster: Muster, id_: str) -> str:
    return str(json.loads(muster.ctl("--json", "task", id_).stdout)["state"])


def test_the_example_tells_each_change(muster: Musters, site: Loopback) -> None:
    daemon = muster({}, start=False)
    daemon.config_path = daemon.folder / "watch.toml"
    assert EXAMPLE.count(SHOP) == 1
    daemon.config_path.write_text(EXAMPLE.replace(SHOP, site.url))
    daemon.popen_options["env"] = {
        **os.environ,
        "TELEGRAM_URL": site.hook,
        "MUSTERD_SUPERVISOR__RUNTIME_DIR": str(daemon.runtime),
        "MUSTERD_SUPERVISOR__STATE_DIR": str(daemon.state),
    }
    site.show("49.00 €")
    daemon.start()
    wait_for("alerts are sent", lambda: speaks(daemon))
    run(daemon)
    site.show("39.00 €")
    run(daemon)
    line = "kites: price 49.00 € → 39.00 €"
    assert line in README
    wait_for("it is told", lambda: site.titles() == [line])
    wait_for("that is noted", lambda: (speaks(daemon) or {}).get("sent") == 1)
    first = alerts_process(daemon)
    first.kill()
    first.wait()
    site.show("45.00 €")
    run(daemon)
    wait_for("the next too", lambda: len(site.heard) == 2)
    assert site.titles()[1] == "kites: price 39.00 € → 45.00 €"
    assert site.heard[1]["type"] == "info"
    [change] = site.heard[1]["musterd"]["changes"]
    assert (change["before"], change["after"]) == ({"price": "39.00 €"}, {"price": "45.00 €"})
    assert change["fields"] == {"price": {"before": "39.00 €", "after": "45.00 €"}}
    assert '+  "price": "45.00 €"' in change["diff"]
    assert not site.heard[1]["musterd"]["again"]


def test_no_change_is_lost_when_everything_is_killed(
    kites: Callable[..., Muster], site: Loopback
) -> None:
    """Both processes die before the alerts process has heard of the change."""
    daemon = kites()
    site.show("1 €")
    run(daemon)
    process = alerts_process(daemon)
    process.suspend()
    site.show("2 €")
    run(daemon)
    wait_for("it is kept", lambda: daemon.ctl("--json", "changes").stdout.count("\n") == 1)
    daemon.kill()
    process.kill()
    daemon.start()
    wait_for("it is told", lambda: site.titles() == ["kites: price 1 € → 2 €"])
    site.show("3 €")
    run(daemon)
    wait_for("the next too", lambda: len(site.heard) == 2)
    assert site.titles()[1] == "kites: price 2 € → 3 €"


def test_all_that_history_keeps_is_told_with_its_content(
    kites: Callable[..., Muster], site: Loopback
) -> None:
    """More changes are missed than the default of `keep`, and this schedule keeps them all."""
    daemon, missed = kites({"keep": 60}), 30
    site.show("0 €")
    run(daemon)
    process = alerts_process(daemon)
    process.suspend()
    with daemon.client() as client:
        for price in range(1, missed + 1):
            site.show(f"{price} €")
            client.schedules.run("kites").result(60)
    daemon.kill()
    process.kill()
    daemon.start()

    def told() -> list[str]:
        return [each["summary"] for sent in site.heard for each in sent["musterd"]["changes"]]

    wait_for("all are told", lambda: len(told()) == missed)
    assert told() == [f"price {price} € → {price + 1} €" for price in range(missed)]


def test_a_message_that_may_come_twice_says_so(
    kites: Callable[..., Muster], site: Loopback
) -> None:
    daemon = kites()
    site.show("1 €")
    run(daemon)
    site.answers.clear()
    site.show("2 €")
    run(daemon)
    wait_for("it is being sent", lambda: site.calls == 1)
    process = alerts_process(daemon)
    process.kill()
    wait_for("it is sent once more", lambda: site.calls == 2)
    site.answers.set()
    wait_for("both are there", lambda: len(site.heard) == 2)
    assert sorted(site.titles()) == [
        "kites: price 1 € → 2 €",
        "kites: price 1 € → 2 € (again)",
    ]


def test_a_long_text_has_a_diff_that_the_event_leaves_out(
    kites: Callable[..., Muster], site: Loopback
) -> None:
    """The command gets all of it; the template has the address of the page."""
    lines = [f"Kite {number} costs {number}.00 €, flies well and is blue" for number in range(200)]
    daemon = kites(
        {"args": {"url": site.url, "select": {"text": "pre"}}},
        command=[sys.executable, "-c", KEEP],
        title="{schedule} at {url}",
    )
    site.page = f"<pre>{chr(10).join(lines)}</pre>"
    run(daemon)
    lines[150] = "Kite 150 is sold out"
    site.page = f"<pre>{chr(10).join(lines)}</pre>"
    run(daemon)
    file = daemon.folder / "heard.json"
    wait_for("it is told", lambda: file.exists() and file.read_text().endswith("\n"))
    told = json.loads(file.read_text())
    assert told["title"] == f"kites at {site.url}"
    assert "+Kite 150 is sold out" in told["body"]
    [change] = told["changes"]
    assert "Kite 150 costs 150.00" in change["before"]["text"]
    assert not change["cut"]


def test_a_site_that_fails_and_recovers_is_told_once_each(
    kites: Callable[..., Muster], site: Loopback
) -> None:
    daemon = kites({"stale": 2}, on=["task.changed", "watch.stale", "watch.recovered"])
    site.show("1 €")
    run(daemon)
    site.show("")
    run(daemon, "failed")
    run(daemon, "failed")
    wait_for("it is told", lambda: site.titles() == ["kites: its runs fail"])
    assert "2 runs in a row failed" in site.heard[0]["message"]
    site.show("1 €")
    run(daemon)
    wait_for("its end is told", lambda: len(site.heard) == 2)
    assert site.titles()[1] == "kites: its runs succeed again"
    site.show("2 €")
    run(daemon)
    wait_for("a change is told", lambda: len(site.heard) == 3)
    assert site.titles()[2] == "kites: price 1 € → 2 €"
