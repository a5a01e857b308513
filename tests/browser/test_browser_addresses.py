"""A pool's `allow` and `deny` hold for everything a page does, with both backends."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.workers.authoring.base import Context, Permanent
from musterd.workers.browser import BrowserWorker, find_executable
from musterd.workers.pages.connections import AddressRefused
from musterd.workers.pages.http import BadRequest

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

PATIENCE_SECONDS = 60
# Every address of 127.0.0.0/8 is this machine: two sites, of which the rules deny one.
OPEN, INNER = "127.0.0.1", "127.0.0.2"
RULES = {"deny": ["127.0.0.2/32"]}


class Site:
    """`requested` counts the requests that reached each of the two addresses."""

    def __init__(self) -> None:
        self.requested: Counter[str] = Counter()
        self.connected: Counter[str] = Counter()
        self.url = self.inner = ""

    def ahead(self) -> str:
        """Return links that Chromium follows by itself, before or after it shows the page."""
        rules = f'{{"prefetch": [{{"source": "list", "urls": ["{self.inner}/rules"]}}]}}'
        kinds = ("prefetch", "preconnect", "dns-prefetch", "modulepreload", "icon", "stylesheet")
        links = "".join(f"<link rel={kind} href='{self.inner}/{kind}'>" for kind in kinds)
        return f"{links}<script type=speculationrules>{rules}</script>"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("sockname")[0]
        self.connected[host] += 1
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.requested[f"{host}{path}"] += 1
            head = "200 OK\r\nContent-Type: text/html\r\nAccess-Control-Allow-Origin: *"
            body = "<title>well</title><p>well</p>"
            if path == "/redirect":
                head, body = f"302 Found\r\nLocation: {self.inner}/secret", ""
            elif path == "/parts":
                body += f"<img src='{self.inner}/img'><iframe src='{self.inner}/frame'></iframe>"
                body += f"<script>new WebSocket('{self.inner}/ws'.replace('http', 'ws'))</script>"
            elif path == "/ahead":
                body += self.ahead()
            elif path == "/service.js":
                head = "200 OK\r\nContent-Type: text/javascript"
                body = f"self.oninstall = event => event.waitUntil(fetch('{self.inner}/service',"
                body += " {mode: 'no-cors'}).catch(() => 0))"
            text = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write((text + body).encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    served = Site()
    outer = await asyncio.start_server(served.answer, OPEN, 0)
    inner = await asyncio.start_server(served.answer, INNER, 0)
    served.url = f"http://{OPEN}:{outer.sockets[0].getsockname()[1]}"
    served.inner = f"http://{INNER}:{inner.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        outer.close()
        inner.close()


def told(
    backend: str, story: Callable[[BrowserWorker, Site], Awaitable[None]], **rules: Any
) -> None:
    async def run() -> None:
        worker = BrowserWorker()
        worker.pool, worker.options = "browser", {"backend": backend, **(rules or RULES)}
        await worker.open()
        try:
            async with site() as served, asyncio.timeout(PATIENCE_SECONDS):
                await story(worker, served)
        finally:
            await worker.close()

    asyncio.run(run())


@pytest.fixture(params=["playwright", "cdp"])
def backend(request: pytest.FixtureRequest, scratch: Path) -> str:
    return str(request.param)


def inner_requests(served: Site) -> list[str]:
    return [each for each in served.requested if each.startswith(INNER)]


def test_an_address_that_is_denied_is_refused_for_good(backend: str) -> None:
    async def story(worker: BrowserWorker, served: Site) -> None:
        assert (await worker.render(Context("a"), f"{served.url}/"))["title"] == "well"
        # Once as the address itself, once as the target of a redirect, which only Chromium sees.
        for url in (f"{served.inner}/secret", f"{served.url}/redirect"):
            with pytest.raises(AddressRefused, match=r"denied by '127\.0\.0\.2/32'") as raised:
                await worker.render(Context("b"), url)
            assert isinstance(raised.value, Permanent)
        assert not inner_requests(served)

    told(backend, story)


def test_parts_and_scripts_of_a_page_are_held_to_the_rules_as_well(backend: str) -> None:
    async def story(worker: BrowserWorker, served: Site) -> None:
        fetched = f"await fetch('{served.inner}/fetch'); return 'got it'"
        script = f"try {{ {fetched} }} catch {{ return 'no' }}"
        page = await worker.render(Context("a"), f"{served.url}/parts", script=script)
        assert page["script"] == "no"
        assert page["title"] == "well"
        assert not inner_requests(served)

    told(backend, story)


@pytest.mark.one_backend
@pytest.mark.parametrize("rules", [RULES, {"allow": ["127.0.0.0/8"]}], ids=["denied", "allowed"])
def test_what_chromium_does_ahead_and_in_service_workers_is_held_to_the_rules(
    backend: str, rules: dict[str, list[str]]
) -> None:
    """The allowed page shows that Chromium would do all this."""

    async def story(worker: BrowserWorker, served: Site) -> None:
        script = f"""
            await navigator.serviceWorker.register("/service.js");
            await navigator.serviceWorker.ready;
            navigator.sendBeacon("{served.inner}/beacon", "x");
            await new Promise(resolve => setTimeout(resolve, 500));
        """
        page = await worker.render(Context("a"), f"{served.url}/ahead", script=script)
        assert page["title"] == "well"
        if "deny" in rules:
            assert not served.connected[INNER]
        else:
            reached = {each.removeprefix(INNER) for each in inner_requests(served)}
            assert reached >= {"/service", "/stylesheet"}, "these are waited for"

    told(backend, story, **rules)


@pytest.mark.one_backend
def test_names_are_resolved_where_they_are_checked(backend: str) -> None:
    """`localhost` is no address: only its resolution shows what it stands for."""

    async def story(worker: BrowserWorker, served: Site) -> None:
        port = served.url.rpartition(":")[2]
        with pytest.raises(
            AddressRefused, match=r"localhost is at (127.0.0.1|::1), which is denied"
        ):
            await worker.render(Context("a"), f"http://localhost:{port}/")
        assert not served.requested

    told(backend, story, deny=["private"])


@pytest.mark.one_backend
def test_only_what_is_allowed_can_be_reached(backend: str) -> None:
    async def story(worker: BrowserWorker, served: Site) -> None:
        assert (await worker.render(Context("a"), f"{served.url}/"))["title"] == "well"
        with pytest.raises(AddressRefused, match="not among the allowed"):
            await worker.render(Context("b"), f"{served.inner}/secret")
        assert not inner_requests(served)

    told(backend, story, allow=[OPEN])


@pytest.mark.one_backend
def test_peer_connections_do_not_go_around_the_rules(backend: str) -> None:
    """WebRTC asks STUN servers by UDP, which no proxy sees."""

    async def story(worker: BrowserWorker, served: Site) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stun:
            stun.bind((INNER, 0))
            stun.setblocking(False)
            server = f"stun:{INNER}:{stun.getsockname()[1]}"
            script = f"""
                const peer = new RTCPeerConnection({{iceServers: [{{urls: "{server}"}}]}});
                peer.createDataChannel("x");
                await peer.setLocalDescription(await peer.createOffer());
                await new Promise(resolve => setTimeout(resolve, 1500));
            """
            await worker.render(Context("a"), f"{served.url}/", script=script)
            with pytest.raises(BlockingIOError):
                stun.recv(2000)

    told(backend, story)


@pytest.mark.one_backend
def test_a_proxy_of_the_task_would_go_around_the_rules(backend: str) -> None:
    async def story(worker: BrowserWorker, served: Site) -> None:
        with pytest.raises(BadRequest, match="a proxy cannot be used together with allow and deny"):
            await worker.render(Context("a"), f"{served.url}/", proxy="http://127.0.0.1:1")

    told(backend, story)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deny": ["10.0.0.0/99"]}, "deny has '10.0.0.0/99'"),
        ({"deny": ["private"], "proxy": "http://127.0.0.1:1"}, "a proxy cannot be used together"),
    ],
)
def test_rules_that_cannot_be_are_told_at_the_start(options: dict[str, Any], text: str) -> None:
    worker = BrowserWorker()
    worker.pool, worker.options = "browser", {"backend": "cdp", **options}
    with pytest.raises(ConfigurationError, match=f"options: {text}"):
        asyncio.run(worker.open())


@pytest.mark.one_backend
def test_nothing_listens_once_a_page_is_closed(backend: str) -> None:
    async def story(worker: BrowserWorker, served: Site) -> None:
        def listening() -> int:
            found = psutil.Process().net_connections("tcp")
            return sum(each.status == psutil.CONN_LISTEN for each in found)

        before = listening()
        async with worker.open_page(Context("a"), served.url):
            assert listening() == before + 1
        assert listening() == before

    told(backend, story)
