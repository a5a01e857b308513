"""Entries of `proxies`: an address without a login, or the name of a secret that is an address."""

from urllib.parse import urlsplit

from musterd.ipc.secrets.reference import is_secret_name

PROXIES_MAX = 100  # of one list
PROXY_CHARS_MAX = 300
BY_NAME = "secret:"
SCHEMES = ("http", "https", "socks5")


def secret_of(entry: str) -> str:
    """Return the name of the secret that has the address; "" for an entry that is one itself."""
    return entry.removeprefix(BY_NAME) if entry.startswith(BY_NAME) else ""


def address_problem(address: str) -> str:
    """Return what is wrong with the address of a proxy, without showing it; "" if nothing is."""
    try:
        parts = urlsplit(address)
        whole = parts.scheme in SCHEMES and parts.hostname and parts.port
    except ValueError:
        whole = False
    if not whole or len(address) > PROXY_CHARS_MAX:
        return f"is not scheme://host:port with one of {', '.join(SCHEMES)}"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "has more than scheme://host:port"
    return ""


def entry_problem(entry: str) -> str:
    """Return what is wrong with an entry of `proxies`; "" if nothing is."""
    if entry.startswith(BY_NAME):
        return "" if is_secret_name(secret_of(entry)) else "does not name a secret behind secret:"
    if problem := address_problem(entry):
        return problem
    if "@" in entry:
        return (
            'has a login in it: put the whole address into a secret, and write "secret:NAME" here'
        )
    return ""
