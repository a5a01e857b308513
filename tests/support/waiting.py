"""Ways to wait for a condition: each has a deadline, and none asserts how long the wait took."""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import pytest

T = TypeVar("T")

# Ends a test that would wait for ever. No quiet machine needs a tenth of this time.
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.005  # the pause between two looks


def wait_for(what: str, condition: Callable[[], T], seconds: float = WAIT_SECONDS) -> T:
    """Return the first true value of the condition; fail the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline  # the last look comes after the deadline
        value = condition()
        if value:
            return value
        if late:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(LOOK_SECONDS)


class Waiting(Protocol):
    """The type of the fixture `waiting`, which is `wait_for`."""

    def __call__(self, what: str, condition: Callable[[], T], seconds: float = ...) -> T: ...
