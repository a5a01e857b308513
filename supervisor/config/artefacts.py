"""The keys of [artefacts]: files that failed attempts leave behind."""

from typing import Annotated

from msgspec import field

from musterd.ipc.wire.artefacts import ATTEMPT_BYTES_MAX
from musterd.supervisor.config.kinds import Duration, Flag, Size, Whole
from musterd.supervisor.config.section import MEBIBYTE, Section
from musterd.supervisor.text.units import SECOND_NS

# Each look at them reads their names: ten thousand take some 10 ms of a thread.
ATTEMPTS_MAX = 10_000
BYTES_MAX = 1024 * 1024 * MEBIBYTE
DAY_NS = 86_400 * SECOND_NS  # as long as results are kept by default


class ArtefactsConfig(Section, frozen=True):
    enabled: Annotated[bool, Flag()] = True
    count: Annotated[int, Whole(1, ATTEMPTS_MAX)] = 200
    bytes: Annotated[int, Size(ATTEMPT_BYTES_MAX, BYTES_MAX)] = 256 * MEBIBYTE
    age_ns: Annotated[int, Duration(SECOND_NS)] = field(name="age", default=DAY_NS)
