"""The policy that a cluster shares, made from the configuration that people write, and back.

Both ways lead to the same: `shared_config` of a policy is what would have been written for it, as
short as it can be.
"""

from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import msgspec
from msgspec import structs
from msgspec.msgpack import Ext

from musterd.ipc.client.taskspec import key_of
from musterd.ipc.resilience.policy import BackoffPolicy, BreakerPolicy
from musterd.ipc.secrets.reference import JSON_KEY, from_json, secret_name
from musterd.ipc.watching.rules import decode_rules
from musterd.ipc.wire.messages import NOT_GIVEN, PRIORITY_NAMES
from musterd.supervisor.config.schema import (
    BreakerConfig,
    BreakerOverride,
    CacheConfig,
    ClassConfig,
    DebounceConfig,
    RetryConfig,
    RetryOverride,
    ScheduleConfig,
    TargetConfig,
    over,
)
from musterd.supervisor.config.section import Section
from musterd.supervisor.config.shared import SharedConfig
from musterd.supervisor.core.model import shared
from musterd.supervisor.core.model.policy import (
    GatePolicy,
    SchedulePolicy,
    TargetPolicy,
    WatchPolicy,
)
from musterd.supervisor.core.model.shared import ClusterPolicy
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.settings.policy import fleet_policy

T = TypeVar("T", bound=Section)


def shared_policy(config: SharedConfig) -> ClusterPolicy:
    """Return the policy of a cluster with these sections."""
    policy = fleet_policy(config.as_config())
    return shared.shared_policy(policy, policy.schedules)


def shared_config(policy: ClusterPolicy) -> SharedConfig:
    """Return what may be written for a policy; ValueError for a schedule of a newer musterd."""
    retry = _retry(
        policy.retry.max_retries,
        policy.retry.backoff,
        budget=policy.target.retry_share is not None,
    )
    breaker = _breaker(policy.breaker)
    classes = {
        name: _class(each, policy.class_breakers.get(name, policy.breaker), retry, breaker)
        for name, each in policy.classes.items()
    }
    targets = {}
    for name, each in policy.targets.items():
        of_class = classes.get(each.policy, ClassConfig())
        targets[name] = _target(each, over(retry, of_class.retry), over(breaker, of_class.breaker))
    schedules = [shared.schedule_of(card.plan, ZoneInfo) for card in policy.schedules]
    return SharedConfig(
        retry=retry,
        breaker=breaker,
        classes=classes,
        targets=targets,
        cache=CacheConfig(
            enabled=policy.cache.enabled,
            entries=policy.cache.entries,
            bytes_max=policy.cache.bytes,
        ),
        debounce=DebounceConfig(enabled=policy.cache.debounce),
        schedule={each.name: _schedule(each) for each in schedules},
    )


def _retry(max_retries: int, backoff: BackoffPolicy, *, budget: bool = True) -> RetryConfig:
    return RetryConfig(
        max_retries=max_retries,
        strategy=backoff.custom or backoff.strategy,
        base_ns=backoff.base_ns,
        factor=backoff.factor,
        max_ns=backoff.max_ns,
        jitter=backoff.jitter,
        budget=budget,
    )


def _breaker(policy: BreakerPolicy) -> BreakerConfig:
    same = {*BreakerPolicy.__struct_fields__} & {*BreakerConfig.__struct_fields__}
    return BreakerConfig(
        **{name: getattr(policy, name) for name in same},
        jitter=policy.open_jitter,
        window_min=policy.window_calls_min,
    )


def _override(kind: type[T], base: Section, wanted: Section) -> T:
    """Return the keys in which a section differs from the one that it overrides."""
    names = {*kind.__struct_fields__} & {*base.__struct_fields__}
    said = {name: getattr(wanted, name) for name in names}
    return kind(**{name: value for name, value in said.items() if value != getattr(base, name)})


def _own_retry(max_retries: int, backoff: BackoffPolicy | None, base: RetryConfig) -> RetryOverride:
    given = None if max_retries == NOT_GIVEN else max_retries
    if backoff is None:
        return RetryOverride(max_retries=given)
    own = _override(RetryOverride, base, _retry(base.max_retries, backoff))
    return structs.replace(own, max_retries=given)


def _class(
    policy: GatePolicy, its_breaker: BreakerPolicy, retry: RetryConfig, breaker: BreakerConfig
) -> ClassConfig:
    return ClassConfig(
        timeout_ns=policy.timeout_ns or None,
        max_concurrent=policy.max_concurrent,
        on_open=policy.on_open or None,
        fallback_on=policy.fallback_on or None,
        counts=policy.counts,
        retry=_own_retry(policy.max_retries, policy.backoff, retry),
        breaker=_override(BreakerOverride, breaker, _breaker(its_breaker)),
    )


def _target(policy: TargetPolicy, retry: RetryConfig, breaker: BreakerConfig) -> TargetConfig:
    own = _own_retry(policy.max_retries, policy.backoff, retry)
    if policy.backoff is not None and own == RetryOverride():
        own = RetryOverride(base_ns=policy.backoff.base_ns)  # said, and as its class says
    its_breaker = _breaker(policy.breaker) if policy.breaker is not None else breaker
    share = {} if policy.retry_share is None else {"retry_share": policy.retry_share}
    return TargetConfig(
        policy=policy.policy,
        timeout_ns=policy.timeout_ns or None,
        max_concurrent=policy.max_concurrent,
        rate=policy.rate,
        burst=policy.burst,
        on_open=policy.on_open or None,
        fallback_on=policy.fallback_on or None,
        counts=policy.counts,
        proxies=policy.proxies,
        robots=policy.robots,
        retry=own,
        breaker=_override(BreakerOverride, breaker, its_breaker),
        **share,
    )


def _schedule(policy: SchedulePolicy) -> ScheduleConfig:
    timing = policy.timing
    if isinstance(timing, Every):
        when: dict[str, Any] = {"every_ns": timing.every_ns}
    else:
        when = {"cron": timing.expression, "timezone": str(timing.zone)}
    same = {*SchedulePolicy.__struct_fields__} & {*ScheduleConfig.__struct_fields__}
    same -= {"args", "priority", "notify", "key"}
    args = msgspec.msgpack.decode(policy.args, ext_hook=_as_written)
    derived = (policy.cache_ns or policy.debounce_ns) and key_of(policy.task, from_json(args))
    return ScheduleConfig(
        **{name: getattr(policy, name) for name in same},
        **when,
        args=args,
        key="" if policy.key == derived else policy.key,
        priority=PRIORITY_NAMES[policy.priority],
        notify="task.changed" if policy.notify else "",
        **_watching(policy.watching),
    )


def _watching(policy: WatchPolicy) -> dict[str, Any]:
    """Return the keys about watching that say this."""
    same = {*WatchPolicy.__struct_fields__} & {*ScheduleConfig.__struct_fields__} - {"by"}
    keys = {name: getattr(policy, name) for name in same}
    if policy.rules:
        rules = decode_rules(policy.rules)
        keys |= {"watch": rules.watch, "ignore": rules.ignore}
    if policy.by:
        keys["by"] = f"{policy.by * 100:.12g}%" if policy.by_share else f"{policy.by:.12g}"
    return keys


def _as_written(code: int, data: memoryview) -> dict[str, str]:
    """Return a reference to a secret as people write it; nothing else is in arguments."""
    return {JSON_KEY: secret_name(Ext(code, bytes(data))) or ""}
