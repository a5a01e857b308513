"""The fleet's state for systemd, told by the loop itself: a loop that hangs falls silent.

start   EXTEND_TIMEOUT_USEC while the store is read and workers start; READY=1 when every pool
        has its minimum or has given up; in that case STATUS says "degraded", and the good pools
        run
run     STATUS once a second if it has changed, WATCHDOG=1 well before it is due
reload  RELOADING=1, then READY=1 when the new configuration is in force or was refused
end     STOPPING=1 once, EXTEND_TIMEOUT_USEC while the phases of the shutdown go on
"""

from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.log import log
from musterd.supervisor.service.notify import Notifier
from musterd.supervisor.service.problems import Problems
from musterd.supervisor.views import fleet as fleet_view

PERIOD_NS = 1_000_000_000
# Asked for anew each second: systemd gives up a loop that hangs this long after its last turn. The
# last steps are done without the loop (store, threads) and must take less.
GRACE_NS = 30_000_000_000
WATCHDOG_SHARE = 4  # WATCHDOG=1 is sent this many times as often as needed: one may be late


class SystemdStatus:
    def __init__(self, notifier: Notifier, started_ns: int) -> None:
        self._notifier = notifier
        self._started_ns = started_ns
        self._due_ns = 0
        self._fed_ns = 0
        self._stopping = False
        self.ready = False

    def turn(self, now_ns: int, fleet: Fleet, problems: Problems) -> None:
        """Tell systemd what is due, in every turn of the loop."""
        self._feed(now_ns)
        if not self.ready and fleet.phase == Phase.UP and fleet_view.settled(fleet):
            self.ready = True
            self._due_ns = 0
            self._notifier.tell("READY=1")
            log.note("daemon.ready", seconds=f"{(now_ns - self._started_ns) / 1e9:.3f}")
        if fleet.phase != Phase.UP and not self._stopping:
            self._due_ns = 0
            self.stopping()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + PERIOD_NS
            self._notifier.status(fleet_view.headline(fleet, self.ready, problems.text))
            if self._stopping or not self.ready:
                self._notifier.extend_timeout(GRACE_NS)

    def begun(self, now_ns: int, what: str) -> None:
        """Tell systemd how far the start is, before there is a loop."""
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + PERIOD_NS
            self._notifier.status(f"starting: {what}")
            self._notifier.extend_timeout(GRACE_NS)

    def _feed(self, now_ns: int) -> None:
        period_ns = self._notifier.watchdog_ns // WATCHDOG_SHARE
        if period_ns and now_ns - self._fed_ns >= period_ns:
            self._fed_ns = now_ns
            self._notifier.tell("WATCHDOG=1")

    # -- reload -------------------------------------------------------------------------------

    def reloading(self) -> None:
        if self._may_say_ready:
            self._notifier.reloading()

    def reloaded(self) -> None:
        if self._may_say_ready:
            self._notifier.tell("READY=1")

    @property
    def _may_say_ready(self) -> bool:
        """Whether READY=1 would be true: not before the fleet is up, nor at the end."""
        return self.ready and not self._stopping

    # -- the end ------------------------------------------------------------------------------

    def stopping(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._notifier.tell("STOPPING=1")

    def close(self) -> None:
        self._notifier.close()
