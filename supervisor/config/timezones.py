"""Time zones by name, and the time zone of this machine."""

import os
from pathlib import Path
from zoneinfo import ZoneInfo

LOCALTIME = Path("/etc/localtime")
_GIVE = 'give a name such as "Europe/Berlin" or "UTC"'


def time_zone(name: str) -> ZoneInfo:
    """Return the zone of this name, "" for that of this machine; ValueError if unknown."""
    if not name:
        return _local_zone()
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown, not a name, the name of a folder
        raise ValueError(f"is not a known time zone: {_GIVE}") from None


def _local_zone() -> ZoneInfo:
    given = os.environ.get("TZ", "").removeprefix(":")
    if given and not given.startswith("/"):
        try:
            return time_zone(given)
        except ValueError:
            raise ValueError(f"is not given, and TZ={given!r} names no zone: {_GIVE}") from None
    path = Path(given) if given else LOCALTIME
    if not given and not path.exists():
        return ZoneInfo("UTC")  # as the C library does
    name = os.path.realpath(path).partition("/zoneinfo/")[2]
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        pass  # a copy of the file, not a link
    try:
        with path.open("rb") as file:
            return ZoneInfo.from_file(file, key="local")
    except (OSError, ValueError) as error:
        raise ValueError(f"is not given, and {path} cannot be read ({error}): {_GIVE}") from None
