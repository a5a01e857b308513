"""The daemon's time of day; core/model/clock.py decides whether to believe the machine's clock."""

import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from musterd.supervisor.api.status import ClockStatus
from musterd.supervisor.core.model.clock import CLOCK, Anchor, Clock
from musterd.supervisor.log import log
from musterd.supervisor.store.interface import Store

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_decode = msgspec.msgpack.Decoder(Anchor).decode
_encode = msgspec.msgpack.Encoder().encode


class WallClock:
    def __init__(self) -> None:
        self._boot = BOOT_ID.read_text().strip()
        self._clock = Clock(self._boot, _boot_ns(), time.time_ns(), None)

    def open(self, store: Store) -> None:
        """Go on from the time that was believed when the store was last used."""
        self._clock = Clock(self._boot, _boot_ns(), time.time_ns(), _last_believed(store))

    def now_ns(self) -> int:
        """Return the believed time; any thread may ask."""
        return _boot_ns() + self._clock.offset_ns

    def read(self) -> bytes:
        """Look at the machine's clock, once a second; return the anchor to store, or b""."""
        now_ns = _boot_ns()
        self._clock.read(now_ns, time.time_ns())
        steps = self._clock.steps_due(now_ns)
        if steps is not None:
            seconds = f"{steps.last_ns / 1e9:+.0f}"
            log.note("clock.stepped", "warning", seconds=seconds, count=steps.count)
        anchor = self._clock.anchor_due(now_ns)
        return _encode(anchor) if anchor is not None else b""

    def accept(self) -> None:
        """Believe the machine's clock: a person says that it is right."""
        if self._clock.doubted:
            log.note("clock.accepted", "warning", reason=self.problem())
        self._clock.accept(_boot_ns(), time.time_ns())

    def forgets(self) -> bool:
        """Whether old results and states may be deleted."""
        return self._clock.forgets(_boot_ns())

    def problem(self) -> str:
        """Return why the machine's clock is not believed and what to do, or ""."""
        if not self._clock.doubted:
            return ""
        side = "ahead of" if self._clock.ahead_ns > 0 else "behind"
        days = abs(self._clock.ahead_ns) / 86400e9
        return (
            f"the clock shows {_shown(time.time_ns())}, {days:.1f} days {side} the expected time"
            f" ({_shown(self.now_ns())}): nothing old is deleted, and schedules use the expected"
            " time: set the clock, or if it is right, run musterctl clock accept"
        )

    def status(self) -> ClockStatus:
        return ClockStatus(
            now=self.now_ns() / 1e9,
            machine=time.time_ns() / 1e9,
            doubted=self._clock.doubted,
            forgets=self.forgets(),
            reason=self.problem(),
        )


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _last_believed(store: Store) -> Anchor | None:
    for _, value in store.facts(CLOCK):
        try:
            return _decode(value)
        except msgspec.DecodeError as error:
            log.note("clock.unreadable", "warning", reason=error)
    newest_ns = store.newest_wall_ns()  # the store was written by an older musterd
    return Anchor("", 0, newest_ns, True) if newest_ns else None


def _shown(wall_ns: int) -> str:
    try:
        return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{wall_ns / 1e9:.0f} s since 1970"
