"""Look up secrets of the daemon: in the environment variable, else in the systemd credential.

Workers look elsewhere: see access.py.
"""

import os
import stat
from pathlib import Path

from musterd.ipc.secrets.reference import is_secret_name
from musterd.ipc.wire.environment import CREDENTIALS_VARIABLE

SECRET_BYTES_MAX = 64 * 1024  # a key or a certificate; a larger file is not a secret


class MissingSecret(Exception):
    """A named secret is absent. The message never holds a value."""


def find_secret(name: str) -> str:
    """Return the value of this secret of the daemon; MissingSecret says where it was looked for."""
    if not is_secret_name(name):
        raise MissingSecret(f"{name[:128]!r} cannot be the name of a secret")
    value = os.environ.get(name)
    if value:
        check_text(name, value)
        return value
    lacks = f"environment variable {name}"
    folder = os.environ.get(CREDENTIALS_VARIABLE)
    if folder:
        lacks += " and no systemd credential of that name"
        value = read_secret(name, Path(folder, name))
        if value:
            return value
    raise MissingSecret(
        f"secret {name!r} is missing or empty: the daemon has no {lacks}: give it one, and start "
        "it again"
    )


def check_text(name: str, value: str) -> None:
    """Raise MissingSecret if the value of a variable is not text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MissingSecret(f"secret {name!r}: its variable is not UTF-8 text") from None


def read_secret(name: str, path: Path) -> str:
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise MissingSecret(f"secret {name!r}: {path} is not an ordinary file")
            data = file.read(SECRET_BYTES_MAX + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise MissingSecret(f"secret {name!r} cannot be read: {error.strerror}: {path}") from None
    if len(data) > SECRET_BYTES_MAX:
        raise MissingSecret(f"secret {name!r}: {path} has more than {SECRET_BYTES_MAX} bytes")
    try:
        return data.decode().rstrip("\r\n")  # editors and echo end files with a line break
    except UnicodeDecodeError:
        raise MissingSecret(f"secret {name!r}: {path} is not text in UTF-8") from None


def _at_once(path: str, flags: int) -> int:
    """Open without blocking: a pipe would keep the worker waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)
