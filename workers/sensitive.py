"""What is not for the eyes of others: which names stand for it, and addresses without it."""

from yarl import URL

# Names of parameters that are not for the eyes of others, alone or as the last words of a name.
SENSITIVE = (
    *("password", "passwd", "passphrase", "secret", "token", "cookie", "credentials"),
    *("auth", "authorization", "api_key", "apikey", "access_key", "private_key", "secret_key"),
)
# In the query of an address these are, too: ?key=... and ?sig=... let anybody in who has them.
SENSITIVE_IN_QUERY = frozenset({"key", "sig", "signature"})
# Marks of a place in a list, not of a person.
CURSORS = ("page_token", "next_token", "sync_token", "continuation_token", "delta_token")
HIDDEN = "***"


def is_sensitive(name: str, more: frozenset[str] = frozenset()) -> bool:
    """Whether a parameter of this name is not to be written anywhere."""
    plain = name.lower().replace("-", "_")
    if plain.endswith(CURSORS):
        return False
    return any(plain == word or plain.endswith(f"_{word}") for word in (*SENSITIVE, *more))


def shown_url(url: URL | str) -> str:
    """An address as it may be logged: no credentials, no values of sensitive parameters.

    Of one that cannot be read nothing is shown that could be either.
    """
    try:
        known = URL(url)
        query = [
            (name, HIDDEN if is_sensitive(name, SENSITIVE_IN_QUERY) else value)
            for name, value in known.query.items()
        ]
        anonymous = known.with_user(None) if known.host else known
        return str(anonymous.with_query(query).with_fragment(None))
    except ValueError:
        return _beginning(str(url))


def _beginning(url: str) -> str:
    """What comes before the query, without credentials."""
    plain = url.partition("#")[0].partition("?")[0]
    scheme, slashes, rest = plain.partition("//")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"
