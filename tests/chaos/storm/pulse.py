"""Ask the daemon for its status over and over, as `musterctl status` does, and note how long each
answer took. A separate process, so that nothing in the test can delay it.

    python pulse.py CONTROL_SOCKET FILE

    FILE: one line per question:  WHEN SECONDS yes  or  WHEN SECONDS no REASON
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.ctl.connection import Connection

PERIOD_SECONDS = 0.05
ANSWER_SECONDS_MAX = 60.0  # a later answer counts as none


def main(path: str, output: str) -> None:
    with open(output, "w", buffering=1) as file:
        while True:
            began = time.monotonic()
            try:
                with Connection(path, timeout=ANSWER_SECONDS_MAX) as connection:
                    connection.request(rpc.Status())
                answer = "yes"
            except (MusterdError, OSError) as error:
                answer = f"no {type(error).__name__}: {error}"
            file.write(f"{began:.6f} {time.monotonic() - began:.6f} {answer}\n")
            time.sleep(max(0.0, began + PERIOD_SECONDS - time.monotonic()))


class Answers(NamedTuple):
    count: int
    longest: float  # seconds
    p99: float
    unreachable: float  # the longest time without any answer, in seconds
    failed: list[str]


class Pulse:
    """The process, and what it found."""

    def __init__(self, control_socket: str, file: Path) -> None:
        self._file = file
        self._process = subprocess.Popen([sys.executable, __file__, control_socket, str(file)])

    def stop(self, kills: list[float]) -> Answers:
        """Stop asking. `kills` are the times at which the supervisor was killed: from each one to
        its next answer, it need not answer."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)
        took, failed, unreachable = [], [], 0.0
        answered, dead = 0.0, False
        for line in self._file.read_text().splitlines():
            when, seconds, answer = line.split(maxsplit=2)
            end = float(when) + float(seconds)
            dead = dead or any(answered < kill <= end for kill in kills)
            if answer == "yes":
                took.append(float(seconds))
                unreachable = max(unreachable, end - (answered or end))
                answered, dead = end, False
            elif not dead:
                failed.append(line)
        took.sort()
        return Answers(len(took), took[-1], took[int(len(took) * 0.99)], unreachable, failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
