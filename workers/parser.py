"""Built-in worker for pages that need no browser: `parser.fetch` and `parser.extract`.

May import: workers.authoring, workers.pages.
"""

from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Meta

from musterd.workers.authoring.base import Context, Worker, task
from musterd.workers.pages.addresses import AddressRules
from musterd.workers.pages.connections import open_connector, open_session
from musterd.workers.pages.extraction import Value, compile_selectors
from musterd.workers.pages.http import PAGE_BYTES_MAX, Method, Page, Request, fetch
from musterd.workers.pages.options import read_options
from musterd.workers.pages.page_reader import PageReader

USER_AGENT = "musterd/0.1"
DEFAULT_SELECT = {"title": "title"}

Bytes = Annotated[int, Meta(ge=1)]


class ParserOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[pools.parser] options`."""

    user_agent: str = USER_AGENT
    headers: dict[str, str] = {}
    max_bytes: Bytes = PAGE_BYTES_MAX
    proxy: str | None = None
    allow: list[str] = []  # see `addresses`; empty: everything
    deny: list[str] = []

    def __post_init__(self) -> None:
        """Raise ValueError for rules that cannot be read or enforced."""
        rules = AddressRules(self.allow, self.deny)
        if self.proxy and rules.need_address:
            raise ValueError(
                "`allow` and `deny` have addresses, and with `proxy` it is the proxy that resolves "
                "names: have the proxy refuse them, or name hosts only"
            )


class ParserWorker(Worker):
    """Fetch pages over connections kept for the worker's life, and extract values from them."""

    options_type: type[ParserOptions] = ParserOptions  # a subclass may have options of its own
    _connector: aiohttp.TCPConnector | None = None

    def __init__(self) -> None:
        super().__init__()
        self._reader = PageReader()

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        read_options(options, cls.options_type)

    async def open(self) -> None:
        self._options = read_options(self.options, self.options_type)
        self._rules = AddressRules(self._options.allow, self._options.deny)
        proxy = self._options.proxy
        self._connector = open_connector(
            self._rules, proxy_host=urlsplit(proxy).hostname if proxy else None
        )

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
    ) -> dict[str, Any]:
        """Return the page at `url` as {status, url, headers, text, encoding, elapsed_seconds}.

        `url` in the result is the last one of the redirects. A status of 400 or more is an error.
        """
        request = self._request(url, method, headers, body, max_bytes)
        return msgspec.structs.asdict(await self._fetch(ctx, request))

    @task(target="url")
    async def extract(
        self,
        ctx: Context,
        url: str,
        select: dict[str, str] = DEFAULT_SELECT,
        *,
        headers: dict[str, str] | None = None,
        max_bytes: Bytes | None = None,
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
        page = await self._fetch(ctx, self._request(url, "GET", headers, "", max_bytes))
        return await self._reader.extract(page.text, selectors)

    def _request(
        self,
        url: str,
        method: Method,
        headers: dict[str, str] | None,
        body: str,
        max_bytes: int | None,
    ) -> Request:
        limit = self._options.max_bytes if max_bytes is None else max_bytes
        return Request(url, method, headers or {}, body, limit, self._options.proxy)

    async def _fetch(self, ctx: Context, request: Request) -> Page:
        assert self._connector is not None, "open() was not called"
        headers = {"User-Agent": self._options.user_agent, **self._options.headers}
        # "unsafe" is aiohttp's word for cookies of sites without a name, such as http://127.0.0.1/.
        cookies = aiohttp.CookieJar(unsafe=True)
        async with open_session(self._connector, headers, self._rules, cookies) as session:
            return await fetch(session, request, ctx.deadline)
