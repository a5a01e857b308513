"""Show that an operation is under way: what it does, and how long it has been running.

    with loading("fetching prices", ctx=ctx) as shown:
        for number, page in enumerate(pages):
            shown.update(fraction=number / len(pages))

    @loading("fetching prices")
    async def fetch(ctx, url): ...

Text and time go to `ctx.progress()`, which `task.progress()` of a client and `musterctl submit
--wait` show, or to your own function `show(text, seconds)`: at once, then every `every` seconds,
and at the end.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from datetime import timedelta
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from musterd.workers.toolkit import functions

P = ParamSpec("P")
R = TypeVar("R")

EVERY_SECONDS = 1.0  # as often as the shown time changes
JOIN_SECONDS = 1.0  # for the thread that shows, which may be in a slow `show`

Show = Callable[[str, float], object]

log = logging.getLogger("musterd.toolkit")


class Shown:
    """Operation under way."""

    def __init__(self, text: str, show: Callable[["Shown"], object]) -> None:
        self.text = text
        self.fraction = 0.0
        self._show = show
        self._began = monotonic()

    @property
    def seconds(self) -> float:
        """How long the operation has been running."""
        return monotonic() - self._began

    def update(self, text: str | None = None, *, fraction: float | None = None) -> None:
        """Show another text, or the progress from 0 to 1."""
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"loading: fraction={fraction!r}: give one from 0 to 1")
            self.fraction = float(fraction)
        if text is not None:
            self.text = text
        self.tell()

    def tell(self) -> None:
        """Show the operation now. An error of `show` is logged and does not harm the operation."""
        try:
            self._show(self)
        except Exception as error:  # noqa: BLE001 - a word about the work is not the work
            log.warning("loading: %s cannot be shown: %r", self.text, error)


class loading:
    """Show `text` and the time while the block or the function runs.

    A decorator uses the `ctx` of the call, and its text may be a function of the arguments.
    `show(text, seconds)` is called instead of `ctx.progress()`, from another thread in code that is
    not async.
    """

    def __init__(
        self,
        text: str | Callable[..., str],
        *,
        ctx: Any | None = None,
        show: Show | None = None,
        every: float | timedelta = EVERY_SECONDS,
    ) -> None:
        self._text = text
        self._ctx = ctx
        self._show = show
        self._every = functions.seconds("loading: every", every)
        self._shown: Shown | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    # -- as a context manager -------------------------------------------------------------------

    def __enter__(self) -> Shown:
        shown = self._begin()
        self._over.clear()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._tick, shown), name="loading", daemon=True
        )
        self._thread.start()
        return shown

    def __exit__(self, *error: object) -> None:
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(JOIN_SECONDS)
        self._end()

    async def __aenter__(self) -> Shown:
        shown = self._begin()
        self._task = asyncio.create_task(self._tick_async(shown))
        return shown

    async def __aexit__(self, *error: object) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._end()

    def _begin(self) -> Shown:
        if self._shown is not None:
            raise RuntimeError("loading(...) is under way already: make one for each operation")
        if not isinstance(self._text, str):
            raise TypeError("loading: a function that makes the text is for @loading(...) alone")
        self._shown = Shown(self._text, self._teller())
        self._shown.tell()
        return self._shown

    def _end(self) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.tell()

    def _teller(self) -> Callable[[Shown], object]:
        show, ctx = self._show, self._ctx
        if show is not None:
            return lambda shown: show(shown.text, shown.seconds)
        progress = getattr(ctx, "progress", None)
        if progress is None:
            raise TypeError(
                "loading: there is nobody to show it to: give ctx=ctx, or show=function"
            )
        return lambda shown: progress(shown.fraction, f"{shown.text} ({int(shown.seconds)} s)")

    def _tick(self, shown: Shown) -> None:
        while not self._over.wait(self._every):
            shown.tell()

    async def _tick_async(self, shown: Shown) -> None:
        while True:
            await asyncio.sleep(self._every)
            shown.tell()

    # -- as a decorator ---------------------------------------------------------------------------

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        awaits = functions.is_async("loading", function)
        call: Callable[..., Any] = function
        text = functions.namer("loading: text", self._text, function)
        context = functions.context_finder(function)

        def made(args: tuple[Any, ...], kwargs: dict[str, Any]) -> loading:
            """Make one for each call: many may be under way at once."""
            ctx = self._ctx if self._ctx is not None else context(args, kwargs)
            return loading(text(args, kwargs), ctx=ctx, show=self._show, every=self._every)

        async def shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if awaits:
                async with made(args, kwargs):
                    return await call(*args, **kwargs)
            with made(args, kwargs):
                return call(*args, **kwargs)

        return functions.wrapped(function, shown, awaits=awaits)
