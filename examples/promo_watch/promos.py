"""The workers: one parses pages, the other needs a browser to see them. Copy these."""

import math
from typing import Any

from musterd import Context, Permanent, Retry, task
from musterd.workers.browser import BrowserWorker
from musterd.workers.parser import ParserWorker

SELECT = {"promo": ".promo", "notice": ".notice"}


class Parser(ParserWorker):
    @task(target="exchange")
    async def check(self, ctx: Context, exchange: str, url: str) -> dict[str, Any]:
        ctx.progress(0.1, "asking the exchange")
        page = await self.extract(ctx, url, SELECT)
        return await compare(ctx, exchange, page)


class Browser(BrowserWorker):
    @task(target="exchange")
    async def check(self, ctx: Context, exchange: str, url: str) -> dict[str, Any]:
        ctx.progress(0.1, "rendering the page")
        page = await self.extract(ctx, url, SELECT, wait_for=".promo, .notice", block=["image"])
        return await compare(ctx, exchange, page)


async def compare(ctx: Context, exchange: str, page: dict[str, Any]) -> dict[str, Any]:
    """Return the promo and the one before it; the result differs only when the promo changes."""
    if page["notice"]:
        raise Retry(page["notice"], after=0.5)  # "back in a moment"
    if not page["promo"]:
        raise Permanent(f"{exchange} shows no promo: has its page another layout?")
    ctx.progress(0.9, "comparing")
    seen = await ctx.state.aload(key=exchange, default={"promo": None, "before": None})
    if page["promo"] != seen["promo"]:
        seen = {"promo": page["promo"], "before": seen["promo"]}
        await ctx.state.asave(seen, key=exchange, ttl=math.inf)
    return dict(seen)
