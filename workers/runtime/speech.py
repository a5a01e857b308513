"""Standard output and error of a worker: each line that is said within an attempt names its task.

The attempt is found by a context variable, so it holds for coroutines, for `asyncio.to_thread` and
for the toolkit's executors. Other threads say what they say without a task.
"""

import io
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from musterd.ipc.wire.spoken import BEGIN, mark

LOG_FORMAT = "%(levelname)s %(name)s [%(MUSTERD_TASK)s] %(message)s"

# Id of the task whose attempt runs here; "" outside of an attempt.
speaking: ContextVar[str] = ContextVar("speaking", default="")


class Voice(io.TextIOWrapper):
    """Text stream that marks the lines of attempts for the supervisor (ipc/wire/spoken.py)."""

    _begins = True  # the next character begins a line

    def write(self, text: str) -> int:
        task = speaking.get()
        begins, self._begins = self._begins, text.endswith("\n")
        # What begins with a mark is marked by the formatter, line by line.
        if not task or not text or text.startswith(BEGIN):
            return super().write(text)
        marks = mark(task)
        inner, end = (text[:-1], "\n") if self._begins else (text, "")
        inner = inner.replace("\n", f"\n{marks}")
        super().write(f"{marks if begins else ''}{inner}{end}")
        return len(text)


class Formatter(logging.Formatter):
    """Formatter that names the task, and leaves out the secrets of running tasks."""

    redact: Callable[[str], str] = str  # of the worker, once there is one

    def __init__(self, *, marks: bool) -> None:
        super().__init__(LOG_FORMAT, defaults={"MUSTERD_TASK": "-"})
        self._marks = marks

    def format(self, record: logging.LogRecord) -> str:
        task = getattr(record, "MUSTERD_TASK", "") or speaking.get()
        if task:
            record.MUSTERD_TASK = task
        text = type(self).redact(super().format(record))
        if not self._marks:
            return text
        marks = mark(task, record.levelname)
        return f"{marks}{text}".replace("\n", f"\n{marks}")


def find_voice() -> None:
    """Mark what this process says from now on; streams that are replaced already stay as they are.

    Called before users' code is imported, which may keep the streams.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            settings: dict[str, Any] = {
                setting: getattr(stream, setting)
                for setting in ("encoding", "errors", "line_buffering", "write_through")
            }
            voice = Voice(stream.detach(), **settings)
            setattr(sys, name, voice)
            setattr(sys, f"__{name}__", voice)
