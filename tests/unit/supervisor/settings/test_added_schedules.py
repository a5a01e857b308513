"""Sections that are added at run time: as strict as files, several problems at once."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.supervisor.config.load import load
from musterd.supervisor.config.schema import Config
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.settings.added_schedules import read_added
from musterd.supervisor.settings.policy import fleet_policy
from musterd.supervisor.text.units import SECOND_NS

POOLS = '[pools.shop]\nworker = "shop:Shop"\n[pools.off]\nworker = "shop:Shop"\nenabled = false\n'
GOOD = {"task": "shop.check", "every": "5m"}
CLUSTER = '[cluster]\nurl_secret = "CLUSTER"\npools = ["shop"]\n'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path, POOLS)


def configured(folder: Path, text: str) -> Config:
    path = folder / "musterd.toml"
    path.write_text(text)
    return load([path], None, (), {}).config


def problems(config: Config, keys: Any, name: str = "kites") -> list[str]:
    return read_added(config, name, msgspec.msgpack.encode(keys)).problem.splitlines()


def test_a_section_becomes_the_policy_that_a_file_makes_of_it(
    tmp_path: Path, config: Config
) -> None:
    section = msgspec.msgpack.encode({**GOOD, "args": {"url": "https://site.example/a"}})
    read = read_added(config, "kites", section)
    assert read.problem == ""
    assert read.policy is not None
    assert read.policy.timing == Every(300 * SECOND_NS)
    text = (
        '[schedule.kites]\ntask = "shop.check"\nevery = "5m"\nargs.url = "https://site.example/a"'
    )
    assert (read.policy,) == fleet_policy(configured(tmp_path, f"{POOLS}{text}")).schedules


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"task": "shop.check"}, ["'every': is missing"]),
        ({**GOOD, "evry": 1}, ["'evry': unknown key: did you mean 'every'?"]),
        (
            {**GOOD, "every": "5x", "overlap": "no"},
            ["'every': value \"5x\" has the unit", "'overlap': value \"no\" is neither true"],
        ),
        ({**GOOD, "task": "cafe.check"}, ["has no pool: the pools are off, shop"]),
        ({**GOOD, "task": "off.check"}, ["has a pool that is not enabled"]),
        ({**GOOD, "args": {"password": "p"}}, ["named in supervisor.redact"]),
        ({**GOOD, "args": {"x": None}}, ["is neither text, number"]),
        ({**GOOD, "args": {"x": b"bytes"}}, ["is neither text, number"]),
        ({**GOOD, "login": "os:system"}, ["'login': is for configuration files only"]),
        ({**GOOD, 7: 1}, ["the name 7 is not text"]),
        ([], ["is not a table of keys"]),
    ],
)
def test_every_mistake_is_named(config: Config, keys: Any, told: list[str]) -> None:
    found = problems(config, keys)
    assert len(found) == len(told)
    for problem, words in zip(found, told, strict=True):
        assert problem.startswith("schedule 'kites': ")
        assert words in problem


@pytest.mark.parametrize("name", ["Kites", "a.b", "a" * 41, "7", "a\nb"])
def test_a_name_is_one_that_a_file_may_have(config: Config, name: str) -> None:
    [problem] = problems(config, GOOD, name)
    assert "use lower-case letters" in problem


def test_what_is_not_msgpack_is_told(config: Config) -> None:
    assert "cannot be read" in read_added(config, "kites", b"\xc1").problem
    assert "cannot be read" in read_added(config, "kites", b"\x91" * 10_000).problem


def test_a_pool_of_a_cluster_is_refused(tmp_path: Path) -> None:
    [problem] = problems(configured(tmp_path, POOLS + CLUSTER), GOOD)
    assert "musterctl cluster apply" in problem
