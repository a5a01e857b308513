"""Workers of these tests; the module runs inside the machines."""

import os
import subprocess
import time

from musterd import Worker, task


class Jobs(Worker):
    @task
    def add(self, ctx, a: int, b: int) -> int:
        return a + b

    @task(timeout=600)
    def nap(self, ctx, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @task(timeout=600)
    def until(self, ctx, path: str) -> None:
        """Run until the file is there."""
        while not os.path.exists(path):
            time.sleep(0.01)

    @task(timeout=600)
    def litter(self, ctx, seconds: float) -> int:
        """Leave a process that ignores signals, then go on for a while."""
        subprocess.Popen(["sh", "-c", "trap '' TERM HUP; exec sleep 54321"], start_new_session=True)
        time.sleep(seconds)
        return os.getpid()


class Slow(Worker):
    """Takes long to start."""

    def open(self) -> None:
        time.sleep(float(os.environ.get("BED_OPEN_SECONDS", "2")))

    @task
    def add(self, ctx, a: int, b: int) -> int:
        return a + b


class Broken(Worker):
    """Never starts."""

    def open(self) -> None:
        raise RuntimeError("this one cannot start")
