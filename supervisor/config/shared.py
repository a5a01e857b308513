"""The sections that all machines of a cluster share, out of a file of their own or a machine's.

`musterctl cluster apply` reads them. A schedule may be for a pool that this machine does not have.
The other sections of a machine's file stay with the machine.
"""

from collections.abc import Iterator

from musterd.supervisor.config.bulk import is_pattern
from musterd.supervisor.config.redact import problem_of
from musterd.supervisor.config.schema import (
    BreakerConfig,
    CacheConfig,
    ClassConfig,
    Config,
    DebounceConfig,
    RetryConfig,
    ScheduleConfig,
    SupervisorConfig,
    TargetConfig,
    class_conflicts,
    target_conflicts,
)
from musterd.supervisor.config.section import Conflict, Section
from musterd.supervisor.config.timezones import time_zone
from musterd.supervisor.config.watching import ATTACH_SHARED


class SharedConfig(Section, frozen=True):
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    classes: dict[str, ClassConfig] = {}
    targets: dict[str, TargetConfig] = {}
    cache: CacheConfig = CacheConfig()
    debounce: DebounceConfig = DebounceConfig()
    schedule: dict[str, ScheduleConfig] = {}

    def as_config(self) -> Config:
        """Return a configuration with nothing else."""
        return Config(**{name: getattr(self, name) for name in self.__struct_fields__})

    def conflicts(self) -> Iterator[Conflict]:
        config = self.as_config()
        yield from class_conflicts(config)
        yield from target_conflicts(config)
        for name in filter(is_pattern, self.targets):
            yield ("targets", name), "is a pattern, which a cluster does not know: name each target"
        for name, schedule in self.schedule.items():
            if schedule.cron and not schedule.timezone and _zone_has_no_name():
                yield (
                    ("schedule", name, "timezone"),
                    "is missing, and the time zone of this machine has no name that others know: "
                    'give a name such as "Europe/Berlin" or "UTC"',
                )
            if schedule.attach:
                yield ("schedule", name, "attach"), ATTACH_SHARED
            problem = problem_of(schedule.task, schedule.args, SupervisorConfig().redact)
            if problem:
                yield ("schedule", name, "args"), problem


def _zone_has_no_name() -> bool:
    try:
        return str(time_zone("")) == "local"
    except ValueError:
        return False  # the section itself says so
