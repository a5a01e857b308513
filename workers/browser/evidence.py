"""Why a page failed: a picture, the HTML and the console, held for the case that its task fails.
And the picture for the alert about a change, taken before the page is left.

A browser that is wedged, or whose page spins, answers nothing: what does not come in time is left
out, and the failure is not held up. The console is known already.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Literal, TypeVar

from musterd.ipc.errors import LoggedOut, MusterdError
from musterd.workers.authoring.base import Context
from musterd.workers.browser.backend import Page
from musterd.workers.browser.errors import LOST, PageClosed, PageCrashed

EVIDENCE_SECONDS = 5.0  # a picture takes a tenth of a second; longer than this is a wedged browser
LATE_SECONDS = 1.0  # after the task's own timeout; its worker is killed 5 s after that
TRACE_SECONDS = 10.0  # to pack a trace, which somebody has asked for
HTML_CHARS_MAX = 2 * 1024 * 1024
PICTURE, HTML, CONSOLE, TRACE = "screenshot.png", "page.html", "console.txt", "trace.zip"

Wanted = Literal["auto", "always", "never"]
T = TypeVar("T")
log = logging.getLogger(__name__)


def is_wanted(ctx: Context, wanted: Wanted) -> bool:
    """Tell whether artefacts of this attempt's pages are kept."""
    return wanted != "never" and ctx.wants_artefacts(always=wanted == "always")


async def hold(
    ctx: Context, page: Page, error: BaseException, wanted: Wanted, *, trace: bool
) -> float:
    """Hold what can be known of a page that fails, within a limited time. Raises nothing.

    Return how much of the time to close the page was used, LATE_SECONDS at most.
    """
    goes_on = isinstance(error, LoggedOut) and ctx.may_log_in_again()
    if ctx.cancelled or goes_on or not is_wanted(ctx, wanted):
        return 0.0
    began = time.monotonic()
    await _hold(ctx, page, error, always=wanted == "always", trace=trace)
    return min(time.monotonic() - began, LATE_SECONDS)


async def attach(ctx: Context, page: Page) -> None:
    """Take the picture that the schedule asks for. Without one the task succeeds all the same."""
    if not ctx.attaches:
        return
    seconds = min(_seconds(ctx, EVIDENCE_SECONDS), (page.leave_at - time.monotonic()) / 2)
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            ctx.attach(await page.last_picture())
    except (TimeoutError, MusterdError) as error:
        ctx.log.warning("there is no picture of the page: %s", error or "it took too long")


async def _hold(
    ctx: Context, page: Page, error: BaseException, *, always: bool, trace: bool
) -> None:
    if page.console.lines:
        ctx.artefact(CONSOLE, "\n".join(page.console.lines) + "\n", always=always)
    if isinstance(error, (*LOST, PageCrashed, PageClosed)):
        return  # nobody would answer
    end = time.monotonic() + _seconds(ctx, EVIDENCE_SECONDS)
    both = _in_time(page.last_picture(), end), _in_time(page.last_html(HTML_CHARS_MAX), end)
    try:
        picture, html = await asyncio.gather(*both)
    except asyncio.CancelledError:  # once more: the page has to be closed now
        return
    if picture:
        ctx.artefact(PICTURE, picture, always=always)
    if html:
        ctx.artefact(HTML, html, always=always)
    path = ctx.artefact_path(TRACE, always=always) if trace else None
    if path is not None:
        await _in_time(page.stop_trace(path), time.monotonic() + _seconds(ctx, TRACE_SECONDS))


def _seconds(ctx: Context, most: float) -> float:
    """Return how long a picture may take: half of what is left to close the page and to report."""
    left = ctx.deadline - time.monotonic()
    return min(most, left / 2) if left > 0 else LATE_SECONDS


async def _in_time(work: Awaitable[T], end: float) -> T | None:
    """Return the result; None if it does not come in time, or fails.

    A cancellation counts as not in time: the page must be closed all the same.
    """
    working = asyncio.ensure_future(work)
    try:
        async with asyncio.timeout(max(0.0, end - time.monotonic())):
            return await working
    except (TimeoutError, asyncio.CancelledError, MusterdError) as error:
        log.debug("part of the evidence is missing: %s", error or type(error).__name__)
        return None
