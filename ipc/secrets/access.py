"""Which secrets the tasks of a pool may name, and where a worker finds them.

Whoever may submit a task may name any secret in it, and may have its value sent anywhere. So a
worker looks nowhere but in these places:

    variable    of the pool's `env`, or one of the daemon's that the pool's `secrets` names in full
    credential  of systemd, if the pool's `secrets` names it in full
    file        in the pool's `secrets_dir`

A name that fits no pattern of the pool's `secrets` is refused, wherever its value may be. Secrets
of the daemon itself (the web token, addresses of alerts) are not for workers, whatever the patterns
say.
"""

import os
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from musterd.ipc.secrets.lookup import MissingSecret, check_text, read_secret
from musterd.ipc.secrets.reference import is_secret_name

EVERYTHING = ("*",)  # default of pools.NAME.secrets


class RefusedSecret(MissingSecret):
    """This secret is not for this pool."""


class Access(msgspec.Struct, frozen=True):
    """What the supervisor tells the workers of a pool: names and places, no values."""

    pool: str = ""
    patterns: tuple[str, ...] = EVERYTHING
    variables: frozenset[str] = frozenset()
    credentials: dict[str, str] = {}  # name -> file
    folder: str = ""
    own: tuple[str, ...] = ()  # files of the daemon, which may lie in that folder as well

    def find(self, name: str) -> str:
        """Return the value of this secret; MissingSecret or RefusedSecret says what to do."""
        if not is_secret_name(name):  # the name came with a task, and must not lead anywhere else
            raise MissingSecret(f"{name[:128]!r} cannot be the name of a secret")
        if not fits(name, self.patterns):
            raise RefusedSecret(
                f"secret {name!r} is not for pool {self.pool!r}, which has secrets = "
                f"{list(self.patterns)}: add {name!r} to them, or name one of them"
            )
        if name in self.variables and (value := os.environ.get(name)):
            check_text(name, value)
            return value
        if name in self.credentials:
            value = read_secret(name, Path(self.credentials[name]))
            if value:
                return value
        if self.folder:
            path = Path(self.folder, name)
            if any(_same(path, each) for each in self.own):
                raise RefusedSecret(
                    f"secret {name!r} is a file of the daemon itself, and not for pool "
                    f"{self.pool!r}: give the pool a secrets_dir of its own"
                )
            value = read_secret(name, path)
            if value:
                return value
        raise RefusedSecret(
            f"secret {name!r} is not given to pool {self.pool!r}, or empty: put it into the "
            "secrets_dir or env of the pool; a variable or credential of the daemon is given by "
            f"its full name: [pools.{self.pool}] secrets = [{name!r}]"
        )


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_full_name(pattern: str) -> bool:
    """Tell whether the pattern fits one name only: such a name may be one of the daemon's."""
    return not any(sign in pattern for sign in "*?[")


def _same(path: Path, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # absent or unreadable, so it is not given away either
        return False
