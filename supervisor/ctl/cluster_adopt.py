"""musterctl cluster adopt: move the queue of one machine into the cluster.

Batches of tasks are submitted under their own ids as resends: the cluster knows a task that it has
already. What a kill at any point leaves is said in store/departure.py.
"""

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.messages import QUEUE_FULL, TaskSpec
from musterd.supervisor.cluster import checks
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.config.load import load
from musterd.supervisor.config.schema import Config
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.ctl.app import CLUSTER_UNREACHABLE, DONE, FAILED, Settings
from musterd.supervisor.ctl.cluster_link import (
    ClusterAway,
    ClusterUnusable,
    cluster_engine,
    find_url,
    told,
)
from musterd.supervisor.ctl.output import emit, emit_json, warn
from musterd.supervisor.store.departure import Departure, Doubt
from musterd.supervisor.store.interface import StoreError, pool_of
from musterd.supervisor.system import directories
from musterd.supervisor.text.printable import printable

BATCH_TASKS = 500
BATCH_BYTES = 8 * 1024 * 1024
FULL_SECONDS = 1.0  # how full a queue is, is counted once a second
FULL_TRIES = 30  # without room for a single task

EXPIRED = "expired: the daemon ends them at its next start"
CANCELLED = "cancelled: the daemon ends them at its next start"
LOCAL = "of pools that stay on this machine"


class Adopted(Struct, kw_only=True):
    """Answer to `musterctl cluster adopt`."""

    moved: int = 0
    pools: dict[str, int] = {}  # moved, or to be moved, by pool
    left: dict[str, int] = {}  # not moved, by the reason
    dry_run: bool = False


class QueueStaysFull(ClusterUnusable):
    """The queue of a pool has no room for more."""


def adopt(settings: Settings, *, dry_run: bool, again: bool) -> int:
    """Move all tasks that the cluster takes; say what stays and why."""
    config = _config(settings)
    with told():
        place = checks.place(find_url(settings))
    path = directories.state_dir(config.supervisor.state_dir) / directories.STORE_FILE
    if not path.exists():
        raise ClusterUnusable(f"there is no store {path}: nothing to move; see --config")
    try:
        departure = Departure(path)
    except StoreError as error:
        warn(f"{error} The daemon must be stopped: musterctl shutdown")
        return CLUSTER_UNREACHABLE if "in use" in str(error) else FAILED
    mover = Mover(departure, config, place)
    try:
        with cluster_engine(settings, "submit_1", "submit", alone=_number(path)) as engine:
            _move(mover, engine, dry_run=dry_run, again=again)
    except (ClusterAway, QueueStaysFull) as error:
        mover.tell(settings, dry_run=dry_run)
        raise type(error)(f"{error}; run the same command again to go on") from None
    finally:
        departure.close()
    mover.tell(settings, dry_run=dry_run)
    return FAILED if mover.left else DONE


def _number(path: Path) -> int:
    """Return what the session of this store's adoption is known by in PostgreSQL.

    A submit of an adoption that was killed may still be under way there; it is ended before.
    """
    name = f"adopt {socket.gethostname()} {path.absolute()}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2 or 1


def _config(settings: Settings) -> Config:
    try:
        return load([Path(each) for each in settings.config] or None).config
    except ConfigurationError as error:
        raise ClusterUnusable(str(error)) from None


def _move(mover: "Mover", engine: PostgresEngine, *, dry_run: bool, again: bool) -> None:
    if dry_run:
        for batch in mover.batches():
            mover.count(batch)
        return
    mover.resolve(engine, again=again)
    for batch in mover.batches():
        mover.move(engine, batch)


class Mover:
    def __init__(self, departure: Departure, config: Config, place: str) -> None:
        self._departure = departure
        self._cluster = config.cluster
        self._keep_seconds = config.store.keep_results_ns / 1e9
        self._place = place
        self._moved: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def tell(self, settings: Settings, *, dry_run: bool) -> None:
        """Print what was moved, and what was not."""
        result = Adopted(
            moved=0 if dry_run else self._moved.total(),
            pools=dict(self._moved),
            left=dict(self.left),
            dry_run=dry_run,
        )
        if settings.json:
            emit_json(msgspec.json.encode(result))
        else:
            emit(adopted(result, self._place))

    # -- what is moved ------------------------------------------------------------------------

    def batches(self) -> Iterator[list[Recovered]]:
        """Yield the tasks that can be moved, in their order; count the others."""
        cancelled, after = self._departure.cancelled(), 0
        while True:
            page, last = self._departure.tasks(after, BATCH_TASKS)
            if not last:
                return
            after = last
            movable = [task for task in page if self._may_move(task, cancelled)]
            yield from _portions(movable)

    def _may_move(self, task: Recovered, cancelled: set[str]) -> bool:
        why = ""
        if self._cluster.wanted and not self._cluster.shares(pool_of(task.spec)):
            why = LOCAL
        elif task.spec.id in cancelled:
            why = CANCELLED
        elif task.spec.expires_ns and not task.expires_at_ns:
            why = EXPIRED
        if why:
            self.left[why] += 1
        return not why

    def count(self, batch: Sequence[Recovered]) -> None:
        self._moved.update(pool_of(task.spec) for task in batch)

    def move(self, engine: PostgresEngine, batch: Sequence[Recovered]) -> None:
        """Submit a batch, then remove what was taken."""
        cluster, waiting, tries = engine.cluster(), list(batch), 0
        while waiting:
            ids = [task.spec.id for task in waiting]
            self._departure.announce(Doubt(cluster, self._place, time.time(), ids))
            verdicts = engine.submit([departing(task) for task in waiting], resend=True)
            taken, full, why = [], [], ""
            for task, verdict in zip(waiting, verdicts, strict=True):
                if verdict.rejection is None:
                    taken.append(task)
                elif verdict.rejection.code == QUEUE_FULL:
                    full.append(task)
                    why = verdict.rejection.message
                else:
                    self.left[_reason(verdict.rejection.message, task.spec.id)] += 1
            self._departure.remove([task.seq for task in taken])
            self._departure.settle()
            self.count(taken)
            waiting, tries = full, 0 if taken else tries + 1
            if tries > FULL_TRIES:
                raise QueueStaysFull(
                    f"{_reason(why, waiting[0].spec.id)}: let the nodes work, or raise queue_size "
                    "of the pool on them"
                )
            if full:
                time.sleep(FULL_SECONDS)

    # -- after a kill -------------------------------------------------------------------------

    def resolve(self, engine: PostgresEngine, *, again: bool) -> None:
        """Find out about the batch in doubt: what the cluster knows is removed here."""
        doubt = self._departure.doubt()
        if doubt is None:
            return
        if doubt.cluster != engine.cluster():
            raise ClusterUnusable(
                f"an adoption into another cluster, at {doubt.place}, was cut off: finish that one "
                "first"
            )
        found = engine.fetch(doubt.ids, -1)
        doubted, absent = set(doubt.ids), set(found.absent)
        known = doubted - absent
        seqs = [task for page in self._pages() for task in page if task.spec.id in doubted]
        unknown = [task.spec.id for task in seqs if task.spec.id in absent]
        if unknown and not again and time.time() - doubt.at > self._keep_seconds:
            raise ClusterUnusable(
                f"{len(unknown)} tasks may have run: an adoption was cut off longer ago than the "
                "cluster remembers ended tasks. Move them with --again, which runs them once more "
                f"if they have: {', '.join(unknown[:10])}"
            )
        gone = [task for task in seqs if task.spec.id in known]
        self._departure.remove([task.seq for task in gone])
        self._departure.settle()
        self.count(gone)

    def _pages(self) -> Iterator[list[Recovered]]:
        after = 0
        while True:
            page, last = self._departure.tasks(after, BATCH_TASKS)
            if not last:
                return
            after = last
            yield page


def _portions(tasks: Sequence[Recovered]) -> Iterator[list[Recovered]]:
    """Cut tasks into batches of BATCH_BYTES."""
    part: list[Recovered] = []
    size = 0
    for task in tasks:
        size += len(task.spec.args) + len(task.spec.fallback or b"")
        if part and size > BATCH_BYTES:
            yield part
            part, size = [], len(task.spec.args) + len(task.spec.fallback or b"")
        part.append(task)
    if part:
        yield part


def departing(task: Recovered) -> TaskSpec:
    """Return what is submitted: delays and expiries are what is left, retries what was not used.

    `task` has times from now on. Crashes and retries that its declaration allows count anew.
    """
    spec = task.spec
    retries = max(0, spec.max_retries - task.attempt) if spec.max_retries > 0 else spec.max_retries
    return structs.replace(
        spec,
        delay_ns=task.ready_ns,
        expires_ns=task.expires_at_ns if spec.expires_ns else 0,
        max_retries=retries,
    )


def _reason(message: str, id_: str) -> str:
    """Return the message of a rejection without the task's id: it is the same for many."""
    return message.removeprefix(f"'{id_}' was not accepted: ").replace(f"'{id_}' ", "")


def adopted(result: Adopted, place: str) -> str:
    """Format the answer of `adopt`."""
    number = sum(result.pools.values())
    pools = ", ".join(f"{name} {count}" for name, count in sorted(result.pools.items()))
    what = "would be moved" if result.dry_run else "moved"
    tasks = "1 task" if number == 1 else f"{number} tasks"
    lines = [f"{tasks} {what} into the cluster at {place}" + (f": {pools}" if pools else "")]
    lines += [f"{count} stay here: {why}" for why, count in sorted(result.left.items())]
    if not result.dry_run:
        lines.append("results and failed tasks from before stay in the store of this machine")
    return printable("\n".join(lines), keep="\n")
