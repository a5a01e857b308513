"""The formats of log lines, and which one is chosen."""

import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.ctl import cli
from musterd.supervisor.log import formats
from musterd.supervisor.log.log import MESSAGES
from musterd.supervisor.log.message_ids import MESSAGE_IDS

ROOT = Path(__file__).resolve().parents[4]
# Keys of the configuration, and methods of control.sock.
OTHER_WORDS = {f"cluster.{name}" for name in ("url", "url_file", "url_secret", "task", "tasks")}
CATALOG = ROOT / "systemd" / "musterd.catalog"
# The supervisor itself writes these fields, not a Report.
OTHER_FIELDS = {"COUNT"}

SAY = """
import sys
from musterd.supervisor.log import log
log.configure("debug", *sys.argv[1:])
log.note("worker.crashed", "error", pool="p", worker="p/0", reason="exited with code 1")
"""


def record(**fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("musterd", logging.ERROR, "", 0, "worker crashed", (), None)
    made.fields = {"EVENT": "worker.crashed", "WORKER": "p/0", **fields}
    return made


def say(*arguments: str, env: dict[str, str] | None = None, stderr: Any = subprocess.PIPE) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "JOURNAL_STREAM")}
    done = subprocess.run(
        [sys.executable, "-c", SAY, *arguments],
        stderr=stderr,
        env={**clean, "TERM": "xterm", **(env or {})},
        check=True,
        text=True,
        timeout=60,
    )
    return done.stderr or ""


def on_terminal(env: dict[str, str] | None = None) -> str:
    ours, theirs = pty.openpty()
    try:
        say(env=env, stderr=theirs)
        return os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_gets_colours_and_a_pipe_does_not() -> None:
    assert re.match(r"\x1b\[31m\d\d:\d\d:\d\d error worker crashed .*\x1b\[0m", on_terminal())
    assert re.match(r"\d\d:\d\d:\d\d error worker crashed event=worker.crashed pool=p ", say())


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_whoever_wants_no_colours_gets_none(env: dict[str, str]) -> None:
    assert "\x1b" not in on_terminal(env)


def test_json_is_one_object_per_line() -> None:
    told = json.loads(say("", "json"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", told.pop("at"))
    assert told == {
        "level": "error",
        "message": "worker crashed",
        "event": "worker.crashed",
        "pool": "p",
        "worker": "p/0",
        "reason": "exited with code 1",
    }


def test_a_log_file_may_have_either_format(tmp_path: Path) -> None:
    say(str(tmp_path / "a"), "auto")
    say(str(tmp_path / "b"), "json")
    assert re.match(r"\d{4}-\d\d-\d\d [\d:]{8} error worker crashed ", (tmp_path / "a").read_text())
    assert json.loads((tmp_path / "b").read_text())["worker"] == "p/0"


def test_a_line_break_in_a_field_does_not_make_a_second_line() -> None:
    line = formats.LineFormatter(colour=False, date=False).format(record(REASON="a\nb"))
    assert "\n" not in line
    assert "\n" not in formats.JsonFormatter().format(record(REASON="a\nb"))


HOSTILE = "a\x1b[31m\rb\u2028c\u2029\x85d\x9b2J\x7f\n\x00e"


def is_one_clean_line(line: str) -> bool:
    return len(line.splitlines()) == 1 and line.isprintable()


@pytest.mark.parametrize(
    "formatter",
    [
        formats.LineFormatter(colour=False, date=False),
        formats.JsonFormatter(),
        formats.PrefixFormatter(),
    ],
)
def test_nothing_in_a_message_or_a_field_moves_the_cursor_or_ends_the_line(
    formatter: logging.Formatter,
) -> None:
    made = record(REASON=HOSTILE, OUTPUT="\x85")
    made.msg = f"worker said {HOSTILE}"
    line = formatter.format(made)
    assert is_one_clean_line(line), line
    if isinstance(formatter, formats.JsonFormatter):
        told = json.loads(line)
        assert (told["reason"], told["message"]) == (HOSTILE, f"worker said {HOSTILE}")


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    made = record()
    made.exc_text = f"Traceback\n  x\nValueError: {HOSTILE}"
    for formatter in (
        formats.LineFormatter(colour=False, date=False),
        formats.PrefixFormatter(),
    ):
        assert all(is_one_clean_line(line) for line in formatter.format(made).split("\n") if line)
    assert is_one_clean_line(formats.JsonFormatter().format(made))
    assert all(map(is_one_clean_line, formats.journal_text(made).split("\n")))


def test_the_journal_is_chosen_by_where_standard_error_goes_not_by_the_variable_alone() -> None:
    found = os.fstat(2)
    assert formats.goes_to_journal({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
    assert not formats.goes_to_journal({"JOURNAL_STREAM": f"{found.st_dev}:1"})
    assert not formats.goes_to_journal({})


def test_without_systemd_python_the_level_goes_to_the_journal_as_a_prefix() -> None:
    line = formats.PrefixFormatter().format(record(REASON="x"))
    assert line == "<3>worker crashed event=worker.crashed worker=p/0 reason=x"


def test_an_entry_of_the_journal_has_the_fields_and_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("systemd.journal")
    sent: list[tuple[str, dict[str, Any]]] = []
    handler = formats.Journal()
    monkeypatch.setattr(handler, "_send", lambda message, **fields: sent.append((message, fields)))
    handler.take([record(REASON="gone", TASK="t1")])
    assert sent == [
        (
            "worker crashed worker=p/0 reason=gone task=t1",
            {
                "PRIORITY": 3,
                "SYSLOG_IDENTIFIER": "musterd",
                "MUSTERD_EVENT": "worker.crashed",
                "MUSTERD_WORKER": "p/0",
                "MUSTERD_REASON": "gone",
                "MUSTERD_TASK": "t1",
                "MESSAGE_ID": MESSAGE_IDS["worker.crashed"],
            },
        )
    ]


def test_a_journald_that_takes_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("systemd.journal")
    monkeypatch.setattr(formats, "JOURNAL_RETRY_SECONDS", 0.0)
    tries: list[str] = []

    def send(message: str, **_fields: Any) -> None:
        tries.append(message)
        if len(tries) < 4:
            raise BlockingIOError

    handler = formats.Journal()
    monkeypatch.setattr(handler, "_send", send)
    handler.take([record()])
    assert len(tries) == 4


# -- the catalog ------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    parts = re.split(r"^-- ([0-9a-f]{32})$", CATALOG.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_id_is_explained_and_every_explanation_has_an_id() -> None:
    assert set(entries()) == set(MESSAGE_IDS.values())
    assert len(set(MESSAGE_IDS.values())) == len(MESSAGE_IDS)


def test_the_documentation_names_every_id() -> None:
    page = (ROOT / "docs" / "logs.md").read_text()
    rows = re.findall(r"^- `([\w.]+)`: `([0-9a-f]{32})`$", page, re.MULTILINE)
    assert dict(rows) == MESSAGE_IDS


def test_the_documentation_explains_every_event_of_the_cluster() -> None:
    page = (ROOT / "docs" / "logs.md").read_text()
    section = page.partition("\n## The cluster\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^- (`cluster.+?`) \(", section, re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    words = set()
    folder = ROOT / "supervisor"
    # `musterctl --cluster events` makes up its own, of what it sees in the database.
    for path in set(folder.rglob("*.py")) - {folder / "ctl" / "cluster_events.py"}:
        words |= set(re.findall(r'"(cluster\.[a-z_]+)"', path.read_text()))
    known = {name for name in MESSAGES if name.startswith("cluster.")}
    assert explained == known
    assert words - known - OTHER_WORDS == set()


@pytest.mark.parametrize("event", MESSAGE_IDS)
def test_an_explanation_names_fields_and_commands_that_there_are(event: str) -> None:
    text = entries()[MESSAGE_IDS[event]]
    assert re.search(r"^Subject: \S", text, re.MULTILINE)
    fields = {name.upper() for name in Report.__struct_fields__} | OTHER_FIELDS
    used = set(re.findall(r"@MUSTERD_([A-Z_]+)@", text))
    assert used <= fields
    assert not re.search(r"@(?!MUSTERD_[A-Z_]+@)\w+@", text)
    commands = re.findall(r"\bmusterctl (\w+)", text)
    assert commands or "musterd check-config" in text
    assert set(commands) <= set(cli.commands)


def test_journalctl_compiles_the_catalog(tmp_path: Path) -> None:
    source = tmp_path / "usr/lib/systemd/catalog"
    source.mkdir(parents=True)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    (source / "musterd.catalog").write_text(CATALOG.read_text())
    try:
        command = ["journalctl", f"--root={tmp_path}", "--update-catalog"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no journalctl here")
    assert (done.returncode, done.stderr) == (0, "")
    command = ["journalctl", f"--root={tmp_path}", "--list-catalog"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert {line.split()[0] for line in listed.stdout.splitlines()} == set(MESSAGE_IDS.values())
