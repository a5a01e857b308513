"""A worker that hangs in every way, copied beside the daemon. Each way hangs only once."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

from musterd import Worker, task


def hang(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    elif how == "loop":
        sum(range(10**13))  # in C: no signal handler runs, and no other thread
    elif how == "deadlock":
        mutex = ctypes.create_string_buffer(64)  # zeroes are an unlocked pthread_mutex_t
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    elif how == "stubborn":
        lock = threading.Lock()
        lock.acquire()
        while True:
            try:
                lock.acquire()
            except BaseException:  # noqa: BLE001 - that is the point
                continue


class Hangs(Worker):
    def open(self):
        self.once(self.options.get("open", ""), f"open-{self.pool}")

    def once(self, how, marker):
        path = Path(f"{marker}.hung")
        if how and not path.exists():
            path.touch()
            hang(how)

    @task(timeout=0.5, max_retries=2)
    def work(self, ctx, how: str, marker: str) -> int:
        self.once(how, marker)
        return ctx.attempt

    @task
    def later(self, ctx, how: str) -> None:
        """Hang when the worker is idle again."""
        threading.Timer(0.3, hang, [how]).start()

    @task
    def echo(self, ctx, value: int) -> int:
        return value
