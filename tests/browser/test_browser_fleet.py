"""A real browser under the daemon: unprivileged, sandboxed, in a PID namespace, and killed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from musterd import TaskFailed

BACKENDS = ("playwright", "cdp")
POOL: dict[str, Any] = {"worker": "musterd.workers.browser:BrowserWorker", "size": 1}


def _tree(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # the process has ended
        return []


def _start(muster, unprivileged, backend):
    pools = {"browser": {**POOL, "options": {"backend": backend}}}
    return muster(pools, as_user=unprivileged.uid if os.geteuid() == 0 else None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_is_rendered_under_the_sandbox_in_a_pid_namespace(
    muster, unprivileged, sample_site, backend
):
    daemon = _start(muster, unprivileged, backend)
    assert daemon.status().containment == "pidns"
    with daemon.client() as client:
        wanted = {"url": f"{sample_site}/js", "wait_for": "code"}
        page = client.submit("browser.render", wanted).result(60)
        assert page["status"] == 200
        assert "written by script" in page["title"]
        worker = daemon.worker("browser/0").pid
        assert psutil.Process(worker).uids().real == unprivileged.uid
        chromium = [p for p in _tree(worker) if "chromium" in " ".join(_command(p))]
        assert chromium
        assert not any("--no-sandbox" in _command(p) for p in chromium), "its sandbox is on"
        namespace = os.readlink(f"/proc/{worker}/ns/pid")
        assert namespace != os.readlink("/proc/self/ns/pid")
    assert daemon.stop() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", ["worker", "browser", "supervisor"])
def test_killed_in_the_middle_nothing_survives_and_the_next_page_works(  # noqa: PLR0917 - fixtures
    muster, unprivileged, sample_site, waiting, gone, victim, backend
):
    daemon = _start(muster, unprivileged, backend)
    client = daemon.client()
    url = f"{sample_site}/slow?seconds=3"
    handle = client.submit("browser.render", {"url": url}, timeout=30)
    waiting("it runs", lambda: daemon.worker("browser/0").state == "BUSY")
    worker = daemon.worker("browser/0").pid
    time.sleep(0.5)  # in the middle of the page
    before = [psutil.Process(worker), *_tree(worker)]
    assert len(before) > 5
    if victim == "supervisor":
        daemon.kill()
        waiting("nothing survives", lambda: all(map(gone, before)), 2.0)
        daemon.start()
    elif victim == "worker":
        os.kill(worker, signal.SIGKILL)
        waiting("nothing survives", lambda: not any(p.is_running() for p in before), 2.0)
    else:
        browser = next(
            p
            for p in before
            if "chromium" in (words := " ".join(_command(p))) and "--type=" not in words
        )
        browser.kill()
    try:
        assert handle.result(60)["status"] == 200
    except TaskFailed as error:
        pytest.fail(f"the page was lost: {error}\n{error.traceback}")
    assert client.submit("browser.render", {"url": f"{sample_site}/js"}).result(60)["status"] == 200
    client.close()
    assert daemon.stop() == 0
    assert not list(Path(daemon.state, "tmp").glob("*"))
