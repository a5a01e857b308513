"""Breakpoints of handlers, and people who debug them with `musterctl debug`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from musterd import Client, Secret, TaskCancelled, TaskFailed
from musterd.supervisor.api import rpc
from support.daemon import Muster, Musters, wait_for_end
from support.terminal import MUSTERCTL, Terminal
from support.waiting import wait_for

SECONDS = 30.0
PROMPT = "(Pdb) "

SHOP = """
import asyncio, contextlib, os, threading, time
from musterd import Worker, task

def price_of(page):
    price = page["price"]
    return price * 2

class Shop(Worker):
    def open(self):
        if self.options.get("breaks"):
            breakpoint()

    @task(timeout=1, max_retries=0)
    def check(self, ctx, page: dict) -> list:
        began = ctx.deadline
        breakpoint()
        found = price_of(page)
        return [found, ctx.deadline - began]

    @task(timeout=1, max_retries=0)
    async def acheck(self, ctx, page: dict) -> list:
        await asyncio.sleep(0.01)
        import pdb
        pdb.set_trace(header="look here")
        await asyncio.sleep(0.01)
        found = price_of(page)
        return [found, 0]

    @task(max_retries=0)
    def rounds(self, ctx, count: int) -> int:
        for number in range(count):
            breakpoint()
        return count

    @task(max_retries=0)
    def nap(self, ctx, seconds: float, tell: str = "") -> float:
        breakpoint()
        if tell:
            open(tell, "w").close()
        time.sleep(seconds)
        return seconds

    @task(max_retries=0)
    async def anap(self, ctx, seconds: float) -> float:
        breakpoint()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(0.01)
        return seconds

    @task(max_retries=0)
    def tidy(self, ctx, path: str) -> None:
        try:
            ctx.progress(0.5)
            time.sleep(60)
        finally:
            breakpoint()
            open(path, "w").close()

    @task(max_retries=0)
    def late(self, ctx) -> None:
        breakpoint()
        raise ValueError("late")

    @task(max_retries=0)
    def login(self, ctx, password: str) -> str:
        breakpoint()
        return "done"

    @task(max_retries=0)
    def elsewhere(self, ctx, where: str) -> str:
        if where == "thread":
            thread = threading.Thread(target=breakpoint, name="helper")
            thread.start()
            thread.join()
        elif where == "child":
            if os.fork() == 0:
                breakpoint()
                os._exit(0)
            os.wait()
        else:
            os.environ["PYTHONBREAKPOINT"] = "0"
            breakpoint()
        return "went on"

    @task
    def echo(self, ctx, value: int) -> int:
        return value
"""

WIDE = """
import asyncio
from musterd import task

@task(timeout=1, max_retries=0)
async def stop(ctx) -> str:
    breakpoint()
    await asyncio.sleep(0)
    return "stopped"

@task(timeout=1, max_retries=0)
async def beside(ctx) -> str:
    await asyncio.sleep(0.5)
    return "beside"
"""


@pytest.fixture
def shop(muster: Musters):
    def make(start: bool = True, module: str = "shop:Shop", **settings) -> Muster:
        pool = {
            "worker": module,
            "size": 1,
            "debug": True,
            "env": {"SHOP_PASSWORD": "hunter2hunter2"},
            **settings.pop("pool", {}),
        }
        made = muster({"shop": pool}, start=False, **settings)
        Path(made.folder, "shop.py").write_text(SHOP)
        Path(made.folder, "wide.py").write_text(WIDE)
        return made.start() if start else made

    return make


class Debugger:
    """musterctl debug, as a program would use it: lines in, text out."""

    def __init__(self, daemon: Muster, *names: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket),
                *("debug", *names),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.shown = ""

    def until(self, end: str) -> str:
        """Return what is shown up to and including this."""
        deadline = time.monotonic() + SECONDS
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        while end not in self.shown:
            assert time.monotonic() < deadline, f"no {end!r} in {self.shown!r}"
            data = self.process.stdout.read(65536)
            if data == b"":
                raise AssertionError(f"it ended without {end!r}: {self.shown!r}")
            if data is None:
                time.sleep(0.01)
            else:
                self.shown += data.decode()
        found, _, self.shown = self.shown.partition(end)
        return found + end

    def types(self, line: str) -> str:
        """Type a line; return what is shown up to the next prompt."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        return self.until(PROMPT)

    def leaves(self, line: str | None) -> str:
        """Type the last line, or nothing more; return what is shown until the end."""
        out, errors = self.process.communicate(
            b"" if line is None else f"{line}\n".encode(), SECONDS
        )
        return self.shown + out.decode() + errors.decode()


@pytest.fixture
def debug() -> Iterator[Callable[..., Debugger]]:
    """Return a function that begins to debug, and end what is left at the end."""
    made: list[Debugger] = []

    def begin(daemon: Muster, *names: str) -> Debugger:
        made.append(Debugger(daemon, *names))
        return made[-1]

    yield begin
    for each in made:
        each.process.kill()
        if each.process.stdout is not None and not each.process.stdout.closed:
            each.process.communicate()


def waits(daemon: Muster, worker: str = "shop/0") -> None:
    wait_for("a task is at a breakpoint", lambda: "breakpoint" in daemon.worker(worker).debug)


def over(daemon: Muster) -> list[str]:
    """Return why debuggers ended, as the log tells."""
    return [line for line in daemon.log().splitlines() if "event=debug.over" in line]


# -- a session --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["check", "acheck"])
def test_a_task_is_debugged_and_its_timeouts_stand(shop, debug, method):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit(f"shop.{method}", {"page": {"price": 4}})
        waits(daemon)
        debugger = debug(daemon, "shop/0")
        begin = debugger.until(PROMPT)
        assert f"shop/0: task {task.id} (shop.{method}, attempt 1) at shop.py:" in begin
        assert ("look here" in begin) == (method == "acheck")
        assert "-> " in begin
        assert "{'price': 4}" in debugger.types("p page")
        time.sleep(1.5)  # longer than its timeout
        assert not task.done()
        assert "shop.py" in debugger.types("b price_of")
        assert "price_of()" in debugger.types("c")
        where = debugger.types("w")
        assert "price_of()" in where
        assert "/musterd/" not in where, "the runtime's frames are nobody's business"
        assert "8" in debugger.types("p page['price'] * 2")
        debugger.types("page['price'] = 5")
        end = debugger.leaves("c")
        assert "shop/0: the attempt has ended" in end
        assert debugger.process.returncode == 0
        found, moved = task.result(SECONDS)
        assert found == 10
        assert method == "acheck" or moved > 1.4, "ctx.deadline moves, too"
        assert client.submit("shop.echo", {"value": 1}).result(SECONDS) == 1
    assert daemon.worker("shop/0").debug == ""
    assert daemon.worker("shop/0").restarts == 0


@pytest.mark.parametrize("last", ["q", "exit", None])
def test_who_leaves_lets_the_task_go_on_without_further_stops(shop, debug, last):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.rounds", {"count": 50})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        assert "0" in debugger.types("p number")
        debugger.types("c")
        assert "1" in debugger.types("p number")
        assert "the debugger was left" in debugger.leaves(last)
        assert debugger.process.returncode == 0
        assert task.result(SECONDS) == 50
    assert len(over(daemon)) == 1


def test_the_output_of_the_debugger_is_bounded_and_has_no_secrets(shop, debug):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.login", {"password": Secret("SHOP_PASSWORD")})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        assert "***SHOP_PASSWORD***" in debugger.types("p password")
        assert "***SHOP_PASSWORD***" in debugger.types("print(password)")
        long = debugger.types("print('x' * 10_000_000)")
        assert len(long) < 40_000
        assert "characters more" in long
        assert "\x1b" not in debugger.types("print('\\x1b[2J')")
        assert "hunter2" not in debugger.leaves("q")
        assert task.result(SECONDS) == "done"


def test_what_pdb_can_do_more(shop, debug):
    """Nothing that is typed ends the worker, or reaches for a terminal that is not there."""
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.check", {"page": {"price": 1}})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        assert "restarted from here" in debugger.types("run")
        assert "Documented commands" in debugger.types("h")
        assert "*** SystemExit" in debugger.types("raise SystemExit(3)")
        assert "*** EOFError" in debugger.types("open('/dev/stdin').read(); raise EOFError")
        debugger.types("import os; child = os.fork()")
        assert "SyntaxError" in debugger.types("if if")
        assert "[EOF]" not in debugger.types("l")
        debugger.leaves("q")
        assert task.result(SECONDS)[0] == 2
    assert daemon.worker("shop/0").restarts == 0


def test_an_error_after_a_breakpoint_fails_the_task_as_ever(shop, debug):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.late")
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        assert "the attempt has ended" in debugger.leaves("c")
        with pytest.raises(TaskFailed, match="ValueError: late"):
            task.result(SECONDS)


def test_what_the_terminal_interrupts_is_shown_at_once(shop, debug, tmp_path):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.nap", {"seconds": 60, "tell": str(tmp_path / "naps")})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        assert debugger.process.stdin is not None
        debugger.process.stdin.write(b"c\n")
        wait_for("it sleeps", (tmp_path / "naps").exists)
        debugger.process.send_signal(signal.SIGINT)
        assert "nap()" in debugger.until(PROMPT)
        debugger.process.stdin.write(b"p [each for each in iter(int, 1)]\n")
        time.sleep(0.5)
        debugger.process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in debugger.until(PROMPT)
        assert "60" in debugger.types("p seconds")
        debugger.leaves("q")
        task.cancel()
        with pytest.raises(TaskCancelled):
            task.result(SECONDS)


def test_an_async_handler_is_interrupted_at_its_next_line(shop, debug):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.anap", {"seconds": 60})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        assert debugger.process.stdin is not None
        debugger.process.stdin.write(b"c\n")
        time.sleep(0.3)
        debugger.process.send_signal(signal.SIGINT)
        assert "anap()" in debugger.until(PROMPT)
        debugger.types("end = 0")
        debugger.leaves("q")
        assert task.result(SECONDS) == 60


# -- who may, and for how long ----------------------------------------------------------------


@pytest.mark.parametrize("method", ["rounds", "acheck"])
def test_where_it_is_not_allowed_breakpoint_explains_itself_and_the_task_goes_on(shop, method):
    daemon = shop(pool={"debug": False})
    arguments = {"count": 20} if method == "rounds" else {"page": {"price": 1}}
    with daemon.client() as client:
        client.submit(f"shop.{method}", arguments).result(SECONDS)
    lines = [line for line in daemon.log().splitlines() if "debug." in line]
    assert len(lines) == 1, "of a loop the first time"
    assert " warning breakpoint() was passed over: the task goes on" in lines[0]
    assert "set pools.shop.debug = true" in lines[0]
    refused = daemon.ctl("debug", "shop/0")
    assert refused.returncode == 1
    assert "pool shop does not allow it" in refused.stderr


def test_the_development_profile_allows_it_and_a_reload_does(shop, debug):
    daemon = shop(pool={"debug": None}, start=False)
    config = json.loads(daemon.config_path.read_text())
    del config["pools"]["shop"]["debug"]
    daemon.config_path.write_text(json.dumps(config))
    daemon.start()
    with daemon.client() as client:
        assert client.submit("shop.rounds", {"count": 1}).result(SECONDS) == 1
        before = daemon.worker("shop/0").pid
        config["debug"] = {"enabled": True, "wait": "2m"}
        daemon.config_path.write_text(json.dumps(config))
        changed = daemon.ctl("reload")
        assert "debug.enabled" in changed.stdout, changed
        task = client.submit("shop.rounds", {"count": 1})
        waits(daemon)
        assert daemon.worker("shop/0").pid == before, "no worker is replaced for it"
        debug(daemon).leaves("q")
        task.result(SECONDS)
    shown = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "show-config", "--profile", "development"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert "debug" in shown.stdout
    assert "enabled = true" in shown.stdout.partition("[debug]")[2]


def test_nobody_is_waited_for_forever(shop):
    daemon = shop(debug__wait="1s")
    with daemon.client() as client:
        assert client.submit("shop.rounds", {"count": 3}).result(SECONDS) == 3
    assert "nobody has come" in over(daemon)[0]
    assert len(over(daemon)) == 1, "once for an attempt"


def test_the_status_says_who_waits_and_who_debugs(shop, debug):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.rounds", {"count": 1})
        waits(daemon)
        shown = daemon.ctl("status").stdout
        assert "at a breakpoint, shop.py:" in shown
        assert "musterctl debug shop/0" in shown
        debugger = debug(daemon)
        debugger.until(PROMPT)
        told = f"by uid {os.geteuid()}, process {debugger.process.pid}"
        assert told in daemon.ctl("status").stdout
        (worker,) = json.loads(daemon.ctl("--json", "status").stdout)["pools"][0]["workers"]
        assert told in worker["debug"]
        second = daemon.ctl("debug")
        assert second.returncode == 1
        assert "debugged already" in second.stderr
        debugger.leaves("c")
        task.result(SECONDS)
    log = daemon.log()
    assert " warning task waits at a breakpoint for a debugger: its timeouts stand" in log
    assert "musterctl debug shop/0 within 600 s" in log


def test_names_are_those_of_every_command(shop, debug):
    daemon = shop(pool={"size": 2})
    assert daemon.ctl("debug", "nosuch").returncode == 4
    none = daemon.ctl("debug", "shop/0")
    assert none.returncode == 1
    assert "put breakpoint() into its handler" in none.stderr
    with daemon.client() as client:
        tasks = [client.submit("shop.rounds", {"count": 1}) for _ in range(2)]
        for worker in ("shop/0", "shop/1"):
            waits(daemon, worker)
        several = daemon.ctl("debug", "shop")
        assert several.returncode == 1
        assert "shop/0, shop/1" in several.stderr.replace("shop/1, shop/0", "shop/0, shop/1")
        for worker in ("shop/1", "shop/0"):
            debug(daemon, worker).leaves("q")
        for task in tasks:
            task.result(SECONDS)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("thread", "thread 'helper' cannot be debugged"),
        ("child", "a process that the handler forked"),
        ("environment", ""),
    ],
)
def test_elsewhere_breakpoint_explains_itself(shop, where, why):
    daemon = shop()
    with daemon.client() as client:
        assert client.submit("shop.elsewhere", {"where": where}).result(SECONDS) == "went on"
    log = daemon.log()
    assert ("is passed over" in log) == bool(why)
    assert why in log


def test_outside_of_a_task_nobody_can_debug(shop):
    daemon = shop(pool={"options": {"breaks": True}}, start=False)
    path = Path(daemon.folder, "shop.py")
    path.write_text(f"breakpoint()\n{path.read_text()}")
    daemon.start()
    wait_for("the worker is open", lambda: "in open is passed over: no task runs" in daemon.log())
    log = daemon.log()
    assert "breakpoint() at shop.py:1 in <module> is passed over: no task runs" in log
    assert "BdbQuit" not in log


def test_beside_a_debugged_task_nothing_is_late(shop, debug):
    """A debugger stops the whole worker; no other task of it may pay for that."""
    daemon = shop(module="wide", pool={"concurrency": 4})
    with daemon.client() as client:
        beside = [client.submit("shop.beside") for _ in range(3)]
        stopped = client.submit("shop.stop")
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        time.sleep(2)
        assert "stop()" in debugger.types("w")
        queued = client.submit("shop.beside")
        assert "stop()" in debugger.types("n")
        debugger.leaves("q")
        assert stopped.result(SECONDS) == "stopped"
        assert [task.result(SECONDS) for task in (*beside, queued)] == ["beside"] * 4
    assert daemon.worker("shop/0").restarts == 0


# -- ends -------------------------------------------------------------------------------------


def test_the_words_of_musterctl_fit_the_terminal(shop):
    daemon = shop()
    daemon.ctl("submit", "shop.late")
    waits(daemon)
    terminal = Terminal([*MUSTERCTL, "-s", daemon.control_socket, "debug"], columns=60, rows=40)
    try:
        terminal.wait("it asks", lambda lines: any("(Pdb)" in line for line in lines))
        words = [line for line in terminal.said() if not line.startswith(("> ", "-> ", "(Pdb)"))]
        assert "h helps." in " ".join(words)
        assert [line for line in words if len(line) > 60] == []
        terminal.press("c\n")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()


def test_a_terminal_that_is_killed_leaves_nobody_behind(shop, debug):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.rounds", {"count": 5})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        debugger.process.kill()
        assert task.result(SECONDS) == 5
    assert "the terminal has gone" in over(daemon)[0]


def test_a_terminal_that_is_killed_while_the_code_runs_stops_the_debugger(shop, debug):
    daemon = shop(pool={"task_timeout": "1s"})
    with daemon.client() as client:
        task = client.submit("shop.nap", {"seconds": 60})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        assert debugger.process.stdin is not None
        debugger.process.stdin.write(b"c\n")
        time.sleep(1.5)  # its timeout stands
        assert not task.done()
        debugger.process.kill()
        with pytest.raises(TaskFailed, match="longer than its timeout"):
            task.result(SECONDS)


def test_a_cancelled_task_is_not_debugged_any_more(shop, debug):
    daemon = shop()
    with daemon.client() as client:
        for debugged in (False, True):
            task = client.submit("shop.rounds", {"count": 5})
            waits(daemon)
            debugger = debug(daemon) if debugged else None
            if debugger is not None:
                debugger.until(PROMPT)
            task.cancel()
            with pytest.raises(TaskCancelled):
                task.result(SECONDS)
            if debugger is not None:
                assert "the task was cancelled" in debugger.leaves(None)
    assert daemon.worker("shop/0").restarts == 0, "nobody was killed for it"


def test_a_breakpoint_in_a_clean_up_holds_up_no_cancelled_task(shop, tmp_path):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.tidy", {"path": str(tmp_path / "tidy")})
        assert next(task.progress(SECONDS)).fraction == 0.5
        task.cancel()
        with pytest.raises(TaskCancelled):
            task.result(SECONDS)
    assert (tmp_path / "tidy").exists(), "its clean-up ran to its end"
    assert daemon.worker("shop/0").restarts == 0


def test_a_worker_that_is_killed_ends_the_session(shop, debug):
    daemon = shop()
    with daemon.client() as client:
        task = client.submit("shop.check", {"page": {"price": 1}})
        waits(daemon)
        debugger = debug(daemon)
        debugger.until(PROMPT)
        os.kill(daemon.worker("shop/0").pid, signal.SIGKILL)
        assert "the worker has ended" in debugger.leaves(None)
        assert debugger.process.returncode == 0
        waits(daemon)  # the next attempt
        debug(daemon).leaves("q")
        assert task.result(SECONDS)[0] == 2


def test_a_daemon_that_is_killed_leaves_nothing_behind(shop, debug):
    daemon = shop()
    client = daemon.client()
    client.submit("shop.check", {"page": {"price": 1}})
    waits(daemon)
    debugger = debug(daemon)
    debugger.until(PROMPT)
    daemon.kill()
    assert "the daemon has ended the connection" in debugger.leaves(None)
    assert debugger.process.returncode == 1
    wait_for_end(daemon)
    daemon.start()  # for a clean end


def test_a_drain_and_a_restart_do_not_wait_for_somebody_to_come(shop):
    daemon = shop()
    with daemon.client() as client:
        for words in (("drain", "shop"), ("restart", "shop/0")):
            task = client.submit("shop.rounds", {"count": 1})
            waits(daemon)
            done = daemon.ctl("--timeout", "20", *words)
            assert done.returncode == 0, done.stderr
            assert task.result(SECONDS) == 1
            daemon.ctl("resume", "all")
    assert all("its worker is to stop" in line for line in over(daemon))


@pytest.mark.parametrize("attached", [False, True])
def test_a_shutdown_ends(shop, debug, attached):
    daemon = shop(supervisor__drain_timeout="2s")
    client = Client(daemon.tasks_socket)
    client.submit("shop.rounds", {"count": 1}).ack(SECONDS)
    waits(daemon)
    debugger = debug(daemon) if attached else None
    if debugger is not None:
        debugger.until(PROMPT)
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 15, "the drain, and no kill after it"
    if debugger is not None:
        said = debugger.leaves(None)
        assert "its worker is to stop: the task is interrupted" in said
        assert debugger.process.returncode == 0
    client.close()
    assert not psutil.pid_exists(daemon.pid)


# -- the protocol -----------------------------------------------------------------------------


def test_lines_without_a_session_are_refused(shop):
    daemon = shop()
    for params in (rpc.DebugLine("p 1"), rpc.DebugInterrupt()):
        with pytest.raises(rpc.RpcError, match="nothing is debugged on this connection"):
            daemon.ask(params)
    with pytest.raises(rpc.RpcError, match=r"at most|length"):
        daemon.ask(rpc.DebugLine("x" * 100_000))


def test_it_has_no_json():
    told = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor.ctl", "--json", "debug"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert told.returncode == 2
    assert "it has no --json" in told.stderr
