"""Cookies of a session go into an HTTP client's jar and come back as they were."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict
from yarl import URL

from musterd.workers.authoring.session import Cookie
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
