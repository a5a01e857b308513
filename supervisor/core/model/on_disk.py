"""Tasks that are read back from disk, in columns."""

from typing import Self

from msgspec import Struct

from musterd.ipc.wire.messages import TaskSpec


class OnDisk(Struct, frozen=True, gc=False):
    """Unfinished tasks that have never run, in columns: many are read, without an object each."""

    seqs: list[int] = []
    specs: list[TaskSpec] = []
    submits_wall_ns: list[int] = []

    def add(self, seq: int, spec: TaskSpec, submitted_wall_ns: int) -> None:
        self.seqs.append(seq)
        self.specs.append(spec)
        self.submits_wall_ns.append(submitted_wall_ns)

    def extend(self, others: Self) -> None:
        self.seqs.extend(others.seqs)
        self.specs.extend(others.specs)
        self.submits_wall_ns.extend(others.submits_wall_ns)
