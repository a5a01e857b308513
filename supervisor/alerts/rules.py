"""Decide which messages `[[alerts]]` send, and when.

Each rule keeps one *incident* per kind of event and subject ("breaker.open", "site.example"):

    (nothing) ──► WAITING ──────────► DUE ──── told ────► TOLD ──── over ────► ENDING
                  for how long   ▲     │ came and went:     │                    │ told
                  does it hold?  │     ▼ told as that       │ resolved = false   ▼
                              MUTED ◄── again, too soon ── QUIET ◄───────────────┘

    WAITING  the condition holds, but not yet for the rule's `for`; if it ends, it is forgotten
    DUE      is reported with the rule's next message
    TOLD     was reported and still holds; recurrences are counted, and reported after `every`
    ENDING   its end is reported with the next message, unless it comes back before
    QUIET    was reported and is over; kept for `every`, so that flapping is reported rarely
    MUTED    came back within `every`: reported after that, with a count, if it holds or has no end

A rule has one message at a time: incidents that become due while it is under way, or cannot be
delivered, are reported together in the next. Nothing piles up, however long nobody is reachable,
and a subject is reported at most twice in `every`: its beginning and its end. Many subjects in a
row make few messages: the pause between messages grows.

A change (`task.changed`) is no incident. Each is told, whatever `every` says, with those that came
within `group` (alerts/changes.py).

Time is given: `now_ns` decides, wall-clock times (`at`) are only shown.
"""

from enum import StrEnum
from fnmatch import fnmatchcase

from msgspec import Struct, field, structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.alerts.changes import Change, ChangeState
from musterd.supervisor.alerts.kinds import (
    CHANGED,
    ENDED_BY,
    KINDS,
    Finding,
    Happening,
    Survey,
    matching,
)

# Incidents of one rule. Further subjects are only counted.
INCIDENTS_MAX = 500
# Lines of one message: a phone shows no more, and Telegram takes 4096 characters.
LINES_MAX = 10
CHANGES_MAX = 50  # of one message; the next has the others
TEXT_CHARS_MAX = 300
RETRY_NS = 5 * SECOND_NS  # after the first failure; doubled with each further one
RETRY_NS_MAX = 600 * SECOND_NS
# Pause between messages of a rule that follow each other closely; it doubles with each.
PACE_NS_MIN = SECOND_NS // 2
PACE_NS_MAX = 600 * SECOND_NS
PACE_CHANGES_NS_MAX = 60 * SECOND_NS  # people wait for them
STORM_GAPS = 10  # closely: within this many pauses
GIVE_UP_NS = 24 * 3600 * SECOND_NS  # older messages help nobody


class Rule(Struct, frozen=True):
    name: str
    on: tuple[str, ...]  # names and globs of events
    pools: tuple[str, ...] = ()  # globs; empty: any pool, or none
    targets: tuple[str, ...] = ()
    for_ns: int = 0
    group_ns: int = 10 * SECOND_NS
    every_ns: int = 3600 * SECOND_NS
    resolved: bool = True


class Stage(StrEnum):
    WAITING = "waiting"
    DUE = "due"
    TOLD = "told"
    ENDING = "ending"
    QUIET = "quiet"
    MUTED = "muted"


class Incident(Struct):
    kind: str
    subject: str
    stage: Stage
    since: float  # wall-clock time
    began_ns: int
    text: str = ""
    times: int = 0  # occurrences not reported yet
    holds: bool = False
    told_ns: int | None = None
    last_ns: int = 0  # last occurrence, or end
    over_at: float = 0.0  # wall-clock time
    opened: bool = False  # its beginning was reported, its end not yet


class Line(Struct, frozen=True):
    """One incident in a message."""

    kind: str
    subject: str
    text: str = ""
    since: float = 0.0
    over_at: float = 0.0  # 0: it holds, or has no end
    times: int = 1


class Message(Struct, frozen=True):
    rule: str
    number: int
    at: float
    began: list[Line] = []
    ended: list[Line] = []
    more: int = 0  # incidents beyond LINES_MAX
    made_ns: int = 0
    test: bool = False
    changes: list[Change] = []
    again: bool = False  # a process died while it was sent: it may have arrived

    def without(self, count: int) -> "Message":
        """Return what is left of the message when its first lines have arrived."""
        began = max(0, count - len(self.changes))
        ended = max(0, began - len(self.began))
        return structs.replace(
            self,
            changes=self.changes[count:],
            began=self.began[began:],
            ended=self.ended[ended:],
        )


class RuleState(Struct):
    """The state of a rule."""

    incidents: list[Incident] = []
    others: int = 0  # occurrences beyond INCIDENTS_MAX, not reported yet
    batch_ns: int | None = None  # since when something is due
    number: int = 0  # of the last message
    made_ns: int = 0  # time of the last message
    pace_ns: int = 0  # minimum pause after the last message
    message: Message | None = None  # being delivered
    flying: bool = False  # a courier has it
    attempts: int = 0  # failed attempts for that message
    retry_ns: int = 0
    sent: int = 0
    failures: int = 0
    lost: int = 0  # messages given up
    sent_at: float = 0.0
    error: str = ""  # of the last attempt, "" if it succeeded
    changes: ChangeState = field(default_factory=ChangeState)


class _ActiveRule:
    """One rule and its incidents."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.kinds = frozenset(matching(rule.on))
        self.state = RuleState()
        self.incidents: dict[tuple[str, str], Incident] = {}

    def wants(self, event: Happening) -> bool:
        rule = self.rule
        return (
            event.kind in self.kinds
            and (not rule.pools or any(fnmatchcase(event.pool, each) for each in rule.pools))
            and (not rule.targets or any(fnmatchcase(event.target, each) for each in rule.targets))
        )

    def wants_change(self, change: Change) -> bool:
        return self.wants(Happening(CHANGED, pool=change.pool, schedule=change.schedule))

    # -- events -------------------------------------------------------------------------------

    def happened(self, now_ns: int, event: Happening) -> None:
        kind = KINDS[event.kind]
        key = (event.kind, event.subject_of(event.kind))
        incident = self.incidents.get(key)
        if incident is None:
            if len(self.incidents) >= INCIDENTS_MAX:
                self.state.others += event.count
                return
            incident = Incident(*key, Stage.QUIET, since=event.at, began_ns=now_ns)
            self.incidents[key] = incident
        incident.text = event.text[:TEXT_CHARS_MAX] or incident.text
        incident.times += event.count
        incident.last_ns = now_ns
        if kind.lasts and not incident.holds:
            incident.holds, incident.since, incident.began_ns = True, event.at, now_ns
            incident.over_at = 0.0
        if incident.stage == Stage.ENDING:
            incident.stage = Stage.TOLD  # it came back before its end was reported
        elif incident.stage == Stage.QUIET:
            incident.since = event.at
            waits = kind.lasts and self.rule.for_ns > 0
            incident.stage = Stage.WAITING if waits else self._due_or_muted(now_ns, incident)

    def over(self, now_ns: int, incident: Incident, at: float) -> None:
        if not incident.holds:
            return
        incident.holds = False
        incident.last_ns = now_ns
        if incident.opened:
            incident.over_at = at
            incident.opened = self.rule.resolved
            incident.stage = Stage.ENDING if self.rule.resolved else Stage.QUIET
        elif incident.stage == Stage.DUE:
            incident.over_at = at  # reported as over
        elif incident.stage == Stage.WAITING:
            if incident.told_ns is None:
                del self.incidents[incident.kind, incident.subject]  # it did not last
            else:
                incident.stage = Stage.QUIET

    def _due_or_muted(self, now_ns: int, incident: Incident) -> Stage:
        muted = incident.told_ns is not None and now_ns < incident.told_ns + self.rule.every_ns
        return Stage.MUTED if muted else Stage.DUE

    # -- time ---------------------------------------------------------------------------------

    def turn(self, now_ns: int) -> None:
        """Advance incidents that have waited long enough, and forget old ones."""
        every_ns = self.rule.every_ns
        for key, incident in list(self.incidents.items()):
            if incident.stage == Stage.WAITING and now_ns >= incident.began_ns + self.rule.for_ns:
                incident.stage = self._due_or_muted(now_ns, incident)
            told_ns = incident.told_ns if incident.told_ns is not None else incident.last_ns
            if incident.stage == Stage.MUTED and now_ns >= told_ns + every_ns:
                lasts = KINDS[incident.kind].lasts
                incident.stage = Stage.DUE if incident.holds or not lasts else Stage.QUIET
            elif incident.stage == Stage.TOLD and incident.times and now_ns >= told_ns + every_ns:
                incident.stage = Stage.DUE  # it happened again
            elif (
                incident.stage == Stage.QUIET
                and now_ns >= max(told_ns, incident.last_ns) + every_ns
            ):
                del self.incidents[key]
        if len(self.incidents) >= INCIDENTS_MAX:
            self._make_room()
        if self.state.batch_ns is None and self._has_news():
            self.state.batch_ns = now_ns

    def _make_room(self) -> None:
        """Forget a tenth of the incidents: those that have been over for longest."""
        quiet = [each for each in self.incidents.values() if each.stage == Stage.QUIET]
        quiet.sort(key=lambda each: each.last_ns)
        for incident in quiet[: INCIDENTS_MAX // 10]:
            del self.incidents[incident.kind, incident.subject]

    def _has_news(self) -> bool:
        if self.state.others or self.state.changes.pending:
            return True
        return any(each.stage in (Stage.DUE, Stage.ENDING) for each in self.incidents.values())

    def wake_ns(self) -> int | None:
        """Return when turn() or take() has something to do, None for never."""
        rule, state = self.rule, self.state
        due: list[int] = []
        for incident in self.incidents.values():
            told_ns = incident.told_ns if incident.told_ns is not None else incident.last_ns
            if incident.stage == Stage.WAITING:
                due.append(incident.began_ns + rule.for_ns)
            elif incident.stage == Stage.QUIET:
                due.append(max(told_ns, incident.last_ns) + rule.every_ns)
            elif incident.stage == Stage.MUTED or (incident.stage == Stage.TOLD and incident.times):
                due.append(told_ns + rule.every_ns)
        ripe_ns = self._ripe_ns()
        if ripe_ns is None and self._has_news():
            due.append(0)  # turn() has not noticed yet
        elif state.message is None and ripe_ns is not None:
            due.append(ripe_ns)
        if state.message is not None and not state.flying:
            due.append(state.retry_ns)
        return min(due, default=None)

    def _ripe_ns(self) -> int | None:
        """Return when the next message may be made, None if nothing is due."""
        state = self.state
        if state.batch_ns is None:
            return None
        most_ns = PACE_CHANGES_NS_MAX if state.changes.pending else PACE_NS_MAX
        pause_ns = min(state.pace_ns, max(most_ns, self.rule.group_ns))
        return max(state.batch_ns + self.rule.group_ns, state.made_ns + pause_ns)

    # -- messages -----------------------------------------------------------------------------

    def take(self, now_ns: int, at: float, *, at_once: bool = False) -> Message | None:
        """Return the message to deliver now; delivered() or failed() must follow."""
        state = self.state
        if state.flying:
            return None
        if state.message is not None:
            if now_ns - state.message.made_ns >= GIVE_UP_NS and not state.message.changes:
                state.lost += 1
                state.message = None
            elif now_ns < state.retry_ns and not at_once:
                return None
        if state.message is None:
            ripe_ns = self._ripe_ns()
            if ripe_ns is None or (now_ns < ripe_ns and not at_once):
                return None
            state.message = self._compose(now_ns, at)
            state.attempts = 0
        state.flying = state.message is not None
        return state.message

    def _compose(self, now_ns: int, at: float) -> Message | None:
        state = self.state
        began, ended = [], []
        for incident in self.incidents.values():
            if incident.stage not in (Stage.DUE, Stage.ENDING):
                continue
            line = Line(
                incident.kind,
                incident.subject,
                incident.text,
                incident.since,
                0.0 if incident.holds else incident.over_at,
                max(1, incident.times),
            )
            if incident.stage == Stage.ENDING:
                ended.append(line)
                incident.opened, incident.stage = False, Stage.QUIET
            else:
                began.append(line)
                incident.told_ns = now_ns
                incident.opened = incident.holds
                incident.stage = Stage.TOLD if incident.holds else Stage.QUIET
            incident.times, incident.over_at = 0, 0.0
        more = max(0, len(began) - LINES_MAX) + max(0, len(ended) - LINES_MAX) + state.others
        pending = state.changes.pending
        changes, state.changes.pending = pending[:CHANGES_MAX], pending[CHANGES_MAX:]
        self._set_pace(now_ns, PACE_CHANGES_NS_MAX if changes else PACE_NS_MAX)
        state.batch_ns, state.others = None, 0
        if not began and not ended and not more and not changes:
            return None  # nothing is due any more
        state.number += 1
        return Message(
            self.rule.name,
            state.number,
            at,
            began[:LINES_MAX],
            ended[:LINES_MAX],
            more,
            made_ns=now_ns,
            changes=changes,
        )

    def _set_pace(self, now_ns: int, most_ns: int) -> None:
        """Set the pause after this message: none for a first one, longer for each that follows."""
        state, least_ns = self.state, max(self.rule.group_ns, PACE_NS_MIN)
        gap_ns = now_ns - state.made_ns if state.number else STORM_GAPS * RETRY_NS_MAX
        if gap_ns > STORM_GAPS * max(state.pace_ns, least_ns):
            state.pace_ns = 0
        else:
            state.pace_ns = max(least_ns, min(2 * state.pace_ns, most_ns))
        state.made_ns = now_ns

    def delivered(self, at: float) -> None:
        state = self.state
        state.flying = False
        state.message, state.attempts, state.error = None, 0, ""
        state.sent += 1
        state.sent_at = at

    def failed(self, now_ns: int, why: str, arrived: int) -> None:
        state = self.state
        if state.message is not None and arrived:
            state.message = state.message.without(arrived)
        state.flying = False
        state.error = why
        state.failures += 1
        state.retry_ns = now_ns + min(RETRY_NS << min(state.attempts, 16), RETRY_NS_MAX)
        state.attempts += 1


class Alerting:
    """All rules of the configuration."""

    def __init__(self, rules: list[Rule]) -> None:
        self._rules = {rule.name: _ActiveRule(rule) for rule in rules}

    @property
    def states(self) -> dict[str, RuleState]:
        """Return the state of each rule, to be kept or shown."""
        for rule in self._rules.values():
            rule.state.incidents = list(rule.incidents.values())
        return {name: rule.state for name, rule in self._rules.items()}

    def restore(self, states: dict[str, RuleState], passed_ns: int) -> None:
        """Restore the states of an earlier process, whose clock was `passed_ns` behind ours.

        Incidents that a rule does not want any more are forgotten.
        """
        for name, state in states.items():
            rule = self._rules.get(name)
            if rule is None:
                continue
            moved = [_moved(each, passed_ns) for each in state.incidents if each.kind in rule.kinds]
            rule.incidents = {(each.kind, each.subject): each for each in moved}
            rule.state = state
            if CHANGED not in rule.kinds:
                state.changes = ChangeState()  # a rule that asks for them later begins then
            state.retry_ns = 0  # whoever has mended the destination need not wait
            state.made_ns += passed_ns
            if state.batch_ns is not None:
                state.batch_ns += passed_ns
            if state.message is not None:
                state.message = structs.replace(
                    state.message,
                    made_ns=state.message.made_ns + passed_ns,
                    again=state.message.again or state.flying,
                )
            state.flying = False

    def happened(self, now_ns: int, event: Happening) -> None:
        """Open conditions of the event's kind, and end those that it ends."""
        ended = ENDED_BY.get(event.kind, ())
        for rule in self._rules.values():
            told = False
            for kind in ended:
                incident = rule.incidents.get((kind, event.subject_of(kind)))
                if incident is not None:
                    rule.over(now_ns, incident, event.at)
                    told = told or incident.stage == Stage.ENDING
            if rule.wants(event) and not told:  # else its line says that it is over
                rule.happened(now_ns, event)

    def surveyed(self, now_ns: int, survey: Survey, at: float) -> None:
        """End conditions that hold no more, and open those that hold without an event."""
        standing = survey.standing()
        for rule in self._rules.values():
            for incident in list(rule.incidents.values()):
                if (
                    incident.holds
                    and survey.finding(incident.kind, incident.subject) == Finding.OVER
                ):
                    rule.over(now_ns, incident, at)
            for event in standing:
                known = rule.incidents.get((event.kind, event.subject_of(event.kind)))
                if (known is None or not known.holds) and rule.wants(event):
                    rule.happened(now_ns, structs.replace(event, at=at))

    def turn(self, now_ns: int, at: float, *, at_once: bool = False) -> list[Message]:
        """Return the messages to deliver now; with `at_once`, without waiting for more."""
        found = []
        for rule in self._rules.values():
            rule.turn(now_ns)
            message = rule.take(now_ns, at, at_once=at_once)
            if message is not None:
                found.append(message)
        return found

    def next_wake(self) -> int | None:
        """Return when turn() is due, None for never."""
        wakes = [rule.wake_ns() for rule in self._rules.values()]
        return min((each for each in wakes if each is not None), default=None)

    def delivered(self, rule: str, at: float) -> None:
        self._rules[rule].delivered(at)

    def failed(self, now_ns: int, rule: str, why: str, arrived: int = 0) -> None:
        """Note a failed delivery, of which the first lines may have arrived."""
        self._rules[rule].failed(now_ns, why, arrived)

    # -- changes ------------------------------------------------------------------------------

    def begin(self, at: float) -> None:
        """Take the changes before this for history, for rules that are new."""
        for rule in self._rules_of_changes():
            rule.state.changes.begin(at)

    def changed(self, change: Change) -> None:
        """Take a change that the daemon has just told."""
        for rule in self._rules_of_changes(change):
            rule.state.changes.happened(change)

    def listed(self, changes: list[Change]) -> None:
        """Take changes that were missed, of all that the daemon's history has, oldest first."""
        for rule in self._rules_of_changes():
            wanted = [each for each in changes if rule.wants_change(each)]
            rule.state.changes.listed(wanted)

    @property
    def catches_up(self) -> bool:
        """Return whether a rule wants the list of changes."""
        return any(rule.state.changes.catches_up for rule in self._rules_of_changes())

    def _rules_of_changes(self, change: Change | None = None) -> list[_ActiveRule]:
        return [
            rule
            for rule in self._rules.values()
            if CHANGED in rule.kinds and (change is None or rule.wants_change(change))
        ]

    @property
    def holding(self) -> bool:
        """Return whether any condition holds."""
        return any(each.holds for rule in self._rules.values() for each in rule.incidents.values())


def _moved(incident: Incident, passed_ns: int) -> Incident:
    return structs.replace(
        incident,
        began_ns=incident.began_ns + passed_ns,
        last_ns=incident.last_ns + passed_ns,
        told_ns=None if incident.told_ns is None else incident.told_ns + passed_ns,
    )
