"""Built-in worker for pages that need a browser: render, extract and screenshot.

Each worker has one browser, launched in `open()` and so before the worker is ready, and one fresh
context per task, closed whatever becomes of the task. That context is the probe as well: it must
open and run a script within PROBE_SECONDS before the task's own work begins, otherwise the browser
is replaced, once, and the task goes on in the new one. A browser that is slow and yet works is not
stuck, but on a busy machine: it gets BUSY_SECONDS more, because another one would be slower still.

A browser also ends after `recycle_requests` pages or `recycle_seconds`, each a little more or less
so that the browsers of a pool do not end together. Where several tasks run at once, new tasks then
wait until the pages of the others are closed.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from musterd.ipc.errors import ConfigurationError, LoggedOut
from musterd.workers.authoring.base import Context, Worker, task
from musterd.workers.authoring.session import Session
from musterd.workers.authoring.settings import settings as given_settings
from musterd.workers.browser import evidence
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
from musterd.workers.browser.driven import DrivenBackend, check_installed
from musterd.workers.browser.errors import LOST, BrowserError, BrowserStuck
from musterd.workers.browser.filter_proxy import NO_DIRECT_UDP
from musterd.workers.browser.lean import LeanBackend
from musterd.workers.browser.network import NO_PROXY, Network
from musterd.workers.metrics import metrics
from musterd.workers.pages.addresses import AddressRules
from musterd.workers.pages.extraction import Value, compile_selectors
from musterd.workers.pages.http import (
    PAGE_BYTES_MAX,
    PROXY_LOGIN,
    HttpError,
    PageTooLarge,
    SiteTimeout,
    SiteUnreachable,
    shown_url,
    status_error,
)
from musterd.workers.pages.kinds import check_watched
from musterd.workers.pages.options import check_proxies, read_options, read_rules
from musterd.workers.pages.page_reader import PageReader
from musterd.workers.pages.watched import check_found

LAUNCH_SECONDS = 25.0  # below the pool's start_timeout of 30 s, so that the reason is reported
PROBE_SECONDS = 5.0  # a new context takes some 50 ms; a hundred times that is a wedged browser
# More for a browser that uses this much of a processor between two looks.
BUSY_SECONDS, LOOK_SECONDS, WORK_SECONDS = 25.0, 1.0, 0.05
CLOSE_SECONDS = 3.0  # likewise; and a task that does not end 5 s after its timeout costs the worker
# Part of a task's time kept to close its page and to report what failed: a tenth, within reason.
LEAVE_SHARE, LEAVE_SECONDS_MAX = 0.1, 1.0
TAKE_SECONDS = 30.0  # to take cookies and storage out of a page; some 50 ms for each site
RECYCLE_REQUESTS = 50  # browsers grow with every page
RECYCLE_SECONDS = 1800.0
RECYCLE_JITTER = 0.1  # a tenth more or less
# Pages in a row that do not load: then the browser may be broken, whose probe needs no network.
# Another browser costs less than finding out.
TIMEOUTS_MAX = 3
DEFAULT_SELECT = {"title": "title"}
# Chromium shows a page of its own in place of an empty error of a site, the headless shell nothing.
EMPTY_DOCUMENT = "!document.body?.childNodes.length && !document.head?.childNodes.length"

Seconds = Annotated[float, Meta(gt=0)]
Bytes = Annotated[int, Meta(ge=1)]

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
    proxies: list[str] = []  # in turn; those of a target go before
    block: list[Block] = []
    allow: list[str] = []  # see musterd.workers.pages.addresses
    deny: list[str] = []
    robots: bool = False
    artefacts: evidence.Wanted = "auto"  # auto: not of tasks with sessions or secrets
    trace: bool = False  # a trace of Playwright among them

    def __post_init__(self) -> None:
        """Raise ValueError for options that cannot be read or used together."""
        check_proxies(self.proxies, self.proxy)
        if self.trace and (self.backend != "playwright" or self.artefacts == "never"):
            raise ValueError('trace needs backend = "playwright" and artefacts: leave one out')

    @property
    def settings(self) -> Settings:
        """Default settings of a page."""
        return Settings(
            viewport=self.viewport,
            headers=self.headers,
            user_agent=self.user_agent,
            proxy=self.proxy,
            block=self.block,
        )


class Wait(msgspec.Struct, frozen=True):
    """What to wait for on a page, and how long."""

    until: WaitUntil
    selector: str
    timeout: float | None
    characters_max: int = 0  # of the document; 0: any


class BrowserWorker(Worker):
    """Owns one browser; each task gets a context of its own in it."""

    options_type: type[BrowserOptions] = BrowserOptions  # a subclass may have options of its own
    _browser: Backend | None = None
    _broken = ""  # why the browser must not be used any more
    _requests_left = 0.0
    _timeouts = 0  # of pages, one after the other
    _use_until = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._reader = PageReader()

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        read, _ = cls._read_options(options)
        find_executable(read.executable)
        if read.backend == "playwright":
            check_installed()

    @classmethod
    def _read_options(cls, options: dict[str, Any]) -> tuple[BrowserOptions, AddressRules]:
        read = read_options(options, cls.options_type)
        rules = read_rules(read.allow, read.deny)
        if rules and (read.proxy or read.proxies):
            raise ConfigurationError(f"options: {NO_PROXY}")
        return read, rules

    async def open(self) -> None:
        self._options, self._rules = self._read_options(self.options)
        self._network = Network(self._rules, self._options.proxies, self._options.robots)
        self._launching = asyncio.Lock()
        self._page_closed = asyncio.Event()  # a new one for each closed page
        self._pages_of: Counter[str] = Counter()  # open ones, by task
        if os.geteuid() == 0:
            log.warning("running as root: Chromium's own sandbox is off, use an unprivileged user")
        await self._launch()

    async def close(self) -> None:
        self._reader.close()
        browser, self._browser = self._browser, None
        if browser is not None:
            await browser.close()

    async def healthy(self) -> bool:
        """Tell whether the browser still opens a page and runs a script in it."""
        try:
            browser = await self._usable()
            page = await self._open_probed(browser, self._options.settings, "")
            await self._close_page(browser, page)
        except BrowserError as error:
            log.warning("the browser failed its probe: %s", error)
            return False
        return not self._broken

    # -- tasks ---------------------------------------------------------------------------------

    @task(target="url")
    async def render(
        self,
        ctx: Context,
        url: str,
        *,
        wait_until: WaitUntil = "load",
        wait_for: str = "",
        script: str = "",
        timeout: Seconds | None = None,
        max_bytes: Bytes | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return the page at `url` after its scripts ran, as {html, title, url, status}.

        `timeout` (seconds) can only shorten the task's own. `status` is the site's answer, errors
        included; 0 without one. With `script`, its return value is added as `script`. `settings`
        are those of a page: viewport, headers, cookies, user_agent, proxy, block.
        """
        limit = self._limit(max_bytes)
        wait = Wait(wait_until, wait_for, timeout, limit)
        async with self._visit(ctx, url, settings, wait) as (page, status):
            returned = {"script": await page.run(script, limit)} if script else {}
            shown = await page.snapshot(limit)
        return {**msgspec.structs.asdict(shown), "status": status, **returned}

    @task(target="url")
    async def extract(
        self,
        ctx: Context,
        url: str,
        select: dict[str, str] = DEFAULT_SELECT,
        *,
        wait_until: WaitUntil = "load",
        wait_for: str = "",
        script: str = "",
        timeout: Seconds | None = None,
        max_bytes: Bytes | None = None,
        **settings: Any,
    ) -> dict[str, Value]:
        """Return the values that `select` names, after the page's scripts ran; else its title.

        Selectors are those of `parser.extract`, CSS or `xpath:`; `wait_for` is one of them, without
        a suffix, that the page must match first.
        """
        selectors = compile_selectors(select)  # a bad selector costs the site no request
        limit = self._limit(max_bytes)
        wait = Wait(wait_until, wait_for, timeout, limit)
        async with self._visit(ctx, url, settings, wait) as (page, _):
            if script:
                await page.perform(script)
            shown = await page.snapshot(limit)
            values = await self._reader.extract(shown.html, selectors)
            if ctx.runs("extract"):  # not a handler that uses this method
                await check_watched(ctx, values, shown.html, self._reader)
                check_found(ctx, values)
        return values

    @task(target="url")
    async def screenshot(
        self,
        ctx: Context,
        url: str,
        *,
        full_page: bool = False,
        wait_until: WaitUntil = "load",
        wait_for: str = "",
        script: str = "",
        timeout: Seconds | None = None,
        max_bytes: Bytes | None = None,
        **settings: Any,
    ) -> bytes:
        """Return a picture of the page as PNG: what is in view, or all of it."""
        wait = Wait(wait_until, wait_for, timeout)
        async with self._visit(ctx, url, settings, wait) as (page, _):
            if script:
                await page.perform(script)
            picture = await page.screenshot(full_page=full_page)
        if len(picture) > (limit := self._limit(max_bytes)):
            raise PageTooLarge(f"the picture has {len(picture)} bytes, over the limit of {limit}")
        return picture

    # -- pages ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def open_page(self, ctx: Context, url: str = "", **settings: Any) -> AsyncIterator[Page]:
        """`async with self.open_page(ctx) as page`: a page in a fresh context, always closed.

        For tasks of your own, or to be overridden: every task of this class opens its page by it.
        `url` is the site that cookies without a domain are for. A task with a session finds its
        cookies and local storage in the page; what the page leaves of them is kept.
        """
        wanted = merge(self._options.settings, settings)
        async with (
            ctx.session() if ctx.has_session else nullcontext() as session,
            self._network.reached(ctx, url, wanted, given="proxy" in settings) as reached,
            self._opened_page(ctx, url, reached) as page,
        ):
            if session is None:
                yield page
                await evidence.attach(ctx, page)
                return
            await page.put_session(session)
            try:
                yield page
            except Exception:
                # Sites change their cookies at any time: also on the way to an error.
                await self._taken(page, session)
                raise
            await evidence.attach(ctx, page)  # first: for its storage a page may leave the site
            async with asyncio.timeout(TAKE_SECONDS):
                await page.take_session(session)

    async def _taken(self, page: Page, session: Session) -> None:
        """Take out of a page that failed what it still has."""
        try:
            async with asyncio.timeout(TAKE_SECONDS):
                await page.take_session(session)
        except (TimeoutError, BrowserError, SiteUnreachable) as error:
            log.debug("session %s stays as it was: %s", session.name, error)

    @asynccontextmanager
    async def _opened_page(self, ctx: Context, url: str, settings: Settings) -> AsyncIterator[Page]:
        browser, page = await self._fresh(settings, url, ctx.task_id)
        self._pages_of[ctx.task_id] += 1
        try:
            if self._options.trace and evidence.is_wanted(ctx, self._options.artefacts):
                await page.start_trace()
            yield page
        except asyncio.CancelledError as error:
            # Evidence and closing must end before the runtime interrupts once more.
            left = CLOSE_SECONDS - await self._hold_evidence(ctx, page, error)
            # Timed out or cancelled: only now the reason for the delay can be seen.
            if problem := await self._surely_closed(browser, page, at_once=left):
                stuck = BrowserStuck(problem)
                _count(stuck)
                raise stuck from None
            raise
        except BaseException as error:
            if isinstance(error, BrowserError):
                _count(error)
            if isinstance(error, Exception):
                await self._hold_evidence(ctx, page, error)
            await self._surely_closed(browser, page)
            raise
        else:
            await self._surely_closed(browser, page)
        finally:
            self._pages_of -= Counter([ctx.task_id])

    async def _hold_evidence(self, ctx: Context, page: Page, error: BaseException) -> float:
        options = self._options
        return await evidence.hold(ctx, page, error, options.artefacts, trace=options.trace)

    @asynccontextmanager
    async def _visit(
        self, ctx: Context, url: str, settings: dict[str, Any], wait: Wait
    ) -> AsyncIterator[tuple[Page, int]]:
        """Yield the loaded page at `url` with its status; all of it before the task's deadline."""
        wanted = merge(self._options.settings, settings)
        await self._network.check(ctx, url, wanted, given="proxy" in settings)
        left = ctx.deadline - time.monotonic()
        left -= min(left * LEAVE_SHARE, LEAVE_SECONDS_MAX)
        seconds = min(left, wait.timeout or math.inf)
        try:
            # The backends' own timeouts do not cover a page whose script spins.
            async with asyncio.timeout(seconds), self.open_page(ctx, url, **settings) as page:
                page.characters_max = wait.characters_max
                page.leave_at = time.monotonic() + seconds
                status = await self._gone_to(ctx, page, url, wait)
                if status == PROXY_LOGIN:
                    raise status_error(status, shown_url(url))
                if status >= 400 and await page.evaluate(EMPTY_DOCUMENT):
                    raise status_error(status, shown_url(url), reason="without a page")
                if wait.selector:
                    await page.wait_for(wait.selector)
                if ctx.has_session:
                    await self._check_login(ctx, page, status)
                self._timeouts = 0
                yield page, status
        except asyncio.CancelledError:
            if time.monotonic() >= ctx.deadline:  # while its page was closed
                self._timeouts += 1
            raise
        except TimeoutError:
            self._timeouts += 1
            raise SiteTimeout(f"{shown_url(url)} was not rendered within {seconds:g} s") from None

    async def _gone_to(self, ctx: Context, page: Page, url: str, wait: Wait) -> int:
        try:
            status = await page.goto(url, wait.until)
        except HttpError as error:
            if ctx.has_session and ctx.session().is_logged_out("", error.status):
                raise LoggedOut(f"the site asks for a login: {error}") from None
            raise
        if ctx.has_session:
            await self._check_login(ctx, page, status)
        return status

    async def _check_login(self, ctx: Context, page: Page, status: int) -> None:
        """Raise LoggedOut if the page is that of a login: the site's, or a script's doing."""
        shown = await page.evaluate("document.URL")
        if ctx.session().is_logged_out(shown, status):
            raise LoggedOut(f"the site asks for a login at {shown_url(shown)}")

    def _limit(self, max_bytes: int | None) -> int:
        return self._options.max_bytes if max_bytes is None else max_bytes

    async def _fresh(self, settings: Settings, url: str, task_id: str) -> tuple[Backend, Page]:
        """Return a page that has run a script, if necessary in a new browser."""
        browser = await self._usable(task_id)
        try:
            return browser, await self._opened(browser, settings, url)
        except LOST as error:
            log.warning("the browser failed its probe: %s", error)
        browser = await self._usable(task_id)
        return browser, await self._opened(browser, settings, url)

    async def _opened(self, browser: Backend, settings: Settings, url: str) -> Page:
        opening = asyncio.ensure_future(self._open_probed(browser, settings, url))
        try:
            # Shielded: if cancelled here, the page would be opened all the same and never be
            # closed.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            try:
                await self._close_page(browser, await opening, at_once=CLOSE_SECONDS)
            except BrowserError as error:
                log.warning("the browser is broken: %s", error)
            except asyncio.CancelledError:  # once more: its open pages are unknown
                self._give_up(browser, "cancelled while a page was opened")
                raise
            raise

    async def _open_probed(self, browser: Backend, settings: Settings, url: str) -> Page:
        try:
            async with in_time(browser, PROBE_SECONDS):
                page = await browser.open_page(settings, url)
                if not await page.probe():
                    raise BrowserError("a page got a sum wrong")
        except TimeoutError:
            stuck = BrowserStuck(f"no page opened within {PROBE_SECONDS:g} s")
            _count(stuck)
            self._give_up(browser, str(stuck))
            raise stuck from None
        except LOST as error:
            _count(error)
            self._give_up(browser, str(error))
            raise
        self._requests_left -= 1
        return page

    async def _surely_closed(
        self, browser: Backend, page: Page, *, at_once: float | None = None
    ) -> str:
        """Close the page even if cancelled, unless cancelled twice."""
        closing = asyncio.ensure_future(self._close_page(browser, page, at_once=at_once))
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            if problem := await closing:
                return problem
            raise

    async def _close_page(
        self, browser: Backend, page: Page, *, at_once: float | None = None
    ) -> str:
        """Return what went wrong, or "". A browser that does not close a page in time is wedged.

        `at_once`: the task's time is over, so there is this much and none for a busy machine.
        """
        seconds = CLOSE_SECONDS if at_once is None else at_once
        clock = in_time(browser, seconds) if at_once is None else asyncio.timeout(seconds)
        try:
            async with clock:
                await page.close()
            return ""
        except asyncio.CancelledError:
            self._give_up(browser, "cancelled while a page was closed")
            raise
        except BrowserError as error:
            broken = str(error)
        except TimeoutError:
            broken = f"a page did not close within {seconds:.2g} s"
        finally:
            self._page_closed.set()
            self._page_closed = asyncio.Event()
        self._give_up(browser, broken)
        log.warning("the browser is broken: %s", broken)
        return broken

    def _give_up(self, browser: Backend, reason: str) -> None:
        """Mark the browser as unusable; another task may have replaced it already."""
        if browser is self._browser:
            self._broken = reason

    # -- browsers ------------------------------------------------------------------------------

    async def _usable(self, task_id: str = "") -> Backend:
        """Return the browser, or a new one in place of one that is dead, stuck or used up.

        A used-up browser is replaced once its last page is closed, but a task that has a page open
        itself does not wait for that.
        """
        while True:
            async with self._launching:
                browser = self._browser
                waits = (
                    browser is not None
                    and browser.pages
                    and not self._broken
                    and browser.alive
                    and not self._pages_of[task_id]
                    and self._worn()
                )
                if not waits:
                    return await self._launched()
                closed = self._page_closed
            await closed.wait()

    async def _launched(self) -> Backend:
        """Return a usable browser at once; under the lock."""
        assert self._browser is not None or self._broken, "open() was not called"
        if self._browser is not None and (reason := self._unusable(self._browser)):
            log.info("launching the browser again: %s", reason)
            dead = self._broken or not self._browser.alive
            metrics.counter("browser_relaunches", why="broken" if dead else "worn").inc()
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
        return self._worn()

    def _worn(self) -> str:
        if self._timeouts >= TIMEOUTS_MAX:
            return f"{self._timeouts} pages in a row did not load"
        if self._requests_left < 0.5:  # the nearest whole number is used up
            return f"it has opened about {self._options.recycle_requests} pages"
        if time.monotonic() >= self._use_until:
            return f"it is about {self._options.recycle_seconds:g} s old"
        return ""

    async def _launch(self) -> None:
        options = self._options
        kind = LeanBackend if options.backend == "cdp" else DrivenBackend
        executable = find_executable(options.executable)
        self._browser = await kind.launch(
            executable,
            [*options.args, *(NO_DIRECT_UDP if self._rules else ())],
            LAUNCH_SECONDS,
            sandbox=os.geteuid() != 0,
        )
        kept = given_settings().artefacts is not None and options.artefacts != "never"
        self._browser.listens = kept
        self._broken = ""
        self._timeouts = 0
        self._requests_left = spread(options.recycle_requests)
        self._use_until = time.monotonic() + spread(options.recycle_seconds)


@asynccontextmanager
async def in_time(browser: Backend, seconds: float) -> AsyncIterator[None]:
    """`async with in_time(browser, 5)`: TimeoutError after that, later while the browser works."""
    loop = asyncio.get_running_loop()
    pause = min(LOOK_SECONDS, seconds / 2)
    last = loop.time() + seconds + BUSY_SECONDS
    timer = loop.call_later(seconds - pause, lambda: look(None))

    def look(before: dict[int, float] | None) -> None:
        nonlocal timer
        used = browser.processor_seconds()
        if before is not None:
            work = sum(used[pid] - before.get(pid, 0.0) for pid in used)
            if work < WORK_SECONDS or loop.time() >= last:
                clock.reschedule(loop.time())
                return
        timer = loop.call_later(pause, look, used)

    try:
        async with asyncio.timeout(None) as clock:
            yield
    finally:
        timer.cancel()


def spread(limit: float) -> float:
    """Return the limit of one browser: a little more or less than the common one; 0 is none."""
    return limit * random.uniform(1 - RECYCLE_JITTER, 1 + RECYCLE_JITTER) if limit else math.inf


def _count(error: BrowserError) -> None:
    """Count errors, also those that fail no task because another browser takes over."""
    metrics.counter("browser_failures", kind=type(error).__name__).inc()
