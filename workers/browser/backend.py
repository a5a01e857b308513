"""Interface of a browser and its pages, however it is driven, and the settings of one page."""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta, Struct

from musterd.ipc.errors import ProxyFailed
from musterd.workers.authoring.session import ORIGINS_MAX, Session
from musterd.workers.authoring.session import Cookie as SessionCookie
from musterd.workers.browser.errors import (
    LOST,
    BrowserError,
    PageClosed,
    PageCrashed,
    ScriptFailed,
)
from musterd.workers.pages.http import (
    PROXY_LOGIN,
    SCHEMES,
    UNAUTHORIZED,
    BadRequest,
    HttpError,
    PageTooLarge,
    SiteUnreachable,
    shown_url,
    status_error,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # between two looks for a selector
HAS_BODY = "!!document.body"
CONSOLE_LINES_MAX = 500  # of one page
CONSOLE_CHARS_MAX = 1000
PROBE = "6 * 7"
PROBE_ANSWER = 42
ABORTED = "net::ERR_ABORTED"  # also reported for a page whose renderer died
EMPTY_ERROR = "net::ERR_HTTP_RESPONSE_CODE_FAILURE"  # reported for an error status without a page
ABORTED_SECONDS = 0.5  # within which a crash is reported, if that is why
LOGIN_WANTED = "net::ERR_INVALID_AUTH_CREDENTIALS"  # a 401 with a challenge: nobody is asked
# Chromium's words for an address that no other attempt will open. The parser refuses such addresses
# too.
UNOPENABLE = {
    "net::ERR_TOO_MANY_REDIRECTS": "it redirects too often",
    "net::ERR_UNSAFE_REDIRECT": "it redirects to an address that cannot be fetched",
    "net::ERR_INVALID_REDIRECT": "it redirects to an invalid address",
    "net::ERR_UNKNOWN_URL_SCHEME": "its scheme is not one of the web",
    "net::ERR_DISALLOWED_URL_SCHEME": "its scheme is not one of the web",
    "net::ERR_INVALID_URL": "it is not a valid address",
    "net::ERR_UNSAFE_PORT": "no browser opens that port",
}
NO_TUNNEL = "net::ERR_TUNNEL_CONNECTION_FAILED"
# Chromium's words for a proxy that fails.
PROXY_ERRORS = (
    NO_TUNNEL,
    "net::ERR_PROXY_CONNECTION_FAILED",
    "net::ERR_PROXY_AUTH_REQUESTED",
    "net::ERR_PROXY_AUTH_UNSUPPORTED",
    "net::ERR_UNEXPECTED_PROXY_AUTH",
    "net::ERR_PROXY_CERTIFICATE_INVALID",
    "net::ERR_SOCKS_CONNECTION_FAILED",
    "net::ERR_NO_SUPPORTED_PROXIES",
)
# Reported for a document that was not cut short: it was stopped, or never begun, which goto()
# raises.
NOT_CUT = (ABORTED, EMPTY_ERROR, LOGIN_WANTED)
NO_CONTENT = (204, 205)  # statuses that never come with a page

# A character of JavaScript takes at most so many bytes of UTF-8: a body with more bytes for each
# character of the limit cannot be within it.
BYTES_PER_CHARACTER = 3
TOO_LARGE = "musterd: too large: "  # thrown by our wrapping of a script, with the length

SAME_SITE = ("Strict", "Lax", "None")

WaitUntil = Literal["commit", "domcontentloaded", "load", "networkidle"]
Block = Literal["image", "font", "media", "stylesheet"]
Pixels = Annotated[int, Meta(ge=1, le=10_000)]

# The page itself checks the length, so that an oversized document never leaves it.
_SNAPSHOT = """(() => {{
  const root = document.documentElement;
  const kind = document.doctype ? new XMLSerializer().serializeToString(document.doctype) : "";
  const html = kind + (root ? root.outerHTML : "");
  return html.length > {limit} ? {{length: html.length}}
    : {{html, title: document.title, url: document.URL}};
}})()"""


NO_PAGE = "about:blank"
_FILL = """(values => {{
  for (const [name, text] of Object.entries(values)) localStorage.setItem(name, text);
}})({values})"""
# Some pages have none, such as those of data: addresses, and reading it raises.
_STORED = "(() => { try { return {...localStorage}; } catch { return {}; } })()"


class Viewport(Struct, frozen=True, forbid_unknown_fields=True):
    width: Pixels = 1280
    height: Pixels = 720


class Cookie(Struct, frozen=True, forbid_unknown_fields=True):
    """Cookie; without a domain it is for the site of the task."""

    name: str
    value: str
    domain: str = ""
    path: str = "/"
    secure: bool = False
    http_only: bool = False


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one page is opened: arguments of every browser task, defaults in the pool's options."""

    viewport: Viewport = Viewport()
    headers: dict[str, str] = {}
    cookies: list[Cookie] = []
    user_agent: str = ""
    proxy: str = ""
    block: list[Block] = []


class Proxy(Struct, frozen=True):
    """`http://user:password@host:port`, split into its parts."""

    server: str
    username: str = ""
    password: str = ""


class Rendered(Struct, frozen=True):
    """Page as it stands after its scripts ran."""

    html: str
    title: str
    url: str


def read_proxy(proxy: str) -> Proxy | None:
    """Return the proxy that settings name; BadRequest where it cannot be read."""
    if not proxy:
        return None
    try:
        parts = urlsplit(proxy)
        server = f"{parts.scheme}://{parts.hostname}:{parts.port}"
        complete = parts.scheme and parts.hostname and parts.port
    except ValueError:
        complete = False
    if not complete:
        raise BadRequest(f"proxy = {shown_url(proxy)!r}: write scheme://[user:password@]host:port")
    return Proxy(server, unquote(parts.username or ""), unquote(parts.password or ""))


def cookies_for(settings: Settings, url: str) -> list[dict[str, Any]]:
    """Return the cookies as Chromium and Playwright take them, for their own domain or the site."""
    site = urlsplit(url).hostname or ""
    for each in settings.cookies:
        if not each.domain and not site:
            raise BadRequest(f"cookie {each.name!r} has no domain, and its page no address")
    return [
        {
            "name": each.name,
            "value": each.value,
            "domain": each.domain or site,
            "path": each.path,
            "secure": each.secure,
            "httpOnly": each.http_only,
        }
        for each in settings.cookies
    ]


def _written(cookie: SessionCookie) -> dict[str, Any]:
    """Return a cookie of a session as Chromium and Playwright take it."""
    written = {
        "name": cookie.name,
        "value": cookie.value,
        "domain": cookie.domain,
        "path": cookie.path,
        "secure": cookie.secure,
        "httpOnly": cookie.http_only,
    }
    if cookie.expires:
        written["expires"] = cookie.expires
    if cookie.same_site in SAME_SITE:
        written["sameSite"] = cookie.same_site
    return written


def _read(cookie: dict[str, Any]) -> SessionCookie:
    return SessionCookie(
        name=cookie["name"],
        value=cookie["value"],
        domain=cookie["domain"],
        path=cookie["path"],
        expires=max(0.0, float(cookie["expires"])),
        secure=cookie["secure"],
        http_only=cookie["httpOnly"],
        same_site=cookie.get("sameSite", ""),
    )


def bad_cookies(settings: Settings, reason: str) -> BadRequest:
    """Return the error without values: they may be secret."""
    names = ", ".join(repr(each.name) for each in settings.cookies)
    return BadRequest(
        f"the cookies {names} cannot be set ({reason}): look at their names, domains, paths and "
        "characters; __Host- and __Secure- need secure = true"
    )


def origin_of(url: str) -> str:
    """Return scheme, host and port of an address of the web; "" of any other."""
    scheme, mark, rest = url.partition("://")
    if scheme not in SCHEMES or not mark:
        return ""
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}"


def content_length(headers: dict[str, str]) -> int:
    """Return the size that an answer announces; 0 without one."""
    for name, value in headers.items():
        if name.lower() == "content-length" and value.isdecimal():
            return int(value)
    return 0


def is_too_large(size: int, characters_max: int) -> bool:
    return bool(characters_max) and size > characters_max * BYTES_PER_CHARACTER


def body_too_large(size: int, characters_max: int) -> PageTooLarge:
    return PageTooLarge(
        f"the page's body has {size} bytes or more, over the limit of {characters_max} characters; "
        "raise max_bytes, or fetch it without a browser"
    )


def cannot_open(url: str, reason: str, status: int = 0) -> Exception:
    """Return the error of an address that Chromium did not open, by Chromium's reason.

    `url` may be shown; `status` is the site's answer, if there was one.
    """
    if reason == LOGIN_WANTED:
        # A proxy is asked for its login in the same words as a site.
        return status_error(status or UNAUTHORIZED, url, reason="and asks for a login")
    if status and (reason == EMPTY_ERROR or (reason == ABORTED and status in NO_CONTENT)):
        return status_error(status, url, reason="without a page")
    if why := UNOPENABLE.get(reason):
        return BadRequest(f"cannot open {url}: {why} ({reason})")
    kind = SiteUnreachable if reason.startswith("net::ERR_") else BrowserError
    return kind(f"cannot open {url}: {reason}")


def proxy_failure(error: Exception, proxy: str) -> ProxyFailed | None:
    """Return the error of a proxy, which may be shown; None if it was the site's."""
    if isinstance(error, ProxyFailed):
        return error
    if isinstance(error, HttpError):
        if error.status != PROXY_LOGIN:
            return None
        return ProxyFailed(f"the proxy {proxy} wants another login: {error}")
    reason = next((each for each in PROXY_ERRORS if each in str(error)), "")
    if not reason:
        return None
    # A tunnel that the proxy refuses may be the fault of the site.
    return ProxyFailed(f"the proxy {proxy} failed: {reason}", everywhere=reason != NO_TUNNEL)


def is_download(url: str) -> BadRequest:
    return BadRequest(f"cannot open {url}: it is a download, not a page; use parser.fetch")


def cut_short(url: str, reason: str) -> SiteUnreachable:
    """Return the error of a document that broke off after its beginning had come."""
    return SiteUnreachable(f"{url} broke off before its end: {reason}")


def whole_document(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters for a picture of the whole page, by Chromium's measures of it."""
    size = metrics["cssContentSize"]
    return {"clip": {"x": 0, "y": 0, **{k: size[k] for k in ("width", "height")}, "scale": 1}}


def merge(defaults: Settings, given: dict[str, Any]) -> Settings:
    """Lay a task's settings over those of its pool; BadRequest names what cannot be read."""
    try:
        changed = msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        raise BadRequest(f"arguments of a page: {error}") from None
    fields = {name: getattr(changed, name) for name in given}
    if "headers" in fields:
        fields["headers"] = {**defaults.headers, **changed.headers}
    return msgspec.structs.replace(defaults, **fields)


class Console:
    """First lines that a page's scripts wrote, and errors of the page."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @property
    def full(self) -> bool:
        """Whether no more lines are kept; then nobody need listen."""
        return len(self.lines) >= CONSOLE_LINES_MAX

    def add(self, kind: str, text: str, where: str = "") -> None:
        if not self.full:
            place = f" ({shown_url(where)})" if where else ""
            self.lines.append(f"{kind}: {text[:CONSOLE_CHARS_MAX]}{place}")


class Page(ABC):
    """Page in a context of its own. Every method may wait forever: use a deadline."""

    raw: Any  # Playwright's Page, or the Session of our own client
    console: Console  # empty where the backend does not listen
    origins: set[str]  # of the documents that the page has shown
    _refused: Sequence[SessionCookie] = ()  # cookies of its session that Chromium does not take
    leave_at = math.inf  # when its task leaves it, in seconds of time.monotonic()
    characters_max = 0  # of a document: one that cannot be within it is not loaded; 0: any

    @abstractmethod
    async def goto(self, url: str, wait_until: WaitUntil = "load") -> int:
        """Open the address; return its HTTP status, 0 without one."""

    @abstractmethod
    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if a promise; plain data only."""

    @abstractmethod
    async def screenshot(self, *, full_page: bool = False) -> bytes:
        """Return the page as PNG: what is in view, or all of it."""

    @abstractmethod
    async def close(self) -> None:
        """Close the page's whole context, popups included."""

    @abstractmethod
    async def last_picture(self) -> bytes:
        """Return what is in view as PNG, also of a page that was cut short or refused."""

    @abstractmethod
    async def last_html(self, characters_max: int) -> str:
        """Return the beginning of the document, likewise."""

    async def start_trace(self) -> None:
        """Record what the page does from now on; the options allow it where the backend can."""
        raise NotImplementedError

    async def stop_trace(self, path: Path) -> None:
        """Write what was recorded as a file."""
        raise NotImplementedError

    @abstractmethod
    async def set_cookies(self, cookies: list[dict[str, Any]]) -> None:
        """Set cookies of the page's context, each as Chromium and Playwright take it."""

    @abstractmethod
    async def get_cookies(self) -> list[dict[str, Any]]:
        """Return all cookies of the page's context, likewise."""

    @abstractmethod
    def blank(self) -> AbstractAsyncContextManager[None]:
        """`async with page.blank()`: every address is an empty page, and no site is asked."""

    @abstractmethod
    def check_document(self) -> None:
        """Raise SiteUnreachable where the connection broke inside the main document.

        Chromium shows the beginning of such a page and never ends loading it.
        """

    async def run(self, script: str, characters_max: int = 0) -> Any:
        """Run a script as the body of an async function and return its value; PageTooLarge if that
        is longer, as JSON."""
        body = f"(async () => {{{script}\n}})()"
        if not characters_max:
            return await self.evaluate(body)
        try:
            return await self.evaluate(_bounded(body, characters_max))
        except ScriptFailed as error:
            _, mark, length = str(error).partition(TOO_LARGE)
            if not mark:
                raise
            raise PageTooLarge(
                f"the script returned {length.split()[0]} characters, over the limit of "
                f"{characters_max}; raise max_bytes or return less"
            ) from None

    async def perform(self, script: str) -> None:
        """Run a script and drop its value."""
        await self.evaluate(f"(async () => {{{script}\n}})().then(() => null)")

    async def probe(self) -> bool:
        """Tell whether the page runs a script."""
        return bool(await self.evaluate(PROBE) == PROBE_ANSWER)

    async def wait_for(self, selector: str) -> None:
        """Return when the selector (CSS, or XPath behind `xpath:`) matches something."""
        looked = _look(selector)
        while True:
            self.check_document()
            try:
                found = await self.evaluate(looked)
            except ScriptFailed as error:
                if error.navigated:  # look at the next document
                    found = False
                else:
                    raise BadRequest(f"wait_for = {selector!r} cannot be read: {error}") from None
            if found:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def put_session(self, session: Session) -> None:
        """Fill a fresh page with the cookies and the local storage of a session."""
        if session.cookies:
            await self._put_cookies(session.cookies)
            there = {_read(each).place for each in await self.get_cookies()}
            self._refused = [each for each in session.cookies if each.place not in there]
            if self._refused:
                names = ", ".join(each.name for each in self._refused)
                log.debug("session %s: the browser refuses its cookies %s", session.name, names)
        if session.storage:
            async with self.blank():
                for origin, values in session.storage.items():
                    await self.goto(f"{origin}/")
                    await self.evaluate(_FILL.format(values=msgspec.json.encode(values).decode()))
                await self.goto(NO_PAGE)
        self.origins.clear()

    async def _put_cookies(self, cookies: list[SessionCookie]) -> None:
        """Set those cookies of a session that Chromium takes. It takes all at once or none, and may
        refuse what other clients take of a site: `__Host-` without Secure, for example."""
        try:
            await self.set_cookies([_written(each) for each in cookies])
        except (*LOST, PageCrashed, PageClosed):
            raise
        except BrowserError:
            if half := len(cookies) // 2:
                await self._put_cookies(cookies[:half])
                await self._put_cookies(cookies[half:])

    async def take_session(self, session: Session) -> None:
        """Take cookies and local storage out of the page, which shows nothing any more."""
        shown = await self.evaluate("location.origin")
        origins = {each for each in (*self.origins, *session.storage, shown) if "://" in each}
        storage = {shown: await self._stored()} if shown in origins else {}
        if others := sorted(origins - {shown})[:ORIGINS_MAX]:
            async with self.blank():
                for origin in others:
                    await self.goto(f"{origin}/")
                    storage[origin] = await self._stored()
        session.storage = {origin: values for origin, values in storage.items() if values}
        cookies = [_read(each) for each in await self.get_cookies()]
        taken = {each.place for each in cookies}
        session.cookies = [*cookies, *(each for each in self._refused if each.place not in taken)]

    async def _stored(self) -> dict[str, str]:
        """Return the texts in the document's local storage, or in what it has put in its place."""
        found = await self.evaluate(_STORED)
        entries = found.items() if isinstance(found, dict) else ()
        return {name: text for name, text in entries if isinstance(text, str)}

    async def snapshot(self, characters_max: int) -> Rendered:
        """Return the document with its title and address; PageTooLarge over the limit."""
        expression = _SNAPSHOT.format(limit=characters_max)
        while True:
            self.check_document()
            try:
                found = await self.evaluate(expression)
                break
            except ScriptFailed as error:
                if not error.navigated:
                    raise
                await asyncio.sleep(POLL_SECONDS)
        if "length" in found:
            raise PageTooLarge(
                f"the page has {found['length']} characters, over the limit of {characters_max}; "
                "raise max_bytes or extract less"
            )
        return msgspec.convert(found, Rendered)


class Backend(ABC):
    """Running browser."""

    pages = 0  # open ones
    listens = False  # to consoles of pages

    @abstractmethod
    async def open_page(self, settings: Settings, url: str) -> Page:
        """Return a page in a fresh context; `url` is the site that its cookies are for."""

    @abstractmethod
    async def close(self, *, force: bool = False) -> None:
        """End the browser and all its processes and files; with `force`, or if it does not react,
        kill it."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the browser is not known to have ended; a stuck one is alive."""

    @abstractmethod
    def processor_seconds(self) -> dict[int, float]:
        """Return how long each process of the browser has used processors, by pid."""


def _bounded(body: str, characters_max: int) -> str:
    """Wrap a script so that the page checks the length of its value before it leaves the page."""
    return f"""(async () => {{
  const value = await {body};
  let length = 0;
  try {{ length = (JSON.stringify(value) || "").length; }} catch {{}}
  if (length > {characters_max}) throw new RangeError("{TOO_LARGE}" + length);
  return value;
}})()"""


def html_start(characters_max: int) -> str:
    """Return an expression for the beginning of the document."""
    return f"(document.documentElement?.outerHTML || '').slice(0, {characters_max})"


def _look(selector: str) -> str:
    query = selector.removeprefix("css:").strip()
    if query.startswith("xpath:"):
        text = msgspec.json.encode(query.removeprefix("xpath:").strip()).decode()
        return f"!!document.evaluate({text}, document, null, 9, null).singleNodeValue"
    return f"!!document.querySelector({msgspec.json.encode(query).decode()})"
