"""The alerts process: follows the daemon's events and sends messages about them.

    python -m musterd.supervisor.alerts PARENT BEAT_FD     AlertSettings on standard input, as JSON

The process is a client of control.sock: it notices a daemon that hangs, which is an alert too.
alerts/rules.py decides what to send, and when; a courier, a process for each message, delivers it.
A small file records what was sent: no restart, of the daemon or of this process, forgets a message.
It is written before a message is sent, so that one that may come twice says so. Changes are also
looked up in the daemon's history, whenever the stream of events begins: none is missed.

The process outlives a daemon that is killed, to report it. It stays for ORPHAN_NS, or until another
daemon runs, which has an alerts process of its own.
"""

import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

import msgspec
from msgspec import Raw

from musterd.supervisor.alerts.changes import Change
from musterd.supervisor.alerts.contents import URL, WAIT_NS, Contents, change_of
from musterd.supervisor.alerts.courier import Outcome, problem_of
from musterd.supervisor.alerts.couriers import Couriers
from musterd.supervisor.alerts.kinds import CHANGED, KINDS, Happening, Survey, matching
from musterd.supervisor.alerts.link import Asking, Following, Gone
from musterd.supervisor.alerts.rules import Alerting, Message, Stage
from musterd.supervisor.alerts.saved_state import SavedState, StateFile
from musterd.supervisor.alerts.settings import AlertSettings
from musterd.supervisor.alerts.surveying import Surveyor
from musterd.supervisor.api import rpc
from musterd.supervisor.api.alerts import AlertsStatus, AlertStatus, OpenAlert
from musterd.supervisor.api.history import ChangeList
from musterd.supervisor.api.status import VersionResult

SECOND_NS = 1_000_000_000
CONNECT_NS = SECOND_NS  # between attempts
PING_NS = 3 * SECOND_NS
SILENT_NS = 15 * SECOND_NS  # without an answer, until the daemon counts as silent
SURVEY_NS = 20 * SECOND_NS  # between surveys, while a condition holds
KEEP_NS = SECOND_NS  # between writes to the file, and reports to the daemon
BEAT_NS = 3 * SECOND_NS
LOCK_SECONDS = 0.1  # between attempts to lock the file
STOP_NS = 2 * SECOND_NS  # for messages under way at the end
ORPHAN_NS = 60 * SECOND_NS
OPEN_SHOWN_MAX = 50  # of one alert, in `musterctl alerts`
QUESTIONS_MAX = 20  # unanswered requests, until the daemon gets no more
MARGIN_SECONDS = 5.0  # while connected, older events have been seen
PASS_BY_SECONDS = 60.0  # between notes of that in the file
TEST = "alert.test"  # an event that requests a test message
LIST_NS = 15 * SECOND_NS  # for the list of changes, until it is asked for again
HELD_MAX = rpc.LIST_MAX  # changes that are told meanwhile; of more, the list is asked for again


class AlertProcess:
    def __init__(self, settings: AlertSettings, parent: int, beat_fd: int) -> None:
        self._settings = settings
        self._parent = parent
        self._beat_fd = beat_fd
        self._selector = selectors.DefaultSelector()
        self._couriers = Couriers(self._selector, socket.gethostname(), settings.pictures)
        self._alerting = Alerting(settings.rules)
        self._file = StateFile(settings.state_file)
        self._saved: SavedState | None = None
        self._asking: Asking | None = None
        self._following: Following | None = None
        self._surveyor = Surveyor(self._surveyed)
        self._contents: list[Contents] = []  # of messages that are about to be sent
        self._follows_changes = CHANGED in self._kinds()
        self._list_wanted = False  # of changes: some may have been missed
        self._list_ns = 0  # when it may be asked for
        self._held: list[Change] | None = None  # told while the list is on its way
        now_ns = time.monotonic_ns()
        self._connect_ns = self._ping_ns = self._survey_ns = self._beat_ns = 0
        self._answered_ns = now_ns
        self._silent = False
        self._skip = 0  # events of time seen_at that an earlier process has seen
        self._kept_ns = 0
        self._dirty = self._untold = True
        self._file_problem = ""
        self._problems: dict[str, str] = {}  # of destinations, before the first message
        self._stop_ns: int | None = None
        self._flushed = False  # all messages were tried once more before the end
        self._orphan_ns: int | None = None
        self._over = False

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        self._watch_signals()
        self._watch_parent()
        while not self._file.lock():  # the process of a killed daemon is about to end
            if self._stop_ns is not None:
                return
            self._beat(time.monotonic_ns())
            time.sleep(LOCK_SECONDS)
        self._remember()
        self._look_at_destinations()
        self._beat(time.monotonic_ns())
        while not self._over:
            for key, _ in self._selector.select(self._sleep_seconds()):
                key.data()
            self._turn(time.monotonic_ns())
        self._couriers.close()
        self._keep()
        self._file.close()

    def _look_at_destinations(self) -> None:
        """Say at once, and not with the first message, that nothing can be delivered."""
        for name, destination in self._settings.destinations.items():
            if problem := problem_of(destination):
                self._problems[name] = problem
                say("WARNING", f"alert {name}: nothing can be delivered: {problem}")

    def _sleep_seconds(self) -> float:
        now_ns = time.monotonic_ns()
        due = [self._beat_ns]
        due += [
            each for each in (self._stop_ns, self._couriers.next_deadline()) if each is not None
        ]
        due += [each.deadline_ns for each in self._contents]
        wake_ns = self._alerting.next_wake()
        if wake_ns is not None:
            due.append(wake_ns)
        if self._dirty or self._untold:
            due.append(self._kept_ns + KEEP_NS)
        if not self._silent:
            due.append(self._answered_ns + SILENT_NS)
        if self._asking is not None:
            due.append(self._ping_ns)
            if self._list_wanted:
                due.append(self._list_ns)
            if self._surveys:
                due.append(self._survey_ns)
        if self._asking is None or self._following is None:
            due.append(self._connect_ns)
        return max(0.0, (min(due) - now_ns) / 1e9)

    def _turn(self, now_ns: int) -> None:
        if self._beat_ns <= now_ns:
            self._beat(now_ns)
        self._connect(now_ns)
        self._ping(now_ns)
        self._listen(now_ns)
        self._list_changes(now_ns)
        last = self._stop_ns is not None and not self._flushed
        self._flushed = self._flushed or last
        messages = self._alerting.turn(now_ns, time.time(), at_once=last)
        if messages:
            self._untold = True
            self._keep()  # before they are sent: a message that comes twice is marked
        for message in messages:
            self._fetch(now_ns, message)
        for contents in list(self._contents):
            if now_ns >= contents.deadline_ns or last:
                contents.finish()
        self._couriers.turn(now_ns)
        if (self._dirty or self._untold) and now_ns >= self._kept_ns + KEEP_NS:
            self._kept_ns = now_ns
            self._keep()
            self._tell_daemon()
        self._leave(now_ns)

    def _leave(self, now_ns: int) -> None:
        if self._stop_ns is not None:
            # Undelivered messages are in the file: the next process delivers them.
            self._over = now_ns >= self._stop_ns or not (self._couriers.busy or self._contents)
        elif self._orphan_ns is not None and now_ns >= self._orphan_ns + ORPHAN_NS:
            self._over = not self._couriers.busy

    # -- signals and the parent ---------------------------------------------------------------

    def _watch_signals(self) -> None:
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        self._sockets = (wake, woken)  # kept: closing them would end the wake-ups

        def stop(_number: int, _frame: object) -> None:
            if self._stop_ns is None:
                self._stop_ns = time.monotonic_ns() + STOP_NS
                self._dirty = True

        signal.signal(signal.SIGTERM, stop)
        signal.set_wakeup_fd(wake.fileno())
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(64))

    def _watch_parent(self) -> None:
        try:
            pidfd = os.pidfd_open(self._parent)
        except ProcessLookupError:
            self._orphan_ns = time.monotonic_ns()
            return

        def gone() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._orphan_ns = time.monotonic_ns()
            self._ping_ns = 0

        self._selector.register(pidfd, selectors.EVENT_READ, gone)
        if os.getppid() != self._parent:  # the pid is another process's by now
            gone()

    def _beat(self, now_ns: int) -> None:
        self._beat_ns = now_ns + BEAT_NS
        try:
            os.write(self._beat_fd, b"\n")
        except (BlockingIOError, BrokenPipeError):  # the daemon hangs, or has ended
            return

    # -- the daemon ---------------------------------------------------------------------------

    def _connect(self, now_ns: int) -> None:
        if self._asking is not None and self._asking.gone:
            self._asking = None
        if self._following is not None and self._following.gone:
            self._following = None
        if now_ns < self._connect_ns or (self._asking and self._following):
            return
        self._connect_ns = now_ns + CONNECT_NS
        try:
            if self._asking is None:
                self._asking = Asking(self._settings.control_socket, self._selector)
                self._ping_ns = 0
            if self._following is None and self._orphan_ns is None:
                self._following = Following(
                    self._settings.control_socket,
                    self._selector,
                    rpc.Events(follow=True, kinds=self._kinds(), limit=rpc.LIST_MAX),
                    self._event,
                    self._caught_up,
                )
        except Gone:
            return  # reported when the daemon has been silent for SILENT_NS

    def _kinds(self) -> list[str]:
        """Return the events that rules want, and those that end them."""
        wanted = {kind for rule in self._settings.rules for kind in matching(rule.on)}
        ends = {end for kind in wanted for end in KINDS[kind].ends}
        return sorted({*wanted, *ends, TEST})

    def _ping(self, now_ns: int) -> None:
        asking = self._asking
        if asking is None or asking.gone:
            return
        if now_ns >= self._ping_ns:
            self._ping_ns = now_ns + (CONNECT_NS if self._orphan_ns is not None else PING_NS)
            if asking.idle:
                asking.ask(rpc.Version(), self._answered)
        if now_ns >= self._survey_ns and self._surveys:
            self._survey(now_ns)

    def _answered(self, result: Raw) -> None:
        now_ns = time.monotonic_ns()
        self._answered_ns = now_ns
        self._pass_by(time.time() - MARGIN_SECONDS)
        pid = msgspec.json.decode(result, type=VersionResult).pid
        if self._orphan_ns is not None:
            self._over = pid != self._parent  # another daemon has its own alerts process
        elif self._silent:
            self._silent = False
            self._happened(Happening("daemon.answers", at=time.time()))

    def _listen(self, now_ns: int) -> None:
        """Notice a daemon that is silent."""
        if self._silent or self._stop_ns is not None or now_ns < self._answered_ns + SILENT_NS:
            return
        self._silent = True
        why = "it was killed" if self._orphan_ns is not None else "it hangs or is not running"
        text = f"no answer for {SILENT_NS // SECOND_NS} s: {why}"
        self._happened(Happening("daemon.silent", text=text, at=time.time()))

    def _caught_up(self) -> None:
        """Survey the daemon when the stream of events has begun."""
        self._survey(time.monotonic_ns())
        self._list_wanted, self._list_ns = self._follows_changes, 0
        self._untold = True

    @property
    def _surveys(self) -> bool:
        return self._alerting.holding and self._orphan_ns is None

    def _survey(self, now_ns: int) -> None:
        self._survey_ns = now_ns + SURVEY_NS
        asking = self._asking
        if asking is not None and not asking.gone and asking.waiting < QUESTIONS_MAX:
            self._surveyor.ask(asking)

    def _surveyed(self, survey: Survey, pid: int, started: float) -> None:
        now_ns, saved = time.monotonic_ns(), self._saved
        assert saved is not None
        if self._orphan_ns is not None:
            return  # this may be another daemon
        self._answered_ns, self._silent = now_ns, False
        another = pid != saved.daemon_pid or abs(started - saved.daemon_started) > 2
        if saved.daemon_pid and another and not saved.stopped:
            self._happened(Happening("daemon.crashed", at=time.time()))
        self._dirty = self._dirty or another or self._alerting.holding
        saved.daemon_pid, saved.daemon_started, saved.stopped = pid, started, False
        self._alerting.surveyed(now_ns, survey, time.time())

    # -- events -------------------------------------------------------------------------------

    def _event(self, fields: dict[str, Any], before: bool) -> None:
        saved = self._saved
        assert saved is not None
        if "dropped" in fields:
            self._survey(time.monotonic_ns())
            self._list_wanted = self._follows_changes
            return
        if fields.get("event") == TEST:
            if not before:
                self._test(str(fields.get("reason", "")), str(fields.get("digest", "")))
            return
        if before and fields.get("event") == CHANGED and fields.get("number"):
            return  # the list of changes has it
        at, seen_at = float(fields.get("at", 0.0)), saved.seen_at
        first = before and saved.daemon_pid == 0  # events before our first start are history
        known = before and (at < seen_at or (at == seen_at and self._skip > 0))
        if known:
            self._skip -= at == seen_at
            return
        saved.seen_count = saved.seen_count + 1 if at == seen_at else 1
        saved.seen_at = at
        if first or not is_alerted_here(fields):
            return
        if fields.get("event") == CHANGED:
            self._changed(told_change(fields))
        else:
            self._happened(happening(fields))

    def _pass_by(self, at: float) -> None:
        """Mark the daemon's earlier events as seen: rules added later must not report them."""
        saved = self._saved
        if saved is not None and self._following and at > saved.seen_at + PASS_BY_SECONDS:
            saved.seen_at, saved.seen_count, self._dirty = at, 0, True

    def _happened(self, event: Happening) -> None:
        self._alerting.happened(time.monotonic_ns(), event)
        self._dirty = self._untold = True

    # -- changes ------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        if self._held is None:
            self._alerting.changed(change)
            self._dirty = self._untold = True
        elif len(self._held) < HELD_MAX:
            self._held.append(change)
        else:
            self._list_wanted = True

    def _list_changes(self, now_ns: int) -> None:
        """Ask for the changes of all schedules, if some may have been missed."""
        asking = self._asking
        self._list_wanted = self._list_wanted or self._alerting.catches_up
        if not self._list_wanted or now_ns < self._list_ns or asking is None or asking.gone:
            return
        self._list_ns = now_ns + LIST_NS
        self._release()  # the list before did not come
        held: list[Change] = []
        self._held = held  # told after those that the list has, which are older

        def listed(result: Raw) -> None:
            if self._held is held:
                self._list_wanted = False
                found = msgspec.json.decode(result, type=ChangeList).changes
                self._alerting.listed([change_of(each) for each in found])
                self._release()

        asking.ask(rpc.ListChanges(limit=rpc.LIST_MAX, brief=True), listed)

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for change in held:
            self._alerting.changed(change)
        self._dirty = self._untold = True

    # -- messages -----------------------------------------------------------------------------

    def _fetch(self, now_ns: int, message: Message) -> None:
        """Send a message when the daemon has told what it leaves out, or takes too long."""

        def then(whole: Message) -> None:
            self._contents.remove(contents)
            self._send(time.monotonic_ns(), whole)

        urls = URL in self._settings.destinations[message.rule].placeholders
        contents = Contents(message, now_ns + WAIT_NS, then, urls=urls)
        self._contents.append(contents)
        contents.ask(self._asking if self._orphan_ns is None else None)

    def _send(self, now_ns: int, message: Message) -> None:
        destination = self._settings.destinations[message.rule]

        def then(outcome: Outcome) -> None:
            error = outcome.error
            self._dirty = self._untold = True
            self._problems.pop(message.rule, None)
            if not error:
                self._alerting.delivered(message.rule, time.time())
                self._keep()  # at once, so that the message is not sent again
                return
            self._alerting.failed(time.monotonic_ns(), message.rule, error, outcome.arrived)
            attempts = self._alerting.states[message.rule].attempts
            say("ERROR", f"alert {message.rule}: delivery attempt {attempts} failed: {error}")

        self._couriers.send(now_ns, message, destination, then)

    def _test(self, name: str, token: str) -> None:
        destination = self._settings.destinations.get(name)

        def then(outcome: Outcome) -> None:
            if not outcome.error:
                self._problems.pop(name, None)
            if self._asking is not None and not self._asking.gone:
                tested = rpc.TestedAlert(token=token, error=outcome.error)
                self._asking.ask(tested, lambda _: None)

        if destination is None:
            then(Outcome(f"no such alert: {name!r}"))
            return
        message = Message(name, 0, time.time(), test=True)
        self._couriers.send(time.monotonic_ns(), message, destination, then)

    # -- the file, and reports to the daemon --------------------------------------------------

    def _remember(self) -> None:
        found, problem = self._file.load()
        if problem:
            say("WARNING", problem)
        now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        self._saved = SavedState(wall_ns=wall_ns, now_ns=now_ns) if found is None else found
        self._skip = self._saved.seen_count
        if found is not None:
            passed_ns = now_ns - found.now_ns - max(0, wall_ns - found.wall_ns)
            self._alerting.restore(found.rules, passed_ns)
        self._alerting.begin(wall_ns / 1e9)

    def _keep(self) -> None:
        saved = self._saved
        assert saved is not None
        self._dirty = False
        saved.wall_ns, saved.now_ns = time.time_ns(), time.monotonic_ns()
        saved.rules = self._alerting.states
        saved.stopped = saved.stopped or self._stop_ns is not None
        problem = self._file.save(saved)
        if problem and problem != self._file_problem:
            say("ERROR", problem)
        self._file_problem = problem

    def _tell_daemon(self) -> None:
        if self._orphan_ns is not None:
            return  # our daemon has ended
        if self._asking is not None and not self._asking.gone and self._asking.idle:
            self._untold = False
            self._asking.ask(rpc.ReportAlerts(status=self._status()), lambda _: None)

    def _status(self) -> AlertsStatus:
        alerts = []
        for name, state in self._alerting.states.items():
            shown = [each for each in state.incidents if each.stage != Stage.QUIET]
            waiting = state.changes.pending
            error = state.error
            if not error and name in self._problems:  # it may have been mended since
                error = problem_of(self._settings.destinations[name])
            alerts.append(
                AlertStatus(
                    name=name,
                    destination=self._settings.destinations[name].shown,
                    state="failing" if error else "sending" if state.message else "idle",
                    open=[
                        OpenAlert(
                            kind=each.kind,
                            subject=each.subject,
                            stage=each.stage,
                            since=each.since,
                            times=each.times,
                            text=each.text,
                        )
                        for each in shown[:OPEN_SHOWN_MAX]
                    ]
                    + [
                        OpenAlert(
                            kind=CHANGED,
                            subject=each.schedule,
                            stage=Stage.DUE,
                            since=each.at,
                            text=each.summary,
                        )
                        for each in waiting[: max(0, OPEN_SHOWN_MAX - len(shown))]
                    ],
                    sent=state.sent,
                    failures=state.failures,
                    lost=state.lost,
                    sent_at=state.sent_at or None,
                    error=error,
                )
            )
        return AlertsStatus(alerts=alerts, pid=os.getpid())


def is_alerted_here(fields: dict[str, Any]) -> bool:
    """Whether this process tells people: of what all nodes of a cluster report, one tells."""
    return fields.get("event") in KINDS and not fields.get("elsewhere")


def happening(fields: dict[str, Any]) -> Happening:
    """Return an event of the stream, reduced to what alerts need."""
    kind = str(fields["event"])
    texts = [str(fields.get(name, "")) for name in ("task", "target", "phase", "reason")]
    if KINDS[kind].subject == "target":
        texts[1] = ""
    return Happening(
        kind,
        str(fields.get("pool", "")),
        str(fields.get("worker", "")),
        str(fields.get("target", "")),
        str(fields.get("schedule", "")),
        " ".join(" ".join(texts).split()),
        float(fields.get("at", 0.0)),
        max(1, int(fields.get("count", 1))) if kind == "task.dead" else 1,
        str(fields.get("node", "")),
        str(fields.get("session", "")),
    )


def told_change(fields: dict[str, Any]) -> Change:
    """Return the change that an event of the stream tells."""
    return Change(
        str(fields.get("schedule", "")),
        int(fields.get("number", 0)),
        float(fields.get("changed_at") or fields.get("at", 0.0)),
        str(fields.get("task", "")),
        str(fields.get("digest", "")),
        str(fields.get("summary", "")),
        fields.get("before"),
        fields.get("after"),
        "before" not in fields or "after" not in fields,
        str(fields.get("pool", "")),
    )


def say(level: str, text: str) -> None:
    """Write a line for the daemon's log, which reads the level from its first word."""
    try:
        print(f"{level} {text}", file=sys.stderr, flush=True)
    except (BrokenPipeError, BlockingIOError):  # the daemon has ended
        return
