"""Threads that call the engine, each with a connection of its own.

A thread has the methods that may wait for each other: a heartbeat never waits for a slow claim. The
calls are bounded by those who make them: one of a kind at a time (cluster/calls.py).
"""

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import psycopg
from msgspec import Struct
from psycopg import sql

from musterd.supervisor.cluster import checks
from musterd.supervisor.cluster.engine import (
    EngineAway,
    EngineError,
    EngineUnreached,
    Fenced,
    NameTaken,
)
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.cluster.sidecar_events import EngineAnswered, EngineFailed

# Which thread does what.
WRITES, READS, FETCHES, MEMBER, CLAIMS, ENDS, TIME, HANDLERS, LOOKS = range(9)
THREADS = {
    **dict.fromkeys(("check", "submit", "cancel", "invalidate", "put", "delete", "pause"), WRITES),
    **dict.fromkeys(("cards", "ended", "changes", "marks"), READS),
    **dict.fromkeys(("fetch", "view", "history", "schedules"), FETCHES),
    **dict.fromkeys(
        ("give_back", "join", "redeclare", "rejoin", "release", "beat", "leave"), MEMBER
    ),
    "claim": CLAIMS,
    **dict.fromkeys(("finish", "begun", "progress"), ENDS),
    **dict.fromkeys(("tick", "reap", "retain"), TIME),
    **dict.fromkeys(("policy", "due", "settle", "announce", "watched", "judged"), TIME),
    **dict.fromkeys(("untold", "told"), TIME),
    **dict.fromkeys(("statistics", "find"), LOOKS),  # for people
    **dict.fromkeys(("states", "locks"), HANDLERS),
}
LISTEN_SECONDS = 1.0  # between two looks at what is to be listened to
RECONNECT_SECONDS = 1.0
EXIT_INTERNAL = 70

Event = EngineAnswered | EngineFailed


class Job(Struct, frozen=True):
    """A call, and who gets its answer."""

    ticket: int
    method: str
    arguments: tuple[object, ...]
    options: dict[str, object]
    answered: Callable[[Event], object]


class Engines:
    def __init__(self, url: str, alone: int) -> None:
        """`alone` is the number of this process (checks.py)."""
        self._url = url
        self._alone = alone
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queues: dict[int, SimpleQueue[Job]] = {}
        self._done: deque[tuple[Callable[[Event], object], Event]] = deque()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are answers."""
        return self._wake

    def call(self, job: Job) -> None:
        number = THREADS[job.method]
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = SimpleQueue()
            engine = PostgresEngine(self._url, alone=self._alone | number)
            name = f"engine-{number}"
            threading.Thread(
                target=self._work, args=(engine, queue), name=name, daemon=True
            ).start()
        queue.put(job)

    def hear(self) -> None:
        """Hand the answers that have come to those who wait for them."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._done:
            answered, event = self._done.popleft()
            answered(event)

    def tell(self, answered: Callable[[Event], object], event: Event) -> None:
        """Have a call made by the loop; for other threads."""
        self._done.append((answered, event))
        os.eventfd_write(self._wake, 1)

    def _work(self, engine: PostgresEngine, queue: "SimpleQueue[Job]") -> None:
        try:
            while True:
                job = queue.get()
                self.tell(job.answered, self._call(engine, job))
        except BaseException:  # noqa: BLE001 - who waits for its answers would wait for ever
            traceback.print_exc()
            os._exit(EXIT_INTERNAL)

    def _call(self, engine: PostgresEngine, job: Job) -> Event:
        try:
            result = getattr(engine, job.method)(*job.arguments, **job.options)
        except EngineAway as error:
            unsent = isinstance(error, EngineUnreached)
            return EngineFailed(job.ticket, str(error), unsent=unsent)
        except Fenced as error:
            return EngineFailed(job.ticket, str(error), fenced=True)
        except NameTaken as error:
            return EngineFailed(job.ticket, str(error), taken_ns=error.beat_age_ns)
        except EngineError as error:
            return EngineFailed(job.ticket, str(error), refused=True)
        return EngineAnswered(job.ticket, result)


class Listener:
    """Hears notifications, in a thread. `heard` is called there with the channels."""

    def __init__(self, url: str, heard: Callable[[list[tuple[str, str]]], None]) -> None:
        self._url = url
        self._heard = heard
        self._wanted: tuple[str, ...] = ()
        threading.Thread(target=self._work, name="listener", daemon=True).start()

    def listen(self, *channels: str) -> None:
        """Listen to these channels instead of those before, within LISTEN_SECONDS."""
        self._wanted = channels

    def _work(self) -> None:
        while True:
            try:
                with checks.connect(self._url) as connection:
                    self._listen(connection)
            except (psycopg.Error, EngineError):
                time.sleep(RECONNECT_SECONDS)  # polling goes on meanwhile

    def _listen(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        listened: tuple[str, ...] = ()
        while True:
            wanted = self._wanted
            if wanted != listened:
                connection.execute("UNLISTEN *")
                for channel in wanted:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                listened = wanted
            found = list(connection.notifies(timeout=LISTEN_SECONDS, stop_after=1))
            if found:
                self._heard([(each.channel, each.payload) for each in found])
