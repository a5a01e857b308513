"""Defaults: sizes of pools, ages of results, threads, the monitor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.messages import AS_CONFIGURED, Fetching
from musterd.supervisor.config.load import Loaded, load, show
from musterd.supervisor.config.schema import Config
from musterd.supervisor.settings.diff import compare
from musterd.supervisor.settings.policy import build_of, fleet_policy, worker_settings_of
from musterd.supervisor.text.units import SECOND_NS

BROWSER = "musterd.workers.browser:BrowserWorker"
PARSER = "musterd.workers.parser:ParserWorker"
Read = Callable[..., Loaded]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return read("[pools.parser]", ...), which loads a file of these lines."""

    def read(*lines: str, profile: str | None = None) -> Loaded:
        path = tmp_path / "musterd.toml"
        path.write_text("\n".join(lines))
        return load([path], profile, [], {})

    return read


# -- pools ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "worker", "size"),
    [
        ("[pools.browser]", BROWSER, 3),
        ("[pools.parser]", PARSER, 5),
        ('[pools.browser]\nworker = "shop:Browser"', "shop:Browser", 3),
        ('[pools.parser]\nworker = "shop:Parser"', "shop:Parser", 5),
        (f'[pools.pages]\nworker = "{BROWSER}"', BROWSER, 3),
        (f'[pools.feeds]\nworker = "{PARSER}"', PARSER, 5),
        ('[pools.shop]\nworker = "shop:Shop"', "shop:Shop", 1),
        ("[pools.browser]\nsize = 7", BROWSER, 7),
        ("[pools.browser]\nsize = 0", BROWSER, 0),
        # The default stays within the bounds that are given.
        ("[pools.parser]\nmax = 2", PARSER, 2),
        ("[pools.browser]\nmin = 4\nmax = 8", BROWSER, 4),
        ("[pools.browser]\nmin = 1\nmax = 8", BROWSER, 3),
        ('[pools.shop]\nworker = "shop:Shop"\nmin = 2\nmax = 4', "shop:Shop", 2),
    ],
)
def test_a_pool_that_says_nothing_has_the_usual_workers(
    read: Read, pool: str, worker: str, size: int
) -> None:
    (found,) = read(pool).config.pools.values()
    assert (found.worker, found.size) == (worker, size)


def test_a_size_of_a_profile_wins_over_the_usual_one(read: Read) -> None:
    assert read("[pools.parser]", profile="development").config.pools["parser"].size == 2


def test_the_bounds_follow_the_usual_size(read: Read) -> None:
    (pool,) = fleet_policy(read("[pools.parser]\nmax = 9").config).pools
    assert pool.scaling is not None
    assert (pool.scaling.min, pool.size, pool.scaling.max) == (5, 5, 9)


def test_bounds_that_cannot_be_are_still_named_where_they_stand(read: Read) -> None:
    with pytest.raises(ConfigurationError, match=r"musterd.toml: key 'pools.parser.min'.* max"):
        read("[pools.parser]\nmin = 4\nmax = 3")


# -- ages of results, threads -----------------------------------------------------------------


def test_a_pool_takes_over_what_it_does_not_say_and_shows_from_where(
    read: Read, tmp_path: Path
) -> None:
    lines = [
        '[cache]\nttl = "60s"\nentries = 50',
        "[executors]\nio = 7",
        '[pools.parser]\ncache_ttl = "5s"\nexecutors = {api = 2}',
        "[pools.browser]",
    ]
    loaded = read(*lines)
    parser, browser = (loaded.config.pools[name] for name in ("parser", "browser"))
    assert (parser.cache_ttl_ns, browser.cache_ttl_ns) == (5 * SECOND_NS, 60 * SECOND_NS)
    assert (parser.cache_entries, parser.debounce_window_ns) == (50, SECOND_NS // 2)
    threads = [(each.executors.io, each.executors.api) for each in (parser, browser)]
    assert threads == [(7, 2), (7, 10)]
    file = str(tmp_path / "musterd.toml")
    assert f'cache_ttl = "1m"  # {file}' in show(loaded)
    assert "executors.calculation = 20  # built-in" in show(loaded)
    assert f"executors.io = 7  # {file}" in show(loaded)
    assert read(show(loaded)).config == loaded.config


def test_the_core_and_the_workers_are_told(read: Read) -> None:
    config = read('[debounce]\nwindow = "2s"\nenabled = false', "[executors]\napi = 4").config
    policy = fleet_policy(config)
    assert (policy.pools[0].cache_ns, policy.pools[0].debounce_ns) == (
        30 * SECOND_NS,
        2 * SECOND_NS,
    )
    assert policy.cache.enabled
    assert not policy.cache.debounce
    own = read('[pools.parser]\ncache_ttl = "3s"\ndebounce_window = "4s"').config
    (pool,) = fleet_policy(own).pools
    assert (pool.cache_ns, pool.debounce_ns) == (3 * SECOND_NS, 4 * SECOND_NS)
    worker_settings = worker_settings_of(config.pools["parser"])
    assert worker_settings.threads == {"io": 3, "calculation": 20, "api": 4}
    assert (worker_settings.cache_seconds, worker_settings.cache_entries) == (30.0, 1000)


def _build(config: Config) -> str:
    return build_of("parser", config.pools["parser"], config)


def test_workers_are_replaced_when_their_threads_change(read: Read) -> None:
    before = read("[pools.parser]")
    after = read("[pools.parser]", "[executors]\nio = 4")
    assert _build(before.config) != _build(after.config)
    difference = compare(before, after)
    assert [(each.name, each.effect) for each in difference.pools] == [("parser", "rolls")]
    assert difference.restart == []


def test_a_schedule_may_ask_for_an_earlier_result(read: Read) -> None:
    lines = ("[pools.parser]", '[[schedule]]\nname = "a"\ntask = "parser.fetch"\nevery = "5m"')
    (plain,) = fleet_policy(read(*lines).config).schedules
    (usual,) = fleet_policy(read(*lines, "cache = true\ndebounce = true").config).schedules
    (given,) = fleet_policy(read(*lines, 'cache = "1m"\nkey = "k"').config).schedules
    assert (plain.cache_ns, plain.debounce_ns, plain.key) == (0, 0, "")
    assert (usual.cache_ns, usual.debounce_ns) == (AS_CONFIGURED, AS_CONFIGURED)
    assert usual.key.startswith("parser.fetch:")
    assert (given.cache_ns, given.key) == (60 * SECOND_NS, "k")


@pytest.mark.parametrize("priority", ["HIGH", "High", "high"])
def test_a_priority_may_be_written_in_any_case(read: Read, priority: str) -> None:
    lines = '[[schedule]]\nname = "a"\ntask = "parser.fetch"\nevery = "5m"\n'
    loaded = read("[pools.parser]", f'{lines}priority = "{priority}"')
    assert loaded.config.schedule["a"].priority == "high"


# -- the monitor ------------------------------------------------------------------------------


def test_without_a_monitor_memory_is_left_alone(read: Read) -> None:
    assert fleet_policy(read("[pools.parser]").config).memory.watched
    memory = fleet_policy(read("[monitor]\nenabled = false").config).memory
    assert (memory.watched, memory.enabled) == (False, False)


def test_without_a_monitor_no_worker_can_be_measured(read: Read) -> None:
    with pytest.raises(ConfigurationError, match=r"pools.parser.max_memory.*monitor.enabled"):
        read('[monitor]\nenabled = false\n[pools.parser]\nmax_memory = "500M"')


# -- exceptions that count ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ('"ConnectionError"', "is not a list of exceptions"),
        ('["ConectionError"]', '"ConectionError", which is neither "module:Error", nor a built-in'),
        ('["print"]', "which is neither"),
        ('["shop.errors:"]', "which is neither"),
        (f'["a:{"b" * 200}"]', "over 200 characters"),
    ],
)
def test_exceptions_that_cannot_be_are_named(read: Read, counts: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(f'[targets."site.example"]\ncounts = {counts}')
    assert problem in str(caught.value)
    assert "key 'targets.\"site.example\".counts'" in str(caught.value)


def test_exceptions_and_fallbacks_reach_the_core(read: Read) -> None:
    lines = ["[classes.soft]", 'fallback_on = "failure"', 'counts = ["usual", "shop:Blocked"]']
    lines += ["[targets.aurora]", "counts = []", 'fallback_on = "open"']
    policy = fleet_policy(read(*lines).config)
    assert policy.classes["soft"].fallback_on == "failure"
    assert policy.classes["soft"].counts == ("usual", "shop:Blocked")
    assert policy.targets["aurora"].counts == ()
    assert policy.targets["aurora"].fallback_on == "open"


@pytest.mark.parametrize(
    ("proxies", "problem"),
    [
        ('"http://a.example:1"', "is not a list of proxies"),
        ('["a.example:3128"]', "is not scheme://host:port"),
        ('["http://a.example"]', "is not scheme://host:port"),
        ('["ftp://a.example:1"]', "with one of http, https, socks5"),
        ('["http://a.example:1/x"]', "has more than scheme://host:port"),
        (
            '["http://bob:hush@a.example:1"]',
            "has a login in it: put the whole address into a secret",
        ),
        ('["secret:../x"]', "does not name a secret"),
    ],
)
def test_proxies_that_cannot_be_are_named_and_no_login_is_shown(
    read: Read, proxies: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(f'[targets."site.example"]\nproxies = {proxies}')
    assert problem in str(caught.value)
    assert "hush" not in str(caught.value)


def test_what_a_target_says_about_fetching_reaches_the_core(read: Read) -> None:
    lines = ["[targets.aurora]", 'proxies = ["http://a.example:1", "secret:PROXY"]']
    lines += ["robots = false", "[targets.plain]"]
    policy = fleet_policy(read(*lines).config)
    said = Fetching(("http://a.example:1", "secret:PROXY"), False)
    assert policy.targets["aurora"].fetching == said
    assert policy.targets["plain"].fetching is None
