"""The worker of the chaos test, copied beside the daemon; every execution writes one line.

    born INCARNATION              a worker process has opened
    ran INCARNATION TASK ATTEMPT  a handler began
    bye INCARNATION               it was told to end; a killed one never writes this

An incarnation is one worker process: `GENERATION:POOL/INDEX:RANDOM`, where the generation counts
the starts of the supervisor. (A pid would not do: in its namespace each worker is PID 2.)
"""

import asyncio
import contextlib
import os
import subprocess
import tempfile
import time

from musterd import Permanent, Worker, task


class Jobs(Worker):
    def open(self):
        generation = os.environ["CHAOS_GENERATION"]
        self.incarnation = f"{generation}:{self.pool}/{self.index}:{os.urandom(4).hex()}"
        self.diary = os.open(os.environ["CHAOS_DIARY"], os.O_WRONLY | os.O_APPEND)
        self.note("born")

    def close(self):
        self.note("bye")
        os.close(self.diary)

    def note(self, what, *more):
        line = " ".join([what, self.incarnation, *map(str, more)]) + "\n"
        os.write(self.diary, line.encode())  # one write: lines of several workers never mix

    def ran(self, ctx):
        self.note("ran", ctx.task_id, ctx.attempt)

    @task
    def tiny(self, ctx, value: int) -> int:
        self.ran(ctx)
        return value

    @task
    def nap(self, ctx, value: int, seconds: float) -> int:
        self.ran(ctx)
        time.sleep(seconds)
        return value

    @task
    async def anap(self, ctx, value: int, seconds: float) -> int:
        self.ran(ctx)
        await asyncio.sleep(seconds)
        return value

    @task
    def flaky(self, ctx, value: int, fails: int) -> int:
        self.ran(ctx)
        if ctx.attempt <= fails:
            raise ValueError(f"attempt {ctx.attempt} of {fails} that fail")
        return value

    @task
    def hopeless(self, ctx, value: int) -> None:
        self.ran(ctx)
        raise ValueError(f"no attempt at {value} succeeds")

    @task
    def refused(self, ctx, value: int) -> None:
        self.ran(ctx)
        raise Permanent(f"{value} will not be tried again")

    @task
    def shout(self, ctx, value: int, kilobytes: int) -> int:
        """Write more than anybody reads, with and without ends of lines."""
        self.ran(ctx)
        os.write(1, (b"shouting " * 12 + b"\n") * (kilobytes * 1024 // 109) + b"and on")
        return value

    @task
    def bulky(self, ctx, value: int, kilobytes: int) -> list[object]:
        self.ran(ctx)
        return [value, b"x" * (kilobytes * 1024)]

    @task
    def litter(self, ctx, value: int) -> int:
        """Leave files, and a process that only a kill will end."""
        self.ran(ctx)
        with contextlib.suppress(OSError):  # the disk is full, or fork fails
            with tempfile.NamedTemporaryFile(delete=False) as file:
                file.write(bytes(4096))
            subprocess.Popen(
                ["sh", "-c", "trap '' TERM HUP INT; sleep 1000 & sleep 1000"],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return value


class Doomed(Jobs):
    """Never becomes ready."""

    def open(self):
        os._exit(7)
