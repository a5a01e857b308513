"""A submitter can reach the secrets of the pool, and nothing else that the daemon has."""

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musterd import Secret, TaskFailed
from support.daemon import Muster, Musters

TOKEN = "0123456789abcdef0123456789abcdef"
ALERT_URL = "json://127.0.0.1:9/alert-token-of-the-daemon"
CREDENTIAL = "given-to-the-pool-in-full"
UNKNOWN = "UNRELATED_DATABASE_URL"

SHOP = """
import os
from musterd import Worker, task

class Shop(Worker):
    @task
    def environment(self, ctx) -> dict:
        return dict(os.environ)

    @task
    def size(self, ctx, key: str) -> int:
        return len(key)
"""


class Listener:
    """A server of the submitter, and the headers that it received."""

    def __init__(self) -> None:
        heard: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heard.append(str(self.headers))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.heard = heard
        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def daemon(muster: Musters) -> Any:
    """Make a daemon with a web token, an alert, a variable of its own, and two pools."""
    made = muster({}, start=False)
    (made.folder / "shop.py").write_text(SHOP)
    credentials, secrets = made.folder / "credentials", made.folder / "secrets"
    credentials.mkdir()
    secrets.mkdir()
    for name, value in (("http-token", TOKEN), ("SHOP_GIVEN", CREDENTIAL), ("SHOP_KEPT", "kept")):
        (credentials / name).write_text(value)
        (credentials / name).chmod(0o600)
    (secrets / "FILED").write_text("filed")
    pools = {
        "shop": {
            "worker": "shop:Shop",
            "secrets_dir": str(secrets),
            "secrets": ["*", "SHOP_GIVEN", "SHOP_VARIABLE"],
            "env": {"OF_POOL": "of the pool"},
        },
        "parser": {"worker": "musterd.workers.parser:ParserWorker", "secrets": ["*"]},
    }
    alert = {"on": ["worker.fatal"], "url_secret": "ALERT_URL"}
    remade = type(made)(made.folder, pools, http__token_file="http-token", alerts__ops=alert)
    made.config_path = remade.config_path
    variables = {
        "CREDENTIALS_DIRECTORY": str(credentials),
        "ALERT_URL": ALERT_URL,
        "SHOP_VARIABLE": "a variable in full",
        UNKNOWN: "postgres://user:password@db/x",
        "MUSTERD_STORE__DURABILITY": "normal",
    }
    made.popen_options = {"env": {**os.environ, **variables}}
    return made.start()


def failure(handle: Any) -> TaskFailed:
    with pytest.raises(TaskFailed) as caught:
        handle.result(timeout=30)
    return caught.value


def test_what_is_the_daemons_own_is_delivered_to_nobody(daemon: Muster, listener: Listener) -> None:
    client = daemon.client()
    own = ("http-token", "ALERT_URL", UNKNOWN, "HOME", "PATH", "CREDENTIALS_DIRECTORY")
    for name in (*own, "MUSTERD_SECRETS", "SHOP_KEPT", "SHOP_GIVEN"):
        headers = {"X-Stolen": Secret(name)}
        error = failure(client.submit("parser.fetch", {"url": listener.url, "headers": headers}))
        assert error.kind == "permanent"
        assert error.type == "musterd.RefusedSecret"
        assert f"secret '{name}' is not given to pool 'parser'" in str(error)
        assert f"[pools.parser] secrets = ['{name}']" in str(error)
    assert listener.heard == []
    client.submit("parser.fetch", {"url": listener.url}).result(timeout=30)
    assert len(listener.heard) == 1, "it would have heard"


def test_a_pool_has_its_own_secrets_and_those_it_was_given_in_full(daemon: Muster) -> None:
    client = daemon.client()
    for name, value in (
        ("FILED", "filed"),
        ("OF_POOL", "of the pool"),
        ("SHOP_GIVEN", CREDENTIAL),
        ("SHOP_VARIABLE", "a variable in full"),
    ):
        assert client.submit("shop.size", {"key": Secret(name)}).result(30) == len(value)
    for name in ("http-token", "ALERT_URL", "SHOP_KEPT", UNKNOWN):
        assert "not given to pool 'shop'" in str(
            failure(client.submit("shop.size", {"key": Secret(name)}))
        )


def test_a_run_by_hand_has_the_arguments_and_secrets_of_its_schedule(daemon: Muster) -> None:
    client = daemon.client()
    keys = {"task": "shop.size", "cron": "0 0 1 1 *"}
    client.schedules.put("given", args={"key": Secret("SHOP_GIVEN")}, **keys)
    client.schedules.put("stolen", args={"key": Secret("SHOP_KEPT")}, **keys)
    assert client.schedules.run("given").result(timeout=30) == len(CREDENTIAL)
    assert "not given to pool 'shop'" in str(failure(client.schedules.run("stolen")))
    kept = client.schedules.get("given").keys["args"]
    assert kept == {"key": {"$secret": "SHOP_GIVEN"}}
    assert CREDENTIAL.encode() not in (daemon.state / "store.db-wal").read_bytes()


def test_a_workers_environment_has_nothing_that_is_the_daemons_alone(daemon: Muster) -> None:
    found = daemon.client().submit("shop.environment").result(30)
    assert found["OF_POOL"] == "of the pool"
    assert found["SHOP_VARIABLE"] == "a variable in full"
    assert {"PATH", "HOME"} <= found.keys()
    for name in ("CREDENTIALS_DIRECTORY", "ALERT_URL", UNKNOWN, "MUSTERD_STORE__DURABILITY"):
        assert name not in found
    assert TOKEN not in str(found)
    assert "alert-token" not in str(found)
    assert Path(daemon.folder, "credentials", "http-token").read_text() == TOKEN
