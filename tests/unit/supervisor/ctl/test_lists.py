"""Lists begin with what is wrong, and fit a terminal. The answers are of support.long_names."""

import re
from collections.abc import Callable

import pytest
from wcwidth import wcswidth

from musterd.supervisor.api import rpc
from musterd.supervisor.ctl import (
    alerts,
    breakers,
    cluster_view,
    memory,
    schedules,
    sessions,
    show,
)
from musterd.supervisor.ctl.table import Paper
from support import long_names

SITES, POOLS, SCHEDULES = long_names.SITES, long_names.POOLS, long_names.SCHEDULES


def first_words(text: str, head: str) -> list[str]:
    """Return the first column of the table with this head."""
    begun = re.search(rf"^{head}  +", text, re.MULTILINE)
    assert begun is not None
    table, _, _ = text[begun.start() :].partition("\n\n")
    shown = [line.split("  ")[0] for line in table.splitlines()[1:]]
    return list(dict.fromkeys(shown))


def test_pools_that_do_not_run_come_first_then_those_that_are_held_back() -> None:
    names = first_words(show.fleet(long_names.fleet()), "POOL")
    assert names[:3] == ["aurora-price-watch-parser-night", "browser", "aurora-price-watch-parser"]
    assert names[3:] == [name for name in POOLS if name not in names[:3]], "else as they are"


def test_workers_that_do_not_run_come_first() -> None:
    names = first_words(show.fleet(long_names.fleet()), "WORKER")
    night = [f"aurora-price-watch-parser-night/{number}" for number in range(3)]
    assert names[:5] == [*night, "browser/1", "parser/0"]


def test_tasks_that_failed_come_first_each_the_newest_first() -> None:
    text = show.tasks(long_names.tasks(("running", "failed", "expired", "succeeded")))
    states = [line.split()[1] for line in text.splitlines()[1:-1]]
    assert states == ["failed", "expired"] * 6 + ["running", "succeeded"] * 6
    numbers = [line.split()[0] for line in text.splitlines()[1:-1]]
    assert numbers[:12] == sorted(numbers[:12]), "the number of these ids grows with their age"


@pytest.mark.parametrize(
    ("listed", "asked", "head", "names"),
    [
        (
            breakers._table,
            rpc.ListBreakers(),
            "SITE",
            [SITES[1], SITES[4], SITES[2], SITES[3], SITES[0]],
        ),
        (
            schedules._table,
            rpc.ListSchedules(),
            "SCHEDULE",
            [SCHEDULES[3], SCHEDULES[2], SCHEDULES[5], SCHEDULES[0], SCHEDULES[4], SCHEDULES[1]],
        ),
        (
            sessions._table,
            rpc.ListSessions(),
            "SESSION",
            ["учётная-запись", "shop", "account-of-the-aurora-shop-in-the-second-region"],
        ),
        (alerts._listed, rpc.ListAlerts(), "ALERT", ["telegram-of-the-people-on-call", "mail"]),
    ],
)
def test_what_is_wrong_comes_first(
    listed: Callable[[object], str], asked: rpc.Params, head: str, names: list[str]
) -> None:
    shown = first_words(listed(long_names.answer(asked)), head)
    assert shown[: len(names)] == names


def test_pools_that_memory_holds_back_come_first() -> None:
    text = "\n\n".join(memory._parts(long_names.answer(rpc.ShowMemory())))  # type: ignore[arg-type]
    assert first_words(text, "POOL")[:2] == [POOLS[4], POOLS[0]]


def test_nodes_that_are_lost_come_first() -> None:
    text = cluster_view.node_table(long_names.nodes())
    states = [re.split(r"  +", line)[1] for line in text.splitlines()[1:]]
    assert states == ["lost", "silent", "alive", "alive"]
    pools = first_words(cluster_view.fleet_text(long_names.cluster()), "POOL")
    assert pools[0] == "aurora-price-watch-parser-night"


def test_a_session_with_a_problem_says_so_below() -> None:
    text = sessions._table(long_names.answer(rpc.ListSessions()))  # type: ignore[arg-type]
    assert "учётная-запись: it cannot be decrypted with sessions.key_file" in text


@pytest.mark.parametrize("columns", [60, 80, 100, 132])
def test_a_cluster_fits_the_terminal(columns: int) -> None:
    on = Paper(columns)
    lines = cluster_view.fleet_text(long_names.cluster(), on).splitlines()
    lines += cluster_view.node_table(long_names.nodes(), on).splitlines()
    assert max(wcswidth(line) for line in lines) <= columns
    assert not re.search(r"\w…\w*$", "\n".join(lines), re.MULTILINE), "words are not cut"


def test_a_quiet_fleet_fits_80_columns_in_one_line_each() -> None:
    whole = show.fleet(long_names.quiet_fleet())
    assert max(map(len, whole.splitlines())) <= 80
    assert show.fleet(long_names.quiet_fleet(), Paper(80)) == whole
