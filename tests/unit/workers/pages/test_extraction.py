"""Selectors and Retry-After: the parser worker's decisions without a network."""

import pytest

from musterd.workers.authoring.base import Permanent
from musterd.workers.pages.extraction import (
    ExtractTooLarge,
    InvalidSelector,
    Value,
    compile_selectors,
    extract,
    parse_selector,
)
from musterd.workers.pages.http import (
    RETRY_AFTER_SECONDS_MAX,
    BadRequest,
    check_url,
    retry_after_seconds,
)

PAGE = """<!doctype html><meta charset="windows-1251"><title>t</title>
<h1> Весна <b>20 %</b><!-- not this --> </h1>
<ul><li class="promo">one</li><li class="promo">two</li><li>three</li></ul>
<a class="promo">no link</a><a class="promo" href="/q?a=1&amp;b=2" download>link</a>
"""


def value(selector: str, page: str = PAGE) -> Value:
    return extract(page, compile_selectors({"it": selector}))["it"]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("h1", "Весна 20 %"),
        ("css:h1", "Весна 20 %"),
        ("h1::text", "Весна"),
        ("  h1 ::text ", "Весна"),
        ("li.promo", "one"),
        ("[]li.promo", ["one", "two"]),
        ("[]css: li.promo", ["one", "two"]),
        ("li:nth-child(3)", "three"),
        ("a.promo::attr(href)", "/q?a=1&b=2"),
        ("[]a.promo::attr( HREF )", ["/q?a=1&b=2"]),
        ("a.promo::attr(download)", ""),
        ("h2", None),
        ("[]h2", []),
        ("h1::attr(id)", None),
        ("xpath://h1", "Весна 20 %"),
        ("xpath://h1/text()", "Весна"),
        ("[]xpath://li[@class='promo']", ["one", "two"]),
        ("[]xpath: //a/@href", ["/q?a=1&b=2"]),
        ("xpath:count(//li)", "3"),
        ("xpath:count(//li) div 2", "1.5"),
        ("xpath:boolean(//h2)", "false"),
        ("xpath:string(//b)", "20 %"),
        ("xpath://h2", None),
        ("[]xpath://h2", []),
    ],
)
def test_a_selector_gives_the_text_it_names(selector: str, expected: Value) -> None:
    assert value(selector) == expected


@pytest.mark.parametrize(
    "selector",
    [
        *("", "[]", "h1[", "h1,", "h1:unknown", "h1::attr()", "h1::html", "xpath:", "xpath://h1["),
        *("xpath:unknown(//h1)", "xpath://x:y", "xpath://p[unknown()]"),
    ],
)
def test_an_invalid_selector_is_permanent_and_tells_its_name_and_text(selector: str) -> None:
    with pytest.raises(InvalidSelector) as caught:
        compile_selectors({"good": "h1", "price": selector})
    assert isinstance(caught.value, Permanent)
    assert f"price={selector!r}" in str(caught.value)


@pytest.mark.parametrize("page", ["", "  \n", "\0", "plain text", "<", "\ud800"])
def test_a_page_without_html_has_no_matches(page: str) -> None:
    selectors = compile_selectors({"css": "h1", "all": "[]h1", "xpath": "xpath://h1"})
    assert extract(page, selectors) == {"css": None, "all": [], "xpath": None}


def test_an_encoding_declared_in_decoded_text_is_not_applied_again() -> None:
    page = '<?xml version="1.0" encoding="koi8-r"?><meta charset="koi8-r"><h1>Чай</h1>'
    assert value("h1", page) == value("xpath://h1", page) == "Чай"


def test_a_selection_that_multiplies_the_page_is_refused() -> None:
    page = "<div>" * 200 + "x" * 100_000
    with pytest.raises(ExtractTooLarge, match="select less"):
        value("[]div", page)


def test_a_selector_is_taken_apart() -> None:
    found = parse_selector("link", "[]css:a.promo::attr(href)")
    assert (found.query, found.attribute, found.many, found.xpath) == (
        "a.promo",
        "href",
        True,
        False,
    )


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", 0.0),
        ("7", 7.0),
        (" 120 ", 120.0),
        ("-5", 0.0),
        ("soon", 0.0),
        ("1e9", 0.0),
        ("999999999", RETRY_AFTER_SECONDS_MAX),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_SECONDS_MAX),
        ("Thu, 99 Jan 1970 00:00:01 GMT", 0.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_date_and_bounded(header: str, expected: float) -> None:
    assert retry_after_seconds(header, now=1000.0) == expected


@pytest.mark.parametrize(
    "url",
    ["", "example", "file:///etc/passwd", "ftp://a/", "http://", "http://a:b/", "http://[::1"],
)
def test_only_whole_http_addresses_are_fetched(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_url(url)
    assert repr(url) in str(caught.value)
    assert isinstance(caught.value, Permanent)
