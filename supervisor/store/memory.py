"""The store for `durability = "memory"`: it never waits, and is gone with the process."""

import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from musterd.ipc.wire.messages import FAILED, SUCCEEDED, FailedAttempt
from musterd.supervisor.core.model.actions import (
    AttemptRecord,
    Fact,
    FinalRecord,
    LiveRecord,
    NewRecord,
    Persist,
    ReopenRecord,
)
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.core.model.events import Recovered
from musterd.supervisor.core.model.on_disk import OnDisk
from musterd.supervisor.store.interface import (
    ATTEMPTS_KEPT,
    LIST_LOOKS_MAX,
    LIST_TASKS_MAX,
    REFUSED,
    FindFact,
    FindFacts,
    FindSome,
    FindStranded,
    FindTasks,
    Found,
    Listed,
    ListFinished,
    ListLive,
    Page,
    Portion,
    Purge,
    Purged,
    Query,
    ReadQueued,
    StoredTask,
    StrandedTasks,
    WallTime,
    Withdraw,
    ended_fits,
    fact_end_ns,
    kept_failure,
    listed_state,
    live_state,
    time_left_ns,
    without_payload,
)
from musterd.supervisor.system.threads import Wakeup

# Limits of kept results, whichever is reached first. Clients fetch results within seconds; the
# limits keep a daemon that runs for months from growing.
RESULTS_MAX = 100_000
RESULT_BYTES_MAX = 64 * 1024 * 1024


class MemoryStore:
    immediate = True

    def __init__(self, wall_ns: WallTime = time.time_ns) -> None:
        self._wall_ns = wall_ns
        self.commits = 0
        self.ended = 0  # each write keeps the limits: no trim is needed for them
        self._last_number = 0  # of a finished task
        self._live: dict[str, tuple[NewRecord, int]] = {}  # by id, with the wall time of the write
        self._changed: dict[int, tuple[LiveRecord, int]] = {}  # by seq
        # With the wall time and the number of their end, the oldest first.
        self._finished: OrderedDict[str, tuple[FinalRecord, int, int]] = OrderedDict()
        self._finished_bytes = 0
        self._attempts: dict[int, deque[FailedAttempt]] = {}  # by seq
        self._facts: dict[tuple[str, str], tuple[bytes, int]] = {}  # with their end, 0 for never
        self._last_seq = 0
        self._ticket: int | None = None
        self._answers: deque[Found] = deque()  # of one turn of the loop
        self._methods: dict[type, Callable[[Any], object]] = {
            FindTasks: lambda query: self._find_some(query.ids, sys.maxsize, query.attempts).tasks,
            FindSome: lambda query: self._find_some(query.ids, query.bytes_max, query.attempts),
            ReadQueued: self._read,
            ListFinished: self._list_finished,
            ListLive: self._list_live,
            FindStranded: self._find_stranded,
            FindFact: self._find_fact,
            FindFacts: lambda query: [
                self._find_fact(FindFact(query.kind, key)) for key in query.keys
            ],
            Withdraw: lambda _: [],  # a task never waits to be written
            Purge: self._purge,
        }
        self._wakeup = Wakeup()
        self.commit_times = Histogram()
        self.size_bytes = 0

    def recover(self, now_ns: int, wall_ns: int) -> Iterator[list[Recovered]]:
        return iter(())

    def unfinished(self) -> int:
        return 0

    def last_seq(self) -> int:
        return self._last_seq

    def facts(self, kind: str) -> list[tuple[str, bytes]]:
        self._forget_facts(self._wall_ns())
        return sorted((key, value) for (of, key), (value, _) in self._facts.items() if of == kind)

    def write(self, persist: Persist) -> None:
        wall_ns = self._wall_ns()
        for reopened in persist.reopened:
            self._reopen(reopened)
        for new in persist.news():
            self._live[new.spec.id] = (new, wall_ns)
            self._last_seq = max(self._last_seq, new.seq)
        for change in persist.changed:
            self._changed[change.seq] = (change, wall_ns)
        for failed in persist.failed:
            self._note_attempt(failed, wall_ns)
        for final in persist.finished:
            self._finish(final, wall_ns)
        for fact in persist.facts:
            self._note_fact(fact, wall_ns)
        self._forget_beyond(RESULTS_MAX)
        self._ticket = persist.ticket
        self.commits += 1

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def completed(self) -> int | None:
        ticket, self._ticket = self._ticket, None
        return ticket

    def ask(self, query: Query[Any], token: object) -> bool:
        self._answers.append((token, self._methods[type(query)](query)))
        self._wakeup.set()
        return True

    def _with_attempts(self, task: StoredTask) -> StoredTask:
        return msgspec.structs.replace(task, attempts=list(self._attempts.get(task.seq, ())))

    def _find_some(self, ids: list[str], bytes_max: int, attempts: bool) -> Portion:
        found: list[StoredTask] = []
        for place, task in enumerate(map(self._find, ids)):
            if task is None:
                continue
            size = len(task.spec.args) + len(task.outcome.value if task.outcome else b"")
            if size > bytes_max:
                return Portion(found, ids[place:], size)
            bytes_max -= size
            found.append(self._with_attempts(task) if attempts else task)
        return Portion(found, [])

    def _read(self, query: ReadQueued) -> Page:
        tasks = OnDisk()
        for id_ in query.ids:
            if id_ in self._live:
                new = self._live[id_][0]
                tasks.add(new.seq, new.spec, new.submitted_wall_ns)
        return Page(tasks, [])

    def _list_finished(self, query: ListFinished) -> Listed:
        below = query.below or self._last_number + 1
        ended = (each for each in reversed(self._finished.values()) if each[2] < below)

        def fits(final: FinalRecord, wall_ns: int) -> bool:
            outcome = final.outcome
            dead = not query.dead or listed_state(outcome) != REFUSED
            return dead and ended_fits(query.where, final.spec, outcome, wall_ns)

        page: list[StoredTask] = []
        for looks, (final, wall_ns, number) in enumerate(ended, 1):
            if fits(final, wall_ns):
                page.append(without_payload(self._stored(final, wall_ns)))
            if len(page) >= min(query.limit, LIST_TASKS_MAX) or looks >= LIST_LOOKS_MAX:
                return Listed(page, number if number > 1 else 0, below)
        return Listed(page, 0, below)

    def _list_live(self, query: ListLive) -> Listed:
        where, below = query.where, query.below or self._last_seq + 1
        live = (new for new, _ in reversed(self._live.values()) if new.seq < below)
        page: list[StoredTask] = []
        for looks, new in enumerate(live, 1):
            task = self._find(new.spec.id) if where.fits(new.spec, new.submitted_wall_ns) else None
            if task is not None and where.fits_state(task.state):
                page.append(without_payload(task))
            if len(page) >= min(query.limit, LIST_TASKS_MAX) or looks >= LIST_LOOKS_MAX:
                return Listed(page, new.seq if new.seq > 1 else 0, below)
        return Listed(page, 0, below)

    def _find_stranded(self, query: FindStranded) -> StrandedTasks:
        now_ns, wall_ns = time.monotonic_ns(), self._wall_ns()
        tasks = [
            self._recovered(new, since_ns, now_ns, wall_ns)
            for new, since_ns in self._live.values()
            if new.pool == query.pool and new.seq > query.after_seq
        ]
        return StrandedTasks(sorted(tasks, key=lambda task: task.seq), 0)

    def _recovered(self, new: NewRecord, since_ns: int, now_ns: int, wall_ns: int) -> Recovered:
        spec = new.spec
        change, since_ns = self._last_change(new, since_ns)
        wait_left = time_left_ns(since_ns, change.wait_ns, wall_ns)
        expires_left = time_left_ns(new.submitted_wall_ns, spec.expires_ns, wall_ns)
        return Recovered(
            seq=new.seq,
            spec=spec,
            submitted_wall_ns=new.submitted_wall_ns,
            ready_ns=now_ns + wait_left if wait_left else 0,
            expires_at_ns=now_ns + expires_left if spec.expires_ns else 0,
            attempt=change.attempt,
            crashes=change.crashes,
            interruptions=change.interruptions,
            begun=change.begun,
        )

    def _last_change(self, new: NewRecord, since_ns: int) -> tuple[LiveRecord, int]:
        """Return the last change of a task, and its wall time: of a new one, its submit."""
        unchanged = (LiveRecord(new.seq, 0, 0, 0, new.spec.delay_ns, False), since_ns)
        return self._changed.get(new.seq, unchanged)

    def _find_fact(self, query: FindFact) -> bytes | None:
        value, end_ns = self._facts.get((query.kind, query.key), (None, 0))
        return None if 0 < end_ns <= self._wall_ns() else value

    def found(self) -> list[Found]:
        self._wakeup.clear()
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def _purge(self, query: Purge) -> Purged:
        ids = query.ids
        purged = [
            id_
            for id_ in (list(self._finished) if ids is None else dict.fromkeys(ids))
            if (known := self._finished.get(id_)) is not None
            and known[0].outcome.state != SUCCEEDED
            and (query.unwell or known[0].outcome.state == FAILED)
            and known[1] < query.before_wall_ns
        ]
        for id_ in purged:
            self._forget(id_)
        return Purged(len(purged), [] if ids is None else purged)

    def problem(self) -> str | None:
        return None

    def write_problem(self) -> str | None:
        return None

    def newest_wall_ns(self) -> int:
        return 0

    def trim(self, keep_ns: int | None, keep_max: int) -> None:
        wall_ns = self._wall_ns()
        self._forget_beyond(min(keep_max, RESULTS_MAX))
        if keep_ns is None:
            return
        while self._finished:
            id_, (_, finished_ns, _) = next(iter(self._finished.items()))
            if finished_ns >= wall_ns - keep_ns:
                break
            self._forget(id_)
        self._forget_facts(wall_ns)

    def close(self) -> None:
        self._wakeup.close()

    def _reopen(self, reopened: ReopenRecord) -> None:
        attempts = self._attempts.get(reopened.former_seq)
        if reopened.id in self._finished:
            self._forget(reopened.id)
        if attempts:
            self._attempts[reopened.seq] = attempts

    def _note_attempt(self, failed: AttemptRecord, wall_ns: int) -> None:
        attempts = self._attempts.setdefault(failed.seq, deque(maxlen=ATTEMPTS_KEPT))
        failure = kept_failure(failed.failure)
        attempts.append(FailedAttempt(failed.attempt, wall_ns / 1e9, failed.worker, failure))

    def _note_fact(self, fact: Fact, wall_ns: int) -> None:
        if fact.value is None:
            self._facts.pop((fact.kind, fact.key), None)
        else:
            self._facts[fact.kind, fact.key] = (fact.value, fact_end_ns(fact, wall_ns))

    def _finish(self, final: FinalRecord, wall_ns: int) -> None:
        self._live.pop(final.spec.id, None)
        self._changed.pop(final.seq, None)
        # A task that ran again replaces its former result, as the newest.
        if final.spec.id in self._finished:
            self._forget(final.spec.id)
        self._last_number += 1
        self._finished[final.spec.id] = (final, wall_ns, self._last_number)
        self._finished_bytes += self._bytes_of(final)

    def _forget(self, id_: str) -> None:
        final, *_ = self._finished.pop(id_)
        self._finished_bytes -= self._bytes_of(final)
        self._attempts.pop(final.seq, None)

    def _bytes_of(self, final: FinalRecord) -> int:
        errors = sum(
            len(attempt.failure.message) + len(attempt.failure.traceback)
            for attempt in self._attempts.get(final.seq, ())
        )
        return len(final.spec.args) + len(final.outcome.value) + errors

    def _forget_beyond(self, results_max: int) -> None:
        while self._finished and (
            len(self._finished) > results_max or self._finished_bytes > RESULT_BYTES_MAX
        ):
            self._forget(next(iter(self._finished)))

    def _forget_facts(self, wall_ns: int) -> None:
        ended = [name for name, (_, end_ns) in self._facts.items() if 0 < end_ns <= wall_ns]
        for name in ended:
            del self._facts[name]

    def _find(self, task_id: str) -> StoredTask | None:
        if live := self._live.get(task_id):
            new, since_ns = live
            change, since_ns = self._last_change(new, since_ns)
            wait_left = time_left_ns(since_ns, change.wait_ns, self._wall_ns())
            state = live_state(change.begun, wait_left)
            return StoredTask(
                *(new.seq, new.spec, state, None),
                *(change.crashes, change.attempt, new.submitted_wall_ns),
            )
        if finished := self._finished.get(task_id):
            return self._stored(*finished[:2])
        return None

    @staticmethod
    def _stored(final: FinalRecord, finished_wall_ns: int) -> StoredTask:
        return StoredTask(
            final.seq, final.spec, final.outcome.state, final.outcome, final.crashes,
            final.outcome.attempts, final.submitted_wall_ns, finished_wall_ns,
        )  # fmt: skip
