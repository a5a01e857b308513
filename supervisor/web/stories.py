"""Recent events of the daemon, read from one stream for all pages.

A task's story is its events, kept while there is room. Of older tasks the store has the failed
attempts, and `journalctl MUSTERD_TASK=<id>` the rest.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from typing import Any

import msgspec

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.envelope import decode_answer, encode_request
from musterd.supervisor.api.rpc import LINE_BYTES_MAX
from musterd.supervisor.api.status import RecentEvents

NEWEST_SHOWN = 50
TASKS_MAX = 1000  # whose events are kept
EVENTS_OF_TASK_MAX = 30
REASON_CHARS_MAX = 500
RETRY_SECONDS = 3.0  # between attempts to reach the daemon
# Without level debug: progress makes too many events.
PARAMS = rpc.Events(follow=True, level="info")

_OF_WHAT = ("pool", "worker", "schedule", "task", "attempt", "target")
_FIELDS = ("at", "event", "level", *_OF_WHAT, "reason")

Event = dict[str, Any]


class Stories:
    def __init__(self, path: str) -> None:
        self._path = path
        self._newest: deque[Event] = deque(maxlen=NEWEST_SHOWN)
        self._tasks: OrderedDict[str, deque[Event]] = OrderedDict()

    def newest(self) -> list[Event]:
        """Return events of the fleet, newest first; events of tasks are in their stories."""
        return list(reversed(self._newest))

    def of(self, task: str) -> list[Event]:
        return list(self._tasks.get(task, ()))

    async def run(self) -> None:
        """Read the stream, and reopen it when it ends."""
        while True:
            with contextlib.suppress(OSError, ValueError, MusterdError, msgspec.DecodeError):
                await self._read()
            await asyncio.sleep(RETRY_SECONDS)

    async def _read(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES_MAX)
        try:
            writer.write(encode_request(1, PARAMS))
            first = decode_answer(await reader.readline())
            if not isinstance(first.result, msgspec.Raw):
                return  # we are not allowed
            self._newest.clear()
            self._tasks.clear()  # recent events are sent again
            for event in msgspec.json.decode(first.result, type=RecentEvents).recent:
                self.keep(event)
            while line := await reader.readline():
                self.keep(msgspec.json.decode(line, type=dict[str, Any]))
        finally:
            writer.close()

    def keep(self, told: Event) -> None:
        event = {name: told[name] for name in _FIELDS if name in told}
        if "event" not in event:
            return  # a count of dropped events
        if isinstance(event.get("reason"), str):
            event["reason"] = event["reason"][:REASON_CHARS_MAX]
        task = event.get("task")
        if not task or event.get("level") in ("warning", "error", "critical"):
            self._newest.append(event)
        if task:
            self._tasks.setdefault(task, deque(maxlen=EVENTS_OF_TASK_MAX)).append(event)
            self._tasks.move_to_end(task)
            if len(self._tasks) > TASKS_MAX:
                self._tasks.popitem(last=False)
