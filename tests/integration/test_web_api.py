"""The API of the page, as used by a stranger, an owner and an attacker."""

import contextlib
import http.client
import json
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from musterd.supervisor.web.live import STREAMS_MAX
from support.daemon import Muster, Musters
from support.waiting import Waiting

TOKEN = "a-token-of-this-test-0123456789"
WORKER = """
import time
from musterd import Worker, task

class Jobs(Worker):
    @task
    def echo(self, ctx, value: object = None) -> object:
        return value

    @task
    def nap(self, ctx, seconds: float) -> None:
        time.sleep(seconds)

    @task(max_retries=0)
    def fail(self, ctx, text: str, password: object = None, note: str = "") -> None:
        raise ValueError(text)
"""


NUMBERS = count(1)


class Web:
    def __init__(self, url: str) -> None:
        self.url = url
        self.host = url.removeprefix("http://")
        self.source = "127.0.0.1"  # limits of rates are those of an address

    def ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, Any, Any]:
        source = (self.source, 0)
        connection = http.client.HTTPConnection(self.host, timeout=20, source_address=source)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        is_json = text and answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text, answer.headers

    def act(self, token: str | None = TOKEN, **action: Any) -> tuple[int, Any]:
        headers = {"Content_Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        status, told, _ = self.ask("POST", "/api/actions", action, **headers)
        return status, told

    def patient(self, *args: Any, **options: Any) -> tuple[int, Any]:
        """Call act(), and again as long as the answer is "too many requests"."""
        while (answer := self.act(*args, **options))[0] == 429:
            time.sleep(0.2)
        return answer


def make(muster: Musters, waiting: Waiting, **settings: Any) -> Any:
    daemon = muster(
        {"jobs": {"worker": "jobs:Jobs", "size": 2}},
        start=False,
        http__listen="127.0.0.1:0",
        **settings,
    )
    Path(daemon.folder, "jobs.py").write_text(WORKER)
    token = Path(daemon.folder, "token")
    token.write_text(TOKEN)
    token.chmod(0o600)
    daemon.start()
    daemon.web = Web(waiting("the web process is up", lambda: daemon.status().web.address))
    return daemon


@pytest.fixture
def fleet(shared_fleet: Any) -> Any:
    """Yield the shared daemon; each test comes from an address of its own."""
    shared_fleet.web.source = f"127.0.1.{next(NUMBERS)}"
    return shared_fleet


@pytest.fixture(scope="module")
def shared_fleet(module_muster: Musters, waiting: Waiting) -> Iterator[Any]:
    """Make a daemon with a token, for all tests here that leave it unchanged."""
    folder_token = "TOKEN_FILE"
    daemon = module_muster(
        {"jobs": {"worker": "jobs:Jobs", "size": 2}},
        start=False,
        http__listen="127.0.0.1:0",
        http__token_file=folder_token,
        schedule__hourly={"task": "jobs.echo", "every": "1h"},
    )
    Path(daemon.folder, "jobs.py").write_text(WORKER)
    token = Path(daemon.folder, "token")
    token.write_text(TOKEN)
    token.chmod(0o600)
    config = daemon.config_path.read_text().replace(folder_token, str(token))
    daemon.config_path.write_text(config)
    daemon.start()
    daemon.web = Web(waiting("the web process is up", lambda: daemon.status().web.address))
    yield daemon
    daemon.close()


def failed_task(daemon: Muster, waiting: Waiting, text: str, **more: Any) -> str:
    handle = daemon.client().submit("jobs.fail", {"text": text, **more})
    waiting("it has failed", lambda: handle.status().state == "failed")
    return str(handle.id)


# -- the page ---------------------------------------------------------------------------------


def test_the_page_and_its_files_load_nothing_from_elsewhere(fleet: Any) -> None:
    status, page, headers = fleet.web.ask("GET", "/")
    assert (status, headers.get_content_type()) == (200, "text/html")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    for name in ("dashboard.js", "dashboard.css", "live.js", "tasks.js", "icon.svg"):
        status, text, headers = fleet.web.ask("GET", f"/static/{name}")
        assert status == 200
        assert headers["x-content-type-options"] == "nosniff"
        page += text
    assert "https://" not in page
    assert "innerHTML" not in page
    assert page.count("http://") == page.count("http://www.w3.org/2000/svg")
    _, _, headers = fleet.web.ask("GET", "/")
    assert fleet.web.ask("GET", "/", If_None_Match=headers["etag"])[0] == 304
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/", "/static/nothing.js"):
        assert fleet.web.ask("GET", path)[0] == 404


# -- actions ----------------------------------------------------------------------------------


def test_a_retry_works_with_the_token_and_is_refused_without(fleet: Any, waiting: Waiting) -> None:
    task = failed_task(fleet, waiting, "again")
    for token, status in ((None, 401), ("", 401), ("wrong-token-of-this-test", 401)):
        assert fleet.web.patient(token, action="retry", ids=[task])[0] == status
    status, told = fleet.web.patient(action="retry", ids=[task])
    assert (status, told["done"]) == (200, "1 task is queued again")
    waiting("it has failed again", lambda: _shown(fleet, task)["state"] == "failed")
    assert fleet.web.patient(action="retry", ids=["nothing"])[0] == 409
    waiting("it is in the log", lambda: "retry {" in fleet.log())
    assert TOKEN not in fleet.log()


def entitled(fleet: Any, path: str) -> tuple[int, Any]:
    status, told, _ = fleet.web.ask("GET", path, Authorization=f"Bearer {TOKEN}")
    return status, told


def test_schedules_are_added_edited_and_removed_with_the_token_alone(fleet: Any) -> None:
    args = {"value": {"page_token": "a-word-of-this-test"}}
    keys = {"task": "jobs.echo", "every": "1h", "args": args}
    add = {"action": "schedule.add", "name": "kites", "keys": keys}
    assert fleet.web.patient(None, **add)[0] == 401
    assert fleet.web.patient("wrong-token-of-this-test", **add)[0] == 401
    assert fleet.web.ask("GET", "/api/schedules?q=kites")[1]["found"] == 0
    assert fleet.web.act(**add) == (200, {"done": "schedule kites was added"})
    assert fleet.web.ask("GET", "/api/schedules?q=kites")[1]["found"] == 1, "at once"
    status, told = fleet.web.act(**add)
    assert status == 400
    assert "kites" in told["error"]
    assert fleet.web.ask("GET", "/api/schedule?name=kites")[0] == 401
    shown = {**keys, "args": {"value": {"page_token": "(hidden)"}}}
    assert entitled(fleet, "/api/schedule?name=kites") == (200, {"name": "kites", "keys": shown})
    edit = {"action": "schedule.edit", "name": "kites"}
    status, told = fleet.web.act(**edit, keys={"args": shown["args"]})
    assert status == 400
    assert "not shown here" in told["error"]
    status, told = fleet.web.act(**edit, keys={"every": "5x", "login": "os:system"})
    assert status == 400
    assert '"5x"' in told["error"]
    assert "login" in told["error"]
    password = {"args": {"value": 1, "password": "a-word-of-this-test"}}
    status, told = fleet.web.act(**edit, keys=password)
    assert status == 400
    assert "password" in told["error"]
    assert fleet.web.act(**edit, keys={"cron": "@daily"}, unset=["every"])[0] == 200
    kept = fleet.client().schedules.get("kites").keys
    assert kept == {"task": "jobs.echo", "cron": "@daily", "args": args}
    for word, state in (("pause", "paused"), ("resume", "active")):
        assert fleet.web.act(action=f"schedule.{word}", name="kites")[0] == 200
        assert fleet.client().schedules.get("kites").state == state
    status, told = fleet.web.act(action="schedule.run", name="kites")
    assert status == 200
    task = told["done"].rpartition(" ")[2]
    assert fleet.client().task(task).result(60) == args["value"]
    remove = {"action": "schedule.remove", "name": "kites"}
    assert fleet.web.act(**remove) == (200, {"done": "schedule kites was removed"})
    assert fleet.web.act(**remove)[0] == 404
    assert fleet.web.act(**edit, keys={"every": "1m"})[0] == 404
    assert entitled(fleet, "/api/schedule?name=kites")[0] == 404
    assert "a-word-of-this-test" not in fleet.log()


def test_a_schedule_of_a_file_is_not_to_be_changed_and_the_file_is_named(fleet: Any) -> None:
    for action in (
        {"action": "schedule.edit", "name": "hourly", "keys": {"every": "2h"}},
        {"action": "schedule.remove", "name": "hourly"},
        {"action": "schedule.add", "name": "hourly", "keys": {"task": "jobs.echo", "every": "1h"}},
    ):
        status, told = fleet.web.act(**action)
        assert 400 <= status < 500
        assert str(fleet.config_path) in told["error"]
    assert fleet.web.act(action="schedule.pause", name="hourly")[0] == 200


def test_what_is_nested_too_deep_for_a_schedule_is_refused(fleet: Any) -> None:
    for depth in (200, 990, 20_000):
        value = b'{"a":' * depth + b"1" + b"}" * depth
        for word in (b"add", b"edit"):
            action = b'{"action":"schedule.%s","name":"deep","keys":{"args":%s}}' % (word, value)
            headers = {"Content_Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
            status, told, _ = fleet.web.ask("POST", "/api/actions", action, **headers)
            assert 400 <= status < 500, (depth, word)
            assert told["error"]


def test_schedules_that_a_snapshot_has_no_room_for_are_found_by_words(fleet: Any) -> None:
    schedules = fleet.client().schedules
    names = [f"site-{number:04}" for number in range(620)]
    check = {"task": "jobs.echo", "every": "1h", "enabled": False}
    schedules.put_many({name: {**check} for name in names})
    status, told, _ = fleet.web.ask("GET", "/api/schedules?q=SITE-061")
    assert status == 200
    assert [row["name"] for row in told["rows"]] == [name for name in names if "site-061" in name]
    assert fleet.web.ask("GET", "/api/schedules?q=site")[1]["found"] == len(names)
    assert fleet.web.ask("GET", f"/api/schedules?q={'x' * 300}")[0] == 400
    schedules.delete(*names)


def _shown(fleet: Any, task: str, **headers: str) -> Any:
    while (answer := fleet.web.ask("GET", f"/api/task?id={task}", **headers))[0] == 429:
        time.sleep(0.2)
    assert answer[0] == 200, answer
    return answer[1]


def test_a_pool_is_scaled_drained_and_resumed_and_a_task_cancelled(
    fleet: Any, waiting: Waiting
) -> None:
    assert fleet.web.patient(action="scale", pool="jobs", size=3)[0] == 200
    waiting("three are up", lambda: fleet.pool("jobs").running == 3)
    assert fleet.web.patient(action="scale", pool="jobs", size=2)[0] == 200
    assert fleet.web.patient(action="scale", pool="nothing", size=2)[0] == 404
    assert fleet.web.patient(action="drain", pool="jobs")[0] == 200
    waiting("it is drained", lambda: fleet.pool("jobs").halt == "drained")
    assert fleet.web.patient(action="resume", pool="jobs")[0] == 200
    waiting("it works again", lambda: fleet.pool("jobs").halt == "")
    task = fleet.client().submit("jobs.echo", {}, delay=600)
    task.ack()
    assert fleet.web.patient(action="cancel", ids=[task.id])[0] == 200
    waiting("it is cancelled", lambda: task.status().state == "cancelled")
    assert fleet.web.patient(action="reset", target="nothing.example")[0] == 404


def test_without_a_token_in_the_configuration_actions_are_off(
    muster: Musters, waiting: Waiting
) -> None:
    daemon = make(muster, waiting)
    for token in (None, "", TOKEN):
        status, told = daemon.web.act(token, action="drain", pool="jobs")
        assert status == 403
        assert "http.token_file" in told["error"]
    assert daemon.pool("jobs").halt == ""


def test_arguments_and_tracebacks_are_for_those_with_the_token(
    fleet: Any, waiting: Waiting
) -> None:
    task = failed_task(fleet, waiting, "the text", note="for the owner")
    shown = _shown(fleet, task)
    assert "the text" in shown["error"]
    assert "for the owner" not in json.dumps(shown)
    assert "Traceback" not in json.dumps(shown)
    shown = _shown(fleet, task, Authorization=f"Bearer {TOKEN}")
    assert "for the owner" in shown["args"]
    assert "Traceback" in shown["traceback"]
    assert [each["attempt"] for each in shown["attempts"]] == [1]


def test_tasks_are_found_by_state_pool_and_words(fleet: Any, waiting: Waiting) -> None:
    task = failed_task(fleet, waiting, "an Unmistakable failure")
    status, told, _ = fleet.web.ask("GET", "/api/tasks?state=failed&pool=jobs&q=unmistakable+jobs")
    assert (status, [row["id"] for row in told["rows"]]) == (200, [task])
    _, told, _ = fleet.web.ask("GET", "/api/tasks?state=succeeded&q=unmistakable")
    assert told["rows"] == []
    assert fleet.web.ask("GET", "/api/tasks?state=nonsense")[0] == 400
    nap = fleet.client().submit("jobs.nap", {"seconds": 30.0})
    waiting("it runs", lambda: nap.status().state == "running")
    waiting(
        "it is listed",
        lambda: nap.id in str(fleet.web.ask("GET", "/api/tasks?state=running&pool=jobs")[1]),
    )
    nap.cancel()


# -- strangers --------------------------------------------------------------------------------


def test_pages_of_others_get_no_answer(fleet: Any) -> None:
    own = fleet.web.host
    assert fleet.web.ask("GET", "/api/tasks", Origin=f"http://{own}")[0] == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://{own}.evil"):
        for path in ("/", "/status", "/api/live", "/api/tasks"):
            assert fleet.web.ask("GET", path, Origin=origin)[0] == 403
        headers = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"}
        action = {"action": "drain", "pool": "jobs"}
        assert fleet.web.ask("POST", "/api/actions", action, Origin=origin, **headers)[0] == 403
    cross = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}
    assert fleet.web.ask("GET", "/status", **cross)[0] == 403
    assert fleet.web.ask("GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0]
    for path in ("/", "/api/live", "/api/actions"):
        assert fleet.web.ask("GET", path, Host="rebound.example")[0] == 421
    assert fleet.pool("jobs").halt == ""


def test_a_form_cannot_act(fleet: Any) -> None:
    kind = "application/x-www-form-urlencoded"
    status, _, _ = fleet.web.ask(
        "POST", "/api/actions", b"action=drain", Content_Type=kind, Authorization=f"Bearer {TOKEN}"
    )
    assert status in (415, 429)


def test_wrong_tokens_are_limited_and_the_right_one_is_still_heard(
    fleet: Any, waiting: Waiting
) -> None:
    def guess() -> int:
        status: int = fleet.web.act("wrong-token-of-this-test", action="x")[0]
        return status

    waiting("the limit is not reached, by other tests", lambda: guess() == 401)
    assert {guess() for _ in range(40)} | {401} == {401, 429}
    answers = [fleet.web.act(action="resume", pool="jobs")[0] for _ in range(30)]
    assert set(answers) == {200}  # though the address is over every limit


def test_the_right_token_gets_in_while_a_neighbour_guesses(fleet: Any) -> None:
    """All have one address, as behind a proxy; the token also opens the pages that only show."""
    over = threading.Event()

    def guess() -> None:
        while not over.is_set():
            fleet.web.act("wrong-token-of-this-test", action="x")

    guessing = [threading.Thread(target=guess) for _ in range(3)]
    for thread in guessing:
        thread.start()
    try:
        while fleet.web.ask("GET", "/api/tasks")[0] != 429:  # without the token: over the limit
            pass
        right = {"Authorization": f"Bearer {TOKEN}"}
        answers = [fleet.web.ask("POST", "/api/token", **right)[0] for _ in range(30)]
        answers += [fleet.web.ask("GET", "/api/tasks", **right)[0] for _ in range(30)]
    finally:
        over.set()
        for thread in guessing:
            thread.join()
    assert set(answers) == {204, 200}


def test_a_neighbour_with_all_live_pages_keeps_nobody_out(fleet: Any) -> None:
    with contextlib.ExitStack() as opened:

        def look(address: str) -> int:
            connection = http.client.HTTPConnection(
                fleet.web.host, timeout=20, source_address=(address, 0)
            )
            opened.callback(connection.close)
            connection.request("GET", "/api/live")
            answer = connection.getresponse()
            opened.callback(answer.close)
            if answer.status == 200:
                assert answer.readline() == b"retry: 2000\n"  # it is one of the open streams
            return answer.status

        assert {look("127.0.0.2") for _ in range(STREAMS_MAX)} == {200}
        assert look("127.0.0.2") == 503
        assert [look("127.0.0.3") for _ in range(2)] == [200, 200]
        assert look("127.0.0.2") == 503, "nor is anybody driven out again"


def test_whatever_is_sent_is_answered_and_changes_nothing(fleet: Any) -> None:
    """Random requests never cause a 5xx, a traceback or an effect."""
    chance = random.Random(7)
    words = ["retry", "cancel", "scale", "drain", "resume", "reset", "", "x" * 300, "\x00", "ü"]
    keys = ["action", "ids", "pool", "size", "target", "more"]

    def value(depth: int = 0) -> Any:
        kind = chance.randrange(8 if depth < 3 else 5)
        if kind == 5:
            return [value(depth + 1) for _ in range(chance.randrange(4))]
        if kind >= 6:
            return {chance.choice(keys): value(depth + 1) for _ in range(chance.randrange(5))}
        simple = [None, chance.randrange(-5, 10**6), chance.choice(words), chance.random(), True]
        return simple[kind]

    paths = ["/", "/api/live/x", "/api/tasks", "/api/task", "/api/actions", "/api/token", "/status"]
    queries = ["", "?id=", "?id=%00", "?id=" + "a" * 3000, "?state=%ff", "?q=%F0%9F%98%80", "?%%%"]
    raw = [b"", b"\xff\xfe", b"[" * 5000, b'{"action":', b"\x00" * 100]
    for _ in range(300):
        body = chance.choice(raw) if chance.random() < 0.3 else json.dumps(value()).encode()
        method = chance.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"])
        headers = {"Content_Type": chance.choice(["application/json", "text/plain", "é"])}
        if chance.random() < 0.7:
            bad = [f"Bearer {TOKEN}x", "Bearer", "Basic " + "a" * 500, "\xff" * 20]
            headers["Authorization"] = chance.choice(bad)
        path = chance.choice(paths) + chance.choice(queries)
        status, text, _ = fleet.web.ask(method, path, body, **headers)
        assert 200 <= status < 500, (method, path, body, status, text)
        assert "Traceback" not in str(text)
    # With the token: nonsense of any kind is refused.
    for _ in range(100):
        status, _ = fleet.web.patient(action=chance.choice(words), more=value())
        assert status == 400
    assert fleet.pool("jobs").halt == ""
    assert fleet.pool("jobs").size == 2


def test_slow_and_deaf_clients_take_nothing_from_tasks_and_are_dropped(
    muster: Musters, waiting: Waiting
) -> None:
    daemon = make(muster, waiting)
    host, _, port = daemon.web.host.partition(":")
    address, own = (host, int(port)), f"Host: {daemon.web.host}\r\n".encode()
    client = daemon.client()
    web = daemon.status().web.pid
    opened: list[socket.socket] = []
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.5):
            for each in opened[:150]:
                try:
                    each.send(b"X")
                except OSError:
                    continue

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        for number in range(300):
            sock = socket.create_connection(address, timeout=5)
            sock.setblocking(False)
            opened.append(sock)
            begin = b"GET /api/live HTTP/1.1\r\n" + own
            try:  # half of them never end their request, the others never read the answer
                sock.send(begin if number < 150 else begin + b"\r\n")
            except OSError:
                continue
        results = [client.submit("jobs.echo", {"value": each}) for each in range(500)]
        assert [each.result(60) for each in results] == list(range(500))
        waiting("others are answered", lambda: _is_well(daemon))
        waiting("all slow ones are gone", lambda: all(_is_closed(each) for each in opened[:150]))
    finally:
        stop.set()
        dripping.join()
        for each in opened:
            each.close()
    assert daemon.status().web.pid == web
    assert daemon.pool("jobs").failed == 0


def _is_well(daemon: Muster) -> bool:
    try:
        return bool(daemon.web.ask("GET", "/healthz")[0] == 200)
    except OSError:
        return False


def _is_closed(sock: socket.socket) -> bool:
    try:
        while select.select([sock], [], [], 0)[0]:
            if not sock.recv(65536):
                return True
    except OSError:
        return True
    return False


def test_only_so_many_pages_are_live_at_once(muster: Musters, waiting: Waiting) -> None:
    daemon = make(muster, waiting)
    connections = []
    try:
        statuses = []
        for _ in range(26):
            connection = http.client.HTTPConnection(daemon.web.host, timeout=20)
            connection.request("GET", "/api/live")
            answer = connection.getresponse()
            connections.append((connection, answer))
            statuses.append(answer.status)
            if answer.status == 200:
                assert answer.readline() == b"retry: 2000\n"
        assert statuses == [200] * 24 + [503, 503]
        assert daemon.web.ask("GET", "/healthz")[0] == 200
    finally:
        for connection, answer in connections:
            answer.close()
            connection.close()
    waiting("there is room again", lambda: _opens(daemon))


def _opens(daemon: Muster) -> bool:
    connection = http.client.HTTPConnection(daemon.web.host, timeout=20)
    try:
        connection.request("GET", "/api/live")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def test_musterctl_lists_what_has_ended(fleet: Any, waiting: Waiting) -> None:
    ended = failed_task(fleet, waiting, "it is over")
    waits = fleet.client().submit("jobs.echo", {}, delay=600)
    waits.ack()
    found = json.loads(fleet.ctl("--json", "tasks", "--state", "finished").stdout)["tasks"]
    assert ended in [each["id"] for each in found]
    assert waits.id not in [each["id"] for each in found]
    found = json.loads(fleet.ctl("--json", "tasks", "--state", "waiting").stdout)["tasks"]
    assert [each["id"] for each in found] == [waits.id]
    waits.cancel()
