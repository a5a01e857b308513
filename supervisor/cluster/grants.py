"""Cards and grants between the messages of node.sock and the engine."""

from collections.abc import Iterable

from msgspec import structs

from musterd.ipc.wire import node_messages as wire
from musterd.ipc.wire.messages import BATCH_BYTES_MAX
from musterd.supervisor.cluster import engine


def engine_card(card: wire.PoolCard) -> engine.PoolCard:
    return engine.PoolCard(
        card.name,
        card.places,
        card.tasks,
        card.queue_size,
        card.aging_ns,
        card.max_crashes,
        card.cache_ns,
        card.debounce_ns,
    )


def without_places(cards: tuple[wire.PoolCard, ...]) -> list[wire.PoolCard]:
    return [structs.replace(card, places=0) for card in cards]


def attempt_of(grant: engine.Grant, called_ns: int) -> wire.Attempt:
    """Return the grant for the supervisor, with instants of this machine's clock."""
    return wire.Attempt(
        grant.spec,
        grant.claim,
        grant.attempt,
        grant.crashes,
        grant.interruptions,
        grant.policy,
        called_ns + grant.expires_in_ns if grant.expires_in_ns else 0,
    )


def portions(attempts: list[wire.Attempt]) -> Iterable[list[wire.Attempt]]:
    """Cut attempts into messages of about BATCH_BYTES_MAX, at least one in each."""
    portion: list[wire.Attempt] = []
    size = 0
    for attempt in attempts:
        size += len(attempt.spec.args)
        if portion and size > BATCH_BYTES_MAX:
            yield portion
            portion, size = [], len(attempt.spec.args)
        portion.append(attempt)
    if portion:
        yield portion
