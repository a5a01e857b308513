"""How far the task is that `musterctl submit --wait` waits for, on a terminal."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.ctl.app import Settings, connect
from musterd.supervisor.ctl.connection import Connection
from musterd.supervisor.text.printable import printable

LINE_CHARS_MAX = 79  # a longer line would wrap, and could not be written over
_BACK = "\r\033[K"  # to the start of the line, and away with it


@contextmanager
def shown(settings: Settings, task_id: str) -> Iterator[None]:
    """Writes the task's progress over and over on one line of standard error, if that is a
    terminal, from the daemon's events; without a word if there are none to be had."""
    if settings.json or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    try:
        connection = connect(settings)
        connection.request(rpc.Events())
    except MusterdError:
        yield  # whatever is wrong is told about the task itself
        return
    thread = threading.Thread(target=_follow, args=(connection, task_id, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        connection.interrupt()
        thread.join()
        connection.close()
        _write(_BACK)


def _follow(connection: Connection, task_id: str, over: threading.Event) -> None:
    with suppress(MusterdError, OSError, msgspec.DecodeError):  # the connection ended
        for line in connection.stream():
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if over.is_set():
                return
            if fields.get("event") == "task.progress" and fields.get("task") == task_id:
                text = printable(str(fields.get("reason", "")))
                _write(f"{_BACK}{text[:LINE_CHARS_MAX]}")


def _write(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
