"""Handlers that are to behave alike under musterd_worker and under a daemon."""

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from musterd import Context, Permanent, Retry, TaskTimeout, Worker, task
from musterd.workers.toolkit import retry

BEEN: dict[str, int] = {}  # of this process


def die() -> None:
    """End the worker as the kernel does; tests without a daemon put their own in its place."""
    os.kill(os.getpid(), signal.SIGKILL)


def note_retry(ctx: Context, error: BaseException) -> None:
    ctx.metrics.counter("retries_seen", error=type(error).__name__).inc()


class SiteError(Exception):
    status = 503


@dataclass
class Offer:
    name: str
    price: float


class Jobs(Worker):
    def open(self) -> None:
        self.opened_with = dict(self.options)

    # -- results and arguments ----------------------------------------------------------------

    @task
    def echo(self, ctx: Context, value: Any = None) -> Any:
        return value

    @task
    def typed(self, ctx: Context, name: str, many: list[int], offer: Offer | None = None) -> str:
        return f"{name} {sum(many)} {offer}"

    @task
    def unserialisable(self, ctx: Context) -> object:
        return {"what": object()}

    @task
    def about(self, ctx: Context) -> dict[str, Any]:
        return {"attempt": ctx.attempt, "options": self.opened_with, "pool": self.pool}

    @task
    def note(self, ctx: Context, text: str) -> None:
        ctx.metrics.counter("notes").inc()
        ctx.metrics.counter("notes_of", text=text).inc()
        ctx.log.info("noted: %s", text)
        ctx.log.debug("a debug line")

    # -- errors and retries -------------------------------------------------------------------

    @task
    def fail(self, ctx: Context, times: int = 1000, kind: str = "ConnectionError") -> int:
        if ctx.attempt <= times:
            raise {"ConnectionError": ConnectionError, "SiteError": SiteError}[kind]("no luck")
        return ctx.attempt

    @task(max_retries=1)
    def fail_twice_at_most(self, ctx: Context) -> None:
        raise ValueError("never")

    @task(retry_on=(TimeoutError,))
    def fail_otherwise(self, ctx: Context) -> None:
        raise ValueError("not worth another attempt")

    @task
    def ask_again(self, ctx: Context) -> int:
        if ctx.attempt < 3:
            raise Retry("not yet", after=0.01)
        return ctx.attempt

    @task
    def give_up(self, ctx: Context) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise Permanent("hopeless") from error

    @task(backoff=lambda attempt, error: 0.001 * attempt, on_retry=note_retry)
    def with_hooks(self, ctx: Context) -> int:
        if ctx.attempt < 3:
            raise OSError("again")
        return ctx.attempt

    @task
    def leave(self, ctx: Context) -> None:
        sys.exit("enough")

    # -- time ---------------------------------------------------------------------------------

    @task(timeout=0.2)
    def sleep(self, ctx: Context, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @task(timeout=0.2)
    async def asleep(self, ctx: Context, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    @task(timeout=0.2)
    def block(self, ctx: Context) -> None:
        """Wait in a way that no clock of ours knows."""
        read, write = os.pipe()
        try:
            os.read(read, 1)
        finally:
            os.close(read)
            os.close(write)

    @task(timeout=0.2)
    def wrap_timeout(self, ctx: Context) -> None:
        try:
            time.sleep(60)
        except TaskTimeout as error:
            raise RuntimeError("the library failed") from error

    @task(timeout=0.2)
    def clean_up_late(self, ctx: Context) -> str:
        try:
            time.sleep(60)
        except TaskTimeout:
            time.sleep(0.01)
        return "late, but well"

    @task(timeout=30)
    def run_loop(self, ctx: Context) -> str:
        async def both() -> str:
            await asyncio.gather(asyncio.sleep(0.05), asyncio.sleep(0.01))
            return "gathered"

        return asyncio.run(both())

    @task
    def budget(self, ctx: Context) -> bool:
        return 0 < ctx.deadline - time.monotonic() <= 120

    # -- state, progress, locks ---------------------------------------------------------------

    @task
    def steps(self, ctx: Context, count: int, dies_at: int = -1, fails_at: int = -1) -> list[int]:
        done: list[int] = ctx.state.load(default=[])
        for step in range(len(done), count):
            if step == dies_at and ctx.state.load("died", default=0) < 2:
                ctx.state.save(ctx.state.load("died", default=0) + 1, "died")
                die()
            if step == fails_at and ctx.attempt == 1:
                raise ConnectionError(f"at step {step}")
            done.append(ctx.attempt)
            ctx.state.save(done)
            ctx.progress(len(done) / count, f"step {step}")
        ctx.state.clear("died")
        return done

    @task
    async def asteps(self, ctx: Context, count: int, fails_at: int = -1) -> list[int]:
        done: list[int] = await ctx.state.aload(default=[])
        for step in range(len(done), count):
            if step == fails_at and ctx.attempt == 1:
                raise ConnectionError(f"at step {step}")
            done.append(ctx.attempt)
            await ctx.state.asave(done)
            ctx.progress(len(done) / count, f"step {step}")
        return done

    @task
    def remember(self, ctx: Context, key: str, value: Any = None) -> Any:
        before = ctx.state.load(key)
        ctx.state.save(value, key)
        return before

    @task
    def forget(self, ctx: Context) -> list[Any]:
        ctx.state.save(1, "gone")
        before = ctx.state.load("gone")
        ctx.state.clear("gone")
        return [before, ctx.state.load("gone"), ctx.state.load("gone", default="nothing")]

    @task
    def save_rubbish(self, ctx: Context) -> None:
        ctx.state.save({"what": object()})

    @task
    def lock_twice(self, ctx: Context) -> None:
        with ctx.lock("a"), ctx.lock("a"):
            pass

    @task
    def lock(self, ctx: Context) -> str:
        with ctx.lock("a"):
            return "locked"

    @task
    async def alock(self, ctx: Context) -> str:
        async with ctx.lock("a"):
            return "locked"

    @task
    def die_always(self, ctx: Context) -> None:
        die()

    # -- secrets and sites --------------------------------------------------------------------

    @task
    def use_secret(self, ctx: Context, token: str, tell: str = "") -> int:
        if tell == "error":
            raise ConnectionError(f"refused: {token}")
        if tell == "result":
            return token  # type: ignore[return-value]
        return len(token)

    @task
    def look_up(self, ctx: Context, name: str) -> int:
        return len(ctx.secret(name))

    @task(target="url")
    def visit(self, ctx: Context, url: str) -> str:
        raise SiteError("503")

    @task
    def use_toolkit(self, ctx: Context) -> int:
        return try_often(ctx)

    @task
    def page(self, ctx: Context) -> list[str]:
        """See a page that is there for those who are logged in."""
        with ctx.session() as session:
            return sorted(each.name for each in session.cookies)


class Wide(Worker):
    """Runs several tasks at once."""

    @task
    async def meet(self, ctx: Context, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @task(timeout=0.2)
    async def asleep(self, ctx: Context, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @task
    async def line_up(self, ctx: Context) -> int:
        async with ctx.lock("queue"):
            number: int = await ctx.state.aload("number", default=0)
            await asyncio.sleep(0.01)
            await ctx.state.asave(number + 1, "number")
            return number

    @task
    async def fail(self, ctx: Context) -> None:
        raise ConnectionError("no luck")


@retry(max_retries=3, base=0.001)
def try_often(ctx: Context) -> int:
    BEEN[ctx.task_id] = BEEN.get(ctx.task_id, 0) + 1
    if BEEN[ctx.task_id] < 3:
        raise OSError("again")
    return BEEN[ctx.task_id]


def log_in(session: Any, user: str) -> None:
    session.set_cookie(f"sid-{user}", "a-long-value-of-a-cookie", "site.example")


# -- a module of functions ----------------------------------------------------------------------


@task
def double(ctx: Context, number: int) -> int:
    return 2 * number


@task
async def slowly(ctx: Context, number: int) -> int:
    await asyncio.sleep(0.01)
    return number
