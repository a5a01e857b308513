"""Keeps the daemon of a test: `python -m musterd.testing.keeper FOLDER PID COMMAND...`

Started by daemon.py in a session of its own, so that no Ctrl-C and no kill of the tests' process
group reaches it. It starts the daemon (COMMAND) when it is told to, says when it has ended, and
when the test process (PID) is gone, or closes its end, it ends the daemon and removes FOLDER. So
nothing is left of the daemon, whatever becomes of the tests.

    start             the daemon is started:               started PID
    stop [SECONDS]    SIGTERM; once more after SECONDS
    kill              SIGKILL                              exited CODE, at any end of the daemon
"""

import contextlib
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from musterd.supervisor.system.linux import die_with_parent

# After these the daemon is asked more urgently: the second SIGTERM ends its drain, the third kills
# its workers. Nobody waits for what runs when the test process is gone.
PATIENCE_SECONDS = (0.5, 5.0, 5.0)
LOG_FILE = "daemon.log"


def _end_with_keeper() -> None:
    die_with_parent(signal.SIGTERM)


class Keeper:
    def __init__(self, folder: Path, test_pid: int, command: list[str]) -> None:
        self._folder = folder
        self._command = command
        self._tests = os.pidfd_open(test_pid)
        self._daemon: subprocess.Popen[bytes] | None = None
        self._daemon_fd = -1
        self._poll = select.poll()
        self._orders = io.FileIO(0)  # so that poll() tells of each line
        self._poll.register(self._tests, select.POLLIN)
        self._poll.register(self._orders, select.POLLIN)
        self._due: list[float] = []  # when to send another SIGTERM

    def serve(self) -> None:
        while True:
            seconds = max(0.0, self._due[0] - time.monotonic()) if self._due else None
            ready = dict(self._poll.poll(None if seconds is None else seconds * 1000))
            if self._daemon_fd in ready:
                self._tell_end()
            if self._due and time.monotonic() >= self._due[0]:
                self._due.pop(0)
                self._signal(signal.SIGTERM)
            if self._tests in ready:
                return
            if 0 in ready and not self._obey(self._orders.readline().decode().split()):
                return

    def _obey(self, words: list[str]) -> bool:
        match words:
            case ["start"]:
                self._start()
            case ["stop", *seconds]:
                now = time.monotonic()
                self._due = [now, *(now + float(each) for each in seconds)]
            case ["kill"]:
                self._signal(signal.SIGKILL)
            case _:
                return False
        return True

    def _start(self) -> None:
        assert self._daemon is None
        with open(self._folder / LOG_FILE, "ab") as log:
            self._daemon = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_keeper,  # noqa: PLW1509 - there is one thread
            )
        self._daemon_fd = os.pidfd_open(self._daemon.pid)
        self._poll.register(self._daemon_fd, select.POLLIN)
        print("started", self._daemon.pid, flush=True)

    def _signal(self, number: int) -> None:
        if self._daemon is not None:
            self._daemon.send_signal(number)

    def _tell_end(self) -> None:
        code = self._end()
        with contextlib.suppress(OSError):  # nobody listens any more
            print("exited", code, flush=True)

    def _end(self) -> int:
        assert self._daemon is not None
        code = self._daemon.wait()
        self._poll.unregister(self._daemon_fd)
        os.close(self._daemon_fd)
        self._daemon, self._daemon_fd, self._due = None, -1, []
        return code

    def close(self) -> None:
        """End the daemon, if it runs, and leave nothing of it."""
        for seconds in PATIENCE_SECONDS:
            if self._daemon is None:
                break
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemon.wait(seconds)
                self._end()
        if self._daemon is not None:
            self._signal(signal.SIGKILL)
            self._end()
        shutil.rmtree(self._folder, ignore_errors=True)


def main(words: list[str]) -> int:
    folder, test_pid, *command = words
    try:
        keeper = Keeper(Path(folder), int(test_pid), command)
    except ProcessLookupError:  # the tests were over before we began
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    try:
        keeper.serve()
    finally:
        keeper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
