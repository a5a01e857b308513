"""Tables are complete where there is room, and never wider than the terminal."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musterd.supervisor.ctl import table as table_module
from musterd.supervisor.ctl.table import (
    Column,
    Paper,
    layout,
    paper,
    short_moment,
    table,
    told,
    untold,
)
from musterd.supervisor.text.fitting import cells

COLUMNS = (
    Column("NAME", name=True),
    Column("STATE"),
    Column("WAITING", rank=2, below=told("{} waiting")),
    Column("DONE", rank=1, below=untold),
    Column("AT", short=lambda text: text[-5:]),
    Column("NOTE", rank=9),
)
ROW = ["parser", "RUNNING", "12", "1204", "2025-01-31 12:00", "lost: 1 oom"]
FINE = ["browser", "RUNNING", "0", "37", "2025-01-31 12:01", ""]


def lines(width: int, *rows: list[str]) -> list[str]:
    return table(COLUMNS, [list(row) for row in rows], Paper(width)).splitlines()


def test_a_file_or_a_wide_terminal_has_everything() -> None:
    whole = [
        "NAME     STATE    WAITING  DONE  AT                NOTE",
        "parser   RUNNING       12  1204  2025-01-31 12:00  lost: 1 oom",
        "browser  RUNNING        0    37  2025-01-31 12:01",
    ]
    assert lines(0, ROW, FINE) == whole
    assert lines(62, ROW, FINE) == whole


def test_short_forms_come_first() -> None:
    assert lines(61, ROW, FINE)[1] == "parser   RUNNING       12  1204  12:00  lost: 1 oom"


def test_a_note_without_room_is_below_its_row_alone() -> None:
    long = [*ROW[:-1], "lost: 1 oom; attempts failed: 300 ValueError, 31 SiteTimeout"]
    assert lines(60, long, ROW, FINE) == [
        "NAME     STATE    WAITING  DONE  AT     NOTE",
        "parser   RUNNING       12  1204  12:00",
        "    lost: 1 oom; attempts failed: 300 ValueError, 31",
        "    SiteTimeout",
        "parser   RUNNING       12  1204  12:00  lost: 1 oom",
        "browser  RUNNING        0    37  12:01",
    ]


def test_columns_go_by_rank_and_are_told_below_unless_they_say_nothing() -> None:
    assert lines(45, ROW, FINE) == [
        "NAME     STATE    WAITING  AT     NOTE",
        "parser   RUNNING       12  12:00  lost: 1 oom",
        "browser  RUNNING        0  12:01",
    ]
    assert lines(30, ROW, FINE) == [
        "NAME     STATE    AT",
        "parser   RUNNING  12:00",
        "    lost: 1 oom; 12 waiting",
        "browser  RUNNING  12:01",
    ]


def test_a_number_is_told_in_the_singular_too() -> None:
    crashes = told("{} crash", "es")
    assert [crashes(number) for number in ("1", "2")] == ["1 crash", "2 crashes"]


def test_different_names_stay_different() -> None:
    names = [f"nightly-import-of-the-{word}-warehouse-in-the-north" for word in ("tea", "kite")]
    shown = [row[0].strip() for row in layout(COLUMNS, [[n, *ROW[1:]] for n in names], 60).rows]
    assert len(set(shown)) == 2
    assert all("…" in name for name in shown)


def test_an_id_without_room_has_a_line_of_its_own() -> None:
    columns = (Column("ID", alone=True), Column("STATE"), Column("TASK", name=True))
    long = "@prices-of-kites-in-the-northern-region.18e94251"
    rows = [["019a", "failed", "parser.extract"], [long, "queued", "parser.extract"]]
    assert table(columns, rows, Paper(60)).splitlines() == [
        "ID    STATE   TASK",
        "019a  failed  parser.extract",
        long,
        "      queued  parser.extract",
    ]
    assert table(columns, rows, Paper()).splitlines()[2].startswith(f"{long}  queued")
    assert layout(columns, rows, 60, below=False).above == [[], []]


NAMES = st.text(st.sampled_from("abcя的-_./ "), min_size=1, max_size=90)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=6), st.integers(min_value=50, max_value=140))
def test_no_line_is_wider_than_the_terminal(rows: list[tuple[str, str]], width: int) -> None:
    texts = [[name, *ROW[1:-1], note] for name, note in rows]
    shown = table(COLUMNS, texts, Paper(width, colour=False)).splitlines()
    assert max(cells(line) for line in shown) <= width
    without = layout(COLUMNS, texts, width, below=False)
    assert not any(without.below)
    for row in [without.heads, *without.rows]:
        assert cells("  ".join(row)) <= width


def test_wide_characters_stay_aligned() -> None:
    rows = [["価格", *ROW[1:]], ["цена", *ROW[1:]]]
    first, second = (line.index("RUNNING") for line in lines(0, *rows)[1:])
    assert first + 2 == second, "two characters of two columns are as wide as four"


def test_nothing_that_others_wrote_moves_the_cursor() -> None:
    assert "\x1b" not in table(COLUMNS, [["a\x1b[2J", *ROW[1:-1], "b\nc"]], Paper(60))


@pytest.mark.parametrize(
    ("days", "shown"), [(0, "%H:%M:%S"), (-3, "%m-%d %H:%M"), (-400, "%Y-%m-%d")]
)
def test_a_moment_in_short(days: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noon = time.mktime((2026, 7, 14, 12, 0, 0, 0, 0, -1))
    today = time.localtime(noon)
    strftime = time.strftime
    monkeypatch.setattr(table_module.time, "strftime", lambda form, at=today: strftime(form, at))
    then = time.localtime(noon + 86400 * days)
    assert short_moment(strftime("%Y-%m-%d %H:%M:%S", then)) == strftime(shown, then)
    assert short_moment("-") == "-"


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paper() == Paper(0, colour=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert paper() == Paper(44, colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert paper() == Paper(44, colour=False), "without colours it is as narrow"
