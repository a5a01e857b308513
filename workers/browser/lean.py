"""Lean backend: Chromium by our own client, without Playwright and without node."""

import asyncio
import logging
from typing import Any

from musterd.workers.browser.backend import Backend, Settings, read_proxy
from musterd.workers.browser.cdp import COMMAND_SECONDS, CommandFailed, Session
from musterd.workers.browser.chromium import Chromium, processor_seconds, session_members
from musterd.workers.browser.errors import (
    BrowserDied,
    BrowserError,
    BrowserStuck,
    PageClosed,
    PageCrashed,
)
from musterd.workers.browser.lean_page import AUTO_ATTACH, LeanPage

AUTO_ATTACH_PAGES = {**AUTO_ATTACH, "filter": [{"type": "page"}]}  # sent to the browser itself

log = logging.getLogger(__name__)


class LeanBackend(Backend):
    """Chromium behind its pipe."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._browser = chromium.connection.browser
        self._by_target: dict[str, LeanPage] = {}
        self._by_context: dict[str, LeanPage] = {}
        self._expected: dict[str, asyncio.Future[Session]] = {}  # context -> its first page
        self._browser.on("Target.attachedToTarget", self._attached)
        self._browser.on("Target.detachedFromTarget", self._detached)
        self._browser.on("Target.targetCrashed", self._crashed)
        self._browser.on("Target.targetDestroyed", self._destroyed)

    @classmethod
    async def launch(
        cls, executable: str, args: list[str], seconds: float, *, sandbox: bool
    ) -> "LeanBackend":
        """Return a browser that has answered; BrowserError says why there is none."""
        chromium = await Chromium.start(executable, args, sandbox=sandbox)
        try:
            browser = chromium.connection.browser
            await browser.command("Browser.getVersion", seconds=seconds)
            backend = cls(chromium)
            await browser.command("Target.setDiscoverTargets", discover=True)
            await browser.command("Target.setAutoAttach", **AUTO_ATTACH_PAGES)
            return backend
        except BrowserStuck as error:
            await chromium.kill()
            raise BrowserStuck(f"{executable} was not up in {seconds:g} s") from error
        except BrowserError as error:
            words = chromium.words() or "it printed nothing"
            await chromium.kill()
            raise BrowserError(f"cannot launch {executable}: {error}: {words}") from error
        except BaseException:  # cancelled: no browser may stay behind
            await chromium.kill()
            raise

    @property
    def alive(self) -> bool:
        return not self._chromium.connection.ended.done()

    @property
    def pid(self) -> int:
        return self._chromium.pid

    def processor_seconds(self) -> dict[int, float]:
        return processor_seconds(session_members(self.pid))

    async def close(self, *, force: bool = False) -> None:
        if force:
            await self._chromium.kill()
        else:
            await self._chromium.end()

    async def open_page(self, settings: Settings, url: str) -> "LeanPage":
        proxy = read_proxy(settings.proxy)
        # Chromium bypasses proxies for loopback unless told otherwise.
        via: dict[str, Any] = {}
        if proxy is not None:
            via = {"proxyServer": proxy.server, "proxyBypassList": "<-loopback>"}
        created = await self._browser.command(
            "Target.createBrowserContext", disposeOnDetach=True, **via
        )
        context = created["browserContextId"]
        self.pages += 1
        try:
            return await self._open_in(context, settings, url)
        except BaseException:
            self.pages -= 1
            await self.dispose(context)
            raise

    async def _open_in(self, context: str, settings: Settings, url: str) -> "LeanPage":
        await self._browser.command(
            "Browser.setDownloadBehavior", behavior="deny", browserContextId=context
        )
        expected = self._expected[context] = asyncio.get_running_loop().create_future()
        try:
            made = await self._browser.command(
                "Target.createTarget",
                url="about:blank",
                browserContextId=context,
                width=settings.viewport.width,
                height=settings.viewport.height,
            )
            async with asyncio.timeout(COMMAND_SECONDS):
                session = await expected
        except TimeoutError:
            raise BrowserStuck(
                f"a new page was not reported within {COMMAND_SECONDS:g} s"
            ) from None
        finally:
            del self._expected[context]
        page = LeanPage(self, session, context, made["targetId"])
        self._by_target[page.target] = self._by_context[context] = page
        try:
            await page.prepare(settings, url)
        except BaseException:
            self._forget(page)
            raise
        return page

    async def cookies(self, context: str) -> list[dict[str, Any]]:
        answer = await self._browser.command("Storage.getCookies", browserContextId=context)
        cookies: list[dict[str, Any]] = answer["cookies"]
        return cookies

    async def dispose(self, context: str) -> None:
        """End a context; ignore one that is gone already, or died with its browser."""
        try:
            await self._browser.command("Target.disposeBrowserContext", browserContextId=context)
        except (BrowserDied, CommandFailed) as error:
            log.debug("context %s: %s", context, error)

    def forget(self, page: "LeanPage") -> None:
        self._forget(page)
        self.pages -= 1

    def _forget(self, page: "LeanPage") -> None:
        self._by_target.pop(page.target, None)
        self._by_context.pop(page.context, None)
        self.forget_session(page.raw)

    def session(self, name: str) -> Session:
        return self._chromium.connection.session(name)

    def forget_session(self, session: Session) -> None:
        self._chromium.connection.forget(session)

    def _attached(self, event: dict[str, Any]) -> None:
        """Prepare a page that we asked for, or a popup of one; it stands still until then."""
        session = self.session(event["sessionId"])
        context = event["targetInfo"].get("browserContextId", "")
        expected = self._expected.get(context)
        if expected is not None and not expected.done():
            expected.set_result(session)
        elif page := self._by_context.get(context):
            page.adopt(session)
        else:  # its context is ending
            session.notify("Runtime.runIfWaitingForDebugger")
            self.forget_session(session)

    def _detached(self, event: dict[str, Any]) -> None:
        for page in list(self._by_context.values()):
            page.disown(event["sessionId"])

    def _crashed(self, event: dict[str, Any]) -> None:
        page = self._by_target.get(event["targetId"])
        if page is not None:
            how = f"{event.get('status', 'crashed')}, code {event.get('errorCode', 0)}"
            page.end(PageCrashed(f"the page's renderer process ended ({how})"))

    def _destroyed(self, event: dict[str, Any]) -> None:
        page = self._by_target.get(event["targetId"])
        if page is not None:
            page.end(PageClosed("the page was closed"))
