"""The shutdown of a real daemon: its phases, the clean-ups of workers, and the supervisor's own."""

import re
import subprocess
import sys
from pathlib import Path

from musterd.supervisor.api import rpc

CLOSING = """
import time
from pathlib import Path
from musterd import Worker, on_close, task

def say(path, word):
    with open(path, "a") as f:
        f.write(word + "\\n")

PATH = Path(__file__).with_name("said")
on_close(say, PATH, "import")

class Closing(Worker):
    def open(self):
        self.on_close(say, PATH, "open")

    def close(self):
        say(PATH, "close")

    @task
    def register(self, ctx, word: str) -> None:
        self.on_close(say, PATH, word)

    @task
    def hang(self, ctx) -> None:
        self.on_close(time.sleep, 600)

    @task
    def fail(self, ctx) -> None:
        self.on_close(int, "not a number")
"""

FUNCTIONS = """
from pathlib import Path
from musterd import on_close, task

@task
def register(ctx, word: str) -> None:
    on_close(lambda: Path(__file__).with_name("functions").write_text(word))
"""

CLEANUP = """
import asyncio, os, sys, time
from pathlib import Path

def run():
    print("cleaning up")
    print("in two lines", file=sys.stderr)
    Path(__file__).with_name("cleaned").write_text(str(os.getppid()))

async def arun():
    await asyncio.sleep(0)
    print("async too")

def fail():
    raise ValueError("cannot clean")

def hang():
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)

def flood():
    for n in range(100_000):
        print("x" * 100)
"""


def phases(log: str) -> list[str]:
    return re.findall(r"shutdown event=shutdown.phase phase=(\w+)", log)


def test_registered_clean_ups_of_a_worker_run_last_first(muster):
    daemon = muster(
        {
            "closing": {"worker": "closing:Closing"},
            "functions": {"worker": "functions"},
        },
        start=False,
    )
    Path(daemon.folder, "closing.py").write_text(CLOSING)
    Path(daemon.folder, "functions.py").write_text(FUNCTIONS)
    daemon.start()
    with daemon.client() as client:
        client.submit("closing.register", {"word": "task 1"}).result(30)
        client.submit("closing.fail").result(30)
        client.submit("closing.register", {"word": "task 2"}).result(30)
        client.submit("functions.register", {"word": "a function's"}).result(30)
    assert daemon.stop() == 0
    said = Path(daemon.folder, "said").read_text().split("\n")
    assert said == ["task 2", "task 1", "open", "close", "import", ""]
    assert Path(daemon.folder, "functions").read_text() == "a function's"
    assert "clean-up int failed" in daemon.log()
    assert phases(daemon.log()) == ["intake", "drain", "stop", "cleanup", "close", "over"]
    assert "phase=drain reason='nothing runs'" in daemon.log()
    assert "phase=cleanup reason='nothing is configured'" in daemon.log()


def test_a_clean_up_that_hangs_ends_within_stop_timeout_and_the_others_run(muster):
    daemon = muster(
        {"closing": {"worker": "closing:Closing"}}, start=False, supervisor__stop_timeout="3s"
    )
    Path(daemon.folder, "closing.py").write_text(CLOSING)
    daemon.start()
    with daemon.client() as client:
        client.submit("closing.hang").result(30)
    assert daemon.stop() == 0
    said = Path(daemon.folder, "said").read_text().split("\n")
    assert said == ["open", "close", "import", ""]
    assert "sleep took longer than its share" in daemon.log()
    assert "worker.killed" not in daemon.log()


def test_clean_ups_of_the_supervisor_run_in_processes_of_their_own(jobs):
    names = ["cleanup:run", "cleanup:fail", "cleanup:arun", "nowhere:run"]
    daemon = jobs(size=1, start=False, supervisor__cleanup=names)
    Path(daemon.folder, "cleanup.py").write_text(CLEANUP)
    daemon.start()
    pid = daemon.pid
    assert daemon.stop() == 0
    log = daemon.log()
    assert Path(daemon.folder, "cleaned").read_text() == str(pid)
    assert "function=cleanup:run line='cleaning up'" in log
    assert "function=cleanup:run line='in two lines'" in log
    assert "line='async too'" in log
    assert "ValueError: cannot clean" in log
    assert "reason='cleanup:fail: it exited with code 1'" in log
    assert "No module named 'nowhere'" in log
    assert "clean-up failed: cleanup:fail, nowhere:run" in log
    assert phases(log) == ["intake", "drain", "stop", "cleanup", "close", "over"]


def test_a_clean_up_that_hangs_is_killed_with_its_children_and_the_next_one_runs(jobs):
    daemon = jobs(
        size=1,
        start=False,
        supervisor__cleanup=["cleanup:hang", "cleanup:flood", "cleanup:run"],
        supervisor__cleanup_timeout="18s",
    )
    Path(daemon.folder, "cleanup.py").write_text(CLEANUP)
    daemon.start()
    assert daemon.stop() == 0
    log = daemon.log()
    assert re.search(r"cleanup:hang: it was killed after 6\.0 s, its share", log)
    assert "function=cleanup:flood left_out=" in log
    assert Path(daemon.folder, "cleaned").exists()


def test_a_third_request_ends_the_clean_up(jobs, waiting):
    daemon = jobs(
        size=1,
        start=False,
        supervisor__cleanup=["cleanup:hang"],
        supervisor__cleanup_timeout="600s",
    )
    Path(daemon.folder, "cleanup.py").write_text(CLEANUP)
    daemon.start()
    daemon.process.terminate()
    waiting("it cleans up", lambda: "phase=cleanup" in daemon.log())
    for _ in range(2):
        daemon.ask(rpc.Shutdown(no_block=True))
    daemon.process.wait(60)
    assert daemon.process.returncode == 0
    assert "asked once more" in daemon.log()


def test_check_config_tells_of_a_clean_up_that_cannot_be_imported(jobs):
    daemon = jobs(size=1, start=False, supervisor__cleanup=["cleanup:run", "cleanup:nothing"])
    Path(daemon.folder, "cleanup.py").write_text(CLEANUP)
    done = subprocess.run(
        [sys.executable, "-m", "musterd.supervisor", "check-config", "-c", daemon.config_path],
        cwd=daemon.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 78
    assert 'supervisor.cleanup\': value "cleanup:nothing"' in done.stderr
    assert "cleanup:run" not in done.stderr
