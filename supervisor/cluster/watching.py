"""What an engine keeps of the results of schedules: runs to be judged, records, history, changes.

    seen       each ended run of a schedule with `notify`, noted in the transaction of its end
    watched    what is known of a schedule's results (core/model/watching.py), for the engine bytes
    history    the results that differ
    changes    what is told, on every node; one node alerts people of each

A node judges (judging.py): it reads the runs and the record, and writes the new record, entries of
history and changes in one transaction, which takes the runs away. Its `turn` lets one node win, as
that of a schedule does. So each run is judged once, whoever dies and whichever answer is lost.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.history import HistoryEntry
from musterd.ipc.wire.messages import View

CHANGES_MAX = 1000  # in one answer: the newest
WATCHED_MAX = 200  # runs in one answer
# Whoever takes a change upon itself tells of it within milliseconds; after this time it is dead.
SILENT_NS = 30 * SECOND_NS

CHANGED, STALE, RECOVERED = "task.changed", "watch.stale", "watch.recovered"


class SeenRun(Struct, frozen=True):
    """A run that has ended and was not judged; `anew`: the schedule begins anew here."""

    number: int
    kind: Literal["good", "failed", "anew"]
    task: str
    at_ns: int  # wall-clock time of the engine
    digest: str = ""  # SHA-256 of the result
    value: bytes | None = None  # the result; None: it is longer than history keeps
    view: View | None = None  # as its worker saw it; None also for the result of another task
    watch: bytes = b""  # the rules by which it ran
    error: str = ""


class WatchedSchedule(Struct, frozen=True):
    """A schedule with runs to be judged, and what is known of its results."""

    name: str
    plan: bytes
    turn: int
    record: bytes  # b"": nothing
    untold: tuple[int, ...]  # entries of changes that were not told yet
    runs: tuple[SeenRun, ...]


class NewNote(Struct, frozen=True):
    """Something to be told of the results of a schedule."""

    event: str  # CHANGED, STALE or RECOVERED
    pool: str = ""
    task: str = ""
    digest: str = ""
    entry: int = 0  # of a change: the number of the new result in history ...
    before: int = 0  # ... and of the one it was compared with
    at_ns: int = 0
    reason: str = ""
    count: int = 0


class Judged(Struct, frozen=True):
    """What a node has found about runs of one schedule."""

    name: str
    turn: int
    record: bytes
    runs: tuple[int, ...]  # their numbers
    entries: tuple[HistoryEntry, ...] = ()
    forgotten: tuple[int, ...] = ()  # numbers of entries
    notes: tuple[NewNote, ...] = ()


class ChangeNote(Struct, frozen=True):
    """A change, or something else that is told of a schedule's results; numbers grow."""

    number: int
    schedule: str
    task: str
    digest: str
    announced: bool = False  # a node has taken it upon itself to alert people
    event: str = CHANGED
    entry: int = 0
    before: int = 0
    at_ns: int = 0
    reason: str = ""
    count: int = 0
    pool: str = ""


class Changed(Struct, frozen=True):
    """Changes, oldest first, and what to ask for next time."""

    notes: tuple[ChangeNote, ...]
    after: str


class KeptChange(Struct, frozen=True):
    """A change that history keeps."""

    schedule: str
    plan: bytes
    before: HistoryEntry | None
    after: HistoryEntry


class WatchingEngine(Protocol):
    def watched(self, skip: Sequence[str] = ()) -> list[WatchedSchedule]:
        """Return runs to be judged, at most WATCHED_MAX, but for these schedules."""

    def judged(self, found: Sequence[Judged]) -> list[str]:
        """Take over what a node has found; return the schedules for which that counts."""

    def history(
        self, name: str, numbers: Sequence[int] | None = None, *, limit: int = CHANGES_MAX
    ) -> list[HistoryEntry] | None:
        """Return these entries, or the newest, oldest first; None: there is no such schedule."""

    def changed(self, name: str = "", limit: int = 20) -> list[KeptChange]:
        """Return the newest changes that history keeps, newest first, of one schedule or all."""

    def changes(self, after: str = "") -> Changed:
        """Return the changes since a call, at most CHANGES_MAX; first the newest of each schedule.

        No change is left out because its transaction took longer than that of a later one.
        """

    def untold(self) -> list[ChangeNote]:
        """Return changes that nobody has told within SILENT_NS."""

    def announce(self, number: int, token: int) -> int:
        """Take it upon the caller to alert people of a change: 1 for one token, 2 if another has
        taken it before and is silent for SILENT_NS, 0 for all others and for what is told."""

    def told(self, numbers: Sequence[int]) -> None:
        """Note that people are alerted of these."""
