"""Which failures say that the site is unwell, and which say nothing about it."""

import socket
import urllib.error
from email.message import Message
from typing import Any

import aiohttp
import pytest

from musterd.ipc.errors import ProxyFailed
from musterd.ipc.wire.messages import Failure, Lease
from musterd.workers.authoring import outcome
from musterd.workers.authoring.base import Context, Permanent, Retry, TaskOptions, TaskTimeout
from musterd.workers.pages.http import HttpError, PermanentHttpError, SiteTimeout, SiteUnreachable


def failure_of(
    error: BaseException,
    *,
    was_cancelled: bool = False,
    retry_on: Any = None,
    counts: tuple[str, ...] | None = None,
) -> Failure:
    lease, context = Lease(1, "t", "x", b"", 1, 0, counts=counts), Context("t")
    context.cancelled = was_cancelled
    attempt = outcome.FailedAttempt(lease, TaskOptions(retry_on=retry_on), context, error)
    failure = outcome.failed(attempt, 1).failure
    assert failure is not None
    return failure


def raised_from(outer: BaseException, inner: BaseException) -> BaseException:
    """Chain as `raise outer from inner` does."""
    outer.__cause__ = inner
    return outer


def raised_while(outer: BaseException, inner: BaseException, *, hidden: bool = False) -> Any:
    """Chain as `raise outer` in an `except` block does; `hidden` means `from None`."""
    outer.__context__ = inner
    outer.__suppress_context__ = hidden
    return outer


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class LibraryError(Exception):
    """An error like those of requests and httpx: the status is in the response."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"HTTP {status_code}")
        self.response = Response(status_code)


class OwnWord(Exception):
    def __init__(self, unwell: bool) -> None:
        super().__init__()
        self.unwell = unwell


def url_error(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://site.example", code, "", Message(), None)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        socket.gaierror(),
        TaskTimeout(),
        SiteTimeout(),
        SiteUnreachable(),
        *[HttpError(status, "http://site.example") for status in (408, 425, 429, 500, 503, 599)],
        LibraryError(503),
        url_error(502),
        OwnWord(unwell=True),
        raised_from(RuntimeError("of a library"), ConnectionResetError()),
        raised_while(RuntimeError("of a library"), TimeoutError()),
        raised_from(RuntimeError("of a library"), TaskTimeout()),
    ],
    ids=repr,
)
def test_the_site_is_unwell(error: BaseException) -> None:
    assert failure_of(error).unwell


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a price that is none"),
        Retry(after=10),
        Permanent("no such page"),
        PermanentHttpError(404, "http://site.example"),
        LibraryError(404),
        HttpError(403, "http://site.example"),
        url_error(404),
        OwnWord(unwell=False),
        FileNotFoundError(),
        MemoryError(),
        raised_while(ValueError("its own matter"), ConnectionResetError(), hidden=True),
        raised_from(LibraryError(404), TimeoutError("of an attempt before")),
    ],
    ids=repr,
)
def test_nothing_is_said_about_the_site(error: BaseException) -> None:
    assert not failure_of(error).unwell


def test_a_cancelled_attempt_says_nothing() -> None:
    assert not failure_of(ConnectionResetError(), was_cancelled=True).unwell


def test_permanent_says_nothing_whatever_it_was_raised_from() -> None:
    assert not failure_of(raised_from(Permanent(), ConnectionResetError())).unwell


def test_what_is_not_worth_a_retry_may_still_say_that_the_site_is_unwell() -> None:
    failure = failure_of(ConnectionResetError(), retry_on=(KeyError,))
    assert (failure.kind, failure.unwell) == ("permanent", True)


@pytest.mark.parametrize("status", [True, -1, 0, 1000, "503", None])
def test_only_a_status_that_can_be_one_counts(status: Any) -> None:
    error = ValueError()
    error.status = status  # type: ignore[attr-defined]
    assert failure_of(error).status in (0, 1)
    assert not failure_of(error).unwell


def test_a_ring_of_causes_has_an_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert not failure_of(first).unwell


# -- exceptions that the operator names ----------------------------------------------------------


class Blocked(Permanent):
    """An error that a worker defines."""


class Captcha(Blocked):
    pass


HERE = Blocked.__module__
# Classes of a module that was loaded anew: their names lead to other classes by now.
Gone = type("Gone", (Exception,), {"__module__": "gone"})
GoneToo = type("GoneToo", (Gone,), {"__module__": "gone"})


@pytest.mark.parametrize(
    ("counts", "error", "unwell"),
    [
        ((f"{HERE}:Blocked",), Blocked(), True),
        ((f"{HERE}:Blocked",), Captcha(), True),  # a subclass
        ((f"{HERE}:Captcha",), Blocked(), False),
        (("KeyError",), KeyError(), True),
        (("builtins:LookupError",), KeyError(), True),
        ((f"{HERE}:Blocked",), raised_from(RuntimeError(), Captcha()), True),
        ((f"{HERE}:Blocked",), raised_while(RuntimeError(), Blocked(), hidden=True), False),
        # Named exceptions count instead of the usual ones, or beside them.
        (("KeyError",), ConnectionResetError(), False),
        (("KeyError",), HttpError(503, "http://site.example"), False),
        (("KeyError", "usual"), ConnectionResetError(), True),
        ((), ConnectionResetError(), False),
        # A library exports its errors from another module than the one that defines them.
        (("aiohttp:ClientError",), aiohttp.ClientPayloadError(), True),
        (("musterd:Permanent",), Captcha(), True),
        (
            ("musterd.workers.pages.http:HttpError",),
            PermanentHttpError(403, "http://site.example"),
            True,
        ),
        # An exception's own `unwell` counts, unless the exception is named.
        (("KeyError",), OwnWord(unwell=True), True),
        (("KeyError", "usual"), OwnWord(unwell=False), False),
        ((f"{HERE}:OwnWord",), OwnWord(unwell=False), True),
        (("gone:Gone",), GoneToo(), True),
        (("nowhere.at.all:Error", "os:environ", "os:path.sep"), ValueError(), False),
    ],
)
def test_the_exceptions_that_are_named_count(
    counts: tuple[str, ...], error: BaseException, unwell: bool
) -> None:
    assert failure_of(error, counts=counts).unwell is unwell


def test_a_cancelled_attempt_says_nothing_even_if_its_error_is_named() -> None:
    assert not failure_of(KeyError(), was_cancelled=True, counts=("KeyError",)).unwell


def test_a_failure_of_a_proxy_says_nothing_about_the_site() -> None:
    error = raised_while(ProxyFailed("no connection", retry_after=3.0), ConnectionRefusedError())
    failure = failure_of(error)
    assert not failure.unwell
    assert failure.retry_after_ns == 3 * 10**9
