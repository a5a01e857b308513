"""Sensitive names, such as those of passwords: compared word by word, in any spelling.

`user_password`, `userPassword`, `USER-PASSWORD` and `user password` are the same two words, and end
with a sensitive one. Written together, `apikey` is the same as `api_key`.
"""

import re
from functools import lru_cache

# Alone, or as the last words of a name.
SENSITIVE = (
    *("password", "passwd", "passphrase", "secret", "token", "cookie", "credentials"),
    *("auth", "authorization", "api_key", "access_key", "private_key", "secret_key"),
)
# Cursors: they mark a place in a list, not a person.
CURSORS = ("page_token", "next_token", "sync_token", "continuation_token", "delta_token")
NAME_CHARS_MAX = 200  # a longer key is a text, and only its end is looked at
NAMES_KEPT = 4096  # a program has few names; their words are split once

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+")


def is_sensitive(name: str, names: frozenset[str] = frozenset(SENSITIVE)) -> bool:
    """Tell whether the name is one of `names` or ends with the words of one.

    A cursor is not sensitive unless `names` has it.
    """
    return _is_sensitive(name[-NAME_CHARS_MAX:], names)


@lru_cache(maxsize=NAMES_KEPT)
def _is_sensitive(name: str, names: frozenset[str]) -> bool:
    found = _ends(name) & _together(names)
    return bool(found) and (not _ends(name) & _CURSORS or bool(found & _CURSORS))


def last_word(name: str) -> str:
    """Return the word that every name contains which equals or ends with this one."""
    words = words_of(name)
    return words[-1] if words else name.lower()


def words_of(name: str) -> list[str]:
    """Split a name into lower-case words, without a number at the end."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and words[-1].isdigit():  # password2 is sensitive as well
        words.pop()
    return words


def _ends(name: str) -> frozenset[str]:
    """Return the last word, the last two, and so on, each joined."""
    words = words_of(name)
    return frozenset("".join(words[at:]) for at in range(len(words)))


@lru_cache(maxsize=NAMES_KEPT)
def _together(names: frozenset[str]) -> frozenset[str]:
    return frozenset("".join(words_of(name)) or name for name in names)


_CURSORS = _together(frozenset(CURSORS))
