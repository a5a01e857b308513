"""Views of watched results, made by a real worker; the test plays the supervisor."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from worker_standin import Fleet

from musterd.ipc.watching.rules import PLAIN, Rules, encode_rules
from musterd.ipc.wire.messages import ERROR, View

WORKERS = """
    from musterd import Worker, task

    class Shop(Worker):
        @task
        async def price(self, ctx, price: str | None) -> dict:
            return {"price": price, "title": "Kite"}
"""
PRICE = encode_rules(Rules(watch=("price",), numbers=True))


@pytest.fixture(params=[1, 3])
def fleet(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Fleet]:
    """Run a worker that runs one task at a time, and one that runs several."""
    fleet = Fleet(short_folder, {"shop": WORKERS})
    try:
        yield fleet.start("shop:Shop", width=request.param)
    finally:
        fleet.close()


def test_a_watched_result_has_a_view_and_another_has_none(fleet: Fleet) -> None:
    done = fleet.run("price", {"price": "1.299,00 €"}, watch=PRICE)
    assert done.view is not None
    assert done.view.numbers == {"price": 1299.0}
    assert msgspec.msgpack.decode(done.view.kept or b"") == {"price": "1.299,00 €"}
    assert msgspec.msgpack.decode(done.value)["title"] == "Kite"
    assert fleet.run("price", {"price": "1"}).view is None
    plain = fleet.run("price", {"price": None}, watch=PLAIN)
    assert plain.view == View(sha256(plain.value).hexdigest())


@pytest.mark.parametrize(
    ("price", "error"), [(None, "NothingFound"), ("", "NothingFound"), ("sold out", "NotANumber")]
)
def test_where_nothing_is_found_the_attempt_fails_with_a_type(
    fleet: Fleet, price: str | None, error: str
) -> None:
    failure = fleet.failure("price", {"price": price}, watch=PRICE)
    assert (failure.kind, failure.type) == (ERROR, f"musterd.{error}")
    assert "price" in failure.message
    assert not failure.unwell  # the site has answered: its breaker counts nothing
