"""docs/cluster.md: its examples work as printed, and its numbers are those of the program."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import Server, servers

from musterd.supervisor.cluster.migrate import migrate
from musterd.supervisor.cluster.postgres import PostgresEngine
from support.daemon import Muster
from support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/cluster.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE)
COMMANDS = sorted(
    {
        tuple(found[1].split())
        for found in re.finditer(
            r"`musterctl (?:--url-file \S+ )?((?:--cluster |cluster )[a-z]+)", PAGE
        )
    }
)
WORKER = """
from musterd import task

@task
def count(ctx, x: int) -> int:
    with ctx.lock("counting", 10):
        ctx.state.save(x)
        return x + (ctx.state.load() or 0)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server on which the page's first steps were taken, by the users that it names."""
    first, granted = [text for kind, text in BLOCKS if kind == "sql"]
    with servers() as server:
        for statement in filter(str.strip, first.split(";")):
            server.execute(statement)
        migrate(server.url("tasks", "muster_owner"))
        owner = server.url("tasks", "muster_owner")
        subprocess.run(["psql", "-q", "-v", "ON_ERROR_STOP=1", "-c", granted, owner], check=True)
        yield server


def musterctl(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "musterd.supervisor.ctl", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def file(name: str) -> str:
    (text,) = [text for kind, text in BLOCKS if text.startswith(f"# {name}\n")]
    return str(text)


def test_a_node_works_with_the_users_of_the_page_and_has_the_connections_it_says(
    server: Server, tmp_path: Path
) -> None:
    settings = tomllib.loads(file("node.toml"))["cluster"]
    url = tmp_path / "cluster.url"
    url.write_text(
        f"postgresql://muster_node:second@/tasks?host={server.folder}&port=5432&sslmode=prefer"
    )
    url.chmod(0o600)
    (tmp_path / "jobs.py").write_text(WORKER)
    pool = {"worker": "jobs", "env": {"PYTHONPATH": str(tmp_path)}}
    keys = {f"cluster__{key}": value for key, value in settings.items()}
    node = Muster(tmp_path, {"jobs": pool}, **{**keys, "cluster__url_file": str(url)})
    node.start()
    try:
        with node.client() as client:
            assert client.submit("jobs.count", {"x": 2}).result(timeout=60) == 4
            task = client.submit("jobs.count", {"x": 3})
            assert task.result(timeout=60) == 6
            assert client.task(task.id).status().state == "succeeded"
        stated = re.search(r"A node has up to (\d+):", PAGE)
        assert stated is not None
        query = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'muster_node'"
        wait_for("all connections", lambda: server.execute(query) == [(int(stated[1]),)])
    finally:
        node.stop()
    assert server.execute(query) == [(0,)]


def test_the_policy_of_the_page_is_applied_and_shown(server: Server, tmp_path: Path) -> None:
    policy, owner = tmp_path / "policy.toml", tmp_path / "owner.url"
    policy.write_text(file("policy.toml"))
    owner.write_text(server.url("tasks", "muster_owner"))
    owner.chmod(0o600)
    done = musterctl("--url-file", str(owner), "cluster", "apply", str(policy))
    assert done.returncode == 0, done.stderr
    done = musterctl("--url-file", str(owner), "cluster", "show")
    assert "shop.example" in done.stdout, done.stderr


def test_several_servers_may_be_given(server: Server) -> None:
    """As with Patroni: the one that takes writes is found."""
    (text,) = [text for _, text in BLOCKS if text.startswith("postgresql://muster_node")]
    hosts = re.search(r"@(.*?)/", text)
    assert hosts is not None
    url = text.strip().replace(hosts[1], "").replace("sslmode=verify-full", "sslmode=prefer")
    nowhere = server.folder / "nowhere"
    engine = PostgresEngine(f"{url}&host={nowhere},{server.folder}&port=5432,5432")
    assert engine.nodes() is not None
    engine.close()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_page_exists(words: tuple[str, ...]) -> None:
    done = musterctl(*words, "--help")
    assert done.returncode == 0, done.stderr
