"""Changes that a rule has to tell: each of them, once.

A change is no incident: it is never muted, and never counted instead of told. A rule notes of each
schedule which change it took last. Changes that it missed, because this process or the daemon was
dead, are found in the daemon's history (`listed`). A rule whose destination does not answer takes
PENDING_MAX changes; it is then *behind*, and looks up the others when there is room again.
"""

from typing import Any

import msgspec
from msgspec import Struct, structs

PENDING_MAX = 500  # of one rule
SEEN_MAX = 20_000  # schedules of one rule; the daemon has fewer
# JSON of a result that waits in the file; larger ones are asked of the daemon when they are sent.
KEPT_BYTES_MAX = 512
SAME_SECONDS = 0.001  # times are rounded on their way


class Change(Struct, frozen=True):
    """A change of a schedule's result."""

    schedule: str
    number: int = 0  # in the schedule's history; 0: of a cluster, which keeps none
    at: float = 0.0  # wall-clock time
    task: str = ""  # id of the run
    digest: str = ""
    summary: str = ""
    before: Any = None
    after: Any = None
    cut: bool = False  # the results are not here, or only their beginning
    pool: str = ""
    url: str = ""  # of the page, where a template asks for it

    def without_content(self) -> "Change":
        """Return the change as it waits to be told: without large results."""
        size = len(msgspec.json.encode((self.before, self.after)))
        if size <= 2 * KEPT_BYTES_MAX:
            return self
        return structs.replace(self, before=None, after=None, cut=True)


class ChangeState(Struct):
    """Changes of one rule."""

    pending: list[Change] = []  # oldest first
    seen: dict[str, tuple[int, float]] = {}  # schedule -> number and time of its last change
    since: float = 0.0  # earlier changes are history: the rule did not exist
    behind: bool = False  # there are more than it could take

    def begin(self, at: float) -> None:
        self.since = self.since or at

    def happened(self, change: Change) -> bool:
        """Take a change that was told just now; return whether it is new."""
        if self.behind or self._knows(change):
            return False
        if len(self.pending) >= PENDING_MAX:
            self.behind = True
            return False
        self._note(change)
        self.pending.append(change.without_content())
        return True

    def listed(self, changes: list[Change]) -> bool:
        """Take the changes of the daemon's history that are new; return whether there are any."""
        self.behind = False
        taken = [self.happened(each) for each in changes if each.at > self.since]
        return any(taken)

    @property
    def catches_up(self) -> bool:
        """Return whether a rule that is behind has room again."""
        return self.behind and len(self.pending) <= PENDING_MAX // 2

    def _knows(self, change: Change) -> bool:
        """Return whether this change was taken. A schedule that was deleted and made anew counts
        from one again, but later."""
        number, at = self.seen.get(change.schedule, (0, 0.0))
        return 0 < change.number <= number and change.at < at + SAME_SECONDS

    def _note(self, change: Change) -> None:
        if not change.number:
            return
        self.seen.pop(change.schedule, None)  # the newest is last
        self.seen[change.schedule] = (change.number, change.at)
        if len(self.seen) > SEEN_MAX:
            _, at = self.seen.pop(next(iter(self.seen)))
            self.since = max(self.since, at)
