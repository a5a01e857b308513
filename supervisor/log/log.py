"""The log: the text of each event, and how many lines of each kind are written.

A line is a constant message plus fields, for the journal, a terminal and a file alike. formats.py
makes lines of records; writer.py writes them without delaying the loop.
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

# Of each kind of event. Enough for a fleet of 200 that starts or falls; not for a storm.
LINES_PER_SECOND = 20
LINES_BURST = 500
TRACEBACK_CHARS_MAX = 4000  # in the log: the end, which names the line that raised
# These events are rare, or have limits of their own.
UNLIMITED = frozenset({"cleanup.output", "worker.flood", "tasks.finished", "log.limited"})

log = logging.getLogger("musterd")

# The text of a log line for each event; an event that is missing here is shown by its name.
MESSAGES = {
    "daemon.starting": "musterd is starting",
    "daemon.ready": "musterd is ready",
    "daemon.stopped": "musterd has stopped",
    "daemon.state": "state",
    "daemon.thread": "a thread has ended: the daemon ends with it",
    "log.limited": "too many log lines of one kind: the rest were dropped",
    LEFT_OUT: LEFT_OUT_MESSAGE,
    "config.reloaded": "the configuration was read again",
    "config.refused": "the configuration is wrong: nothing changed",
    "pool.rolling": "the workers of a pool are being replaced",
    "pool.rolled": "the workers of a pool were replaced",
    "pool.roll_failed": "the workers of a pool were not replaced",
    "pool.added": "pool was added",
    "pool.removed": "pool was removed",
    "loop.slow": "a turn of the loop was slow",
    "client.malformed": "dropped a malformed message from a client",
    "client.dropped": "a client was disconnected; it may reconnect",
    "worker.malformed": "dropped a malformed message on workers.sock",
    "workers.waiting": "workers wait to connect: no descriptors or no memory left",
    "tasks.finished": "more tasks finished",
    "task.queued": "task was submitted",
    "task.recovered": "task was recovered from the store and queued again",
    "task.withdrawn": "task was refused: the store could not take it",
    "task.started": "task was dispatched to a worker",
    "task.waiting": "task waits",
    "task.deadlock": "task waits for tasks that can never run: it gets an error",
    "task.crashed": "task lost its worker and is queued again",
    "task.succeeded": "task has succeeded",
    "task.failed": "task is dead: it is not retried",
    "task.refused": "task ended at once: its site is shut",
    "task.cancelled": "task is cancelled",
    "task.expired": "task has expired",
    "alerts.ready": "the alerts process is up",
    "alerts.crashed": "the alerts process ended: it is restarted",
    "alerts.fatal": "the alerts process cannot be used: it is not restarted",
    "events.ready": "events are published",
    "events.crashed": "the event publisher ended: it is restarted",
    "events.fatal": "events cannot be published: not retried before the next reload",
    "web.ready": "the web process is listening",
    "web.crashed": "the web process ended: it is restarted",
    "web.fatal": "the web process cannot be used: not restarted before the next reload",
    "cluster.ready": "the cluster sidecar is up",
    "cluster.crashed": "the cluster sidecar ended: it is restarted, clients wait, tasks run on",
    "cluster.fatal": "the cluster cannot be used: submits are refused until a reload or restart",
    "cluster.joined": "this node is a member of the cluster",
    "cluster.draining": "this node is drained by the cluster: it gets no more of its tasks",
    "cluster.resumed": "this node gets tasks of the cluster again",
    "cluster.away": "a call of the cluster's database failed: it is made again",
    "cluster.back": "the cluster's database answers again",
    "cluster.unreachable": "the cluster's database does not answer: submits are refused, "
    "running tasks go on, results are kept",
    "cluster.reachable": "the cluster's database answers again: submits are accepted",
    "cluster.lease_over": "the lease of this node is over: no task of the cluster begins here",
    "cluster.fenced": "the cluster has given this node up: what it ran does not count",
    "cluster.locks_over": "the lease of this node is over: others may get the locks of its tasks",
    "cluster.locks_lost": "the cluster has given this node up: its tasks have lost their locks",
    "cluster.released": "tasks that were granted in a lost answer went back to the cluster",
    "cluster.refused": "the cluster's database refused a call",
    "cluster.failing": "a kind of call fails again and again at the cluster's database",
    "cluster.name_taken": "another node of the cluster has this node's name",
    "cluster.copied": "state_dir is a copy: this node has an identity of its own from now on",
    "cluster.local_only": "there is no cluster sidecar: only local pools are served",
    "cluster.serves": "the cluster sidecar serves clients again",
    "cluster.warning": "the cluster's database could lose what was acknowledged",
    "cluster.node_lost": "a node of the cluster was lost: its tasks run elsewhere",
    "cluster.node_back": "a lost node of the cluster is back",
    "cluster.vacuum_stalled": "a transaction is left open in the cluster's database: dead rows "
    "pile up and claims get slower; end it (pg_stat_activity)",
    "cluster.vacuum_resumed": "the cluster's database can remove dead rows again",
    "cluster.malformed": "dropped a malformed message on node.sock",
    "cluster.waiting": "the cluster sidecar waits to connect: no descriptors or no memory left",
    "worker.ready": "worker is ready",
    "worker.crashed": "worker crashed",
    "worker.hung": "worker hangs",
    "worker.recycled": "worker is recycled",
    "worker.not_recycled": "worker could not be recycled",
    "worker.fatal": "worker keeps failing: not restarted until it is reset",
    "worker.killed": "worker was killed",
    "pool.fatal": "pool cannot start",
    "pool.scaled": "pool was scaled",
    "pool.paused": "pool is paused: tasks wait until it is resumed",
    "pool.drained": "pool is drained: no tasks are run or accepted until it is resumed",
    "pool.resumed": "pool is resumed",
    "worker.paused": "worker is paused: it is given no tasks until it is resumed",
    "worker.drained": "worker is drained: it is given no tasks until it is resumed",
    "worker.resumed": "worker is resumed",
    "forkserver.crashed": "fork server failed",
    "forkserver.threads": "importing the worker class starts threads: each worker imports it anew",
    "worker.resists": "a worker, or a process it left, resists SIGKILL",
    "worker.leftovers": "leftovers of a worker were removed",
    "daemon.leftovers": "leftovers of an earlier supervisor were removed",
    "leftovers.unnoted": "processes that this supervisor leaves if killed will not be found",
    "worker.flood": "a worker writes more than the log takes: lines were dropped",
    "worker.status_taken": "the exit status of a worker's init was taken by somebody else",
    "debug.waiting": "task waits at a breakpoint for a debugger: its timeouts stand",
    "debug.attached": "task is debugged: its timeouts stand",
    "debug.over": "task goes on without a debugger: its timeouts hold again",
    "debug.refused": "breakpoint() was passed over: the task goes on",
    "task.retry": "task will be retried",
    "task.hung": "task hangs",
    "task.progress": "task is under way",
    "task.quarantined": "task is quarantined",
    "task.fallback": "task has failed for good and uses its fallback",
    "task.stranded": "task has no pool; it is kept",
    "task.changed": "the result of a scheduled task has changed",
    "watch.stale": "runs of a watching schedule fail: nobody would be told of a change",
    "watch.recovered": "a watching schedule has results again",
    "cluster.policy_differs": "configuration differs from the policy of the cluster, which holds",
    "cluster.policy_missing": "nothing is shared by the cluster: no policy is applied",
    "cluster.policy_unread": "the policy of the cluster cannot be read: the one before holds",
    "schedule.skipped": "runs of a schedule were skipped",
    "schedule.paused": "schedule is paused",
    "schedule.resumed": "schedule is resumed",
    "schedule.reset": "schedule starts over",
    "schedule.put": "schedules were added or changed at run time",
    "schedule.deleted": "schedules of run time were removed",
    "schedule.unusable": "schedules of run time cannot be run",
    "session.held": "logins of a session keep failing: none is tried for a while",
    "session.resumed": "a session may log in again",
    "session.no_key": "sessions have no key: tasks with a session fail",
    "session.no_login": "the login task of a session is not accepted",
    "breaker.open": "breaker open: the site keeps failing and gets no tasks",
    "breaker.half_open": "breaker half-open: the site is tried again",
    "breaker.closed": "breaker closed: the site works again",
    "breaker.forced_open": "breaker opened by hand: the site gets no tasks",
    "breaker.disabled": "breaker disabled by hand: failures of the site do not count",
    "memory.warning": "memory is short: the fleet shrinks",
    "memory.critical": "memory is nearly exhausted: one worker per pool is left",
    "memory.sacrifice": "memory stays critical: pools marked as sacrifice get no workers",
    "memory.kill": "memory stays critical: workers that did not stop are killed",
    "memory.recovering": "memory recovers: the fleet grows by one step",
    "memory.normal": "memory is back to normal",
    "memory.held": "workers are held back by memory",
    "memory.unwatched": "memory notifications of systemd cannot be used",
    "machine.statistics": "statistics",
    "store.failing": "the store cannot write: nothing is acknowledged until it can",
    "clock.doubted": "the clock is doubted: nothing is forgotten because of its age",
    "clock.trusted": "the clock is plausible again",
    "clock.accepted": "the clock was confirmed by an operator",
    "clock.stepped": "the clock was set: nothing is forgotten because of its age for an hour",
    "clock.unreadable": "the last noted time cannot be read",
    "leftovers.unread": "the note of an earlier supervisor cannot be read",
    "leftovers.group": "a control group of an earlier supervisor is left",
    "store.lost": "the store's files are not where they were",
    "store.rewritten": "the store was written anew: nothing is lost",
    "store.recovered": "the store can write again",
    "memory.unreadable": "memory cannot be measured",
    "door.shut": "descriptors are short: clients are disconnected and wait",
    "door.open": "descriptors are available again: clients are accepted",
    "sockets.lost": "a socket is gone: restart to make it again",
    "daemon.unclean": "a step of the shutdown failed",
    "task.interrupted": "task was interrupted and is queued again",
    "shutdown.phase": "shutdown",
    "cleanup.output": "output of a clean-up",
    "cleanup.done": "clean-up is done",
    "cleanup.failed": "clean-up failed",
    "shutdown.kill": "shutdown: killing what is left",
}
_FIELDS = (
    *("pool", "worker", "task", "attempt", "target", "phase", "cause", "reason"),
    *("schedule", "session", "count", "digest", "summary", "output", "node"),
)
# A line of a worker that begins with a level has that level, and does not say it twice.
_LEVEL_SAID = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:[: ]\s*(.*))?", re.DOTALL)
# What follows the level in the format of workers/runtime/speech.py: logger, task, message.
_LOGGED = re.compile(r"(\S+) \[([^\]\s]{1,64})\] (.*)", re.DOTALL)
_OF_TASK = "musterd.task"  # logger of ctx.log


class _Limits:
    """Limits the lines of each kind; lines beyond are counted, and the count is logged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # our threads write lines too
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
        """Return how many lines were left out since the last call, by event."""
        with self._lock:
            found, self._left_out = self._left_out, {}
        return found


_limits = _Limits()
_developing = False  # somebody writes these workers just now


def configure(
    level: str, log_file: str = "", log_format: str = AUTO, *, developing: bool = False
) -> None:
    """Set up logging for the daemon; `developing`: a task's first failure has its traceback."""
    global _developing
    _developing = developing
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
    """Set the minimum log level."""
    log.setLevel(level.upper())


def note(event: str, level: str = "info", **fields: object) -> None:
    """Log one line with these fields, unless there are too many of its kind."""
    number = logging.getLevelNamesMapping()[level.upper()]
    if log.isEnabledFor(number) and _limits.take(event):
        line(event, number, {key.upper(): value for key, value in fields.items()})


def line(event: str, level: int, fields: dict[str, object], *, traceback: str = "") -> None:
    """Log one line without a limit: the caller has a limit of its own. A traceback follows it."""
    extra: dict[str, object] = {"fields": {"EVENT": event, **fields}}
    if traceback:
        extra["traceback"] = traceback[-TRACEBACK_CHARS_MAX:].rstrip()
    log.log(level, MESSAGES.get(event, event), extra=extra)


def has_room(event: str) -> bool:
    """Tell whether one more line of this kind may be logged; if not, count it."""
    return _limits.take(event)


def tell_left_out() -> None:
    """Log, once a second, how many lines of which kinds were left out."""
    for event, count in _limits.left_out().items():
        note("log.limited", "warning", kind=event, count=count)


def write(report: Report, *, always: bool = False) -> None:
    """Log one line for a report; `always`: without a limit, as part of the story of a task."""
    fields = {name.upper(): value for name in _FIELDS if (value := getattr(report, name))}
    if report.seconds:
        fields["SECONDS"] = f"{report.seconds:.3f}"
    number = logging.getLevelNamesMapping()[report.level.upper()]
    if log.isEnabledFor(number) and (always or _limits.take(report.event)):
        # An attempt that is tried again is worth its traceback to those who look closely.
        close = number >= logging.WARNING or log.isEnabledFor(logging.DEBUG)
        close = close or (_developing and report.attempt == 1)
        line(report.event, number, fields, traceback=report.traceback if close else "")


def say(speaker: str, text: str, task: str = "", level: str = "") -> None:
    """Log one line of a worker or a fork server, which is said by this task at this level.

    What the line itself says of both becomes its level and its field.
    """
    if said := _LEVEL_SAID.fullmatch(text):
        level, text = said[1], said[2] or text
        if logged := _LOGGED.fullmatch(text):
            logger, named, message = logged.groups()
            task = task if named == "-" else named
            text = message if logger == _OF_TASK else f"{logger}: {message}"
    number = getattr(logging, level or "INFO")
    if log.isEnabledFor(number):
        fields = {"EVENT": "worker.output", "POOL": speaker.partition("/")[0]}
        if "/" in speaker:
            fields["WORKER"] = speaker
        if task:
            fields["TASK"] = task
        log.log(number, "%s", printable(text, keep="\t"), extra={"fields": fields})
