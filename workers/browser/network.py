"""The way of a page to its site: the pool's rules, proxies in turn, and robots.txt.

network = Network(rules, proxies, robots)          kept for a worker's life
await network.check(ctx, url, settings)            raises where the page may not be opened
async with network.reached(ctx, url, settings) as settings: ...     with the proxy to use
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from musterd.ipc.errors import ProxyFailed
from musterd.workers.authoring.base import Context
from musterd.workers.browser.backend import Settings, proxy_failure
from musterd.workers.browser.filter_proxy import REFUSED, FilterProxy
from musterd.workers.metrics import metrics
from musterd.workers.pages.addresses import AddressRules
from musterd.workers.pages.connections import AddressRefused, open_connector, open_session
from musterd.workers.pages.http import (
    BadRequest,
    HttpError,
    Page,
    Request,
    SiteUnreachable,
    check_url,
    fetch,
    shown_url,
)
from musterd.workers.pages.proxies import Proxies, host_of
from musterd.workers.pages.robots import Robots, are_wanted

ROBOTS_AGENT = "musterd"  # as robots.txt knows browsers of a pool that gives no user_agent

NO_PROXY = (
    "a proxy cannot be used together with allow and deny: the addresses behind it cannot be "
    "checked; leave out the proxy, or have the proxy keep to the rules"
)


class Network:
    """What holds for all pages of a worker."""

    def __init__(self, rules: AddressRules, proxies: Sequence[str], robots: bool) -> None:
        self._rules = rules
        self._entries = proxies
        self._by_pool = robots
        self._proxies = Proxies()
        self._robots = Robots()

    async def check(self, ctx: Context, url: str, settings: Settings, *, given: bool) -> None:
        """Raise where the page may not be opened, by the address or by the site's robots.txt."""
        check_url(url)  # file: and chrome: would let a task read this machine
        if reason := self._rules.check(urlsplit(url).hostname or ""):
            raise AddressRefused(f"cannot open {shown_url(url)}: {reason}")
        if not are_wanted(ctx, self._by_pool):
            return
        agent = settings.user_agent or ROBOTS_AGENT

        async def fetch_robots(asked: Request) -> Page:
            async with self._by_proxy(ctx, url, settings, given=given) as through:
                if through.proxy and self._rules:
                    raise BadRequest(NO_PROXY)
                request = msgspec.structs.replace(asked, proxy=through.proxy or None)
                connector = open_connector(self._rules)
                headers = {"User-Agent": agent}
                async with open_session(connector, headers, self._rules, owned=True) as session:
                    return await fetch(session, request, ctx.deadline)

        await self._robots.check(ctx, url, agent, fetch_robots)

    @asynccontextmanager
    async def reached(
        self, ctx: Context, url: str, settings: Settings, *, given: bool
    ) -> AsyncIterator[Settings]:
        """Yield the settings of a page with the proxy it has to use; `given`: the task's own."""
        async with (
            self._by_proxy(ctx, url, settings, given=given) as through,
            self._within_rules(through) as within,
        ):
            yield within

    @asynccontextmanager
    async def _by_proxy(
        self, ctx: Context, url: str, settings: Settings, *, given: bool
    ) -> AsyncIterator[Settings]:
        """Yield the settings with the next of the proxies, unless the task has given one."""
        entries = ctx.fetching.proxies or self._entries
        if given or not entries:
            yield settings
            return
        site = host_of(url)
        proxy = self._proxies.usable(entries, site, ctx.secret)[0]
        try:
            yield msgspec.structs.replace(settings, proxy=proxy.address)
        except (SiteUnreachable, HttpError, ProxyFailed) as error:
            failure = proxy_failure(error, proxy.entry)
            if failure is None:
                raise
            self._proxies.failed(proxy, site, failure)
            metrics.counter("proxy_failures").inc()
            raise failure from None
        else:
            self._proxies.worked(proxy, site)

    @asynccontextmanager
    async def _within_rules(self, settings: Settings) -> AsyncIterator[Settings]:
        """Yield the settings of a page that connects only where the pool's rules allow."""
        if not self._rules:
            yield settings
            return
        if settings.proxy:
            raise BadRequest(NO_PROXY)
        proxy = FilterProxy(self._rules)
        try:
            yield msgspec.structs.replace(settings, proxy=await proxy.start())
        except SiteUnreachable as error:
            if REFUSED in str(error) and proxy.refusals:
                raise AddressRefused(f"{error}: {proxy.refusals[0]}") from None
            raise
        finally:
            await proxy.close()
