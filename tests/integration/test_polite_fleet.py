"""What targets say about fetching reaches the workers of a daemon, and what is kept outlives it."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from musterd import Secret
from musterd.ipc.errors import TaskFailed
from musterd.supervisor.api import rpc
from support.daemon import Musters

SECONDS = 60
WORD = "hush-" + "a-password"
NOBODY = "http://127.0.0.1:9"  # the port of `discard`, where nobody listens
PARSER = "musterd.workers.parser:ParserWorker"
PRICE = {"price": ".price"}


class Site(ThreadingHTTPServer):
    """A site, and a proxy for plain HTTP; `asked` are the heads of all requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[tuple[str, dict[str, str]]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        head = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append((self.path, head))
        robots = self.path.endswith("/robots.txt")
        body = b"User-agent: *\nCrawl-delay: 0.2\n" if robots else b"<p class=price>49.00</p>"
        same = head.get("if-none-match") == '"a"'
        self.send_response(304 if same else 200)
        self.send_header("ETag", '"a"')
        if not same:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not same:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_a_dead_proxy_of_a_target_is_left_out_and_its_breaker_stays_closed(
    muster: Musters, site: Site
) -> None:
    fleet = muster(
        {
            "parser": {
                "worker": PARSER,
                "size": 1,
                "env": {"PROXY_URL": f"http://bob:{WORD}@{site.address}"},
            }
        },
        retry__max_retries=0,
        **{
            "targets__shop.example": {"proxies": [NOBODY, "secret:PROXY_URL"], "robots": True},
            "targets__dead.example": {"proxies": [NOBODY], "breaker": {"failures": 1}},
        },
    )
    client = fleet.client()
    for path in ("kites", "boats"):
        args = {"url": f"http://shop.example/{path}", "select": PRICE}
        assert client.submit("parser.extract", args).result(SECONDS) == {"price": "49.00"}
    assert [path for path, _ in site.asked] == [
        "http://shop.example/robots.txt",
        "http://shop.example/kites",
        "http://shop.example/boats",
    ]
    assert all("proxy-authorization" in head for _, head in site.asked)
    kinds = []
    for _ in range(3):
        with pytest.raises(TaskFailed) as raised:
            client.submit("parser.fetch", {"url": "http://dead.example/"}).result(SECONDS)
        kinds.append(raised.value.type.rpartition(".")[2])
        assert WORD not in f"{raised.value} {raised.value.traceback}"
    assert {*kinds} <= {"ProxyFailed", "NoProxyLeft"}
    assert not [
        each for each in fleet.ask(rpc.ListBreakers())["breakers"] if each["state"] == "open"
    ]
    assert WORD not in fleet.log() + fleet.ctl("--json", "tasks").stdout
    for path in fleet.state.rglob("*"):
        with contextlib.suppress(OSError):
            assert WORD.encode() not in path.read_bytes()


def test_what_a_page_was_outlives_a_killed_daemon(muster: Musters, site: Site) -> None:
    fleet = muster({"parser": {"worker": PARSER, "size": 1}})
    args = {"url": f"http://{site.address}/", "select": PRICE, "conditional": True}
    first = fleet.client().submit("parser.extract", args).result(SECONDS)
    fleet.kill()
    fleet.start()
    assert fleet.client().submit("parser.extract", args).result(SECONDS) == first
    assert [head.get("if-none-match") for _, head in site.asked] == [None, '"a"']


def test_tasks_with_a_secret_are_not_kept(muster: Musters, site: Site) -> None:
    fleet = muster({"parser": {"worker": PARSER, "size": 1, "env": {"TOKEN": WORD}}})
    args = {"url": f"http://{site.address}/", "select": PRICE, "conditional": True}
    for _ in range(2):
        private = args | {"headers": {"Authorization": Secret("TOKEN")}}
        fleet.client().submit("parser.extract", private).result(SECONDS)
    assert [head.get("if-none-match") for _, head in site.asked] == [None, None]
    assert all(head["authorization"] == WORD for _, head in site.asked)


def test_workers_of_a_pool_share_the_turns_of_a_crawl_delay(muster: Musters, site: Site) -> None:
    fleet = muster({"parser": {"worker": PARSER, "size": 2, "options": {"robots": True}}})
    pages = [{"url": f"http://{site.address}/{number}"} for number in range(4)]
    handles = [fleet.client().submit("parser.fetch", each) for each in pages]
    assert [each.result(SECONDS)["status"] for each in handles] == [200] * 4
