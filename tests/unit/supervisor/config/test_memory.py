"""The keys of [memory]."""

from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.load import Loaded, load
from musterd.supervisor.core.model.policy import MemoryPolicy
from musterd.supervisor.settings.policy import fleet_policy


def loaded(tmp_path: Path, text: str) -> Loaded:
    path = tmp_path / "musterd.toml"
    path.write_text(text)
    return load([path], None, [], {})


def test_the_defaults_are_those_of_the_core(tmp_path: Path) -> None:
    assert fleet_policy(loaded(tmp_path, "").config).memory == MemoryPolicy()


def test_every_key_is_heeded(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """
[memory]
enabled = false
warning = "50%"
critical = "60%"
margin = "2%"
pressure = 0.2
check_interval = "500ms"
calm = "3s"
patience = "4s"
statistics = "1m"
[pools.a]
worker = "a:B"
sacrifice = true
""",
    ).config
    policy = fleet_policy(config)
    assert policy.memory == MemoryPolicy(
        enabled=False,
        warning=0.5,
        critical=0.6,
        margin=0.02,
        pressure=0.2,
        calm_ns=3 * 10**9,
        patience_ns=4 * 10**9,
    )
    assert policy.pools[0].sacrifice
    assert (config.memory.check_interval_ns, config.memory.statistics_ns) == (5 * 10**8, 6 * 10**10)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('warning = "90%"', 'memory.warning\': value "90%" is not below critical (85%): lower it'),
        ('margin = "70%"', 'memory.margin\': value "70%" is not below warning (70%): lower it'),
        ('check_interval = "1ms"', 'is too short: give at least "100ms"'),
        ('warning = "a lot"', "memory.warning"),
        ("percent = 3", "memory.percent"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        loaded(tmp_path, f"[memory]\n{text}\n")
    assert told in str(refused.value)
