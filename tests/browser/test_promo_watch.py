"""examples/promo_watch as users run it: real daemon, real browsers, exchanges on loopback."""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from musterd import Context, Permanent, Retry
from musterd.supervisor.config.load import load
from musterd.supervisor.settings.policy import fleet_policy
from musterd.workers.toolkit import MemoryState

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


def test_the_exchange_that_hangs_is_left_alone_and_delays_nobody(shown):
    assert "abyss: no promo: it was silent too often" in shown
    assert re.search(r"^abyss +open ", shown, re.MULTILINE)
    quick, slow = (min(seconds for _, seconds in answers(shown, each)) for each in PACES)
    assert quick < slow


def test_each_change_is_announced_once(shown):
    changes = re.findall(r"promo changed: (\w+): '(.*)' -> '(.*)'", shown)
    assert sorted(changes) == [
        ("aurora", "no fees in November", "free withdrawals"),
        ("nimbus", "50 USDT for a friend", "100 USDT for a friend"),
    ]


def test_the_bot_is_never_deaf_and_nothing_is_left(shown):
    [pause] = re.findall(r"never deaf for longer than (\d+) ms", shown)
    assert float(pause) < PAUSE_MS_MAX
    assert "musterd has ended, with exit code 0" in shown
    [folder] = re.findall(r"musterctl -s (\S+)/run/control.sock", shown)
    assert not Path(folder).exists()
    for process in psutil.process_iter():
        try:
            words = [process.cwd(), *process.cmdline()]
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
        assert not any(folder in word or str(EXAMPLE) in word for word in words), words


def test_the_readme_shows_what_the_demo_prints(shown):
    def shape(text: str) -> set[str]:
        """Return the steps, without numbers and paths."""
        return set(re.findall(r"^--- (.*)$", re.sub(r"\S*[\d/]\S*", "N", text), re.MULTILINE))

    for path in (EXAMPLE / "README.md", ROOT / "README.md"):
        assert shape(path.read_text()) <= shape(shown), path
    assert shape((EXAMPLE / "README.md").read_text()) == shape(shown)


# -- the workers by themselves ----------------------------------------------------------------


@pytest.fixture
def promos() -> ModuleType:
    spec = importlib.util.spec_from_file_location("promos", EXAMPLE / "promos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_result_is_another_one_only_when_the_promo_is(promos):
    ctx = Context("test")
    ctx.state = MemoryState()

    def check(promo: str) -> dict[str, str | None]:
        page = {"promo": promo, "notice": None}
        return asyncio.run(promos.compare(ctx, "aurora", page))

    first, again, second, still = check("one"), check("one"), check("two"), check("two")
    assert first == again == {"promo": "one", "before": None}
    assert second == still == {"promo": "two", "before": "one"}


def test_a_page_that_asks_for_patience_gets_it_and_one_without_a_promo_is_not_asked_again(promos):
    ctx = Context("test")
    with pytest.raises(Retry, match="back soon"):
        asyncio.run(promos.compare(ctx, "aurora", {"promo": None, "notice": "back soon"}))
    with pytest.raises(Permanent, match="aurora shows no promo"):
        asyncio.run(promos.compare(ctx, "aurora", {"promo": None, "notice": None}))


def test_every_exchange_is_watched_and_limited():
    config = load([EXAMPLE / "musterd.toml"], None, [], {}).config
    policy = fleet_policy(config)
    assert list(config.schedule) == ["aurora", "nimbus", "tortoise", "gremlin", "abyss"]
    for name, schedule in config.schedule.items():
        assert schedule.args["exchange"] == name
        target = policy.target_of(name)
        assert (target.rate, target.max_concurrent) == (5.0, 1)
    assert policy.target_of("abyss").policy == "impatient"
