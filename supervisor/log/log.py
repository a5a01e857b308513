"""Logs: a constant message plus fields, the same for the journal, a terminal and a file.

How a line looks is the matter of formats.py, and how it gets out without holding up anybody that
of writer.py. Here is what is said, and how often.
"""

import logging
import os
import re
import threading
import time

from musterd.ipc.user_code import turn_down
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.log.formats import AUTO, target
from musterd.supervisor.log.token_bucket import Allowance
from musterd.supervisor.log.writer import LEFT_OUT, LEFT_OUT_MESSAGE, Outbox
from musterd.supervisor.text.printable import printable

# Of each kind of event. A fleet of 200 that starts or falls is within; a storm is not.
LINES_PER_SECOND = 20
LINES_BURST = 500
# These are few by themselves, or have limits of their own.
UNLIMITED = frozenset({"cleanup.output", "worker.flood", "tasks.finished", "log.limited"})

log = logging.getLogger("musterd")

# The text of a log line for each event; what is missing here is shown by its name.
MESSAGES = {
    "daemon.starting": "musterd is starting",
    "daemon.ready": "musterd is ready",
    "daemon.stopped": "musterd has stopped",
    "daemon.state": "state",
    "daemon.thread": "a thread has ended: the daemon ends with it",
    "log.limited": "more lines of a kind than the log takes: the others were left out",
    LEFT_OUT: LEFT_OUT_MESSAGE,
    "config.reloaded": "the configuration was read again",
    "config.refused": "the configuration is wrong: nothing changed",
    "pool.rolling": "the workers of a pool are being replaced",
    "pool.rolled": "the workers of a pool were replaced",
    "pool.roll_failed": "the workers of a pool were not replaced",
    "pool.added": "pool was added",
    "pool.removed": "pool was removed",
    "loop.slow": "a turn of the loop was slow",
    "client.malformed": "dropped a message of a client",
    "client.dropped": "a client was put out; it may come again",
    "worker.malformed": "dropped what came on workers.sock",
    "workers.waiting": "workers wait to be let in: no descriptor or no memory is left",
    "tasks.finished": "more tasks finished",
    "task.queued": "task is submitted",
    "task.recovered": "task was in the store: it is queued again",
    "task.withdrawn": "task was refused: the store could not take it",
    "task.started": "task is given to a worker",
    "task.waiting": "task waits",
    "task.deadlock": "task waits for what can never run: it gets an error",
    "task.crashed": "task has lost its worker: it is queued again",
    "task.succeeded": "task has succeeded",
    "task.failed": "task is dead: it is not tried again",
    "task.cancelled": "task is cancelled",
    "task.expired": "task has expired",
    "alerts.ready": "the process that sends alerts is up",
    "alerts.crashed": "the process that sends alerts ended: it is started again",
    "alerts.fatal": "the process that sends alerts cannot be used: it is not started again",
    "events.ready": "events are published",
    "events.crashed": "the publisher of events ended: it is started again",
    "events.fatal": "events cannot be published: not tried again before the next reload",
    "web.ready": "the web process listens",
    "web.crashed": "the web process ended: it is started again",
    "web.fatal": "the web process is given up until the next reload",
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
    "forkserver.crashed": "fork server failed",
    "forkserver.threads": "importing the worker class starts threads: each worker imports it anew",
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
    "task.fallback": "task has failed for good and falls back",
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
    "store.failing": "the store cannot write: nothing is acknowledged until it can",
    "clock.doubted": "the clock is doubted: nothing is forgotten for its age",
    "clock.trusted": "the clock is plausible again",
    "clock.accepted": "the clock is right: a person says so",
    "clock.stepped": "the clock was set: nothing is forgotten for its age for an hour",
    "clock.unreadable": "the time that was noted last cannot be read",
    "leftovers.unread": "what an earlier supervisor has noted cannot be read",
    "leftovers.group": "a control group of an earlier supervisor is left",
    "store.lost": "the store's files are not where they were",
    "store.rewritten": "the store was written anew: nothing is lost",
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
# How the logging of workers begins its lines (workers/runtime/run.py): such a line keeps its level.
_LEVEL_SAID = {
    "DEBUG": logging.DEBUG,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}
_OF_TASK = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \[([^\]\s]{2,64})\] ")


class _Limits:
    """How many lines of each kind are logged; a storm is counted, and the count is logged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # threads of ours write lines too
        self._allowed: dict[str, Allowance] = {}
        self._left_out: dict[str, int] = {}

    def take(self, event: str) -> bool:
        if event in UNLIMITED:
            return True
        with self._lock:
            allowed = self._allowed.get(event)
            if allowed is None:
                allowed = self._allowed[event] = Allowance(LINES_PER_SECOND, LINES_BURST)
            if allowed.take(time.monotonic_ns()):
                return True
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return False

    def left_out(self) -> dict[str, int]:
        """Since this was asked last."""
        with self._lock:
            found, self._left_out = self._left_out, {}
        return found


_limits = _Limits()


def configure(level: str, log_file: str = "", log_format: str = AUTO) -> None:
    """Set up logging for the daemon."""
    outbox = Outbox(target(log_format, log_file, os.environ))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(outbox)
    root.setLevel(logging.WARNING)
    log.setLevel(level.upper())
    turn_down(level)


def set_level(level: str) -> None:
    """The least level that is logged from now on."""
    log.setLevel(level.upper())


def note(event: str, level: str = "info", **fields: object) -> None:
    """One line with these fields, unless there are too many of its kind."""
    number = logging.getLevelNamesMapping()[level.upper()]
    if log.isEnabledFor(number) and _limits.take(event):
        line(event, number, {key.upper(): value for key, value in fields.items()})


def line(event: str, level: int, fields: dict[str, object]) -> None:
    """One line, however many there are of its kind: whoever calls this has a limit of its own."""
    log.log(level, MESSAGES.get(event, event), extra={"fields": {"EVENT": event, **fields}})


def has_room(event: str) -> bool:
    """Whether one more of this kind may be logged; if not, it is counted."""
    return _limits.take(event)


def tell_left_out() -> None:
    """Once a second: how many lines of which kinds are not there."""
    for event, count in _limits.left_out().items():
        note("log.limited", "warning", kind=event, count=count)


def write(report: Report, *, always: bool = False) -> None:
    """One line for one thing that happened; `always`: it belongs to a story that is told."""
    fields = {name.upper(): value for name in _FIELDS if (value := getattr(report, name))}
    if report.seconds:
        fields["SECONDS"] = f"{report.seconds:.3f}"
    number = logging.getLevelNamesMapping()[report.level.upper()]
    if log.isEnabledFor(number) and (always or _limits.take(report.event)):
        line(report.event, number, fields)


def say(speaker: str, text: str) -> None:
    """One line of a worker or a fork server; one of ctx.log names its task."""
    number = _LEVEL_SAID.get(text.partition(" ")[0], logging.INFO)
    if log.isEnabledFor(number):
        fields = {"EVENT": "worker.output", "POOL": speaker.partition("/")[0]}
        if "/" in speaker:
            fields["WORKER"] = speaker
        if found := _OF_TASK.match(text):
            fields["TASK"] = found[1]
        log.log(number, "%s", printable(text, keep="\t"), extra={"fields": fields})
