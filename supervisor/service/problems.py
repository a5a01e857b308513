"""Problems of the daemon itself: shown in its status, and reported when they come and go."""

from collections.abc import Callable
from dataclasses import dataclass

from musterd.supervisor.core.model.actions import Report

OFTEN_NS = 60_000_000_000  # a problem that comes and goes all the time is reported once a minute


@dataclass
class Problem:
    """One kind of problem: who knows of it, and the events when it comes and goes."""

    ask: Callable[[], str | None]
    came: str
    went: str  # "": it never goes
    level: str = "error"
    gap_ns: int = 0  # the shortest time between two reports
    now: str = ""
    told: bool = False  # whether the present problem was reported
    told_ns: int | None = None

    def look(self, now_ns: int) -> Report | None:
        before, self.now = self.now, self.ask() or ""
        if self.now and not before:
            self.told = False
        if self.now and not self.told:
            self.told = self.told_ns is None or now_ns - self.told_ns >= self.gap_ns
            if self.told:  # else later, if it lasts
                self.told_ns = now_ns
                return Report(self.came, self.level, reason=self.now)
        if before and not self.now and self.went and self.told:
            return Report(self.went)
        return None


class Problems:
    def __init__(self, *problems: Problem) -> None:
        self._problems = problems

    def look(self, now_ns: int) -> list[Report]:
        """Look at all of them; return what is to be reported."""
        return [told for each in self._problems if (told := each.look(now_ns)) is not None]

    @property
    def text(self) -> str:
        return "; ".join(each.now for each in self._problems if each.now)
