"""Every key of the configuration: its name, its kind, its default.

A section is one struct and one line in Config. The name of a field says its unit where the value
was converted; `name=` gives the key that people write. What the documentation promises for later
versions is listed in LATER, so that it is refused by its name instead of doing nothing.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from msgspec import Struct, field

from musterd.supervisor.config_values import (
    AbsolutePath,
    Choice,
    Duration,
    Flag,
    GroupName,
    Number,
    Options,
    Share,
    Text,
    Variables,
    Whole,
    WorkerName,
)
from musterd.supervisor.units import SECOND_NS, format_duration

MILLISECOND_NS = SECOND_NS // 1000
DAY_NS = 86_400 * SECOND_NS

# Each worker is a process tree; more per pool than this is a slip of the pen on any machine.
POOL_SIZE_MAX = 1000
# Each pool costs a process of its own, the nursery.
POOLS_MAX = 100
# A pool's name is part of process titles, task names and journal fields.
POOL_NAME_LENGTH_MAX = 64
# Queued tasks are rows on disk: about 1 KB each, so some 10 GB.
QUEUE_SIZE_MAX = 10_000_000
# What the protocol carries (ipc.messages.TaskSpec.max_retries).
RETRIES_MAX = 1000
CRASHES_MAX = 100
RESTARTS_MAX = 10_000
# Its 64th power must stay a float, and a pause that grows faster is at its maximum anyway.
FACTOR_MAX = 100

NAME = re.compile(r"[a-z][a-z0-9_-]*")
RESERVED_POOL_NAMES = frozenset({"all"})  # musterctl's word for every pool

# Promised names that this version does not act on; * stands for any name.
LATER = frozenset(
    {"memory", "breaker", "classes", "targets", "schedule", "alerts", "http"}
    | {
        f"pools.*.{key}"
        for key in ("min", "max", "max_tasks", "max_age", "max_memory", "sacrifice")
    }
)


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""

    entries_max: ClassVar[int] = 0  # of a table of such sections

    @staticmethod
    def name_problem(name: str) -> str:
        """Why no such section can be called so, or "". For tables of sections."""
        return ""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys whose values do not go together, each with the rest of the sentence."""
        yield from ()


class SupervisorConfig(Section, frozen=True):
    runtime_dir: Annotated[str, AbsolutePath()] = ""
    state_dir: Annotated[str, AbsolutePath()] = ""
    log_level: Annotated[str, Choice(("debug", "info", "warning", "error"))] = "info"
    log_file: Annotated[str, AbsolutePath()] = ""
    drain_timeout_ns: Annotated[int, Duration()] = field(
        name="drain_timeout", default=30 * SECOND_NS
    )
    stop_timeout_ns: Annotated[int, Duration()] = field(name="stop_timeout", default=5 * SECOND_NS)
    profile: Annotated[str, Text()] = "production"
    containment: Annotated[str, Choice(("auto", "pidns", "reaper"), later=("cgroup",))] = "auto"
    control_group: Annotated[str, GroupName()] = ""
    tasks_group: Annotated[str, GroupName()] = ""


class StoreConfig(Section, frozen=True):
    durability: Annotated[str, Choice(("full", "normal", "memory"))] = "full"
    keep_results_ns: Annotated[int, Duration()] = field(name="keep_results", default=DAY_NS)


def _base_over_max(base_ns: int, max_ns: int) -> Iterator[tuple[str, str]]:
    if base_ns > max_ns:
        yield "base", f"is longer than max ({format_duration(max_ns)}): lower base or raise max"


class RetryConfig(Section, frozen=True):
    max_retries: Annotated[int, Whole(0, RETRIES_MAX)] = 3
    strategy: Annotated[str, Choice(("exponential",), later=("linear", "fixed", "random"))] = (
        "exponential"
    )
    base_ns: Annotated[int, Duration()] = field(name="base", default=SECOND_NS)
    factor: Annotated[float, Number(1, FACTOR_MAX)] = 2.0
    max_ns: Annotated[int, Duration()] = field(name="max", default=60 * SECOND_NS)
    jitter: Annotated[float, Share()] = 0.1

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from _base_over_max(self.base_ns, self.max_ns)


class RestartConfig(Section, frozen=True):
    base_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="base", default=500 * MILLISECOND_NS
    )
    factor: Annotated[float, Number(1, FACTOR_MAX)] = 2.0
    max_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="max", default=60 * SECOND_NS)
    jitter: Annotated[float, Share()] = 0.1
    reset_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="reset", default=60 * SECOND_NS)
    limit: Annotated[int, Whole(1, RESTARTS_MAX)] = 10
    window_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="window", default=60 * SECOND_NS
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from _base_over_max(self.base_ns, self.max_ns)


class PoolConfig(Section, frozen=True):
    entries_max = POOLS_MAX
    worker: Annotated[str, WorkerName()]
    enabled: Annotated[bool, Flag()] = True
    size: Annotated[int, Whole(0, POOL_SIZE_MAX)] = 1
    queue_size: Annotated[int, Whole(1, QUEUE_SIZE_MAX)] = 10_000
    aging_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(name="aging", default=60 * SECOND_NS)
    task_timeout_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="task_timeout", default=120 * SECOND_NS
    )
    start_timeout_ns: Annotated[int, Duration(MILLISECOND_NS)] = field(
        name="start_timeout", default=30 * SECOND_NS
    )
    max_crashes: Annotated[int, Whole(1, CRASHES_MAX)] = 3
    env: Annotated[dict[str, str], Variables()] = {}
    options: Annotated[dict[str, Any], Options()] = {}
    restart: RestartConfig = RestartConfig()

    @staticmethod
    def name_problem(name: str) -> str:
        if name in RESERVED_POOL_NAMES:
            return f'the name "{name}" means every pool to musterctl: choose another'
        if not NAME.fullmatch(name) or len(name) > POOL_NAME_LENGTH_MAX:
            return (
                "not a pool name: use lower-case letters, digits, - and _, beginning with "
                f"a letter, at most {POOL_NAME_LENGTH_MAX} characters"
            )
        return ""


class Config(Section, frozen=True):
    supervisor: SupervisorConfig = SupervisorConfig()
    store: StoreConfig = StoreConfig()
    retry: RetryConfig = RetryConfig()
    pools: dict[str, PoolConfig] = {}


# Where no file has a [pools] table.
BUILT_IN_POOLS = {"parser": {"worker": "musterd.workers.parser:ParserWorker", "size": 5}}

# Profiles that need no file. Pools named here are only changed, never made.
BUILT_IN_PROFILES: dict[str, dict[str, Any]] = {
    "development": {
        "supervisor": {"log_level": "debug"},
        "store": {"durability": "normal"},
        "pools": {"parser": {"size": 2}},
    },
    "production": {},  # the defaults are made for it
}
