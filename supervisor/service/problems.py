"""What is wrong with the daemon itself: shown in its status, and told when it comes and goes."""

from collections.abc import Callable
from dataclasses import dataclass

from musterd.supervisor.core.model.actions import Report

OFTEN_NS = 60_000_000_000  # what may come and go all the time is told once a minute


@dataclass
class Problem:
    """One kind of it: who knows, and the names of its events; "" for one that never is over."""

    ask: Callable[[], str | None]
    came: str
    went: str
    level: str = "error"
    gap_ns: int = 0  # between two times that it is told
    now: str = ""
    told: bool = False  # of the present one
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
        """What is to be told of it."""
        return [told for each in self._problems if (told := each.look(now_ns)) is not None]

    @property
    def text(self) -> str:
        return "; ".join(each.now for each in self._problems if each.now)
