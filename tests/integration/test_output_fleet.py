"""Standard output and error of workers, with a real daemon."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TALKER = """
import asyncio, logging, os, subprocess, sys, time
from musterd import Worker, task
from musterd.workers.toolkit import executors

log = logging.getLogger("shop.prices")
print("imported", flush=False)

class Talker(Worker):
    def open(self):
        print("opened", self.index)

    @task
    def say(self, ctx, text: str) -> None:
        print("out", text)
        sys.stderr.write(f"err {text}\\n")
        subprocess.run(["echo", "child", text], check=True)
        ctx.log.error("log %s", text)

    @task
    def flood(self, ctx, seconds: float) -> int:
        data, written = b"flooding the log\\n" * 4000, 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            written += os.write(1, data)
        return written

    @task(timeout=0.3, max_retries=0)
    def deaf(self, ctx) -> None:
        sum(range(10**12))

    @task(max_retries=0)
    def die(self, ctx) -> None:
        print("I have seen things")
        sys.stderr.write("and now I die")
        sys.stderr.flush()
        os.kill(os.getpid(), 9)

    @task
    def echo(self, ctx, value: int) -> int:
        return value

    @task
    def speak(self, ctx) -> None:
        talk()
        executors.api.submit(talk).result()

    @task
    async def aspeak(self, ctx) -> None:
        await asyncio.sleep(0)
        talk()
        await asyncio.to_thread(talk)

def talk():
    print("I print")
    log.warning("I warn")
    try:
        {}["price"]
    except KeyError:
        log.exception("I fail")
"""

AT_ONCE = """
import asyncio, logging
from musterd import task

@task
async def speak(ctx, number: int) -> None:
    print("begin", number)
    await asyncio.sleep(0.05)
    logging.getLogger("shop").error("end %d", number)
"""

OWN_FORMAT = """
import logging
from musterd import task

logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s", level="INFO")

@task
def speak(ctx) -> None:
    logging.getLogger("shop").warning("own format")
"""


@pytest.fixture
def talker(muster):
    def make(size: int = 1, **pool):
        made = muster({"t": {"worker": "talker:Talker", "size": size, **pool}}, start=False)
        Path(made.folder, "talker.py").write_text(TALKER)
        return made.start()

    return make


def tail(daemon, *arguments: str) -> list[str]:
    done = daemon.ctl("tail", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_output_and_errors_come_in_order_with_the_workers_name(talker, waiting):
    daemon = talker(size=2)
    with daemon.client() as client:
        task = client.submit("t.say", {"text": "hello"})
        task.result(20)
    waiting("all of it is there", lambda: any("log hello" in line for line in tail(daemon)))
    shown = [line for line in tail(daemon) if "hello" in line]
    worker = shown[0].partition(":")[0]
    assert shown == [
        f"{worker}: out hello",
        f"{worker}: err hello",
        f"{worker}: child hello",
        f"{worker}: ERROR musterd.task [{task.id}] log hello",
    ]
    assert "t: imported" in tail(daemon)
    assert tail(daemon, "-n", "1", worker) == [f"ERROR musterd.task [{task.id}] log hello"]
    log = daemon.log()
    assert f"info child hello event=worker.output pool=t worker={worker}\n" in log
    fields = f"event=worker.output pool=t worker={worker} task={task.id}\n"
    for said in ("info out hello", "info err hello", "error log hello"):
        assert f" {said} {fields}" in log
    assert log.count(" imported ") == 1, "no fork says it again"
    answer = json.loads(daemon.ctl("--json", "tail", worker).stdout)
    assert [each["name"] for each in answer["workers"]] == [worker]


@pytest.mark.parametrize("method", ["speak", "aspeak"])
def test_what_any_module_says_names_the_task_and_its_level_once(talker, method):
    daemon = talker()
    with daemon.client() as client:
        task = client.submit(f"t.{method}")
        task.result(20)
    log = daemon.log()
    fields = f"event=worker.output pool=t worker=t/0 task={task.id}\n"
    lines = ("info I print", "warning shop.prices: I warn", "error shop.prices: I fail")
    for line in (*lines, "error Traceback (most recent call last):", "error KeyError: 'price'"):
        assert log.count(f" {line} {fields}") == 2, "said in the handler, and in a thread of it"
    said = f"WARNING shop.prices [{task.id}] I warn"
    assert tail(daemon, "-n", "100", "t/0").count(said) == 2
    assert "\x1e" not in log
    assert "\\x1e" not in log


def test_tasks_of_one_worker_are_told_apart(muster):
    pool = {"worker": "atonce", "size": 1, "concurrency": 8}
    daemon = muster({"t": pool}, start=False)
    Path(daemon.folder, "atonce.py").write_text(AT_ONCE)
    with daemon.start().client() as client:
        tasks = [client.submit("t.speak", {"number": number}) for number in range(8)]
        for task in tasks:
            task.result(20)
    log = daemon.log()
    for number, task in enumerate(tasks):
        fields = f"event=worker.output pool=t worker=t/0 task={task.id}\n"
        assert f" info begin {number} {fields}" in log
        assert f" error shop: end {number} {fields}" in log


def test_a_module_with_a_format_of_its_own_is_understood(muster):
    daemon = muster({"t": {"worker": "own", "size": 1}}, start=False)
    Path(daemon.folder, "own.py").write_text(OWN_FORMAT)
    with daemon.start().client() as client:
        task = client.submit("t.speak")
        task.result(20)
    fields = f"event=worker.output pool=t worker=t/0 task={task.id}"
    assert f" warning shop:own format {fields}\n" in daemon.log()
    assert tail(daemon, "-n", "1", "t/0") == ["WARNING:shop:own format"]


@pytest.mark.parametrize("name", ["nosuch", "t/9", "x*"])
def test_names_are_those_of_every_command(talker, name):
    daemon = talker()
    assert daemon.ctl("tail", name).returncode == 4
    assert daemon.ctl("events", name).returncode == 4
    assert daemon.ctl("tail", "t/*").returncode == 0


def test_a_crash_report_tells_what_the_worker_said_last(talker, waiting):
    daemon = talker()
    with daemon.client() as client:
        client.submit("t.die").ack(20)
        waiting("a crash", lambda: "worker.crashed" in daemon.ctl("events").stdout)
    shown = daemon.ctl("events", "--kind", "worker.crashed", "-n", "1", "t/0").stdout.splitlines()
    assert "worker.crashed pool=t worker=t/0" in shown[0]
    assert shown[1:] == ["    | opened 0", "    | I have seen things", "    | and now I die"]
    assert "output='opened 0\\nI have seen things\\nand now I die'" in daemon.log()
    lines = tail(daemon, "-n", "100", "t/0")
    assert "--- the next worker ---" in lines, lines


def test_a_slot_without_a_worker_shows_what_the_last_one_said(talker, waiting):
    daemon = talker(restart={"limit": 1})
    killed = 0

    def runs() -> int:
        worker = daemon.worker("t/0")
        return worker.pid if worker.state == "RUNNING" and worker.pid != killed else 0

    for _ in range(2):
        killed = waiting("the next worker runs", runs)
        os.kill(killed, signal.SIGKILL)
    waiting("it is given up", lambda: daemon.worker("t/0").state == "FATAL")
    assert daemon.worker("t/0").output == "opened 0"


def test_the_stacks_of_a_hung_worker_are_there(talker, waiting):
    daemon = talker()
    with daemon.client() as client:
        client.submit("t.deaf").ack(20)
        waiting(
            "its stacks", lambda: any("in deaf" in line for line in tail(daemon, "-n", "100", "t"))
        )
    assert "in deaf event=worker.output pool=t worker=t/0" in daemon.log()


def test_an_import_that_fails_says_why(muster, waiting):
    daemon = muster({"t": {"worker": "broken:Worker", "size": 1}}, start=False)
    Path(daemon.folder, "broken.py").write_text(
        "print('about to fail')\nraise OSError('no luck')\n"
    )
    daemon.start(wait=False)
    waiting("it is given up", lambda: "pool cannot start" in daemon.log())
    lines = tail(daemon, "-n", "100", "t")
    assert "t: about to fail" in lines
    assert "t: OSError: no luck" in lines


def test_a_flood_disturbs_nobody_and_is_counted(talker):
    daemon = talker(size=2)
    with daemon.client() as client:
        flood = client.submit("t.flood", {"seconds": 3})
        answered = 0
        while not flood.done():
            assert client.submit("t.echo", {"value": 1}).result(20) == 1
            daemon.status()
            answered += 1
        written = flood.result(20)
    assert answered > 10, "the control socket and the other worker answer all the while"
    assert written > 1_000_000, "it goes on writing, though nobody looks"
    log = daemon.log()
    assert "lines were dropped" in log
    assert len(log) < 1_000_000, "the log is not flooded"
    assert 100 < len(tail(daemon, "-n", "1000", "t")) <= 1500
    turns = [float(found) for found in re.findall(r"event=loop.slow .*?cpu=([\d.]+)", log)]
    assert all(processor_seconds < 0.5 for processor_seconds in turns)


def test_following_shows_what_comes_until_it_is_interrupted(talker):
    daemon = talker()
    command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
    with (
        daemon.client() as client,
        subprocess.Popen(
            [*command, "tail", "-f", "-n", "1", "t/0"], stdout=subprocess.PIPE, text=True
        ) as follower,
    ):
        assert follower.stdout is not None
        assert follower.stdout.readline() == "opened 0\n"
        client.submit("t.say", {"text": "one"}).result(20)
        assert [follower.stdout.readline() for _ in range(3)] == [
            "out one\n",
            "err one\n",
            "child one\n",
        ]
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 0


def test_a_follower_that_does_not_read_is_told_what_it_missed(talker):
    daemon = talker()
    command = [sys.executable, "-m", "musterd.supervisor.ctl", "-s", daemon.control_socket]
    follower = subprocess.Popen(
        [*command, "--json", "tail", "-f", "t"], stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    assert "imported" in follower.stdout.readline()
    os.kill(follower.pid, signal.SIGSTOP)
    try:
        with daemon.client() as client:
            client.submit("t.flood", {"seconds": 2}).result(30)
            os.kill(follower.pid, signal.SIGCONT)
            dropped = 0
            for line in follower.stdout:
                dropped = dropped or json.loads(line).get("dropped", 0)
                if dropped:
                    break
        assert dropped > 0
    finally:
        follower.kill()
        follower.communicate()


def _is_spare(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, IndexError):
        return process.cmdline()[0].startswith("musterd: spare")
    return False


def test_no_descriptor_is_left_of_workers_that_died(talker, waiting):
    daemon = talker()
    files = Path(f"/proc/{daemon.pid}/fd")
    daemon.ctl("restart", "t")
    waiting("a spare has its descriptors", lambda: any(map(_is_spare, daemon.processes())))
    before = len(list(files.iterdir()))
    for _ in range(5):
        daemon.ctl("restart", "t")
    waiting("as before", lambda: len(list(files.iterdir())) <= before)
