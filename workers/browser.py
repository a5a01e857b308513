"""The built-in worker for pages that need a browser: `browser.render` on the system's Chromium.

One browser per worker, launched in `open()` and so before the worker is ready; one fresh context
per task, closed whatever becomes of the task. Playwright's `is_connected()` says yes of a wedged
browser, so `healthy()` makes the browser do something, within a deadline.

Importing this module starts no process and no thread: a nursery may fork after it.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from musterd.ipc.errors import ConfigurationError, MusterdError
from musterd.workers.base import Context, Worker, task
from musterd.workers.http import SiteTimeout, SiteUnreachable, check_url
from musterd.workers.sensitive import shown_url

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Playwright

try:
    from playwright import async_api as playwright_api
except ImportError:  # the extra was not asked for; open() says so
    playwright_api = None  # type: ignore[assignment]

TASK_SECONDS = 60.0
LAUNCH_SECONDS = 25.0  # below the pool's start_timeout of 30 s, so that the reason is told
PROBE_SECONDS = 5.0  # a new context takes some 50 ms; a hundred times that is a wedged browser
CLOSE_SECONDS = 5.0  # the same; and a wedged browser must not hold up a shutdown

# Most frugal first. Debian's /usr/bin/chromium is a shell script around the second.
EXECUTABLES = (
    "chromium-headless-shell",
    "/usr/lib/chromium/chromium",
    "chromium",
    "google-chrome",
)
# Keep it from talking to anyone but the site. Playwright adds the flags that automation needs.
QUIET_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

log = logging.getLogger(__name__)
WaitUntil = Literal["commit", "domcontentloaded", "load", "networkidle"]


class BrowserError(MusterdError):
    """The browser could not do what was asked."""


class BrowserOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[pools.browser] options`."""

    executable: str = ""
    args: list[str] = []


def find_executable(wanted: str = "") -> str:
    """The path of the browser to run: the one asked for, else the first that is installed."""
    for candidate in [wanted] if wanted else EXECUTABLES:
        if found := shutil.which(candidate):
            return found
    if wanted:
        raise ConfigurationError(f"options.executable = {wanted!r} is not an executable file")
    raise ConfigurationError(
        f"no browser found: none of {', '.join(EXECUTABLES)} is installed; "
        "install chromium-headless-shell or chromium, or set options.executable"
    )


class BrowserWorker(Worker):
    """Owns one browser; each task gets a context of its own in it."""

    _playwright: "Playwright | None" = None
    _browser: "Browser | None" = None
    _broken = ""  # why the browser must not be used any more

    async def open(self) -> None:
        if playwright_api is None:
            raise ConfigurationError(
                "a browser worker needs Playwright, which is not installed: "
                "pip install 'musterd[browser]'"
            )
        try:
            options = msgspec.convert(self.options, BrowserOptions)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"options of pool {self.pool!r}: {error}") from error
        executable = find_executable(options.executable)
        root = os.geteuid() == 0
        if root:
            log.warning("running as root: Chromium's own sandbox is off, use an unprivileged user")
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                self._playwright = await playwright_api.async_playwright().start()
                self._browser = await self._playwright.chromium.launch(
                    executable_path=executable,
                    args=[*QUIET_FLAGS, *options.args],
                    chromium_sandbox=not root,
                    # The worker ends its browser; a signal to all must not do so before.
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                )
        except TimeoutError as error:
            await self.close()
            raise BrowserError(f"{executable} was not up in {LAUNCH_SECONDS:g} s") from error
        except playwright_api.Error as error:
            await self.close()
            raise BrowserError(f"cannot launch {executable}: {error.message}") from error

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._browser is not None:
                    await self._browser.close()
                if self._playwright is not None:
                    await self._playwright.stop()
        except TimeoutError:  # what is left of it dies with the worker's process tree
            log.warning("the browser did not close within %g s", CLOSE_SECONDS)
        self._browser = self._playwright = None

    async def healthy(self) -> bool:
        """Whether the browser still opens a page and runs a script in it."""
        try:
            async with asyncio.timeout(PROBE_SECONDS), self._page() as page:
                return bool(await page.evaluate("6 * 7") == 42)
        except (playwright_api.Error, TimeoutError) as error:
            log.warning("the browser failed its probe: %s", error or type(error).__name__)
            return False

    @task(timeout=TASK_SECONDS, target="url")
    async def render(
        self,
        ctx: Context,
        url: str,
        *,
        wait_until: WaitUntil = "load",
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """The page at `url` after its scripts ran, as {html, title, url, status}.

        `timeout` (seconds) can only shorten the task's own. `status` is the site's answer, errors
        included; 0 where there was none.
        """
        check_url(url)  # file: and chrome: would let a task read this machine
        left = ctx.deadline - time.monotonic()
        seconds = min(left, timeout or TASK_SECONDS)
        try:
            # Playwright's own time-outs do not cover a page whose script spins.
            async with asyncio.timeout(seconds), self._page() as page:
                response = await page.goto(url, wait_until=wait_until, timeout=0)
                return {
                    "html": await page.content(),
                    "title": await page.title(),
                    "url": page.url,
                    "status": response.status if response is not None else 0,
                }
        except TimeoutError:
            raise SiteTimeout(f"{shown_url(url)} was not rendered within {seconds:g} s") from None
        except playwright_api.Error as error:
            # Its text, and its traceback, have the whole URL in them.
            reason = error.message.partition("\n")[0].partition(" at http")[0]
            kind = SiteUnreachable if "net::ERR_" in reason else BrowserError
            raise kind(f"cannot render {shown_url(url)}: {reason}") from None

    async def _relaunch(self) -> None:
        """Another browser in the place of one that crashed or is wedged."""
        log.warning("launching the browser again: %s", self._broken or "it crashed")
        await self.close()
        await self.open()
        self._broken = ""

    @asynccontextmanager
    async def _page(self) -> AsyncIterator["Page"]:
        """A page in a fresh context, which is closed even if the task is cancelled meanwhile."""
        assert self._browser is not None, "open() was not called"
        if self._broken or not self._browser.is_connected():
            await self._relaunch()
        opening = asyncio.ensure_future(self._browser.new_context(accept_downloads=False))
        try:
            # Shielded: cancelled here, it would be opened all the same and never be closed.
            context = await asyncio.shield(opening)
            yield await context.new_page()
        finally:
            closing = asyncio.ensure_future(self._close_context(opening))
            try:
                await asyncio.shield(closing)
            finally:
                await closing

    async def _close_context(self, opening: "asyncio.Future[BrowserContext]") -> None:
        """A browser that does not open or close a context in time is wedged, or dead."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                context = await opening
                await context.close()
        except asyncio.CancelledError:
            self._broken = "cancelled while a context was closed"
            raise
        except (playwright_api.Error, TimeoutError) as error:
            self._broken = str(error) or f"no context opened and closed in {CLOSE_SECONDS:g} s"
            log.warning("the browser is broken: %s", self._broken)
