"""Sessions on two real daemons with one PostgreSQL: logged in once, whoever runs the task."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from nodes import Nodes, kill_all, nodes_of
from postgres import Server

from musterd import InvalidTask, TaskFailed
from support.daemon import Muster
from support.login_site import PASSWORD, USER, LoginSite, login_site
from support.waiting import wait_for

LOGINS = """
from urllib.parse import urlencode

FORM = {"Content-Type": "application/x-www-form-urlencoded"}

async def log_in(session, url, user, password):
    body = urlencode({"user": user, "password": password})
    await session.worker.fetch(session.ctx, url, method="POST", headers=FORM, body=body)
"""
PARSER = "musterd.workers.parser:ParserWorker"


@pytest.fixture
def nodes(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    name = f"sessions{abs(hash(request.node.name)) % 10**9}"
    with nodes_of(server, tmp_path, name) as made:
        yield made


@pytest.fixture
def site() -> Iterator[LoginSite]:
    with login_site() as site:
        yield site


def start(
    nodes: Nodes,
    site: LoginSite,
    name: str,
    *,
    shared: bool = True,
    password: str = PASSWORD,
    pools: tuple[str, ...] = ("jobs",),
    **session: Any,
) -> Muster:
    """Start a node; `shared`: with the key that all have."""
    acme = {
        "login": "logins:log_in",
        "args": {"url": f"{site.url}/login", "user": USER, "password": {"$secret": "SHOP"}},
        "logged_out": [f"{site.url}/login*"],
        **session,
    }
    key = nodes.folder / "key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    settings: dict[str, Any] = {"sessions__key_file": str(key)} if shared else {}
    path = f"{nodes.folder / name}"
    form = urlencode({"user": USER, "password": password})
    pool = {"worker": PARSER, "env": {"SHOP": password, "FORM": form, "PYTHONPATH": path}}
    node = nodes.make(name, pools=pools, pool=pool, sessions__acme=acme, **settings)
    (node.folder / "logins.py").write_text(LOGINS)
    node.start(wait=False)
    nodes.wait_for(node)
    return node


def account(node: Muster, site: LoginSite, count: int = 1) -> list[Any]:
    args = {"url": f"{site.url}/account", "select": {"user": ".user"}}
    with node.client() as client:
        tasks = [client.submit("jobs.extract", args, session="acme") for _ in range(count)]
        return [task.result(timeout=120) for task in tasks]


def test_a_session_moves_to_another_node_when_its_own_is_killed(
    nodes: Nodes, site: LoginSite
) -> None:
    a = start(nodes, site, "a")
    assert account(a, site, 2) == [{"user": USER}] * 2
    b = start(nodes, site, "b")
    kill_all(a)
    assert account(b, site, 2) == [{"user": USER}] * 2
    assert (site.logins, site.refused) == (1, 0)
    kept = nodes.database.sql("SELECT value FROM musterd.state WHERE key = 'session:acme'")
    assert len(kept) == 1
    assert all(sid.encode() not in bytes(kept[0][0]) for sid in site.sids)


def test_tasks_of_both_nodes_never_race_for_one_login(nodes: Nodes, site: LoginSite) -> None:
    a, b = start(nodes, site, "a"), start(nodes, site, "b")
    args = {"url": f"{site.url}/account", "select": {"user": ".user"}}
    with a.client() as of_a, b.client() as of_b:
        tasks = [
            client.submit("jobs.extract", args, session="acme")
            for _ in range(8)
            for client in (of_a, of_b)
        ]
        assert [task.result(timeout=120) for task in tasks] == [{"user": USER}] * 16
    assert (site.logins, site.refused, site.most_inside) == (1, 0, 1)


def test_without_a_shared_key_a_session_is_refused(nodes: Nodes, site: LoginSite) -> None:
    a = start(nodes, site, "a", shared=False)
    with pytest.raises(InvalidTask, match="a key_secret or key_file of"):
        account(a, site)


def test_a_site_that_refuses_logins_is_left_alone_by_all_nodes_until_a_person_says_so(
    nodes: Nodes, site: LoginSite
) -> None:
    rules = {"password": "wrong", "login_failures": 2, "login_pause": "1h"}
    a, b = (start(nodes, site, name, **rules) for name in ("a", "b"))
    args = {"url": f"{site.url}/account"}

    def ask(node: Muster) -> TaskFailed:
        with node.client() as client, pytest.raises(TaskFailed) as failed:
            client.submit("jobs.extract", args, session="acme", max_retries=0).result(timeout=120)
        return failed.value

    for node in (a, b):
        assert ask(node).type != "SessionHeld"
    assert site.tries == 2
    for node in (a, b, a, b):
        held = ask(node)
        assert (held.kind, held.type) == ("open", "SessionHeld")
        assert "musterctl --cluster sessions reset acme" in str(held)
    assert site.tries == 2
    wait_for("it is told", lambda: any("session.held" in node.log() for node in (a, b)))
    teller, other = (a, b) if "session.held" in a.log() else (b, a)
    wait_for("both show it", lambda: all("held" in node.ctl("sessions").stdout for node in (a, b)))
    assert "session.held" not in other.log()
    refused = other.ctl("sessions", "reset", "acme")
    assert (refused.returncode, "--cluster sessions reset acme" in refused.stderr) == (1, True)
    other.kill()
    other.start()
    nodes.wait_for(other)
    assert ask(other).type == "SessionHeld"
    done = other.ctl("--cluster", "-c", str(other.config_path), "sessions", "reset", "acme")
    assert done.stdout == "acme: logs in again when a task needs it\n", done.stderr
    assert ask(b).type != "SessionHeld"
    assert site.tries == 3
    wait_for("its end is told", lambda: "session.resumed" in teller.log())


def by_task(nodes: Nodes, site: LoginSite, name: str, **session: Any) -> Muster:
    """Start a node where a task of pool `door` logs in for tasks of pool `jobs`."""
    args = {
        "url": f"{site.url}/login",
        "method": "POST",
        "headers": {"Content-Type": "application/x-www-form-urlencoded"},
        "body": {"$secret": "FORM"},
    }
    login = {"login": "", "login_task": "door.fetch", "args": args}
    return start(nodes, site, name, pools=("jobs", "door"), **login, **session)


def test_a_login_task_runs_once_for_both_nodes_while_all_tasks_wait(
    nodes: Nodes, site: LoginSite
) -> None:
    a, b = by_task(nodes, site, "a"), by_task(nodes, site, "b")
    args = {"url": f"{site.url}/account", "select": {"user": ".user"}}
    with a.client() as of_a, b.client() as of_b:
        tasks = [
            client.submit("jobs.extract", args, session="acme")
            for _ in range(8)
            for client in (of_a, of_b)
        ]
        assert [task.result(timeout=120) for task in tasks] == [{"user": USER}] * 16
        assert {task.status().attempt for task in tasks} == {1}
        assert (site.logins, site.refused, site.most_inside) == (1, 0, 1)
        site.sids.clear()  # the site forgets who is logged in
        assert account(a, site, 4) == [{"user": USER}] * 4
    assert site.logins == 2
    logins = nodes.database.sql("SELECT name, state FROM musterd.done WHERE id LIKE 'login-%%'")
    assert logins == [("door.fetch", 4)] * 2
    kill_all(a)
    site.sids.clear()
    assert account(b, site, 2) == [{"user": USER}] * 2
    assert site.logins == 3


def test_a_login_task_that_fails_fails_who_waited_and_is_counted_by_all(
    nodes: Nodes, site: LoginSite
) -> None:
    rules = {"password": "wrong", "login_failures": 2, "login_pause": "1h"}
    a, b = (by_task(nodes, site, name, **rules) for name in ("a", "b"))
    args = {"url": f"{site.url}/account"}

    def ask(node: Muster) -> TaskFailed:
        with node.client() as client, pytest.raises(TaskFailed) as failed:
            client.submit("jobs.extract", args, session="acme", max_retries=0).result(timeout=120)
        return failed.value

    for node in (a, b):
        failed = ask(node)
        assert failed.type == "LoginFailed"
        assert "of session 'acme' did not work" in str(failed)
    assert site.tries == 2
    for node in (a, b):
        assert ask(node).type == "SessionHeld"
    assert site.tries == 2
    shown = b.ctl("--cluster", "-c", str(b.config_path), "sessions").stdout
    assert "acme: 2 login(s) failed: " in shown
