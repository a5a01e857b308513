"""Page of the lean backend: one target of Chromium, with its popups and frames."""

import asyncio
import base64
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from musterd.workers.browser.backend import (
    ABORTED,
    ABORTED_SECONDS,
    NOT_CUT,
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
from musterd.workers.browser.cdp import CommandFailed, Session
from musterd.workers.browser.errors import BrowserError, PageCrashed, ScriptFailed
from musterd.workers.pages.http import shown_url

if TYPE_CHECKING:
    from musterd.workers.browser.lean import LeanBackend

NEVER = 3600.0  # for commands that wait for a site: the task's own deadline comes first
AUTO_ATTACH: dict[str, Any] = {
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
# Chromium's errors for a document that went away under a script.
NAVIGATED = ("context was destroyed", "navigated or closed", "Cannot find context", "was collected")


class LeanPage(Page):
    """One target in a browser context of its own."""

    raw: Session

    def __init__(self, backend: "LeanBackend", session: Session, context: str, target: str) -> None:
        self.raw = session
        self.target = target
        session.on_end = self._wake
        self._backend = backend
        self.context = context
        self._closed = False
        self._loader = ""  # of the main frame's current document
        self._reached: set[str] = set()  # load states of that document
        self._seen: set[str] = set()  # every document the main frame has had
        self._statuses: dict[str, int] = {}
        self._document = ""  # request of that document
        self._document_url = ""  # fit to be shown
        self._received = 0  # bytes of that document
        self._too_large = 0  # bytes of a document that was refused
        self._cut = ""  # why the connection broke inside that document
        self._moved = asyncio.Event()  # any of the fields above has changed
        self.origins = set()
        self.console = Console()
        self._blank = False  # answer all requests ourselves
        self._credentials: dict[str, str] = {}
        self._blocked: set[str] = set()
        self._requests: list[tuple[str, dict[str, Any]]] = []
        self._others: dict[str, Session] = {}  # of popups, and of frames of other sites

    async def prepare(self, settings: Settings, url: str) -> None:
        """Set up everything that must be in place before the first request."""
        page = self.raw
        page.on("Page.lifecycleEvent", self._lifecycle)
        page.on("Network.responseReceived", self._response)
        page.on("Network.dataReceived", self._data)
        page.on("Network.loadingFailed", self._failed)
        page.on("Inspector.targetCrashed", lambda _: self.end(PageCrashed()))
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
        if self._backend.listens:
            page.on("Runtime.consoleAPICalled", self._said)
            page.on("Runtime.exceptionThrown", self._threw)
            page.on("Log.entryAdded", self._logged)
            commands += [("Runtime.enable", {}), ("Log.enable", {})]
        cookies = [self._set_cookies(settings, url)] if settings.cookies else []
        # Chromium takes them in this order; the answers are awaited together.
        await asyncio.gather(
            *(page.command(name, **params) for name, params in commands),
            *cookies,
            page.command("Runtime.runIfWaitingForDebugger"),
        )

    async def _set_cookies(self, settings: Settings, url: str) -> None:
        try:
            await self.raw.command("Network.setCookies", cookies=cookies_for(settings, url))
        except CommandFailed as error:
            raise bad_cookies(settings, str(error)) from None

    async def set_cookies(self, cookies: list[dict[str, Any]]) -> None:
        await self.raw.command("Network.setCookies", cookies=cookies)

    async def get_cookies(self) -> list[dict[str, Any]]:
        return await self._backend.cookies(self.context)

    @contextlib.asynccontextmanager
    async def blank(self) -> AsyncIterator[None]:
        before = [params for name, params in self._requests if name == "Fetch.enable"]
        await self.raw.command("Fetch.enable", patterns=[{"urlPattern": "*"}])
        self._blank = True
        try:
            yield
        finally:
            self._blank = False
            if before:
                await self.raw.command("Fetch.enable", **before[0])
            else:
                await self.raw.command("Fetch.disable")

    def _about_requests(self, settings: Settings) -> list[tuple[str, dict[str, Any]]]:
        """Return the commands for every frame; one of another site has a session of its own."""
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
        session.on("Page.javascriptDialogOpening", functools.partial(self._dialog, session))
        session.on("Target.attachedToTarget", self._frame_attached)
        session.on("Target.detachedFromTarget", lambda event: self.disown(event["sessionId"]))

    def _interception(self, settings: Settings) -> dict[str, Any]:
        proxy = read_proxy(settings.proxy)
        if proxy is not None and proxy.username:
            self._credentials = {"username": proxy.username, "password": proxy.password}
        self._blocked = {kind.capitalize() for kind in settings.block}
        if self._credentials:  # every request has to pass through us for the login
            return {"patterns": [{"urlPattern": "*"}], "handleAuthRequests": True}
        if self._blocked:
            return {"patterns": [{"resourceType": kind} for kind in sorted(self._blocked)]}
        return {}

    def end(self, reason: BrowserError) -> None:
        """Mark the page as gone."""
        self.raw.end(reason)

    async def goto(self, url: str, wait_until: WaitUntil = "load") -> int:
        answer = await self.raw.command("Page.navigate", seconds=NEVER, url=url)
        loader = answer.get("loaderId", "")
        if reason := answer.get("errorText"):
            if answer.get("isDownload"):
                raise is_download(shown_url(url))
            if self._too_large:  # we have stopped it before it was shown
                raise body_too_large(self._too_large, self.characters_max)
            if reason == ABORTED:
                await self._ended_within(ABORTED_SECONDS)
            raise cannot_open(shown_url(url), reason, self._statuses.get(loader, 0))
        if not loader:  # within the same document
            return 0
        wanted = LIFECYCLE.get(wait_until, "")
        while loader not in self._seen or (wanted and wanted not in self._reached):
            if self.raw.ended is not None:
                raise self.raw.ended
            if self._too_large:
                raise body_too_large(self._too_large, self.characters_max)
            self.check_document()
            self._moved.clear()
            await self._moved.wait()
        return self._statuses.get(loader, 0)

    def check_document(self) -> None:
        if self._cut:
            raise cut_short(self._document_url, self._cut)

    async def _ended_within(self, seconds: float) -> None:
        """Raise why the page ended, if it does so in this time."""
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
        if details := answer.get("exceptionDetails"):
            raise ScriptFailed(thrown(details)[0].partition("\n")[0])
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

    async def last_picture(self) -> bytes:
        return await self.screenshot()

    async def last_html(self, characters_max: int) -> str:
        return str(await self.evaluate(html_start(characters_max)))

    async def _whole(self) -> dict[str, Any]:
        return whole_document(await self.raw.command("Page.getLayoutMetrics"))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._backend.forget(self)
        for name in list(self._others):
            self.disown(name)
        await self._backend.dispose(self.context)

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
            if event.get("frameId") == self.target:
                self._document, self._received, self._cut = event["requestId"], 0, ""
                self._document_url = shown_url(event["response"].get("url", ""))
                self.origins.add(origin_of(event["response"].get("url", "")))
                self._measure(content_length(event["response"].get("headers", {})))

    def _data(self, event: dict[str, Any]) -> None:
        if event["requestId"] == self._document:
            self._received += event["dataLength"]
            self._measure(self._received)

    def _failed(self, event: dict[str, Any]) -> None:
        reason = event.get("errorText", "") or "it failed"
        # Cancelled: by us, or by the page, which navigates before it is complete.
        cancelled = event.get("canceled") or reason in NOT_CUT
        if event["requestId"] == self._document and not cancelled:
            self._cut = reason
            self._moved.set()

    def _measure(self, size: int) -> None:
        """Stop loading a document that cannot be within the limit."""
        if is_too_large(size, self.characters_max) and not self._too_large:
            self._too_large = size
            self.raw.notify("Page.stopLoading")
            self._moved.set()

    def _said(self, event: dict[str, Any]) -> None:
        text = " ".join(
            str(each.get("value", each.get("description", each.get("type"))))
            for each in event.get("args", ())
        )
        frames = event.get("stackTrace", {}).get("callFrames", ())
        self._heard(event.get("type", "log"), text, frames[0].get("url", "") if frames else "")

    def _threw(self, event: dict[str, Any]) -> None:
        self._heard("error", *thrown(event.get("exceptionDetails", {})))

    def _logged(self, event: dict[str, Any]) -> None:
        entry = event.get("entry", {})
        self._heard(entry.get("level", "log"), entry.get("text", ""), entry.get("url", ""))

    def _heard(self, kind: str, text: str, where: str) -> None:
        self.console.add(kind, text, where)
        if self.console.full:  # a page may say things forever
            self.raw.notify("Runtime.disable")
            self.raw.notify("Log.disable")

    def _dialog(self, session: Session, event: dict[str, Any]) -> None:
        # Nobody is there to answer; only leaving a page is agreed to.
        leave = event.get("type") == "beforeunload"
        session.notify("Page.handleJavaScriptDialog", accept=leave)

    def _frame_attached(self, event: dict[str, Any]) -> None:
        self.adopt(self._backend.session(event["sessionId"]))

    def adopt(self, session: Session) -> None:
        """Give a popup or a frame the settings of its page, and close its dialogs."""
        self._others[session.name] = session
        self._listen(session)
        session.notify("Page.enable")
        for name, params in self._requests:
            session.notify(name, **params)
        session.notify("Runtime.runIfWaitingForDebugger")

    def disown(self, name: str) -> None:
        """Forget a session that is gone."""
        if session := self._others.pop(name, None):
            self._backend.forget_session(session)

    def _paused(self, session: Session, event: dict[str, Any]) -> None:
        request = event["requestId"]
        if self._blank:
            html = [{"name": "Content-Type", "value": "text/html"}]
            session.notify(
                "Fetch.fulfillRequest", requestId=request, responseCode=200, responseHeaders=html
            )
        elif event.get("resourceType") in self._blocked:
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


def thrown(details: dict[str, Any]) -> tuple[str, str]:
    """Return what a script threw, and the address of the script."""
    about = details.get("exception", {})
    text = about.get("description") or about.get("value") or details.get("text", "")
    return str(text), details.get("url", "")
