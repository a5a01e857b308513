"""What may be kept of an answer, and which answer says that it still holds."""

import asyncio
from typing import Any

import pytest

from musterd.ipc.errors import StateError
from musterd.workers.pages.conditional import KEPT_BYTES_MAX, Memory, is_possible, validators_of
from musterd.workers.pages.http import Page, Request
from musterd.workers.toolkit import MemoryState

URL = "http://shop.example/kites"
DATE = "Wed, 18 Nov 2026 12:00:00 GMT"
OLD = "Wed, 18 Nov 2026 11:58:00 GMT"
FRESH = "Wed, 18 Nov 2026 11:59:30 GMT"
REQUEST = Request(URL, headers={"User-Agent": "musterd"})


def answer(status: int = 200, url: str = URL, redirects: int = 0, **headers: str) -> Page:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Page(status, url, {"date": DATE} | named, "", "utf-8", 0.1, redirects)


def memory_after(page: Page, result: Any = "49.00", state: Any = None) -> Memory:
    """Return what is known at the next request, after one that was answered like this."""
    state = state or MemoryState()

    async def run() -> Memory:
        await (await Memory.load(state, REQUEST, None)).keep(page, result)
        return await Memory.load(state, REQUEST, None)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "validators"),
    [
        ({"etag": '"a"'}, ('"a"', "")),
        ({"etag": 'W/"a"'}, ('W/"a"', "")),
        ({"etag": '"a"', "last_modified": OLD}, ('"a"', "")),
        ({"last_modified": OLD}, ("", OLD)),
        ({"etag": '"a"', "vary": "Accept-Encoding, Cookie"}, ('"a"', "")),
        ({}, None),
        ({"etag": "a"}, None),
        ({"etag": '"a", "b"'}, None),
        ({"etag": '"' + "a" * 1000 + '"'}, None),
        ({"last_modified": FRESH}, None),
        ({"last_modified": "yesterday"}, None),
        ({"last_modified": OLD, "date": "today"}, None),
        ({"etag": '"a"', "vary": "*"}, None),
        ({"etag": '"a"', "vary": "Accept, *"}, None),
        ({"etag": '"a"', "cache_control": "private, No-Store"}, None),
        ({"etag": '"a"', "status": 206}, None),
        ({"etag": '"a"', "status": 304}, None),
        ({"etag": '"a"', "vary": "cookie", "redirects": 1}, None),
    ],
)
def test_validators(headers: dict[str, Any], validators: tuple[str, str] | None) -> None:
    assert validators_of(answer(**headers)) == validators


def test_the_next_request_asks_by_the_validator_and_a_304_holds() -> None:
    memory = memory_after(answer(etag='"a"'))
    assert memory.asking(REQUEST).headers == {"User-Agent": "musterd", "If-None-Match": '"a"'}
    assert memory.holds(answer(304, etag='"a"'))
    assert memory.holds(answer(304, etag='W/"a"'))
    assert memory.holds(answer(304))
    assert memory.result == "49.00"
    dated = memory_after(answer(last_modified=OLD))
    assert dated.asking(REQUEST).headers["If-Modified-Since"] == OLD
    assert dated.holds(answer(304, etag='"new"'))  # it had none before


def test_no_other_answer_holds() -> None:
    memory = memory_after(answer(etag='"a"'))
    assert not memory.holds(answer(200, etag='"a"'))
    assert not memory.holds(answer(304, etag='"b"'))
    assert not memory.holds(answer(304, url="http://shop.example/login"))
    assert not Memory().holds(answer(304))


def test_after_redirects_the_same_last_address_must_say_so() -> None:
    moved = "http://shop.example/en/kites"
    memory = memory_after(answer(url=moved, redirects=1, etag='"a"'))
    assert memory.holds(answer(304, url=moved, redirects=1))
    assert not memory.holds(answer(304))


@pytest.mark.parametrize(
    "other",
    [
        (Request(URL + "?page=2", headers=REQUEST.headers), None),
        (Request(URL, headers={"User-Agent": "other"}), None),
        (Request(URL, headers={**REQUEST.headers, "Accept-Language": "de"}), None),
        (Request(URL, headers=REQUEST.headers, bytes_max=10), None),
        (REQUEST, {"price": ".price"}),
    ],
)
def test_another_request_or_other_selectors_know_nothing_of_it(other: tuple[Request, Any]) -> None:
    state = MemoryState()
    memory_after(answer(etag='"a"'), state=state)
    assert not asyncio.run(Memory.load(state, *other)).asks


def test_the_names_of_headers_are_compared_in_any_case_and_order() -> None:
    state = MemoryState()
    memory_after(answer(etag='"a"'), state=state)
    again = Request(URL, headers={"user-agent": "musterd"})
    assert asyncio.run(Memory.load(state, again, None)).asks


def test_a_result_over_the_limit_is_not_kept() -> None:
    assert memory_after(answer(etag='"a"'), "x" * (KEPT_BYTES_MAX - 10)).asks
    assert not memory_after(answer(etag='"a"'), "x" * KEPT_BYTES_MAX).asks


def test_a_request_with_conditions_of_its_own_is_left_alone() -> None:
    assert is_possible(REQUEST)
    assert not is_possible(Request(URL, headers={"If-None-Match": '"mine"'}))
    assert not is_possible(Request(URL, headers={"RANGE": "bytes=0-9"}))
    assert not is_possible(Request(URL, "POST"))


class Broken(MemoryState):
    async def aload(self, key: str | None = None, default: Any = None) -> Any:
        raise StateError("the disk is full")

    async def asave(self, *_: Any, **__: Any) -> None:
        raise StateError("the disk is full")


def test_a_state_that_fails_or_cannot_be_read_costs_nothing_but_the_page() -> None:
    assert not memory_after(answer(etag='"a"'), state=Broken()).asks
    state = MemoryState()
    memory_after(answer(etag='"a"'), state=state)
    (key,) = state.kept
    state.save([1, 2], key)
    assert not asyncio.run(Memory.load(state, REQUEST, None)).asks
