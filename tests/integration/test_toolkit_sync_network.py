"""SyncNetworkClient against a real server on loopback, as a handler that is not async uses it."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from musterd.ipc.resilience.policy import MILLISECOND_NS, BackoffPolicy, BreakerPolicy
from musterd.workers.authoring.base import Context, TaskTimeout
from musterd.workers.pages.http import HttpError, PermanentHttpError, SiteTimeout, SiteUnreachable
from musterd.workers.toolkit import BreakerOpen, MemoryState, SyncNetworkClient, Timeouts, breaker

QUICK = BackoffPolicy(base_ns=MILLISECOND_NS, jitter=0)
WAIT = 30.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []
    statuses: ClassVar[list[int]] = []
    hold: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        if self.path == "/never":
            self.hold.wait(WAIT)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) or b"[1.0]"
        self.send_response(self.statuses.pop(0) if self.statuses else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked.clear()
    Handler.statuses.clear()
    Handler.hold.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        Handler.hold.set()
        server.shutdown()
        thread.join(WAIT)
    breaker.reset()


class Ctx(Context):
    def __init__(self, **fields: Any) -> None:
        super().__init__("task-1", **fields)
        self.state = MemoryState()


def network_threads() -> int:
    return sum(thread.name == "network" for thread in threading.enumerate())


def test_requests_answers_and_the_same_time_outs(url: str) -> None:
    with SyncNetworkClient(headers={"X-Shop": "tea"}) as client:
        limits = client.timeouts
        assert (limits.connect, limits.read, limits.write, limits.pool) == (2, 5, 2, 5)
        answer = client.get(url, params={"page": 2})
        assert (answer.status, answer.json(list[float])) == (200, [1.0])
        assert client.post(url, json={"a": 1}).json() == {"a": 1}
        assert client.request("put", f"{url}/x", body="text").text == "text"
        assert network_threads() == 1
    assert network_threads() == 0
    assert Handler.asked[0] == "GET /?page=2"


def test_it_may_be_used_again_after_it_was_closed_and_from_many_threads(url: str) -> None:
    client = SyncNetworkClient()
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(client.get, [url] * 8))
        assert [answer.status for answer in found] == [200] * 8
        client.close()
    assert network_threads() == 0


def test_retries_errors_and_the_breaker_are_those_of_the_other_client(url: str) -> None:
    told: list[tuple[int, int]] = []

    class Shop(SyncNetworkClient):
        def on_retry(self, attempt: int, error: Exception, pause: float) -> None:
            assert isinstance(error, HttpError)
            told.append((attempt, error.status))

    policy = BreakerPolicy(failures=1)
    with Shop(backoff=QUICK, max_retries=2, breaker=policy) as client:
        Handler.statuses += [503, 429]
        assert client.get(url).status == 200
        assert told == [(1, 503), (2, 429)]
        Handler.statuses += [404]
        with pytest.raises(PermanentHttpError):
            client.get(url)
        Handler.statuses += [500, 500, 500]
        with pytest.raises(HttpError):
            client.get(url)
        with pytest.raises(BreakerOpen):
            client.get(url)


def test_a_site_that_is_slow_or_not_there(url: str) -> None:
    short = Timeouts(read=timedelta(milliseconds=50))  # type: ignore[arg-type]
    assert short.read == 0.05
    with SyncNetworkClient(timeouts=short, max_retries=0) as client:
        with pytest.raises(SiteTimeout):
            client.get(f"{url}/never")
        with pytest.raises(SiteUnreachable):
            client.get("http://127.0.0.1:1/")


def test_nothing_goes_beyond_the_deadline_of_the_task(url: str) -> None:
    with SyncNetworkClient(max_retries=0) as client, pytest.raises(SiteTimeout):
        client.get(f"{url}/never", ctx=Ctx(deadline=time.monotonic() + 0.1))


def test_a_task_that_is_stopped_while_it_waits_leaves_no_request_behind(url: str) -> None:
    def strike(number: int, frame: object) -> None:
        raise TaskTimeout("its time is over")

    def wait_and_strike() -> None:
        deadline = time.monotonic() + WAIT
        while not Handler.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, strike)  # as the runtime does it
    striker = threading.Thread(target=wait_and_strike)
    try:
        with SyncNetworkClient(timeouts=Timeouts(read=60), max_retries=0) as client:
            striker.start()
            with pytest.raises(TaskTimeout):
                client.get(f"{url}/never")
            assert client._loop is not None
            deadline = time.monotonic() + WAIT
            while asyncio.all_tasks(client._loop) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not asyncio.all_tasks(client._loop)
            Handler.hold.set()
            assert client.get(url).status == 200
    finally:
        striker.join(WAIT)
        signal.signal(signal.SIGUSR2, before)


def test_the_state_of_an_operation_without_await(url: str) -> None:
    ctx = Ctx()
    with SyncNetworkClient() as client:
        with contextlib.suppress(KeyError), client.operation(ctx, "prices", shop="tea") as work:
            work.save({"page": 1})
            raise KeyError
        assert client.load_state(ctx, "prices", shop="tea") == {"page": 1}
        assert client.load_state(ctx, "prices", shop="other") is None
        client.save_state(ctx, "prices", {"page": 2}, shop="tea")
        assert client.load_state(ctx, "prices", shop="tea") == {"page": 2}
        client.clear_state(ctx, "prices", shop="tea")
        assert client.load_state(ctx, "prices", shop="tea") is None
