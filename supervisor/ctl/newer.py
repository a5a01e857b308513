"""Tell what is newer on disk than what workers are made of, and what to type."""

import os
import shlex
from collections.abc import Iterable

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import NewerCode, PidResult
from musterd.supervisor.ctl.app import Settings, connect
from musterd.supervisor.ctl.output import emit, warn
from musterd.supervisor.text.printable import printable

FILES_SHOWN = 3


def newer_text(newer: NewerCode) -> str:
    """Return what is new for the workers of a pool that are replaced."""
    code = f"new code ({_names(newer.files)})" if newer.files else ""
    return ", ".join(filter(None, (code, _secrets(newer))))


def _secrets(newer: NewerCode) -> str:
    return f"new secrets ({_names(newer.secrets)})" if newer.secrets else ""


def tell_restarted(settings: Settings, newer: Iterable[NewerCode]) -> None:
    """After a restart: its workers run the code that their fork server imported once."""
    for each in newer:
        if each.files:
            warn(
                f"{_has_changed(each)}; a restart keeps the code as it was: to import it anew, "
                f"type {_command(settings)} reload {each.pool}"
            )


def tell_kept(settings: Settings, newer: Iterable[NewerCode]) -> None:
    """After a reload: of pools whose workers were not replaced."""
    for each in newer:
        if each.secrets and not settings.json:
            emit(
                printable(f"pool {each.pool}: {_secrets(each)}, which its tasks read by themselves")
            )
        if each.files:
            warn(f"{_has_changed(each)}: type {_command(settings)} reload {each.pool}")


def tell_unread(settings: Settings) -> bool:
    """Tell what systemd reads at the start of the service alone, if it was written since; return
    whether there is anything."""
    from musterd.supervisor.ctl.unit import written_since_start  # subprocess takes a while

    try:
        with connect(settings) as connection:
            pid = connection.get(rpc.Pid(), PidResult).supervisor
    except MusterdError:  # it has done what was asked, and ends
        return False
    changed, restart = written_since_start(pid)
    if changed:
        have = "has" if len(changed) == 1 else "have"
        warn(
            f"{_names(changed)} {have} changed since the daemon was started, and only a restart "
            f"reads that: type {restart}"
        )
    return bool(changed)


def _has_changed(newer: NewerCode) -> str:
    have = "has" if len(newer.files) == 1 else "have"
    return f"{_names(newer.files)} {have} changed since pool {newer.pool} imported it"


def _command(settings: Settings) -> str:
    return f"musterctl -s {shlex.quote(settings.socket)}" if settings.socket else "musterctl"


def _names(paths: list[str]) -> str:
    """Return the first few, without the directory that we are in."""
    here = os.getcwd() + os.sep
    shown = ", ".join(path.removeprefix(here) for path in paths[:FILES_SHOWN])
    more = len(paths) - FILES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
