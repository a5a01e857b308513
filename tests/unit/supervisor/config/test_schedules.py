"""[[schedule]] in the configuration: what is accepted, how files add up, every mistake named."""

import os
from collections.abc import Callable
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.secrets.reference import SECRET_CODE, SECRET_MARK
from musterd.ipc.watching.rules import PLAIN, Rules, decode_rules
from musterd.ipc.wire.messages import HIGH, NORMAL
from musterd.supervisor.config import timezones
from musterd.supervisor.config.load import load, show
from musterd.supervisor.config.schema import Config, ScheduleConfig
from musterd.supervisor.core.model.policy import SchedulePolicy, WatchPolicy
from musterd.supervisor.core.model.timing import Cron, Every
from musterd.supervisor.settings.policy import fleet_policy
from musterd.supervisor.text.units import SECOND_NS

POOL = '[pools.shop]\nworker = "shop:Shop"\n'
SIMPLE = '[[schedule]]\nname = "promos"\ntask = "shop.check"\nevery = "5m"\n'

TOLD = 'every = "5m"\nnotify = "task.changed"\n'
LONG = [str(number).zfill(199) for number in range(60)]

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def loaded(path: Path, *sets: str) -> Config:
    return load([path], None, sets, {}).config


def problems(path: Path, *sets: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        loaded(path, *sets)
    return str(caught.value).splitlines()


def policies(config: Config) -> tuple[SchedulePolicy, ...]:
    return fleet_policy(config).schedules


def test_a_schedule_becomes_a_policy(write: Write) -> None:
    text = (
        '[[schedule]]\nname = "promos"\ntask = "shop.check"\ncron = "*/5 8-18 * * MON-FRI"\n'
        'timezone = "Europe/Berlin"\npriority = "high"\njitter = "10s"\noverlap = true\n'
        'catch_up = "all"\nenabled = false\ntimeout = "30s"\nmax_retries = 2\nkey = "k"\n'
        'notify = "task.changed"\n[schedule.args]\nurl = "https://Site.example/a"\npages = [1, 2]\n'
    )
    assert policies(loaded(write("a.toml", POOL + text))) == (
        SchedulePolicy(
            "promos",
            "shop.check",
            Cron("*/5 8-18 * * MON-FRI", ZoneInfo("Europe/Berlin")),
            b"\x82\xa3url\xb6https://Site.example/a\xa5pages\x92\x01\x02",
            priority=HIGH,
            sites={"url": "site.example"},
            timeout_ns=30 * SECOND_NS,
            max_retries=2,
            key="k",
            jitter_ns=10 * SECOND_NS,
            overlap=True,
            catch_up="all",
            enabled=False,
            notify=True,
            watching=WatchPolicy(PLAIN),
        ),
    )


def test_what_is_watched_becomes_rules_and_limits(write: Write) -> None:
    text = SIMPLE + (
        'notify = "task.changed"\nwatch = ["price"]\nignore = ["time", "/[0-9]+ visitors/"]\n'
        'confirm = 2\nabove = 50\nbelow = 40.5\nby = "5%"\nkeep = 9\nstale = 0\n'
    )
    [policy] = policies(loaded(write("a.toml", POOL + text)))
    rules = Rules(("price",), ("time", "/[0-9]+ visitors/"), numbers=True)
    watching = policy.watching
    assert decode_rules(watching.rules) == rules
    assert len(watching.name) == 16
    assert watching == WatchPolicy(
        watching.rules, watching.name, 2, 50.0, 40.5, 0.05, by_share=True, keep=9, stale=0
    )


@pytest.mark.parametrize(
    ("by", "step"), [("10", (10.0, False)), ("2.5", (2.5, False)), ('"1 %"', (0.01, True))]
)
def test_a_step_is_a_number_or_a_share(write: Write, by: str, step: tuple[float, bool]) -> None:
    text = SIMPLE + f'notify = "task.changed"\nby = {by}\n'
    path = write("a.toml", POOL + text)
    [policy] = policies(loaded(path))
    assert (policy.watching.by, policy.watching.by_share) == step
    shown = write("b.toml", show(load([path], None, [], {})))
    assert policies(loaded(shown)) == (policy,)


def test_other_limits_keep_the_name_of_the_rules_and_another_field_does_not(write: Write) -> None:
    text = SIMPLE + 'notify = "task.changed"\nwatch = ["price"]\nby = 10\n'
    names = [
        policies(loaded(write("a.toml", POOL + text), *sets))[0].watching.name
        for sets in ([], ["schedule.promos.by=20"], ['schedule.promos.watch=["title"]'])
    ]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("cron", ["@daily", "@Hourly", "0 9 * * Sat-Sun"])
def test_words_of_cron_and_ranges_over_the_end_of_the_week_are_taken(
    write: Write, cron: str
) -> None:
    text = SIMPLE.replace('every = "5m"', f'cron = "{cron}"\ntimezone = "UTC"')
    [policy] = policies(loaded(write("a.toml", POOL + text)))
    assert policy.timing == Cron(cron, ZoneInfo("UTC"))


def test_little_is_needed(write: Write) -> None:
    [policy] = policies(loaded(write("a.toml", POOL + SIMPLE)))
    assert policy == SchedulePolicy("promos", "shop.check", Every(300 * SECOND_NS))
    assert (policy.priority, policy.overlap, policy.catch_up) == (NORMAL, False, "one")


def test_drop_ins_add_schedules_and_change_them(write: Write) -> None:
    file = write("a.toml", POOL + SIMPLE)
    write("a.d/b.toml", '[[schedule]]\nname = "night"\ntask = "shop.sweep"\ncron = "0 3 * * *"\n')
    write("a.d/c.toml", '[[schedule]]\nname = "promos"\nevery = "1m"\n')
    config = loaded(file, "schedule.night.enabled=false")
    assert list(config.schedule) == ["promos", "night"]
    assert config.schedule["promos"].every_ns == 60 * SECOND_NS
    assert not config.schedule["night"].enabled


def test_json_and_tables_say_the_same(write: Write) -> None:
    tables = write("a.toml", POOL + '[schedule.promos]\ntask = "shop.check"\nevery = "5m"\n')
    json = write(
        "b.json",
        '{"pools": {"shop": {"worker": "shop:Shop"}},'
        ' "schedule": [{"name": "promos", "task": "shop.check", "every": "5m"}]}',
    )
    assert loaded(tables) == loaded(json) == loaded(write("c.toml", POOL + SIMPLE))


def test_a_profile_may_change_a_schedule(write: Write) -> None:
    text = '[[profiles.night.schedule]]\nname = "promos"\nevery = "1h"\n'
    file = write("a.toml", POOL + SIMPLE + text)
    assert load([file], "night", [], {}).config.schedule["promos"].every_ns == 3600 * SECOND_NS


def test_what_is_shown_loads_to_the_same(write: Write) -> None:
    text = SIMPLE + 'args = {url = "https://a/", deep = {list = [1, "two"]}}\n'
    before = load([write("a.toml", POOL + text)], None, [], {})
    after = load([write("b.toml", show(before))], None, [], {})
    assert before.config == after.config


def test_the_time_zone_is_that_of_the_machine_unless_given(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    text = SIMPLE.replace('every = "5m"', 'cron = "0 3 * * *"')
    [policy] = policies(loaded(write("a.toml", POOL + text)))
    assert policy.timing == Cron("0 3 * * *", ZoneInfo("America/New_York"))


def test_a_secret_is_passed_on_as_a_reference(write: Write) -> None:
    text = SIMPLE + 'args = {api_key = {"$secret" = "SHOP_KEY"}}\n'
    [policy] = policies(loaded(write("a.toml", POOL + text)))
    assert policy.args == msgspec.msgpack.encode(
        {"api_key": msgspec.msgpack.Ext(SECRET_CODE, SECRET_MARK + b"SHOP_KEY")}
    )


@pytest.mark.parametrize(
    ("line", "key", "problem"),
    [
        ('cron = "61 * * * *"', "cron", 'value "61 * * * *" is not a cron expression (bad minute)'),
        ('cron = "@dayly"', "cron", "(@dayly is not one of @yearly, @annually, @monthly, @weekly"),
        ('cron = "0 0 * *"', "cron", "(wrong number of fields): give minute, hour, day of"),
        ('every = "5m"\ncache = "1us"', "cache", 'is too short: give at least "1ms"'),
        ('cron = "0 0 30 2 *"', "cron", "is not a cron expression (bad day-of-month)"),
        ('cron = "* * * * *"\nevery = "5m"', "cron", "is given beside every: remove one of them"),
        ("", "every", 'is missing: give every = "5m", or cron = "*/5 * * * *"'),
        ('every = "99ms"', "every", 'value "99ms" is too short: give at least "100ms"'),
        ('every = "5m"\ntimezone = "UTC"', "timezone", "has no effect with every: remove it"),
        (
            'cron = "* * * * *"\ntimezone = "Europe/Paradise"',
            "timezone",
            "is not a known time zone",
        ),
        ('cron = "* * * * *"\ntimezone = "../zone"', "timezone", "is not a known time zone"),
        ('cron = "* * * * *"\ntimezone = "Europe"', "timezone", "is not a known time zone"),
        ('every = "5m"\njitter = "5m"', "jitter", "is not shorter than every: lower it"),
        ('every = "5m"\ncatch_up = "some"', "catch_up", 'give "one", "none" or "all"'),
        ('every = "5m"\nnotify = "always"', "notify", 'give "" or "task.changed"'),
        ('every = "5m"\nwatch = ["a"]', "watch", 'has no effect without notify = "task.changed"'),
        ('every = "5m"\nstale = 5', "stale", 'has no effect without notify = "task.changed"'),
        (f'{TOLD}watch = ["a"]\nignore = ["a"]', "ignore", 'has "a", which is in watch'),
        (f'{TOLD}watch = ["/a/"]', "watch", "only `ignore` takes patterns"),
        (f'{TOLD}ignore = ["/[/"]', "ignore", "is no regular expression (unterminated"),
        (f'{TOLD}watch = [""]', "watch", "has a name that is empty"),
        (f'{TOLD}watch = "price"', "watch", "is not a list of fields"),
        (f"{TOLD}confirm = 0", "confirm", "give a whole number from 1 to 100"),
        (f'{TOLD}by = "some"', "by", 'give a number above 0, or a share such as "5%"'),
        (f"{TOLD}by = 0", "by", "is not a step"),
        (f"{TOLD}by = true", "by", "is not a step"),
        (f'{TOLD}above = "50"', "above", "is not a number"),
        (f"{TOLD}keep = 1", "keep", "give a whole number from 2 to 200"),
        (f'{TOLD}watch = ["a"]\ncache = "1m"', "cache", "takes results of other tasks"),
        (f'{TOLD}by = 1\nkey = "k"', "key", "takes results of other tasks"),
        (f"{TOLD}watch = {LONG}", "watch", "and ignore have over 8192 bytes together"),
        ('every = "5m"\npriority = "urgent"', "priority", 'give "critical", "high", "normal"'),
        ('every = "5m"\nevry = 1', "evry", "did you mean 'every'?"),
        ('every = "5m"\nargs = {a = 2020-01-01}', "args.a", "is neither text, number"),
        ('every = "5m"\nargs = {a = {"$secret" = "../x"}}', "args", "Secret(...): give the name"),
        ('every = "5m"\nargs = {api_key = "k"}', "args", "is named in supervisor.redact"),
        (f'every = "5m"\ntarget = "{"x" * 254}"', "target", "is longer than 253 characters"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_key(
    write: Write, line: str, key: str, problem: str
) -> None:
    text = f'[[schedule]]\nname = "promos"\ntask = "shop.check"\n{line}\n'
    file = write("a.toml", POOL + text)
    [found] = problems(file)
    assert found.startswith(f"{file}: key 'schedule.promos.{key}': ")
    assert problem in found


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("check", 'is not a task name: give "POOL.METHOD"'),
        ("nowhere.check", "has no pool: the pools are shop"),
    ],
)
def test_a_task_must_have_a_pool(write: Write, task: str, problem: str) -> None:
    file = write("a.toml", POOL + SIMPLE.replace("shop.check", task))
    assert problems(file) == [f"{file}: key 'schedule.promos.task': value \"{task}\" {problem}"]


def test_a_pool_must_be_enabled_for_what_is_enabled(write: Write) -> None:
    file = write("a.toml", POOL + "enabled = false\n" + SIMPLE)
    [found] = problems(file)
    assert "has a pool that is not enabled" in found
    assert loaded(file, "schedule.promos.enabled=false").schedule["promos"].task == "shop.check"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[[schedule]]\ntask = "shop.check"\nevery = "5m"\n',
            "key 'schedule': entry 1 has no name",
        ),
        (SIMPLE + SIMPLE, "key 'schedule': the name \"promos\" is given twice"),
        ("schedule = [3]\n", "key 'schedule': entry 1 is not a table"),
        ("schedule = 3\n", "key 'schedule': value 3 is not a table of tables"),
        (SIMPLE.replace('"promos"', '"Promos!"'), "not the name of a schedule"),
        (SIMPLE.replace('"promos"', f'"{"p" * 41}"'), "at most 40 characters"),
        (SIMPLE.replace('task = "shop.check"\n', ""), "is missing and has no default"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(write: Write, text: str, problem: str) -> None:
    # The text stands before the pools: in TOML a key behind a table belongs to that table.
    [found] = problems(write("a.toml", text + POOL))
    assert problem in found


def test_defaults_of_a_schedule() -> None:
    config = ScheduleConfig(task="a.b", every_ns=SECOND_NS)
    assert list(config.conflicts()) == []


# -- the machine's own time zone --------------------------------------------------------------


@pytest.mark.parametrize("given", [":Europe/Berlin", "Europe/Berlin"])
def test_the_variable_tz_names_the_zone(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", given)
    assert timezones.time_zone("") == ZoneInfo("Europe/Berlin")


def test_a_rule_instead_of_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST")
    with pytest.raises(ValueError, match="TZ='CET-1CEST' names no zone"):
        timezones.time_zone("")


def test_without_tz_the_zone_is_that_of_etc_localtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TZ", raising=False)
    link = tmp_path / "localtime"
    monkeypatch.setattr(timezones, "LOCALTIME", link)
    assert timezones.time_zone("") == ZoneInfo("UTC"), "there is no such file"
    data = tmp_path / "zoneinfo" / "Europe" / "Berlin"
    data.parent.mkdir(parents=True)
    data.write_bytes(_zone_file("Europe/Berlin"))
    link.symlink_to(data)
    assert timezones.time_zone("") == ZoneInfo("Europe/Berlin")
    link.unlink()
    link.write_bytes(_zone_file("America/New_York"))  # a copy instead of a link
    assert str(timezones.time_zone("")) == "local"
    link.write_text("nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read"):
        timezones.time_zone("")


def _zone_file(name: str) -> bytes:
    from importlib import resources
    from zoneinfo import TZPATH

    for folder in TZPATH:
        if os.path.exists(os.path.join(folder, name)):
            return Path(folder, name).read_bytes()
    package, _, file = name.replace("/", ".").rpartition(".")
    return resources.files(f"tzdata.zoneinfo.{package}").joinpath(file).read_bytes()


# -- pictures ---------------------------------------------------------------------------------

BROWSER = '[pools.browser]\n[pools.parser]\n[schedule.kites]\nevery = "5m"\n'


def test_a_picture_leaves_the_rules_as_they_are(write: Write) -> None:
    text = BROWSER + 'task = "browser.extract"\nnotify = "task.changed"\nwatch = ["price"]\n'
    plain, attaching = (
        policies(loaded(write("a.toml", text + more)))[0].watching
        for more in ("", 'attach = "screenshot"\n')
    )
    assert (plain.picture, attaching.picture) == (False, True)
    assert plain.name == attaching.name, "another name would begin with a new baseline"
    assert decode_rules(attaching.rules) == Rules(("price",), picture=True)
    # As rules were written before there were pictures.
    assert plain.rules == msgspec.msgpack.encode((("price",), (), False))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            'task = "parser.extract"\nnotify = "task.changed"\n',
            "has no effect with task 'parser.extract', which shows no page: use browser.extract",
        ),
        ('task = "browser.extract"\n', 'has no effect without notify = "task.changed"'),
        (
            'task = "browser.extract"\nnotify = "task.changed"\n[artefacts]\nenabled = false\n',
            "has no effect where artefacts.enabled is false",
        ),
        (
            'task = "browser.extract"\nnotify = "task.changed"\n[cluster]\nurl_secret = "DB"\n',
            "pictures stay on their node",
        ),
    ],
)
def test_a_picture_that_nobody_could_take_or_see_is_refused(
    write: Write, text: str, why: str
) -> None:
    [found] = problems(write("a.toml", BROWSER + 'attach = "screenshot"\n' + text))
    assert "schedule.kites.attach" in found
    assert why in found
