"""Runs a seed and tells how to see a failing one again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from musterd.supervisor.core import leases, queue
from simulation.world import World

# Limits that a scenario of a hundred tasks would never reach are made small, so that it does.
SMALL_LIMITS = (
    (queue, "SWEEP_MIN", 4),
    (leases, "TASK_TIMERS_SLACK", 8),
    (leases, "INTERRUPTIONS_MAX", 3),
)


class SeedFailed(AssertionError):
    """A seed broke an invariant, or made the core raise."""


@contextmanager
def small_limits() -> Iterator[None]:
    kept = [(module, name, getattr(module, name)) for module, name, _ in SMALL_LIMITS]
    for module, name, small in SMALL_LIMITS:
        setattr(module, name, small)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def run_seed(seed: int) -> int:
    """One scenario. Returns how many steps the core took."""
    world = World(seed)
    try:
        with small_limits():
            world.run()
    except Exception as error:
        # Whatever the core raises under some order of events is a finding.
        raise SeedFailed(
            f"seed {seed} (profile {world.profile.name}) after {world.watch.steps} steps: "
            f"{type(error).__name__}: {error}\n"
            f"again: python -m pytest tests/sim --seed {seed}\n{story_of(world)}"
        ) from error
    return world.watch.steps


def story_of(world: World) -> str:
    """The last events (->) and the actions that answered them, in milliseconds before the end."""
    return "\n".join(
        f"{(when_ns - world.now_ns) / 1e6:12.3f} ms {mark} {what}"
        for when_ns, mark, what in world.trace
    )
