"""The end of a worker process."""

import subprocess
import sys

ENDING = """
import signal
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.workers.runtime.run import Runtime, load
runtime = Runtime(load("musterd.workers.parser:ParserWorker"), "parser", Scoreboard.create())
signal.setitimer(signal.ITIMER_REAL, 1000, 1000)
runtime.end()
print(signal.getitimer(signal.ITIMER_REAL))
"""


def test_a_worker_that_ends_has_no_timer_left() -> None:
    """The timer's signal would kill the worker, and its init would miss the exit code."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "(0.0, 0.0)\n"
