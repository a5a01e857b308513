"""examples/promo_watch as users run it: real daemon, real browsers, exchanges on loopback."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from musterd.supervisor.config.load import load
from musterd.supervisor.settings.policy import fleet_policy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "promo_watch"
PACES = ("aurora", "tortoise")
PAUSE_MS_MAX = 3000.0  # on a very busy machine


@pytest.fixture(scope="module")
def shown() -> str:
    """Run the demo; return its output."""
    command = [sys.executable, str(EXAMPLE / "run.py"), "--demo"]
    # Other programs on this machine must not cost the demo its browsers.
    environment = {**os.environ, "MUSTERD_MEMORY__ENABLED": "false", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def answers(shown: str, exchange: str) -> list[tuple[str, float]]:
    """Return the promos in the bot's answers, and how long each took."""
    found = re.findall(rf"{exchange}: '(.*)', after ([\d.]+) s", shown)
    return [(promo, float(seconds)) for promo, seconds in found]


def test_every_exchange_that_can_answer_does(shown):
    assert [promo for promo, _ in answers(shown, "aurora")] == [
        "no fees in November",
        "free withdrawals",
    ]
    assert [promo for promo, _ in answers(shown, "nimbus")] == ["50 USDT for a friend"] * 2
    assert [promo for promo, _ in answers(shown, "gremlin")] == ["a token for every bug"]
    assert len(answers(shown, "tortoise")) == 2, "one of them over kill -9 of the daemon"


def test_what_a_login_shows_is_seen_and_one_login_is_enough(shown):
    assert [price.partition("'")[0] for price, _ in answers(shown, "vault")] == [
        "49.00 €",
        "39.00 €",
    ]
    assert "vault has counted 1 login, over both deaths" in shown


def test_the_exchange_that_hangs_is_left_alone_and_delays_nobody(shown):
    assert "abyss: nothing to see: it was silent too often" in shown
    assert re.search(r"^abyss +open ", shown, re.MULTILINE)
    quick, slow = (min(seconds for _, seconds in answers(shown, each)) for each in PACES)
    assert quick < slow


def test_each_change_is_announced_once(shown):
    changes = re.findall(r"news of (\S+): (.*)", shown)
    [(kiosk, coffee)] = [each for each in changes if each[0].startswith("watch-")]
    assert coffee == "promo a coffee with every trade → a cake with every trade"
    assert sorted(changes) == [
        ("aurora", "promo no fees in November → free withdrawals"),
        ("nimbus", "promo 50 USDT for a friend → 100 USDT for a friend"),
        ("vault", "price 49.00 € → 39.00 €"),
        (kiosk, coffee),
    ]


def test_what_is_watched_by_a_word_outlives_the_daemon_until_it_is_not_wanted(shown):
    [name] = re.findall(r"/kiosk is watched as (\S+)", shown)
    assert shown.index("the daemon, at work") < shown.index(f"news of {name}")
    assert f"{name} is not watched any more" in shown
    assert re.search(r"/unwatch aurora: schedule 'aurora' is in .*musterd.toml", shown)


def test_the_bot_is_never_deaf_and_nothing_is_left(shown):
    [pause] = re.findall(r"never deaf for longer than (\d+) ms", shown)
    assert float(pause) < PAUSE_MS_MAX
    assert "musterd has ended, with exit code 0" in shown
    [folder] = re.findall(r" -s (\S+)/run/control.sock", shown)
    assert not Path(folder).exists()
    for process in psutil.process_iter():
        try:
            words = [process.cwd(), *process.cmdline()]
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
        assert not any(folder in word or str(EXAMPLE) in word for word in words), words


def test_the_ways_in_are_printed_as_they_work(shown):
    [address] = re.findall(r"^dashboard: (http://127\.0\.0\.1:\d+)$", shown, re.MULTILINE)
    assert address not in re.findall(r"exchanges on (\S+)", shown)
    [command] = re.findall(r"^(\S+) -s \S+/run/control\.sock status$", shown, re.MULTILINE)
    done = subprocess.run(
        [command, "--help"], cwd=Path.cwd(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0


def test_the_readme_shows_what_the_demo_prints(shown):
    def shape(text: str) -> set[str]:
        """Return the steps, without numbers and paths."""
        return set(re.findall(r"^--- (.*)$", re.sub(r"\S*[\d/]\S*", "N", text), re.MULTILINE))

    for path in (EXAMPLE / "README.md", ROOT / "README.md"):
        assert shape(path.read_text()) <= shape(shown), path
    assert shape((EXAMPLE / "README.md").read_text()) == shape(shown)


# -- the parts by themselves --------------------------------------------------------------------


def test_every_exchange_is_watched_and_limited():
    config = load([EXAMPLE / "musterd.toml"], None, [], {}).config
    policy = fleet_policy(config)
    assert set(config.schedule) == {"aurora", "nimbus", "tortoise", "gremlin", "abyss", "vault"}
    for name, schedule in config.schedule.items():
        assert (schedule.target, schedule.notify) == (name, "task.changed")
        target = policy.target_of(name)
        assert (target.rate, target.max_concurrent) == (5.0, 1)
    assert policy.target_of("abyss").policy == "impatient"
    assert config.schedule["vault"].session == "vault"


def test_each_address_has_a_name_of_its_own_that_a_schedule_may_have(bot: ModuleType):
    urls = [
        "https://shop.example/kites",
        "http://shop.example/kites",
        "https://shop.example/Kites?page=2",
        "https://127.0.0.1:8700/" + "long/" * 50,
        "no address",
        "€",
    ]
    names = [bot.name_of(url) for url in urls]
    assert len(set(names)) == len(urls)
    assert all(re.fullmatch(r"[a-z][a-z0-9_-]{0,39}", name) for name in names)
    assert names == [bot.name_of(url) for url in urls]


@pytest.fixture
def bot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bot", EXAMPLE / "bot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
