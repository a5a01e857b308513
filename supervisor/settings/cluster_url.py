"""Where the PostgreSQL of the cluster is: the URL, which usually holds a password."""

from pathlib import Path

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.secrets.lookup import MissingSecret, find_secret, read_secret


def cluster_url(url: str, url_file: str, url_secret: str) -> str:
    """Return the URL that one of the three keys of [cluster] gives.

    ConfigurationError, without the URL, if there is none.
    """
    try:
        if url_file:
            url = read_secret(Path(url_file).name, Path(url_file))
        elif url_secret:
            url = find_secret(url_secret)
    except MissingSecret as error:
        raise ConfigurationError(str(error)) from None
    if not url.strip():
        raise ConfigurationError(f"cluster.url_file {url_file} is missing or empty")
    return url.strip()
