"""The token that opens the actions of the page: what is in one file, and nothing else.

The file is read again when it has changed, so a token is replaced by writing another. One that is
missing, too short or open to everybody opens nothing: the reason is said once, in the log.
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
    """Where it is: an absolute path, or the name of a credential that systemd gives."""
    if name.startswith("/"):
        return Path(name)
    folder = os.environ.get(CREDENTIALS_VARIABLE)
    if not folder:
        raise ConfigurationError(
            f"key 'http.token_file': value \"{name}\" is the name of a systemd credential, and "
            "there are none: give LoadCredential= in the unit, or an absolute path"
        )
    return Path(folder, name)


def read_token(name: str) -> str:
    """ConfigurationError if it is not there, or is not kept as a secret is."""
    path = token_path(name)
    where = f"key 'http.token_file': {path}"
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or len(data) > TOKEN_BYTES_MAX:
        raise ConfigurationError(f"{where} is no file of at most {TOKEN_BYTES_MAX} bytes")
    if found.st_mode & stat.S_IRWXO:
        raise ConfigurationError(f"{where} is open to everybody: chmod o= {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(f"{where} belongs to uid {found.st_uid}: chown it to root")
    try:
        token = data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{where} is not plain text: write letters and digits") from None
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or " " in token:
        raise ConfigurationError(
            f"{where} has no token of at least {TOKEN_CHARS_MIN} characters: write one by "
            f"openssl rand -hex 32 > {path}"
        )
    return token


class Token:
    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: tuple[int, int, int] | None = None  # the file, as it was when it was read
        self._digest = b""  # of the token; "" if there is none
        self._said = ""

    @property
    def configured(self) -> bool:
        return bool(self._name)

    def fits(self, given: str) -> bool:
        """In a time that tells nothing of the token."""
        self._refresh()
        digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(digest, self._digest or b"\0" * len(digest)) and bool(
            self._digest
        )

    def usable(self) -> bool:
        """Whether there is one that could be given."""
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
