"""Signatures of handlers, as workers and clients read them."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest

from musterd import Worker, task
from musterd.ipc.signatures import (
    ARGUMENTS_CHARS_MAX,
    INVALID_ARGUMENTS,
    PLACE_CHARS_MAX,
    Misfit,
    SignatureError,
    by_name,
    is_method,
    is_task,
    place_of,
    read_signature,
    result_decoder,
)

if TYPE_CHECKING:
    from decimal import Decimal

encode = msgspec.msgpack.encode


@dataclass
class Offer:
    shop: str
    price: float


def plain(ctx: Any, shop: str, price: float = 1.0, *, season: str = "") -> bool: ...


class Best(msgspec.Struct, forbid_unknown_fields=True):
    name: str


def deep(
    ctx: Any,
    *,
    offers: list[Offer] = [],  # noqa: B006
    tags: dict[str, int] = {},  # noqa: B006
    best: Best | None = None,
    pair: tuple[int, int] = (1, 2),
    colour: Literal["red", "blue"] = "red",
    name: Annotated[str, msgspec.Meta(min_length=2)] = "",
) -> None: ...


def loose(_ctx: Any, *, limit: int = 1, **others: Any) -> Any: ...


def bare(ctx, shop): ...  # type: ignore[no-untyped-def]


class Promos(Worker):
    @task
    def check(self, ctx: Any, shop: str) -> "Offer": ...


def test_a_signature_has_the_arguments_behind_self_and_ctx() -> None:
    signature = read_signature("plain", plain, bound=False)
    assert signature.text == "plain(shop, price=..., season=...)"
    assert signature.required == ("shop",)
    assert signature.names == ("shop", "price", "season")
    assert signature.positional == ("shop", "price")
    assert not signature.open
    assert read_signature("check", Promos.check, bound=True).names == ("shop",)
    assert read_signature("loose", loose, bound=False).open


def test_a_method_is_told_from_a_function_by_its_first_parameter() -> None:
    assert is_method(Promos.check)
    assert not any(map(is_method, (plain, loose, bare)))
    assert is_task(Promos.check)
    assert not is_task(plain)


def test_a_place_is_the_same_in_all_processes() -> None:
    assert place_of(Promos.check) == f"{__name__}:Promos.check"
    assert place_of(plain, "bot.promos") == "bot.promos:plain"

    @functools.wraps(plain)
    def wrapped(*args: Any) -> Any: ...

    assert place_of(wrapped) == place_of(plain)
    plain_long = functools.wraps(plain)(lambda: None)
    plain_long.__qualname__ = "x" * 2 * PLACE_CHARS_MAX
    assert len(place_of(plain_long)) == PLACE_CHARS_MAX


@pytest.mark.parametrize(
    ("arguments", "at_fault", "why"),
    [
        ({"shop": 3}, "shop", "shop must be str, not int"),
        ({"shop": "a", "price": [1]}, "price", "price must be float, not list"),
        ({"shop": "a", "season": None}, "season", "season must be str, not None"),
        ({}, "", "the argument 'shop' is missing"),
        ({"shop": "a", "prize": 1}, "", "there is no argument 'prize': did you mean 'price'?"),
        ({"shop": "a", "zoo": 1}, "", "there is no argument 'zoo'"),
        ([], "", "the arguments must be dict, not list"),
        ({1: 2}, "", "a key of the arguments must be str, not int"),
    ],
)
def test_what_does_not_fit_is_refused_and_its_argument_is_found(
    arguments: Any, at_fault: str, why: str
) -> None:
    signature = read_signature("plain", plain, bound=False)
    with pytest.raises(Misfit) as caught:
        signature.decode(encode(arguments))
    assert caught.value.argument == at_fault
    assert str(caught.value) == why


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"offers": [{"shop": "a"}]}, "offers[0]: the field 'price' is missing"),
        ({"tags": {"a": "b"}}, "tags[...] must be int, not str"),
        ({"tags": {1: 2}}, "a key of tags must be str, not int"),
        ({"best": {"name": "n", "prize": 1}}, "best: there is no field 'prize'"),
        ({"best": 3}, "best must be dict | None, not int"),
        ({"pair": [1]}, "pair must be list of length 2, not 1"),
        ({"colour": "green"}, "colour: Invalid enum value 'green'"),
        ({"name": "\n"}, "name must be str of length >= 2"),
    ],
)
def test_the_place_of_a_fault_is_told_in_words_of_python(
    arguments: dict[str, Any], why: str
) -> None:
    signature = read_signature("deep", deep, bound=False)
    with pytest.raises(Misfit) as caught:
        signature.decode(encode(arguments))
    assert str(caught.value) == why


def test_of_many_arguments_those_that_must_be_given_are_shown() -> None:
    signature = read_signature("deep", deep, bound=False)
    assert signature.text == "deep(...)"
    assert len(signature.text) <= len("deep()") + ARGUMENTS_CHARS_MAX
    signature = read_signature("loose", loose, bound=False)
    assert signature.text == "loose(limit=..., **others)"


def test_arguments_without_names_are_bound_as_python_does() -> None:
    signature = read_signature("plain", plain, bound=False)
    assert by_name(signature, ("a", 2.0), {"season": "s"}) == {
        "shop": "a",
        "price": 2.0,
        "season": "s",
    }
    with pytest.raises(TypeError, match="takes 2 arguments without a name, not 3"):
        by_name(signature, ("a", 2.0, "s"), {})
    with pytest.raises(TypeError, match="two values for 'shop'"):
        by_name(signature, ("a",), {"shop": "b"})


def generator(ctx: Any) -> Iterator[int]:
    yield 1


async def async_generator(ctx: Any) -> Any:
    yield 1


def without_ctx(shop: str) -> None: ...


def starred(ctx: Any, *shops: str) -> None: ...


def only_positional(ctx: Any, shop: str, /) -> None: ...


def unknown_type(ctx: Any, price: "Decimal") -> None: ...


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (generator, "contains `yield`"),
        (async_generator, "contains `yield`"),
        (without_ctx, r"must be ctx; write def x\(ctx, \.\.\.\)"),
        (starred, r"\*shops: str is positional"),
        (only_positional, "shop: str is positional"),
        (unknown_type, "its annotations cannot be read: name 'Decimal' is not defined"),
    ],
)
def test_what_can_be_no_handler_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(SignatureError, match=why):
        read_signature("x", function, bound=False)


def test_a_result_is_decoded_as_it_is_annotated() -> None:
    decode = result_decoder("check", Promos.check)
    assert decode is not None
    assert decode(encode({"shop": "a", "price": 1})) == Offer("a", 1.0)
    with pytest.raises(INVALID_ARGUMENTS, match="price must be float, not str"):
        decode(encode({"shop": "a", "price": "b"}))
    assert result_decoder("bare", bare) is None
    assert result_decoder("loose", loose) is None


def test_an_async_handler_is_decoded_as_what_it_is_awaited_for() -> None:
    async def halve(ctx: Any, number: int) -> float:
        return number / 2

    decode = result_decoder("halve", halve)
    assert decode is not None
    assert decode(encode(3)) == 3.0


def hidden(ctx: Any) -> "Decimal": ...


def several(ctx: Any) -> Offer | Promos | dict[str, int]: ...


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (hidden, "its annotations cannot be read: name 'Decimal' is not defined"),
        (several, "its result cannot be decoded as .*, or submit it by its name, for plain data"),
    ],
)
def test_a_result_that_cannot_be_decoded_as_annotated_is_said(
    function: Callable[..., Any], why: str
) -> None:
    with pytest.raises(SignatureError, match=why):
        result_decoder("x", function)
