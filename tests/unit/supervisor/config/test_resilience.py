"""[retry], [breaker], [classes] and [targets]: the core decides by their values."""

from collections.abc import Callable
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.resilience.policy import SECOND_NS, BackoffPolicy, BreakerPolicy
from musterd.ipc.wire.messages import NOT_GIVEN
from musterd.supervisor.config.load import load, show
from musterd.supervisor.core.model.policy import FleetPolicy, GatePolicy, TargetPolicy
from musterd.supervisor.settings.policy import fleet_policy

ROOT = Path(__file__).parents[4]

Policy = Callable[[str], FleetPolicy]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """Return policy(toml), which makes the policy that the core gets."""

    def read(text: str) -> FleetPolicy:
        path = tmp_path / "musterd.toml"
        path.write_text(text)
        return fleet_policy(load([path], None, [], {}).config)

    return read


@pytest.fixture
def problems(tmp_path: Path) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        path = tmp_path / "musterd.toml"
        path.write_text(text)
        with pytest.raises(ConfigurationError) as caught:
            load([path], None, [], {})
        return str(caught.value).replace(f"{path}: ", "").splitlines()

    return read


def test_the_defaults_are_those_of_the_core(policy: Policy) -> None:
    found = policy("")
    assert found.breaker == BreakerPolicy()
    assert found.retry.backoff == BackoffPolicy()
    assert (found.classes, found.targets) == ({}, {})


def test_the_classes_of_the_documentation_mean_what_they_say(policy: Policy) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    example = text[text.index("[classes.critical]\n") :].partition("```")[0]
    found = policy(example)
    critical, normal = found.classes["critical"], found.classes["normal"]
    assert critical == GatePolicy(
        "critical",
        timeout_ns=10 * SECOND_NS,
        max_retries=4,
        backoff=BackoffPolicy(),
        max_concurrent=50,
    )
    assert (normal.timeout_ns, normal.max_retries) == (5 * SECOND_NS, 2)
    assert (normal.max_concurrent, normal.backoff) == (20, BackoffPolicy(jitter=0.2))
    breakers = found.class_breakers
    assert breakers["critical"] == BreakerPolicy(failures=3, open_ns=30 * SECOND_NS)
    assert breakers["normal"] == BreakerPolicy(failures=5, open_ns=60 * SECOND_NS)
    site = found.targets["site.example"]
    assert (site.policy, site.rate, site.breaker) == ("critical", 1.0, breakers["critical"])


def test_every_key_of_a_breaker_reaches_the_core(policy: Policy) -> None:
    found = policy(
        """
        [breaker]
        enabled = false
        failures = 7
        open = "1s"
        open_factor = 3
        open_max = "9s"
        jitter = 0.5
        successes = 4
        probes = 5
        window = 20
        window_min = 6
        failure_rate = "50%"
        slow = "2s"
        slow_rate = 0.25
        """
    )
    assert found.breaker == BreakerPolicy(
        enabled=False,
        failures=7,
        open_ns=SECOND_NS,
        open_factor=3.0,
        open_max_ns=9 * SECOND_NS,
        open_jitter=0.5,
        successes=4,
        probes=5,
        window=20,
        window_calls_min=6,
        failure_rate=0.5,
        slow_ns=2 * SECOND_NS,
        slow_rate=0.25,
    )


def test_what_is_not_said_comes_from_the_class_and_then_from_the_defaults(policy: Policy) -> None:
    found = policy(
        """
        breaker = {failures = 9, successes = 8}
        retry = {base = "5s", max_retries = 7}
        [classes.c]
        breaker = {failures = 2}
        retry = {strategy = "linear"}
        [targets.t]
        class = "c"
        breaker = {open = "1m"}
        retry = {base = "2s"}
        """
    )
    assert found.targets["t"].backoff == BackoffPolicy(base_ns=2 * SECOND_NS, strategy="linear")
    assert found.targets["t"].max_retries == NOT_GIVEN
    assert found.classes["c"].max_retries == NOT_GIVEN, "as the declaration or the pool says"
    assert found.classes["c"].backoff == BackoffPolicy(base_ns=5 * SECOND_NS, strategy="linear")
    own = found.targets["t"].breaker
    assert own is not None
    assert (own.failures, own.successes, own.open_ns) == (2, 8, 60 * SECOND_NS)


def test_every_key_of_a_target_reaches_the_core(policy: Policy) -> None:
    found = policy(
        """
        [classes.c]
        [targets."127.0.0.1:8080"]
        class = "c"
        timeout = "3s"
        max_concurrent = 2
        rate = "30/m"
        burst = 4
        retry_share = "50%"
        on_open = "fail"
        retry = {max_retries = 1, base = "2s"}
        """
    )
    assert found.targets["127.0.0.1:8080"] == TargetPolicy(
        policy="c",
        timeout_ns=3 * SECOND_NS,
        max_retries=1,
        backoff=BackoffPolicy(base_ns=2 * SECOND_NS),
        on_open="fail",
        max_concurrent=2,
        rate=0.5,
        burst=4,
        breaker=BreakerPolicy(),
        retry_share=0.5,
    )


@pytest.mark.parametrize("strategy", ["exponential", "linear", "fixed", "random"])
def test_strategies_by_their_word(policy: Policy, strategy: str) -> None:
    found = policy(f'retry = {{strategy = "{strategy}"}}').retry.backoff
    assert (found.strategy, found.custom) == (strategy, "")


def test_a_strategy_of_one_s_own_leaves_the_usual_one_where_nobody_can_be_asked(
    policy: Policy,
) -> None:
    found = policy(
        """
        retry = {strategy = "myapp.backoff:pauses"}
        [classes.c]
        [classes.d]
        retry = {strategy = "fixed"}
        """
    )
    assert found.retry.backoff == BackoffPolicy(custom="myapp.backoff:pauses")
    assert found.classes["c"].backoff == found.retry.backoff
    assert found.classes["d"].backoff == BackoffPolicy(strategy="fixed")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            'retry = {strategy = "lineal"}',
            'key \'retry.strategy\': value "lineal" is unknown: give "exponential", '
            '"linear", "fixed", "random" or "module:function"',
        ),
        ('retry = {strategy = "my app:f"}', "is unknown"),
        ('retry = {strategy = "app:"}', "is unknown"),
        ("[classes.C]", "not a class name"),
        (f"[classes.{'c' * 33}]", "at most 32 characters"),
        ('[targets.""]', "a target has 1 to 253 characters"),
        (
            '[targets."site.example"]\nclass = "c"',
            'key \'targets."site.example".class\': value "c" is not a class of [classes]: '
            "known are none",
        ),
        ('[classes.c]\non_open = "panic"', 'give "wait", "fail" or "fallback"'),
        ('[targets.t]\nrate = "fast"', 'give a rate such as "1/s", "30/m" or "100/h"'),
        ('[targets.t]\nrate = "0/s"', "is out of range"),
        ("[targets.t]\nrate = true", "is not a rate"),
        ("[targets.t]\nburst = 0", "is out of range"),
        ("breaker = {probes = 0}", "is out of range"),
        ("breaker = {window = 1001, failure_rate = 1}", "from 0 to 1000"),
        ("breaker = {failure_rate = 0.5}", "key 'breaker.window': is missing: a rate needs"),
        ("breaker = {window = 10}", "has no effect without failure_rate or slow_rate"),
        ("breaker = {window = 5, failure_rate = 1}", "key 'breaker.window_min'"),
        ("breaker = {window = 10, slow_rate = 1}", "key 'breaker.slow'"),
        (
            '[classes.c]\nretry = {base = "2m"}',
            "key 'classes.c.retry.base': value \"2m\" is longer than max (1m)",
        ),
        (
            '[targets.t]\nretry = {base = "2m"}',
            "key 'targets.t.retry.base': value \"2m\" is longer than max (1m)",
        ),
        ("[classes.c]\nbreaker = {window = 10}", "key 'classes.c.breaker.window': value 10"),
        (
            '[targets."a.b"]\nbreaker = {window = 10}',
            "key 'targets.\"a.b\".breaker.window': value 10",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(
    problems: Callable[[str], list[str]], text: str, problem: str
) -> None:
    (found,) = problems(text)
    assert problem in found


def test_a_conflict_of_the_defaults_is_told_once(problems: Callable[[str], list[str]]) -> None:
    found = problems('retry = {base = "2m"}\n[classes.a]\n[classes.b]\n[targets.t]\n')
    assert len(found) == 1


def test_what_is_shown_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        """
        retry = {strategy = "app:f"}
        breaker = {failures = 9}
        [classes.c]
        timeout = "1s"
        breaker = {open = "1m"}
        [targets."site.example:80"]
        class = "c"
        rate = "7/m"
        """
    )
    first = load([path], None, [], {})
    shown = tmp_path / "b.toml"
    shown.write_text(show(first))
    assert load([shown], None, [], {}).config == first.config
