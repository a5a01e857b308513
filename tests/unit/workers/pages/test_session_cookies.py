"""Cookies of a session go into an HTTP client's jar and come back as they were."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from yarl import URL

from musterd.workers.authoring.session import EXPIRES_MAX, Cookie
from musterd.workers.pages.session_cookies import cookies_of, jar_of

LATER = 4_000_000_000.0


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@pytest.mark.parametrize(
    "cookie",
    [
        Cookie(name="sid", value="0123", domain="shop.example"),
        Cookie(name="sid", value="0123", domain=".shop.example", path="/a/b"),
        Cookie(name="sid", value="0123", domain="127.0.0.1", expires=LATER),
        Cookie(name="json", value='{"a":"b c",1}', domain="shop.example"),
        Cookie(name="quoted", value='"a b"', domain="shop.example"),
        Cookie(
            name="__Host-sid",
            value="x",
            domain="shop.example",
            secure=True,
            http_only=True,
            same_site="Lax",
        ),
    ],
)
@in_a_loop
async def test_a_cookie_comes_back_as_it_was(cookie: Cookie) -> None:
    assert cookies_of(jar_of([cookie])) == [cookie]


@in_a_loop
async def test_a_cookie_is_sent_to_its_own_hosts_alone() -> None:
    jar = jar_of(
        [
            Cookie(name="here", value="1", domain="shop.example"),
            Cookie(name="below", value="1", domain=".shop.example"),
        ]
    )
    assert set(jar.filter_cookies(URL("http://shop.example/"))) == {"here", "below"}
    assert set(jar.filter_cookies(URL("http://www.shop.example/"))) == {"below"}
    assert set(jar.filter_cookies(URL("http://other.example/"))) == set()


@in_a_loop
async def test_a_value_is_sent_as_the_site_has_sent_it() -> None:
    jar = jar_of([Cookie(name="json", value='{"a":1}', domain="shop.example")])
    sent = jar.filter_cookies(URL("http://shop.example/"))
    assert sent["json"].coded_value == '{"a":1}'


@pytest.mark.parametrize("value", ['{"a":"b c",1}', '"quoted value"', "a=b=="])
@in_a_loop
async def test_a_value_of_a_site_is_sent_back_as_it_was(value: str) -> None:
    jar, url = jar_of([]), URL("http://shop.example/")
    jar.update_cookies_from_headers([f"raw={value}; Path=/"], url)
    assert jar.filter_cookies(url)["raw"].coded_value == value
    assert cookies_of(jar)[0].value == value


@in_a_loop
async def test_what_has_expired_is_left_out() -> None:
    jar = jar_of([Cookie(name="old", value="1", domain="shop.example", expires=1.0)])
    assert cookies_of(jar) == []


@in_a_loop
async def test_the_site_says_when_a_cookie_expires() -> None:
    jar = aiohttp.CookieJar(unsafe=True)
    headers = CIMultiDict([("Set-Cookie", "sid=1; Max-Age=60; HttpOnly; SameSite=lax")])
    jar.update_cookies_from_headers(headers.getall("Set-Cookie"), URL("http://127.0.0.1:8080/x"))
    (cookie,) = cookies_of(jar)
    assert cookie.domain == "127.0.0.1"
    assert time.time() < cookie.expires <= time.time() + 60
    assert (cookie.http_only, cookie.same_site) == (True, "Lax")


@in_a_loop
async def test_a_site_deletes_a_cookie_by_the_beginning_of_1970() -> None:
    """Sites delete cookies so, and aiohttp takes this one instant for no date at all."""
    jar = jar_of([Cookie(name="sid", value="0123", domain="shop.example")])
    gone = "sid=deleted; Path=/; Expires=Thu, 01 Jan 1970 00:00:00 GMT"
    jar.update_cookies_from_headers([gone], URL("https://shop.example/logout"))
    assert cookies_of(jar) == []


@pytest.mark.parametrize("age", ["9" * 12, "9" * 20, "9" * 400])
@in_a_loop
async def test_a_cookie_that_lasts_forever_does_not_break_its_session(age: str) -> None:
    jar = jar_of([])
    jar.update_cookies_from_headers([f"sid=1; Max-Age={age}"], URL("https://shop.example/"))
    kept = cookies_of(jar)
    assert cookies_of(jar_of(kept)) == kept != []


def test_when_a_cookie_expires_is_a_date_or_said_by_the_site() -> None:
    def kept(expires: float) -> float:
        return Cookie(name="sid", value="1", domain="shop.example", expires=expires).expires

    assert kept(LATER) == LATER
    assert kept(1e20) == kept(math.inf) == EXPIRES_MAX
    assert kept(-1.0) == kept(math.nan) == 0.0, "-1 is how browsers' tools write it"


ATTRIBUTES = ("Path", "Domain", "Expires", "Max-Age", "SameSite", "Secure", "HttpOnly")
TEXT = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=20)
HEADER = st.builds(
    lambda name, value, rest: "; ".join([f"{name}={value}", *(f"{k}={v}" for k, v in rest)]),
    TEXT,
    TEXT,
    st.lists(st.tuples(st.sampled_from(ATTRIBUTES), TEXT | st.integers().map(str)), max_size=4),
)


@given(st.lists(HEADER | TEXT, max_size=5))
@in_a_loop
async def test_whatever_a_site_sets_the_session_can_be_used_again(headers: list[str]) -> None:
    url = URL("https://shop.example/a/b")
    jar = jar_of([])
    jar.update_cookies_from_headers(headers, url)
    kept = cookies_of(jar)
    again = jar_of(kept)
    again.filter_cookies(url)
    assert {(each.name, each.value, each.path) for each in cookies_of(again)} == {
        (each.name, each.value, each.path) for each in kept
    }
