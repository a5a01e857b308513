"""The token that unlocks the actions of the dashboard, read from http.token_file.

The file is read again after a change: writing it replaces the token. A token that is missing, too
short or readable by everybody unlocks nothing; the reason is logged once.
"""

import hashlib
import hmac
import os
import stat
import sys
from pathlib import Path

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.environment import CREDENTIALS_VARIABLE

TOKEN_CHARS_MIN = 16
TOKEN_BYTES_MAX = 4096


def token_path(name: str) -> Path:
    """Return the path of the file: absolute, or that of a systemd credential."""
    if name.startswith("/"):
        return Path(name)
    folder = os.environ.get(CREDENTIALS_VARIABLE)
    if not folder:
        raise ConfigurationError(
            f"key 'http.token_file': value \"{name}\" is the name of a systemd credential, and "
            "there are none: set LoadCredential= in the unit, or give an absolute path"
        )
    return Path(folder, name)


def read_token(name: str) -> str:
    """Return the token; ConfigurationError if it is missing or not kept secret."""
    path = token_path(name)
    where = f"key 'http.token_file': {path}"
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or len(data) > TOKEN_BYTES_MAX:
        raise ConfigurationError(f"{where} is not a file of at most {TOKEN_BYTES_MAX} bytes")
    if found.st_mode & stat.S_IRWXO:
        raise ConfigurationError(f"{where} is accessible to everybody: chmod o= {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(f"{where} belongs to uid {found.st_uid}: chown it to root")
    try:
        token = data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{where} is not plain text: write letters and digits") from None
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or " " in token:
        raise ConfigurationError(
            f"{where} has no token of at least {TOKEN_CHARS_MIN} characters: write one with "
            f"openssl rand -hex 32 > {path}"
        )
    return token


class Token:
    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: tuple[int, int, int] | None = None  # the file as it was read
        self._digest = b""  # of the token; "" if there is none
        self._said = ""

    @property
    def configured(self) -> bool:
        return bool(self._name)

    def fits(self, given: str) -> bool:
        """Compare with the token in constant time."""
        self._refresh()
        digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(digest, self._digest or b"\0" * len(digest)) and bool(
            self._digest
        )

    def usable(self) -> bool:
        """Return whether the file has a valid token."""
        self._refresh()
        return bool(self._digest)

    def _refresh(self) -> None:
        if not self._name:
            return
        try:
            found = os.stat(token_path(self._name))
            seen = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
            if seen == self._seen:
                return
            token = read_token(self._name)
        except (ConfigurationError, OSError) as error:
            self._seen, self._digest = None, b""
            if str(error) != self._said:
                self._said = str(error)
                print(f"musterd web: actions are off: {error}", file=sys.stderr, flush=True)
            return
        self._seen, self._said = seen, ""
        self._digest = hashlib.sha256(token.encode()).digest()
