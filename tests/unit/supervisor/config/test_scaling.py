"""min, max and workers_max: the core decides by their values."""

import re
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.resilience.policy import MILLISECOND_NS, SECOND_NS
from musterd.supervisor.config.load import load
from musterd.supervisor.core.model.policy import FleetPolicy, ScalingPolicy
from musterd.supervisor.settings.policy import fleet_policy

ROOT = Path(__file__).parents[4]


def policy(*sets: str) -> FleetPolicy:
    return fleet_policy(load(None, None, list(sets), {}, default_file=Path("/nonexistent")).config)


def problems(*sets: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        policy(*sets)
    return str(caught.value).replace("--set: ", "").splitlines()


def scaling(*sets: str) -> ScalingPolicy | None:
    return policy(*(f"pools.parser.{each}" for each in sets)).pools[0].scaling


def test_a_pool_without_min_and_max_keeps_its_size() -> None:
    assert scaling("size=3") is None
    assert scaling("size=3", "min=3", "max=3") is None


def test_what_is_not_given_is_the_size() -> None:
    assert scaling("size=3", "min=1") == ScalingPolicy(1, 3)
    assert scaling("size=3", "max=9") == ScalingPolicy(3, 9)
    assert scaling("size=3", "min=0", "max=9") == ScalingPolicy(0, 9)


def test_how_eagerly_it_scales_can_be_said() -> None:
    found = scaling("min=1", "max=9", "scale_wait=250ms", "scale_idle=5m")
    assert found == ScalingPolicy(1, 9, 250 * MILLISECOND_NS, 300 * SECOND_NS)


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (("min=6",), "'pools.parser.min': value 6 is more than size (5), the number at"),
        (("max=4",), "'pools.parser.max': value 4 is less than size (5), the number at"),
        (("min=9", "max=4"), "'pools.parser.min': value 9 is more than max (4): lower min or"),
        (("max=0",), "'pools.parser.max': value 0"),
        (("min=-1",), "'pools.parser.min': value -1"),
        (("scale_wait=0s",), "'pools.parser.scale_wait'"),
    ],
)
def test_bounds_that_do_not_go_together_are_refused(sets: tuple[str, ...], problem: str) -> None:
    found = problems(*(f"pools.parser.{each}" for each in sets))
    assert len(found) == 1
    assert problem in found[0]


def test_the_bound_of_the_fleet_has_room_for_what_the_pools_begin_with() -> None:
    other = ('pools.other.worker="x"', "pools.other.size=0")
    assert policy(*other, "supervisor.workers_max=5").workers_max == 5
    (problem,) = problems(*other, "pools.other.max=3", "supervisor.workers_max=5")
    assert "'supervisor.workers_max': value 5 is less than the 6 workers that the pools" in problem
    off = ("pools.other.enabled=false", "pools.other.max=3")
    assert policy(*other, *off, "supervisor.workers_max=5").workers_max == 5


def test_the_example_in_the_documentation_means_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    path = tmp_path / "example.toml"
    path.write_text(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0])
    found = fleet_policy(load([path], None, [], {}).config)
    parser, reports = found.pools
    assert (found.workers_max, parser.size, reports.size) == (20, 2, 0)
    assert parser.scaling == ScalingPolicy(1, 16)
    assert reports.scaling == ScalingPolicy(0, 4, idle_ns=300 * SECOND_NS)
