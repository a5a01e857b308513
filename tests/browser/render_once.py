"""Render one URL with a BrowserWorker and print the result: a program for the tests."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import psutil

from musterd.workers.authoring.base import Context
from musterd.workers.browser import BrowserWorker


def namespace_depth(pid: int) -> int:
    """Return the number of PID namespaces in which this process has a pid, from ours downwards."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) - 1
    raise AssertionError(f"no NSpid in /proc/{pid}/status")


def measure_tree() -> dict[str, int]:
    """Measure the processes below this one; those of a closed page may end meanwhile."""
    report = {"processes": 0, "sandboxed": 0, "pss_bytes": 0}
    for each in psutil.Process().children(recursive=True):
        try:
            depth, pss = namespace_depth(each.pid), each.memory_full_info().pss
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            continue
        report["processes"] += 1
        report["sandboxed"] += depth > 1
        report["pss_bytes"] += pss
    return report


async def main(url: str, backend: str) -> None:
    worker = BrowserWorker()
    worker.pool, worker.options = "browser", {"backend": backend}
    await worker.open()
    try:
        context = Context("task", deadline=time.monotonic() + 60)
        first = await worker.render(context, url, wait_until="networkidle")
        begun = time.monotonic()
        page = await worker.render(context, url, wait_until="networkidle")
        render_seconds = time.monotonic() - begun
        assert page["html"] == first["html"]
        async with worker.open_page(context) as shown:
            await shown.goto(url)
            tree = measure_tree()
        healthy = await worker.healthy()
    finally:
        await worker.close()
    report = {"page": page, "uid": os.geteuid(), "healthy": healthy}
    print(json.dumps(report | tree | {"render_seconds": render_seconds}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
