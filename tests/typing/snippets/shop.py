# mypy: allow-untyped-defs, allow-incomplete-defs
"""Handlers in the styles that people write them, submitted by the other snippets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from musterd import Context, Worker, task


@dataclass
class Offer:
    shop: str
    price: float


class Promos(Worker):
    @task
    def check(self, ctx, shop: str, price: float = 1.0) -> bool:
        return bool(shop) and price > 0

    @task(timeout=30, max_retries=3)
    async def order(self, ctx: Context, item: str, count: int = 1) -> dict[str, int]:
        return {item: count}

    @task
    def best(self, ctx, offers: list[Offer]) -> Offer | None:
        return min(offers, key=lambda offer: offer.price, default=None)

    @task
    def named(self, ctx, *, timeout: int, key: str, pool: str, name: str, args: int) -> str:
        return f"{timeout} {key} {pool} {name} {args}"

    @task
    def tidy(self, ctx) -> None:
        return None

    @task
    def anything(self, ctx, *, limit: int = 1, **others: Any) -> int:
        return limit + len(others)

    @task
    def log_in(self, ctx, user: str, password: str) -> bool:
        return user != password

    def again(self, ctx: Context, shop: str) -> bool:
        return self.check(ctx, shop, price=2.0)


class Sales(Promos):
    @task
    def check(self, ctx, shop: str, price: float = 2.0, season: str = "") -> bool:
        return super().check(ctx, shop, price) and not season


@task
def double(ctx, number: int) -> int:
    return 2 * number


@task
async def halve(ctx: Context, number: int) -> float:
    return number / 2


@task
def count(ctx: Context, words: Iterator[str] | list[str]) -> int:
    return len(list(words))
