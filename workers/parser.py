"""Built-in worker for pages that need no browser: `parser.fetch` and `parser.extract`.

May import: ipc.errors, workers.authoring, workers.pages.
"""

from typing import Annotated, Any, Literal, cast

import aiohttp
import msgspec
from msgspec import Meta
from multidict import CIMultiDict

from musterd.ipc.errors import LoggedOut, ProxyFailed
from musterd.workers.authoring.base import Context, Worker, task
from musterd.workers.pages import robots
from musterd.workers.pages.addresses import AddressRules
from musterd.workers.pages.conditional import NOT_MODIFIED, Memory, is_possible
from musterd.workers.pages.connections import AddressRefused, open_connector, open_session
from musterd.workers.pages.extraction import Value, compile_selectors
from musterd.workers.pages.fetchers import NO_RULES, Fetcher, fetch_by, load_fetcher
from musterd.workers.pages.heads import head_of, seen_by
from musterd.workers.pages.http import (
    PAGE_BYTES_MAX,
    BadRequest,
    HttpError,
    Method,
    Page,
    Request,
    Seen,
    fetch,
    shown_url,
)
from musterd.workers.pages.kinds import check_watched, is_missing
from musterd.workers.pages.options import check_proxies, read_options
from musterd.workers.pages.page_reader import PageReader
from musterd.workers.pages.proxies import Proxies, host_of
from musterd.workers.pages.session_cookies import cookies_of, jar_of
from musterd.workers.pages.watched import check_found

USER_AGENT = "musterd/0.1"
DEFAULT_SELECT = {"title": "title"}

Bytes = Annotated[int, Meta(ge=1)]


PROXY_RESOLVES = (
    "`allow` and `deny` have addresses, and with a proxy it is the proxy that resolves names: have "
    "the proxy refuse them, or name hosts only"
)


class ParserOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[pools.parser] options`."""

    user_agent: str = USER_AGENT
    headers: dict[str, str] = {}
    max_bytes: Bytes = PAGE_BYTES_MAX
    proxy: str | None = None
    proxies: list[str] = []  # in turn; those of a target go before
    allow: list[str] = []  # see `addresses`; empty: everything
    deny: list[str] = []
    conditional: bool | None = None  # None: for runs whose results are watched
    robots: bool = False
    fetcher: str = ""  # "module:function" in place of our own
    artefacts: Literal["auto", "always", "never"] = "auto"  # auto: not with sessions or secrets

    def __post_init__(self) -> None:
        """Raise ValueError for options that cannot be read, enforced or used together."""
        rules = AddressRules(self.allow, self.deny)
        if (self.proxy or self.proxies) and rules.need_address:
            raise ValueError(PROXY_RESOLVES)
        check_proxies(self.proxies, self.proxy)
        if self.fetcher and rules:
            raise ValueError(NO_RULES)


class ParserWorker(Worker):
    """Fetch pages over connections kept for the worker's life, and extract values from them."""

    options_type: type[ParserOptions] = ParserOptions  # a subclass may have options of its own
    _connector: aiohttp.TCPConnector | None = None

    def __init__(self) -> None:
        super().__init__()
        self._reader = PageReader()
        self._proxies = Proxies()
        self._proxy_hosts: set[str] = set()
        self._robots = robots.Robots()
        self._fetcher: Fetcher | None = None

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        read = read_options(options, cls.options_type)
        if read.fetcher:
            load_fetcher(read.fetcher)

    async def open(self) -> None:
        self._options = read_options(self.options, self.options_type)
        self._rules = AddressRules(self._options.allow, self._options.deny)
        if self._options.proxy:
            self._proxy_hosts.add(host_of(self._options.proxy))
        self._connector = open_connector(self._rules, proxy_hosts=self._proxy_hosts)
        if self._options.fetcher:
            self._fetcher = load_fetcher(self._options.fetcher)

    async def close(self) -> None:
        self._reader.close()
        if self._connector is not None:
            await self._connector.close()

    @task(target="url")
    async def fetch(
        self,
        ctx: Context,
        url: str,
        *,
        method: Method = "GET",
        headers: dict[str, str] | None = None,
        body: str = "",
        max_bytes: Bytes | None = None,
        conditional: bool | None = None,
    ) -> dict[str, Any]:
        """Return the page at `url` as {status, url, headers, text, encoding, elapsed_seconds}.

        `url` in the result is the last one of the redirects. A status of 400 or more is an error.
        With a session, its cookies are sent, and those of the site are kept in it.
        """
        request = self._request(url, method, headers, body, max_bytes)
        memory = await self._memory(ctx, conditional, request, None)
        page = await self._ask(ctx, request, memory)
        if page is None:
            return cast(dict[str, Any], memory.result)
        result = msgspec.structs.asdict(page)
        del result["redirects"]
        await memory.keep(page, result)
        return result

    @task(target="url")
    async def extract(
        self,
        ctx: Context,
        url: str,
        select: dict[str, str] = DEFAULT_SELECT,
        *,
        headers: dict[str, str] | None = None,
        max_bytes: Bytes | None = None,
        conditional: bool | None = None,
    ) -> dict[str, Value]:
        """Return the values that `select` names on the page at `url`; without it, the page's title.

            {"title": "h1", "price": "css:.price", "link": "a.promo::attr(href)",
             "all": "[]li.promo", "x": "xpath://h1/text()"}

        A selector is CSS unless it begins with `xpath:`; `::attr(NAME)` gives an attribute,
        `::text`
        the element's own text; a leading `[]` gives all matches as a list. Otherwise the first
        match, or None. More in `musterd.workers.pages.extraction`.
        """
        selectors = compile_selectors(select)  # a bad selector costs the site no request
        request = self._request(url, "GET", headers, "", max_bytes)
        memory = await self._memory(ctx, conditional, request, select)
        page = await self._ask(ctx, request, memory)
        if page is None:
            return cast(dict[str, Value], memory.result)
        values = await self._reader.extract(page.text, selectors)
        if ctx.runs("extract"):  # not a handler that uses this method, and may expect nothing
            await check_watched(ctx, values, page.text, self._reader)
            check_found(ctx, values)
        if not any(is_missing(each) for each in values.values()):  # else look anew the next time
            await memory.keep(page, values)
        return values

    def _request(
        self,
        url: str,
        method: Method,
        headers: dict[str, str] | None,
        body: str,
        max_bytes: int | None,
    ) -> Request:
        """Return the request with all its headers."""
        options = self._options
        sent: CIMultiDict[str] = CIMultiDict({"User-Agent": options.user_agent})
        sent.update(options.headers)
        sent.update(headers or {})
        limit = options.max_bytes if max_bytes is None else max_bytes
        return Request(url, method, dict(sent), body, limit)

    # -- pages that have not changed -----------------------------------------------------------

    async def _memory(
        self, ctx: Context, conditional: bool | None, request: Request, of: Any
    ) -> Memory:
        """Return what is known of this request; nothing where it is not to be conditional."""
        said = self._options.conditional if conditional is None else conditional
        wanted = ctx.watched if said is None else said
        # What a login shows is not kept, and must not be mistaken for what others see.
        if not wanted or ctx.private or not is_possible(request):
            return Memory()
        return await Memory.load(ctx.state, request, of)

    async def _ask(self, ctx: Context, request: Request, memory: Memory) -> Page | None:
        """Return the page; None where it has not changed since the result that `memory` has."""
        if robots.are_wanted(ctx, self._options.robots):
            agent = CIMultiDict(request.headers).get("User-Agent", "")

            async def fetch_robots(asked: Request) -> Page:
                sent = msgspec.structs.replace(asked, headers={"User-Agent": agent})
                return await self._fetch(ctx, sent)

            await self._robots.check(ctx, request.url, agent, fetch_robots)
        page = await self._fetch(ctx, memory.asking(request))
        if memory.holds(page):
            ctx.metrics.counter("parser_not_modified").inc()
            return None
        if memory.asks and page.status == NOT_MODIFIED:
            # Said of another address or of another validator: this is not what was asked.
            page = await self._fetch(ctx, request)
        return page

    # -- fetching ------------------------------------------------------------------------------

    async def _fetch(self, ctx: Context, request: Request) -> Page:
        """Fetch the page, through the next of the proxies where there are any."""
        entries = ctx.fetching.proxies or self._options.proxies
        if not entries:
            by_pool = msgspec.structs.replace(request, proxy=self._options.proxy)
            return await self._send(ctx, by_pool)
        if self._rules.need_address:
            raise AddressRefused(PROXY_RESOLVES)
        # A target's list may have some for its browsers alone.
        entries = [entry for entry in entries if not entry.startswith("socks")]
        if not entries:
            raise BadRequest("proxies has none but SOCKS, which only browsers can use: add others")
        site = host_of(request.url)
        problem: ProxyFailed | None = None
        for proxy in self._proxies.usable(entries, site, ctx.secret):
            if proxy.address.startswith("socks"):
                raise BadRequest(f"proxies has {proxy.entry!r}: only browsers can use SOCKS")
            self._proxy_hosts.add(host_of(proxy.address))
            through = msgspec.structs.replace(request, proxy=proxy.address)
            try:
                page = await self._send(ctx, through)
            except ProxyFailed as error:
                self._proxies.failed(proxy, site, error)
                ctx.metrics.counter("proxy_failures").inc()
                problem = error
                if request.method not in ("GET", "HEAD"):
                    break  # the proxy may have passed it on
            except HttpError:
                self._proxies.worked(proxy, site)
                raise
            else:
                self._proxies.worked(proxy, site)
                return page
        assert problem is not None
        raise problem

    async def _send(self, ctx: Context, request: Request) -> Page:
        """Fetch the page; the head of its answer is kept for the case that the task fails."""
        wanted = self._options.artefacts
        seen = None if wanted == "never" else seen_by(ctx, always=wanted == "always")
        page = await self._answered(ctx, request, seen)
        if seen is not None:
            seen(head_of(page))
        return page

    async def _answered(self, ctx: Context, request: Request, seen: Seen | None) -> Page:
        if self._fetcher is not None:
            return await fetch_by(self._fetcher, request, ctx.deadline, seen)
        assert self._connector is not None, "open() was not called"
        if not ctx.has_session:
            # "unsafe" is aiohttp's word for cookies of sites without a name, such as
            # http://127.0.0.1/.
            own = aiohttp.CookieJar(unsafe=True)
            async with open_session(self._connector, {}, self._rules, own) as client:
                return await fetch(client, request, ctx.deadline, seen)
        async with ctx.session() as session:
            jar = jar_of(session.cookies)
            async with open_session(self._connector, {}, self._rules, jar) as client:
                try:
                    page = await fetch(client, request, ctx.deadline, seen)
                except HttpError as error:
                    if session.is_logged_out("", error.status):
                        raise LoggedOut(f"the site asks for a login: {error}") from None
                    raise
                finally:
                    session.cookies = cookies_of(jar)
            if session.is_logged_out(page.url):
                raise LoggedOut(f"{shown_url(request.url)} leads to {shown_url(page.url)}")
            # What lets anybody in does not belong into a result.
            headers = {name: text for name, text in page.headers.items() if name != "set-cookie"}
            return msgspec.structs.replace(page, headers=headers)
