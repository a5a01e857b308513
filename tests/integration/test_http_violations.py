"""Answers that break HTTP: musterd does as docs/fetching.md says, and so does curl."""

import asyncio
from collections.abc import Iterator

import pytest
from http_verdicts import (
    DOCS,
    EMPTY,
    ERROR,
    OTHER,
    PAGE,
    REFUSED,
    RETRIED,
    curl_verdict,
    curl_version,
    our_verdicts,
    read_table,
)
from http_violations import VIOLATIONS, ViolationServer

# Exceptions from "a page where curl and Chromium have one, else refused"; docs/fetching.md says
# why.
EXCEPTIONS = {
    "status 600": ERROR,
    "status 999": ERROR,
    "gzip of several parts": PAGE,
    "gzip of nothing at all": EMPTY,
    "204 with a body": EMPTY,
    "205 with a body": PAGE,
    "304 that nobody asked for": EMPTY,
    "Location with one slash after its scheme": PAGE,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ViolationServer]:
    server = ViolationServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def verdicts(server: ViolationServer) -> dict[str, tuple[str, str]]:
    return asyncio.run(our_verdicts(server, VIOLATIONS))


def test_the_table_has_every_violation() -> None:
    assert sorted(read_table()) == sorted(each.name for each in VIOLATIONS)
    assert len(VIOLATIONS) >= 100


@pytest.mark.parametrize("name", [each.name for each in VIOLATIONS])
def test_an_answer_becomes_what_the_table_says(
    verdicts: dict[str, tuple[str, str]], name: str
) -> None:
    verdict, reason = verdicts[name]
    assert verdict == read_table()[name][2], reason
    if verdict == REFUSED:
        assert "is refused: " in reason
    elif verdict == RETRIED:
        assert any(word in reason for word in ("closed", "cut off", "reset", "in time")), reason


def test_a_page_is_delivered_where_curl_and_chromium_both_deliver_it() -> None:
    for name, (curl, chromium, ours) in read_table().items():
        if name in EXCEPTIONS:
            assert ours == EXCEPTIONS[name], name
        elif curl == chromium == PAGE:
            assert ours == PAGE, name
        else:
            assert ours in (REFUSED, RETRIED), name


def test_nothing_is_delivered_garbled(verdicts: dict[str, tuple[str, str]]) -> None:
    assert [name for name, (verdict, _) in verdicts.items() if verdict == OTHER] == []


@pytest.mark.skipif(not curl_version(), reason="needs curl")
def test_curl_does_what_the_table_says(server: ViolationServer) -> None:
    """Other versions of curl differ in what they refuse, not in the pages that all deliver."""
    same_version = f"curl {curl_version()}" in DOCS.read_text()
    table = read_table()
    wrong = {}
    for each in VIOLATIONS:
        curl, chromium, _ = table[each.name]
        if same_version or curl == chromium == PAGE:
            found = curl_verdict(server.url(each))
            if found != curl:
                wrong[each.name] = found
    assert wrong == {}
