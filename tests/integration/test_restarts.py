"""Workers that end unexpectedly: the reason, the limit, and that other pools are not disturbed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from musterd import TaskFailed
from support.daemon import Muster, Musters

WORKERS = """
import os, time
from pathlib import Path
from musterd import Worker, task

class Ends(Worker):
    def open(self):
        if "wait" in self.options:
            while not Path(self.options["wait"]).exists():
                time.sleep(0.01)
        if "fail" in self.options:
            raise RuntimeError(self.options["fail"])

    @task
    def leave(self, ctx, code: int) -> None:
        os._exit(code)

    @task
    def die(self, ctx, signal: int) -> None:
        os.kill(os.getpid(), signal)
        time.sleep(60)

    @task
    def eat(self, ctx, megabytes: int) -> int:
        eaten = [b"x" * 1_000_000 for _ in range(megabytes)]
        return len(eaten)

    @task
    def echo(self, ctx, value: int) -> int:
        time.sleep(0.002)
        return value
"""


@pytest.fixture
def ends(muster: Musters) -> Callable[..., Any]:
    """Make a daemon, not started, with pools of the class above: ends(NAME={...}, ...)."""

    def make(**pools: dict[str, Any]) -> Any:
        made = muster(
            {name: {"worker": "ends:Ends", **keys} for name, keys in pools.items()}, start=False
        )
        Path(made.folder, "ends.py").write_text(WORKERS)
        return made

    return make


def test_every_end_is_counted_under_its_cause(ends, waiting):
    daemon = ends(pool={"max_crashes": 1}).start()
    with daemon.client() as client:
        for name, args in (
            ("pool.leave", {"code": 7}),
            ("pool.die", {"signal": int(signal.SIGSEGV)}),
            ("pool.die", {"signal": int(signal.SIGKILL)}),
        ):
            with pytest.raises(TaskFailed, match="quarantined"):
                client.submit(name, args).result(60)
    waiting("all is counted", lambda: daemon.pool("pool").lost == {"exit": 1, "signal": 2})
    assert daemon.worker("pool/0").lost == {"exit": 1, "signal": 2}
    shown = daemon.ctl("status").stdout
    assert "lost: 1 exit, 2 signal" in shown
    assert "cause=exit" in daemon.log()


def test_a_worker_that_a_person_kills_is_no_victim_of_the_kernel(ends, waiting):
    daemon = ends(pool={}).start()
    assert daemon.ctl("signal", "KILL", "pool/0").returncode == 0
    waiting("it is counted", lambda: daemon.pool("pool").lost)
    assert daemon.pool("pool").lost == {"signal": 1}


def test_an_open_that_fails_again_and_again_is_fatal_with_its_error(ends, waiting):
    restart = {"base": "1ms", "limit": 3, "window": "60s"}
    daemon = ends(pool={"options": {"fail": "no such browser"}, "restart": restart})
    daemon.start(wait=False)
    waiting("it is given up", lambda: _reached(daemon, "pool", "FATAL"))
    worker = daemon.worker("pool/0")
    assert "more than 3 crashes within 60 s" in worker.reason
    assert "no such browser" in worker.reason
    assert worker.lost == {"boot": 4}


def _reached(daemon: Muster, pool: str, state: str) -> bool:
    try:
        return daemon.pool(pool).state == state
    except Exception:  # noqa: BLE001 - it is not up yet
        return False


def test_a_worker_that_does_not_get_ready_is_hung_and_its_stacks_are_logged(ends, waiting):
    go = "/nonexistent/never"
    daemon = ends(pool={"options": {"wait": go}, "start_timeout": "5s"})
    daemon.start(wait=False)
    waiting("it was killed", lambda: "cause=hung" in daemon.log())
    waiting("its stacks are in the log", lambda: "in open" in daemon.log())
    assert "not ready within its start_timeout of 5 s" in daemon.log()


def test_after_failures_in_a_row_the_pause_is_long(ends, waiting):
    restart = {"base": "1ms", "max": "2ms", "pause_after": 3, "pause": "1h", "limit": 100}
    daemon = ends(pool={"options": {"fail": "no"}, "restart": restart})
    daemon.start(wait=False)
    waiting("it waits", lambda: daemon.log().count("cause=boot") == 3)
    waiting("its state is shown", lambda: _reached(daemon, "pool", "BACKOFF"))
    time.sleep(0.5)  # a fourth attempt would have come after 2 ms
    assert daemon.worker("pool/0").lost == {"boot": 3}


def test_a_crashing_pool_does_not_disturb_a_busy_one(ends):
    loop = {"base": "1ms", "max": "5ms", "limit": 10_000, "pause_after": 10_000}
    daemon = ends(
        bad={"size": 3, "options": {"fail": "never"}, "restart": loop},
        unknown={"worker": "no_such_module:Nothing"},
        busy={"size": 2},
    )
    daemon.start(wait=False)
    with daemon.client(connect_timeout=60) as client:
        handles = client.submit_many([("busy.echo", {"value": n}, {}) for n in range(500)])
        assert [handle.result(60) for handle in handles] == list(range(500))
        busy = daemon.pool("busy")
    assert (busy.restarts, busy.lost, busy.running) == (0, {}, 2)
    assert daemon.pool("bad").lost["boot"] > 5
    unknown = daemon.pool("unknown")
    assert unknown.state == "FATAL"
    assert "no_such_module" in unknown.reason
    assert "no_such_module" in daemon.ctl("status").stdout


# -- memory -----------------------------------------------------------------------------------

LIMIT_BYTES = 256 * 1024 * 1024  # daemon, fork server and worker need about 120 MB


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are root's to make")
def test_a_kill_of_the_kernel_for_want_of_memory_is_told_apart(memory_group, ends, waiting):
    daemon = ends(pool={"max_crashes": 1})
    procs = memory_group(LIMIT_BYTES) / "cgroup.procs"
    daemon.popen_options = {"preexec_fn": lambda: procs.write_text("0")}
    daemon.start()
    try:
        with daemon.client() as client, pytest.raises(TaskFailed, match="quarantined"):
            client.submit("pool.eat", {"megabytes": 1000}).result(60)
        waiting("it is counted", lambda: daemon.pool("pool").lost)
        assert daemon.pool("pool").lost == {"oom": 1}
        assert "its control group counted the kill" in daemon.log()
        with daemon.client() as client:
            assert client.submit("pool.echo", {"value": 1}).result(60) == 1
    finally:
        daemon.stop()
