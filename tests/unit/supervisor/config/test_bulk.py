"""Many sites in few lines: [target_defaults], patterns of targets, templates of schedules."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import msgpack

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.config.load import Loaded, load, show
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.settings.policy import fleet_policy

Read = Callable[..., Loaded]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return read(toml, csv=...), which loads the file, with sites.csv beside it."""

    def loaded(text: str, csv: str | None = None, overrides: tuple[str, ...] = ()) -> Loaded:
        path = tmp_path / "watch.toml"
        path.write_text(text)
        if csv is not None:
            (tmp_path / "sites.csv").write_text(csv)
        return load([path], None, overrides, {})

    return loaded


def problem(read: Read, *arguments: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read(*arguments)
    return str(caught.value)


# -- targets ----------------------------------------------------------------------------------

SITES = """
[classes.calm]
max_concurrent = 3
breaker = {failures = 9}
[target_defaults]
rate = "2/s"
retry = {max_retries = 7}
[targets."*.example"]
max_concurrent = 5
retry = {base = "3s"}
[targets."*.shop.example"]
max_concurrent = 2
[targets."own.shop.example"]
burst = 4
"""


def of(policy: FleetPolicy, site: str) -> tuple[float, int, int, int]:
    found = policy.target_of(site)
    return found.rate, found.max_concurrent, found.burst, found.max_retries


def test_the_most_specific_section_of_a_site_wins_key_by_key(read: Read) -> None:
    policy = fleet_policy(read(SITES).config)
    assert of(policy, "elsewhere.org") == (2.0, 0, 1, 7)
    assert of(policy, "a.example") == (2.0, 5, 1, 7)
    assert of(policy, "a.shop.example") == (2.0, 2, 1, 7)
    assert of(policy, "own.shop.example") == (2.0, 2, 4, 7)
    backoff = policy.target_of("own.shop.example").backoff
    assert backoff is not None
    assert backoff.base_ns == 3 * 10**9
    assert [name for name, _ in policy.patterns] == ["*.shop.example", "*.example"]
    assert list(policy.targets) == ["own.shop.example"]


def test_a_class_for_all_sites_brings_its_breaker(read: Read) -> None:
    assert fleet_policy(read(SITES).config).target.breaker is None, "tasks choose it by their class"
    calm = fleet_policy(read(SITES.replace('rate = "2/s"', 'class = "calm"')).config).target
    assert (calm.policy, calm.breaker and calm.breaker.failures) == ("calm", 9)


def test_what_is_shown_loads_to_the_same(read: Read) -> None:
    loaded = read(SITES)
    assert read(show(loaded)).config == loaded.config
    inherited = 'targets."own.shop.example".rate'
    assert loaded.origins[inherited].endswith("watch.toml")


def test_a_star_alone_is_refused_and_says_what_to_write(read: Read) -> None:
    told = problem(read, '[targets."*"]\nrate = "1/s"')
    assert "write [target_defaults]" in told


def test_a_class_that_is_unknown_is_told_where_it_stands(read: Read) -> None:
    told = problem(read, '[target_defaults]\nclass = "calm"')
    assert "key 'target_defaults.class'" in told


# -- schedules --------------------------------------------------------------------------------

TEMPLATE = """
[[schedule]]
name = "{name}"
foreach = "sites.csv"
task = "parser.extract"
args = {url = "https://{host}/{path}", select = {price = "{selector}"}}
every = "{every}"
timeout = "{timeout}"
target = "{host}"
"""
CSV = """name,host,path,selector,every,timeout
kites,shop.example,kites,.price,5m,
lamps,"lamps.example",,"b, i",1m,20s

"""


def test_each_row_of_a_file_is_a_schedule(read: Read) -> None:
    config = read(TEMPLATE, CSV).config
    assert list(config.schedule) == ["kites", "lamps"]
    kites, lamps = config.schedule.values()
    assert kites.args == {"url": "https://shop.example/kites", "select": {"price": ".price"}}
    assert (kites.every_ns, kites.timeout_ns, kites.target) == (300 * 10**9, 0, "shop.example")
    assert lamps.args == {"url": "https://lamps.example/", "select": {"price": "b, i"}}
    assert lamps.timeout_ns == 20 * 10**9
    (first, _) = fleet_policy(config).schedules
    assert msgpack.decode(first.args)["url"] == "https://shop.example/kites"


def test_rows_of_a_list_keep_their_types(read: Read) -> None:
    rows = '[{n = "a", pages = 3}, {n = "b", pages = 4}]'
    text = f'[[schedule]]\nname = "{{n}}-{{row}}"\nforeach = {rows}\ntask = "parser.fetch"\n'
    text += 'every = "1m"\n'
    config = read(text + 'args = {url = "http://x/{{{n}}}", max_bytes = "{pages}"}').config
    assert {name: each.args for name, each in config.schedule.items()} == {
        "a-1": {"url": "http://x/{a}", "max_bytes": 3},
        "b-2": {"url": "http://x/{b}", "max_bytes": 4},
    }


def test_columns_may_have_any_name_and_other_braces_stay(read: Read) -> None:
    text = TEMPLATE.replace("{selector}", "{select.price}").replace("{path}", "{page no} a{3}")
    csv = CSV.replace("selector", "select.price").replace("path", "page no")
    kites, _ = read(text, csv).config.schedule.values()
    assert kites.args == {"url": "https://shop.example/kites a{3}", "select": {"price": ".price"}}


def test_a_value_of_a_row_is_told_with_the_line_it_is_from(read: Read, tmp_path: Path) -> None:
    loaded = read(TEMPLATE, CSV)
    assert loaded.origins["schedule.lamps.every"] == f"{tmp_path / 'sites.csv'} line 3"
    assert loaded.origins["schedule.lamps.task"] == str(tmp_path / "watch.toml")
    told = problem(read, TEMPLATE, CSV.replace("5m", "soon"))
    assert f"{tmp_path / 'sites.csv'} line 2: key 'schedule.kites.every'" in told


def test_25_sites_fit_into_60_lines(read: Read) -> None:
    rows = "".join(f"site-{n},https://site{n}.example/,h1\n" for n in range(25))
    text = TEMPLATE.replace("https://{host}/{path}", "{url}")
    text = "\n".join(line for line in text.splitlines() if "{every}" not in line)
    text = text.replace('timeout = "{timeout}"', 'every = "5m"').replace('target = "{host}"', "")
    assert len(read(text, "name,url,selector\n" + rows).config.schedule) == 25
    assert len((text + rows).splitlines()) < 60


@pytest.mark.parametrize(
    ("text", "csv", "told"),
    [
        (TEMPLATE, None, "sites.csv no such file"),
        (TEMPLATE, "", "needs a first line"),
        (TEMPLATE, "name,name\na,b\n", "needs a first line"),
        (TEMPLATE, "name\na,b\n", "more cells than columns in line 2"),
        (TEMPLATE, 'name\n"a\n', "not valid CSV"),
        (TEMPLATE, "name,host\na,b\n", "has no column 'path': known are row, name, host"),
        (TEMPLATE, CSV.replace("lamps,", "kites,"), "is there twice"),
        (TEMPLATE.replace('"{name}"', '"all"'), CSV, "needs a name for each row"),
        (TEMPLATE.replace('"sites.csv"', "3"), CSV, "is neither a CSV file"),
        (TEMPLATE.replace('"sites.csv"', "[3]"), CSV, "is neither a CSV file"),
    ],
)
def test_what_cannot_be_filled_in_is_told(read: Read, text: str, csv: str, told: str) -> None:
    assert told in problem(read, text, csv)


def test_a_path_of_the_command_line_must_be_absolute(read: Read, tmp_path: Path) -> None:
    given = ('schedule."{name}".foreach=sites.csv',)
    text = TEMPLATE.replace('foreach = "sites.csv"\n', "")
    with pytest.raises(ConfigurationError, match="is not an absolute path"):
        read(text, CSV, given)
    given = (f'schedule."{{name}}".foreach={tmp_path}/sites.csv',)
    assert len(read(text, CSV, given).config.schedule) == 2
