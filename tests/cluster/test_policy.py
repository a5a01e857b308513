"""Real daemons and the policy that they share: what is applied holds, and what differs is said."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from postgres import Cluster, Server
from test_node import make_node, prepared

from musterd import TaskFailed
from musterd.supervisor.cluster.engine import PolicyChanged
from musterd.supervisor.config.load import load_part
from musterd.supervisor.config.shared import SharedConfig
from musterd.supervisor.ctl import main
from musterd.supervisor.settings.shared_policy import shared_policy
from support.daemon import Muster
from support.waiting import wait_for

WORKER = """
from musterd import task

@task(target="url")
def count(ctx, url: str) -> int:
    with open(__file__ + ".runs", "a") as file:
        file.write(url + "\\n")
    raise ConnectionError("refused")
"""


@pytest.fixture(scope="module")
def database(server: Server) -> Cluster:
    return prepared(server, "policies")


@contextmanager
def running(database: Cluster, folder: Path, **settings: Any) -> Iterator[Muster]:
    muster = make_node(database, folder, "shed", WORKER, **settings).start()
    try:
        yield muster
    finally:
        muster.stop()


def apply(database: Cluster, folder: Path, text: str) -> int:
    """Apply a file as people do, through PostgreSQL."""
    file = folder / "shared.toml"
    file.write_text(text)
    url = folder / "admin"
    url.write_text(
        f"postgresql://postgres@/{database.name}?host={database.server.folder}&port=5432"
    )
    url.chmod(0o600)
    return main(["cluster", "apply", "--url-file", str(url), str(file)])


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["cluster", "show", "--url-file", str(folder / "admin")]) == 0
    return capsys.readouterr().out


def runs(node: Muster) -> int:
    path = node.folder / "jobs.py.runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


SHARED = """[retry]
max_retries = 1
base = "10ms"

[targets."shop.example"]
max_concurrent = 2
"""


def test_a_policy_that_is_applied_holds_on_the_node_and_is_shown(
    database: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database.reset()
    own = {"retry__max_retries": 5, "targets__other.example": {"rate": "1/s"}}
    with running(database, tmp_path, **own) as node:
        wait_for("what is not shared is said", lambda: "no policy is applied" in node.log())
        assert "retry, targets.other.example: each machine has its own" in node.log()
        assert apply(database, tmp_path, SHARED) == 0
        told = capsys.readouterr().out
        assert 'targets."shop.example".max_concurrent: (not set) -> 2' in told
        assert "version 1 is applied" in told
        assert SHARED in shown(tmp_path, capsys) + "\n"
        wait_for("what differs is said", lambda: "differs from the policy" in node.log())
        assert "retry, targets.other.example: policy 1 of the cluster holds" in node.log()
        with node.client() as client, pytest.raises(TaskFailed):
            client.submit("jobs.count", {"url": "https://shop.example/x"}).result(timeout=60)
        assert runs(node) == 2  # as the cluster says, not as the node does


def test_a_node_that_starts_later_follows_the_policy_too(database: Cluster, tmp_path: Path) -> None:
    database.reset()
    assert apply(database, tmp_path, SHARED) == 0
    with running(database, tmp_path) as node:
        with node.client() as client, pytest.raises(TaskFailed):
            client.submit("jobs.count", {"url": "https://shop.example/x"}).result(timeout=60)
        assert runs(node) == 2
        assert "differs from the policy" not in node.log()


def test_a_reload_says_what_differs(database: Cluster, tmp_path: Path) -> None:
    database.reset()
    assert apply(database, tmp_path, SHARED) == 0
    with running(database, tmp_path) as node:
        with node.client() as client:
            client.submit("jobs.count", {"url": "x"}, max_retries=0).ack()
        config = msgspec.json.decode(node.config_path.read_bytes())
        config["targets"] = {"shop.example": {"max_concurrent": 9}}
        node.config_path.write_bytes(msgspec.json.encode(config))
        assert node.ctl("reload").returncode == 0
        wait_for("it is said", lambda: "differs from the policy" in node.log())
        assert "targets.shop.example: policy 1 of the cluster holds" in node.log()


def test_what_cannot_be_applied_is_said_and_changes_nothing(
    database: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database.reset()
    assert apply(database, tmp_path, '[targets."shop.example"]\nrate = "fast"\n') == 1
    error = capsys.readouterr().err
    assert 'targets."shop.example".rate\': value "fast"' in error
    assert apply(database, tmp_path, '[targets."shop.example"]\nclass = "gold"\n') == 1
    assert "is not a class of [classes]" in capsys.readouterr().err
    assert "nothing is applied yet" in shown(tmp_path, capsys)


def test_of_two_that_apply_at_once_one_is_told(
    database: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database.reset()
    from musterd.supervisor.cluster.postgres import PostgresEngine

    usual = PostgresEngine.apply

    def slow(self: PostgresEngine, policy: object, former: int) -> int:
        other = database.engine()
        file = tmp_path / "other.toml"
        file.write_text("[retry]\nmax_retries = 7\n")
        usual(other, shared_policy(load_part(SharedConfig, file)[0]), former)
        with pytest.raises(PolicyChanged):
            usual(self, policy, former)  # type: ignore[arg-type]
        return usual(self, policy, former)  # type: ignore[arg-type]

    monkeypatch.setattr(PostgresEngine, "apply", slow)
    assert apply(database, tmp_path, "[retry]\nmax_retries = 1\n") == 1
    assert "somebody else has just applied another policy" in capsys.readouterr().err
    assert "max_retries = 7" in shown(tmp_path, capsys)
    database.close()
