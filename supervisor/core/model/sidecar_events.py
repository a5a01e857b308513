"""What can happen to a sidecar (core/workers/sidecar.py). `number` says which process it is."""

from msgspec import Struct

# The sidecars there are.
WEB, ALERTS, EVENTS = "web", "alerts", "events"


class SidecarReady(Struct, frozen=True):
    """It is at work; the web process listens."""

    number: int
    pid: int
    address: str
    name: str = WEB


class SidecarBeat(Struct, frozen=True):
    """It says that it lives."""

    number: int
    name: str = WEB


class SidecarExited(Struct, frozen=True):
    """It is gone, or could not be made."""

    number: int
    reason: str
    fatal: bool = False  # trying again will not help
    name: str = WEB
