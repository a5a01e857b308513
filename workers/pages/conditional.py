"""Conditional GET: ask a site whether a page is still as it was, and keep what was made of it.

    memory = await Memory.load(ctx.state, request, of)     the last good result of this request
    page = await fetch(memory.asking(request))
    memory.holds(page)                                      -> memory.result is what it would give
    await memory.keep(page, result)

What is kept is found by everything that may make a difference: the address, all headers of the
request, the size limit and the selectors. It is used only for an answer of 304 that was asked for,
comes from the same address, by whatever redirects, and names no other validator. Weak validators
will do, as for every cache of pages. Nothing is kept

    of answers other than 200, without a validator, with `Vary: *` or `Cache-Control: no-store`
    where only Last-Modified tells, and that is younger than a minute: the page may have changed
      again within the same second, and clocks differ
    with `Vary: Cookie` after redirects, which may have set a cookie
    over KEPT_BYTES_MAX
    for longer than KEPT_SECONDS: then the page is read anew, whatever the site says
"""

import hashlib
import logging
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import msgspec
from msgspec import Struct, structs

from musterd.ipc.errors import StateError
from musterd.workers.pages.http import Page, Request

KEPT_BYTES_MAX = 256 * 1024
KEPT_SECONDS = 24 * 3600.0
SETTLED_SECONDS = 60.0  # Last-Modified counts seconds, and the clocks of a site's machines differ
VALIDATOR_CHARS_MAX = 1000
DIGEST_BYTES = 16
NOT_MODIFIED = 304
# A request with one of these is conditional by itself, or for a part of the page.
OWN_CONDITIONS = frozenset(
    ("if-none-match", "if-modified-since", "if-match", "if-unmodified-since", "if-range", "range")
)

log = logging.getLogger(__name__)


class StateStore(Protocol):
    """ctx.state, as far as it is used here."""

    async def aload(self, key: str | None = None, default: Any = None) -> Any: ...
    async def asave(self, value: Any, key: str | None = None, ttl: float | None = None) -> None: ...


class _Kept(Struct, array_like=True, frozen=True):
    url: str  # the last one of the redirects
    etag: str
    modified: str
    result: Any


class Memory:
    """What is known of one request. Without a state it knows nothing and keeps nothing."""

    def __init__(self, state: StateStore | None = None, key: str = "") -> None:
        self._state = state
        self._key = key
        self._kept: _Kept | None = None

    @classmethod
    async def load(cls, state: StateStore, request: Request, of: Any) -> "Memory":
        """Return what is kept for a request with all its headers; `of` says what is made of it."""
        memory = cls(state, _key(request, of))
        try:
            found = await state.aload(memory._key)
            memory._kept = None if found is None else msgspec.convert(found, _Kept)
        except (StateError, msgspec.ValidationError) as error:
            log.debug("the page is read in full: %s", error)
        return memory

    @property
    def asks(self) -> bool:
        return self._kept is not None

    @property
    def result(self) -> Any:
        assert self._kept is not None
        return self._kept.result

    def asking(self, request: Request) -> Request:
        """Return the request with the question whether the page has changed."""
        if self._kept is None:
            return request
        asked = {}
        if self._kept.etag:
            asked["If-None-Match"] = self._kept.etag
        else:
            asked["If-Modified-Since"] = self._kept.modified
        return structs.replace(request, headers={**request.headers, **asked})

    def holds(self, page: Page) -> bool:
        """Tell whether the answer says that the page is as it was."""
        kept = self._kept
        if kept is None or page.status != NOT_MODIFIED or page.url != kept.url:
            return False
        etag = page.headers.get("etag", "")
        # Compared weakly, as If-None-Match is; some servers mark a strong one as weak in a 304.
        return not (etag and kept.etag) or _opaque(etag) == _opaque(kept.etag)

    async def keep(self, page: Page, result: Any) -> None:
        """Keep the result for the next time, if the page may be asked about."""
        if self._state is None or not (validators := validators_of(page)):
            return
        etag, modified = validators
        if len(msgspec.msgpack.encode(result)) > KEPT_BYTES_MAX:
            return
        value = [page.url, etag, modified, result]
        try:
            await self._state.asave(value, self._key, KEPT_SECONDS)
        except StateError as error:
            log.debug("the page will be read in full: %s", error)


def is_possible(request: Request) -> bool:
    """Tell whether a request can be made conditional."""
    own = OWN_CONDITIONS & {name.lower() for name in request.headers}
    return request.method == "GET" and not own


def validators_of(page: Page) -> tuple[str, str] | None:
    """Return ETag and Last-Modified, one of them ""; None if the page must be read in full."""
    headers = page.headers
    vary = {each.strip().lower() for each in headers.get("vary", "").split(",")}
    control = {each.strip().lower() for each in headers.get("cache-control", "").split(",")}
    if page.status != 200 or "*" in vary or "no-store" in control:
        return None
    if "cookie" in vary and page.redirects:
        return None
    etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
    if _is_etag(etag):
        return etag, ""
    if modified and len(modified) <= VALIDATOR_CHARS_MAX and _settled(modified, headers):
        return "", modified
    return None


def _is_etag(text: str) -> bool:
    """Tell whether this is one whole entity tag, and not several headers in one."""
    opaque = _opaque(text)
    quoted = len(opaque) >= 2 and opaque[0] == opaque[-1] == '"'
    return quoted and '"' not in opaque[1:-1] and len(text) <= VALIDATOR_CHARS_MAX


def _opaque(etag: str) -> str:
    return etag.removeprefix("W/")


def _settled(modified: str, headers: dict[str, str]) -> bool:
    try:
        at = parsedate_to_datetime(modified).timestamp()
        now = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, OverflowError):
        return False
    return now - at >= SETTLED_SECONDS


def _key(request: Request, of: Any) -> str:
    headers = sorted((name.lower(), value) for name, value in request.headers.items())
    parts = [request.url, headers, request.bytes_max, of]
    data = msgspec.msgpack.encode(parts, order="sorted")
    return f"conditional:{hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()}"
