"""Selectors of watched pages: one that matches nothing is a failure where its value counts."""

from typing import Any

import pytest

from musterd.ipc.errors import NothingFound
from musterd.ipc.watching.rules import PLAIN, Rules, encode_rules
from musterd.ipc.wire.messages import Lease
from musterd.workers.authoring.base import Context
from musterd.workers.pages.watched import check_found


def context(watch: bytes) -> Context:
    return Context("t", lease=Lease(1, "t", "extract", 1, 0, b"", watch=watch))


def rules(**given: Any) -> bytes:
    return encode_rules(Rules(**given))


@pytest.mark.parametrize("watch", [PLAIN, rules(watch=("price",)), rules(ignore=("title",))])
def test_a_selector_that_matches_nothing_is_a_failure(watch: bytes) -> None:
    with pytest.raises(NothingFound, match="selector 'price' matches nothing"):
        check_found(context(watch), {"price": None, "title": "Log in"})


@pytest.mark.parametrize("watch", [b"", rules(watch=("title",)), rules(ignore=("price",))])
def test_what_nobody_watches_may_be_missing(watch: bytes) -> None:
    check_found(context(watch), {"price": None, "title": "Kite"})


def test_a_list_may_be_empty() -> None:
    check_found(context(PLAIN), {"offers": [], "title": "Kites"})
