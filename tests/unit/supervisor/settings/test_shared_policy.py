"""What a cluster shares: from a file to the policy, and back to what one would write."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.messages import NOT_GIVEN
from musterd.supervisor.cluster.model_engine import ModelEngine
from musterd.supervisor.config import shared
from musterd.supervisor.config.load import flat_part, load_part, show_part
from musterd.supervisor.config.shared import SharedConfig
from musterd.supervisor.core.model.shared import ClusterPolicy
from musterd.supervisor.ctl.cluster_link import ClusterRefused
from musterd.supervisor.ctl.cluster_policy import applied, apply_text, show_text
from musterd.supervisor.settings.shared_policy import shared_config, shared_policy

WHOLE = """\
[retry]
max_retries = 5
budget = false

[breaker]
failures = 4
open_max = "2h"

[classes.critical]
timeout = "5s"
on_open = "fail"
counts = ["shop:Closed"]
retry.max_retries = 1
retry.base = "2s"
breaker.open = "1m"

[classes.plain]

[targets."a.example"]
class = "critical"
rate = "2/s"
burst = 3
proxies = ["http://proxy.example:3128", "secret:PROXY"]
robots = true
retry.base = "2s"
breaker.window = 20
breaker.failure_rate = 0.5

[targets."b.example"]
max_concurrent = 7
fallback_on = "failure"
retry.max_retries = 9

[cache]
entries = 50

[debounce]
enabled = false

[schedule.kites]
task = "jobs.check"
args.url = "https://shop.example/x"
args.token."$secret" = "TOKEN"
args.list = [1, {a = 2}]
every = "5m"
priority = "high"
jitter = "10s"
overlap = true
catch_up = "all"
cache = "30s"
notify = "task.changed"

[schedule.night]
task = "jobs.check"
cron = "0 3 * * *"
timezone = "Europe/Berlin"
enabled = false
"""


def load(folder: Path, text: str) -> SharedConfig:
    path = folder / "shared.toml"
    path.write_text(text)
    return load_part(SharedConfig, path)[0]


def test_what_is_applied_is_shown_as_it_was_written(tmp_path: Path) -> None:
    policy = shared_policy(load(tmp_path, WHOLE))
    assert show_part(shared_config(policy)) == WHOLE


def test_the_policy_has_what_the_file_says(tmp_path: Path) -> None:
    policy = shared_policy(load(tmp_path, WHOLE))
    site, other = policy.targets["a.example"], policy.targets["b.example"]
    assert (site.policy, site.rate, site.burst, site.max_retries) == ("critical", 2.0, 3, NOT_GIVEN)
    assert site.breaker is not None
    assert (site.breaker.failures, site.breaker.window) == (4, 20)
    assert site.breaker.open_ns == policy.class_breakers["critical"].open_ns
    assert (other.max_retries, other.retry_share) == (9, None)
    assert policy.retry.max_retries == 5
    assert (policy.cache.entries, policy.cache.debounce) == (50, False)
    assert [(card.name, card.notify) for card in policy.schedules] == [
        ("kites", True),
        ("night", False),
    ]


def test_nothing_is_written_for_nothing() -> None:
    assert show_part(shared_config(ClusterPolicy())) == ""
    assert shared_policy(SharedConfig()) == ClusterPolicy()


def test_any_policy_comes_back_from_what_is_written_for_it(tmp_path: Path) -> None:
    rng = Random(1)
    for _ in range(100):
        text = "\n".join(some_lines(rng))
        policy = shared_policy(load(tmp_path, text))
        again = show_part(shared_config(policy))
        assert shared_policy(load(tmp_path, again)) == policy, text


def some_lines(rng: Random) -> list[str]:
    """Return sections with some of their keys."""

    def some(prefix: str = "", **keys: Any) -> list[str]:
        return [f"{prefix}{key} = {value}" for key, value in keys.items() if rng.random() < 0.5]

    retry = {"max_retries": rng.randrange(9), "base": f'"{rng.randrange(1, 30)}s"', "factor": 3}
    breaker = {"failures": rng.randrange(1, 9), "open": f'"{rng.randrange(1, 900)}s"'}
    lines = ["[retry]", *some(**retry), "[breaker]", *some(**breaker), '[classes."c"]']
    lines += some(max_concurrent=3, timeout='"9s"')
    lines += some("retry.", **retry) + some("breaker.", **breaker)
    for name in ("a.example", "b"):
        lines += [f'[targets."{name}"]', *some(rate='"3/m"', retry_share='"7%"', on_open='"wait"')]
        lines += some(**{"class": '"c"'}) + some("retry.", **retry) + some("breaker.", **breaker)
    return lines


def test_other_sections_are_told_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text('[pools.jobs]\nworker = 5\n[retry]\nmax_retries = 1\n[cluster]\nurl = "x"\n')
    config, others = load_part(SharedConfig, path)
    assert (config.retry.max_retries, others) == (1, ["pools", "cluster"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[tragets.a]\n", "key 'tragets': unknown key: did you mean 'targets'?"),
        ("[retry]\nmax_retries = 'x'\n", "key 'retry.max_retries': value \"x\" is not an integer"),
        ('[targets.a]\nclass = "gold"\n', "is not a class of [classes]: known are none"),
        ('[schedule.a]\ntask = "p.x"\n', "key 'schedule.a.every': is missing"),
        ("[retry\n", "line 1"),
        (
            '[schedule.a]\ntask = "p.x"\nevery = "1m"\nargs = {password = "x"}\n',
            "key 'schedule.a.args'",
        ),
        (
            '[schedule.a]\ntask = "p.x"\nevery = "1m"\nnotify = "task.changed"\n'
            'attach = "screenshot"\n',
            "pictures stay on their node",
        ),
        ('[targets."*.example"]\nrate = "1/s"\n', "which a cluster does not know: name each"),
    ],
)
def test_bad_input_is_said_with_what_and_where(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(tmp_path, text)
    assert problem in str(raised.value)
    assert str(tmp_path / "shared.toml") in str(raised.value)


def test_a_time_zone_without_a_name_cannot_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "time_zone", lambda _: "local")
    text = '[schedule.a]\ntask = "p.x"\ncron = "0 3 * * *"\n'
    with pytest.raises(ConfigurationError, match=r"schedule\.a\.timezone.*has no name"):
        load(tmp_path, text)
    load(tmp_path, text + 'timezone = "UTC"\n')


# -- apply --------------------------------------------------------------------------------------


def engine() -> ModelEngine:
    return ModelEngine(lambda: 1, Random(1))


def test_apply_says_what_changed(tmp_path: Path) -> None:
    cluster = engine()
    assert "nothing is applied yet" in show_text(cluster.policy())
    result = applied(cluster, shared_policy(load(tmp_path, WHOLE)), ["pools"])
    assert result.version == 1
    changes = {change.key: (change.old, change.new) for change in result.changes}
    assert changes["retry.max_retries"] == ("", "5")
    assert changes['targets."a.example".rate'] == ("", '"2/s"')
    assert changes["classes.plain"] == ("", "{}")
    assert "left to each machine: pools" in apply_text(result)
    [warning] = result.warnings
    assert warning.startswith("schedule kites, night: no node has such a task yet")
    other = WHOLE.replace('"5m"', '"6m"').replace("[classes.plain]\n\n", "")
    result = applied(cluster, shared_policy(load(tmp_path, other)), [])
    assert [(each.key, each.old, each.new) for each in result.changes] == [
        ("classes.plain", "{}", ""),
        ("schedule.kites.every", '"5m"', '"6m"'),
    ]
    assert "classes.plain: {} -> (not set)\n" in apply_text(result)
    again = applied(cluster, shared_policy(load(tmp_path, other)), [])
    assert (again.version, again.changes) == (2, [])
    assert "no changes" in apply_text(again)
    assert show_text(cluster.policy()) == f"# policy 2 of the cluster\n\n{other}".rstrip("\n")


def test_who_is_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = engine()
    before = cluster.policy()
    cluster.apply(ClusterPolicy(), 0)
    monkeypatch.setattr(cluster, "policy", lambda: before)
    with pytest.raises(ClusterRefused, match="somebody else has just applied"):
        applied(cluster, ClusterPolicy(), [])
    assert flat_part(shared_config(before.policy)) == {}
