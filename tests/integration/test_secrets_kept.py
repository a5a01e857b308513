"""No secret appears in anything a daemon writes or says, and replayed tasks still run."""

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from musterd import InvalidTask, Secret, TaskFailed
from musterd.supervisor.api import rpc
from support.daemon import Muster, Musters
from support.waiting import Waiting

VALUE = "vErY-sEcReT/v4lue"
FILED = "another-one-in-a-file"

LOGIN = """
import base64, hashlib, json, sys, threading, time
from pathlib import Path
from musterd import Retry, Worker, task

class Login(Worker):
    @task(max_retries=0)
    def check(self, ctx, password: str, user: str = "") -> str:
        return hashlib.sha256(password.encode()).hexdigest()

    @task(max_retries=1)
    def fail(self, ctx, password: str) -> None:
        ctx.progress(0.5, f"logging in with {password}")
        ctx.log.warning("the password is %s", password)
        ctx.metrics.counter("logins", url=f"https://x/?p={password}").inc()
        if ctx.attempt == 1:
            raise Retry(f"no luck with {password}", after=0.01)
        try:
            raise ConnectionError(f"cannot open https://x/?p={password}")
        except ConnectionError as error:
            raise ValueError(f"login with {password!r} failed") from error

    @task(max_retries=0)
    def give_away(self, ctx, password: str) -> dict:
        return {"used": f"<{password}>"}

    @task(max_retries=0)
    def remember(self, ctx, password: str) -> None:
        ctx.state.save({"password": password})

    @task(max_retries=0)
    def remember_by(self, ctx, password: str) -> None:
        ctx.state.save(1, key=f"user:{password}")

    @task(max_retries=0)
    def wrong_type(self, ctx, password: int) -> int:
        return password

    @task(max_retries=0)
    def in_forms(self, ctx, password: str, form: str, give: bool = False) -> dict:
        written = {
            "repr": lambda: repr("it's " + password + ' "so"'),
            "json in json": lambda: json.dumps(json.dumps({"p": password})),
            "json in repr": lambda: repr(json.dumps({"p": password})),
            "bytes": lambda: repr(password.encode()),
            "basic": lambda: "Basic " + base64.b64encode(b"ann:" + password.encode()).decode(),
            "lines": lambda: password,
        }[form]()
        ctx.progress(0.5, written)
        ctx.log.warning("it is %s", written)
        print_later = threading.Thread(target=self.later, args=(ctx.log, written))
        print_later.start()
        if give:
            return {"page": written}
        raise ExceptionGroup("both", [ValueError(written), KeyError(written)])

    def later(self, log, written: str) -> None:
        while not Path("over").exists():
            time.sleep(0.005)
        log.warning("after the end %s", written)
        raise ValueError("in a thread " + written)

    @task
    def wait(self, ctx, password: str, gate: str, told: str) -> int:
        Path(told).touch()
        while not Path(gate).exists():
            time.sleep(0.005)
        return len(password)
"""


@pytest.fixture
def login(muster: Musters) -> Muster:
    """Make a daemon whose workers know SHOP_PASSWORD (environment) and FILED (a file)."""
    daemon = muster({}, start=False)
    secrets = daemon.folder / "secrets"
    secrets.mkdir()
    (secrets / "FILED").write_text(FILED + "\n")
    (daemon.folder / "login.py").write_text(LOGIN)
    pool = {"worker": "login:Login", "size": 1, "secrets_dir": str(secrets)}
    pool["secrets"] = ["*", "SHOP_PASSWORD"]
    remade = type(daemon)(daemon.folder, {"login": pool}, supervisor__log_level="debug")
    daemon.config_path = remade.config_path
    daemon.popen_options = {"env": {**os.environ, "SHOP_PASSWORD": VALUE}}
    return daemon.start()


def find_everywhere(daemon: Muster, text: str) -> list[str]:
    """Return the files of the daemon that contain this text."""
    found = []
    for path in [daemon.log_path, *Path(daemon.state).rglob("*"), *Path(daemon.runtime).rglob("*")]:
        if path.is_file() and text.encode() in path.read_bytes():
            found.append(path.name)
    return found


def error_of(handle: Any) -> TaskFailed:
    with pytest.raises(TaskFailed) as caught:
        handle.result(timeout=30)
    return caught.value


def test_a_handler_gets_the_value_and_nobody_else_does(login: Muster) -> None:
    client = login.client()
    for name, value in (("SHOP_PASSWORD", VALUE), ("FILED", FILED)):
        handle = client.submit("login.check", {"password": Secret(name), "user": "ann"})
        assert handle.result(timeout=30) == hashlib.sha256(value.encode()).hexdigest()
    notes = []
    failing = client.submit("login.fail", {"password": Secret("SHOP_PASSWORD")})
    for note in failing.progress(timeout=30):
        notes.append(note.text)
    error = error_of(failing)
    assert str(error).endswith("login with '***SHOP_PASSWORD***' failed")
    assert "https://x/?p=***SHOP_PASSWORD***" in error.traceback
    assert notes[0] == "logging in with ***SHOP_PASSWORD***"
    assert "the password is ***SHOP_PASSWORD***" in login.log()
    events = str(login.ask(rpc.Events(follow=False)))
    assert "task.retry" in events
    assert "no luck with ***SHOP_PASSWORD***" in events
    shown = login.ctl("task", failing.id).stdout + login.ctl("--json", "task", failing.id).stdout
    assert "***SHOP_PASSWORD***" in shown
    status = login.ctl("--json", "status").stdout
    assert "https://x/?p=***SHOP_PASSWORD***" in status
    for value in (VALUE, FILED):
        assert value not in events + shown + status
        assert find_everywhere(login, value) == []
    assert find_everywhere(login, "SHOP_PASSWORD"), "the search finds what is there"


def test_what_a_handler_would_write_down_is_refused(login: Muster) -> None:
    client = login.client()
    args = {"password": Secret("SHOP_PASSWORD")}
    for method, what in (
        ("give_away", "the result of give_away"),
        ("remember", "the state login"),
        ("remember_by", "a key of ctx.state"),
    ):
        error = error_of(client.submit(f"login.{method}", args))
        assert what in str(error)
        assert "contains the value of secret 'SHOP_PASSWORD'" in str(error)
        assert error.kind == "permanent"
    error = error_of(client.submit("login.wrong_type", args))
    assert error.kind == "invalid"
    assert VALUE not in str(error) + error.traceback
    assert find_everywhere(login, VALUE) == []


NASTY = "it's/a \"näsTy+pässwörd-0815\\\\"
KEY = """-----BEGIN PRIVATE KEY-----
MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj
MzEfYyjiWA4R4/M2bS1GB4t7NXp98C3SC6dVMvDuictGeurT8jNbvJZHtCSuYEvu
-----END PRIVATE KEY-----"""


def test_no_form_of_a_value_leaves_a_worker(login: Muster, waiting: Waiting) -> None:
    client = login.client()
    for name, value in (("NASTY", NASTY), ("PEM", KEY)):
        (login.folder / "secrets" / name).write_text(value + "\n")
    forms = ("repr", "json in json", "json in repr", "bytes", "basic", "lines")
    args = {"password": Secret("NASTY")}
    for form in forms:
        for give in (False, True):
            error = error_of(client.submit("login.in_forms", {**args, "form": form, "give": give}))
            assert error.kind == ("permanent" if give else "error"), error
    for form in ("lines", "repr"):
        error = error_of(client.submit("login.in_forms", {"password": Secret("PEM"), "form": form}))
        assert "***PEM***" in error.traceback
    (login.folder / "over").touch()
    waiting("the threads have spoken", lambda: login.log().count("after the end") == 14)
    waiting("and died", lambda: login.log().count("ValueError: in a thread") == 14)
    basic = base64.b64encode(b"ann:" + NASTY.encode()).decode()[8:24]
    for tell_tale in ("sTy+p", "rd-0815", "MIIEvQIB", "2bS1GB4t7", basic):
        assert find_everywhere(login, tell_tale) == [], tell_tale
    events = str(login.ask(rpc.Events(follow=False))) + login.ctl("--json", "dead").stdout
    assert "rd-0815" not in events
    assert "MIIEvQIB" not in events


def test_a_missing_secret_fails_the_task_for_good_and_is_named(login: Muster) -> None:
    error = error_of(login.client().submit("login.check", {"password": Secret("NO_SUCH")}))
    assert error.kind == "permanent"
    assert error.attempts == 1
    assert "secret 'NO_SUCH' is not given to pool 'login'" in str(error)


def test_a_literal_never_gets_in(login: Muster) -> None:
    client = login.client()
    with pytest.raises(InvalidTask, match=r"argument 'password' of 'login\.check' is"):
        client.submit("login.check", {"password": "hunter2-in-clear"}).result(timeout=30)
    done = login.ctl("submit", "login.check", "password=hunter2-in-clear", "--wait")
    assert done.returncode == 1
    assert 'pass Secret("NAME")' in done.stderr
    assert find_everywhere(login, "hunter2-in-clear") == []
    done = login.ctl("submit", "login.check", 'password={"$secret": "FILED"}', "--wait")
    assert done.returncode == 0, done.stderr


def test_data_that_only_looks_like_a_reference_is_data(login: Muster) -> None:
    """Data that a program passes on from strangers must not read the worker's environment."""
    client = login.client()
    error = error_of(client.submit("login.check", {"password": None, "user": {"$secret": "HOME"}}))
    assert error.kind == "invalid"


def test_arguments_are_shown_with_the_names_of_their_secrets(login: Muster) -> None:
    secret = '{"$secret": "SHOP_PASSWORD"}'
    login.ctl("submit", "login.check", f"password={secret}", "user=eve", "--id", "a", "--wait")
    shown = login.ctl("task", "a").stdout
    assert 'arguments:   {"password":{"$secret":"SHOP_PASSWORD"},"user":"eve"}' in shown
    found = login.ask(rpc.GetTask(id="a"))
    assert found["args"] == {"password": {"$secret": "SHOP_PASSWORD"}, "user": "eve"}
    assert login.ask(rpc.ListTasks())["tasks"][0]["args"] is None


def test_a_replayed_task_finds_its_secret_again(login: Muster, waiting: Waiting) -> None:
    client, gate, told = login.client(), login.folder / "gate", login.folder / "told"
    args = {"password": Secret("SHOP_PASSWORD"), "gate": str(gate), "told": str(told)}
    handle = client.submit("login.wait", args)
    waiting("it runs", told.exists)
    login.kill()
    assert find_everywhere(login, VALUE) == []
    login.start()
    gate.touch()
    assert handle.result(timeout=30) == len(VALUE)
