"""`attach = "screenshot"`: the alert about a change has a picture of the page, also after kills."""

import base64
import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.artefacts import PNG_END, entries
from musterd.supervisor.api import rpc
from musterd.workers.browser import find_executable
from support.daemon import Muster
from support.loopback import Loopback
from support.waiting import wait_for

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

YEARLY = "0 0 1 1 *"  # tests run schedules by hand
VIEWPORT = (640, 480)
SHADES = 10  # more than an empty page has: the edges of letters are smooth
RUN_SECONDS = 90.0  # a page on a very busy machine


@pytest.fixture
def site() -> Iterator[Loopback]:
    made = Loopback()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def kites(muster: Any, unprivileged: Any, site: Loopback) -> Callable[..., Muster]:
    """Make a daemon that watches the shop in a browser and tells the web hook: kites(backend)."""

    def make(backend: str, **more: Any) -> Muster:
        width, height = VIEWPORT
        options = {"backend": backend, "viewport": {"width": width, "height": height}}
        watched = {
            "task": "browser.extract",
            "args": {"url": site.url, "select": {"price": ".price"}},
            "cron": YEARLY,
            "notify": "task.changed",
            "attach": "screenshot",
            **more,
        }
        worker = "musterd.workers.browser:BrowserWorker"
        made: Muster = muster(
            {"browser": {"worker": worker, "size": 1, "options": options}},
            as_user=unprivileged.uid if os.geteuid() == 0 else None,
            schedule__kites=watched,
            sessions__acme={},
            alerts__me={"on": ["task.changed"], "group": "100ms", "url": site.hook},
        )
        wait_for("alerts are sent", lambda: made.ask(rpc.ListAlerts())["pid"])
        return made

    return make


def run(daemon: Muster, site: Loopback, price: str) -> None:
    """Let the schedule see this price."""
    site.show(price)
    done = daemon.ctl("schedule", "run", "kites")
    assert done.returncode == 0, done.stderr
    id_ = done.stdout.strip()

    def state() -> str:
        return str(json.loads(daemon.ctl("--json", "task", id_).stdout)["state"])

    wait_for("the run has succeeded", lambda: state() == "succeeded", RUN_SECONDS)


def kept(daemon: Muster) -> list[Path]:
    return [Path(each.path) for each in entries(str(daemon.state / "artefacts"))]


def pictures(message: dict[str, Any]) -> list[tuple[str, bytes]]:
    found = message.get("attachments") or []
    assert all(each["mimetype"] == "image/png" for each in found)
    return [(each["filename"], base64.b64decode(each["base64"])) for each in found]


def pixels(png: bytes) -> bytes:
    """Return the values of a picture, as its filters left them."""
    data, place = b"", 8
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        data += png[place + 8 : place + 8 + size] if kind == b"IDAT" else b""
        place += size + 12
    return zlib.decompress(data)


@pytest.mark.parametrize("backend", ["playwright", "cdp"])
def test_the_alert_has_a_picture_of_the_page_and_no_other_is_kept(
    kites: Callable[..., Muster], site: Loopback, backend: str
) -> None:
    """Also of a page that has a session: `attach` asks for it explicitly."""
    daemon = kites(backend, session="acme")
    for price in ("1 €", "1 €", "2 €", "2 €"):
        run(daemon, site, price)
    wait_for("it is told", lambda: site.titles() == ["kites: price 1 € → 2 €"], RUN_SECONDS)
    [(name, picture)] = pictures(site.heard[0])
    assert name == "kites-2.png"
    assert picture.endswith(PNG_END)
    assert struct.unpack(">II", picture[16:24]) == VIEWPORT
    assert len(set(pixels(picture))) > SHADES, "the page is not empty"
    wait_for("only that of the change is kept", lambda: len(kept(daemon)) == 1)
    [entry] = kept(daemon)
    assert (entry / "attached.png").read_bytes() == picture
    assert stat.S_IMODE((entry / "attached.png").stat().st_mode) == 0o600
    assert site.heard[0]["musterd"]["changes"][0]["picture"] == "", "a path of this machine"


def test_a_picture_survives_kills_and_a_change_without_one_is_told_all_the_same(
    kites: Callable[..., Muster], site: Loopback
) -> None:
    daemon = kites("cdp")

    def changes(price: str) -> None:
        """Let the price change while the alerts process hears nothing, and kill both."""
        wait_for("alerts are sent", lambda: daemon.ask(rpc.ListAlerts())["pid"])
        process = psutil.Process(daemon.ask(rpc.ListAlerts())["pid"])
        process.suspend()
        count = daemon.ctl("--json", "changes").stdout.count("\n")
        run(daemon, site, price)
        more = count + 1
        wait_for("it is kept", lambda: daemon.ctl("--json", "changes").stdout.count("\n") == more)
        daemon.kill()
        process.kill()

    def told(number: int) -> list[dict[str, Any]]:
        """Return messages about a change; one that was under way at a kill may come again."""
        return [
            each
            for each in site.heard
            if number in [change["number"] for change in each["musterd"]["changes"]]
        ]

    run(daemon, site, "1 €")
    changes("2 €")
    daemon.start()
    [first, *_] = wait_for("it is told", lambda: told(2), RUN_SECONDS)
    assert [name for name, _ in pictures(first)] == ["kites-2.png"]
    changes("3 €")
    for entry in kept(daemon):
        (entry / "attached.png").unlink()
        entry.rmdir()
    daemon.start()
    [second, *_] = wait_for("it is told too", lambda: told(3), RUN_SECONDS)
    assert pictures(second) == []
