"""The answer to `musterctl alerts`, as the process that sends alerts reports it."""

from msgspec import Struct


class OpenAlert(Struct, frozen=True, kw_only=True):
    """A condition that holds, or an event that is still to be told."""

    kind: str
    subject: str = ""
    stage: str  # waiting, due, told, ending, muted
    since: float  # wall-clock time
    times: int = 0  # how often it happened since it was told
    text: str = ""


class AlertStatus(Struct, frozen=True, kw_only=True):
    name: str
    destination: str  # never with a secret
    state: str  # "idle", "sending", "failing"
    open: list[OpenAlert] = []
    sent: int = 0  # messages
    failures: int = 0  # attempts
    lost: int = 0  # messages that were given up
    sent_at: float | None = None
    error: str = ""  # of the last attempt, if that failed; before the first: why it would


class AlertsStatus(Struct, frozen=True, kw_only=True):
    alerts: list[AlertStatus] = []
    pid: int = 0  # of the process that sends them; 0: none, or it has not reported yet
    state: str = "down"  # of that process: as FleetStatus.web.state
    reason: str = ""  # why it is not up


class AlertTested(Struct, frozen=True, kw_only=True):
    name: str
    error: str = ""
