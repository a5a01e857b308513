"""Sessions in a real browser, by both backends: logged in once, whoever dies."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Muster, Musters
from support.login_site import ODD, PASSWORD, USER, LoginSite, login_site

DOCUMENT = Path(__file__).parents[2] / "docs" / "sessions.md"
BACKENDS = ("playwright", "cdp")
# A busy machine may need longer than a browser has.
PATIENT = """
from musterd.workers.browser import BrowserWorker, worker

worker.PROBE_SECONDS = 60.0
"""
TOKEN = "token-of-ada-0123456789"
LOGINS = f"""
async def log_in(session, url, user, password):
    async with session.worker.open_page(session.ctx, url) as page:
        await page.goto(url + "/login")
        await page.perform('''
            const form = document.querySelector("form");
            form.user.value = "%s"; form.password.value = "%s";
            setTimeout(() => form.submit(), 0);
        ''' % (user, password))
        await page.wait_for(".user")
        await page.perform('localStorage.setItem("token", "{TOKEN}")')
"""


@pytest.fixture
def site() -> Iterator[LoginSite]:
    with login_site() as site:
        yield site


@pytest.fixture(params=BACKENDS)
def make(request, muster: Musters, unprivileged, site: LoginSite) -> "Callable[..., Muster]":
    """Make a daemon whose browser logs in: make(code of the login, **its arguments)."""

    def make(code: str, **args: Any) -> Muster:
        browser = {
            "worker": "patient:BrowserWorker",
            "size": 1,
            "options": {"backend": request.param},
            "env": {"SHOP": PASSWORD},
        }
        acme = {
            "login": "logins:log_in",
            "args": {"user": USER, "password": {"$secret": "SHOP"}, **args},
            "logged_out": [f"{site.url}/login*"],
        }
        parser = {"worker": "musterd.workers.parser:ParserWorker", "size": 1}
        made = muster(
            {"browser": browser, "parser": parser},
            start=False,
            as_user=unprivileged.uid if os.geteuid() == 0 else None,
            sessions__acme=acme,
            retry__max_retries=0,
        )
        (made.folder / "logins.py").write_text(code)
        (made.folder / "patient.py").write_text(PATIENT)
        return made.start()

    return make


@pytest.fixture
def daemon(make: "Callable[..., Muster]", site: LoginSite) -> Muster:
    return make(LOGINS, url=site.url)


def extract(daemon: Muster, url: str, select: dict[str, str], pool: str = "browser") -> Any:
    args = {"url": url, "select": select}
    return daemon.client().submit(f"{pool}.extract", args, session="acme").result(timeout=120)


def test_a_browser_is_logged_in_although_worker_and_daemon_were_killed(
    daemon: Muster, site: LoginSite
) -> None:
    account, app = f"{site.url}/account", f"{site.url}/app"
    assert extract(daemon, account, {"user": ".user"}) == {"user": USER}
    assert extract(daemon, app, {"shown": "#token"}) == {"shown": TOKEN}
    os.kill(daemon.worker("browser/0").pid, signal.SIGKILL)
    assert extract(daemon, account, {"user": ".user"}) == {"user": USER}
    daemon.kill()
    daemon.start()
    assert extract(daemon, app, {"shown": "#token"}) == {"shown": TOKEN}
    assert extract(daemon, account, {"user": ".user"}) == {"user": USER}
    # The cookies are the same for a worker without a browser.
    assert extract(daemon, account, {"user": ".user"}, "parser") == {"user": USER}
    assert (site.logins, site.refused) == (1, 0)


def test_the_example_of_the_documents_logs_in(
    make: "Callable[..., Muster]", site: LoginSite
) -> None:
    code = DOCUMENT.read_text().partition("for the browser\n")[2].partition("```")[0]
    assert ".account" in code
    code = code.replace("https://acme.example", site.url).replace(".account", ".user")
    assert extract(make(code), f"{site.url}/account", {"user": ".user"}) == {"user": USER}
    assert site.logins == 1


def test_a_page_that_leads_to_the_login_logs_in_once_more(daemon: Muster, site: LoginSite) -> None:
    account = f"{site.url}/account"
    assert extract(daemon, account, {"user": ".user"}) == {"user": USER}
    site.expire()
    assert extract(daemon, account, {"user": ".user"}) == {"user": USER}
    assert (site.logins, site.refused) == (2, 1)


def test_what_a_page_writes_is_kept_and_what_it_removes_is_gone(
    daemon: Muster, site: LoginSite
) -> None:
    app = f"{site.url}/app"
    extract(daemon, app, {})
    args = {"url": app, "script": 'localStorage.clear(); localStorage.setItem("new", "1")'}
    daemon.client().submit("browser.extract", args, session="acme").result(timeout=120)
    script = "return {...localStorage}"
    args = {"url": app, "script": script}
    page = daemon.client().submit("browser.render", args, session="acme").result(timeout=120)
    assert page["script"] == {"new": "1"}
    fresh = daemon.client().submit("browser.render", args).result(timeout=120)  # without a session
    assert fresh["script"] == {}


def test_a_page_cannot_make_its_session_unreadable(daemon: Muster, site: LoginSite) -> None:
    extract(daemon, f"{site.url}/account", {})
    extract(daemon, f"{site.url}/forged", {})
    assert extract(daemon, f"{site.url}/account", {"user": ".user"}) == {"user": USER}
    args = {"url": f"{site.url}/account", "script": "return {...localStorage}"}
    page = daemon.client().submit("browser.render", args, session="acme").result(timeout=120)
    assert page["script"] == {"text": "text", "half": "\N{REPLACEMENT CHARACTER}"}
    assert site.logins == 1


def test_cookies_that_the_browser_refuses_stay_and_break_nothing(
    daemon: Muster, site: LoginSite
) -> None:
    account = f"{site.url}/account"
    assert extract(daemon, account, {"user": ".user"}) == {"user": USER}
    extract(daemon, f"{site.url}/odd", {}, "parser")
    names = extract(daemon, f"{site.url}/names", {"all": "body"}, "parser")["all"].split()
    assert len(names) == len(ODD) + 2, names
    assert extract(daemon, account, {"user": ".user"}) == {"user": USER}
    shown = extract(daemon, f"{site.url}/names", {"all": "body"})["all"].split()
    assert {"sid", "theme"} <= {*shown} < {*names}
    assert extract(daemon, f"{site.url}/names", {"all": "body"}, "parser")["all"].split() == names
    assert (site.logins, site.refused) == (1, 0)
