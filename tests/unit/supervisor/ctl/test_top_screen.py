"""The screen of `musterctl top` for one moment of the fleet."""

import io
import time
from typing import Any

import msgspec
import pytest
from rich.console import Console

from musterd.supervisor.api.cluster import ClusterStatus
from musterd.supervisor.api.events import Event
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.rpc import Params, Restart
from musterd.supervisor.api.status import (
    BreakerStatus,
    FleetStatus,
    PoolStatus,
    ScheduleStatus,
    TaskFailure,
    TaskStatus,
    WorkerStatus,
)
from musterd.supervisor.api.verdict import BAD, WARNING, Reason, Verdict, verdict
from musterd.supervisor.ctl.top_feed import Memory, Rates, Snapshot, Use
from musterd.supervisor.ctl.top_screen import screen, short_duration, size
from musterd.supervisor.ctl.top_view import View, listed, ordered, press
from support import document_answers

GIB = 1024**3
SCREEN = """\
 1 PROBLEM   musterd 0.1.0 running                pid 4242  up 2h 05m  12:00:00
  parser is paused: musterctl resume parser
memory ██████████░░░░░░░░  54%  2.1G of 3.9G  cpu 37%  warning 70% critical 85%
tasks  3.0/s done  queued critical 0  high 1  normal 9  low 0  waiting 2

POOL     STATE    WORKERS  BUSY  QUEUED  DONE/S  FAILED  NOTE
parser   paused   2/2         1      10     3.0       3  1 high; lost: 1 signal
browser  RUNNING  1/1         0       0     0.0       0

WORKER     STATE     PID    AGE   MEM  CPU  TASKS  RST  DOING
parser/0   BUSY     4711  2h05m   82M  12%    620    0  extract 0.4s
parser/1   RUNNING  4790     3m   79M   0%    584    1
browser/0  RUNNING  4801  2h05m  214M   1%     37    0

dead     parser.extract 12s ago ValueError: no price
schedule nightly in 4h 12m: parser.fetch, last succeeded
 3m 10s ago  worker.crashed parser/1 ended by signal 9
 q  quit   s  sort: name   /  filter   j k  select   r  restart parser/1
"""


def worker(index: int, state: str = "RUNNING", **fields: Any) -> WorkerStatus:
    pid = 4000 + index if state in ("RUNNING", "BUSY") else 0
    return WorkerStatus(
        **{"name": f"parser/{index}", "state": state, "pid": pid, "uptime_seconds": 7500, **fields}
    )


def snapshot(workers: int = 2, **fields: Any) -> Snapshot:
    pool = PoolStatus(
        name="parser",
        state="RUNNING",
        size=workers,
        running=workers,
        queued={"critical": 0, "high": 1, "normal": 9, "low": 0},
        workers=[worker(index) for index in range(workers)],
    )
    fleet = FleetStatus(version="1.2.3", pid=42, uptime_seconds=90, state="running", pools=[pool])
    given = {"at": 1_700_000_000.0, "fleet": fleet, "memory": Memory(1, 4), **fields}
    return judged(Snapshot(**given))


def judged(now: Snapshot, memory: MemoryStatus | None = None) -> Snapshot:
    return msgspec.structs.replace(now, health=verdict(now.fleet, memory, now.breakers))


def changed(now: Snapshot, **fields: Any) -> Snapshot:
    """Return the snapshot with these fields of its pool changed."""
    pool = msgspec.structs.replace(now.fleet.pools[0], **fields)
    fleet = msgspec.structs.replace(now.fleet, pools=[pool])
    return judged(msgspec.structs.replace(now, fleet=fleet))


def lines(now: Snapshot, width: int = 80, height: int = 24, view: View | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or None, no_color=True)
    with console.capture() as captured:
        console.print(screen(now, view or View(), (width, height)))
    return captured.get().splitlines()


def test_a_fleet_that_is_well_says_so_first() -> None:
    assert lines(snapshot())[0].startswith(" ALL OK   musterd 1.2.3 running")
    assert snapshot().health == Verdict("ok", "Running normally", [])


@pytest.mark.parametrize("workers", [0, 1, 5, 200])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60), (60, 18)])
def test_it_fits_the_terminal_and_the_keys_are_in_the_last_line(
    workers: int, width: int, height: int
) -> None:
    shown = lines(snapshot(workers), width, height)
    assert len(shown) == height
    assert max(len(line) for line in shown) <= width
    assert shown[-1].startswith(" q  quit")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 18)])
def test_a_node_of_a_cluster_has_a_line_about_it(width: int, height: int) -> None:
    plain = snapshot(5)
    cluster = ClusterStatus(node="shed", state="member", lease_seconds=21)
    fleet = msgspec.structs.replace(plain.fleet, cluster=cluster)
    shown = lines(msgspec.structs.replace(plain, fleet=fleet), width, height)
    assert "cluster node shed: member, lease 21 s" in [line.rstrip() for line in shown]
    assert len(shown) == height
    assert not [line for line in lines(plain) if line.startswith("cluster")]


def test_everything_about_a_worker_fits_into_80_columns() -> None:
    busy = worker(1, "BUSY", method="extract", task_seconds=0.4, tasks_done=620, restarts=1)
    now = changed(snapshot(uses={"parser/1": Use(0.12, 82 * 1024**2)}), workers=[busy])
    (line,) = [line for line in lines(now) if line.startswith("parser/1")]
    assert line.split() == [
        *("parser/1", "BUSY", "4001", "2h05m", "~82M", "12%", "620", "1", "extract", "0.4s")
    ]
    measured = changed(now, workers=[msgspec.structs.replace(busy, memory_bytes=60 * 1024**2)])
    assert "60M" in next(line for line in lines(measured) if line.startswith("parser/1")).split()


def test_queues_are_shown_by_priority() -> None:
    assert "queued critical 0  high 1  normal 9  low 0  waiting 0" in "\n".join(lines(snapshot()))
    (row,) = [line for line in lines(snapshot(), 120) if line.startswith("parser ")]
    assert row.split()[4:8] == ["0", "1", "9", "0"]


@pytest.mark.parametrize(
    ("fields", "level", "text"),
    [
        (
            {"workers": [worker(0, "FATAL", reason="it crashes")], "running": 0},
            BAD,
            "parser: 1 of 1 workers gave up after too many failures: it crashes",
        ),
        (
            {"workers": [worker(0, "BACKOFF", reason="signal 9")], "running": 0},
            WARNING,
            "parser: 1 of 1 workers waiting to restart: signal 9",
        ),
        ({"state": "FATAL", "reason": "no module"}, BAD, "parser cannot run: no module"),
        ({"running": 1}, WARNING, "parser: 1 of 2 workers are up"),
        ({"halt": "drained"}, WARNING, "parser is drained: musterctl resume parser"),
        ({"workers": [worker(0, halt="paused")]}, WARNING, "paused: parser/0"),
    ],
)
def test_what_is_wrong_with_a_pool_is_told_above_all(
    fields: dict[str, Any], level: str, text: str
) -> None:
    now = changed(snapshot(), **fields)
    assert now.health.problems == [Reason(level, text)]
    shown = lines(now)
    assert shown[0].startswith(" 1 PROBLEM ")
    assert shown[1].strip() == text


def test_sites_memory_and_the_daemon_may_be_wrong_too_and_the_worst_comes_first() -> None:
    now = snapshot(
        breakers=[
            BreakerStatus(target="site.example", state="open", open_seconds=24, waiting=7),
            BreakerStatus(target="fine.example", state="closed"),
        ],
    )
    fleet = msgspec.structs.replace(now.fleet, state="draining", problem="the disk is full")
    memory = MemoryStatus(enabled=True, level="critical", stage="one", share=0.9)
    now = judged(msgspec.structs.replace(now, fleet=fleet), memory)
    assert [each.text for each in now.health.problems] == [
        "the disk is full",
        "memory is low: 90% of memory in use",
        "1 breaker is open: site.example",
        "Shutting down: finishing running tasks",
    ]
    assert [line.strip() for line in lines(now)[1:5]] == [each.text for each in now.health.problems]
    assert "breaker  site.example is open for 24s, 7 wait" in "\n".join(lines(now))


def test_a_daemon_that_does_not_answer_is_what_is_wrong() -> None:
    console = Console(file=io.StringIO(), width=80, no_color=True)
    with console.capture() as captured:
        console.print(screen(snapshot(), View(), (80, 24), "cannot reach the daemon"))
    assert captured.get().splitlines()[1].strip() == "cannot reach the daemon"


def test_workers_in_trouble_come_first_and_the_others_as_wanted() -> None:
    uses = {"parser/0": Use(0.1, 5), "parser/1": Use(0.9, 1), "parser/2": Use()}
    states = ("RUNNING", "RUNNING", "FATAL")
    now = changed(snapshot(uses=uses), workers=[worker(n, state) for n, state in enumerate(states)])
    assert [each.name for each in ordered(now, "name")] == ["parser/2", "parser/0", "parser/1"]
    assert [each.name for each in ordered(now, "cpu")] == ["parser/2", "parser/1", "parser/0"]
    assert [each.name for each in ordered(now, "memory")] == ["parser/2", "parser/0", "parser/1"]


def test_more_workers_than_lines_can_be_scrolled() -> None:
    now = snapshot(100)
    top = lines(now)
    assert any(line.startswith("parser/0 ") for line in top)
    assert any("more workers" in line for line in top)
    end = lines(now, view=View(chosen="parser/99"))
    assert any(line.startswith("parser/99 ") for line in end)
    assert not any(line.startswith("parser/0 ") for line in end)


def test_texts_of_others_cannot_move_the_cursor() -> None:
    now = changed(snapshot(), workers=[worker(0, "FATAL", reason="\x1b[2Jgone\n")], running=0)
    assert not any("\x1b" in line for line in lines(now))


def test_the_last_that_went_wrong_is_below() -> None:
    event = Event(at=1_699_999_990.0, event="worker.crashed", worker="parser/0", reason="9")
    assert "    10s ago  worker.crashed parser/0 9" in lines(snapshot(events=[event]))


def full_of_news(workers: int = 2) -> Snapshot:
    failure = TaskFailure(kind="error", type="ValueError", message="no price")
    at = 1_700_000_000.0
    return snapshot(
        workers,
        breakers=[BreakerStatus(target=f"s{n}.example", state="open") for n in range(9)],
        dead=[
            TaskStatus(id=f"id-{n}", name="parser.get", state="failed", failure=failure)
            for n in range(3)
        ],
        schedules=[
            ScheduleStatus(name=f"due{n}", state="active", task="parser.get", when="", next_at=at)
            for n in range(5)
        ],
        events=[Event(at=at, event="worker.crashed", worker="parser/0")] * 5,
    )


def test_a_long_reason_is_whole_where_few_things_are_wrong() -> None:
    why = (
        "worker = 'bot:Bot': its import failed with SyntaxError: '(' was never closed, at "
        "/home/me/bots/bot.py:25; try: python -c 'import bot'"
    )
    now = changed(snapshot(), state="FATAL", reason=why)
    assert f"parser cannot run: {why}" in " ".join(" ".join(lines(now)).split())
    low = lines(now, height=18)
    assert [line for line in low if "parser cannot run" in line or "try: python" in line] == [
        "  parser cannot run: worker = 'bot:Bot': its import failed with SyntaxError: …"
    ]
    assert len(lines(now)) == 24


def test_dead_tasks_and_what_is_due_next_are_below() -> None:
    failure = TaskFailure(kind="error", type="ValueError", message="no price")
    task = TaskStatus(id="019a", name="parser.get", state="failed", failure=failure)
    ended = msgspec.structs.replace(task, finished_at=1_699_999_988.0)
    later, soon = (
        ScheduleStatus(name=name, state="active", task="parser.get", when="", next_at=at)
        for name, at in (("later", 1_700_000_600.0), ("soon", 1_700_000_010.0))
    )
    paused = ScheduleStatus(name="held", state="paused", task="parser.get", when="")
    shown = lines(snapshot(dead=[ended], schedules=[later, paused, soon]))
    assert "dead     parser.get 12s ago ValueError: no price" in shown
    wide = lines(snapshot(dead=[ended]), width=110)
    assert "dead     parser.get 12s ago 019a ValueError: no price" in wide
    assert [line for line in shown if line.startswith("schedule")] == [
        "schedule soon in 10s: parser.get",
        "schedule later in 10m 00s: parser.get",
    ]


@pytest.mark.parametrize("workers", [2, 200])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (60, 18)])
def test_workers_and_each_kind_of_news_share_a_low_terminal(
    workers: int, width: int, height: int
) -> None:
    shown = lines(full_of_news(workers), width, height)
    assert len(shown) == height
    assert shown[-1].startswith(" q  quit")
    rows = sum(line.startswith("parser/") for line in shown)
    below = sum(line.startswith(("breaker", "dead", "schedule", "     0s")) for line in shown)
    assert rows >= min(workers, 3)
    assert below > 0
    assert rows > below or rows == workers, "workers come first"


# -- keys -------------------------------------------------------------------------------------


def pressed(now: Snapshot, *keys: str, view: View | None = None) -> tuple[View, list[Params]]:
    view, asked = view or View(), []
    for key in keys:
        view, wanted = press(view, key, now)
        asked += [wanted] if wanted is not None else []
    return view, asked


def test_a_worker_is_chosen_by_steps_and_stays_chosen_in_another_order() -> None:
    now = snapshot(30)
    assert pressed(now, "j")[0].chosen == "parser/0"
    assert pressed(now, "j", "j", "\x1b[B", "k")[0].chosen == "parser/1"
    assert pressed(now, *["\x1b[6~"] * 9)[0].chosen == "parser/29"
    view, _ = pressed(now, "j", "j", "s")
    assert (view.order, view.chosen) == ("cpu", "parser/1")
    assert any("restart parser/1" in line for line in lines(now, view=view))
    assert pressed(snapshot(0), "j", "r")[0] == View()


def test_words_are_typed_and_only_workers_that_have_all_of_them_are_left() -> None:
    now = changed(snapshot(), workers=[worker(0), worker(1, "BUSY", method="Extract"), worker(11)])
    view, asked = pressed(now, "/", *"1 extx", "\x7f", "\r")
    assert (view.words, view.typing, asked) == ("1 ext", False, [])
    assert [each.name for each in listed(now, view)] == ["parser/1"]
    assert "  2 filtered out: Esc shows all" in lines(now, view=view)
    typing, _ = pressed(now, "/", "q", "r")
    assert lines(now, view=typing)[-1].startswith(" / qr_ "), "keys are letters meanwhile"
    assert "  no matching workers: Esc shows all" in lines(now, view=typing)
    assert pressed(now, "\x1b", view=typing)[0] == View()
    assert pressed(now, "\x1b", view=view)[0] == View()


def test_a_restart_is_asked_for_once_it_is_confirmed() -> None:
    now = snapshot()
    assert pressed(now, "r", "y") == (View(), []), "nobody is chosen"
    view, asked = pressed(now, "j", "r")
    assert asked == []
    assert "restart parser/0 after its task?" in lines(now, view=view)[-1]
    assert pressed(now, "y", view=view)[1] == [Restart(names=["parser/0"], no_block=True)]
    for other in ("n", "q", "\x1b", "\r"):
        assert pressed(now, other, "y", view=view) == (View(chosen="parser/0"), [])


def test_rates_are_differences_and_never_negative() -> None:
    rates = Rates()
    assert rates.since(10.0, {"a": 5.0}) == {}
    assert rates.since(12.0, {"a": 9.0, "b": 3.0}) == {"a": 2.0, "b": 0.0}
    assert rates.since(13.0, {"a": 0.0}) == {"a": 0.0}, "the daemon was restarted"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0K"),
        (312, "312B"),
        (512 * 1024, "512K"),
        (82 * 1024**2, "82M"),
        (int(3.9 * GIB), "3.9G"),
    ],
)
def test_sizes_read_at_a_glance(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "7s"), (720, "12m"), (7500, "2h05m"), (3 * 86400, "3d")]
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


def test_a_whole_screen_looks_like_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        shown = lines(document_answers.top(), 80, 24, View(chosen="parser/1"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [line.rstrip() for line in shown if line.strip()] == [
        line for line in SCREEN.splitlines() if line
    ]
