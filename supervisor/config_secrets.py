"""Which values of the configuration are nobody's business: they are in no log and no answer."""

import re
from collections.abc import Collection, Sequence

HIDDEN = "(hidden)"
# Names of variables and options whose values are secrets, and logins within addresses.
_SECRET = re.compile(
    r"passw|secret|token|api_?key|credential|private|auth|cookie|login", re.IGNORECASE
)
# Where they are, not what they are.
_NO_SECRET = frozenset({"secrets_dir", "token_file", "url_secret"})
_LOGIN = re.compile(r"(://)[^/@\s\"]*@")


def shown_value(path: Sequence[str], text: str, redact: Collection[str] = ()) -> str:
    """The text of the value at this path, as far as it may be shown."""
    *above, name = path
    words = (name, *above) if "options" in above or "env" in above else (name,)
    secret = any(word in redact or sounds_secret(word) for word in words)
    return HIDDEN if secret else _LOGIN.sub(r"\1" + HIDDEN + "@", text)


def sounds_secret(name: str) -> bool:
    """Whether something of this name is probably a secret."""
    return _SECRET.search(name) is not None and name not in _NO_SECRET
