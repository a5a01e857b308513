"""Logs: a constant message plus fields, the same for the journal, a terminal and a file.

Under systemd the fields become MUSTERD_EVENT, MUSTERD_POOL, ... of journald; elsewhere one line
per record on stderr, or in a rotating file when `log_file` is set.
"""

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from typing import Any

from musterd.ipc.messages import SUCCEEDED
from musterd.supervisor.core.actions import FinalRecord, Report
from musterd.supervisor.printable import printable

FILE_BYTES_MAX = 10 * 1024 * 1024
FILES_KEPT = 5
# One line per finished task is what people want at ten a second, and what drowns them at ten
# thousand: beyond this many in a second the rest is counted and told in one line.
TASK_LINES_PER_SECOND = 20
CHATTY = ("asyncio", "urllib3", "httpx", "aiohttp", "playwright")

log = logging.getLogger("musterd")

# The text of a log line for each event; what is missing here is shown by its name.
MESSAGES = {
    "daemon.starting": "musterd is starting",
    "daemon.ready": "musterd is ready",
    "daemon.stopped": "musterd has stopped",
    "daemon.state": "state",
    "config.reloaded": "the configuration was read again",
    "config.refused": "the configuration is wrong: nothing changed",
    "pool.rolling": "the workers of a pool are being replaced",
    "pool.rolled": "the workers of a pool were replaced",
    "pool.roll_failed": "the workers of a pool were not replaced",
    "pool.added": "pool was added",
    "pool.removed": "pool was removed",
    "loop.slow": "a turn of the loop was slow",
    "client.malformed": "dropped a message of a client",
    "client.slow": "a client does not read its results: dropped, it may ask again",
    "worker.malformed": "dropped a message on workers.sock",
    "tasks.finished": "more tasks finished",
    "worker.ready": "worker is ready",
    "worker.crashed": "worker crashed",
    "worker.hung": "worker hangs",
    "worker.recycled": "worker is recycled",
    "worker.not_recycled": "worker could not be recycled",
    "worker.fatal": "worker is given up until it is reset",
    "worker.killed": "worker was killed",
    "pool.fatal": "pool cannot start",
    "pool.scaled": "pool was scaled",
    "pool.paused": "pool is paused: tasks wait until it is resumed",
    "pool.drained": "pool is drained: no tasks are run or accepted until it is resumed",
    "pool.resumed": "pool goes on",
    "worker.paused": "worker is paused: it is given no tasks until it is resumed",
    "worker.drained": "worker is drained: it is given no tasks until it is resumed",
    "worker.resumed": "worker goes on",
    "nursery.crashed": "nursery failed",
    "nursery.threads": "importing the worker class starts threads: each worker imports it afresh",
    "worker.resists": "a worker, or a process it left, resists SIGKILL",
    "worker.leftovers": "what outlived a worker was ended",
    "daemon.leftovers": "what an earlier supervisor left was ended",
    "leftovers.unnoted": "what this supervisor leaves if it is killed will not be found",
    "worker.flood": "a worker says more than the log takes: lines were left out",
    "worker.status_taken": "the exit status of a worker's init was taken by somebody else",
    "task.retry": "task will be tried again",
    "task.hung": "task hangs",
    "task.progress": "task is under way",
    "task.quarantined": "task is quarantined",
    "task.stranded": "task has no pool; it is kept",
    "task.changed": "the result of a scheduled task has changed",
    "schedule.skipped": "runs of a schedule were skipped",
    "schedule.paused": "schedule is paused",
    "schedule.resumed": "schedule goes on",
    "schedule.reset": "schedule begins anew",
    "breaker.open": "a site is unwell and left alone",
    "breaker.half_open": "a site is tried again",
    "breaker.closed": "a site is well",
    "breaker.forced_open": "a site is left alone by hand",
    "breaker.disabled": "the breaker of a site is switched off by hand",
    "memory.warning": "memory is tight: the fleet is made smaller",
    "memory.critical": "memory is nearly used up: one worker per pool is left",
    "memory.sacrifice": "memory stays critical: pools marked as sacrifice have no worker",
    "memory.kill": "memory stays critical: what did not give way is killed",
    "memory.recovering": "memory recovers: the fleet grows by one step",
    "memory.normal": "memory is back to normal",
    "memory.held": "workers are held back by memory",
    "memory.unwatched": "the notification of systemd cannot be used",
    "machine.statistics": "statistics",
    "machine.unreadable": "the figures of the machine cannot be read",
    "store.failing": "the store cannot write: nothing is acknowledged until it can",
    "store.recovered": "the store can write again",
    "memory.unreadable": "memory cannot be looked at",
    "door.shut": "descriptors are short: clients are put out, and wait",
    "door.open": "there are descriptors again: clients are let in",
    "sockets.lost": "a socket is gone: restart to make it again",
    "daemon.unclean": "a step of the shutdown failed",
    "task.interrupted": "task was interrupted and is queued again",
    "shutdown.phase": "shutdown",
    "cleanup.output": "a clean-up says",
    "cleanup.done": "clean-up is done",
    "cleanup.failed": "clean-up failed",
    "shutdown.kill": "shutdown: killing what is left",
}
_FIELDS = (
    *("pool", "worker", "task", "attempt", "target", "phase", "cause", "reason"),
    *("schedule", "count", "digest", "output"),
)
# How the logging of workers begins its lines (workers/runtime.py): such a line keeps its level.
_LEVEL_SAID = {
    "DEBUG": logging.DEBUG,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}
_COLOURS = {"WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31;1m"}


class LineFormatter(logging.Formatter):
    """`12:01:02 WARNING worker crashed pool=parser worker=parser/0 reason=...`"""

    def __init__(self, *, colour: bool, date: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        words = [
            self.formatTime(record, self.datefmt),
            record.levelname.lower(),
            record.getMessage(),
        ]
        words += [f"{key.lower()}={_quoted(value)}" for key, value in fields.items()]
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        colour = _COLOURS.get(record.levelname) if self._colour else None
        return f"{colour}{line}\033[0m" if colour else line


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or " " in text or "\n" in text else text


class JournalHandler(logging.Handler):
    """To journald, through systemd-python."""

    def __init__(self) -> None:
        super().__init__()
        from systemd import journal  # type: ignore[attr-defined,unused-ignore]

        self._send = journal.send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {f"MUSTERD_{k}": str(v) for k, v in getattr(record, "fields", {}).items()}
            priority = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3}.get(record.levelname, 2)
            self._send(
                self.format(record), PRIORITY=priority, SYSLOG_IDENTIFIER="musterd", **fields
            )
        except Exception:  # noqa: BLE001 - logging's own way of reporting a failing handler
            self.handleError(record)


def _journald() -> logging.Handler | None:
    """A handler for journald, if our stderr goes there."""
    if "JOURNAL_STREAM" not in os.environ:
        return None
    try:
        return JournalHandler()
    except ImportError:
        return None


def configure(level: str, log_file: str = "") -> None:
    """Set up logging for the daemon; called once, and again on reload."""
    handler: logging.Handler | None
    if log_file:
        handler = RotatingFileHandler(
            log_file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8"
        )
        handler.setFormatter(LineFormatter(colour=False, date=True))
    else:
        handler = _journald()
        if handler is None:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(LineFormatter(colour=sys.stderr.isatty(), date=False))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    log.setLevel(level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """The least level that is logged from now on."""
    log.setLevel(level.upper())


def note(event: str, level: str = "info", **fields: object) -> None:
    """One line with these fields."""
    shown = {"EVENT": event, **{key.upper(): value for key, value in fields.items()}}
    number = logging.getLevelNamesMapping()[level.upper()]
    log.log(number, MESSAGES.get(event, event), extra={"fields": shown})


def write(report: Report) -> None:
    """One line for one thing that happened."""
    fields = {name: value for name in _FIELDS if (value := getattr(report, name))}
    if report.seconds:
        fields["seconds"] = f"{report.seconds:.3f}"
    note(report.event, report.level, **fields)


def say(speaker: str, text: str) -> None:
    """One line that a worker, or the nursery of a pool, has said."""
    number = _LEVEL_SAID.get(text.partition(" ")[0], logging.INFO)
    if log.isEnabledFor(number):
        fields = {"EVENT": "worker.output", "POOL": speaker.partition("/")[0]}
        if "/" in speaker:
            fields["WORKER"] = speaker
        log.log(number, "%s", printable(text, keep="\t"), extra={"fields": fields})


class TaskLines:
    """One line per finished task, up to a number per second; then one line for all the others."""

    def __init__(self) -> None:
        self._second = 0
        self._written = 0
        self._left_out = 0

    def finished(self, now_ns: int, records: list[FinalRecord]) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        self.tick(now_ns)
        room = TASK_LINES_PER_SECOND - self._written
        for record in records[:room]:
            self._line(record)
        self._written += min(room, len(records))
        self._left_out += max(0, len(records) - room)

    def tick(self, now_ns: int) -> None:
        """Close the last second's account."""
        second = now_ns // 1_000_000_000
        if second == self._second:
            return
        if self._left_out:
            note("tasks.finished", count=self._left_out)
        self._second, self._written, self._left_out = second, 0, 0

    def _line(self, record: FinalRecord) -> None:
        outcome, spec = record.outcome, record.spec
        fields: dict[str, Any] = {
            "EVENT": f"task.{outcome.state}",
            "TASK": spec.id,
            "NAME": spec.name,
            "ATTEMPT": outcome.attempts,
        }
        if spec.target:
            fields["TARGET"] = spec.target
        if outcome.source:
            fields["RESULT"] = outcome.source
        elif outcome.run_ns:
            fields["SECONDS"] = f"{outcome.run_ns / 1e9:.3f}"
        if outcome.failure is not None:
            fields["REASON"] = f"{outcome.failure.type or outcome.failure.kind}: " + (
                outcome.failure.message
            )
        level = logging.INFO if outcome.state == SUCCEEDED else logging.WARNING
        log.log(level, "task finished", extra={"fields": fields})
