"""What every system is given to do: the same functions, wrapped in its own way by each."""

import os
import time

ARGUMENT = "x" * 100


def echo(data: str) -> str:
    """Nothing, with something to carry there and back: what is left is the cost of the way."""
    return data


def nap(seconds: float) -> None:
    time.sleep(seconds)


def stamp() -> int:
    """When it began; the monotonic clock is the same in all processes of a machine."""
    return time.monotonic_ns()


def hold(path: str, seconds: float) -> None:
    """Tells its pid and stays the first time, to be killed there; returns the second time."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(file, f"{os.getpid()}\n".encode())
    os.close(file)
    time.sleep(seconds)


def note(path: str, number: int, seconds: float) -> None:
    """Puts its number into the file when it is done: what ran, and how often, is found there."""
    time.sleep(seconds)
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(file, f"{number}\n".encode())
    os.close(file)


ALL = (echo, nap, stamp, hold, note)
