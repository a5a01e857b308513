"""Pages that have no value where one was, saved as minimal pages beside this file."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from musterd.ipc.errors import ChallengePage, EmptyPage, LoggedOut, MusterdError
from musterd.ipc.wire.messages import Lease
from musterd.workers.authoring.base import Context
from musterd.workers.pages.extraction import Value
from musterd.workers.pages.kinds import CAPTCHAS, CHALLENGES, SELECTORS, check_watched, kind_of
from musterd.workers.pages.page_reader import PageReader, is_cheap

SAVED = Path(__file__).parent / "saved"


def page(name: str) -> str:
    return (SAVED / f"{name}.html").read_text(encoding="utf-8")


def kind(html: str) -> MusterdError | None:
    reader = PageReader()
    try:
        return asyncio.run(kind_of(html, reader))
    finally:
        reader.close()


def watched(html: str, values: dict[str, Value], *rules: list[str]) -> None:
    lease = Lease(1, "t", "extract", b"", 1, 0, watch=msgspec.msgpack.encode(rules))
    asyncio.run(check_watched(Context("t", lease=lease), values, html, PageReader()))


@pytest.mark.parametrize(
    ("name", "service"),
    [
        ("cloudflare", "Cloudflare"),
        ("cloudflare_translated", "Cloudflare"),
        ("ddos_guard", "DDoS-Guard"),
        ("datadome", "DataDome"),
        ("human", "HUMAN"),
        ("captcha", "reCAPTCHA"),
    ],
)
def test_a_challenge_is_known_by_its_service(name: str, service: str) -> None:
    error = kind(page(name))
    assert isinstance(error, ChallengePage)
    assert service in str(error)


def test_a_login_form_is_one_even_with_a_captcha() -> None:
    assert isinstance(kind(page("login")), LoggedOut)


def test_a_page_without_text_is_empty_whatever_its_scripts_say() -> None:
    assert isinstance(kind(page("empty")), EmptyPage)
    assert isinstance(kind(""), EmptyPage)
    shell = kind(page("shell"))
    assert isinstance(shell, EmptyPage)
    assert "browser.extract" in str(shell)


def test_a_usual_page_is_none_of_them_though_its_scripts_are_longer_than_its_text() -> None:
    assert kind(page("sold_out")) is None


def test_a_challenge_in_a_large_page_is_known_at_a_bounded_cost() -> None:
    assert is_cheap("", SELECTORS)
    large = page("sold_out").replace("Sold out", "Sold out " * 10_000)
    assert kind(large) is None
    assert isinstance(kind(large.replace("<h1>", "<input type=password><h1>")), LoggedOut)


@pytest.mark.parametrize("selectors", [*CHALLENGES.values(), *CAPTCHAS.values()])
def test_every_selector_of_a_service_can_be_read(selectors: tuple[str, ...]) -> None:
    for css in selectors:
        assert next(each for each in SELECTORS if each.name == css).query == css


def test_only_a_missing_watched_value_makes_a_page_a_failure() -> None:
    login = page("login")
    with pytest.raises(LoggedOut):
        watched(login, {"title": "Sign in", "price": None})
    with pytest.raises(LoggedOut):
        watched(login, {"prices": ["", ""]})
    with pytest.raises(LoggedOut):
        watched(login, {"price": "", "badge": "new"}, ["price"])
    watched(login, {"price": "49.00"})
    watched(login, {"price": "49.00", "badge": None}, ["price"])
    watched(login, {"price": "49.00", "badge": None}, [], ["badge"])
    watched(page("sold_out"), {"price": None})


def test_a_run_that_nobody_watches_gives_what_was_found() -> None:
    reader = PageReader()
    asyncio.run(check_watched(Context("t"), {"price": None}, page("login"), reader))
