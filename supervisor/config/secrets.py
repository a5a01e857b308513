"""Secrets in the configuration: values that are never shown, and secrets that a pool may use."""

import re
from collections.abc import Collection, Sequence

from musterd.ipc.secrets.access import is_full_name
from musterd.ipc.secrets.names import is_sensitive
from musterd.ipc.secrets.proxy import PROXIES_MAX, entry_problem
from musterd.ipc.secrets.reference import is_secret_name
from musterd.ipc.wire.environment import OF_DAEMON
from musterd.supervisor.config.kinds import TextList

HIDDEN = "(hidden)"
# Names of variables and options whose values are secrets.
_SECRET = re.compile(
    r"passw|secret|token|api_?key|credential|private|auth|cookie|login", re.IGNORECASE
)
# Keys that say where a secret is, not what it is.
_NO_SECRET = frozenset(
    {"secrets", "secrets_dir", "token_file", "url_secret", "key_secret", "key_file"}
)
_SECRET_PATTERN = re.compile(r"[A-Za-z0-9_.*?\[\]!-]{1,128}")  # a name, and wildcards
_CONFIGURATION = "MUSTERD_"  # prefix of the daemon's own variables
_LOGIN_KEYS = ("login", "login_task", "login_failures", "login_pause")
_LOGIN = re.compile(r"(://)[^/@\s\"]*@")


def shown_value(path: Sequence[str], text: str, redact: Collection[str] = ()) -> str:
    """Return the text of the value at this path, with secrets hidden."""
    *above, name = path
    if name in _LOGIN_KEYS and len(above) == 2 and above[0] == "sessions":
        return text  # no login itself
    words = (name, *above) if "options" in above or "env" in above else (name,)
    names = frozenset(redact)
    secret = any(
        sounds_secret(word) or (is_sensitive(word, names) and word not in _NO_SECRET)
        for word in words
    )
    return HIDDEN if secret else _LOGIN.sub(r"\1" + HIDDEN + "@", text)


def sounds_secret(name: str) -> bool:
    """Return whether a value of this name is probably a secret."""
    return _SECRET.search(name) is not None and name not in _NO_SECRET


class Proxies(TextList, frozen=True):
    """A list of proxies, each an address without a login or "secret:NAME" of one."""

    noun = "proxies"
    example = '"http://proxy.example:3128", "secret:PROXY_URL"'
    count_max = PROXIES_MAX

    def read_one(self, text: str) -> str:
        if problem := entry_problem(text):
            shown = _LOGIN.sub(r"\1" + HIDDEN + "@", text[:200])
            raise ValueError(f'has "{shown}", which {problem}: correct it')
        return text


class SecretPatterns(TextList, frozen=True):
    """A list of secret names; they may have wildcards."""

    noun = "secret names"
    example = '"SHOP_*"'
    remedy = "use a pattern such as SHOP_*"

    def read_one(self, text: str) -> str:
        if is_full_name(text):
            if not is_secret_name(text):
                raise ValueError(
                    f'has "{text[:200]}", which is not a valid secret name: give that of a '
                    "variable, a credential or a file, or a pattern such as SHOP_*"
                )
            if text.startswith(_CONFIGURATION) or text in OF_DAEMON:
                raise ValueError(
                    f'has "{text}", which is the daemon\'s own and never for workers: remove it'
                )
        elif not _SECRET_PATTERN.fullmatch(text):
            raise ValueError(
                f'has "{text[:200]}", which matches no secret: use letters, digits, _ . - '
                "and the wildcards * ? [abc]"
            )
        return text
