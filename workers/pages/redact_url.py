"""Addresses without what is not for the eyes of others."""

from yarl import URL

from musterd.ipc.secrets.names import SENSITIVE, is_sensitive

# In the query of an address these are, too: ?key=... and ?sig=... let anybody in who has them.
SENSITIVE_IN_QUERY = frozenset((*SENSITIVE, "key", "sig", "signature"))
HIDDEN = "***"


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
