"""musterctl cluster apply and show: what is one for all nodes."""

from musterd.supervisor.ctl.app import FAILED, Settings
from musterd.supervisor.ctl.output import warn


def apply(settings: Settings, file: str) -> int:
    """Apply a file to the cluster."""
    warn(f"{file} was not applied: this command is not there yet")
    return FAILED


def show(settings: Settings) -> int:
    """Show what is applied."""
    warn("this command is not there yet")
    return FAILED
