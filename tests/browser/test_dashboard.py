"""The dashboard in a real browser: it shows the truth, and its buttons work."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from support.daemon import Musters
from support.waiting import Waiting

TOKEN = "a-token-of-this-test-0123456789"
# `make screenshots` keeps the pictures; otherwise they help when a test has failed.
SHOTS_VARIABLE = "MUSTERD_SCREENSHOTS"
SLOW_MS = 30_000
MEMORY = {"memory__warning": "98%", "memory__critical": "99%"}
WORKER = """
import time
from musterd import Worker, task

class Jobs(Worker):
    @task
    def check(self, ctx, shop: str = "", seconds: float = 0.0) -> str:
        time.sleep(seconds)
        return shop

    @task(max_retries=0)
    def fail(self, ctx, text: str) -> None:
        ctx.artefact("page.html", "<p>no price")
        ctx.artefact("console.txt", "TypeError: price is undefined")
        raise ValueError(text)

    @task(max_retries=0, target="shop")
    def fetch(self, ctx, shop: str) -> None:
        raise ConnectionError(f"{shop} does not answer")
"""

expect.set_options(timeout=SLOW_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=os.environ.get("MUSTERD_CHROMIUM", "/usr/bin/chromium")
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def fleet(module_muster: Musters, waiting: Waiting) -> Iterator[Any]:
    daemon = module_muster(
        {
            "shops": {"worker": "jobs:Jobs", "size": 4},
            "mail": {"worker": "jobs:Jobs", "size": 2},
        },
        start=False,
        http__listen="127.0.0.1:0",
        http__token_file="TOKEN_FILE",
        memory__enabled=True,
        # Other programs must not make this fleet smaller; a picture shows the usual limits.
        **({} if SHOTS_VARIABLE in os.environ else MEMORY),
        schedule__hourly={"task": "shops.check", "every": "1h"},
    )
    Path(daemon.folder, "jobs.py").write_text(WORKER)
    token = Path(daemon.folder, "token")
    token.write_text(TOKEN)
    token.chmod(0o600)
    text = daemon.config_path.read_text().replace("TOKEN_FILE", str(token))
    daemon.config_path.write_text(text)
    daemon.start()
    daemon.url = waiting("the web process is up", lambda: daemon.status().web.address)
    yield daemon
    daemon.close()


@pytest.fixture
def page(browser: Browser, fleet: Any) -> Iterator[Page]:
    with_errors: list[str] = []
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    opened = context.new_page()
    opened.on("pageerror", lambda error: with_errors.append(str(error)))
    opened.on(
        "console",
        lambda said: with_errors.append(said.text) if "Content Security" in said.text else None,
    )
    opened.goto(fleet.url)
    expect(opened.locator("body")).to_have_attribute("data-contact", "live")
    yield opened
    context.close()
    assert with_errors == []


@pytest.fixture
def shot(tmp_path: Path) -> Callable[[Page, str], None]:
    folder = Path(os.environ.get(SHOTS_VARIABLE, str(tmp_path)))

    def take(page: Page, name: str) -> None:
        page.screenshot(path=folder / f"dashboard-{name}.png")

    return take


NO_ANSWER: Any = {"status": 503, "json": {"error": "the supervisor did not answer"}}


def unlock(page: Page) -> None:
    page.get_by_role("button", name="Unlock actions").click()
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Lock actions")).to_be_visible()
    expect(page.locator("#confirm")).to_be_hidden()


def confirm(page: Page) -> None:
    page.locator("#confirm-yes").click()
    expect(page.locator("#confirm")).to_be_hidden()


def test_its_numbers_are_those_of_musterctl_status(
    fleet: Any, page: Page, shot: Callable[..., None]
) -> None:
    client = fleet.client()
    for task in [client.submit("shops.check", {"shop": str(each)}) for each in range(60)]:
        task.result(60)
    client.submit("mail.check", {}, delay=3600).ack()
    told = json.loads(fleet.ctl("--json", "status").stdout)
    pools = told["pools"]
    expect(page.locator("#f-succeeded")).to_have_text(str(sum(each["succeeded"] for each in pools)))
    expect(page.locator("#f-running")).to_have_text(str(sum(each["running"] for each in pools)))
    expect(page.locator("#f-waiting")).to_have_text(str(sum(each["waiting"] for each in pools)))
    for each in pools:
        cells = page.locator(f"[data-pool={each['name']}] td")
        expect(cells.nth(2)).to_have_text(f"{each['running']} / {each['size']}")
        expect(cells.nth(9)).to_have_text(str(each["succeeded"]))
        for worker in each["workers"]:
            expect(page.locator(f'#grid [data-key="{worker["name"]}"]')).to_be_visible()
    expect(page.locator("#headline")).to_have_text("Running normally")
    expect(page.locator("#memory-warning")).to_be_attached()
    expect(page.locator("#schedules tbody tr")).to_have_count(1)
    expect(page.locator("#schedules tbody td").last).to_have_text("–")
    shot(page, "light")


def test_a_killed_worker_is_seen_to_come_back(fleet: Any, page: Page) -> None:
    before = fleet.worker("mail/1").pid
    cell = page.locator('#grid [data-key="mail/1"]')
    os.kill(before, signal.SIGKILL)
    expect(cell.locator(".state")).to_contain_text("1↻")
    expect(cell.locator(".state")).to_contain_text("running")
    expect(page.locator("#events")).to_contain_text("worker.crashed")
    cell.click()
    expect(page.locator("#detail-body")).to_contain_text(str(fleet.worker("mail/1").pid))
    assert fleet.worker("mail/1").pid != before


def test_a_dead_task_tells_its_story_and_is_retried(
    fleet: Any, page: Page, waiting: Waiting, shot: Callable[..., None]
) -> None:
    text = "<img src=x onerror=alert(1)> is no price"
    task = fleet.client().submit("shops.fail", {"text": text})
    waiting("it has failed", lambda: task.status().state == "failed")
    page.locator("#task-state").select_option("failed")
    row = page.locator(f'#tasks [data-key="{task.id}"]')
    expect(row).to_contain_text(text)
    row.click()
    expect(page.locator("#detail-body")).to_contain_text("attempt 1 failed on shops/")
    expect(page.locator("#detail-body")).not_to_contain_text("Traceback")
    steps = page.locator(".story li > span").all_inner_texts()
    assert steps.index("submitted") < _place(steps, "attempt 1 failed") < steps.index("failed")
    page.locator("#retry").click()
    page.get_by_label("Token").fill("wrong-token-of-this-test")
    page.locator("#confirm-yes").click()
    expect(page.locator("#confirm-error")).to_contain_text("give the token")
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#confirm-title")).to_have_text("Retry this task?")
    page.locator("#confirm-no").click()
    assert len(_attempts(fleet, task.id)) == 1
    page.locator("#retry").click()
    confirm(page)
    expect(page.locator("#toast")).to_contain_text("queued again")
    waiting("it was tried again", lambda: len(_attempts(fleet, task.id)) == 2)
    page.keyboard.press("Escape")
    row.click()
    expect(page.locator("#detail-body")).to_contain_text("Traceback")
    expect(page.locator("#detail-body img")).to_have_count(0)
    with page.expect_download() as started:
        page.locator(".artefacts button", has_text="page.html").first.click()
    assert started.value.suggested_filename.endswith(".page.html")
    assert started.value.path().read_text() == "<p>no price"
    shot(page, "task")


def _place(steps: list[str], begins: str) -> int:
    return next(place for place, step in enumerate(steps) if step.startswith(begins))


def _attempts(fleet: Any, task: str) -> list[Any]:
    told = json.loads(fleet.ctl("--json", "task", task).stdout)
    return list(told.get("attempts", []))


def test_a_pool_is_scaled_and_drained_after_a_confirmation(
    fleet: Any, page: Page, waiting: Waiting, shot: Callable[..., None]
) -> None:
    unlock(page)
    page.get_by_role("button", name="Scale mail").click()
    page.get_by_role("spinbutton", name="Workers").fill("3")
    shot(page, "confirm")
    confirm(page)
    expect(page.locator("[data-pool=mail] td").nth(2)).to_have_text("3 / 3")
    page.get_by_role("button", name="Drain mail").click()
    confirm(page)
    expect(page.locator("body")).to_have_attribute("data-health", "warning")
    expect(page.locator("#reason")).to_contain_text("mail is drained")
    page.get_by_role("button", name="Resume mail").click()
    confirm(page)
    expect(page.locator("body")).to_have_attribute("data-health", "ok")
    assert fleet.pool("mail").size == 3
    page.get_by_role("button", name="Scale mail").click()
    page.get_by_role("spinbutton", name="Workers").fill("2")
    confirm(page)
    waiting("two are left", lambda: fleet.pool("mail").running == 2)


def test_a_link_with_the_token_unlocks_actions_and_leaves_no_trace(
    fleet: Any, browser: Browser
) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{fleet.url}/#token={TOKEN}")
    expect(page.get_by_role("button", name="Lock actions")).to_be_visible()
    assert page.url == f"{fleet.url}/"
    page.reload()  # the tab remembers it
    expect(page.get_by_role("button", name="Lock actions")).to_be_visible()
    page.get_by_role("button", name="Lock actions").click()
    page.evaluate(f"location.hash = 'token={TOKEN}'")  # the link, in the tab that is open
    expect(page.get_by_role("button", name="Lock actions")).to_be_visible()
    assert not any(TOKEN in url for url in asked)
    context.close()
    fresh = browser.new_page()
    fresh.goto(f"{fleet.url}/#token=not-the-token-of-this-daemon")
    expect(fresh.get_by_text("give the token")).to_be_visible()
    expect(fresh.get_by_role("button", name="Unlock actions")).to_be_visible()
    assert fresh.url == f"{fleet.url}/"
    fresh.close()


def test_an_open_breaker_counts_down_and_is_reset(
    fleet: Any, page: Page, shot: Callable[..., None]
) -> None:
    client = fleet.client()
    for _ in range(3):
        client.submit("shops.fetch", {"shop": "dead.example"})
    row = page.locator('#breakers [data-target="dead.example"]')
    expect(row).to_contain_text("open")
    expect(row.locator("td").nth(2)).to_contain_text("4:")
    expect(page.locator("#reason")).to_contain_text("dead.example")
    shot(page, "breaker")
    unlock(page)
    row.get_by_role("button", name="Reset").click()
    confirm(page)
    expect(row).to_contain_text("closed")


def test_workers_and_tasks_are_filtered_and_searched(
    fleet: Any, page: Page, waiting: Waiting
) -> None:
    expect(page.locator("#grid li")).to_have_count(6)
    page.get_by_label("Search workers").fill("mail/1")
    expect(page.locator("#grid li")).to_have_count(1)
    page.get_by_label("Search workers").fill("nobody")
    expect(page.locator("#workers-empty")).to_have_text("No matching workers.")
    page.get_by_label("Search workers").fill("")
    client = fleet.client()
    wanted = client.submit("mail.fail", {"text": "a needle"})
    waiting("it has failed", lambda: wanted.status().state == "failed")
    page.get_by_label("Search tasks").fill("needle")
    expect(page.locator("#tasks tbody tr")).to_have_count(1)
    expect(page.locator("#tasks tbody tr")).to_have_attribute("data-key", wanted.id)
    page.get_by_label("Pool", exact=True).select_option("shops")
    expect(page.locator("#tasks-empty")).to_contain_text("Nothing matches")


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    expect(page.locator("#workers")).to_be_focused()
    page.keyboard.press("Tab")  # search
    page.keyboard.press("Tab")  # state
    page.keyboard.press("Tab")
    names = page.evaluate("[...document.querySelectorAll('#grid li')].map(li => li.dataset.key)")
    focused = "document.activeElement.dataset.key"
    assert page.evaluate(focused) == names[0]
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == names[1]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_have_text(names[1])
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == names[1]
    page.keyboard.press("Tab")  # past all the others
    assert page.evaluate("document.activeElement.id") == "task-state"
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "task-words"


def test_a_stopped_daemon_is_said_to_be_silent_and_what_is_old_looks_old(
    fleet: Any, page: Page, shot: Callable[..., None]
) -> None:
    os.kill(fleet.pid, signal.SIGSTOP)
    try:
        expect(page.locator("#headline")).to_have_text("The supervisor does not answer")
        expect(page.locator("body")).to_have_attribute("data-health", "unknown")
        expect(page.locator("#contact")).to_contain_text("no answer since")
        expect(page.locator("#f-running")).to_have_text("6")
        shot(page, "stopped")
    finally:
        os.kill(fleet.pid, signal.SIGCONT)
    expect(page.locator("body")).to_have_attribute("data-health", "ok")
    os.kill(fleet.status().web.pid, signal.SIGSTOP)
    web = fleet.status().web.pid
    try:
        expect(page.locator("#headline")).to_have_text("Connection lost")
        expect(page.locator("#contact")).to_contain_text("lost")
        shot(page, "lost")
    finally:
        os.kill(web, signal.SIGCONT)
    expect(page.locator("body")).to_have_attribute("data-contact", "live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(
    fleet: Any, browser: Browser, shot: Callable[..., None], scheme: Any
) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    page.goto(fleet.url)
    expect(page.locator("#grid li")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("[data-pool=shops] td").first.bounding_box()["width"] > 40
    cut = "[...document.querySelectorAll('#grid .name')].some(n => n.scrollWidth > n.clientWidth)"
    assert not page.evaluate(cut), "names of workers are read"
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(18, 22, 26)") == (scheme == "dark")
    shot(page, f"phone-{scheme}")
    context.close()


@pytest.mark.parametrize("width", [1024, 1280, 1440, 1920])
def test_nothing_that_has_to_be_read_is_cut_off(fleet: Any, browser: Browser, width: int) -> None:
    site = "a.shop.example"
    for _ in range(3):
        fleet.client().submit("shops.fetch", {"shop": site})
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    page.goto(fleet.url)
    expect(page.locator(f'#breakers [data-target="{site}"]')).to_be_visible()
    assert page.evaluate(CUT_OFF) == []
    note = page.locator("#pools th.note").bounding_box()
    assert note is not None
    assert note["width"] > 120, "why a pool is not well"
    fleet.ctl("breaker", "reset", site)
    context.close()


CUT_OFF = """
[...document.querySelectorAll(
  'th, #breakers td:not(.act), #schedules td:first-child, #events td:first-child')]
  .filter(node => node.offsetWidth && !node.closest('.sr') && !node.querySelector('.sr'))
  .filter(node => node.scrollWidth > node.clientWidth)
  .map(node => node.closest('table').id + ': ' + node.textContent)"""


def test_while_nothing_is_known_every_part_says_that_it_loads(
    fleet: Any, browser: Browser, shot: Callable[..., None]
) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="dark")
    page = context.new_page()
    held: list[Any] = []
    page.route("**/api/live", lambda route: held.append(route))  # noqa: PLW0108 - marked by it
    page.goto(fleet.url)
    expect(page.locator("#headline")).to_have_text("Connecting to the fleet")
    for part in ("pools", "workers", "tasks", "breakers", "schedules", "events"):
        expect(page.locator(f"#{part}-empty")).to_have_text("Loading")
    shot(page, "loading")
    held[0].continue_()
    expect(page.locator("#headline")).not_to_have_text("Connecting to the fleet")
    expect(page.locator("#workers-empty")).to_be_hidden()
    expect(page.locator("#pools-empty")).to_be_hidden()
    context.close()


WATCHER = """
from pathlib import Path
from musterd import Worker, task

class Jobs(Worker):
    @task
    def look(self, ctx) -> dict[str, str]:
        return {"price": Path("price").read_text(), "text": Path("text").read_text()}
"""
EVIL = "<img src=x onerror=document.title='hit'>"


def test_changes_are_listed_and_a_history_shows_the_diff(
    muster: Musters, browser: Browser, waiting: Waiting, shot: Callable[..., None]
) -> None:
    """On a phone too; what a site says is text, whatever it looks like."""
    daemon = muster(
        {"jobs": {"worker": "jobs:Jobs", "size": 1}},
        start=False,
        http__listen="127.0.0.1:0",
        http__token_file="TOKEN_FILE",
        schedule__kites={"task": "jobs.look", "cron": "0 0 1 1 *", "notify": "task.changed"},
    )
    token = Path(daemon.folder, "token")
    token.write_text(TOKEN)
    token.chmod(0o600)
    daemon.config_path.write_text(daemon.config_path.read_text().replace("TOKEN_FILE", str(token)))
    Path(daemon.folder, "jobs.py").write_text(WATCHER)
    daemon.start()

    def results() -> int:
        return len(daemon.ctl("--json", "history", "kites").stdout.split('"number"')) - 1

    for number, price in enumerate(["49.00 €", "39.00 €", EVIL]):
        Path(daemon.folder, "price").write_text(price)
        Path(daemon.folder, "text").write_text(f"Kites\nare {number} blue\nand fly")
        assert daemon.ctl("schedule", "run", "kites").returncode == 0
        waiting("the result is kept", lambda wanted=number + 1: results() == wanted)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(waiting("the web process is up", lambda: daemon.status().web.address))
    rows = page.locator("#changes tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("kites")
    expect(rows.first).to_contain_text("39.00 € → <img src=x onerror=")
    expect(rows.last).to_contain_text("price 49.00 € → 39.00 €")
    page.route("**/api/history?*", lambda route: route.fulfill(**NO_ANSWER), times=1)
    rows.first.click()
    body = page.locator("#detail-body")
    expect(body).to_contain_text("the supervisor did not answer")
    expect(body).to_contain_text("Unlock actions to see the diffs.")  # it is asked again
    expect(body.locator(".diff")).to_have_count(0)
    page.keyboard.press("Escape")
    unlock(page)
    rows.first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_have_text("History of kites")
    expect(body).not_to_contain_text("Unlock actions")
    expect(body.locator(".diff")).to_have_count(2)
    expect(body.locator(".tag", has_text="change")).to_have_count(2)
    expect(body.locator(".added").first).to_contain_text("+")
    expect(body.locator(".added", has_text="39.00 €")).to_have_count(1)
    assert page.locator("#detail-body img").count() == 0
    assert "hit" not in page.title()
    shot(page, "changes")
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    rows.first.scroll_into_view_if_needed()
    shot(page, "changes-list-phone")
    rows.first.click()
    expect(body.locator(".diff")).to_have_count(2)
    assert page.evaluate("document.querySelector('#detail').scrollWidth") <= 360
    shot(page, "changes-phone")
    context.close()


def test_a_schedule_is_added_and_what_is_wrong_is_said_with_its_value(
    fleet: Any, page: Page, shot: Callable[..., None]
) -> None:
    """Nothing that was typed is lost."""
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    error = page.locator("#schedule-error")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    page.get_by_label("Name", exact=True).fill("kites")
    page.get_by_label("Task", exact=True).fill("shops.check")
    page.get_by_label("Every").fill("5x")
    page.get_by_label("Arguments").fill('{"shop": ')
    page.locator("#schedule-save").click()
    expect(error).to_contain_text("Arguments: not JSON")
    page.get_by_label("Arguments").fill('{"shop": "a", "seconds": 0}')
    page.get_by_label("Other keys").fill('{"catch_up": "some"}')
    page.locator("#schedule-save").click()
    expect(error).to_contain_text("key 'every': value \"5x\"")
    expect(error).to_contain_text("key 'catch_up': value \"some\"")
    shot(page, "schedule-form")
    page.get_by_label("Every").fill("5m")
    page.get_by_label("Other keys").fill("")
    page.locator("#schedule-save").click()
    expect(page.locator("#schedule")).to_be_hidden()
    expect(page.locator("#toast")).to_contain_text("schedule kites was added")
    expect(page.locator('#schedules [data-key="kites"]')).to_contain_text("every 5m")
    schedules = fleet.client().schedules
    assert schedules.get("kites").keys == {
        "task": "shops.check",
        "every": "5m",
        "args": {"shop": "a", "seconds": 0},
        "notify": "task.changed",
    }
    schedules.delete("kites")


def test_a_schedule_is_run_paused_edited_and_removed(
    fleet: Any, page: Page, shot: Callable[..., None]
) -> None:
    schedules = fleet.client().schedules
    args = {"shop": "a", "seconds": 0}
    schedules.put("lamps", task="shops.check", every="5m", args=args, priority="low")
    unlock(page)
    row = page.locator('#schedules [data-key="lamps"]')
    page.route("**/api/schedule?*", lambda route: route.fulfill(**NO_ANSWER), times=1)
    row.click()
    body, foot = page.locator("#detail-body"), page.locator("#detail-foot")
    expect(body).to_contain_text("at run time")
    expect(body).to_contain_text('"shop": "a"')
    foot.get_by_role("button", name="Run now").click()
    confirm(page)
    expect(body).to_contain_text("succeeded")
    foot.get_by_role("button", name="Pause").click()
    confirm(page)
    expect(body.locator(".tag").first).to_have_text("paused")
    expect(page.locator("#events tr", has_text="schedule.paused")).to_contain_text("lamps")
    shot(page, "schedule")
    foot.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Name", exact=True)).not_to_be_editable()
    page.get_by_label("Every").fill("")
    page.get_by_label("or cron").fill("30 2 * * *")
    page.locator("#schedule-save").click()
    expect(page.locator("#schedule")).to_be_hidden()
    expect(body).to_contain_text('"cron": "30 2 * * *"')
    found = schedules.get("lamps")
    kept = {"task": "shops.check", "args": args, "priority": "low"}
    assert (found.state, found.keys) == ("paused", {**kept, "cron": "30 2 * * *"})
    foot.get_by_role("button", name="Resume").click()
    confirm(page)
    expect(body.locator(".tag").first).to_have_text("active")
    foot.get_by_role("button", name="Remove").click()
    confirm(page)
    expect(page.locator("#detail")).to_be_hidden()
    expect(row).to_have_count(0)
    assert "lamps" not in [each.name for each in schedules.list()]


def test_a_schedule_of_the_configuration_is_read_only_and_says_so(
    fleet: Any, page: Page, shot: Callable[..., None]
) -> None:
    unlock(page)
    page.locator('#schedules [data-key="hourly"]').focus()
    page.keyboard.press("Enter")
    body, foot = page.locator("#detail-body"), page.locator("#detail-foot")
    expect(body).to_contain_text(str(fleet.config_path))
    expect(body).to_contain_text("read-only here")
    expect(foot.get_by_role("button", name="Run now")).to_be_visible()
    expect(foot.get_by_role("button", name="Pause")).to_be_visible()
    expect(foot.get_by_role("button", name="Edit")).to_have_count(0)
    expect(foot.get_by_role("button", name="Remove")).to_have_count(0)
    shot(page, "schedule-of-file")


def test_why_a_run_of_a_schedule_was_skipped_is_said(
    fleet: Any, page: Page, waiting: Waiting, shot: Callable[..., None]
) -> None:
    client = fleet.client()
    schedules = client.schedules
    schedules.put("stuck", task="shops.check", every="1s", args={"seconds": 600})
    run = waiting("it runs", lambda: schedules.get("stuck").last_task)
    row = page.locator('#schedules [data-key="stuck"]')
    last = row.locator("td").nth(3)
    why = re.compile(rf"[1-9]\d* skipped, the last because run {re.escape(run)} has not ended")
    expect(last).to_have_attribute("title", why)
    row.click()
    body = page.locator("#detail-body")
    expect(body.locator("dt", has_text="Skipped")).to_be_visible()
    said = re.compile(rf"^[1-9]\d*, the last because run {re.escape(run)} has not ended$")
    expect(body.locator("dt", has_text="Skipped").locator("+ dd")).to_have_text(said)
    shot(page, "schedule-skipped")
    schedules.delete("stuck")
    client.task(run).cancel()


def test_a_schedule_beyond_those_listed_is_found_and_opened(fleet: Any, page: Page) -> None:
    schedules = fleet.client().schedules
    names = [f"site-{number:04}" for number in range(620)]
    schedules.put_many(
        {name: {"task": "shops.check", "every": "1h", "enabled": False} for name in names}
    )
    try:
        expect(page.locator("#schedule-count")).to_have_text("the first 500")
        page.get_by_label("Search schedules").fill("site-0619")
        row = page.locator("#schedules tbody tr")
        expect(row).to_have_count(1)
        row.click()
        expect(page.locator("#detail-title")).to_have_text("Schedule site-0619")
        expect(page.locator("#detail-body")).to_contain_text("disabled")
    finally:
        schedules.delete(*names)


def test_the_form_of_a_schedule_fits_a_phone(
    fleet: Any, browser: Browser, shot: Callable[..., None]
) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme="dark")
    page = context.new_page()
    page.goto(fleet.url)
    unlock(page)
    page.get_by_role("button", name="Add", exact=True).click()
    assert page.evaluate("document.querySelector('#schedule').scrollWidth") <= 360
    shot(page, "schedule-form-phone")
    page.locator("#schedule-save").click()
    expect(page.locator("#schedule-error")).to_contain_text("Name: it is missing")
    expect(page.locator("#schedule-save")).to_be_in_viewport()
    shot(page, "schedule-form-error-phone")
    page.keyboard.press("Escape")
    page.locator('#schedules [data-key="hourly"]').click()
    assert page.evaluate("document.querySelector('#detail').scrollWidth") <= 360
    shot(page, "schedule-phone")
    page.keyboard.press("Escape")
    page.locator("#h-schedules").scroll_into_view_if_needed()
    shot(page, "schedules-phone")
    context.close()


def test_a_fleet_that_has_done_nothing_says_how_to_begin(
    muster: Musters,
    browser: Browser,
    waiting: Waiting,
    shot: Callable[..., None],
) -> None:
    daemon = muster({"shops": {"worker": "jobs:Jobs", "size": 0}}, http__listen="127.0.0.1:0")
    url = waiting("the web process is up", lambda: daemon.status().web.address)
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.goto(url)
    expect(page.locator("body")).to_have_attribute("data-contact", "live")
    expect(page.locator("#tasks-empty")).to_contain_text("musterctl submit POOL.TASK")
    expect(page.locator("#workers-empty")).to_contain_text("No workers")
    expect(page.locator("#breakers-empty")).to_have_text("No sites yet.")
    expect(page.locator("#schedules-empty")).to_have_text("No schedules configured.")
    expect(page.get_by_role("button", name="Unlock actions")).to_be_hidden()
    shot(page, "empty")
    context.close()


def test_a_reload_shows_the_minutes_before(page: Page) -> None:
    expect(page.locator("#plot-rate .none")).to_be_hidden()
    page.reload()
    expect(page.locator("body")).to_have_attribute("data-contact", "live")
    expect(page.locator("#plot-rate .none")).to_be_hidden()
    path = page.locator("#plot-rate path").first.get_attribute("d") or ""
    assert path.count("L") > 3


def test_a_fleet_at_work(
    fleet: Any, browser: Browser, waiting: Waiting, shot: Callable[..., None]
) -> None:
    """Make the picture of the README: `make screenshots` lets the fleet work for a while."""
    lasts = 75 if SHOTS_VARIABLE in os.environ else 1
    client = fleet.client()
    chance = random.Random(1)
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(fleet.url)
    until = time.monotonic() + lasts
    shops = [f"{name}.example" for name in ("books", "garden", "tools", "shoes", "tea")]
    while time.monotonic() < until:
        for _ in range(chance.randrange(1, 13)):
            priority = chance.choice(["critical", "high", "normal", "normal", "low", "low"])
            args = {"shop": chance.choice(shops), "seconds": chance.random()}
            client.submit("shops.check", args, priority=priority, target=args["shop"])
        if chance.random() < 0.15:
            client.submit(
                "shops.fail", {"text": "no price on the page"}, target=chance.choice(shops)
            )
        client.flush()
        page.wait_for_timeout(1000)
    for shop in shops:
        client.submit("shops.check", {"shop": shop, "seconds": 3.0}, target=shop)
    expect(page.locator("#grid li.s-work").first).to_be_visible()
    shot(page, "work")
    context.close()
    waiting("all is done", lambda: not sum(fleet.pool("shops").queued.values()))


def test_two_hundred_workers_and_ten_thousand_tasks_move_nothing(
    browser: Browser, fleet: Any, waiting: Waiting, shot: Callable[..., None]
) -> None:
    """The page itself makes up the events: this test is about the page, not the fleet."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.add_init_script(path=Path(__file__).with_name("flood.js"))
    page.goto(fleet.url)
    expect(page.locator("#grid li")).to_have_count(200)
    expect(page.locator("#f-queued")).to_have_text("9,800")
    waiting("it was told some", lambda: page.evaluate("window.sent") > 3)
    before = page.evaluate(PLACES)
    page.evaluate("document.querySelectorAll('#grid li').forEach(node => node.kept = true)")
    waiting("it was told more", lambda: page.evaluate("window.sent") > 12)
    assert page.evaluate(PLACES) == before
    kept = "[...document.querySelectorAll('#grid li')].filter(node => node.kept).length"
    assert page.evaluate(kept) == 200, "a redraw makes nothing anew"
    up = page.locator("[data-pool=jobs] td").nth(2)
    assert up.evaluate("node => node.scrollWidth <= node.clientWidth")
    shot(page, "200")
    context.close()


PLACES = """[...document.querySelectorAll('section, figure, header, li, tr, td, h2')].map(node => {
  const box = node.getBoundingClientRect();
  return [box.x, box.y, box.width, box.height].map(Math.round).join();
}).join(';')"""
