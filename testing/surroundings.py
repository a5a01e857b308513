"""What a worker finds in its process: settings, environment, log, time. Set while its code runs.

A worker under test shares its process with the tests and with other workers. So all that belongs to
the process is that of the worker as long as code of the worker runs, and no longer.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from musterd.ipc.wire.paths import TASKS_VARIABLE
from musterd.testing.loop import VirtualLoop
from musterd.testing.settings import Settings
from musterd.testing.times import time_of
from musterd.testing.world import World
from musterd.workers.authoring import closing, settings
from musterd.workers.authoring.closing import Callback
from musterd.workers.metrics import metrics
from musterd.workers.runtime.speech import Formatter

LOG_LINES_MAX = 10_000  # of one worker; older ones are dropped


class Surroundings:
    def __init__(self, given: Settings, world: World, folder: Path) -> None:
        told = given.worker
        self._settings = settings.made(
            told.threads, told.cache_seconds, told.cache_entries, told.sessions, told.artefacts
        )
        self._environment = {
            **given.environment,
            "TMPDIR": str(folder),
            # A Client in a handler says that nobody is there, and finds no daemon by accident.
            TASKS_VARIABLE: str(folder / "no-daemon-in-this-test" / "tasks.sock"),
        }
        self._world = world
        self._log = _Lines(given.log_level)
        self.lines = self._log.lines
        self._registered: list[Callback] | None = None  # functions for the end of this worker

    def renew(self) -> None:
        """Begin another worker process: what the last one had registered is gone with it."""
        self._registered = None

    @contextmanager
    def inside(self, redact: Callable[[str], str]) -> Iterator[None]:
        """Make the process that of the worker."""
        with ExitStack() as stack:
            former = settings.exchange(self._settings)
            stack.callback(settings.exchange, former)
            stack.enter_context(self._callbacks())
            stack.enter_context(_environment(self._environment))
            self._log.redact = redact
            stack.enter_context(self._log.listening())
            stack.callback(setattr, metrics, "redact", metrics.redact)
            metrics.redact = redact
            stack.enter_context(_loops(lambda: VirtualLoop(self._world)))
            stack.enter_context(self._world.outside.noted())
            stack.enter_context(time_of(self._world))
            self._world.clock.run(True)
            stack.callback(self._world.clock.run, False)
            yield

    @contextmanager
    def _callbacks(self) -> Iterator[None]:
        """Let on_close() be that of this worker; each begins with what imports have registered."""
        outer = closing.exchange([])
        closing.exchange(list(outer) if self._registered is None else self._registered)
        try:
            yield
        finally:
            self._registered = closing.exchange(outer)


class _Lines(logging.Handler):
    """Keeps the lines that a daemon would have in its log of the worker."""

    def __init__(self, level: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.redact: Callable[[str], str] = str
        self._own_level = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        self.setFormatter(Formatter(marks=False))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("musterd.testing"):
            return
        own = record.name.partition(".")[0] == "musterd"
        if record.levelno >= (self._own_level if own else logging.INFO):
            self.lines.append(self.redact(self.format(record)))
            if len(self.lines) > LOG_LINES_MAX:
                del self.lines[0]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear what is logged at the levels that a worker has."""
        root, own = logging.getLogger(), logging.getLogger("musterd")
        levels = root.level, own.level
        root.setLevel(min(root.level or logging.INFO, logging.INFO))
        own.setLevel(min(own.level or self._own_level, self._own_level))
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)
            root.setLevel(levels[0])
            own.setLevel(levels[1])


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _loops(make: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[None]:
    """Have new event loops made by this: asyncio.run() in a handler goes by the worker's clock."""
    former = asyncio.events.new_event_loop
    asyncio.events.new_event_loop = asyncio.new_event_loop = make
    try:
        yield
    finally:
        asyncio.events.new_event_loop = asyncio.new_event_loop = former
