"""Lists of proxies: each request takes the next one, and a dead one is left out for a while.

    proxies = Proxies()                                     kept for a worker's life
    for proxy in proxies.usable(entries, site, secret):     those that are not left out, in turn
        ...                                                 proxies.worked(proxy, site)
        ...                                                 proxies.failed(proxy, site, error)

A proxy that fails is left out for PAUSE_SECONDS, and twice as long each further time, until it
works. One that cannot be reached or refuses its login is left out everywhere; one that does not
connect to a site, for that site alone: the fault may be the site's. Each worker learns this by
itself.
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from msgspec import Struct

from musterd.ipc.errors import ProxyFailed
from musterd.ipc.secrets.lookup import MissingSecret
from musterd.ipc.secrets.proxy import address_problem, secret_of
from musterd.workers.pages.http import BadRequest

PAUSE_SECONDS = 10.0
PAUSE_SECONDS_MAX = 600.0
FAILURES_MAX = 1000  # proxies that a worker remembers as failed
TRIES_MAX = 3  # proxies for one attempt
EVERYWHERE = ""


class NoProxyLeft(ProxyFailed):
    """All proxies of the site have failed a moment ago."""


class Proxy(Struct, frozen=True):
    entry: str  # as configured; may be shown
    address: str  # with its login


class _Failure(Struct):
    count: int
    until: float


class Proxies:
    """Turn and health of proxies."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = random.randrange(1000)  # the workers of a pool do not begin with the same one
        # by entry and site, the newest last
        self._failures: OrderedDict[tuple[str, str], _Failure] = OrderedDict()

    def usable(
        self, entries: Sequence[str], site: str, secret: Callable[[str], str]
    ) -> list[Proxy]:
        """Return the proxies to try, the next one in turn first; NoProxyLeft if all are left out.

        `secret` returns the value of a secret by its name.
        """
        now = self._clock()
        back = {entry: self._back_at(entry, site) for entry in entries}
        left = [entry for entry in entries if back[entry] <= now]
        if not left:
            after = min(back.values()) - now
            raise NoProxyLeft(
                f"all {len(entries)} proxies for {site} have failed; the next one is tried again "
                f"in {after:.0f} s: look at proxies = {list(entries)}",
                retry_after=after,
            )
        self._turn += 1
        first = self._turn % len(left)
        chosen = (left[first:] + left[:first])[:TRIES_MAX]
        return [Proxy(entry, _address(entry, secret)) for entry in chosen]

    def worked(self, proxy: Proxy, site: str) -> None:
        self._failures.pop((proxy.entry, EVERYWHERE), None)
        self._failures.pop((proxy.entry, site), None)

    def failed(self, proxy: Proxy, site: str, error: ProxyFailed) -> None:
        key = (proxy.entry, EVERYWHERE if error.everywhere else site)
        known = self._failures.pop(key, None)
        count = known.count + 1 if known is not None else 1
        pause = min(PAUSE_SECONDS * 2.0 ** (count - 1), PAUSE_SECONDS_MAX)
        self._failures[key] = _Failure(min(count, 32), self._clock() + pause)
        while len(self._failures) > FAILURES_MAX:
            self._failures.popitem(last=False)

    def _back_at(self, entry: str, site: str) -> float:
        known = (self._failures.get((entry, each)) for each in (EVERYWHERE, site))
        return max((each.until for each in known if each is not None), default=0.0)


def _address(entry: str, secret: Callable[[str], str]) -> str:
    name = secret_of(entry)
    if not name:
        return entry
    try:
        address = secret(name)
    except MissingSecret as error:
        raise BadRequest(f"proxies has {entry!r}: {error}") from None
    if problem := address_problem(address):
        raise BadRequest(f"proxies has {entry!r}: the value of that secret {problem}")
    return address


def host_of(url: str) -> str:
    """Return the host of an address; "" where it cannot be read, which the request will say."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
