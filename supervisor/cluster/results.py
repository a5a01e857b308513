"""Results of a cluster's schedules on a node: judge ended runs, tell what has changed.

Pure, a part of the scheduler. Every node does this, and one of them is enough.

    judge      runs that have ended, as watching.py says; whoever is first counts
    tell       changes to the supervisor for its events, with both results. One node takes it upon
               itself to alert people (`announce`), and notes that it has done so when the
               supervisor has had time for it. After a death in between another node takes over, and
               marks the change, of which people may have heard.
"""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol

from msgspec import Struct, json

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.watching.content import content_of
from musterd.ipc.wire import node_messages as wire
from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.cluster.calls import Lane, Wanted
from musterd.supervisor.cluster.judging import judged
from musterd.supervisor.cluster.watching import CHANGED, Changed, ChangeNote, WatchedSchedule
from musterd.supervisor.core.model.policy import SchedulePolicy

WATCH_NS = SECOND_NS // 2  # between two looks at what has ended
CHANGES_NS = SECOND_NS
UNTOLD_NS = 10 * SECOND_NS  # between two looks at what nobody has told
CONFIRM_NS = SECOND_NS  # from the report to the note that people were alerted
TELL_MAX = 1000  # changes to be told; older ones are dropped, and found by the next look
SKIP_MAX = 1000  # schedules whose plans cannot be read here

_encode = json.Encoder().encode


class Call(Protocol):
    def __call__(
        self,
        lane: Lane,
        answered: Callable[[object], None],
        method: str,
        *arguments: object,
        **options: object,
    ) -> None: ...


class Telling(Struct):
    """A change on its way to the supervisor."""

    note: ChangeNote
    elsewhere: bool | None = None  # None: nobody has asked yet who alerts people
    again: bool = False
    late: bool = False  # nobody told it in time
    entries: list[HistoryEntry] | None = None  # None: they were not read yet


class Results:
    def __init__(
        self,
        rng: Random,
        call: Call,
        tell: Callable[[wire.SidecarMessage], None],
        policy_of: Callable[[bytes], SchedulePolicy | None],
    ) -> None:
        self._rng = rng
        self._call = call
        self._tell = tell
        self._policy_of = policy_of
        self.now_ns = 0
        self._watch, self._judge = Lane(), Lane()
        self._watch_at_ns = self._changes_at_ns = 0
        self._untold_at_ns = 0
        self._found: list[WatchedSchedule] = []
        self._skip: dict[str, None] = {}
        self._after = ""
        self._queue: deque[Telling] = deque(maxlen=TELL_MAX)
        self._told: dict[int, None] = {}  # by us, until that is noted
        self._reported: dict[int, int] = {}  # ... and when the supervisor has reported it
        self._token = rng.getrandbits(62)
        self._follow, self._telling, self._missed, self._confirm = Lane(), Lane(), Lane(), Lane()

    def wanted_calls(self) -> Iterable[Wanted]:
        if self._found:
            yield self._judge, 0, self._call_judged
        elif not self._judge.ticket:
            yield self._watch, self._watch_at_ns, self._call_watched
        yield self._follow, self._changes_at_ns, self._call_changes
        if self._untold_at_ns:
            yield self._missed, self._untold_at_ns, self._call_untold
        if self._queue:
            yield self._telling, 0, self._step
        if self._reported:
            yield self._confirm, min(self._reported.values()) + CONFIRM_NS, self._call_told

    # -- judging ------------------------------------------------------------------------------

    def _call_watched(self) -> None:
        self._watch_at_ns = self.now_ns + round(WATCH_NS * self._rng.uniform(0.8, 1.2))
        self._call(self._watch, self._watched, "watched", tuple(self._skip))

    def _watched(self, result: object) -> None:
        assert isinstance(result, list)
        self._found = result

    def _call_judged(self) -> None:
        found, self._found = self._found, []
        verdicts = []
        for each in found:
            policy = self._policy_of(each.plan)
            if policy is None:  # another node can read it
                if len(self._skip) < SKIP_MAX:
                    self._skip[each.name] = None
            else:
                verdicts.append(judged(each, policy))
        if verdicts:
            self._call(self._judge, self._judged, "judged", tuple(verdicts))

    def _judged(self, _result: object) -> None:
        """Look for more; if the answer is lost, the next look says what is left."""
        self._watch_at_ns = self._changes_at_ns = self.now_ns

    def follow(self) -> None:
        """Hear that other schedules are applied: their plans may be readable."""
        self._skip.clear()

    # -- telling ------------------------------------------------------------------------------

    def _call_changes(self) -> None:
        self._changes_at_ns = self.now_ns + CHANGES_NS
        self._call(self._follow, self._changed, "changes", self._after)

    def _changed(self, result: object) -> None:
        """Note what is new; of what was there before, only what nobody has announced."""
        assert isinstance(result, Changed)
        first, self._after = not self._after, result.after
        self._untold_at_ns = self._untold_at_ns or self.now_ns
        for note in result.notes:
            if not note.announced:
                self._take(Telling(note))
            elif not first:
                self._queue.append(Telling(note, elsewhere=True))

    def _call_untold(self) -> None:
        self._untold_at_ns = self.now_ns + round(UNTOLD_NS * self._rng.uniform(0.8, 1.2))
        self._call(self._missed, self._found_untold, "untold")

    def _found_untold(self, result: object) -> None:
        assert isinstance(result, list)
        for note in result:
            self._take(Telling(note, late=True))

    def _take(self, telling: Telling) -> None:
        """Have a change told, unless it is on its way."""
        number = telling.note.number
        if number not in self._told and all(number != each.note.number for each in self._queue):
            self._queue.append(telling)

    def _step(self) -> None:
        """Bring the oldest change a step nearer to the supervisor."""
        while self._queue:
            telling = self._queue[0]
            note = telling.note
            if telling.elsewhere is None:
                self._ask(telling, "announce", note.number, self._token)
                return
            if telling.elsewhere and telling.late:
                self._queue.popleft()  # it was told meanwhile
                continue
            if telling.entries is None and note.entry:
                self._ask(telling, "history", note.schedule, (note.before, note.entry))
                return
            self._queue.popleft()
            self._tell(self._news(telling))
            if not telling.elsewhere:
                self._told[note.number] = None

    def _ask(self, telling: Telling, method: str, *arguments: object) -> None:
        def answered(result: object) -> None:
            if method == "announce":
                assert isinstance(result, int)
                telling.elsewhere, telling.again = result == 0, result == 2
            else:
                telling.entries = result if isinstance(result, list) else []

        self._call(self._telling, answered, method, *arguments)

    def _news(self, telling: Telling) -> wire.ScheduleNews:
        note, entries = telling.note, {each.number: each for each in telling.entries or ()}
        content = b""
        if note.entry:
            both = content_of(entries.get(note.before), entries.get(note.entry))
            content = _encode(wire.Content(*both))
            if len(content) > wire.CONTENT_BYTES_MAX:
                content = b""
        return wire.ScheduleNews(
            note.event,  # type: ignore[arg-type]
            note.schedule,
            note.pool,
            note.task if note.event == CHANGED else "",
            note.reason[: wire.NEWS_CHARS_MAX],
            note.count,
            note.digest,
            bool(telling.elsewhere),
            note.entry,
            note.before,
            note.at_ns if note.event == CHANGED else 0,
            telling.again,
            content,
            0 if telling.elsewhere else note.number,
        )

    # -- what people were alerted of ----------------------------------------------------------

    def confirmed(self, number: int) -> None:
        """Hear that the supervisor has reported a change."""
        if number in self._told:
            self._reported[number] = self.now_ns

    def _call_told(self) -> None:
        due = [
            number for number, at_ns in self._reported.items() if at_ns + CONFIRM_NS <= self.now_ns
        ]

        def answered(_result: object) -> None:
            for number in due:
                self._reported.pop(number, None)
                self._told.pop(number, None)

        self._call(self._confirm, answered, "told", tuple(due))
