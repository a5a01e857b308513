"""Measure browser workers: time per page, requests per minute, recovery, memory.

python bench/browser.py [--quick] [--json FILE] [--only NAME] [--executable PATH]...

In turns, with the same browser and the same page on loopback:

    musterd          browser.extract, submitted one after the other, with either backend
    bare Playwright  a script that keeps one browser open; a fresh context per request, closed after
    new browser      the same script, but each request launches a browser and closes it
    new program      the same, with a new Playwright driver, as in the examples of its manual

The scripts wait for the page only: no queue, no commit, no outer deadline.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import psutil
from command import benchmark, carry_out
from figures import BYTES, PER_MINUTE, SECONDS, Figure, Measure, Target, Verdict, judged
from fleet import BenchError, Fleet, disk_directory
from memory import pss
from msgspec import Struct
from plan import ANSWER_SECONDS
from playwright.async_api import Browser, Playwright, async_playwright
from rich.console import Console
from table import measured

from musterd import Client
from musterd.workers.browser import find_executable
from musterd.workers.pages.extraction import compile_selectors, extract

BACKENDS = ("playwright", "cdp")
BROWSER_WORKER = "musterd.workers.browser:BrowserWorker"
SELECT = {"title": "h1", "codes": "[]code"}
SETTLE_SECONDS = 1.0  # from the last page to the measurement of memory


class Plan(Struct, frozen=True, kw_only=True):
    rounds: int = 5
    pages: int = 6  # of each system per round
    launches: int = 3  # requests with a browser of their own per round
    kills: int = 4


FULL = Plan()
QUICK = Plan(rounds=1, pages=1, launches=1, kills=1)

TARGETS = (
    Target(
        label="requests per minute, to a new browser and driver for each (cdp)",
        key="page.musterd.cdp.rate",
        relative_to="page.program.rate",
        bound=4.0,
        at_least=True,
    ),
    Target(
        label="requests per minute, to a new browser for each (cdp)",
        key="page.musterd.cdp.rate",
        relative_to="page.launched.rate",
        bound=4.0,
        at_least=True,
    ),
    Target(
        label="requests per minute, to a new browser and driver for each (playwright)",
        key="page.musterd.playwright.rate",
        relative_to="page.program.rate",
        bound=4.0,
        at_least=True,
    ),
    Target(
        label="requests per minute, to a new browser for each (playwright)",
        key="page.musterd.playwright.rate",
        relative_to="page.launched.rate",
        bound=4.0,
        at_least=True,
    ),
    Target(
        label="time per page, to a bare Playwright script (cdp)",
        key="page.musterd.cdp.seconds",
        relative_to="page.bare.seconds",
        bound=1.15,
    ),
    Target(
        label="time per page, to a bare Playwright script (playwright)",
        key="page.musterd.playwright.seconds",
        relative_to="page.bare.seconds",
        bound=1.15,
    ),
)


class Stage(Struct, frozen=True, kw_only=True):
    plan: Plan
    folder: Path
    executables: list[str]  # the first is compared
    site: str


@contextlib.contextmanager
def sample_site() -> Iterator[str]:
    command = [sys.executable, "-m", "musterd.supervisor.demo.sample_site", "--until-stdin-closes"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def fleet_of(stage: Stage, name: str, backends: tuple[str, ...], executable: str) -> Fleet:
    """Run a daemon with a pool of one worker for each backend, named after it."""
    made = Fleet(stage.folder / name, "full", dict.fromkeys(backends, (BROWSER_WORKER, 1)))
    for backend in backends:
        made.set(f"pools.{backend}.options.backend", backend)
        made.set(f"pools.{backend}.options.executable", executable)
    return made


def ask(client: Client, pool: str, url: str) -> None:
    found = client.submit(f"{pool}.extract", {"url": url, "select": SELECT}).result(ANSWER_SECONDS)
    _check(found)


def _check(found: dict[str, Any]) -> None:
    if not found["title"]:
        raise BenchError(f"the page has no title: {found}")


# -- time per page ------------------------------------------------------------------------------


async def visit(browser: Browser, url: str) -> None:
    """Do what a script does with its browser."""
    context = await browser.new_context()
    try:
        page = await context.new_page()
        await page.goto(url)
        _check(extract(await page.content(), compile_selectors(SELECT)))
    finally:
        await context.close()


async def visit_once(playwright: Playwright, executable: str, url: str) -> None:
    browser = await playwright.chromium.launch(executable_path=executable)
    try:
        await visit(browser, url)
    finally:
        await browser.close()


async def visit_anew(executable: str, url: str) -> None:
    async with async_playwright() as playwright:
        await visit_once(playwright, executable, url)


def measure_page(stage: Stage, number: int = 0) -> Measure:
    executable, name = stage.executables[number], "page" if not number else f"page{number + 1}"
    with (
        fleet_of(stage, name, BACKENDS, executable) as fleet,
        fleet.client() as client,
        asyncio.Runner() as runner,
    ):
        return runner.run(_pages(stage, client, executable, name))


def measure_page_of_another(stage: Stage) -> Measure | None:
    """Measure the second browser, if there is one."""
    return measure_page(stage, 1) if len(stage.executables) > 1 else None


async def _pages(stage: Stage, client: Client, executable: str, name: str) -> Measure:
    url, plan = f"{stage.site}/", stage.plan
    samples: dict[str, list[float]] = {}
    async with async_playwright() as playwright:
        kept = await playwright.chromium.launch(executable_path=executable)

        async def of_ours(pool: str) -> None:
            ask(client, pool, url)

        systems: list[tuple[str, int, Callable[[], Any]]] = [
            ("musterd.playwright", plan.pages, lambda: of_ours("playwright")),
            ("musterd.cdp", plan.pages, lambda: of_ours("cdp")),
            ("bare", plan.pages, lambda: visit(kept, url)),
            ("launched", plan.launches, lambda: visit_once(playwright, executable, url)),
            ("program", plan.launches, lambda: visit_anew(executable, url)),
        ]
        for _, _, run in systems:
            await run()  # once, unmeasured: fills caches
        for _ in range(plan.rounds):
            for key, count, run in systems:
                began = time.perf_counter()
                for _ in range(count):
                    await run()
                seconds = (time.perf_counter() - began) / count
                samples.setdefault(key, []).append(seconds)
        await kept.close()
    labels = {
        "musterd.playwright": 'musterd, backend "playwright"',
        "musterd.cdp": 'musterd, backend "cdp"',
        "bare": "bare Playwright, one browser kept open",
        "launched": "bare Playwright, a new browser for each request",
        "program": "bare Playwright, a new browser and driver for each request",
    }
    figures = [
        Figure(
            key=f"{name}.{key}.seconds",
            label=f"{label}: time per page",
            unit=SECONDS,
            samples=samples[key],
            baseline=f"{name}.bare.seconds",
        )
        for key, label in labels.items()
    ]
    figures += [
        Figure(
            key=f"{name}.{key}.rate",
            label=f"{label}: requests",
            unit=PER_MINUTE,
            samples=[60 / seconds for seconds in samples[key]],
            baseline=f"{name}.launched.rate",
        )
        for key, label in labels.items()
    ]
    title = f"One page after the other, {Path(executable).name}"
    return Measure(name=name, title=title, figures=figures)


# -- recovery -----------------------------------------------------------------------------------


def measure_recovery(stage: Stage) -> Measure:
    figures = []
    with (
        fleet_of(stage, "recovery", BACKENDS, stage.executables[0]) as fleet,
        fleet.client() as client,
    ):
        for backend in BACKENDS:
            samples = [
                _kill_and_ask(fleet, client, backend, stage) for _ in range(stage.plan.kills)
            ]
            figures.append(
                Figure(
                    key=f"recovery.{backend}",
                    label=f'backend "{backend}": from kill -9 of the worker to the next page',
                    unit=SECONDS,
                    samples=samples,
                )
            )
    return Measure(name="recovery", title="A killed browser worker", figures=figures)


def _kill_and_ask(fleet: Fleet, client: Client, pool: str, stage: Stage) -> float:
    ask(client, pool, f"{stage.site}/")
    fleet.wait_until_idle(pool)
    fleet.forgive(f"{pool}/0")
    victim = fleet.worker(f"{pool}/0").pid
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    ask(client, pool, f"{stage.site}/")
    return time.perf_counter() - began


# -- memory -------------------------------------------------------------------------------------


def measure_memory(stage: Stage) -> Measure:
    """Measure one daemon at a time: memory pages are shared with no other browser."""
    figures = []
    for number, executable in enumerate(stage.executables):
        for backend in BACKENDS:
            with (
                fleet_of(stage, f"memory{number}-{backend}", (backend,), executable) as fleet,
                fleet.client() as client,
            ):
                for _ in range(stage.plan.pages):
                    ask(client, backend, f"{stage.site}/")
                fleet.wait_until_idle(backend)
                time.sleep(SETTLE_SECONDS)
                figures.append(_weigh(fleet, backend, Path(executable).name))
    return Measure(
        name="memory", title="A browser worker after its pages: PSS of its tree", figures=figures
    )


def _weigh(fleet: Fleet, backend: str, browser: str) -> Figure:
    worker = psutil.Process(fleet.worker(f"{backend}/0").pid)
    tree = [worker, *worker.children(recursive=True)]
    weight = 0.0
    for process in tree:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            weight += pss(process.pid)
    return Figure(
        key=f"memory.{backend}.{browser}",
        label=f'backend "{backend}", {browser}',
        unit=BYTES,
        samples=[weight],
        note=f"{len(tree)} processes",
    )


# -- all of it ----------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Stage], Measure | None]] = {
    "page": measure_page,
    "page2": measure_page_of_another,
    "recovery": measure_recovery,
    "memory": measure_memory,
}


class Report(Struct, kw_only=True):
    load: float  # average of the last minute, before the run
    processors: int
    executables: list[str]
    plan: Plan
    measures: list[Measure]
    targets: list[Verdict]


def run(plan: Plan, names: list[str], executables: list[str], console: Console) -> Report:
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    console.print(f"{processors} processors, load {load:.1f}, {', '.join(executables)}")
    with (
        tempfile.TemporaryDirectory(prefix="musterd-bench-", dir=disk_directory()) as place,
        sample_site() as site,
    ):
        stage = Stage(plan=plan, folder=Path(place), executables=executables, site=site)
        measures = measured(names, lambda name: MEASURES[name](stage), console)
    return Report(
        load=load,
        processors=processors,
        executables=executables,
        plan=plan,
        measures=measures,
        targets=judged(TARGETS, measures),
    )


@benchmark(
    MEASURES,
    click.option(
        "--executable",
        "executables",
        multiple=True,
        help="A browser; the first is compared, the memory of all is measured.",
    ),
)
def main(
    quick: bool, path: Path | None, only: tuple[str, ...], executables: tuple[str, ...]
) -> None:
    """Measure browser workers side by side with bare Playwright scripts."""
    plan, names = QUICK if quick else FULL, list(only or MEASURES)

    def report(console: Console) -> Report:
        return run(plan, names, list(executables) or installed(), console)

    carry_out("browser-", report, quick=quick, path=path)


def installed() -> list[str]:
    """Return the browser that a worker finds, and Chromium if that is another one."""
    found = [find_executable()]
    full = Path("/usr/lib/chromium/chromium")
    if full.exists() and str(full) not in found:
        found.append(str(full))
    return found


if __name__ == "__main__":
    main()
