"""Another fetcher in place of ours: `fetcher = "module:function"` in the options of a pool.

    async def fetch(request: Request, deadline: float) -> Page

The request has all headers, the size limit and the proxy; the deadline is in seconds of
time.monotonic(). Redirects, cookies and connections are the fetcher's own business. So nobody
checks where it connects to: it cannot be used together with `allow` and `deny`.
"""

import asyncio
import importlib
import inspect
import math
import time
from collections.abc import Awaitable, Callable

from musterd.ipc.errors import ConfigurationError
from musterd.workers.pages.heads import head_of
from musterd.workers.pages.http import (
    Page,
    PageTooLarge,
    Request,
    Seen,
    SiteTimeout,
    check_url,
    retry_after_seconds,
    shown_url,
    status_error,
)

Fetcher = Callable[[Request, float], Awaitable[Page]]

NO_RULES = (
    "`fetcher` cannot be used together with `allow` and `deny`: nobody checks where it connects "
    "to; leave them out, and limit the network of the machine instead"
)


def load_fetcher(name: str) -> Fetcher:
    """Return the function that `fetcher` names; ConfigurationError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        function: Fetcher | None = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # noqa: BLE001 - an import can raise anything
        why = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"options: fetcher = {name!r} cannot be imported: {why}") from None
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f'options: fetcher = {name!r} is no async function: give "module:function"'
        )
    return function


async def fetch_by(
    fetcher: Fetcher, request: Request, deadline: float, seen: Seen | None = None
) -> Page:
    """Return the page that the fetcher fetches, within the limits of ours."""
    check_url(request.url)
    shown = shown_url(request.url)
    seconds = None if deadline == math.inf else deadline - time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            page = await fetcher(request, deadline)
    except TimeoutError:
        raise SiteTimeout(f"no answer in time from {shown}") from None
    if not isinstance(page, Page):
        raise TypeError(f"the fetcher returned {type(page).__name__}, not a Page")
    if seen is not None:
        seen(head_of(page))
    if page.status >= 400:
        after = retry_after_seconds(page.headers.get("retry-after", ""), time.time())
        raise status_error(page.status, shown, after)
    if len(page.text) > request.bytes_max:
        raise PageTooLarge(f"{shown} is over the size limit of {request.bytes_max} bytes")
    return page
