"""Sessions with a real site, real workers and a real daemon: logged in once, whoever dies."""

import os
import signal
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd import InvalidTask, TaskFailed
from support.daemon import DAEMON, Muster, Musters
from support.login_site import PASSWORD, USER, LoginSite, login_site
from support.waiting import wait_for

DOCUMENT = Path(__file__).parents[2] / "docs" / "sessions.md"
LOGINS = """
from urllib.parse import urlencode

FORM = {"Content-Type": "application/x-www-form-urlencoded"}

async def log_in(session, url, user, password):
    body = urlencode({"user": user, "password": password})
    await session.worker.fetch(session.ctx, url, method="POST", headers=FORM, body=body)

def plain(session, **_):
    session.set_cookie("sid", "0123456789abcdef-plain", "shop.example", http_only=True)

def counted(session, **_):
    with open("logins", "a") as file:
        file.write("x")
    with open("logins") as file:
        session.set_cookie("sid", "cookie-" + file.read(), "shop.example")

def nothing(session, **_):
    pass

def refused(session, **_):
    raise PermissionError("the site wants a second factor")
"""
SHOP = """
import os, time
from pathlib import Path
from musterd import LoggedOut, Worker, task

class Shop(Worker):
    @task
    def cookie(self, ctx, name: str = "sid") -> list:
        with ctx.session() as session:
            return [each.domain for each in session.cookies if each.name == name]

    @task
    def leak(self, ctx) -> str:
        with ctx.session("acme") as session:
            return session.cookies[0].value

    @task(max_retries=0)
    def shout(self, ctx) -> None:
        with ctx.session("acme") as session:
            ctx.log.warning("logged %s", session.cookies[0].value)
            raise ValueError(f"raised {session.cookies[0].value}")

    @task(max_retries=0)
    def always_out(self, ctx, tell: str) -> None:
        with ctx.session("acme"):
            with open(tell, "a") as file:
                file.write("called\\n")
            raise LoggedOut()

    @task
    def put(self, ctx, value: str | int) -> None:
        with ctx.session("acme") as session:
            session.storage["https://shop.example"] = {"token": value}

    @task
    def get(self, ctx) -> dict:
        with ctx.session("acme") as session:
            return session.storage

    @task(max_retries=0)
    def other(self, ctx, name: str) -> None:
        with ctx.session(name):
            pass

    @task
    def hold(self, ctx, until: str) -> None:
        with ctx.session():
            while not Path(until).exists():
                time.sleep(0.01)

    @task
    def out_once(self, ctx, called: str, until: str) -> str:
        with ctx.session() as session:
            if Path(called).exists():
                return session.cookies[0].value
            Path(called).touch()
            while not Path(until).exists():
                time.sleep(0.01)
            raise LoggedOut()

    @task
    def change(self, ctx, until: str) -> None:
        with ctx.session() as session:
            session.storage["https://shop.example"] = {"token": "late"}
            while not Path(until).exists():
                time.sleep(0.01)

    @task
    def environment(self, ctx) -> dict:
        return dict(os.environ)
"""


@pytest.fixture
def site() -> Iterator[LoginSite]:
    with login_site() as site:
        yield site


def parser_of(
    muster: Musters,
    site: LoginSite,
    size: int = 2,
    sessions__key_file: str = "",
    **session: Any,
) -> Muster:
    acme = {
        "login": "logins:log_in",
        "args": {"url": f"{site.url}/login", "user": USER, "password": {"$secret": "SHOP"}},
        "logged_out": [f"{site.url}/login*"],
        **session,
    }
    worker = "musterd.workers.parser:ParserWorker"
    pools = {"parser": {"worker": worker, "size": size, "env": {"SHOP": PASSWORD}}}
    made = muster(
        pools,
        start=False,
        sessions__acme=acme,
        sessions__key_file=sessions__key_file,
        retry__max_retries=0,
    )
    (made.folder / "logins.py").write_text(LOGINS)
    return made.start()


def shop_of(
    muster: Musters, login: str = "", size: int = 1, concurrent: int = 1, **settings: Any
) -> Muster:
    pool = {"worker": "shop:Shop", "size": size}
    acme: dict[str, Any] = {"login": login} if login else {}
    if concurrent > 1:
        acme["concurrent"] = concurrent
    made = muster({"shop": pool}, start=False, sessions__acme=acme, **settings)
    (made.folder / "logins.py").write_text(LOGINS)
    (made.folder / "shop.py").write_text(SHOP)
    return made.start()


def account(muster: Muster, site: LoginSite) -> Any:
    task = muster.client().submit(
        "parser.extract",
        {"url": f"{site.url}/account", "select": {"user": ".user"}},
        session="acme",
    )
    return task.result(timeout=60)


def files_of(muster: Muster) -> Iterator[tuple[Path, bytes]]:
    for path in muster.folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


# -- logged in once, whoever dies ---------------------------------------------------------------


def test_a_task_is_logged_in_although_worker_and_daemon_were_killed(
    muster: Musters, site: LoginSite
) -> None:
    daemon = parser_of(muster, site)
    assert account(daemon, site) == {"user": USER}
    for worker in daemon.pool("parser").workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert account(daemon, site) == {"user": USER}
    daemon.kill()
    daemon.start()
    assert account(daemon, site) == {"user": USER}
    assert (site.logins, site.refused) == (1, 0)


def test_a_task_that_finds_itself_logged_out_logs_in_once_more(
    muster: Musters, site: LoginSite
) -> None:
    daemon = parser_of(muster, site)
    account(daemon, site)
    site.expire()
    assert account(daemon, site) == {"user": USER}  # without a retry: there are none
    assert (site.logins, site.refused) == (2, 1)


def test_a_401_means_logged_out_too(muster: Musters, site: LoginSite) -> None:
    daemon = parser_of(muster, site)
    account(daemon, site)
    site.expire()
    page = daemon.client().submit("parser.fetch", {"url": f"{site.url}/strict"}, session="acme")
    assert page.result(timeout=60)["text"] == "hello"
    assert site.logins == 2


def test_two_tasks_never_race_for_one_login(muster: Musters, site: LoginSite) -> None:
    daemon = parser_of(muster, site, size=4)
    args = {"url": f"{site.url}/account", "select": {"user": ".user"}}
    client = daemon.client()
    tasks = [client.submit("parser.extract", args, session="acme") for _ in range(12)]
    assert [task.result(timeout=60) for task in tasks] == [{"user": USER}] * 12
    assert (site.logins, site.refused, site.most_inside) == (1, 0, 1)


def test_where_several_may_use_a_session_one_of_them_logs_in(
    muster: Musters, site: LoginSite
) -> None:
    daemon = parser_of(muster, site, size=4, concurrent=4)
    args = {"url": f"{site.url}/account", "select": {"user": ".user"}}
    client = daemon.client()
    tasks = [client.submit("parser.extract", args, session="acme") for _ in range(4)]
    assert [task.result(timeout=60) for task in tasks] == [{"user": USER}] * 4
    assert (site.logins, site.refused) == (1, 0)
    site.expire()
    tasks = [client.submit("parser.extract", args, session="acme") for _ in range(8)]
    assert [task.result(timeout=60) for task in tasks] == [{"user": USER}] * 8
    assert site.logins == 2


def test_a_task_takes_a_login_that_was_made_while_it_found_itself_logged_out(
    muster: Musters,
) -> None:
    """Both find out with the first login; the second login comes before the later one looks."""
    daemon = shop_of(muster, "logins:counted", size=2, concurrent=2)
    client, folder = daemon.client(), daemon.folder
    client.submit("shop.get", session="acme").result(60)

    def submit(name: str) -> Any:
        args = {"called": str(folder / f"{name}-called"), "until": str(folder / f"{name}-goes-on")}
        return client.submit("shop.out_once", args, session="acme")

    early, late = submit("early"), submit("late")
    for name in ("early", "late"):
        wait_for("both use the session", (folder / f"{name}-called").exists)
    (folder / "early-goes-on").touch()
    assert early.result(60) == "cookie-xx"
    (folder / "late-goes-on").touch()
    assert late.result(60) == "cookie-xx"
    assert (folder / "logins").read_text() == "xx"


def test_other_tasks_go_on_while_a_session_is_used(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:plain", size=2)
    client, until = daemon.client(), daemon.folder / "until"
    first = client.submit("shop.hold", {"until": str(until)}, session="acme")
    second = client.submit("shop.cookie", session="acme")
    assert client.submit("shop.environment").result(60)
    assert "session acme 1/1" in daemon.ctl("task", second.id).stdout
    until.touch()
    assert second.result(60) == ["shop.example"]
    assert first.status().state == "succeeded"


def test_the_example_of_the_documents_logs_in(muster: Musters, site: LoginSite) -> None:
    text = DOCUMENT.read_text()
    config, code = (
        text[text.index(first) :].partition("```")[0].replace("https://acme.example", site.url)
        for first in ("# watch.toml\n", "# acme.py: how to log in, for the parser\n")
    )
    config = config.replace("/orders", "/account").replace('count = ".orders"', 'user = ".user"')
    daemon = muster({}, start=False)
    daemon.config_path = daemon.folder / "watch.toml"
    daemon.config_path.write_text(config)
    (daemon.folder / "acme.py").write_text(code)
    daemon.popen_options["env"] = {
        **os.environ,
        "ACME_PASSWORD": PASSWORD,
        "MUSTERD_SUPERVISOR__RUNTIME_DIR": str(daemon.runtime),
        "MUSTERD_SUPERVISOR__STATE_DIR": str(daemon.state),
    }
    daemon.start()
    for _ in range(2):
        assert daemon.client().schedules.run("orders").result(timeout=60) == {"user": USER}
    assert (site.logins, site.tries) == (1, 1)


def test_a_schedule_uses_a_session(muster: Musters, site: LoginSite) -> None:
    daemon = parser_of(muster, site)
    config = daemon.config_path
    told = msgspec.json.decode(config.read_bytes())
    args = {"url": f"{site.url}/account", "select": {"user": ".user"}}
    told["schedule"] = {
        "look": {"task": "parser.extract", "args": args, "every": "1h", "session": "acme"}
    }
    config.write_bytes(msgspec.json.encode(told))
    assert daemon.ctl("reload").returncode == 0
    assert daemon.ctl("schedule", "run", "look").returncode == 0
    wait_for("the run has logged in", lambda: site.logins == 1)


# -- what is kept, and where it is not ----------------------------------------------------------


def test_nothing_of_a_session_is_readable_anywhere(muster: Musters, site: LoginSite) -> None:
    daemon = parser_of(muster, site)
    page = daemon.client().submit("parser.fetch", {"url": f"{site.url}/account"}, session="acme")
    page.result(timeout=60)
    (sid,) = site.sids
    daemon.stop()
    key = (daemon.folder / "state-keys" / "sessions.key").read_bytes().strip()
    for path, data in files_of(daemon):
        assert sid.encode() not in data, path
        assert key not in data or path.name == "sessions.key", path
    assert len(key) == 44


def test_the_generated_key_is_private_and_beside_the_state(
    muster: Musters, site: LoginSite
) -> None:
    daemon = parser_of(muster, site)
    path = daemon.folder / "state-keys" / "sessions.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.read_bytes()
    daemon.kill()
    daemon.start()
    assert path.read_bytes() == before


def test_the_key_is_in_no_environment(muster: Musters) -> None:
    secret = "k" * 40
    daemon = shop_of(muster, "logins:plain", sessions__key_secret="ACME_KEY")
    daemon.stop()
    daemon.popen_options["env"] = {**os.environ, "ACME_KEY": secret}
    daemon.start()
    client = daemon.client()
    assert client.submit("shop.cookie", session="acme").result(60) == ["shop.example"]
    assert secret not in str(client.submit("shop.environment").result(60))
    for process in daemon.processes():
        if process.pid != daemon.pid:  # whose environment its operator has made
            assert secret not in process.environ().values(), process
    assert not (daemon.folder / "state-keys").exists()


def test_a_result_with_a_cookie_of_the_session_is_refused(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:plain")
    with pytest.raises(TaskFailed, match="contains a cookie of session acme"):
        daemon.client().submit("shop.leak", session="acme").result(60)


def test_cookies_are_left_out_of_logs_and_errors(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:plain")
    with pytest.raises(TaskFailed) as failed:
        daemon.client().submit("shop.shout", session="acme").result(60)
    said = f"{failed.value}{failed.value.traceback}"
    assert "raised ***session acme***" in said
    assert "0123456789abcdef-plain" not in said
    assert "logged ***session acme***" in daemon.log()


@pytest.mark.parametrize("harm", ["key", "blob", "name"])
def test_a_session_that_cannot_be_opened_is_told_and_made_anew(
    muster: Musters, site: LoginSite, harm: str
) -> None:
    daemon = parser_of(muster, site)
    account(daemon, site)
    daemon.stop()
    if harm == "key":
        (daemon.folder / "state-keys" / "sessions.key").write_text("x" * 40)
        why = "it was encrypted with another key"
    else:
        with sqlite3.connect(daemon.state / "store.db") as store:
            query = "SELECT value FROM facts WHERE key = 'session:acme'"
            (value,) = store.execute(query).fetchone()
            changed = value[:-1] + bytes([value[-1] ^ 1]) if harm == "blob" else b"\x93\x01"
            store.execute("UPDATE facts SET value = ? WHERE key = 'session:acme'", (changed,))
        store.close()
        why = "its data were changed" if harm == "blob" else "its data are damaged"
    daemon.start()
    assert account(daemon, site) == {"user": USER}
    assert site.logins == 2
    assert f"session acme cannot be opened and is made anew: {why}" in daemon.log()


def test_without_a_key_nobody_logs_in_and_a_reload_of_the_pool_finds_the_new_one(
    muster: Musters, site: LoginSite, tmp_path: Path
) -> None:
    key = tmp_path / "sessions.key"
    key.write_text("0123456789" * 4)
    key.chmod(0o644)
    daemon = parser_of(muster, site, sessions__key_file=str(key))
    assert "event=session.no_key pool=parser" in daemon.log()
    for _ in range(2):
        with pytest.raises(TaskFailed, match="others may read or change it"):
            account(daemon, site)
    assert site.tries == 0, "a login that cannot be kept is made again by each task"
    key.chmod(0o600)
    assert daemon.ctl("reload", "parser").returncode == 0
    assert account(daemon, site) == {"user": USER}
    assert site.tries == 1


def test_without_a_login_a_session_that_cannot_be_opened_is_a_clear_error(muster: Musters) -> None:
    daemon = shop_of(muster)
    client = daemon.client()
    client.submit("shop.put", {"value": "a token of some length"}, session="acme").result(60)
    kept = client.submit("shop.get", session="acme").result(60)
    assert kept == {"https://shop.example": {"token": "a token of some length"}}
    daemon.stop()
    (daemon.folder / "state-keys" / "sessions.key").write_text("x" * 40)
    daemon.start()
    with pytest.raises(TaskFailed, match="musterctl sessions forget acme"):
        daemon.client().submit("shop.get", session="acme").result(60)


# -- errors -------------------------------------------------------------------------------------


def test_a_second_logged_out_is_a_failure_of_the_attempt(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:plain")
    client = daemon.client()
    client.submit("shop.cookie", session="acme").result(60)
    tell = daemon.folder / "told"
    with pytest.raises(TaskFailed, match="asks for a login"):
        client.submit("shop.always_out", {"tell": str(tell)}, session="acme").result(60)
    assert tell.read_text() == "called\n" * 2


def test_a_login_that_leaves_nothing_is_a_failure(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:nothing", retry__max_retries=0)
    with pytest.raises(TaskFailed, match="left no cookie and no storage"):
        daemon.client().submit("shop.cookie", session="acme").result(60)


def test_a_login_that_fails_fails_the_task(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:refused", retry__max_retries=0)
    with pytest.raises(TaskFailed, match="wants a second factor"):
        daemon.client().submit("shop.cookie", session="acme").result(60)


def test_a_login_that_is_async_is_refused_where_the_task_is_not(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:log_in")
    with pytest.raises(TaskFailed, match="is async, and this task is not"):
        daemon.client().submit("shop.cookie", session="acme").result(60)


def test_what_could_not_be_read_again_is_not_kept(muster: Musters) -> None:
    client = shop_of(muster).client()
    client.submit("shop.put", {"value": "text"}, session="acme").result(60)
    with pytest.raises(TaskFailed, match="cannot be kept: Expected `str`, got `int`"):
        client.submit("shop.put", {"value": 1}, session="acme").result(60)
    kept = {"https://shop.example": {"token": "text"}}
    assert client.submit("shop.get", session="acme").result(60) == kept


def test_a_task_uses_no_other_session_than_its_own(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:plain")
    client = daemon.client()
    with pytest.raises(TaskFailed, match="submit it with session = 'acme'"):
        client.submit("shop.other", {"name": "acme"}).result(60)
    with pytest.raises(InvalidTask, match="there is no session 'nobody'"):
        client.submit("shop.cookie", session="nobody").result(60)


def test_musterctl_submits_with_a_session(muster: Musters) -> None:
    daemon = shop_of(muster, "logins:plain")
    done = daemon.ctl("submit", "shop.cookie", "--session", "acme", "--wait")
    assert "shop.example" in done.stdout


# -- what people see ----------------------------------------------------------------------------


def test_musterctl_lists_sessions_and_forgets_one(muster: Musters, site: LoginSite) -> None:
    daemon = parser_of(muster, site)
    assert daemon.ctl("sessions").stdout.split()[-7:] == ["acme", *"----", "0", "0"]
    account(daemon, site)
    (sid,) = site.sids
    listed = daemon.ctl("--json", "sessions").stdout
    (shown,) = msgspec.json.decode(listed)["sessions"]
    assert shown["kept"] is True
    assert shown["site"] == "127.0.0.1"
    assert shown["bytes"] > 100
    assert sid not in listed
    assert daemon.ctl("sessions", "forget", "acme").stdout == "acme: forgotten\n"
    assert account(daemon, site) == {"user": USER}
    assert site.logins == 2
    nobody = daemon.ctl("sessions", "forget", "nobody")
    assert nobody.returncode == 4
    assert "no such session" in nobody.stderr


def test_a_task_that_uses_a_forgotten_session_keeps_nothing(muster: Musters) -> None:
    daemon = shop_of(muster)
    client, until = daemon.client(), daemon.folder / "until"
    held = client.submit("shop.change", {"until": str(until)}, session="acme")
    wait_for("the session is used", lambda: "1" in daemon.ctl("sessions").stdout.split()[-2])
    assert daemon.ctl("sessions", "forget", "acme").returncode == 0
    until.touch()
    held.result(60)
    assert client.submit("shop.get", session="acme").result(60) == {}


def test_check_config_looks_at_logins_and_keys(muster: Musters, tmp_path: Path) -> None:
    daemon = shop_of(muster, "logins:log_in")
    config = msgspec.json.decode(daemon.config_path.read_bytes())

    def check() -> "subprocess.CompletedProcess[str]":
        daemon.config_path.write_bytes(msgspec.json.encode(config))
        command = [*DAEMON, "check-config", "-c", str(daemon.config_path)]
        return subprocess.run(
            command, cwd=daemon.folder, capture_output=True, text=True, check=False
        )

    assert check().returncode == 0, check().stderr
    config["sessions"]["acme"]["login"] = "logins:nobody"
    config["sessions"]["key_file"] = str(tmp_path / "no-key")
    checked = check()
    assert checked.returncode == 78
    assert "module logins has no function 'nobody'" in checked.stderr
    assert "key 'sessions.key_file'" in checked.stderr
    config["sessions"] = {"acme": {}}
    config["pools"]["shop"]["sessions"] = []
    assert "no pool may use it" in check().stderr
