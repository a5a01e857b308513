"""Names that stand for what nobody else may see: compared by word, however they are written.

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
# Marks of a place in a list, not of a person.
CURSORS = ("page_token", "next_token", "sync_token", "continuation_token", "delta_token")
NAME_CHARS_MAX = 200  # longer keys are texts, of which the end is looked at
NAMES_KEPT = 4096  # a program has few names; their words are split once

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+")


def is_sensitive(name: str, names: frozenset[str] = frozenset(SENSITIVE)) -> bool:
    """Whether it is one of these names, or ends with the words of one.

    A cursor is none of them, unless they name it.
    """
    return _is_sensitive(name[-NAME_CHARS_MAX:], names)


@lru_cache(maxsize=NAMES_KEPT)
def _is_sensitive(name: str, names: frozenset[str]) -> bool:
    found = _ends(name) & _together(names)
    return bool(found) and (not _ends(name) & _CURSORS or bool(found & _CURSORS))


def last_word(name: str) -> str:
    """What every name has in it, in any case, that is the same or ends with this one."""
    words = words_of(name)
    return words[-1] if words else name.lower()


def words_of(name: str) -> list[str]:
    """In lower case, without a number at the end."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and words[-1].isdigit():  # password2 is one as well
        words.pop()
    return words


def _ends(name: str) -> frozenset[str]:
    """Its last words, more and more of them."""
    words = words_of(name)
    return frozenset("".join(words[at:]) for at in range(len(words)))


@lru_cache(maxsize=NAMES_KEPT)
def _together(names: frozenset[str]) -> frozenset[str]:
    return frozenset("".join(words_of(name)) or name for name in names)


_CURSORS = _together(frozenset(CURSORS))
