"""When somebody is told of what happens, and when not: the decisions of `[[alerts]]`.

Each rule keeps one *matter* per kind of event and subject ("breaker.open", "site.example"):

    (nothing) ──► WAITING ──────────► DUE ──── told ────► TOLD ──── over ────► ENDING
                  for how long   ▲     │ came and went:     │                    │ told
                  does it hold?  │     ▼ told as that       │ resolved = false   ▼
                              MUTED ◄── again, too soon ── QUIET ◄───────────────┘

    WAITING  the condition holds, but not for as long as the rule wants; if it ends, nothing was
    DUE      to be told with the next message of the rule
    TOLD     was told and still holds; what happens again is counted, and told after `every`
    ENDING   its end is to be told with the next message, once; if it comes back before, never
    QUIET    was told and is over; remembered for `every`, so that one that flaps is not told often
    MUTED    came back within `every`: told after that, with a count, if it holds or has no end

A rule has one message at a time: what becomes due while one is on its way, or cannot be delivered,
waits and is told together. So nothing piles up, however long nobody can be reached, and a subject
is told of twice in `every` at most: its beginning and its end. Many subjects in a row make few
messages too: the pause between two of them grows.

Time is given: `now_ns` decides, wall-clock times (`at`) are only shown.
"""

from enum import StrEnum
from fnmatch import fnmatchcase

from msgspec import Struct, structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.alerts.kinds import ENDED_BY, KINDS, Happening, Survey, Verdict, matching

# Of one rule. More subjects than that at once are told as a number.
INCIDENTS_MAX = 500
# In one message: a telephone shows no more, and Telegram takes 4096 characters.
LINES_MAX = 10
TEXT_CHARS_MAX = 300
RETRY_NS = 5 * SECOND_NS  # after a first failure; doubled with each further one
RETRY_NS_MAX = 600 * SECOND_NS
# Messages of a rule that follow each other closely: each waits twice as long as the one before it.
PACE_NS_MIN = SECOND_NS // 2
PACE_NS_MAX = 600 * SECOND_NS
STORM_GAPS = 10  # closely: within so many times the wait
GIVE_UP_NS = 24 * 3600 * SECOND_NS  # older news help nobody


class Rule(Struct, frozen=True):
    name: str
    on: tuple[str, ...]  # names and globs of events
    pools: tuple[str, ...] = ()  # globs; none: of any pool or of none
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
    times: int = 0  # it happened and was not told
    holds: bool = False
    told_ns: int | None = None
    last_ns: int = 0  # when it was heard of last
    over_at: float = 0.0  # wall-clock time
    opened: bool = False  # somebody was told that it holds, and not yet that it is over


class Line(Struct, frozen=True):
    """One matter in a message."""

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
    more: int = 0  # matters that found no place in it
    made_ns: int = 0
    test: bool = False


class RuleState(Struct):
    """All that a rule remembers."""

    incidents: list[Incident] = []
    others: int = 0  # happenings beyond MATTERS_MAX, not told yet
    batch_ns: int | None = None  # since when something is to be told
    number: int = 0  # of the last message
    made_ns: int = 0  # when that was
    pace_ns: int = 0  # what the next one waits at least after it
    message: Message | None = None  # on its way
    attempts: int = 0  # that failed, of that message
    retry_ns: int = 0
    sent: int = 0
    failures: int = 0
    lost: int = 0  # messages that were given up
    sent_at: float = 0.0
    error: str = ""  # of the last attempt, "" if it was good


class _Desk:
    """One rule at work."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.kinds = frozenset(matching(rule.on))
        self.state = RuleState()
        self.incidents: dict[tuple[str, str], Incident] = {}
        self.flying = False  # an attempt to deliver its message is under way

    def wants(self, event: Happening) -> bool:
        rule = self.rule
        return (
            event.kind in self.kinds
            and (not rule.pools or any(fnmatchcase(event.pool, each) for each in rule.pools))
            and (not rule.targets or any(fnmatchcase(event.target, each) for each in rule.targets))
        )

    # -- what happens -------------------------------------------------------------------------

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
            incident.stage = Stage.TOLD  # it was not over for long enough to be told
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
            incident.over_at = at  # it came and went: that is told
        elif incident.stage == Stage.WAITING:
            if incident.told_ns is None:
                del self.incidents[incident.kind, incident.subject]  # it did not last: nothing was
            else:
                incident.stage = Stage.QUIET

    def _due_or_muted(self, now_ns: int, incident: Incident) -> Stage:
        muted = incident.told_ns is not None and now_ns < incident.told_ns + self.rule.every_ns
        return Stage.MUTED if muted else Stage.DUE

    # -- time ---------------------------------------------------------------------------------

    def turn(self, now_ns: int) -> None:
        """Moves on what has waited long enough, and forgets what nobody will ask about."""
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
        """Forgets a tenth of it: those that are over, and were heard of longest ago."""
        quiet = [each for each in self.incidents.values() if each.stage == Stage.QUIET]
        quiet.sort(key=lambda each: each.last_ns)
        for incident in quiet[: INCIDENTS_MAX // 10]:
            del self.incidents[incident.kind, incident.subject]

    def _has_news(self) -> bool:
        if self.state.others:
            return True
        return any(each.stage in (Stage.DUE, Stage.ENDING) for each in self.incidents.values())

    def wake_ns(self) -> int | None:
        """When turn() or take() has something to do, None for never."""
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
            due.append(0)  # turn() has not seen it yet
        elif state.message is None and ripe_ns is not None:
            due.append(ripe_ns)
        if state.message is not None and not self.flying:
            due.append(state.retry_ns)
        return min(due, default=None)

    def _ripe_ns(self) -> int | None:
        """When what is to be told may be told, None if there is nothing."""
        state = self.state
        if state.batch_ns is None:
            return None
        return max(state.batch_ns + self.rule.group_ns, state.made_ns + state.pace_ns)

    # -- telling ------------------------------------------------------------------------------

    def take(self, now_ns: int, at: float, *, at_once: bool = False) -> Message | None:
        """What is to be delivered now; delivered() or failed() is to follow."""
        state = self.state
        if self.flying:
            return None
        if state.message is not None:
            if now_ns - state.message.made_ns >= GIVE_UP_NS:
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
        self.flying = state.message is not None
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
        self._set_pace(now_ns)
        state.batch_ns, state.others = None, 0
        if not began and not ended and not more:
            return None  # what was to be told is not so any more
        state.number += 1
        return Message(
            self.rule.name,
            state.number,
            at,
            began[:LINES_MAX],
            ended[:LINES_MAX],
            more,
            made_ns=now_ns,
        )

    def _set_pace(self, now_ns: int) -> None:
        """A first message is not held up; of many that follow each other, each waits longer."""
        state, least_ns = self.state, max(self.rule.group_ns, PACE_NS_MIN)
        gap_ns = now_ns - state.made_ns if state.number else STORM_GAPS * RETRY_NS_MAX
        if gap_ns > STORM_GAPS * max(state.pace_ns, least_ns):
            state.pace_ns = 0
        else:
            state.pace_ns = max(least_ns, min(2 * state.pace_ns, PACE_NS_MAX))
        state.made_ns = now_ns

    def delivered(self, at: float) -> None:
        state = self.state
        self.flying = False
        state.message, state.attempts, state.error = None, 0, ""
        state.sent += 1
        state.sent_at = at

    def failed(self, now_ns: int, why: str) -> None:
        state = self.state
        self.flying = False
        state.error = why
        state.failures += 1
        state.retry_ns = now_ns + min(RETRY_NS << min(state.attempts, 16), RETRY_NS_MAX)
        state.attempts += 1


class Alerting:
    """All rules."""

    def __init__(self, rules: list[Rule]) -> None:
        self._desks = {rule.name: _Desk(rule) for rule in rules}

    @property
    def states(self) -> dict[str, RuleState]:
        """What each rule remembers, to be kept or shown."""
        for desk in self._desks.values():
            desk.state.incidents = list(desk.incidents.values())
        return {name: desk.state for name, desk in self._desks.items()}

    def restore(self, states: dict[str, RuleState], passed_ns: int) -> None:
        """What was kept of an earlier life; its clock was `passed_ns` behind ours. What a rule
        does not want any more is forgotten."""
        for name, state in states.items():
            desk = self._desks.get(name)
            if desk is None:
                continue
            moved = [_moved(each, passed_ns) for each in state.incidents if each.kind in desk.kinds]
            desk.incidents = {(each.kind, each.subject): each for each in moved}
            desk.state = state
            state.retry_ns += passed_ns
            state.made_ns += passed_ns
            if state.batch_ns is not None:
                state.batch_ns += passed_ns
            if state.message is not None:
                state.message = structs.replace(
                    state.message, made_ns=state.message.made_ns + passed_ns
                )

    def happened(self, now_ns: int, event: Happening) -> None:
        """The event opens conditions of its kind, and ends those that it is the end of."""
        ended = ENDED_BY.get(event.kind, ())
        for desk in self._desks.values():
            for kind in ended:
                incident = desk.incidents.get((kind, event.subject_of(kind)))
                if incident is not None:
                    desk.over(now_ns, incident, event.at)
            if event.kind in desk.kinds and desk.wants(event):
                desk.happened(now_ns, event)

    def surveyed(self, now_ns: int, survey: Survey, at: float) -> None:
        """Ends what does not hold any more, and opens what holds and was not heard of."""
        standing = survey.standing()
        for desk in self._desks.values():
            for incident in list(desk.incidents.values()):
                if (
                    incident.holds
                    and survey.verdict(incident.kind, incident.subject) == Verdict.OVER
                ):
                    desk.over(now_ns, incident, at)
            for event in standing:
                known = desk.incidents.get((event.kind, event.subject_of(event.kind)))
                if (known is None or not known.holds) and desk.wants(event):
                    desk.happened(now_ns, structs.replace(event, at=at))

    def turn(self, now_ns: int, at: float, *, at_once: bool = False) -> list[Message]:
        """The messages that are to be delivered now. With `at_once` nothing waits for more."""
        found = []
        for desk in self._desks.values():
            desk.turn(now_ns)
            message = desk.take(now_ns, at, at_once=at_once)
            if message is not None:
                found.append(message)
        return found

    def next_wake(self) -> int | None:
        """When turn() is due, None for never."""
        wakes = [desk.wake_ns() for desk in self._desks.values()]
        return min((each for each in wakes if each is not None), default=None)

    def delivered(self, rule: str, at: float) -> None:
        self._desks[rule].delivered(at)

    def failed(self, now_ns: int, rule: str, why: str) -> None:
        self._desks[rule].failed(now_ns, why)

    @property
    def holding(self) -> bool:
        """Whether any condition is thought to hold."""
        return any(each.holds for desk in self._desks.values() for each in desk.incidents.values())


def _moved(incident: Incident, passed_ns: int) -> Incident:
    return structs.replace(
        incident,
        began_ns=incident.began_ns + passed_ns,
        last_ns=incident.last_ns + passed_ns,
        told_ns=None if incident.told_ns is None else incident.told_ns + passed_ns,
    )
