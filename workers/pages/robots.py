"""robots.txt, where the operator asks for it: what a site lets programs fetch, and how often.

    robots = Robots()                                    kept for a worker's life
    await robots.check(ctx, url, user_agent, fetch)      returns when the page may be fetched

As RFC 9309 says: a site without robots.txt (an answer of 4xx) allows everything; while it cannot be
read (5xx, no answer) nothing is fetched, and that error is raised. It is kept for an hour. The
group of the user agent counts, else that of `*`.

A crawl delay holds for all workers together: the time of the next fetch is a state that they share,
changed under a lock. An attempt waits for its turn up to WAIT_SECONDS_MAX, else it comes back
later.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from msgspec import Struct
from protego import Protego

from musterd.workers.authoring.base import Context, Permanent, Retry
from musterd.workers.pages.http import Page, PermanentHttpError, Request, shown_url

ROBOTS_BYTES_MAX = 500 * 1024  # RFC 9309: at least so much must be read
KEPT_SECONDS = 3600.0  # RFC 9309: at most a day
KEPT_CHARS_MAX = 4 * 1024 * 1024  # of all sites
DELAY_SECONDS_MAX = 3600.0  # a longer crawl delay is a mistake in the unit
WAIT_SECONDS_MAX = 10.0
LEAVE_SECONDS = 5.0  # of an attempt, for the page itself
AGENT_CHARS_MAX = 200
NOBODY = "-"  # an agent that nobody is

_AGENT_LINE = re.compile(r"(\s*user[-\s]*agent[\s:]+)([^#]*)", re.IGNORECASE)

Fetch = Callable[[Request], Awaitable[Page]]


class RobotsDisallowed(Permanent):
    """The site's robots.txt asks programs not to fetch this page."""


def are_wanted(ctx: Context, by_pool: bool) -> bool:
    """Tell whether the task keeps to robots.txt: as its target says, else its pool."""
    said = ctx.fetching.robots
    return by_pool if said is None else said


class _Kept(Struct):
    text: str  # "": everything is allowed
    until: float
    agent: str = ""
    rules: Protego | None = None  # for this agent


class Robots:
    """Rules of sites, kept for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def check(self, ctx: Context, url: str, user_agent: str, fetch: Fetch) -> None:
        """Return when the page may be fetched; RobotsDisallowed if it may not."""
        parts = urlsplit(url)
        site = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        agent = user_agent[:AGENT_CHARS_MAX]
        rules = await self._rules(site, agent, fetch)
        if not rules.can_fetch(url, agent):
            raise RobotsDisallowed(
                f"{shown_url(url)} is not for programs, says {site}/robots.txt: ask the site, or "
                "set robots = false"
            )
        if delay := rules.crawl_delay(agent):
            await _take_turn(ctx, site, min(float(delay), DELAY_SECONDS_MAX))

    async def _rules(self, site: str, agent: str, fetch: Fetch) -> Protego:
        known = self._kept.get(site)
        if known is None or known.until <= self._clock():
            try:
                page = await fetch(Request(f"{site}/robots.txt", bytes_max=ROBOTS_BYTES_MAX))
                text = page.text
            except PermanentHttpError:
                text = ""  # it has none
            known = _Kept(text, self._clock() + KEPT_SECONDS)
            self._kept.pop(site, None)
            self._kept[site] = known
            size = sum(len(each.text) + len(name) for name, each in self._kept.items())
            while size > KEPT_CHARS_MAX:
                name, oldest = self._kept.popitem(last=False)
                size -= len(oldest.text) + len(name)
        if known.rules is None or known.agent != agent:
            known.rules, known.agent = Protego.parse(without_others(known.text, agent)), agent
        return known.rules


def without_others(text: str, agent: str) -> str:
    """Return robots.txt with all agents but `*` and the one that is meant as one agent.

    Protego gives each agent of a group all rules of it: a file of 500 KiB that names thousands of
    agents for thousands of rules would take hours, and the memory of the machine.
    """
    lines = [(line, _AGENT_LINE.match(line)) for line in text.splitlines()]
    named = {_name(found) for _, found in lines if found}
    meant = max((each for each in named if _is_meant(each, agent)), key=len, default="*")
    return "\n".join(
        line
        if not found
        else found[1] + (name if (name := _name(found)) in ("*", meant) else NOBODY)
        for line, found in lines
    )


def _name(line: re.Match[str]) -> str:
    name = line[2].strip().lower()
    return name if name == "*" else name.replace("*", "")


def _is_meant(name: str, agent: str) -> bool:
    """Tell whether this is a product in the agent's name, from its beginning."""
    known = agent.lower()
    return name in known and bool(name and re.search(rf"(?<![\w-]){re.escape(name)}", known))


async def _take_turn(ctx: Context, site: str, delay: float) -> None:
    """Wait until `delay` seconds have passed since the last fetch by any worker of the pool."""
    key = f"crawl:{site[:150]}"
    async with ctx.lock(key):
        now = time.time()
        turn = float(await ctx.state.aload(key, 0.0))
        # Nobody takes a later turn than this: the clock was set back.
        wait = min(max(turn - now, 0.0), WAIT_SECONDS_MAX + delay)
        left = ctx.deadline - time.monotonic() - LEAVE_SECONDS
        if wait <= min(WAIT_SECONDS_MAX, left):
            await ctx.state.asave(now + wait + delay, key, ttl=2 * delay + WAIT_SECONDS_MAX)
    if wait > min(WAIT_SECONDS_MAX, left):
        raise Retry(f"{site} asks for {delay:g} s between two pages", after=wait)
    await asyncio.sleep(wait)
