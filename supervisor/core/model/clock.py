"""The believed time, where the wall clock may be wrong.

The wall clock decides what is deleted: results, states and tasks are kept for a time, and a cron
line names an hour. A machine without a battery starts in 1970; an operator types the wrong year. So
the daemon keeps a time of its own, the *believed* time: the last believed moment plus what the boot
clock, which nobody can set, has counted since. The daemon follows the wall clock as long as that is
plausible:

    on the same boot    no further than STEP_MAX_NS from the believed time, in either direction
    after another boot  no further than STEP_MAX_NS behind the last believed time, for time does
                        not go back, nor than OFF_MAX_NS ahead of it: the machine was off

    from before EARLIEST_NS to any time after it: the store was begun under a clock that was never
                        set, and now it has been set

Otherwise the wall clock is doubted: the believed time goes on by the boot clock alone, and nothing
is deleted for its age. The doubt ends when the wall clock is plausible again, or when an operator
accepts it. A followed step of more than JUMP_NS is reported, and nothing is deleted for its age for
SETTLE_NS: a wrong clock is often corrected within the hour. Time zones and summer time are no
steps: the wall clock counts in UTC.

The last believed moment is stored as a fact (CLOCK), so neither a restart nor a reboot ends a
doubt.
"""

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS

# 2026-01-01, before musterd existed: a clock that shows less was not set since the boot.
EARLIEST_NS = 1_767_225_600 * SECOND_NS
CLOCK = "clock"  # kind of fact: the last believed moment
HOUR_NS = 3600 * SECOND_NS
STEP_MAX_NS = 24 * HOUR_NS  # more than any time zone: a hardware clock may be in local time
OFF_MAX_NS = 30 * 24 * HOUR_NS
JUMP_NS = 300 * SECOND_NS  # a clock under NTP does not step so far
SETTLE_NS = HOUR_NS
ANCHOR_NS = 600 * SECOND_NS  # how often the believed moment is noted
TOLD_GAP_NS = 60 * SECOND_NS  # between two words about steps: two masters may set a clock in turn


class Anchor(Struct, array_like=True, frozen=True):
    """A believed moment."""

    boot: str  # names the boot of the machine
    boot_ns: int  # since that boot, sleep included
    wall_ns: int
    was_off: bool = False  # the machine was off before this moment, for an unknown time


class Steps(Struct, frozen=True):
    """How far the clock was set since the last report."""

    last_ns: int
    count: int


class Clock:
    """`boot_ns` is what the boot clock shows, `wall_ns` what the wall clock shows."""

    def __init__(self, boot: str, boot_ns: int, wall_ns: int, anchor: Anchor | None) -> None:
        """Start from the last believed moment; without one, believe the wall clock."""
        self._boot = boot
        self._was_off = False
        self._settled_ns = boot_ns
        self._noted: Anchor | None = None
        self.ahead_ns = 0  # of the wall clock, while it is doubted
        self.offset_ns = wall_ns - boot_ns  # of the believed time to the boot clock
        self.stepped_ns = 0  # how far the clock was set when it was last read and followed
        self._untold: Steps | None = None
        self._told_ns: int | None = None
        if anchor is not None:
            same = anchor.boot == boot and anchor.boot_ns <= boot_ns
            self._was_off = anchor.was_off or not same
            self.offset_ns = anchor.wall_ns - (anchor.boot_ns if same else boot_ns)
            self.read(boot_ns, wall_ns)

    def read(self, boot_ns: int, wall_ns: int) -> None:
        """Follow the wall clock if it is plausible; called once a second."""
        ahead_ns = wall_ns - (boot_ns + self.offset_ns)
        ahead_max_ns = OFF_MAX_NS if self._was_off else STEP_MAX_NS
        self.stepped_ns = 0
        if boot_ns + self.offset_ns < EARLIEST_NS <= wall_ns:
            ahead_max_ns = ahead_ns
        if not -STEP_MAX_NS <= ahead_ns <= ahead_max_ns:
            self.ahead_ns = ahead_ns
            return
        if abs(ahead_ns) > JUMP_NS and not self._was_off:
            self.stepped_ns = ahead_ns
            self._untold = Steps(ahead_ns, self._untold.count + 1 if self._untold else 1)
            self._settled_ns = boot_ns + SETTLE_NS
        self._follow(boot_ns, wall_ns)

    def accept(self, boot_ns: int, wall_ns: int) -> None:
        """Believe the wall clock, because an operator says that it is right."""
        self._settled_ns = boot_ns
        self._follow(boot_ns, wall_ns)

    def _follow(self, boot_ns: int, wall_ns: int) -> None:
        self.offset_ns = wall_ns - boot_ns
        self.ahead_ns = 0
        self._was_off = False

    @property
    def doubted(self) -> bool:
        return bool(self.ahead_ns)

    def steps_due(self, boot_ns: int) -> Steps | None:
        """Return the steps to report now; each is reported once, with others if they come often."""
        told_ns = self._told_ns
        if self._untold is None or (told_ns is not None and boot_ns - told_ns < TOLD_GAP_NS):
            return None
        steps, self._untold, self._told_ns = self._untold, None, boot_ns
        return steps

    def forgets(self, boot_ns: int) -> bool:
        """Whether something may be deleted for its age."""
        return not self.ahead_ns and boot_ns >= self._settled_ns

    def anchor_due(self, boot_ns: int) -> Anchor | None:
        """Return the believed moment if it is time to store it.

        A doubt is measured from the believed moment, so that is stored exactly when one begins.
        """
        noted = self._noted
        near_ns = 0 if self.ahead_ns else JUMP_NS
        offset_ns = noted.wall_ns - noted.boot_ns if noted is not None else 0
        if (
            noted is not None
            and boot_ns - noted.boot_ns < ANCHOR_NS
            and abs(self.offset_ns - offset_ns) <= near_ns
            and noted.was_off == self._was_off
        ):
            return None
        wall_ns = max(0, boot_ns + self.offset_ns)
        self._noted = Anchor(self._boot, boot_ns, wall_ns, self._was_off)
        return self._noted
