"""Timing: when a schedule is due, in wall-clock nanoseconds since 1970.

Pure calculation: no clock is read. Instants do not depend on where counting begins, so a daemon
that was down finds the instants that it would have seen.

Summer time, for cron (as in Debian's cron): a run in the skipped hour comes right after it, once;
in the repeated hour a run at a fixed time comes the first time only, while runs that repeat by the
hour or the minute (`*` or `*/N` there) go on.
"""

import re
from collections.abc import Callable, Iterator
from datetime import datetime, tzinfo
from functools import lru_cache
from itertools import takewhile

from cronsim import CronSim, CronSimError
from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS

# The nicknames of crontab(5) for common expressions; not `@reboot`, which names no time.
NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
WEEKDAY_RANGE = re.compile(r"([0-7]|[A-Z]{3})-([0-7]|[A-Z]{3})(?:/([1-9]\d?))?")

ZoneOf = Callable[[str], tzinfo]  # finds a time zone by its name

# How far the search for the newest instants looks back; doubled until enough are found.
LOOK_BACK_NS = 60 * SECOND_NS
# Next instants that are remembered: to find one takes some 30 µs, and many schedules have the same
# expression, and each asks twice.
NEXT_KEPT = 4096


class Due(Struct, frozen=True):
    """The newest due instants of a stretch of time, and how many older ones there are."""

    instants: tuple[int, ...]  # oldest first
    older: int = 0  # how many came before these ...
    counted: bool = True  # ... false: at least so many


class Every(Struct, frozen=True):
    """A fixed interval after the last instant."""

    every_ns: int

    def __str__(self) -> str:
        return f"every {self.every_ns} ns"

    def next_after(self, last_ns: int) -> int | None:
        return last_ns + self.every_ns

    def due(self, last_ns: int, now_ns: int, limit: int) -> Due:
        """Return the newest `limit` instants after last_ns and not after now_ns."""
        count = max(0, (now_ns - last_ns) // self.every_ns)
        first = max(1, count - limit + 1)
        instants = tuple(last_ns + n * self.every_ns for n in range(first, count + 1))
        return Due(instants, first - 1)


class Cron(Struct, frozen=True):
    """A cron expression in a time zone: five fields, six with seconds first, or a nickname."""

    expression: str  # as it was written
    zone: tzinfo

    def __str__(self) -> str:
        return f"cron {self.expression} ({self.zone})"

    def next_after(self, last_ns: int) -> int | None:
        """Return the next instant; None if nothing matches for fifty years."""
        return _next_after(self, last_ns // SECOND_NS)

    def due(self, last_ns: int, now_ns: int, limit: int) -> Due:
        """Return the newest `limit` instants after last_ns and not after now_ns.

        The search goes backwards in stretches that double: after a year of downtime a schedule of
        every minute costs no more than after a day.
        """
        first = self.next_after(last_ns)
        if first is None or first > now_ns:
            return Due(())
        second = self.next_after(first)
        if second is None or second > now_ns:
            return Due((first,))
        back_ns = LOOK_BACK_NS
        while True:
            start_ns = max(last_ns, now_ns - back_ns)
            instants = self._between(start_ns, now_ns)
            if len(instants) > limit:
                left = len(instants) - limit
                return Due(tuple(instants[left:]), left, counted=start_ns == last_ns)
            if start_ns == last_ns:
                return Due(tuple(instants))
            back_ns *= 2

    def _between(self, start_ns: int, end_ns: int) -> list[int]:
        after = self.after(start_ns // SECOND_NS)
        return list(takewhile(lambda instant_ns: instant_ns <= end_ns, after))

    def after(self, last_second: int) -> Iterator[int]:
        """Yield the instants after this second."""
        found = _Calendar(
            fields_of(self.expression), datetime.fromtimestamp(last_second, self.zone)
        )
        for moment in found:
            second = int(moment.timestamp())
            if second <= last_second:
                continue  # in a repeated hour, it ran the first time
            shown = datetime.fromtimestamp(second, self.zone)
            if shown.replace(tzinfo=None) == moment.replace(tzinfo=None) or _matches(found, shown):
                last_second = second
                yield second * SECOND_NS


@lru_cache(NEXT_KEPT)
def _next_after(cron: Cron, last_second: int) -> int | None:
    return next(cron.after(last_second), None)


class _Calendar(CronSim):
    """CronSim, right for days that begin at one o'clock: the library goes on from the skipped
    midnight, and is at two an hour later."""

    def advance_day(self) -> bool:
        moved = super().advance_day()
        if moved and self.dt.tzinfo is not None:
            self.dt = datetime.fromtimestamp(self.dt.timestamp(), self.dt.tzinfo)
        return moved


def _matches(cron: CronSim, moment: datetime) -> bool:
    return (
        moment.second in cron.seconds
        and moment.minute in cron.minutes
        and moment.hour in cron.hours
        and moment.month in cron.months
        and cron.match_day(moment.date())
    )


Timing = Every | Cron


def fields_of(expression: str) -> str:
    """Translate what the library does not know: nicknames, and ranges of weekdays over the end of
    the week, such as SAT-SUN or FRI-MON."""
    text = expression.strip()
    if text.startswith("@"):
        return NICKNAMES.get(text.lower(), text)
    parts = text.split()
    if parts:
        parts[-1] = ",".join(_weekdays(term) for term in parts[-1].upper().split(","))
    return " ".join(parts)


def _weekdays(term: str) -> str:
    """Turn a range of weekdays over the end of the week into a list; keep other terms."""
    found = WEEKDAY_RANGE.fullmatch(term)
    if found is None or not {found[1], found[2]} <= {*WEEKDAYS, *"01234567"}:
        return term
    first, last = (int(day) if day.isdigit() else WEEKDAYS.index(day) for day in found.groups()[:2])
    if first <= last:
        return term
    return ",".join(str(day % 7) for day in range(first, last + 8, int(found[3] or 1)))


def cron_problem(expression: str) -> str:
    """Say what is wrong with a cron expression, or ""."""
    fields = fields_of(expression)
    if fields.startswith("@"):
        return f"{fields.split()[0]} is not one of {', '.join(NICKNAMES)}"
    try:
        first = next(CronSim(fields, datetime(2000, 1, 1)), None)
    except CronSimError as error:
        return str(error).lower()
    return "it is never due" if first is None else ""
