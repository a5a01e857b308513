"""Libraries that log each of their steps are turned down to warnings."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from musterd.ipc.user_code import CHATTY, turn_down

LOGS = Path(__file__).parents[3] / "docs" / "logs.md"
MEANT = ("urllib3", "httpx", "asyncio", "playwright")  # libraries that CHATTY must not miss


def documented() -> list[str]:
    text = " ".join(LOGS.read_text().split())
    names = re.search(r"Libraries that log each of their steps \((.*?), \.\.\.\)", text)
    assert names is not None
    return names[1].split(", ")


KNOWN = sorted({*MEANT, *documented(), *CHATTY})


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Let every logger pass everything, as in a worker that logs all it can."""
    before = {name: logging.getLogger(name).level for name in ("root", *KNOWN)}
    for name in KNOWN:
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger().setLevel(logging.DEBUG)
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("name", KNOWN)
def test_a_chatty_library_says_warnings_only(name: str) -> None:
    turn_down("info")
    inner = logging.getLogger(f"{name}.inner")
    assert inner.getEffectiveLevel() == logging.WARNING


@pytest.mark.parametrize("level", ["debug", "DEBUG"])
def test_whoever_wants_everything_hears_them(level: str) -> None:
    turn_down(level)
    assert [name for name in CHATTY if logging.getLogger(name).level != logging.NOTSET] == []


def test_a_level_that_somebody_has_chosen_stays() -> None:
    logging.getLogger("httpx").setLevel(logging.INFO)
    turn_down("info")
    assert logging.getLogger("httpx").level == logging.INFO
