"""The configuration as a whole: layers, checks, origins, and the way back to text."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config import load as configuration
from musterd.supervisor.config.load import Loaded, load, show
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import Config, inherited
from musterd.supervisor.processes.containment import CONTAINMENTS
from musterd.supervisor.text.units import SECOND_NS

Write = Callable[[str, str], Path]
NO_FILE = Path("/nonexistent/musterd.toml")
PARSER = "musterd.workers.parser:ParserWorker"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def loaded(
    *files: Path,
    profile: str | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    return load(list(files), profile, sets, environ or {}, default_file=NO_FILE)


def problems(*files: Path, **sources: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        loaded(*files, **sources)
    return str(caught.value).split("\n")


# -- defaults ---------------------------------------------------------------------------------


def test_without_any_source_there_is_one_pool_of_five_parsers() -> None:
    expected = Config(pools={"parser": PoolConfig(worker=PARSER, size=5)})
    assert loaded().config == inherited(expected)


def test_the_defaults_are_those_that_were_promised() -> None:
    config = loaded().config
    pool = config.pools["parser"]
    assert config.supervisor.drain_timeout_ns == 30 * SECOND_NS
    assert config.supervisor.stop_timeout_ns == 5 * SECOND_NS
    assert config.supervisor.containment == "auto"
    assert (config.store.durability, config.store.keep_results_ns) == ("full", 86400 * SECOND_NS)
    assert (config.retry.max_retries, config.retry.strategy) == (3, "exponential")
    assert (config.retry.base_ns, config.retry.max_ns) == (SECOND_NS, 60 * SECOND_NS)
    assert (config.retry.factor, config.retry.jitter) == (2.0, 0.1)
    assert (pool.queue_size, pool.aging_ns, pool.max_crashes) == (10_000, 60 * SECOND_NS, 3)
    assert pool.task_timeout_ns == 120 * SECOND_NS
    assert pool.start_timeout_ns == 30 * SECOND_NS
    assert (pool.restart.base_ns, pool.restart.limit) == (SECOND_NS // 2, 10)
    assert pool.restart.max_ns == pool.restart.reset_ns == pool.restart.window_ns == 60 * SECOND_NS
    assert pool.enabled


def test_pools_of_a_file_take_the_place_of_the_built_in_one(write: Write) -> None:
    file = write("a.toml", '[pools.promos]\nworker = "shop.promos"\n')
    expected = inherited(Config(pools={"promos": PoolConfig(worker="shop.promos")}))
    assert loaded(file).config == expected


def test_an_empty_pools_table_means_no_pools(write: Write) -> None:
    assert loaded(write("a.toml", "[pools]\n")).config.pools == {}


# -- layers -----------------------------------------------------------------------------------


def test_each_layer_wins_over_the_ones_before(write: Write) -> None:
    file = write("a.toml", "[retry]\nmax_retries = 11\n[profiles.night.retry]\nmax_retries = 13\n")
    drop_in = "[retry]\nmax_retries = 12\n"
    environ = {"MUSTERD_RETRY__MAX_RETRIES": "14"}
    found = [loaded(file).config]
    write("a.d/50.toml", drop_in)
    found.append(loaded(file).config)
    found.append(loaded(file, profile="night").config)
    found.append(loaded(file, profile="night", environ=environ).config)
    found.append(
        loaded(file, profile="night", environ=environ, sets=["retry.max_retries=15"]).config
    )
    assert [config.retry.max_retries for config in found] == [11, 12, 13, 14, 15]


def test_layers_are_merged_key_by_key(write: Write) -> None:
    first = write("a.toml", f'[pools.parser]\nworker = "{PARSER}"\nsize = 4\nrestart.limit = 7\n')
    second = write("b.json", '{"pools": {"parser": {"restart": {"base": "2s"}}}}')
    pool = loaded(first, second, environ={"MUSTERD_POOLS__PARSER__QUEUE_SIZE": "9"}).config.pools[
        "parser"
    ]
    assert (pool.size, pool.queue_size) == (4, 9)
    assert (pool.restart.limit, pool.restart.base_ns) == (7, 2 * SECOND_NS)


def test_every_leaf_knows_where_it_is_from(write: Write) -> None:
    file = write(
        "a.toml",
        '[store]\nkeep_results = "2d"\n[profiles.development.retry]\nfactor = 3\n',
    )
    drop_in = write("a.d/x.toml", '[supervisor]\nlog_file = "/x"\n')
    origins = loaded(
        file,
        profile="development",
        environ={"MUSTERD_RETRY__BASE": "2s", "MUSTERD_POOLS__PARSER__ENV__Lang": "C"},
        sets=["retry.max=90s", "pools.parser.options.proxy.host=h"],
    ).origins
    assert origins["store.keep_results"] == str(file)
    assert origins["supervisor.log_file"] == str(drop_in)
    assert origins["supervisor.log_level"] == "profile development (built-in)"
    assert origins["retry.factor"] == f"profile development ({file})"
    assert origins["supervisor.profile"] == "--profile"
    assert origins["retry.base"] == "environment MUSTERD_RETRY__BASE"
    assert origins["pools.parser.env.Lang"] == "environment MUSTERD_POOLS__PARSER__ENV__Lang"
    assert origins["retry.max"] == "--set"
    assert origins["pools.parser.options.proxy.host"] == "--set"
    assert origins["retry.jitter"] == "built-in"
    assert origins["pools.parser.worker"] == "built-in"


# -- profiles ---------------------------------------------------------------------------------


def test_development_is_talkative_quick_and_small() -> None:
    config = loaded(profile="development").config
    assert config.supervisor.profile == "development"
    assert config.supervisor.log_level == "debug"
    assert config.store.durability == "normal"
    assert config.pools["parser"].size == 2


def test_production_is_the_default_and_changes_nothing() -> None:
    assert loaded(profile="production").config == loaded().config


def test_the_profile_in_force_by_default_can_be_extended(write: Write) -> None:
    file = write("a.toml", "[profiles.production.retry]\nmax_retries = 5\n")
    assert loaded(file).config.retry.max_retries == 5


def test_a_built_in_profile_makes_no_pool(write: Write) -> None:
    file = write("a.toml", '[pools.promos]\nworker = "shop"\n')
    assert list(loaded(file, profile="development").config.pools) == ["promos"]


@pytest.mark.parametrize(
    "sources",
    [
        {"profile": "night"},
        {"sets": ["supervisor.profile=night"]},
        {"environ": {"MUSTERD_SUPERVISOR__PROFILE": "night"}},
        {"profile": "night", "sets": ["supervisor.profile=development"]},
    ],
)
def test_a_profile_is_chosen_by_any_source_and_first_by_its_option(
    write: Write, sources: Any
) -> None:
    file = write("a.toml", "[profiles.night.pools.parser]\nsize = 20\n")
    config = loaded(file, **sources).config
    assert (config.supervisor.profile, config.pools["parser"].size) == ("night", 20)


def test_an_unknown_profile_is_refused_with_the_known_ones(write: Write) -> None:
    file = write("a.toml", "[profiles.night]\n")
    assert problems(file, profile="day") == [
        "--profile: key 'supervisor.profile': value \"day\" is not a known profile: "
        "give one of development, night, production"
    ]
    assert problems(sets=["supervisor.profile=7"]) == [
        "--set: key 'supervisor.profile': value \"7\" is not a known profile: "
        "give one of development, production"
    ]


def test_a_profile_that_is_not_in_force_is_checked_too(write: Write) -> None:
    file = write("a.toml", '[profiles.night.pools.parser]\nsize = "x"\nsise = 1\n')
    assert problems(file) == [
        f"profile night ({file}): key 'pools.parser.sise': unknown key: did you mean 'size'?",
        f"profile night ({file}): key 'pools.parser.size': value \"x\" is not an integer: "
        "give a whole number such as 3",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("profiles = 3", "key 'profiles.profiles': write [profiles.NAME]"),
        ("[profiles]\nnight = 3", "key 'profiles.night': write [profiles.NAME]"),
        ("[profiles.'N 1']", "key 'profiles.\"N 1\"': not a profile name"),
        ("[profiles.a.supervisor]\nprofile = 'b'", "a profile cannot choose a profile"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(write: Write, text: str, problem: str) -> None:
    assert problem in problems(write("a.toml", text))[0]


def test_profiles_are_made_in_files_only() -> None:
    assert problems(sets=["profiles.a.retry.factor=3"]) == [
        "--set: key 'profiles': profiles are made in files: write [profiles.NAME] there"
    ]


# -- problems ---------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once_each_on_its_line(write: Write) -> None:
    file = write(
        "a.toml",
        '[supervisor]\ndrain_timeuot = "3s"\ndrain_timeout = "soon"\n'
        f'[pools.parser]\nworker = "{PARSER}"\nsize = "three"\n',
    )
    assert problems(file, sets=["store.durability=some"], environ={"MUSTERD_HOUSE__X": "1"}) == [
        "environment MUSTERD_HOUSE__X: key 'house': unknown key: "
        f"known are {', '.join(sorted(Config.__struct_encode_fields__))}",
        f"{file}: key 'supervisor.drain_timeuot': unknown key: did you mean 'drain_timeout'?",
        f"{file}: key 'supervisor.drain_timeout': value \"soon\" is not a duration: "
        'give a number with a unit such as "500ms", "30s", "5m", "2h" or "1d"',
        "--set: key 'store.durability': value \"some\" is unknown: "
        'give "full", "normal" or "memory"',
        f"{file}: key 'pools.parser.size': value \"three\" is not an integer: "
        "give a whole number such as 3",
    ]


def test_a_problem_does_not_give_a_secret_away(write: Callable[[str, str], Path]) -> None:
    file = write(
        "a.toml",
        f'[pools.parser]\nworker = "{PARSER}"\nenv = {{API_TOKEN = 987654321, PORT = 8080}}\n',
    )
    assert problems(file) == [
        f"{file}: key 'pools.parser.env.API_TOKEN': value (hidden) is not text: put it in quotes",
        f"{file}: key 'pools.parser.env.PORT': value 8080 is not text: put it in quotes",
    ]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("supervisor.log_level=loud", 'give "debug", "info", "warning" or "error"'),
        ("supervisor.runtime_dir=run", "is not an absolute path: begin it with /"),
        ('supervisor.log_file="/a\\u0000b"', "cannot be printed"),
        ("supervisor.control_group=a b", "is not a valid group name"),
        ("supervisor.drain_timeout=-1s", "is negative"),
        ("supervisor.user=root", "unknown key: known are"),
        ("supervisor.runtime_dir={a=1}", "is a table: give it a single value"),
        ("store=full", "is not a table of keys"),
        ("pools=3", "is not a table of tables"),
        ("pools.parser=3", "is not a table of keys"),
        ("retry.factor=0.5", "is out of range: give a number from 1 to 100"),
        ("retry.factor=nan", "is out of range"),
        ("retry.factor=fast", "is not a number"),
        ("retry.jitter=1.5", "is more than the whole"),
        ("retry.max_retries=-1", "give a whole number from 0 to 1000"),
        ("retry.max_retries=true", "is not an integer"),
        ("retry.max_retries=3.0", "is not an integer"),
        ("retry.base=5m", "is longer than max (1m): lower base or raise max"),
        ("retry.max=10ms", "is longer than max (10ms): lower base or raise max"),
        ("pools.parser.restart.base=2m", "is longer than max (1m)"),
        ("pools.parser.restart.base=0", 'is too short: give at least "1ms"'),
        ("pools.parser.restart.limit=0", "give a whole number from 1 to 10000"),
        ("pools.parser.size=-1", "give a whole number from 0 to 1000"),
        ("pools.parser.queue_size=0", "is out of range"),
        ("pools.parser.task_timeout=0", "is too short"),
        ("pools.parser.enabled=yes", "is neither true nor false"),
        ("pools.parser.worker=a..b", 'give "module:Class"'),
        ("pools.parser.worker=a:b:c", 'give "module:Class"'),
        ("pools.parser.worker=a:", 'give "module:Class"'),
        ("pools.parser.worker=import.x", 'give "module:Class"'),
        ("pools.parser.worker=a/b.py", 'give "module:Class"'),
        ("pools.parser.worker=", 'give "module:Class"'),
        ("pools.parser.env=LANG", "is not a table of values"),
        ("pools.parser.env.LANG={a=1}", "is not text"),
        ('pools.parser.env."A B="=1', "write section.key=value"),
        ('pools.parser.env={"A="="1"}', "is not a valid variable name"),
        ('pools.parser.env.A="\\u0000"', "contains a NUL character"),
        ("pools.parser.options=[1]", "is not a table of values"),
        ("pools.parser.options.a=nan", "is not a finite number"),
        ("pools.parser.options.a=9223372036854775808", "needs more than 64 bits"),
        ("pools.Parser.size=1", "not a pool name"),
        ("pools.1a.size=1", "not a pool name"),
        (f"pools.{'a' * 65}.size=1", "at most 64 characters"),
        ('pools.all.worker="x"', "means all pools in musterctl"),
        ("pools.promos.size=1", "key 'pools.promos.worker': is missing and has no default"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_what_to_do(setting: str, problem: str) -> None:
    found = problems(sets=[setting])
    assert found[0].startswith("--set: ")
    assert problem in found[0]


def test_every_containment_is_a_word_of_the_configuration() -> None:
    for word in CONTAINMENTS:
        found = loaded(sets=[f"supervisor.containment={word}"]).config
        assert found.supervisor.containment == word
    (problem,) = problems(sets=["supervisor.containment=docker"])
    assert 'give "auto", "pidns", "cgroup" or "reaper"' in problem


def test_a_later_name_means_nothing_special_elsewhere() -> None:
    assert "unknown key" in problems(sets=["supervisor.memory=1"])[0]
    assert "unknown key" in problems(sets=["pools.parser.restart.min=1"])[0]


def test_more_pools_than_a_machine_can_have_are_refused(write: Write) -> None:
    file = write("a.toml", "".join(f'[pools.p{n}]\nworker = "x"\n' for n in range(101)))
    assert problems(file) == [f"{file}: key 'pools': more than 100 entries: remove some"]


def test_a_problem_in_a_pools_table_names_the_file_that_made_it(write: Write) -> None:
    first = write("a.toml", f'[pools.parser]\nworker = "{PARSER}"\nenv = {{A = "1"}}\n')
    second = write("b.toml", "[pools.parser]\nenv = {B = 2}\n")
    assert problems(first, second) == [
        f"{second}: key 'pools.parser.env.B': value 2 is not text: put it in quotes"
    ]


def test_a_file_that_cannot_be_read_hides_neither_other_problems_nor_invents_any(
    write: Write,
) -> None:
    broken = write("a.toml", "[pools.promos]\nworker = \n")
    other = write("b.toml", "[pools.promos]\nsize = -1\n")
    found = problems(broken, other)
    assert len(found) == 2
    assert found[0].startswith(f"{broken}: not valid TOML: ")
    assert found[1].startswith(f"{other}: key 'pools.promos.size': value -1 is out of range")


def test_a_problem_stays_on_one_short_line(write: Write) -> None:
    file = write("a.json", '{"retry": {"a\\nb\\u001b": 1, "base": "' + "x" * 500 + '\\n"}}')
    found = problems(file)
    assert len(found) == 2
    assert all(line.isprintable() and len(line) < 300 + len(str(file)) for line in found)


# -- text from outside ------------------------------------------------------------------------


def test_text_from_outside_is_text_where_text_is_wanted() -> None:
    pool = loaded(
        sets=["pools.parser.env.A=1", "pools.parser.env.B=true", 'pools.parser.env.C="1"'],
        environ={
            "MUSTERD_POOLS__PARSER__OPTIONS__N": "1",
            "MUSTERD_POOLS__PARSER__OPTIONS__T": "x",
        },
    ).config.pools["parser"]
    assert pool.env == {"A": "1", "B": "true", "C": "1"}
    assert pool.options == {"n": 1, "t": "x"}


def test_the_environment_is_the_processs_own_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTERD_POOLS__PARSER__SIZE", "7")
    assert load(default_file=NO_FILE).config.pools["parser"].size == 7
    assert load(environ={}, default_file=NO_FILE).config.pools["parser"].size == 5


def test_a_table_can_be_given_in_one_piece() -> None:
    pool = loaded(sets=["pools.parser.restart={limit = 4, base = '1s'}"]).config.pools["parser"]
    assert (pool.restart.limit, pool.restart.base_ns, pool.size) == (4, SECOND_NS, 5)


# -- showing ----------------------------------------------------------------------------------


def reloaded(shown: str, path: Path) -> Loaded:
    path.write_text(shown)
    return loaded(path)


def test_what_is_shown_loads_to_the_same_configuration(write: Write, tmp_path: Path) -> None:
    file = write(
        "a.toml",
        '[pools.a-b]\nworker = "x:Y"\nenabled = false\nenv = {"A.B" = "q\\"\\u007f#\\n"}\n'
        '[pools.a-b.options]\nlist = [1, 2.0, "x", {"k k" = []}]\nempty = {}\n"a.b".c = true\n'
        "[profiles.night.retry]\nfactor = 1.25\n",
    )
    first = loaded(file, profile="night", sets=["supervisor.drain_timeout=1.5s"])
    second = reloaded(show(first), tmp_path / "shown.toml")
    assert second.config == first.config
    assert second.config.pools["a-b"].options == {
        "list": [1, 2.0, "x", {"k k": []}],
        "empty": {},
        "a.b": {"c": True},
    }


@pytest.mark.parametrize("sets", [[], ["supervisor.log_level=error", "pools.parser.size=9"]])
def test_what_is_shown_is_the_same_under_a_profile(tmp_path: Path, sets: list[str]) -> None:
    first = loaded(profile="development", sets=sets)
    assert reloaded(show(first), tmp_path / "shown.toml").config == first.config


def test_what_is_shown_has_no_pools_where_there_are_none(write: Write, tmp_path: Path) -> None:
    first = loaded(write("a.toml", "[pools]\n"))
    assert reloaded(show(first), tmp_path / "shown.toml").config.pools == {}


def test_each_shown_line_ends_with_the_origin_of_its_value(write: Write) -> None:
    file = write("a.toml", '[store]\nkeep_results = "48h"\n')
    result = loaded(file, environ={"MUSTERD_RETRY__JITTER": "20%"})
    lines = show(result).splitlines()
    assert f'keep_results = "2d"  # {file}' in lines
    assert "jitter = 0.2  # environment MUSTERD_RETRY__JITTER" in lines
    assert 'restart.base = "500ms"  # built-in' in lines
    settings = [line for line in lines if re.match(r"[^\[].* = ", line)]
    assert len(settings) == len(result.origins)


@given(
    st.dictionaries(
        st.text(max_size=9),
        st.recursive(
            st.booleans()
            | st.integers(-(2**63), 2**63 - 1)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=9), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_every_table_of_options_survives_being_shown(options: dict[str, Any]) -> None:
    pool = PoolConfig(worker="x", options=options)
    flat = dict(configuration._flat(configuration._written(pool)))
    origins = {configuration.dotted(("pools", "p", *key)): "here" for key in flat}
    text = show(Loaded(Config(pools={"p": pool}), {**loaded().origins, **origins}))
    assert tomllib.loads(text)["pools"]["p"]["options"] == options
