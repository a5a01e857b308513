"""Where the value of a secret is found, and how it may be written where nobody should see it.

A secret is found in the environment variable of its name, else in the systemd credential of its
name, else in a file of its name in the `secrets_dir` of a worker's pool.
"""

import base64
import json
import os
from pathlib import Path
from urllib.parse import quote, quote_plus

from musterd.ipc.secret import SECRETS_DIR_VARIABLE, is_secret_name

CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"  # set by systemd

SECRET_BYTES_MAX = 64 * 1024  # a key or a certificate; a larger file is not a secret
# Shorter values are found in any text by chance: replacing them would tell more than it hides.
TEXT_CHARS_MIN = 4


class MissingSecret(Exception):
    """A secret that is named is not there. Never says what a value is."""


def find_secret(name: str, whom: str = "this pool's workers") -> str:
    """The value of this secret; MissingSecret says where it was looked for."""
    if not is_secret_name(name):  # the name came with a task, and must not lead anywhere else
        raise MissingSecret(f"{name[:128]!r} cannot be the name of a secret")
    value = os.environ.get(name)
    if value:
        if not value.isascii():
            _check_text(name, value)
        return value
    looked = [f"the environment variable {name}"]
    for variable, called in (
        (CREDENTIALS_VARIABLE, "the systemd credential"),
        (SECRETS_DIR_VARIABLE, "the pool's secrets_dir"),
    ):
        folder = os.environ.get(variable)
        if folder:
            looked.append(called)
            value = read_secret(name, Path(folder, name))
            if value:
                return value
    raise MissingSecret(
        f"secret {name!r} is not there or empty: looked for in {', '.join(looked)}; "
        f"set one of them for {whom}"
    )


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MissingSecret(f"secret {name!r}: its variable is not text in UTF-8") from None


def read_secret(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
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


def written_forms(value: str) -> set[str]:
    """A secret as it may stand in a message, a URL or a header."""
    if len(value) < TEXT_CHARS_MIN:
        return set()
    plain = value.encode()
    return {
        value,
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        quote(plain, safe=""),
        quote(plain),
        quote_plus(plain),
        base64.b64encode(plain).decode(),
    }
