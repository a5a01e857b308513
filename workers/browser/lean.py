"""The lean backend: Chromium by our own client, without Playwright and without node."""

import asyncio
import base64
import contextlib
import functools
import logging
from typing import Any

from musterd.workers.browser.backend import (
    ABORTED,
    ABORTED_SECONDS,
    Backend,
    Page,
    Settings,
    WaitUntil,
    cookie_domain,
    read_proxy,
)
from musterd.workers.browser.cdp import CommandFailed, Session
from musterd.workers.browser.chromium import Chromium
from musterd.workers.browser.errors import (
    BrowserDied,
    BrowserError,
    BrowserStuck,
    PageClosed,
    PageCrashed,
    ScriptFailed,
)
from musterd.workers.http import SiteUnreachable
from musterd.workers.sensitive import shown_url

NEVER = 3600.0  # for commands that wait for a site: the task's own deadline comes first
AUTO_ATTACH = {
    "autoAttach": True,
    "waitForDebuggerOnStart": True,  # until it has its settings
    "flatten": True,
    "filter": [{"type": "iframe"}],
}

# Our names of load states -> Chromium's
LIFECYCLE = {
    "domcontentloaded": "DOMContentLoaded",
    "load": "load",
    "networkidle": "networkIdle",
}
# What Chromium says where a document went away under a script.
NAVIGATED = ("context was destroyed", "navigated or closed", "Cannot find context", "was collected")

log = logging.getLogger(__name__)


class LeanBackend(Backend):
    """One Chromium behind its pipe."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._browser = chromium.connection.browser
        self._by_target: dict[str, LeanPage] = {}
        self._browser.on("Target.targetCrashed", self._crashed)
        self._browser.on("Target.targetDestroyed", self._destroyed)

    @classmethod
    async def launch(
        cls, executable: str, args: list[str], seconds: float, *, sandbox: bool
    ) -> "LeanBackend":
        """A browser that has answered; BrowserError says why there is none."""
        chromium = await Chromium.start(executable, args, sandbox=sandbox)
        try:
            browser = chromium.connection.browser
            await browser.command("Browser.getVersion", seconds=seconds)
            await browser.command("Target.setDiscoverTargets", discover=True)
            return cls(chromium)
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

    async def close(self, *, force: bool = False) -> None:
        if force:
            await self._chromium.kill()
        else:
            await self._chromium.end()

    async def open_page(self, settings: Settings, url: str) -> "LeanPage":
        proxy = read_proxy(settings.proxy)
        # Chromium goes around proxies for loopback unless told otherwise.
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
        made = await self._browser.command(
            "Target.createTarget",
            url="about:blank",
            browserContextId=context,
            width=settings.viewport.width,
            height=settings.viewport.height,
        )
        target = made["targetId"]
        attached = await self._browser.command(
            "Target.attachToTarget", targetId=target, flatten=True
        )
        session = self.session(attached["sessionId"])
        page = LeanPage(self, session, context, target)
        self._by_target[target] = page
        await page.prepare(settings, url)
        return page

    async def dispose(self, context: str) -> None:
        """Ends a context; one that is gone already, or died with its browser, is no error."""
        try:
            await self._browser.command("Target.disposeBrowserContext", browserContextId=context)
        except (BrowserDied, CommandFailed) as error:
            log.debug("context %s: %s", context, error)

    def forget(self, page: "LeanPage") -> None:
        self._by_target.pop(page.target, None)
        self.forget_session(page.raw)
        self.pages -= 1

    def session(self, name: str) -> Session:
        return self._chromium.connection.session(name)

    def forget_session(self, session: Session) -> None:
        self._chromium.connection.forget(session)

    def _crashed(self, event: dict[str, Any]) -> None:
        page = self._by_target.get(event["targetId"])
        if page is not None:
            how = f"{event.get('status', 'crashed')}, code {event.get('errorCode', 0)}"
            page.end(PageCrashed(f"the page's renderer process ended ({how})"))

    def _destroyed(self, event: dict[str, Any]) -> None:
        page = self._by_target.get(event["targetId"])
        if page is not None:
            page.end(PageClosed("the page was closed"))


class LeanPage(Page):
    """One target in a browser context of its own."""

    raw: Session

    def __init__(self, backend: LeanBackend, session: Session, context: str, target: str) -> None:
        self.raw = session
        self.target = target
        session.on_end = self._wake
        self._backend = backend
        self._context = context
        self._closed = False
        self._loader = ""  # of the main frame's current document
        self._reached: set[str] = set()  # its load states
        self._seen: set[str] = set()  # every document the main frame has had
        self._statuses: dict[str, int] = {}
        self._moved = asyncio.Event()  # anything of the above has changed
        self._credentials: dict[str, str] = {}
        self._blocked: set[str] = set()
        self._requests: list[tuple[str, dict[str, Any]]] = []
        self._frames: dict[str, Session] = {}  # those of other sites

    async def prepare(self, settings: Settings, url: str) -> None:
        """All that must be in place before the first request."""
        page = self.raw
        page.on("Page.lifecycleEvent", self._lifecycle)
        page.on("Page.javascriptDialogOpening", self._dialog)
        page.on("Network.responseReceived", self._response)
        page.on("Inspector.targetCrashed", lambda _: self.end(_renderer_ended()))
        self._listen(page)
        self._requests = self._about_requests(settings)
        commands: list[tuple[str, dict[str, Any]]] = [
            ("Page.enable", {}),
            ("Inspector.enable", {}),
            ("Page.setLifecycleEventsEnabled", {"enabled": True}),
            (
                "Emulation.setDeviceMetricsOverride",
                {
                    "width": settings.viewport.width,
                    "height": settings.viewport.height,
                    "deviceScaleFactor": 1,
                    "mobile": False,
                },
            ),
        ]
        commands += self._requests
        if settings.cookies:
            commands.append(("Network.setCookies", {"cookies": _cookies(settings, url)}))
        # Chromium takes them in this order; the answers are waited for together.
        await asyncio.gather(*(page.command(name, **params) for name, params in commands))

    def _about_requests(self, settings: Settings) -> list[tuple[str, dict[str, Any]]]:
        """What holds for every frame; one of another site has a session of its own."""
        commands: list[tuple[str, dict[str, Any]]] = [
            ("Network.enable", {}),
            ("Target.setAutoAttach", AUTO_ATTACH),
        ]
        if settings.user_agent:
            agent = {"userAgent": settings.user_agent}
            commands.append(("Emulation.setUserAgentOverride", agent))
        if settings.headers:
            commands.append(("Network.setExtraHTTPHeaders", {"headers": settings.headers}))
        if fetch := self._interception(settings):
            commands.append(("Fetch.enable", fetch))
        return commands

    def _listen(self, session: Session) -> None:
        session.on("Fetch.requestPaused", functools.partial(self._paused, session))
        session.on("Fetch.authRequired", functools.partial(self._asked, session))
        session.on("Target.attachedToTarget", self._frame_attached)
        session.on("Target.detachedFromTarget", self._frame_detached)

    def _interception(self, settings: Settings) -> dict[str, Any]:
        proxy = read_proxy(settings.proxy)
        if proxy is not None and proxy.username:
            self._credentials = {"username": proxy.username, "password": proxy.password}
        self._blocked = {kind.capitalize() for kind in settings.block}
        if self._credentials:  # every request has to pass by us for it
            return {"patterns": [{"urlPattern": "*"}], "handleAuthRequests": True}
        if self._blocked:
            return {"patterns": [{"resourceType": kind} for kind in sorted(self._blocked)]}
        return {}

    def end(self, reason: BrowserError) -> None:
        """The page is no more."""
        self.raw.end(reason)

    async def goto(self, url: str, wait_until: WaitUntil = "load") -> int:
        answer = await self.raw.command("Page.navigate", seconds=NEVER, url=url)
        loader = answer.get("loaderId", "")
        if reason := answer.get("errorText"):
            if answer.get("isDownload"):
                raise BrowserError(f"cannot open {shown_url(url)}: it is a download")
            if reason == ABORTED:
                await self._ended_within(ABORTED_SECONDS)
            kind = SiteUnreachable if reason.startswith("net::ERR_") else BrowserError
            raise kind(f"cannot open {shown_url(url)}: {reason}")
        if not loader:  # within the same document
            return 0
        wanted = LIFECYCLE.get(wait_until, "")
        while loader not in self._seen or (wanted and wanted not in self._reached):
            if self.raw.ended is not None:
                raise self.raw.ended
            self._moved.clear()
            await self._moved.wait()
        return self._statuses.get(loader, 0)

    async def _ended_within(self, seconds: float) -> None:
        """Raises why the page ended, if it does so in this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.raw.ended is None:
                    self._moved.clear()
                    await self._moved.wait()
        if self.raw.ended is not None:
            raise self.raw.ended

    async def evaluate(self, expression: str) -> Any:
        try:
            answer = await self.raw.command(
                "Runtime.evaluate",
                seconds=NEVER,
                expression=expression,
                awaitPromise=True,
                returnByValue=True,
                userGesture=True,
            )
        except CommandFailed as error:
            text = str(error)
            raise ScriptFailed(text, navigated=any(each in text for each in NAVIGATED)) from None
        if thrown := answer.get("exceptionDetails"):
            about = thrown.get("exception", {})
            text = about.get("description") or about.get("value") or thrown.get("text", "")
            raise ScriptFailed(str(text).partition("\n")[0])
        return answer["result"].get("value")

    async def screenshot(self, *, full_page: bool = False) -> bytes:
        answer = await self.raw.command(
            "Page.captureScreenshot",
            seconds=NEVER,
            format="png",
            captureBeyondViewport=full_page,
            **(await self._whole() if full_page else {}),
        )
        return base64.b64decode(answer["data"])

    async def _whole(self) -> dict[str, Any]:
        size = (await self.raw.command("Page.getLayoutMetrics"))["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, **{k: size[k] for k in ("width", "height")}, "scale": 1}}

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._backend.forget(self)
        for frame in self._frames.values():
            self._backend.forget_session(frame)
        await self._backend.dispose(self._context)

    # -- events --------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._moved.set()

    def _lifecycle(self, event: dict[str, Any]) -> None:
        if event["frameId"] != self.target:  # the main frame is named after its target
            return
        if event["loaderId"] != self._loader:
            self._loader = event["loaderId"]
            self._seen.add(self._loader)
            self._reached = set()
        self._reached.add(event["name"])
        self._moved.set()

    def _response(self, event: dict[str, Any]) -> None:
        if event["type"] == "Document" and event["requestId"] == event["loaderId"]:
            self._statuses[event["loaderId"]] = event["response"]["status"]

    def _dialog(self, event: dict[str, Any]) -> None:
        # Nobody is there to answer; only leaving a page is agreed to.
        leave = event.get("type") == "beforeunload"
        self.raw.notify("Page.handleJavaScriptDialog", accept=leave)

    def _frame_attached(self, event: dict[str, Any]) -> None:
        frame = self._backend.session(event["sessionId"])
        self._frames[frame.name] = frame
        self._listen(frame)
        for name, params in self._requests:
            frame.notify(name, **params)
        frame.notify("Runtime.runIfWaitingForDebugger")

    def _frame_detached(self, event: dict[str, Any]) -> None:
        if frame := self._frames.pop(event["sessionId"], None):
            self._backend.forget_session(frame)

    def _paused(self, session: Session, event: dict[str, Any]) -> None:
        request = event["requestId"]
        if event.get("resourceType") in self._blocked:
            session.notify("Fetch.failRequest", requestId=request, errorReason="BlockedByClient")
        else:
            session.notify("Fetch.continueRequest", requestId=request)

    def _asked(self, session: Session, event: dict[str, Any]) -> None:
        answer: dict[str, str] = {"response": "CancelAuth"}
        if event["authChallenge"].get("source") == "Proxy" and self._credentials:
            # Once: what was refused is refused again.
            answer = {"response": "ProvideCredentials", **self._credentials}
            self._credentials = {}
        session.notify(
            "Fetch.continueWithAuth", requestId=event["requestId"], authChallengeResponse=answer
        )


def _renderer_ended() -> PageCrashed:
    return PageCrashed("the page's renderer process ended")


def _cookies(settings: Settings, url: str) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "value": each.value,
            "domain": cookie_domain(each, url),
            "path": each.path,
            "secure": each.secure,
            "httpOnly": each.http_only,
        }
        for each in settings.cookies
    ]
