"""Data for the page: whether the fleet is well, what has changed, and nothing secret."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import (
    ScheduleKeys,
    TaskFailure,
    TaskStatus,
    WorkerStatus,
)
from musterd.supervisor.config.secrets import HIDDEN
from musterd.supervisor.web import actions, snapshot
from musterd.supervisor.web.api import ARGUMENTS_CHARS_MAX, Api
from musterd.supervisor.web.security import CALLERS_MAX, Rates
from musterd.supervisor.web.snapshot import (
    FIELDS,
    HISTORY_SECONDS,
    POINTS_MAX,
    History,
    Instants,
    Snapshots,
)
from musterd.supervisor.web.stories import EVENTS_OF_TASK_MAX, NEWEST_SHOWN, TASKS_MAX, Stories
from musterd.supervisor.web.token import Token, read_token
from support.statuses import fleet, pool

GOOD = "0123456789abcdef" * 2


# -- what has changed -------------------------------------------------------------------------


def test_a_change_holds_only_what_is_new_and_names_what_is_gone() -> None:
    told = Snapshots()
    rows = {"a/0": {"state": "RUNNING"}, "a/1": {"state": "BUSY"}}
    told.put({"workers": rows, "daemon": {"pid": 1}}, [1.0])
    told.put({"workers": {"a/0": {"state": "BUSY"}, "a/2": {"state": "RUNNING"}}}, [2.0])
    change = json.loads(told.change())
    assert change == {
        "number": 2,
        "workers": {"a/0": {"state": "BUSY"}, "a/2": {"state": "RUNNING"}, "a/1": None},
        "point": [2.0],
    }
    whole = json.loads(told.whole([[1.0], [2.0]]))
    assert whole["workers"] == {"a/0": {"state": "BUSY"}, "a/2": {"state": "RUNNING"}}
    assert whole["daemon"] == {"pid": 1}
    assert whole["points"] == [[1.0], [2.0]]


def test_a_worker_that_only_grows_older_is_no_news() -> None:
    told, instants = Snapshots(), Instants()
    for second in range(5):
        worker = WorkerStatus(name="a/0", state="BUSY", pid=3, uptime_seconds=10.0 + second * 1.01)
        status = fleet(pool(workers=[worker]))
        rows = snapshot.worker_rows(status, 1000.0 + second, instants)
        instants.turn()
        told.put({"workers": rows}, None)
    assert json.loads(told.change()) == {"number": 5}


def test_history_counts_tasks_a_second_and_forgets_what_is_old() -> None:
    history = History()
    for second in range(1500):
        status = fleet(pool("BUSY", succeeded=20 * second, queued={"high": 3}))
        point = dict(zip(FIELDS, history.add(1000.0 + second, status, None), strict=True))
    assert point["succeeded"] == 20.0
    assert (point["high"], point["low"], point["running"]) == (3, 0, 1)
    points = history.points()
    assert len(points) <= POINTS_MAX
    assert points[-1][0] - points[0][0] <= HISTORY_SECONDS


def test_counters_that_begin_anew_are_no_burst() -> None:
    history = History()
    history.add(1.0, fleet(pool("BUSY", succeeded=1000)), None)
    assert history.add(2.0, fleet(pool("BUSY", succeeded=3)), None)[1] == 0.0
    assert history.add(3.0, fleet(pool("BUSY", succeeded=500), pid=8), None)[1] == 0.0


def test_stories_are_bounded() -> None:
    stories = Stories("/nowhere")
    for number in range(TASKS_MAX + 50):
        for _ in range(EVENTS_OF_TASK_MAX + 5):
            stories.keep({"at": 1.0, "event": "task.retry", "task": f"t{number}"})
    for _ in range(NEWEST_SHOWN + 5):
        stories.keep({"at": 2.0, "event": "worker.ready", "worker": "a/0", "reason": "x" * 9000})
    stories.keep({"dropped": 7})
    assert stories.of("t0") == []
    assert len(stories.of(f"t{TASKS_MAX + 49}")) == EVENTS_OF_TASK_MAX
    assert len(stories.newest()) == NEWEST_SHOWN
    assert len(stories.newest()[0]["reason"]) < 1000


# -- what is never shown ----------------------------------------------------------------------


def api() -> Api:
    nobody: Any = None
    return Api(nobody, nobody, nobody, Token(""), ("customer",))


def test_arguments_named_in_redact_or_like_secrets_are_hidden_and_references_stay() -> None:
    shown = api().arguments(
        {
            "url": "https://a.example",
            "customer": "4711",
            "nested": [{"api_key": "k1", "x": 1}, {"password": {"$secret": "DB_PASSWORD"}}],
            "auth_header": {"deep": "k2"},
        }
    )
    assert "4711" not in shown
    assert "k1" not in shown
    assert "k2" not in shown
    assert '"$secret": "DB_PASSWORD"' in shown
    assert "https://a.example" in shown


def test_long_arguments_are_cut() -> None:
    assert len(api().arguments({"x": "y" * 100_000})) < ARGUMENTS_CHARS_MAX + 20


def test_a_line_of_a_list_has_no_arguments_result_or_traceback() -> None:
    failure = TaskFailure(kind="error", type="ValueError", message="m" * 1000, traceback="secret")
    task = TaskStatus(
        id="a", name="jobs.x", state="failed", args={"k": "secret"}, value="secret", failure=failure
    )
    row = snapshot.task_row(task)
    assert "secret" not in json.dumps(row)
    assert len(row["error"]) <= snapshot.MESSAGE_CHARS_MAX


# -- the token --------------------------------------------------------------------------------


def test_the_right_token_fits_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{GOOD}\n")
    path.chmod(0o600)
    token = Token(str(path))
    assert token.fits(GOOD)
    for wrong in ("", GOOD[:-1], f"{GOOD}x", GOOD.upper(), "\udcff", "0" * 10_000):
        assert not token.fits(wrong)


def test_a_token_that_is_replaced_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(GOOD)
    path.chmod(0o600)
    token = Token(str(path))
    assert token.fits(GOOD)
    path.write_text("another-token-of-today")
    assert not token.fits(GOOD)
    assert token.fits("another-token-of-today")
    path.unlink()
    assert not token.fits("another-token-of-today")
    assert not token.usable()


def test_without_a_token_nothing_fits() -> None:
    assert not Token("").fits("")
    assert not Token("").configured


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (GOOD, 0o644, "accessible to everybody"),
        ("short", 0o600, "at least 16"),
        ("", 0o600, "at least 16"),
        ("with a space in the middle", 0o600, "at least 16"),
        ("х" * 20, 0o600, "not plain text"),
        ("x" * 5000, 0o600, "at most 4096 bytes"),
    ],
)
def test_a_token_that_is_not_kept_as_one_is_refused(
    tmp_path: Path, content: str, mode: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=words):
        read_token(str(path))
    assert not Token(str(path)).fits(content)
    assert "actions are off" in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_token_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(GOOD)
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigurationError, match="belongs to uid 12345"):
        read_token(str(path))


def test_a_credential_of_systemd_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(ConfigurationError, match="LoadCredential"):
        read_token("http-token")
    (tmp_path / "http-token").write_text(GOOD)
    (tmp_path / "http-token").chmod(0o400)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_token("http-token") == GOOD


# -- actions and rates ------------------------------------------------------------------------


def test_actions_are_what_they_say_and_nothing_else() -> None:
    found = actions.decode(b'{"action":"scale","pool":"jobs","size":3}')
    assert found.request() == rpc.Scale(pool="jobs", size=3, no_block=True)
    found = actions.decode(b'{"action":"reset","target":"a.example"}')
    assert found.request() == rpc.SetBreaker(target="a.example", command="reset")
    for bad in (
        b"{}",
        b"[]",
        b'{"action":"shutdown"}',
        b'{"action":"scale","pool":"jobs","size":-1}',
        b'{"action":"scale","pool":"jobs","size":1,"more":2}',
        b'{"action":"retry","ids":[]}',
        b'{"action":"drain"}',
        b'{"action":"schedule.add","name":"kites"}',
        b'{"action":"schedule.add","name":"","keys":{}}',
        b'{"action":"schedule.run","name":"kites","keys":{}}',
    ):
        with pytest.raises(actions.msgspec.DecodeError):
            actions.decode(bad)


def test_an_edit_changes_what_it_names_and_leaves_the_rest() -> None:
    edit = actions.decode(
        b'{"action":"schedule.edit","name":"kites","keys":{"cron":"@daily"},"unset":["every"]}'
    )
    assert isinstance(edit, actions.EditSchedule)
    assert edit.request() == rpc.GetSchedule(name="kites")
    found = ScheduleKeys(
        name="kites",
        state="active",
        task="jobs.look",
        when="every 5m",
        keys={"task": "jobs.look", "every": "5m", "args": {"token": "t"}},
    )
    told = msgspec.Raw(msgspec.json.encode(found))
    kept = {"task": "jobs.look", "args": {"token": "t"}, "cron": "@daily"}
    assert edit.edited(told) == rpc.PutSchedules([rpc.NewSchedule("kites", kept)])
    hidden = actions.EditSchedule("kites", {"args": {"auth": [{"token": HIDDEN}]}})
    with pytest.raises(rpc.RpcError, match="musterctl schedule edit kites"):
        hidden.edited(told)


def test_the_log_has_the_keys_of_a_schedule_and_not_their_values() -> None:
    keys = {"task": "jobs.look", "args": {"password": "hunter2"}, "x" * 1000: 1}
    for action in (actions.AddSchedule("kites", keys), actions.EditSchedule("kites", keys)):
        words = action.words()
        assert words.startswith(f"schedule.{type(action).__name__[:-8].lower()} kites: task, args")
        assert "hunter2" not in words
        assert len(words) < 500


def test_one_who_asks_too_often_does_not_slow_down_others_and_many_are_forgotten() -> None:
    rates = Rates(0.001, 3)
    assert [rates.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert rates.take("b")
    for number in range(CALLERS_MAX):
        rates.take(str(number))
    assert rates.take("a")
