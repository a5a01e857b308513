"""Sessions on two real daemons with one PostgreSQL: logged in once, whoever runs the task."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Nodes, kill_all, nodes_of
from postgres import Server

from musterd import InvalidTask
from support.daemon import Muster
from support.login_site import PASSWORD, USER, LoginSite, login_site

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


def start(nodes: Nodes, site: LoginSite, name: str, *, shared: bool = True) -> Muster:
    """Start a node; `shared`: with the key that all have."""
    acme = {
        "login": "logins:log_in",
        "args": {"url": f"{site.url}/login", "user": USER, "password": {"$secret": "SHOP"}},
        "logged_out": [f"{site.url}/login*"],
    }
    key = nodes.folder / "key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    settings: dict[str, Any] = {"sessions__key_file": str(key)} if shared else {}
    path = f"{nodes.folder / name}"
    pool = {"worker": PARSER, "env": {"SHOP": PASSWORD, "PYTHONPATH": path}}
    node = nodes.make(name, pools=("jobs",), pool=pool, sessions__acme=acme, **settings)
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
