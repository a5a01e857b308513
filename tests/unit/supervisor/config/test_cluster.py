"""[cluster]: which databases and leases are allowed, that no password is shown, what it starts."""

from pathlib import Path
from typing import Any

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config import cluster
from musterd.supervisor.config.load import Loaded, flat, load
from musterd.supervisor.settings.diff import compare
from musterd.supervisor.settings.node import node_settings
from musterd.supervisor.settings.policy import fleet_policy

URL = "cluster.url=postgresql://node@db.example/queue"


def loaded(*sets: str, files: list[Path] | None = None) -> Loaded:
    return load(files or [], None, list(sets), {}, default_file=Path("/nonexistent"))


def problem(*sets: str, files: list[Path] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        loaded(*sets, files=files)
    return str(caught.value)


def written(folder: Path, text: str, mode: int = 0o600) -> list[Path]:
    path = folder / "musterd.toml"
    path.write_text(text)
    path.chmod(mode)
    return [path]


def test_without_a_database_a_machine_works_alone() -> None:
    config = loaded().config
    policy = fleet_policy(config)
    assert not config.cluster.wanted
    assert (policy.cluster, policy.fence_stops) == ("", False)
    assert not any(pool.clustered for pool in policy.pools)


@pytest.mark.parametrize(
    "given", [URL, "cluster.url_file=/etc/musterd/url", "cluster.url_secret=QUEUE_URL"]
)
def test_a_database_makes_a_node_of_all_pools(given: str) -> None:
    policy = fleet_policy(loaded(given, "cluster.fence=stop").config)
    assert policy.cluster
    assert policy.fence_stops
    assert all(pool.clustered for pool in policy.pools)


def test_only_the_named_pools_are_shared(tmp_path: Path) -> None:
    text = """
    cluster = {url_secret = "QUEUE_URL", pools = ["parser"]}
    pools = {parser = {}, other = {worker = "myapp.jobs"}}
    """
    policy = fleet_policy(loaded(files=written(tmp_path, text)).config)
    assert {pool.name: pool.clustered for pool in policy.pools} == {"parser": True, "other": False}


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["cluster.url=mysql://db/queue"], "cluster.url"),
        (["cluster.url=host=db"], "cluster.url"),
        ([URL, "cluster.url_secret=QUEUE_URL"], "cluster.url_secret"),
        (["cluster.url_file=/a", "cluster.url_secret=QUEUE_URL"], "cluster.url_secret"),
        (["cluster.url_file=relative"], "cluster.url_file"),
        (["cluster.url_secret=not a name"], "cluster.url_secret"),
        (["cluster.lease=30s", "cluster.node=a"], "cluster"),
        ([URL, "cluster.lease=4s"], "cluster.lease"),
        ([URL, "cluster.lease=2h"], "cluster.lease"),
        ([URL, 'cluster.pools=["nothing"]'], "cluster.pools"),
        ([URL, "cluster.fence=kill"], "cluster.fence"),
        ([URL, "cluster.node=" + "a" * 300], "cluster.node"),
        (["cluster.nodes=a"], "cluster.nodes"),
    ],
)
def test_what_cannot_work_is_refused(sets: list[str], key: str) -> None:
    assert f"'{key}'" in problem(*sets)


def test_a_password_is_not_shown() -> None:
    config = loaded("cluster.url_file=/a").config
    secret = cluster.ClusterConfig(url="postgresql://node:hunter2@db.example/queue")
    shown: Any = flat(type(config)(cluster=secret))["cluster.url"]
    assert "hunter2" not in str(shown)
    assert "hidden" in str(shown)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://node:hunter2@db.example/queue",
        "postgresql://node@db.example/queue?password=hunter2",
        "postgresql://node@db.example/queue?sslmode=require&sslpassword=hunter2",
        "postgresql://node:hunter2@[db.example/queue",
    ],
)
def test_a_password_in_a_file_that_everybody_reads_is_refused(tmp_path: Path, url: str) -> None:
    text = f'cluster = {{url = "{url}"}}'
    told = problem(files=written(tmp_path, text, 0o644))
    assert "cluster.url" in told
    assert "chmod" in told
    assert "hunter2" not in told
    assert loaded(files=written(tmp_path, text, 0o640)).config.cluster.wanted
    harmless = 'cluster = {url = "postgresql://node@db.example/queue"}'
    assert loaded(files=written(tmp_path, harmless, 0o644)).config.cluster.wanted


def test_a_password_on_the_command_line_is_refused() -> None:
    told = problem("cluster.url=postgresql://node:hunter2@db.example/queue")
    assert "lists processes" in told
    assert "hunter2" not in told


def test_no_pool_gets_the_secret_of_the_cluster() -> None:
    told = problem("cluster.url_secret=QUEUE_URL", 'pools.parser.secrets=["QUEUE_URL"]')
    assert "cluster.url_secret" in told


def test_a_change_needs_a_restart_and_the_old_database_stays() -> None:
    before, after = loaded("cluster.url_secret=A"), loaded("cluster.url_secret=B")
    difference = compare(before, after)
    assert difference.restart == ["cluster.url_secret"]
    assert difference.in_force.cluster.url_secret == "A"


def test_the_name_of_a_node_is_its_host_unless_given() -> None:
    assert node_settings(loaded(URL).config).node
    assert node_settings(loaded(URL, "cluster.node=shed").config).node == "shed"


def test_what_is_missing_on_this_machine_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = cluster.ClusterConfig(url_file=str(tmp_path / "url"))
    with pytest.raises(ConfigurationError, match=r"cluster\.url_file.*cannot be read"):
        cluster.check(given)
    (tmp_path / "url").write_text("postgresql://node@db.example/queue")
    (tmp_path / "url").chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod"):
        cluster.check(given)
    (tmp_path / "url").chmod(0o600)
    cluster.check(given)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"musterd\[cluster\]"):
        cluster.check(given)
    cluster.check(cluster.ClusterConfig())
