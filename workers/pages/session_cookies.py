"""Cookies of a session, in the jar of an HTTP client and back."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from http.cookies import Morsel

import aiohttp
from yarl import URL

from musterd.workers.authoring.session import Cookie, Session


class RawJar(aiohttp.CookieJar):
    """Jar that sends values as sites have sent them, as browsers do: aiohttp quotes some anew."""

    def __init__(self) -> None:
        # "unsafe" is aiohttp's word for cookies of sites without a name, such as http://127.0.0.1/.
        super().__init__(unsafe=True, quote_cookie=False)

    def update_cookies_from_headers(self, headers: Sequence[str], response_url: URL) -> None:
        super().update_cookies_from_headers(headers, response_url)
        for named in self.cookies.values():
            for morsel in named.values():
                if morsel.value != morsel.coded_value:
                    _set_raw(morsel, morsel.key, morsel.coded_value)

    @classmethod
    def _parse_date(cls, date_str: str) -> int | None:
        """Sites delete cookies with the beginning of 1970, which aiohttp takes for no date."""
        seconds = super()._parse_date(date_str)
        return 1 if seconds == 0 else seconds


def _set_raw(morsel: "Morsel[str]", name: str, value: str) -> None:
    """Set a value as it is: Morsel.set() would quote it, and refuse some names."""
    state = {"key": name, "value": value, "coded_value": value}
    morsel.__setstate__(state)  # type: ignore[attr-defined]


def jar_of(cookies: list[Cookie]) -> aiohttp.CookieJar:
    """Return a jar with these cookies; those that have expired are left out."""
    jar = RawJar()
    now = time.time()
    for each in cookies:
        if each.expires and each.expires <= now:
            continue
        morsel: Morsel[str] = Morsel()
        _set_raw(morsel, each.name, each.value)
        morsel["path"] = each.path
        morsel["domain"] = each.host if each.domain.startswith(".") else ""  # "": this host alone
        morsel["secure"] = each.secure
        morsel["httponly"] = each.http_only
        morsel["samesite"] = each.same_site
        if each.expires:
            morsel["expires"] = format_datetime(datetime.fromtimestamp(each.expires, UTC), True)
        jar.update_cookies([(each.name, morsel)], URL.build(scheme="https", host=each.host))
    return jar


def cookies_of(jar: aiohttp.CookieJar) -> list[Cookie]:
    """Return what is in a jar."""
    return list(_cookies(jar))


def keep_changes(session: Session, before: list[Cookie], jar: aiohttp.CookieJar) -> None:
    """Keep what a request has changed in its jar: others may change the session meanwhile."""
    known = {each.place: each for each in before}
    now = {each.place: each for each in cookies_of(jar)}
    changed = {place: each for place, each in now.items() if known.get(place) != each}
    gone = known.keys() - now.keys() | changed.keys()
    others = [each for each in session.cookies if each.place not in gone]
    session.cookies = [*others, *changed.values()]


def _cookies(jar: aiohttp.CookieJar) -> Iterator[Cookie]:
    here_only = jar.host_only_cookies
    len(jar)  # drops what has expired
    for (domain, path), named in jar.cookies.items():
        for name, morsel in named.items():
            if not domain:
                continue
            yield Cookie(
                name=name,
                value=morsel.coded_value,
                domain=domain if (domain, path, name) in here_only else f".{domain}",
                path=morsel["path"] or "/",
                expires=_expires(morsel),
                secure=bool(morsel["secure"]),
                http_only=bool(morsel["httponly"]),
                same_site=str(morsel["samesite"] or "").capitalize(),
            )


def _expires(morsel: "Morsel[str]") -> float:
    try:
        if morsel["max-age"]:
            return time.time() + int(morsel["max-age"])
        if morsel["expires"]:
            return parsedate_to_datetime(morsel["expires"]).timestamp()
    except (ValueError, OverflowError):
        pass  # the jar does not understand it either
    return 0.0
