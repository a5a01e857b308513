"""The built-in worker for pages that need a browser: render, extract and screenshot.

One browser per worker, launched in `open()` and so before the worker is ready; one fresh context
per task, closed whatever becomes of the task. That context is the probe as well: it must open and
run a script within PROBE_SECONDS before the task's own work begins, otherwise the browser is
replaced, once, and the task goes on in the new one.

A browser also ends after `recycle_requests` pages or `recycle_seconds`, each a little more or less
so that the browsers of a pool do not end together.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from musterd.ipc.errors import ConfigurationError
from musterd.workers.base import Context, Worker, task
from musterd.workers.browser.backend import (
    Backend,
    Block,
    Page,
    Settings,
    Viewport,
    WaitUntil,
    merge,
)
from musterd.workers.browser.chromium import find_executable
from musterd.workers.browser.driven import DrivenBackend
from musterd.workers.browser.errors import LOST, BrowserError, BrowserStuck
from musterd.workers.browser.lean import LeanBackend
from musterd.workers.extraction import Value, compile_selectors, extract
from musterd.workers.http import PAGE_BYTES_MAX, PageTooLarge, SiteTimeout, check_url
from musterd.workers.sensitive import shown_url

TASK_SECONDS = 60.0
LAUNCH_SECONDS = 25.0  # below the pool's start_timeout of 30 s, so that the reason is told
PROBE_SECONDS = 5.0  # a new context takes some 50 ms; a hundred times that is a wedged browser
CLOSE_SECONDS = 5.0  # the same; and a wedged browser must not hold up a shutdown
RECYCLE_REQUESTS = 50  # browsers grow with every page
RECYCLE_SECONDS = 1800.0
RECYCLE_JITTER = 0.1  # a tenth more or less
DEFAULT_SELECT = {"title": "title"}

log = logging.getLogger(__name__)


class BrowserOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[pools.browser] options`."""

    backend: Literal["playwright", "cdp"] = "playwright"
    executable: str = ""
    args: list[str] = []
    recycle_requests: Annotated[int, Meta(ge=0)] = RECYCLE_REQUESTS  # 0: never
    recycle_seconds: Annotated[float, Meta(ge=0)] = RECYCLE_SECONDS  # 0: never
    max_bytes: Annotated[int, Meta(ge=1)] = PAGE_BYTES_MAX
    viewport: Viewport = Viewport()
    headers: dict[str, str] = {}
    user_agent: str = ""
    proxy: str = ""
    block: list[Block] = []

    @property
    def settings(self) -> Settings:
        """What a page gets unless its task says otherwise."""
        return Settings(
            viewport=self.viewport,
            headers=self.headers,
            user_agent=self.user_agent,
            proxy=self.proxy,
            block=self.block,
        )


class Wait(msgspec.Struct, frozen=True):
    """For what of a page a task waits, and how long."""

    until: WaitUntil
    selector: str
    timeout: float | None


class BrowserWorker(Worker):
    """Owns one browser; each task gets a context of its own in it."""

    _browser: Backend | None = None
    _broken = ""  # why the browser must not be used any more
    _requests_left = 0.0
    _use_until = 0.0

    async def open(self) -> None:
        try:
            self._options = msgspec.convert(self.options, BrowserOptions)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"options of pool {self.pool!r}: {error}") from error
        self._launching = asyncio.Lock()
        if os.geteuid() == 0:
            log.warning("running as root: Chromium's own sandbox is off, use an unprivileged user")
        await self._launch()

    async def close(self) -> None:
        browser, self._browser = self._browser, None
        if browser is not None:
            await browser.close()

    async def healthy(self) -> bool:
        """Whether the browser still opens a page and runs a script in it."""
        try:
            browser = await self._usable()
            page = await self._open_probed(browser, self._options.settings, "")
            await self._close_page(browser, page)
        except BrowserError as error:
            log.warning("the browser failed its probe: %s", error)
            return False
        return not self._broken

    # -- tasks ---------------------------------------------------------------------------------

    @task(timeout=TASK_SECONDS, target="url")
    async def render(
        self,
        ctx: Context,
        url: str,
        *,
        wait_until: WaitUntil = "load",
        wait_for: str = "",
        script: str = "",
        timeout: float | None = None,
        max_bytes: int | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """The page at `url` after its scripts ran, as {html, title, url, status}.

        `timeout` (seconds) can only shorten the task's own. `status` is the site's answer, errors
        included; 0 where there was none. With `script`, also what it returned, as `script`.
        `settings` are those of a page: viewport, headers, cookies, user_agent, proxy, block.
        """
        wait = Wait(wait_until, wait_for, timeout)
        async with self._visit(ctx, url, settings, wait) as (page, status):
            returned = {"script": await page.run(script)} if script else {}
            shown = await page.snapshot(self._limit(max_bytes))
        return {**msgspec.structs.asdict(shown), "status": status, **returned}

    @task(timeout=TASK_SECONDS, target="url")
    async def extract(
        self,
        ctx: Context,
        url: str,
        select: dict[str, str] = DEFAULT_SELECT,
        *,
        wait_until: WaitUntil = "load",
        wait_for: str = "",
        script: str = "",
        timeout: float | None = None,
        max_bytes: int | None = None,
        **settings: Any,
    ) -> dict[str, Value]:
        """The values that `select` names, out of the page after its scripts ran; else its title.

        Selectors as those of `parser.extract`, CSS or `xpath:`; `wait_for` is one of them, without
        a suffix, that the page must match first.
        """
        selectors = compile_selectors(select)  # a bad selector costs the site no request
        wait = Wait(wait_until, wait_for, timeout)
        async with self._visit(ctx, url, settings, wait) as (page, _):
            if script:
                await page.run(script)
            shown = await page.snapshot(self._limit(max_bytes))
        return extract(shown.html, selectors)

    @task(timeout=TASK_SECONDS, target="url")
    async def screenshot(
        self,
        ctx: Context,
        url: str,
        *,
        full_page: bool = False,
        wait_until: WaitUntil = "load",
        wait_for: str = "",
        script: str = "",
        timeout: float | None = None,
        max_bytes: int | None = None,
        **settings: Any,
    ) -> bytes:
        """A picture of the page as PNG: what is in view, or all of it."""
        wait = Wait(wait_until, wait_for, timeout)
        async with self._visit(ctx, url, settings, wait) as (page, _):
            if script:
                await page.run(script)
            picture = await page.screenshot(full_page=full_page)
        if len(picture) > (limit := self._limit(max_bytes)):
            raise PageTooLarge(f"the picture has {len(picture)} bytes, over the limit of {limit}")
        return picture

    # -- pages ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def open_page(self, ctx: Context, url: str = "", **settings: Any) -> AsyncIterator[Page]:
        """`async with self.open_page(ctx) as page`: a page in a fresh context, always closed.

        For tasks of your own, or to be overridden: every task of this class opens its page by it.
        `url` is the site that cookies without a domain are for.
        """
        wanted = merge(self._options.settings, settings)
        browser, page = await self._fresh(wanted, url)
        try:
            yield page
        finally:
            closing = asyncio.ensure_future(self._close_page(browser, page))
            try:
                await asyncio.shield(closing)
            finally:
                await closing

    @asynccontextmanager
    async def _visit(
        self, ctx: Context, url: str, settings: dict[str, Any], wait: Wait
    ) -> AsyncIterator[tuple[Page, int]]:
        """The page at `url`, loaded, with its status; all of it before the task's deadline."""
        check_url(url)  # file: and chrome: would let a task read this machine
        seconds = min(ctx.deadline - time.monotonic(), wait.timeout or TASK_SECONDS)
        try:
            # The backends' own time-outs do not cover a page whose script spins.
            async with asyncio.timeout(seconds), self.open_page(ctx, url, **settings) as page:
                status = await page.goto(url, wait.until)
                if wait.selector:
                    await page.wait_for(wait.selector)
                yield page, status
        except TimeoutError:
            raise SiteTimeout(f"{shown_url(url)} was not rendered within {seconds:g} s") from None

    def _limit(self, max_bytes: int | None) -> int:
        return self._options.max_bytes if max_bytes is None else max_bytes

    async def _fresh(self, settings: Settings, url: str) -> tuple[Backend, Page]:
        """A page that has run a script, if need be in another browser than the last one."""
        browser = await self._usable()
        try:
            return browser, await self._opened(browser, settings, url)
        except LOST as error:
            log.warning("the browser failed its probe: %s", error)
        browser = await self._usable()
        return browser, await self._opened(browser, settings, url)

    async def _opened(self, browser: Backend, settings: Settings, url: str) -> Page:
        opening = asyncio.ensure_future(self._open_probed(browser, settings, url))
        try:
            # Shielded: cancelled here, it would be opened all the same and never be closed.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            try:
                await self._close_page(browser, await opening)
            except BrowserError as error:
                log.warning("the browser is broken: %s", error)
            except asyncio.CancelledError:  # once more: what it has open is not known
                self._broken = "cancelled while a page was opened"
                raise
            raise

    async def _open_probed(self, browser: Backend, settings: Settings, url: str) -> Page:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                page = await browser.open_page(settings, url)
                if not await page.probe():
                    raise BrowserError("a page cannot calculate")
        except TimeoutError:
            self._broken = f"no page opened within {PROBE_SECONDS:g} s"
            raise BrowserStuck(self._broken) from None
        except LOST as error:
            self._broken = str(error)
            raise
        self._requests_left -= 1
        return page

    async def _close_page(self, browser: Backend, page: Page) -> None:
        """A browser that does not close a page in time is wedged."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await page.close()
            return
        except asyncio.CancelledError:
            self._broken = "cancelled while a page was closed"
            raise
        except BrowserError as error:
            broken = str(error)
        except TimeoutError:
            broken = f"a page did not close within {CLOSE_SECONDS:g} s"
        if browser is self._browser:
            self._broken = broken
        log.warning("the browser is broken: %s", broken)

    # -- browsers ------------------------------------------------------------------------------

    async def _usable(self) -> Backend:
        """The browser, or another in the place of one that is dead, stuck or used up."""
        async with self._launching:
            assert self._browser is not None or self._broken, "open() was not called"
            if self._browser is not None and (reason := self._unusable(self._browser)):
                log.info("launching the browser again: %s", reason)
                force = bool(self._broken)
                self._broken = reason  # also if we are cancelled from here on
                await self._browser.close(force=force)
                self._browser = None
            if self._browser is None:
                await self._launch()
            assert self._browser is not None
            return self._browser

    def _unusable(self, browser: Backend) -> str:
        if self._broken:
            return self._broken
        if not browser.alive:
            return "it ended by itself"
        if browser.pages:  # it is in use: its turn comes with the last page
            return ""
        if self._requests_left <= 0:
            return f"{self._options.recycle_requests} pages, more or less, were opened in it"
        if time.monotonic() >= self._use_until:
            return f"it is {self._options.recycle_seconds:g} s old, more or less"
        return ""

    async def _launch(self) -> None:
        options = self._options
        kind = LeanBackend if options.backend == "cdp" else DrivenBackend
        executable = find_executable(options.executable)
        self._browser = await kind.launch(
            executable, options.args, LAUNCH_SECONDS, sandbox=os.geteuid() != 0
        )
        self._broken = ""
        spread = random.uniform(1 - RECYCLE_JITTER, 1 + RECYCLE_JITTER)
        requests, seconds = options.recycle_requests, options.recycle_seconds
        self._requests_left = round(requests * spread) if requests else float("inf")
        self._use_until = time.monotonic() + (seconds * spread if seconds else float("inf"))
