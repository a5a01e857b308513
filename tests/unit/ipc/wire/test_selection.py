"""Which tasks a selection means."""

from typing import Any

import msgspec
import pytest

from musterd.ipc.wire.messages import FINAL_STATES, Failure, TaskSpec
from musterd.ipc.wire.selection import Selection

WALL = 1_700_000_000
TASK = TaskSpec("@nightly.17f", "parser.extract", b"", target="shop.example", key="promo:1")


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({}, True),
        ({"pool": "parser"}, True),
        ({"pool": "parse"}, False),
        ({"target": "shop.example"}, True),
        ({"target": "shop"}, False),
        ({"key": "promo:1"}, True),
        ({"key": "promo:"}, False),
        ({"schedule": "nightly"}, True),
        ({"schedule": "night"}, False),
        ({"since": WALL}, True),
        ({"since": WALL + 0.001}, False),
        ({"before": WALL}, False),
        ({"before": WALL + 0.001}, True),
        ({"pool": "parser", "target": "shop.example", "key": "other"}, False),
    ],
)
def test_a_task_fits_if_it_fits_everything(given: dict[str, Any], fits: bool) -> None:
    assert Selection(**given).fits(TASK, WALL * 10**9) is fits


def test_the_name_of_a_schedule_may_have_a_dot() -> None:
    task = msgspec.structs.replace(TASK, id="@a.b.17f")
    assert Selection(schedule="a.b").fits(task, 0)
    assert not Selection(schedule="a").fits(task, 0)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("timeout", True),
        ("readtimeout", True),
        ("HTTP 504", True),
        ("ReadTimeout (HTTP 504): the Gateway sleeps", True),
        ("gateway", True),
        ("505", False),
    ],
)
def test_an_error_is_found_by_the_line_that_lists_show(text: str, fits: bool) -> None:
    failure = Failure("timeout", "ReadTimeout", "the Gateway sleeps", status=504)
    assert Selection(error=text).fits_error(failure) is fits
    assert not Selection(error=text).fits_error(None)


def test_finished_is_each_final_state() -> None:
    finished = Selection(state="finished")
    assert all(finished.fits_state(state) for state in FINAL_STATES)
    assert not finished.fits_state("queued")
    assert (finished.ended, finished.live) == (True, False)
    assert (Selection().ended, Selection().live) == (False, False)
    assert (Selection(state="waiting").live, Selection(error="x").ended) == (True, True)
