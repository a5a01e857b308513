"""Login tasks, and logins that fail, with a real site, real workers and a real daemon."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from musterd import TaskFailed
from support.daemon import Muster, Musters, slowest_turn
from support.login_site import PASSWORD, USER, LoginSite, login_site
from support.waiting import Waiting

DOOR = """
import asyncio, urllib.parse, urllib.request
from http.cookies import SimpleCookie
from musterd import Worker, task

class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None

class Door(Worker):
    @task
    def log_in(self, ctx, url: str, user: str, password: str) -> None:
        with ctx.session() as session:
            form = urllib.parse.urlencode({"user": user, "password": password}).encode()
            try:
                answer = urllib.request.build_opener(_Stay).open(url, form, timeout=10)
            except urllib.error.HTTPError as found:
                answer = found
            if answer.status != 303:
                raise PermissionError("the site does not let us in")
            for line in answer.headers.get_all("Set-Cookie"):
                for name, morsel in SimpleCookie(line).items():
                    session.set_cookie(name, morsel.value, "127.0.0.1")

    @task
    def empty(self, ctx, **_) -> None:
        with ctx.session():
            pass
"""
CLIENTS = """
from musterd import Worker, task
from musterd.workers.toolkit import NetworkClient, SyncNetworkClient

class Clients(Worker):
    async def open(self):
        self.client, self.plain = NetworkClient(), SyncNetworkClient()

    async def close(self):
        await self.client.close()
        self.plain.close()

    @task
    async def log_in(self, ctx, url: str, user: str, password: str) -> None:
        body = f"user={user}&password={password.replace(' ', '+')}"
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        async with ctx.session() as session:
            await self.client.post(url, ctx=ctx, body=body, headers=headers, session=session)

    @task
    async def page(self, ctx, url: str) -> str:
        async with ctx.session() as session:
            return (await self.client.get(url, ctx=ctx, session=session)).text

    @task
    def plain_page(self, ctx, url: str) -> str:
        with ctx.session() as session:
            return self.plain.get(url, ctx=ctx, session=session).text

    @task
    async def stranger(self, ctx, url: str) -> str:
        return (await self.client.get(url, ctx=ctx)).url
"""
FUNCTION = """
def refused(session, tell, **_):
    with open(tell, "a") as file:
        file.write("tried\\n")
    raise PermissionError("wrong password")
"""


@pytest.fixture
def site() -> Iterator[LoginSite]:
    with login_site() as site:
        yield site


def fleet_of(muster: Musters, site: LoginSite, size: int = 2, **session: Any) -> Muster:
    acme = {
        "login_task": "door.log_in",
        "args": {"url": f"{site.url}/login", "user": USER, "password": {"$secret": "SHOP"}},
        "logged_out": [f"{site.url}/login*"],
        **session,
    }
    parser = {"worker": "musterd.workers.parser:ParserWorker", "size": size}
    door = {"worker": "door:Door", "size": 1, "env": {"SHOP": PASSWORD, "OLD": "forgotten"}}
    clients = {"worker": "clients:Clients", "size": 1, "env": {"SHOP": PASSWORD}}
    pools = {"parser": parser, "door": door, "clients": clients}
    made = muster(pools, start=False, sessions__acme=acme, retry__max_retries=0)
    (made.folder / "door.py").write_text(DOOR)
    (made.folder / "clients.py").write_text(CLIENTS)
    (made.folder / "function.py").write_text(FUNCTION)
    return made.start()


def ask(muster: Muster, site: LoginSite, count: int = 1) -> list[Any]:
    client = muster.client()
    args = {"url": f"{site.url}/account", "select": {"user": ".user"}}
    tasks = [client.submit("parser.extract", args, session="acme") for _ in range(count)]
    return [task.result(timeout=60) for task in tasks]


def listed(muster: Muster) -> dict[str, Any]:
    (shown,) = msgspec.json.decode(muster.ctl("--json", "sessions").stdout)["sessions"]
    return dict(shown)


def test_a_login_task_logs_in_once_whoever_waits_and_dies(muster: Musters, site: LoginSite) -> None:
    daemon = fleet_of(muster, site)
    assert ask(daemon, site, 6) == [{"user": USER}] * 6
    daemon.kill()
    daemon.start()
    assert ask(daemon, site) == [{"user": USER}]
    assert (site.logins, site.refused) == (1, 0)
    site.expire()
    assert ask(daemon, site, 3) == [{"user": USER}] * 3
    assert (site.logins, site.refused) == (2, 1)


def test_several_tasks_at_once_share_a_login_task(muster: Musters, site: LoginSite) -> None:
    daemon = fleet_of(muster, site, size=4, concurrent=4)
    assert ask(daemon, site, 8) == [{"user": USER}] * 8
    assert site.logins == 1


def test_one_worker_runs_the_task_and_its_login(muster: Musters, site: LoginSite) -> None:
    args = {
        "url": f"{site.url}/login",
        "method": "POST",
        "headers": {"Content-Type": "application/x-www-form-urlencoded"},
        "body": f"user={USER}&password={PASSWORD.replace(' ', '+')}",
    }
    daemon = fleet_of(muster, site, size=1, login_task="parser.fetch", args=args)
    assert ask(daemon, site, 2) == [{"user": USER}] * 2
    assert site.logins == 1


def test_a_login_task_that_leaves_nothing_fails_the_task(muster: Musters, site: LoginSite) -> None:
    daemon = fleet_of(muster, site, login_task="door.empty", args={})
    with pytest.raises(TaskFailed, match="left no cookie and no storage") as failed:
        ask(daemon, site)
    assert failed.value.type == "LoginFailed"


def test_a_site_that_refuses_the_login_is_left_alone(muster: Musters, site: LoginSite) -> None:
    secret = {"$secret": "OLD"}
    args = {"url": f"{site.url}/login", "user": USER, "password": secret}
    daemon = fleet_of(muster, site, args=args, login_failures=2, login_pause="1h")
    for _ in range(2):
        with pytest.raises(TaskFailed, match="does not let us in"):
            ask(daemon, site)
    for _ in range(2):
        with pytest.raises(TaskFailed, match="musterctl sessions reset acme") as failed:
            ask(daemon, site)
        assert (failed.value.kind, failed.value.type) == ("open", "SessionHeld")
    assert site.tries == 2
    shown = listed(daemon)
    assert shown["login_failures"] == 2
    assert 3000 < shown["held_seconds"] <= 3600
    assert "held" in daemon.ctl("sessions").stdout
    assert "does not let us in" in daemon.ctl("sessions").stdout
    assert "session.held" in daemon.log()
    daemon.kill()
    daemon.start()
    with pytest.raises(TaskFailed, match="is held for"):
        ask(daemon, site)
    assert site.tries == 2
    assert daemon.ctl("sessions", "reset", "acme").returncode == 0
    with pytest.raises(TaskFailed, match="does not let us in"):
        ask(daemon, site)
    assert site.tries == 3
    nobody = daemon.ctl("sessions", "reset", "nobody")
    assert (nobody.returncode, "no such session" in nobody.stderr) == (4, True)


def test_a_login_function_that_fails_is_not_called_again_and_again(
    muster: Musters, site: LoginSite
) -> None:
    daemon = fleet_of(
        muster,
        site,
        login_task="",
        login="function:refused",
        args={"tell": "tried"},
        login_failures=3,
        login_pause="1h",
    )
    for _ in range(3):
        with pytest.raises(TaskFailed, match="wrong password"):
            ask(daemon, site)
    with pytest.raises(TaskFailed, match="3 logins in a row failed"):
        ask(daemon, site)
    assert (daemon.folder / "tried").read_text() == "tried\n" * 3


def test_a_login_after_which_the_site_still_asks_counts_as_failed(
    muster: Musters, site: LoginSite
) -> None:
    daemon = fleet_of(muster, site, login_failures=1, login_pause="1h")
    site.forgetful = True
    with pytest.raises(TaskFailed, match="/login"):
        ask(daemon, site)
    with pytest.raises(TaskFailed, match="is held for"):
        ask(daemon, site)
    assert site.logins == 1


def test_a_network_client_uses_the_session(muster: Musters, site: LoginSite) -> None:
    daemon = fleet_of(muster, site, login_task="clients.log_in")
    client, url = daemon.client(), f"{site.url}/account"
    for name in ("page", "plain_page"):
        page = client.submit(f"clients.{name}", {"url": url}, session="acme").result(60)
        assert f"Account of {USER}" in page
    assert site.logins == 1
    site.expire()
    page = client.submit("clients.page", {"url": f"{site.url}/strict"}, session="acme").result(60)
    assert (page, site.logins) == ("hello", 2)
    # Nothing of the session is in the client itself.
    assert client.submit("clients.stranger", {"url": url}).result(60).endswith("/login")
    assert ask(daemon, site) == [{"user": USER}]
    assert site.logins == 2


MANY = 50_000
TURN_SECONDS_MAX = 0.05  # of processor time
USER_OF_ACME = """
from musterd import task

@task(max_retries=0)
def use(ctx) -> None:
    with ctx.session():
        pass
"""


def test_a_session_that_is_held_ends_thousands_of_tasks_and_no_turn_takes_long(
    muster: Musters, waiting: Waiting
) -> None:
    pool = {"worker": "users", "queue_size": 2 * MANY}
    acme = {"login": "function:refused", "args": {"tell": "tried"}, "login_failures": 1}
    daemon = muster({"users": pool}, start=False, sessions__acme=acme)
    (daemon.folder / "users.py").write_text(USER_OF_ACME)
    (daemon.folder / "function.py").write_text(FUNCTION)
    daemon.start()
    assert daemon.ctl("pause", "users").returncode == 0
    with daemon.client() as client:
        args: dict[str, Any] = {}
        options = {"session": "acme", "expires": 3600.0}  # so all of them are in memory
        tasks = client.submit_many([("users.use", args, options)] * MANY)
        client.flush()
        assert daemon.ctl("resume", "users").returncode == 0
        waiting("all have ended", lambda: daemon.status().pools[0].failed == MANY, 300)
        with pytest.raises(TaskFailed, match="is held for") as failed:
            tasks[-1].result(timeout=60)
    assert failed.value.type == "SessionHeld"
    assert (daemon.folder / "tried").read_text() == "tried\n"
    assert slowest_turn(daemon.log()) <= TURN_SECONDS_MAX
