"""How musterctl reads arguments and shows answers, without a daemon."""

import contextlib
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec
import pytest

from musterd.supervisor.api.cluster import ClusterStatus
from musterd.supervisor.api.status import (
    AttemptStatus,
    FleetStatus,
    PoolStatus,
    TaskFailure,
    TaskStatus,
    WorkerStatus,
)
from musterd.supervisor.ctl import output, show, streams
from musterd.supervisor.ctl.app import cli
from musterd.supervisor.ctl.arguments import task_arguments
from musterd.supervisor.ctl.connection import Connection, Unreachable
from musterd.supervisor.ctl.table import Paper

DOCUMENT = Path(__file__).parents[4] / "docs" / "musterctl.md"


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("k=1", 1),
        ("k=1.5", 1.5),
        ("k=true", True),
        ("k=null", None),
        ('k={"a": [1]}', {"a": [1]}),
        ('k="1"', "1"),
        ("k=plain text", "plain text"),
        ("k=", ""),
        ("k=a=b", "a=b"),
        ("k=007", "007"),
        ("k=NaN", "NaN"),
        ("k=https://site.example/?q=1", "https://site.example/?q=1"),
        ("k=" + "[" * 50_000, "[" * 50_000),
    ],
)
def test_a_value_is_json_or_else_text(pair: str, value: object) -> None:
    assert task_arguments((pair,), None) == {"k": value}


def test_pairs_win_over_json_arguments() -> None:
    assert task_arguments(("a=2", "c=3"), '{"a": 1, "b": 1}') == {"a": 2, "b": 1, "c": 3}


@pytest.mark.parametrize(
    ("pairs", "json_args", "message"),
    [
        (("novalue",), None, "NAME=VALUE"),
        (("=1",), None, "NAME=VALUE"),
        (("a=1", "a=2"), None, "twice"),
        ((), "[1]", "JSON object"),
        ((), "{", "JSON object"),
    ],
)
def test_arguments_that_make_no_sense_are_a_usage_error(
    pairs: tuple[str, ...], json_args: str | None, message: str
) -> None:
    with click.Context(cli), pytest.raises(click.UsageError, match=message):
        task_arguments(pairs, json_args)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (0.44, "0.4s"),
        (12.9, "12s"),
        (190, "3m 10s"),
        (7500, "2h 05m"),
        (3 * 86400 + 4 * 3600, "3d 4h"),
    ],
)
def test_durations_read_at_a_glance(seconds: float, text: str) -> None:
    assert show.duration(seconds) == text


def fleet(reason: str = "") -> FleetStatus:
    workers = [
        WorkerStatus(
            name="parser/0",
            state="BUSY",
            pid=4711,
            task_id="0192",
            method="extract",
            uptime_seconds=190,
            task_seconds=0.44,
            tasks_done=620,
        ),
        WorkerStatus(
            name="parser/1", state="BACKOFF", restarts=12, lost={"exit": 12}, reason=reason
        ),
    ]
    pool = PoolStatus(
        name="parser",
        state="RUNNING",
        size=2,
        running=1,
        busy=1,
        queued={"critical": 1, "high": 0, "normal": 5, "low": 4},
        succeeded=1204,
        lost={"exit": 12, "oom": 1},
        workers=workers,
    )
    return FleetStatus(
        version="9.9", pid=42, uptime_seconds=7500, state="running", pools=[pool],
        containment="pidns",
    )  # fmt: skip


def test_the_status_is_a_table_with_aligned_columns() -> None:
    assert show.fleet(fleet("exit 1")).splitlines() == [
        "musterd 9.9  running  pid 42  up 2h 05m  containment pidns",
        "",
        "POOL    STATE    WORKERS  BUSY  QUEUED  WAITING  DONE  FAILED  RESTARTS  NOTE",
        "parser  RUNNING  1/2         1      10        0  1204       0         0"
        "  lost: 12 exit, 1 oom; queued: 1 critical",
        "",
        "WORKER    STATE     PID  UPTIME  TASKS  RESTARTS  LOST     TASK  DOING",
        "parser/1  BACKOFF     -  -           0        12  12 exit     -  exit 1",
        "parser/0  BUSY     4711  3m 10s    620         0  -        0192  extract 0.4s",
    ]


def test_a_node_of_a_cluster_has_a_line_about_it() -> None:
    cluster = ClusterStatus(node="shed\x1b", state="member", lease_seconds=21)
    text = show.fleet(msgspec.structs.replace(fleet("exit 1"), cluster=cluster))
    assert text.splitlines()[2] == r"cluster: node shed\x1b: member, lease 21 s"


def test_colours_change_nothing_but_the_colours() -> None:
    plain = show.fleet(fleet("exit 1"), Paper(200))
    painted = show.fleet(fleet("exit 1"), Paper(200, colour=True))
    assert painted != plain
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain


def test_a_worker_cannot_send_control_characters_to_the_terminal() -> None:
    text = show.fleet(fleet("evil \x1b[2J\rname\n"))
    assert "\x1b" not in text
    assert "\r" not in text
    assert r"evil \x1b[2J\rname\n" in text
    failure = TaskFailure(kind="error", message="\x1b]0;x\x07", traceback="line 1\n\tline 2\x1b[0m")
    shown = show.task(TaskStatus(id="1", name="a.b", state="failed", failure=failure))
    assert "\x1b" not in shown
    assert "line 1\n\tline 2\\x1b[0m" in shown


def test_of_a_task_prose_is_wrapped_and_what_is_copied_is_not() -> None:
    why = "the exchange answered with a long explanation of what is wrong in its maintenance window"
    failure = TaskFailure(kind="error", type="ValueError", message=why, traceback="x" * 100)
    status = TaskStatus(
        id="019a8b2c3d49f86d081e4000002a",
        name="bot.check",
        state="failed",
        args={"url": f"https://exchange.example/{'page/' * 20}"},
        failure=failure,
        attempts=[AttemptStatus(attempt=1, at=1.7e9, worker="bot/0", failure=failure)],
    )
    shown = show.task(status, Paper(80)).split("\n")
    long = [line[:9] for line in shown if len(line) > 80]
    assert long == ["arguments", "xxxxxxxxx"]
    at = next(at for at, line in enumerate(shown) if line.startswith("error:"))
    assert shown[at + 1].startswith(" " * 13)
    assert f"ValueError: {why}" in " ".join(" ".join(shown[at : at + 2]).split())
    assert f"bot/0 ValueError: {why}" in " ".join(" ".join(shown[-2:]).split())
    whole = show.task(status).split("\n")
    assert f"error:       ValueError: {why}" in whole


def test_a_fleet_without_pools_says_so() -> None:
    empty = FleetStatus(version="1", pid=1, uptime_seconds=1, state="running", pools=[])
    assert "no pools" in show.fleet(empty)


def test_results_are_shown_as_text_or_as_json() -> None:
    assert show.value("plain") == "plain"
    assert show.value({"a": [1]}) == '{\n  "a": [\n    1\n  ]\n}'
    assert show.value(None) == "null"


HOSTILE = "a\x1b[2J\rb\u2028c\x85d\x9b\x7f"


def test_what_others_wrote_moves_no_cursor_and_ends_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = show.value({"a": HOSTILE})
    assert shown.replace("\n", "").isprintable()
    assert msgspec.json.decode(shown) == {"a": HOSTILE}
    output.emit_json(msgspec.json.encode({HOSTILE: [HOSTILE, "\U000e0001"]}))
    told = capsys.readouterr().out
    assert told.replace("\n", "").isprintable()
    assert msgspec.json.decode(told) == {HOSTILE: [HOSTILE, "\U000e0001"]}
    fields = {"at": 0, "event": HOSTILE, "reason": HOSTILE, "output": f"x\n{HOSTILE}", "k": HOSTILE}
    assert all(line.isprintable() for line in show.event(fields))
    assert len(show.event(fields)) == 3
    for line in streams._as_json(fields):
        assert line.isprintable()
        assert {**msgspec.json.decode(line), **fields} == msgspec.json.decode(line)
    chunk = {"worker": HOSTILE, "lines": [HOSTILE]}
    assert all(line.isprintable() for line in show.chunk(chunk, plain=False))
    assert show.value(HOSTILE) == HOSTILE, "into a file or a pipe: as it is"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert show.value(HOSTILE).isprintable()


def test_an_event_is_one_line() -> None:
    (line,) = show.event(
        {"at": 0, "event": "worker.crashed", "worker": "a/0", "reason": "two\nlines"}
    )
    assert line.endswith(r"info     worker.crashed worker=a/0 two\nlines")
    assert "17 events" in show.event({"dropped": 17})[0]


def test_the_document_describes_every_command_and_no_other() -> None:
    described = re.findall(r"^### `musterctl (\w+)", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(cli.commands)


def test_the_document_describes_every_option_of_each_command() -> None:
    sections = re.split(r"^### `musterctl (\w+)", DOCUMENT.read_text(), flags=re.MULTILINE)
    text = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name in ("cancel", "retry"):
        assert "(#in-bulk)" in text[name]
        text[name] += text["purge"].partition("### In bulk\n")[2]
    for name, command in cli.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name not in ("json", "help"):
                assert parameter.opts[-1] in text[name], f"{name} {parameter.opts}"


def test_the_document_describes_every_command_of_a_cluster() -> None:
    section = DOCUMENT.read_text().partition("### `musterctl cluster COMMAND`")[2]
    table = section.partition("\n\n`nodes`")[0]
    described = re.findall(r"^- `(\w+)(.*?)`:", table, re.MULTILINE)
    group = cli.commands["cluster"]
    assert isinstance(group, click.Group)
    options = {
        name: sorted(
            parameter.opts[-1]
            for parameter in command.params
            if isinstance(parameter, click.Option)
            and parameter.name not in ("json", "help", "config", "url", "url_file")
        )
        for name, command in group.commands.items()
    }
    assert {name: sorted(re.findall(r"--[\w-]+", rest)) for name, rest in described} == options


def test_a_caller_waits_while_more_callers_wait_than_the_kernel_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind("full.sock")
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                caller = held.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect("full.sock")
        with pytest.raises(Unreachable, match="does not accept connections"):
            Connection("full.sock", timeout=0.05)
        pool = held.enter_context(ThreadPoolExecutor(1))
        late = pool.submit(Connection, "full.sock", timeout=60)
        listener.settimeout(0.05)
        while not late.done():
            with contextlib.suppress(TimeoutError):
                held.enter_context(listener.accept()[0])
        late.result().close()
