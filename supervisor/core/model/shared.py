"""What must be one for all nodes of a cluster: retries, classes, limits of sites, schedules.

The engine keeps it (supervisor/cluster/engine.py), and each node has a configuration of its own
beside it. `shared_policy` returns what a node would share, so that both can be compared.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct, structs

from musterd.ipc.resilience.policy import BreakerPolicy, RetryPolicy
from musterd.ipc.wire.messages import NORMAL, NOT_GIVEN
from musterd.supervisor.core.model.policy import (
    CachePolicy,
    FleetPolicy,
    GatePolicy,
    SchedulePolicy,
    TargetPolicy,
    WatchPolicy,
)
from musterd.supervisor.core.model.timing import Cron, Every, Timing, ZoneOf


class ScheduleCard(Struct, frozen=True):
    """A schedule of the cluster. The engine keeps `plan` for the nodes, and does not read it."""

    name: str
    plan: bytes = b""
    notify: bool = False  # note when the result has changed


class ClusterPolicy(Struct, frozen=True):
    """What must be one for all nodes."""

    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()
    classes: dict[str, GatePolicy] = {}
    class_breakers: dict[str, BreakerPolicy] = {}
    targets: dict[str, TargetPolicy] = {}
    target: TargetPolicy = TargetPolicy()  # of targets without a policy of their own
    cache: CachePolicy = CachePolicy()
    schedules: tuple[ScheduleCard, ...] = ()


_AS_BUILT_IN = WatchPolicy()


class Plan(Struct, frozen=True, omit_defaults=True):
    """A SchedulePolicy as it is kept: its timing is every so often, or cron in a named zone."""

    name: str
    task: str
    every_ns: int = 0
    cron: str = ""
    zone: str = ""
    args: bytes = b"\x80"
    priority: int = NORMAL
    target: str = ""
    sites: dict[str, str] = {}
    timeout_ns: int = 0
    max_retries: int = NOT_GIVEN
    key: str = ""
    cache_ns: int = 0
    debounce_ns: int = 0
    jitter_ns: int = 0
    overlap: bool = False
    catch_up: str = "one"
    enabled: bool = True
    notify: bool = False
    watching: WatchPolicy = _AS_BUILT_IN


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Plan).decode

# Fields of a plan that a SchedulePolicy has too.
_SAME = [name for name in Plan.__struct_fields__ if name not in ("every_ns", "cron", "zone")]


def card_of(policy: SchedulePolicy) -> ScheduleCard:
    timing = policy.timing
    same = {name: getattr(policy, name) for name in _SAME}
    if policy.watching == _AS_BUILT_IN:
        del same["watching"]  # only what is the default itself is left out
    plan = Plan(**same)
    if isinstance(timing, Every):
        plan = structs.replace(plan, every_ns=timing.every_ns)
    else:
        plan = structs.replace(plan, cron=timing.expression, zone=str(timing.zone))
    return ScheduleCard(policy.name, _encode(plan), policy.notify)


def schedule_of(plan: bytes, zone_of: ZoneOf) -> SchedulePolicy:
    """Return the schedule of a plan; ValueError for one that cannot be read here.

    Whoever calls it finds the time zone: that reads files.
    """
    try:
        kept = _decode(plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"its plan cannot be read by this version ({error})") from None
    timing: Timing = Every(kept.every_ns)
    if kept.cron:
        try:
            timing = Cron(kept.cron, zone_of(kept.zone))
        except (ValueError, KeyError, OSError):
            raise ValueError(f"its time zone '{kept.zone}' is not known on this machine") from None
    return SchedulePolicy(timing=timing, **{name: getattr(kept, name) for name in _SAME})


def is_shared(policy: FleetPolicy, schedule: SchedulePolicy) -> bool:
    """Whether a schedule's task belongs to a pool of the cluster: then it does not run here."""
    pool = schedule.task.partition(".")[0]
    return any(each.clustered and each.name == pool for each in policy.pools)


def shared_policy(policy: FleetPolicy, schedules: tuple[SchedulePolicy, ...]) -> ClusterPolicy:
    """Return what a configuration would share."""
    return ClusterPolicy(
        policy.retry,
        policy.breaker,
        policy.classes,
        policy.class_breakers,
        policy.targets,
        policy.target,
        policy.cache,
        tuple([card_of(each) for each in schedules]),
    )


def differences(local: ClusterPolicy, applied: ClusterPolicy) -> Iterator[str]:
    """Yield the keys of a local configuration that are not as they are applied.

    What is as built in was not written by anybody, and is no difference.
    """
    built_in = ClusterPolicy()
    for name in ("retry", "breaker", "cache"):
        own = getattr(local, name)
        if own not in (getattr(applied, name), getattr(built_in, name)):
            yield name
    if local.target not in (applied.target, built_in.target):
        yield "retry.budget"
    for name, of_class in local.classes.items():
        same = applied.classes.get(name) == of_class
        if not same or applied.class_breakers.get(name) != local.class_breakers.get(name):
            yield f"classes.{name}"
    for name, target in local.targets.items():
        if applied.targets.get(name) != target:
            yield f"targets.{name}"
    cards = {card.name: card for card in applied.schedules}
    for card in local.schedules:
        if cards.get(card.name) != card:
            yield f"schedule.{card.name}"
