"""Default backend: Chromium driven by Playwright, whose driver is a node process.

Playwright's `is_connected()` says yes of a wedged browser or driver, and its own timeouts hang with
the driver: callers bring a deadline, and close() ends the processes itself.
"""

import asyncio
import base64
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from musterd.ipc.errors import ConfigurationError
from musterd.workers.browser.backend import (
    ABORTED,
    ABORTED_SECONDS,
    HAS_BODY,
    NOT_CUT,
    Backend,
    Console,
    Page,
    Settings,
    WaitUntil,
    bad_cookies,
    body_too_large,
    cannot_open,
    content_length,
    cookies_for,
    cut_short,
    html_start,
    is_download,
    is_too_large,
    origin_of,
    read_proxy,
    whole_document,
)
from musterd.workers.browser.chromium import (
    QUIET_FLAGS,
    end_processes,
    family,
    lives,
    processor_seconds,
    session_members,
)
from musterd.workers.browser.errors import (
    BrowserDied,
    BrowserError,
    BrowserStuck,
    DriverDied,
    PageClosed,
    PageCrashed,
    ScriptFailed,
)
from musterd.workers.browser.scratch import Scratch
from musterd.workers.pages.http import SiteUnreachable, shown_url
from musterd.workers.texts import with_whole_characters

if TYPE_CHECKING:
    from playwright import async_api

try:
    from playwright import async_api as playwright_api
except ImportError:  # the extra is not installed; launch() says so
    playwright_api = None  # type: ignore[assignment]

EXIT_SECONDS = 5.0  # from a request to close until it is killed; a healthy one takes 0.1 s
STOP_SECONDS = 1.0  # for the driver alone to stop
DRIVER_WORD = "run-driver"  # on the driver's command line, and on no other
DOWNLOADING = "Download is starting"  # Playwright's words
NAVIGATED = ("context was destroyed", "because of a navigation", "Cannot find context")

T = TypeVar("T")
log = logging.getLogger(__name__)


def check_installed() -> None:
    """Raise ConfigurationError without Playwright."""
    if playwright_api is None:
        raise ConfigurationError(
            "a browser worker needs Playwright, which is not installed: "
            "pip install 'musterd[browser]', or set options.backend = \"cdp\""
        )


class DrivenBackend(Backend):
    """Browser with the driver between us and it."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._playwright: async_api.Playwright | None = None
        self._browser: async_api.Browser | None = None
        self._driver: psutil.Process | None = None
        self._processes: set[psutil.Process] = set()

    @classmethod
    async def launch(
        cls, executable: str, args: list[str], seconds: float, *, sandbox: bool
    ) -> "DrivenBackend":
        """Return a browser that is up; BrowserError says why there is none."""
        check_installed()
        backend = cls(Scratch("pw-"))
        try:
            async with asyncio.timeout(seconds):
                await backend._launch(executable, args, sandbox=sandbox)
        except TimeoutError as error:
            await backend.close()
            raise BrowserStuck(f"{executable} was not up in {seconds:g} s") from error
        except playwright_api.Error as error:
            await backend.close()
            raise BrowserError(f"cannot launch {executable}: {error.message}") from error
        except BaseException:  # cancelled: no browser may stay behind
            await backend.close()
            raise
        return backend

    async def _launch(self, executable: str, args: list[str], *, sandbox: bool) -> None:
        before = set(psutil.Process().children())
        # The driver inherits it: all its files, and the browser's, can be removed together.
        outer = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self._scratch.path)
        try:
            self._playwright = await playwright_api.async_playwright().start()
        finally:
            if outer is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = outer
            started = set(psutil.Process().children()) - before
            self._driver = next((each for each in started if _is_driver(each)), None)
        self._browser = await self._playwright.chromium.launch(
            executable_path=self._scratch.launcher(executable),
            args=[*QUIET_FLAGS, *args],
            chromium_sandbox=sandbox,
            env={**os.environ, **self._scratch.environment},
            # The worker ends its browser; a signal to the group must not do so before.
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )
        self._note_processes()

    def _note_processes(self) -> None:
        # Of both: if the driver is dead, its browser has another parent; if the browser is dead,
        # its later children are found by the session that the driver made for it. While one of them
        # lives, the number of that session is not reused.
        sessions = set()
        for process in [*self._processes, *([self._driver] if self._driver else [])]:
            if process.is_running():
                self._processes.update(family(process.pid))
                with contextlib.suppress(ProcessLookupError):
                    sessions.add(os.getsid(process.pid))
        for session in sessions - {os.getsid(0)}:
            self._processes |= session_members(session)

    @property
    def alive(self) -> bool:
        return self._browser is not None and self._browser.is_connected() and self._driver_lives()

    def processor_seconds(self) -> dict[int, float]:
        self._note_processes()
        return processor_seconds(self._processes)

    def _driver_lives(self) -> bool:
        return self._driver is None or lives(self._driver)

    async def close(self, *, force: bool = False) -> None:
        self._note_processes()
        if force:  # except the driver, which reports the end of the rest
            await end_processes(self._processes - {self._driver})
        try:
            async with asyncio.timeout(STOP_SECONDS if force else EXIT_SECONDS):
                if self._browser is not None and self.alive and not force:
                    await self._browser.close()
                if self._playwright is not None and self._driver_lives():
                    await self._playwright.stop()
        except TimeoutError:
            log.warning("the browser did not close in time, it is killed")
        except playwright_api.Error as error:
            log.debug("closing the browser: %s", error.message)
        finally:
            await end_processes(self._processes)
            await self._scratch.remove()
            self._browser = self._playwright = None

    async def open_page(self, settings: Settings, url: str) -> "DrivenPage":
        assert self._browser is not None, "launch() was not called"
        proxy = read_proxy(settings.proxy)
        via: Any = None
        if proxy is not None:
            via = {"server": proxy.server}
            if proxy.username:
                via |= {"username": proxy.username, "password": proxy.password}
        try:
            context = await self._browser.new_context(
                accept_downloads=False,
                viewport={"width": settings.viewport.width, "height": settings.viewport.height},
                extra_http_headers=settings.headers or None,
                user_agent=settings.user_agent or None,
                proxy=via,
            )
        except playwright_api.Error as error:
            raise self.translated(error) from None
        self.pages += 1
        try:
            return await self._open_in(context, settings, url)
        except playwright_api.Error as error:
            self.pages -= 1
            raise self.translated(error) from None
        except BaseException:
            self.pages -= 1
            await context.close()
            raise

    async def _open_in(
        self, context: "async_api.BrowserContext", settings: Settings, url: str
    ) -> "DrivenPage":
        if settings.cookies:
            cookies: Any = cookies_for(settings, url)
            try:
                await context.add_cookies(cookies)
            except playwright_api.Error as error:
                if not self.alive:
                    raise
                raise bad_cookies(settings, error.message.partition("\n")[0]) from None
        if settings.block:
            blocked = frozenset(settings.block)

            async def pass_or_block(route: "async_api.Route") -> None:
                if route.request.resource_type in blocked:
                    await route.abort("blockedbyclient")
                else:
                    await route.continue_()

            await context.route("**/*", pass_or_block)
        return DrivenPage(self, context, await context.new_page())

    def translated(self, error: "async_api.Error") -> BrowserError | SiteUnreachable:
        """Return our error by what is still alive: Playwright's texts have whole URLs."""
        reason = error.message.partition("\n")[0].partition(" at http")[0]
        if not self._driver_lives() or "connection closed" in reason.lower():
            return DriverDied(f"Playwright's driver process ended ({reason})")
        if self._browser is None or not self._browser.is_connected():
            return BrowserDied(f"the browser's process ended ({reason})")
        if "net::ERR_" in reason:
            return SiteUnreachable(reason)
        if "crashed" in reason:
            return PageCrashed()
        if "has been closed" in reason:
            return PageClosed(f"the page was closed ({reason})")
        return BrowserError(reason)


class DrivenPage(Page):
    """Page of Playwright in a context of its own."""

    raw: "async_api.Page"

    def __init__(
        self, backend: DrivenBackend, context: "async_api.BrowserContext", page: "async_api.Page"
    ) -> None:
        self.raw = page
        self._backend = backend
        self._context = context
        self._closed = False
        self.origins = set()
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._too_large: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._cut: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self._status = 0  # last status of the main frame
        self._document: async_api.Request | None = None  # request of that status
        page.on("crash", self._note_crash)
        page.on("response", self._note_response)
        page.on("requestfailed", self._note_failure)
        self.console = Console()
        self._listens = backend.listens
        self._traces = False
        if self._listens:
            page.on("console", self._note_said)
            page.on("pageerror", self._note_thrown)

    def _note_crash(self, _: "async_api.Page") -> None:
        if not self._crashed.done():
            self._crashed.set_result(None)

    def _note_response(self, response: "async_api.Response") -> None:
        request = response.request
        if not request.is_navigation_request() or request.frame != self.raw.main_frame:
            return
        self._status = response.status
        self._document = request
        self.origins.add(origin_of(response.url))
        size = content_length(response.headers)
        if is_too_large(size, self.characters_max) and not self._too_large.done():
            self._too_large.set_result(size)  # reject the whole document

    def _note_failure(self, request: "async_api.Request") -> None:
        if request != self._document:
            return  # a part of the page; or it was never answered, and goto() fails by itself
        reason = request.failure or "it failed"
        if reason not in NOT_CUT and not self._cut.done():
            self._cut.set_result((shown_url(request.url), reason))

    def _note_said(self, message: "async_api.ConsoleMessage") -> None:
        self._heard(message.type, message.text, message.location.get("url", ""))

    def _note_thrown(self, error: "async_api.Error") -> None:
        self._heard("error", f"{error.name}: {error.message}", "")

    def _heard(self, kind: str, text: str, where: str) -> None:
        self.console.add(kind, text, where)
        if self.console.full and self._listens:  # a page may say things forever
            self._listens = False
            self.raw.remove_listener("console", self._note_said)
            self.raw.remove_listener("pageerror", self._note_thrown)

    def check_document(self) -> None:
        if self._cut.done():
            raise cut_short(*self._cut.result())

    async def goto(self, url: str, wait_until: WaitUntil = "load") -> int:
        try:
            response = await self._done(self.raw.goto(url, wait_until=wait_until, timeout=0))
        except (BrowserError, SiteUnreachable) as error:
            if self._cut.done():
                raise cut_short(*self._cut.result()) from None
            reason = str(error).removeprefix("Page.goto: ")
            if ABORTED in reason:
                await asyncio.wait((self._crashed,), timeout=ABORTED_SECONDS)
                if self._crashed.done():
                    raise PageCrashed() from None
            if type(error) not in (BrowserError, SiteUnreachable):
                raise type(error)(f"cannot open {shown_url(url)}: {reason}") from None
            if DOWNLOADING in reason:
                raise is_download(shown_url(url)) from None
            raise cannot_open(shown_url(url), reason, self._status) from None
        return response.status if response is not None else 0

    async def evaluate(self, expression: str) -> Any:
        try:
            return with_whole_characters(await self._done(self.raw.evaluate(expression)))
        except BrowserError as error:
            if type(error) is not BrowserError:
                raise
            text = str(error).removeprefix("Page.evaluate: ")
            raise ScriptFailed(text, navigated=any(each in text for each in NAVIGATED)) from None

    async def screenshot(self, *, full_page: bool = False) -> bytes:
        if full_page and not await self.evaluate(HAS_BODY):
            # Playwright measures the body of a page, and waits forever for a page without one, such
            # as a picture or a feed. Chromium measures any document.
            return await self._done(self._whole())
        return await self._done(self.raw.screenshot(full_page=full_page, timeout=0))

    async def _whole(self) -> bytes:
        session = await self._context.new_cdp_session(self.raw)
        clip = whole_document(await session.send("Page.getLayoutMetrics"))
        answer = await session.send(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, **clip}
        )
        return base64.b64decode(answer["data"])

    async def last_picture(self) -> bytes:
        return await self._tried(self.raw.screenshot(timeout=0))

    async def last_html(self, characters_max: int) -> str:
        return str(await self._tried(self.raw.evaluate(html_start(characters_max))))

    async def start_trace(self) -> None:
        await self._done(self._context.tracing.start(screenshots=True, snapshots=True))
        self._traces = True

    async def stop_trace(self, path: Path) -> None:
        if self._traces:
            self._traces = False
            await self._tried(self._context.tracing.stop(path=path))

    async def _tried(self, work: Awaitable[T]) -> T:
        """Return the result whatever is known of the document, or raise our error."""
        try:
            return await work
        except playwright_api.Error as error:
            raise self._backend.translated(error) from None

    async def set_cookies(self, cookies: list[dict[str, Any]]) -> None:
        written: Any = cookies
        await self._done(self._context.add_cookies(written))

    async def get_cookies(self) -> list[dict[str, Any]]:
        found: Any = await self._done(self._context.cookies())
        return list(found)

    @contextlib.asynccontextmanager
    async def blank(self) -> AsyncIterator[None]:
        async def answer(route: "async_api.Route") -> None:
            await route.fulfill(status=200, content_type="text/html", body="")

        await self._done(self.raw.route("**/*", answer))
        try:
            yield
        finally:
            await self._done(self.raw.unroute("**/*", answer))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._backend.pages -= 1
        try:
            await self._context.close()
        except playwright_api.Error as error:
            if self._backend.alive:
                raise self._backend.translated(error) from None

    async def _done(self, work: Awaitable[T]) -> T:
        """Return the result, or raise our error; a crash of the page ends the wait."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                (working, self._crashed, self._too_large, self._cut),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._too_large.done():
                raise body_too_large(self._too_large.result(), self.characters_max)
            if not working.done():
                self.check_document()
                raise PageCrashed()
            return working.result()
        except playwright_api.Error as error:
            if self._crashed.done():
                raise PageCrashed() from None
            raise self._backend.translated(error) from None
        finally:
            working.cancel()


def _is_driver(process: psutil.Process) -> bool:
    try:
        return DRIVER_WORD in process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return False
