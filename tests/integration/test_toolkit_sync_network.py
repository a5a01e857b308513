"""SyncNetworkClient with a real server on loopback, as a synchronous handler uses it."""

import asyncio
import contextlib
import inspect
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
from musterd.workers.toolkit import (
    BreakerOpen,
    MemoryState,
    NetworkClient,
    StateError,
    SyncNetworkClient,
    Timeouts,
    breaker,
    sync_network,
)
from musterd.workers.toolkit.network import ClientOptions, RequestOptions

QUICK = BackoffPolicy(base_ns=MILLISECOND_NS, jitter=0)
WAIT = 30.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []
    shops: ClassVar[list[str | None]] = []
    statuses: ClassVar[list[int]] = []
    hold: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self.shops.append(self.headers.get("X-Shop"))
        self.asked.append(f"{self.command} {self.path}")
        if self.path == "/never":
            self.hold.wait(4 * WAIT)  # longer than any test waits
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
    Handler.shops.clear()
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


def test_requests_answers_and_the_same_timeouts(url: str) -> None:
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
    assert Handler.shops == ["tea"] * 3


class Noted(NetworkClient):
    """Notes its arguments and its calls."""

    def __init__(self, told: Any, **options: Any) -> None:
        self.made, self.asked = options, {}
        self.timeouts = options["timeouts"]

    async def request(self, method: str, url: str, **options: Any) -> Any:
        self.asked = {"method": method, "url": url, **options}

    async def close(self) -> None: ...


def test_all_arguments_are_those_of_the_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    made_with = inspect.signature(NetworkClient).parameters
    assert set(ClientOptions.__annotations__) == set(made_with)
    asked_with = set(inspect.signature(NetworkClient.request).parameters)
    assert set(RequestOptions.__annotations__) == asked_with - {"self", "method", "url"}
    monkeypatch.setattr(sync_network, "_Inner", Noted)
    made = {name: object() for name in inspect.signature(NetworkClient).parameters}
    asked = {name: object() for name in inspect.signature(NetworkClient.request).parameters}
    del asked["self"]
    with SyncNetworkClient(**made) as client:  # type: ignore[arg-type]
        client.request(**asked)  # type: ignore[arg-type]
        assert client.timeouts is made["timeouts"]
        noted: Any = client._client
        assert noted.made == made
        assert noted.asked == asked


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_of_the_process_makes_requests_of_its_own(url: str) -> None:
    with SyncNetworkClient() as client:
        assert client.get(url).status == 200
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if client.get(f"{url}/child").status == 200 else 2
            finally:
                os._exit(code)
        deadline = time.monotonic() + WAIT
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        assert client.get(url).status == 200


def test_a_request_that_is_under_way_ends_when_the_client_is_closed(url: str) -> None:
    client = SyncNetworkClient(timeouts=Timeouts(read=3 * WAIT), max_retries=0)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            client.get(f"{url}/never")
        except BaseException as error:  # noqa: BLE001 - for the test to see
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    deadline = time.monotonic() + WAIT
    while not Handler.asked and time.monotonic() < deadline:
        time.sleep(0.01)
    client.close()
    thread.join(WAIT)
    (error,) = found
    assert isinstance(error, ConnectionError)
    assert "closed while the request was under way" in str(error)
    assert network_threads() == 0


def test_a_request_out_of_on_retry_is_refused_instead_of_waiting_for_itself(url: str) -> None:
    class Shop(SyncNetworkClient):
        def on_retry(self, attempt: int, error: Exception, pause: float) -> None:
            self.get(url)

    Handler.statuses += [503]
    found: list[BaseException] = []

    def ask() -> None:
        try:
            client.get(url)
        except BaseException as error:  # noqa: BLE001 - for the test to see
            found.append(error)

    client = Shop(backoff=QUICK)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert [type(each) for each in found] == [RuntimeError]
    client.close()


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
    with (
        SyncNetworkClient(sensitive=frozenset({"shop"})) as client,
        pytest.raises(StateError, match="'shop'"),
    ):
        client.save_state(ctx, "prices", {"url": "/?shop=k3y-of-tea"}, shop="k3y-of-tea")
