"""From [[schedule]] to what the core decides by."""

from musterd.ipc.client.taskspec import encode_args, key_of
from musterd.ipc.secrets.reference import from_json
from musterd.ipc.wire.messages import PRIORITY_NAMES
from musterd.supervisor.config.schema import Config, ScheduleConfig
from musterd.supervisor.config.timezones import time_zone
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.timing import Cron, Every, Timing
from musterd.supervisor.sockets.targets import site_of


def schedule_policies(config: Config) -> tuple[SchedulePolicy, ...]:
    return tuple(_schedule_policy(name, each) for name, each in config.schedule.items())


def _schedule_policy(name: str, schedule: ScheduleConfig) -> SchedulePolicy:
    key, args = schedule.key, from_json(schedule.args)
    if not key and (schedule.cache_ns or schedule.debounce_ns):
        key = key_of(schedule.task, args)
    return SchedulePolicy(
        name=name,
        task=schedule.task,
        timing=_timing(schedule),
        args=encode_args(schedule.task, args),
        priority=PRIORITY_NAMES.index(schedule.priority),
        target=schedule.target,
        sites={key: site_of(text) for key, text in schedule.args.items() if isinstance(text, str)},
        timeout_ns=schedule.timeout_ns,
        max_retries=schedule.max_retries,
        key=key,
        cache_ns=schedule.cache_ns,
        debounce_ns=schedule.debounce_ns,
        jitter_ns=schedule.jitter_ns,
        overlap=schedule.overlap,
        catch_up=schedule.catch_up,
        enabled=schedule.enabled,
        notify=bool(schedule.notify),
    )


def _timing(schedule: ScheduleConfig) -> Timing:
    if schedule.every_ns:
        return Every(schedule.every_ns)
    return Cron(schedule.cron, time_zone(schedule.timezone))
