"""Watching: whether a result is a change, and which results history keeps.

Pure calculation, for the schedules of a daemon (core/tasks/schedules.py) and of a cluster.

The first result is the *baseline*, and no change. Without rules for numbers, a result whose digest
is not that of the baseline is a change once `confirm` results in a row have that digest. With rules
for numbers, it is a change once `confirm` results in a row satisfy one of them: `by` compares with
the baseline, `above` and `below` with the last result that satisfied none. The baseline is then the
new result. Results by other rules cannot be compared: the next one is the baseline.

History has an entry for each result that differs from the one before. Entries that the newest
change names are kept whatever happens, those of changes that are still to be told if there is room
for their bytes, the others as long as there is room.
"""

import msgspec
from msgspec import Struct, field

from musterd.ipc.wire.history import HistoryEntry
from musterd.supervisor.core.model.policy import WatchPolicy

HISTORY = "history"  # Fact.kind; the key is NAME.NUMBER
HISTORY_BYTES_MAX = 1024 * 1024  # of one schedule
# Changes that are told again after a death. They are told within milliseconds, so that more are
# under way only if somebody runs a schedule by hand as fast as possible.
UNTOLD_MAX = 100
CUT_OFF = b"\xa0"  # msgpack of an empty text, for a result that history has no room for
ERROR_CHARS_MAX = 500  # of a failure, in the report about many in a row
ROUNDING = 1e-9  # 5% of 49.00 is 2.45, also if it is 2.4500000000000001

encode_entry = msgspec.msgpack.Encoder().encode


class Kept(Struct, array_like=True, frozen=True, gc=False):
    """An entry of history, without its value."""

    number: int
    size: int  # bytes
    changed_ns: int = 0  # when it was told as a change; 0: it was not
    before: int = 0  # the entry that it was compared with then


class ChangeNote(Struct, array_like=True, frozen=True, gc=False):
    """A change, as it is told."""

    task: str  # id of the run
    digest: str
    number: int = 0  # of the new entry; 0: of a version that kept no history
    before: int = 0  # of the entry that it is compared with
    at_ns: int = 0


class Watched(Struct, array_like=True):
    """What is known of the results of a schedule, over restarts."""

    rules: str = ""  # WatchPolicy.name of what follows
    baseline: str = ""  # digest; "": there was no result yet
    told: int = 0  # entry of the baseline
    told_numbers: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)  # of the last result that was no change
    candidate: str = ""  # digest that is not confirmed yet ...
    count: int = 0  # ... and how many results in a row spoke for a change
    digest: str = ""  # of the newest entry
    number: int = 0  # of the newest entry; no number is given twice
    history: list[Kept] = field(default_factory=list)  # oldest first
    newest: ChangeNote | None = None
    untold: list[ChangeNote] = field(default_factory=list)  # until they are surely told
    failures: int = 0  # runs in a row
    stale: bool = False  # that was reported


class Seen(Struct, frozen=True):
    """A good result."""

    task: str
    digest: str
    numbers: dict[str, float]
    value: bytes
    cut: bool
    at_ns: int


class Judgement(Struct, frozen=True):
    """What a result means: a change or none, the entry to write, the entries to forget."""

    change: ChangeNote | None = None
    entry: HistoryEntry | None = None
    forgotten: tuple[int, ...] = ()


def judge(policy: WatchPolicy, watched: Watched, seen: Seen) -> Judgement:
    """Note a good result in `watched`; return what it means."""
    if watched.rules != policy.name:
        begin_anew(watched, policy.name)
    first = not watched.baseline
    changed = not first and _is_change(policy, watched, seen)
    change = entry = None
    before = watched.told if changed else 0
    fresh = watched.digest != seen.digest
    if fresh:
        watched.number += 1
        watched.digest = seen.digest
    if first or changed:
        watched.baseline, watched.told = seen.digest, watched.number
        watched.told_numbers, watched.numbers = dict(seen.numbers), seen.numbers
    elif not watched.told and seen.digest == watched.baseline:
        watched.told = watched.number  # the version before kept no history
    if changed:
        change = ChangeNote(seen.task, seen.digest, watched.number, before, seen.at_ns)
        watched.newest = change
        watched.untold = [*watched.untold, change][-UNTOLD_MAX:]
    if fresh or changed:
        entry = HistoryEntry(
            watched.number,
            seen.at_ns,
            seen.task,
            seen.digest,
            seen.value,
            seen.cut,
            changed,
            before,
        )
        kept = Kept(watched.number, len(seen.value), seen.at_ns if changed else 0, before)
        watched.history = [*watched.history[: None if fresh else -1], kept]
    return Judgement(change, entry, trim(policy, watched))


def _is_change(policy: WatchPolicy, watched: Watched, seen: Seen) -> bool:
    """Return whether a result is a change; if not, note what it says."""
    if policy.numeric:
        speaks, same = _satisfies(policy, watched, seen.numbers), True
    else:
        speaks, same = seen.digest != watched.baseline, seen.digest == watched.candidate
    if not speaks:
        watched.candidate, watched.count = "", 0
        watched.numbers = seen.numbers
        return False
    watched.count = watched.count + 1 if same else 1
    watched.candidate = seen.digest
    if watched.count < policy.confirm:
        return False
    watched.candidate, watched.count = "", 0
    return True


def _satisfies(policy: WatchPolicy, watched: Watched, numbers: dict[str, float]) -> bool:
    """Return whether one of the numbers is worth telling. One that is new has its own baseline."""
    for name, number in numbers.items():
        last, told = watched.numbers.get(name), watched.told_numbers.setdefault(name, number)
        if last is not None:
            if policy.above is not None and last <= policy.above < number:
                return True
            if policy.below is not None and last >= policy.below > number:
                return True
        least = policy.by * abs(told) if policy.by_share else policy.by
        if policy.by and number != told and abs(number - told) >= least * (1 - ROUNDING):
            return True
    return False


def trim(policy: WatchPolicy, watched: Watched) -> tuple[int, ...]:
    """Forget the oldest entries that are too many or too large; return their numbers."""
    needed = {watched.number, watched.told}
    if watched.newest is not None:
        needed |= {watched.newest.number, watched.newest.before}
    untold = {each for note in watched.untold for each in (note.number, note.before)}
    forgotten = _excess(watched.history, needed | untold, policy.keep, HISTORY_BYTES_MAX)
    left = [each for each in watched.history if each.number not in forgotten]
    forgotten |= _excess(left, needed, len(left), HISTORY_BYTES_MAX)
    if forgotten:
        watched.history = [each for each in watched.history if each.number not in forgotten]
    return tuple(sorted(forgotten))


def _excess(history: list[Kept], needed: set[int], count_max: int, size_max: int) -> set[int]:
    """Return the oldest entries that nobody needs, as many as are too many or too large."""
    count, size = len(history), sum(each.size for each in history)
    found = set()
    for kept in history:
        if count <= count_max and size <= size_max:
            break
        if kept.number not in needed:
            found.add(kept.number)
            count, size = count - 1, size - kept.size
    return found


def begin_anew(watched: Watched, rules: str = "") -> None:
    """Take the next result for the baseline; history and what is to be told stay."""
    watched.rules, watched.baseline, watched.told = rules, "", 0
    watched.candidate, watched.count = "", 0
    watched.told_numbers, watched.numbers = {}, {}
    watched.digest = ""  # the next result has an entry, also if it looks the same


def note_failure(policy: WatchPolicy, watched: Watched) -> bool:
    """Count a failed run; return whether it makes the schedule stale."""
    watched.failures += 1
    became = 0 < policy.stale <= watched.failures and not watched.stale
    watched.stale = watched.stale or became
    return became


def stale_why(watched: Watched, error: str) -> str:
    return f"{watched.failures} runs in a row failed; the last: {error[:ERROR_CHARS_MAX]}"


def history_key(schedule: str, number: int) -> str:
    return f"{schedule}.{number}"
