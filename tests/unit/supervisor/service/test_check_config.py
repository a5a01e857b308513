"""What check-config remarks about a valid configuration."""

from pathlib import Path

import pytest

from musterd.supervisor.config.load import load
from musterd.supervisor.service.check_config import remarks_of

SHARED = '[cluster]\nurl_file = "/etc/musterd/cluster.url"\npools = ["parser"]\n'
KEY = '[sessions]\nkey_secret = "KEY"\n'
ACME = '[sessions.acme]\nlogin = "shops.acme:log_in"\n'
POOLS = "[pools.parser]\n[pools.browser]\n"


def remarks(folder: Path, *parts: str) -> list[str]:
    file = folder / "musterd.toml"
    file.write_text("".join(parts))
    return list(remarks_of(load([file], None, [], {}, default_file=file).config))


def test_sessions_that_stay_on_their_node_are_named(tmp_path: Path) -> None:
    stays, refused = remarks(tmp_path, SHARED, ACME, "[sessions.shop]\n", POOLS)
    assert stays == "sessions of pool(s) browser stay on this node: acme, shop"
    assert "pool(s) parser are refused with these sessions: acme, shop: give" in refused
    assert "sessions.key_secret or sessions.key_file" in refused
    assert remarks(tmp_path, KEY, SHARED, ACME, POOLS) == [
        "sessions of pool(s) browser stay on this node: acme"
    ]
    assert remarks(tmp_path, KEY, SHARED, ACME, POOLS, "sessions = []\n") == []


def test_a_login_task_of_a_pool_that_is_shared_alone_is_named(tmp_path: Path) -> None:
    task = '[sessions.acme]\nlogin_task = "browser.log_in"\n'
    stays, refused = remarks(tmp_path, KEY, SHARED, task, POOLS)
    assert stays == "sessions of pool(s) browser stay on this node: acme"
    assert refused.endswith("acme: have the login_task and its pool shared, or neither")


@pytest.mark.parametrize("parts", [(ACME, POOLS), (SHARED, POOLS), (POOLS,)])
def test_there_is_nothing_to_remark_without_a_cluster_or_sessions(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    assert remarks(tmp_path, *parts) == []


def test_a_few_of_many_sessions_are_named(tmp_path: Path) -> None:
    many = "".join(f"[sessions.s{number:03}]\n" for number in range(200))
    [stays, _] = remarks(tmp_path, SHARED, many, POOLS)
    assert stays.endswith("s008, s009 and 190 more")
