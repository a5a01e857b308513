"""The tasks of every system: the same functions, wrapped by each system in its own way."""

import os
import time

ARGUMENT = "x" * 100


def echo(data: str) -> str:
    """Return the argument: the time is only the cost of transport."""
    return data


def nap(seconds: float) -> None:
    time.sleep(seconds)


def stamp() -> int:
    """Return the start time; all processes of a machine share the monotonic clock."""
    return time.monotonic_ns()


def hold(path: str, seconds: float) -> None:
    """Write the pid and stay the first time, to be killed; return the second time."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(file, f"{os.getpid()}\n".encode())
    os.close(file)
    time.sleep(seconds)


def note(path: str, number: int, seconds: float) -> None:
    """Append its number to the file when it is done: the file shows what ran, and how often."""
    time.sleep(seconds)
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(file, f"{number}\n".encode())
    os.close(file)


ALL = (echo, nap, stamp, hold, note)
