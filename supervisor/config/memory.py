"""The keys of [memory] and [monitor]."""

from collections.abc import Iterator
from typing import Annotated

from msgspec import field

from musterd.supervisor.config.kinds import Duration, Flag, Share
from musterd.supervisor.config.section import MILLISECOND_NS, Conflict, Section
from musterd.supervisor.text.units import SECOND_NS

CHECK_NS_MIN = 100 * MILLISECOND_NS  # more often tells nothing new


class MonitorConfig(Section, frozen=True):
    """Looks at memory, processors, disk and network of the machine and of the workers."""

    enabled: Annotated[bool, Flag()] = True


class MemoryConfig(Section, frozen=True):
    enabled: Annotated[bool, Flag()] = True
    warning: Annotated[float, Share()] = 0.7
    critical: Annotated[float, Share()] = 0.85
    margin: Annotated[float, Share()] = 0.05
    pressure: Annotated[float, Share()] = 0.4
    check_interval_ns: Annotated[int, Duration(CHECK_NS_MIN)] = field(
        name="check_interval", default=SECOND_NS
    )
    calm_ns: Annotated[int, Duration()] = field(name="calm", default=10 * SECOND_NS)
    patience_ns: Annotated[int, Duration()] = field(name="patience", default=10 * SECOND_NS)
    statistics_ns: Annotated[int, Duration()] = field(name="statistics", default=300 * SECOND_NS)

    def conflicts(self) -> Iterator[Conflict]:
        if self.warning >= self.critical:
            yield ("warning",), f"is not below critical ({self.critical:.0%}): lower it"
        elif self.margin >= self.warning:
            yield ("margin",), f"is not below warning ({self.warning:.0%}): lower it"
