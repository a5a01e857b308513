"""Failures of browsers are told apart by their errors, and counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.workers.authoring.base import Context
from musterd.workers.browser import BrowserError, BrowserWorker, find_executable
from musterd.workers.metrics import metrics

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
try:
    find_executable()
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)

PATIENCE_SECONDS = 45
PARTS = [
    ("renderer", "playwright", "PageCrashed"),
    ("renderer", "cdp", "PageCrashed"),
    ("browser", "playwright", "BrowserDied"),
    ("browser", "cdp", "BrowserDied"),
    ("driver", "playwright", "DriverDied"),
]


@asynccontextmanager
async def opened(backend: str) -> AsyncIterator[BrowserWorker]:
    worker = BrowserWorker()
    worker.pool = "browser"
    worker.options = {"backend": backend}
    await worker.open()
    try:
        yield worker
    finally:
        await worker.close()


def kill(part: str) -> None:
    for process in psutil.Process().children(recursive=True):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        words = " ".join(process.cmdline())
        chromium = "chrom" in words and "run-driver" not in words
        if {
            "renderer": chromium and "--type=renderer" in words,
            "browser": chromium and "--type=" not in words and "crashpad" not in words,
            "driver": "run-driver" in words,
        }[part]:
            process.kill()


@pytest.mark.parametrize(("part", "backend", "kind"), PARTS)
def test_each_part_that_dies_is_counted_by_its_name(
    part: str, backend: str, kind: str, scratch: Path, sample_site: str
) -> None:
    async def lose(worker: BrowserWorker) -> None:
        async with worker.open_page(Context("a")) as page:
            await page.goto(f"{sample_site}/")
            kill(part)
            await page.evaluate("new Promise(() => {})")

    async def story() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), opened(backend) as worker:
            metrics.take()
            with pytest.raises(BrowserError) as raised:
                await lose(worker)
            assert type(raised.value).__name__ == kind
            assert (await worker.render(Context("b"), f"{sample_site}/"))["status"] == 200
            counted = {(each.name, *each.labels.values()): each.value for each in metrics.take()}
            assert counted["browser_failures", kind] >= 1
            relaunches = counted.get(("browser_relaunches", "broken"), 0)
            assert relaunches == (0 if part == "renderer" else 1)

    asyncio.run(story())
