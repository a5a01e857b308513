"""One schedule: what survives restarts, and what is known in this life."""

from hashlib import sha256

import msgspec
from msgspec import Struct, field

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import VIEW_BYTES_MAX, Outcome
from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.runs import plan_name
from musterd.supervisor.core.model.task import Task
from musterd.supervisor.core.model.watching import CUT_OFF, ChangeNote, Seen, Watched

FACT = "schedule"  # Fact.kind


class ScheduleRecord(Struct, array_like=True):
    """The state of a schedule that survives restarts."""

    plan: str  # task and timing: another plan begins anew
    last_ns: int = 0  # all instants up to this one are settled; 0: not begun
    turn: int = 0  # how often `last_ns` was set back: part of the ids, so that none repeats
    paused: bool = False
    task: str = ""  # id of the newest run
    ran_ns: int = 0  # the instant of the newest run
    state: str = ""  # how the newest run ended; "" while it is alive
    digest: str = ""  # written by the version before only, as are `untold` and `changed`
    untold: str = ""
    runs: int = 0
    skipped: int = 0
    retried: list[str] = []  # ids of runs retried by hand, until they end
    changed: str = ""
    asked_ns: int = 0  # when the newest run was made that somebody asked for, or it was added ...
    asked: str = ""  # ... and the id of that run
    watched: Watched = field(default_factory=Watched)  # its results


decode_record = msgspec.msgpack.Decoder(ScheduleRecord).decode
encode_record = msgspec.msgpack.Encoder().encode


class Schedule:
    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self.record = ScheduleRecord(plan_name(policy))
        self.next_ns: int | None = None  # the instant after `last_ns`
        self.look_ns: int | None = None  # when it has to be looked at (due_times.py)
        self.unreported = 0  # skipped runs that were not reported yet
        self.why = ""
        self.reported_ns = 0  # when skipped runs were reported last
        self.reset_ns = 0  # when its new beginning was reported last
        self.told: list[ChangeNote] = []  # changes that the shell has told in this life

    @property
    def active(self) -> bool:
        return self.policy.enabled and not self.record.paused

    @property
    def all_alive(self) -> list[str]:
        """Return the ids of live runs: the newest, and those that were retried by hand."""
        record = self.record
        newest = [record.task] if record.task and not record.state else []
        return newest + record.retried

    @property
    def alive(self) -> str:
        """Return the id of a live run; "" if there is none."""
        return next(iter(self.all_alive), "")

    def settle(self, instant_ns: int) -> None:
        """Settle all instants up to this one."""
        self.record.last_ns = instant_ns
        self.next_ns = self.policy.timing.next_after(instant_ns)


def seen_of(task: Task, outcome: Outcome, wall_ns: int, *, by_rules: bool) -> Seen | None:
    """Return a good result as it is judged; None where rules want a view and there is none."""
    view, value, id_ = task.view, outcome.value, task.spec.id
    if view is None or outcome.cached:
        if by_rules:
            return None
        cut = len(value) > VIEW_BYTES_MAX
        digest = sha256(value).hexdigest()
        return Seen(id_, digest, {}, CUT_OFF if cut else value, cut, wall_ns)
    kept = value if view.kept is None else view.kept
    return Seen(id_, view.digest, view.numbers, kept, view.cut, wall_ns)


def readable(value: bytes) -> ScheduleRecord | None:
    try:
        return decode_record(value)
    except msgspec.MsgspecError:
        return None


def adopt(record: ScheduleRecord) -> None:
    """Take over what the version before has written."""
    watched = record.watched
    if record.digest:
        watched.baseline = record.digest
    if record.changed:
        watched.newest = ChangeNote(record.changed, record.digest)
    if record.untold:
        watched.untold = [ChangeNote(record.untold, record.digest)]
    record.digest = record.untold = record.changed = ""


def change_report(schedule: Schedule, note: ChangeNote, *, again: bool = False) -> Report:
    """Return the event of a change; `again` if it may have been told before."""
    policy = schedule.policy
    return Report(
        "task.changed",
        pool=policy.task.partition(".")[0],
        task=note.task,
        schedule=policy.name,
        digest=note.digest,
        number=note.number,
        number_before=note.before,
        changed_at=note.at_ns / SECOND_NS,
        again=again,
    )
