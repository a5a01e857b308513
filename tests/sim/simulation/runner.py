"""Run a seed, and say how to repeat a failing one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import ModuleType

from musterd.ipc.resilience.policy import MILLISECOND_NS
from musterd.supervisor.core.model import ledger, queue, scaler, timers
from musterd.supervisor.core.tasks import coalescing, endings
from musterd.supervisor.core.workers import autoscale
from simulation.profile import Profile
from simulation.world import World

# Limits that a hundred tasks would never reach are made small, so that scenarios reach them.
SMALL_LIMITS = (
    (queue, "SWEEP_MIN", 4),
    (timers, "TIMERS_SLACK", 8),
    (endings, "INTERRUPTIONS_MAX", 3),
)
SMALL_LIMITS_OF_KEYS = (
    (coalescing, "JOINED_MAX", 6),
    (ledger, "PAGE_BYTES_MAX", 40),
)
SMALL_LIMITS_OF_SCALING = (
    (autoscale, "LOOK_NS", 100 * MILLISECOND_NS),
    (scaler, "UP_PAUSE_NS", 200 * MILLISECOND_NS),
    (scaler, "DOWN_PAUSE_NS", 300 * MILLISECOND_NS),
    (scaler, "TURN_PAUSE_NS", 400 * MILLISECOND_NS),
)


class SeedFailed(AssertionError):
    """A seed broke an invariant, or made the core raise."""


@contextmanager
def small_limits(profile: Profile) -> Iterator[None]:
    limits: tuple[tuple[ModuleType, str, int], ...] = SMALL_LIMITS
    limits += SMALL_LIMITS_OF_KEYS if profile.keys else ()
    limits += SMALL_LIMITS_OF_SCALING if profile.scaling else ()
    kept = [(module, name, getattr(module, name)) for module, name, _ in limits]
    for module, name, small in limits:
        setattr(module, name, small)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def run_seed(seed: int) -> int:
    """Run one scenario; return the number of steps of the core."""
    return run_world(seed).watch.steps


def run_world(seed: int) -> World:
    """Run one scenario from beginning to end."""
    world = World(seed)
    try:
        with small_limits(world.profile):
            world.run()
    except Exception as error:
        # Any exception of the core under some order of events is a finding.
        raise SeedFailed(
            f"seed {seed} (profile {world.profile.name}) after {world.watch.steps} steps: "
            f"{type(error).__name__}: {error}\n"
            f"again: python -m pytest tests/sim --seed {seed}\n{story_of(world)}"
        ) from error
    return world


class Digest:
    """Takes the place of a world's trace: keeps all of it as one number."""

    def __init__(self) -> None:
        self._hash = sha256()

    def append(self, entry: tuple[int, str, object]) -> None:
        when_ns, mark, what = entry
        # The kind of an event is enough (one event holds a set): the actions tell the rest.
        told = repr(what) if mark == "  " else type(what).__name__
        self._hash.update(f"{when_ns}{mark}{told}".encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def story_digest(seed: int) -> str:
    """Return all events and actions of one scenario as one number."""
    world = World(seed)
    world.trace = digest = Digest()  # type: ignore[assignment]
    with small_limits(world.profile):
        world.run()
    return str(digest)


def story_of(world: World) -> str:
    """Return the last events (->) and the actions after them, in milliseconds before the end."""
    return "\n".join(
        f"{(when_ns - world.now_ns) / 1e6:12.3f} ms {mark} {what}"
        for when_ns, mark, what in world.trace
    )
