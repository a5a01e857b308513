"""The browser worker with a real Chromium."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.supervisor.demo.sample_site import SCRIPTED
from musterd.workers.authoring.base import Context
from musterd.workers.browser import BrowserError, BrowserWorker, find_executable, worker
from musterd.workers.pages.http import BadRequest, SiteTimeout, SiteUnreachable

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

BACKENDS = ("playwright", "cdp")
RENDER_ONCE = str(Path(__file__).with_name("render_once.py"))


class User(Protocol):
    uid: int

    def run(self, command: list[str], home: Path) -> subprocess.CompletedProcess[str]: ...


def wait_until_gone(processes: Iterable[psutil.Process], seconds: float = 20) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert alive == []


def offspring() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def users_of(directory: Path) -> list[psutil.Process]:
    """Return the processes whose command line names the directory; every part of a browser does."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if str(directory) in " ".join(each.info["cmdline"] or [])
    ]


def temporary_files(directory: Path) -> list[str]:
    """Return files that a browser left in its temporary directory, except caches."""
    return [each.name for each in directory.iterdir() if not each.name.startswith(".")]


# -- in a separate process ------------------------------------------------------------------------


def check_report(done: subprocess.CompletedProcess[str], url: str) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    page = report["page"]
    assert (page["title"], page["status"], page["url"]) == (SCRIPTED.title, 200, url)
    assert f'<code class="code">{SCRIPTED.code}</code>' in page["html"]
    assert report["healthy"]
    return report


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unprivileged_user_renders_javascript_inside_chromiums_own_sandbox(
    sample_site: str, unprivileged: User, home: Path, backend: str
) -> None:
    url = f"{sample_site}/js"
    done = unprivileged.run([RENDER_ONCE, url, backend], home)
    report = check_report(done, url)
    assert report["uid"] == unprivileged.uid != 0
    assert report["sandboxed"] > 0
    assert "sandbox is off" not in done.stderr
    wait_until_gone(users_of(home))
    assert temporary_files(home) == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("backend", BACKENDS)
def test_root_renders_without_the_sandbox_and_is_warned(
    sample_site: str, scratch: Path, backend: str
) -> None:
    url = f"{sample_site}/js"
    command = [sys.executable, RENDER_ONCE, url, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    report = check_report(done, url)
    assert report["sandboxed"] == 0
    assert "sandbox is off" in done.stderr
    wait_until_gone(users_of(scratch))
    assert temporary_files(scratch) == []


def run_python(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_worker_starts_neither_threads_nor_processes() -> None:
    output = run_python(
        "import os, musterd.workers.browser, psutil\n"
        "print(len(os.listdir('/proc/self/task')), len(psutil.Process().children()))"
    )
    assert output.split() == ["1", "0"]


def test_without_playwright_the_error_names_the_extra() -> None:
    output = run_python(
        "import asyncio, sys\n"
        "sys.modules['playwright'] = None\n"
        "from musterd.workers.browser import BrowserWorker\n"
        "try:\n"
        "    asyncio.run(BrowserWorker().open())\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert output.startswith("ConfigurationError")
    assert "pip install 'musterd[browser]'" in output


def test_the_lean_backend_needs_no_playwright(scratch: Path) -> None:
    output = run_python(
        "import asyncio, sys\n"
        "sys.modules['playwright'] = None\n"
        "from musterd.workers.browser import BrowserWorker\n"
        "async def main():\n"
        "    worker = BrowserWorker()\n"
        "    worker.options = {'backend': 'cdp'}\n"
        "    await worker.open()\n"
        "    print(await worker.healthy())\n"
        "    await worker.close()\n"
        "asyncio.run(main())\n"
    )
    assert output == "True\n"
    assert temporary_files(scratch) == []


# -- in this process --------------------------------------------------------------------------


class Opened:
    """A worker with its browser, and their event loop."""

    def __init__(self, runner: asyncio.Runner, backend: str, **options: Any) -> None:
        self.worker = BrowserWorker()
        self.worker.pool, self.worker.options = "browser", {"backend": backend, **options}
        self.lean = backend == "cdp"
        self.run = runner.run
        self._others = offspring()
        self.run(self.worker.open())

    def tree(self) -> set[psutil.Process]:
        """Return the processes of the browser and its driver."""
        return offspring() - self._others

    def render(self, url: str, *, seconds: float = 30, **args: Any) -> dict[str, Any]:
        context = Context("task", deadline=time.monotonic() + seconds)
        return self.run(self.worker.render(context, url, **args))

    @property
    def contexts(self) -> int:
        """Count the open contexts, as the browser itself does."""
        browser: Any = self.worker._browser
        if self.lean:
            answer = self.run(browser._browser.command("Target.getBrowserContexts"))
            return len(answer["browserContextIds"])
        return len(browser._browser.contexts)

    @property
    def pages(self) -> int:
        assert self.worker._browser is not None
        return self.worker._browser.pages

    def chromium(self) -> psutil.Process:
        """Return the browser's main process."""
        for each in self.tree():
            with suppress(psutil.Error):  # gone meanwhile
                words = each.cmdline()
                if "--remote-debugging-pipe" in words and "--type=" not in " ".join(words):
                    return each
        raise AssertionError("there is no browser")


@pytest.fixture
def runner(scratch: Path) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(runner: asyncio.Runner, backend: str, scratch: Path) -> Iterator[Opened]:
    opened = Opened(runner, backend)
    try:
        yield opened
    finally:
        tree = opened.tree()
        opened.run(opened.worker.close())
        wait_until_gone(tree)
        assert temporary_files(scratch) == []


def test_every_outcome_leaves_no_context_and_a_healthy_browser(
    opened: Opened, sample_site: str
) -> None:
    assert opened.render(f"{sample_site}/gone")["status"] == 404
    with pytest.raises(SiteTimeout, match=r"/slow\?seconds=50 was not rendered within"):
        opened.render(f"{sample_site}/slow?seconds=50", seconds=1)
    with pytest.raises(SiteTimeout):
        opened.render(f"{sample_site}/slow?seconds=50", timeout=1.0)
    with pytest.raises(SiteUnreachable, match="net::ERR_"):
        opened.render("http://nowhere.invalid/")
    for url in ("file:///etc/passwd", "chrome://version", "data:text/html,x"):
        with pytest.raises(BadRequest):
            opened.render(url)
    assert opened.contexts == 0
    assert opened.run(opened.worker.healthy())


@pytest.mark.parametrize("moment", ["while its context is opened", "while it waits for the site"])
def test_a_cancelled_task_closes_its_context(opened: Opened, moment: str) -> None:
    requested = asyncio.Event()

    async def cancelled() -> None:
        context = Context("task", deadline=time.monotonic() + 60)
        rendering = asyncio.ensure_future(opened.worker.render(context, f"{address}/"))
        async with asyncio.timeout(30):
            if "waits" in moment:
                await requested.wait()
            while not opened.pages:
                await asyncio.sleep(0)
        rendering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rendering

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.set()
        await reader.read()  # until the browser disconnects
        writer.close()

    async def cancelled_at_a_silent_site() -> None:
        nonlocal address
        async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await cancelled()

    address = ""
    opened.run(cancelled_at_a_silent_site())
    assert opened.contexts == 0
    assert opened.run(opened.worker.healthy())


def test_a_task_cancelled_while_its_context_is_closed_still_closes_it(
    opened: Opened, sample_site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_page = opened.worker._close_page

    async def cancelled() -> None:
        closing = asyncio.Event()

        async def tell_and_close(*args: Any, **how: Any) -> None:
            closing.set()
            await close_page(*args, **how)

        monkeypatch.setattr(opened.worker, "_close_page", tell_and_close)
        context = Context("task", deadline=time.monotonic() + 60)
        rendering = asyncio.ensure_future(opened.worker.render(context, f"{sample_site}/js"))
        async with asyncio.timeout(30):
            await closing.wait()
        rendering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rendering

    opened.run(cancelled())
    assert opened.contexts == 0
    assert opened.run(opened.worker.healthy())


def test_a_page_whose_script_spins_ends_at_its_deadline(opened: Opened) -> None:
    async def spin() -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n"

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer + b"<script>while (true) {}</script>")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            context = Context("task", deadline=time.monotonic() + 2)
            with pytest.raises(SiteTimeout):
                await opened.worker.render(context, f"http://127.0.0.1:{port}/")

    opened.run(spin())
    assert opened.contexts == 0


def test_a_killed_browser_is_launched_again_for_the_next_task(
    opened: Opened, sample_site: str
) -> None:
    before = opened.chromium()
    before.kill()
    before.wait(10)
    assert opened.render(f"{sample_site}/js")["status"] == 200
    assert opened.chromium().pid != before.pid
    assert opened.run(opened.worker.healthy())


def test_a_wedged_browser_is_unhealthy_within_the_probes_deadline(
    opened: Opened, sample_site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chromium = opened.chromium()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "PROBE_SECONDS", 0.5)
        chromium.send_signal(signal.SIGSTOP)
        assert not opened.run(opened.worker.healthy())
    assert opened.worker._browser is not None
    assert opened.worker._browser.alive  # so `alive` alone proves nothing
    assert opened.render(f"{sample_site}/js")["status"] == 200, "the next task has another one"
    wait_until_gone([chromium])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"executable": "/nowhere/chromium"}, ConfigurationError, "'/nowhere/chromium' is not"),
        ({"executable": "/bin/false"}, BrowserError, "cannot launch /bin/false"),
        ({"exec": "x"}, ConfigurationError, "options: .*exec"),
        ({"block": ["text"]}, ConfigurationError, "options: .*text"),
    ],
)
def test_a_browser_that_cannot_be_launched_says_why(
    runner: asyncio.Runner,
    backend: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    others = offspring()
    with pytest.raises(error, match=message):
        Opened(runner, backend, **options)
    wait_until_gone(offspring() - others)


def test_the_files_of_a_browser_are_in_the_workers_own_temporary_directory(
    opened: Opened, scratch: Path
) -> None:
    assert temporary_files(scratch) != []
    opened.run(opened.worker.close())
    assert temporary_files(scratch) == []


def test_a_temporary_directory_with_a_long_name_is_no_hindrance(
    runner: asyncio.Runner,
    backend: str,
    scratch: Path,
    sample_site: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = scratch / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    opened = Opened(runner, backend)
    assert opened.render(f"{sample_site}/js")["status"] == 200
    tree = opened.tree()
    opened.run(opened.worker.close())
    wait_until_gone(tree)
    assert temporary_files(deep) == []
