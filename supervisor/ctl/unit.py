"""Find files that systemd read when it started the daemon's unit, and that were written since.

An environment file, a credential and the unit itself are read at the start of a service: what has
changed in them, no reload can bring. Whoever types `musterctl reload` is told.
"""

import contextlib
import glob
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

SYSTEMCTL_SECONDS = 2.0
FILES_MAX = 100  # looked at
PROPERTIES = ("MainPID", "EnvironmentFiles", "FragmentPath", "DropInPaths", "NeedDaemonReload")
PLACE = re.compile(r"(.+) \(ignore_errors=(?:yes|no)\)")
# systemd 252 does not show these. A path with % is one that only systemd knows.
CREDENTIAL = re.compile(r"^LoadCredential(?:Encrypted)?=[^:\s]+:(/[^%\n]+)$", re.MULTILINE)


def unit_of(pid: int) -> tuple[str, bool]:
    """Return the service that a process belongs to, and whether it is one of a user's manager;
    "" where it is none."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return "", False
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controllers != "name=systemd":
            continue
        services = [part for part in path.split("/") if part.endswith(".service")]
        if services:
            of_user = len(services) > 1 and services[0].startswith("user@")
            return services[-1] if of_user or len(services) == 1 else services[0], of_user
    return "", False


def command(verb: str, unit: str, *, of_user: bool) -> list[str]:
    return ["systemctl", *(["--user"] if of_user else []), verb, unit]


def written_since_start(pid: int) -> tuple[list[str], str]:
    """Return what was written since the daemon of this pid was started and only a restart reads,
    and the command that restarts it; nothing where systemd did not start it."""
    unit, of_user = unit_of(pid)
    started = _started_at(pid)
    if not unit or started is None:
        return [], ""
    shown = _show(unit, of_user=of_user)
    if ("MainPID", str(pid)) not in shown:  # a daemon that something else in the service started
        return [], ""
    files = islice(dict.fromkeys(_files(shown)), FILES_MAX)
    changed = [path for path in files if _changed_at(path) > started]
    restart = " ".join(_command("restart", unit, of_user=of_user))
    if ("NeedDaemonReload", "yes") in shown:
        changed.insert(0, unit)
        restart = f"{' '.join(_command('daemon-reload', of_user=of_user))}; {restart}"
    return changed, restart


def _command(verb: str, *words: str, of_user: bool) -> list[str]:
    return ["systemctl", *(["--user"] if of_user else []), verb, *words]


def _show(unit: str, *, of_user: bool) -> list[tuple[str, str]]:
    """Return what systemd says about the unit; nothing if it does not answer."""
    wanted = [word for name in PROPERTIES for word in ("-p", name)]
    try:
        done = subprocess.run(
            _command("show", unit, *wanted, of_user=of_user),
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no systemctl, or a manager that hangs
        return []
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return [(name, value) for name, _, value in pairs]


def _files(shown: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the files that are read at the start, beside the unit itself."""
    for name, value in shown:
        if name == "EnvironmentFiles" and (place := PLACE.fullmatch(value)):
            yield from sorted(glob.glob(place[1]))
        elif name in ("FragmentPath", "DropInPaths"):
            for path in value.split():
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    yield from CREDENTIAL.findall(Path(path).read_text())


def _changed_at(path: str) -> float:
    """Return when a file changed, in seconds of the wall clock; 0.0 for one that is not there."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_ctime
    return 0.0


def _started_at(pid: int) -> float | None:
    """Return when a process began, in seconds of the wall clock."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    ticks = int(stat.rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age
