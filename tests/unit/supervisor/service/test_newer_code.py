"""What is newer on disk than what a pool runs, asked of one thread at a time."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from musterd.ipc.user_code import Source
from musterd.supervisor.api.status import NewerCode
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import Config
from musterd.supervisor.processes.spawner import Code
from musterd.supervisor.service import newer_code
from musterd.supervisor.service.newer_code import CHECK_SECONDS, WAITING_MAX, CodeChecks


class Calls:
    """Background calls that run when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def run(self, _name: str, work: Any, then: Any) -> None:
        self.begun.append(lambda: then(work()))


def running(pool: str, path: Path | str = "/nowhere", **fields: Any) -> newer_code.RunningCode:
    fields = {"at_ns": 0, "secrets_dir": "", "secrets": ("*",), **fields}
    return newer_code.RunningCode(pool, (Source(str(path), "", 0),), **fields)


def pool_of(build: str, rollout: str = "") -> Any:
    return SimpleNamespace(build=build, rollout=SimpleNamespace(build=rollout) if rollout else None)


def test_of_a_pool_that_is_being_replaced_the_next_code_counts() -> None:
    config = Config(pools={name: PoolConfig(worker="x:Y") for name in ("a", "b", "c")})
    code = {
        key: Code((), number) for number, key in enumerate([("a", "1"), ("b", "1"), ("b", "2")])
    }
    fleet: Any = SimpleNamespace(
        pools={
            "a": pool_of("1"),
            "b": pool_of("1", rollout="2"),
            "c": pool_of("1"),  # loads its first class
            "gone": pool_of("1"),  # drains: it is not configured any more
        }
    )
    found = newer_code.running_code(fleet, lambda *key: code.get(key), config)
    assert [(each.pool, each.at_ns) for each in found] == [("a", 0), ("b", 2)]


def test_changed_files_of_code_and_of_the_pools_own_secrets_are_told(tmp_path: Path) -> None:
    for name in ("SHOP_KEY", "SHOP_OLD", "OTHER"):
        (tmp_path / name).write_text(name)
    at_ns = (tmp_path / "SHOP_OLD").stat().st_ctime_ns
    while (
        tmp_path / "SHOP_KEY"
    ).stat().st_ctime_ns <= at_ns:  # until the file system's clock ticks
        (tmp_path / "SHOP_KEY").write_text("new")
        (tmp_path / "OTHER").write_text("new")
    was = (tmp_path / "SHOP_OLD").stat()
    os.utime(tmp_path / "SHOP_KEY", ns=(was.st_atime_ns, was.st_mtime_ns))  # as `mv` keeps it
    shop = running("shop", tmp_path / "SHOP_KEY", at_ns=at_ns, secrets=("SHOP_*",))
    found = newer_code.newer_code([shop])
    assert found == [NewerCode(pool="shop", files=[str(tmp_path / "SHOP_KEY")])]
    with_secrets = running("shop", at_ns=at_ns, secrets_dir=str(tmp_path), secrets=("SHOP_*",))
    (told,) = newer_code.newer_code([with_secrets])
    assert told.secrets == ["SHOP_KEY"]
    assert (
        newer_code.newer_code([running("shop", secrets_dir=str(tmp_path / "none"))])[0].secrets
        == []
    )


def test_nothing_new_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("")
    assert newer_code.newer_code([running("shop", tmp_path / "code.py")]) == []


def test_one_question_at_a_time_and_so_many_in_line() -> None:
    calls: Any = Calls()
    checks = CodeChecks(lambda: [running("shop"), running("other")], calls)
    asked = [checks.ask({"shop"}) for _ in range(WAITING_MAX + 2)]
    assert len(calls.begun) == 1
    assert [check.over for check in asked] == [False] * (WAITING_MAX + 1) + [True]
    assert asked[-1].result == []
    while calls.begun:
        calls.begun.pop()()
    assert all(check.over for check in asked)
    assert [each.pool for each in asked[0].result] == ["shop"]


def test_a_file_system_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(newer_code.time, "monotonic", lambda: now)
    calls: Any = Calls()
    check = CodeChecks(lambda: [running("shop")], calls).ask({"shop"})
    assert not check.over
    now = CHECK_SECONDS + 1
    assert (check.over, check.result) == (True, [])
