"""The client's side of tasks.sock as pure state: no socket, no clock, no thread.

Theory of operation. The owner calls `connected`, `disconnected`, `receive` and `tick` with the
present time, sends the messages of `outbox` in order, and comes back at `next_deadline`.

    add() -> batch -> seal() -> requests -> Accepted -> acknowledged -> Results -> ended
                                    ^   |
                 another connection |   | QueueFull, and the task may wait: again later
                 or epoch           +---+

Nothing but Hello is sent before the Welcome of a connection. A Welcome on a new connection, or with
another epoch, means that the supervisor knows nothing of us: every request not acknowledged is sent
again (`resend`, same ids, so nothing runs twice) and every task not ended is watched again. Both
are also done after REFRESH_NS of silence, because a ROUTER drops what a slow reader does not take.
Messages of the connection before may still be on their way. The supervisor recognizes that
connection by the name of the session in Hello, and stops reading it: the first copy of a task never
comes after the second one.
Messages that arrive twice change nothing.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count, islice
from typing import TypeVar

from msgspec import structs

from musterd.ipc.client.changes import Following
from musterd.ipc.client.record import Inspection, Question, SubmitRequest, TaskRecord
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.history import Entries
from musterd.ipc.wire.messages import (
    BATCH_BYTES_MAX,
    BATCH_TASKS_MAX,
    CANCELLED,
    PROTOCOL,
    QUEUE_FULL,
    UNKNOWN_TASK,
    Accepted,
    Advice,
    Advise,
    Cancel,
    Changes,
    ClientMessage,
    Follow,
    Hello,
    History,
    Inspect,
    Inspected,
    Invalidate,
    Missing,
    Outcome,
    ProgressNote,
    Refused,
    Rejection,
    Results,
    ServerMessage,
    Submit,
    Watch,
    Welcome,
)
from musterd.ipc.wire.resolving import Resolved
from musterd.ipc.wire.schedule_messages import (
    ScheduleAnswer,
    ScheduleReply,
    Schedules,
)

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000 * MILLISECOND_NS

# Limits of unacknowledged work; `full` asks the owner to wait.
UNACKED_TASKS_MAX = 10_000
UNACKED_BYTES_MAX = 64 * 1024 * 1024

# While a request is in flight, single submits gather up to this many before they are worth a frame.
COALESCE_TASKS = 64
COALESCE_BYTES = 64 * 1024

HELLO_RETRY_NS = SECOND_NS  # until the Welcome
# After the Welcome, while something is under way: a supervisor that has forgotten us says so when
# it is spoken to. Soon when all is silent, then less and less often.
HELLO_SILENCE_NS = 200 * MILLISECOND_NS
HELLO_PERIOD_NS = 5 * SECOND_NS
REFRESH_NS = 30 * SECOND_NS  # ask again when an answer is that late
FULL_RETRY_NS = 50 * MILLISECOND_NS  # for a full queue that does not say when to come back
UNREPORTED_MAX = 1_000  # rejections kept for flush(); older ones are only counted

TASK_MISSING = "TaskMissing"  # our own Rejection.code: the answer to a Watch was Missing

_SOFTWARE = "musterd.ipc.client"
_NO_TASK = "-"  # an id that no task has

Asked = TypeVar("Asked", Inspection, Question)


class Session:
    def __init__(self, name: str = "") -> None:
        """Only the supervisor gets to know `name`, on every connection."""
        self.name = name
        self.epoch = ""  # of the supervisor that answered last; "" before the first
        self.ready = False  # the Welcome of the present connection has arrived
        self.refusal = ""  # why the supervisor refuses us
        self.records: dict[str, TaskRecord] = {}  # every unfinished task
        self.outbox: deque[bytes] = deque()
        self.unacked_tasks = 0
        self.unacked_bytes = 0
        self.unreported: dict[str, TaskRecord] = {}  # rejected, and the user was not told yet
        self.unreported_count = 0
        self.progress = False  # receive() changed something; the owner resets it
        self.last_request = 0
        self.unknown_tasks = 0  # rejected because there is no such task
        self._connected = False
        self._hello_ns = 0  # when the next Hello is due
        self._silence_ns = 0  # when a Hello is due if nothing is sent or heard before
        self._silence_gap_ns = HELLO_SILENCE_NS
        self._refresh_ns = 0
        self._batch: list[TaskRecord] = []
        self._batch_bytes = 0
        self._requests: dict[int, SubmitRequest] = {}
        self._retries: list[tuple[int, int, TaskRecord]] = []
        self._retry_order = count()
        self._inspections: dict[int, Inspection | Question] = {}
        self._inspection_numbers = count(1)
        self._cancels: dict[str, None] = {}
        self._followings: list[Following] = []

    # -- what the user wants ------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the next task must wait for acknowledgements."""
        return self.unacked_tasks >= UNACKED_TASKS_MAX or self.unacked_bytes >= UNACKED_BYTES_MAX

    @property
    def gathering(self) -> bool:
        """Whether tasks wait in the batch."""
        return bool(self._batch)

    @property
    def due(self) -> bool:
        """Whether the batch should go out now instead of waiting for company."""
        return (
            not self._requests
            or len(self._batch) >= COALESCE_TASKS
            or self._batch_bytes >= COALESCE_BYTES
        )

    @property
    def busy(self) -> bool:
        """Whether an answer of the supervisor is awaited."""
        return bool(self.records or self._inspections or self._followings)

    def add(self, record: TaskRecord) -> None:
        """Submit a new task."""
        self.records[record.id] = record
        self._enqueue(record)

    def _enqueue(self, record: TaskRecord) -> None:
        self._batch.append(record)
        self._batch_bytes += record._size
        self.unacked_tasks += 1
        self.unacked_bytes += record._size

    def watch(self, record: TaskRecord) -> None:
        """Follow a task that was submitted before."""
        self.records[record.id] = record
        if self.ready:
            self.outbox.append(encode(Watch([record.id])))

    def cancel(self, now_ns: int, task_id: str) -> None:
        record = self.records.get(task_id)
        if record is None:
            return
        if any(waiting is record for _, _, waiting in self._retries):
            self._end(record, Outcome(task_id, CANCELLED))  # the supervisor does not have the task
            return
        self._cancels[task_id] = None
        self.seal(now_ns)  # the task itself goes first
        if self.ready:
            self.outbox.append(encode(Cancel([task_id])))

    def inspect(self, now_ns: int, task_id: str) -> Inspection:
        return self._inquire(now_ns, Inspection(task_id))

    def invalidate(self, now_ns: int, key: str, prefix: bool) -> Inspection:
        """Forget cached results; the answer comes when that is done.

        The supervisor handles messages in order, so the answer to a later question proves it.
        """
        return self._inquire(now_ns, Inspection(_NO_TASK, encode(Invalidate(key, prefix))))

    def advise(self, now_ns: int) -> Inspection:
        """Ask how many workers the pools should have."""
        return self._inquire(now_ns, Inspection(""))

    def history(self, now_ns: int, question: History) -> Inspection:
        """Ask for results of a schedule."""
        return self._inquire(now_ns, Inspection("", history=question))

    def ask(self, now_ns: int, question: Question) -> Question:
        """Ask about schedules or functions."""
        return self._inquire(now_ns, question)

    def _inquire(self, now_ns: int, inspection: Asked) -> Asked:
        number = next(self._inspection_numbers)
        self._inspections[number] = inspection
        self.seal(now_ns)
        if self.ready:
            self._ask(number, inspection)
        return inspection

    def _ask(self, number: int, inspection: Inspection | Question) -> None:
        if isinstance(inspection, Question):
            self.outbox.append(encode(inspection.make(number, inspection.asked > 0)))
            inspection.asked += 1
            return
        if inspection.ahead is not None:
            self.outbox.append(inspection.ahead)
        if inspection.history is not None:
            question: ClientMessage = structs.replace(inspection.history, request=number)
        else:
            question = Inspect(number, inspection.id) if inspection.id else Advise(number)
        self.outbox.append(encode(question))

    def follow(self, following: Following) -> None:
        """Report changes to this reader from now on."""
        self._followings.append(following)
        if self.ready:
            self.outbox.append(encode(Follow()))

    def unfollow(self, following: Following) -> None:
        if following in self._followings:
            self._followings.remove(following)

    def drop(self, inspection: Inspection | Question) -> None:
        """Forget an answer that nobody waits for any more."""
        for number, known in self._inspections.items():
            if known is inspection:
                del self._inspections[number]
                return

    def seal(self, now_ns: int) -> None:
        """Turn the batch into requests."""
        while self._batch:
            records, size = self._cut()
            self.last_request += 1
            request = self._requests[self.last_request] = SubmitRequest(records, size)
            if self.ready:
                self._send(now_ns, self.last_request, request)

    def _cut(self) -> tuple[list[TaskRecord], int]:
        """Take as much of the batch as one request may hold, at least one task."""
        batch = self._batch
        if len(batch) <= BATCH_TASKS_MAX and self._batch_bytes <= BATCH_BYTES_MAX:
            size, self._batch, self._batch_bytes = self._batch_bytes, [], 0
            return batch, size
        size = taken = 0
        for record in islice(batch, BATCH_TASKS_MAX):
            if taken and size + record._size > BATCH_BYTES_MAX:
                break
            size += record._size
            taken += 1
        self._batch = batch[taken:]
        self._batch_bytes -= size
        return batch[:taken], size

    def acknowledged_up_to(self, request: int) -> bool:
        """Tell whether every task sealed up to that request was accepted or rejected."""
        first = next(iter(self._requests), None)
        return (first is None or first > request) and not self._retries

    # -- the connection -----------------------------------------------------------------------

    def connected(self, now_ns: int) -> None:
        """Note that a connection exists; may be called repeatedly."""
        if not self._connected:
            self._connected = True
            self.ready = False
            self.refusal = ""
            self._hello_ns = now_ns

    def disconnected(self) -> None:
        """Note that the connection is gone; unanswered questions will be asked again."""
        if self._connected:
            self._connected = False
            self.ready = False
            self.outbox.clear()

    def tick(self, now_ns: int) -> None:
        """Do everything that is due by now."""
        while self._retries and self._retries[0][0] <= now_ns:
            record = heappop(self._retries)[2]
            self.unacked_tasks -= 1
            self.unacked_bytes -= record._size
            if record._ending is None:
                self._enqueue(record)
        if not self._connected:
            return
        if self._hello_due() <= now_ns and (self.busy or not self.ready):
            self._hello_ns = now_ns + (HELLO_PERIOD_NS if self.ready else HELLO_RETRY_NS)
            self._silence_gap_ns = min(2 * self._silence_gap_ns, HELLO_PERIOD_NS)
            self._silence_ns = now_ns + self._silence_gap_ns
            self.outbox.append(encode(Hello(PROTOCOL, _SOFTWARE, self.name)))
        if self.ready and now_ns >= self._refresh_ns and self.busy:
            self._ask_again(now_ns, before_ns=now_ns - REFRESH_NS)

    def next_deadline(self) -> int | None:
        """Return when tick() has something to do, if anything is under way."""
        deadline = self._retries[0][0] if self._retries else None
        if self._connected and self.busy:
            soonest = self._hello_due()
            if self.ready:
                soonest = min(soonest, self._refresh_ns)
            deadline = soonest if deadline is None else min(deadline, soonest)
        return deadline

    def _hello_due(self) -> int:
        return min(self._hello_ns, self._silence_ns) if self.ready else self._hello_ns

    def _not_silent(self, now_ns: int) -> None:
        self._silence_gap_ns = HELLO_SILENCE_NS
        self._silence_ns = now_ns + HELLO_SILENCE_NS

    # -- what the supervisor says -------------------------------------------------------------

    def receive(self, now_ns: int, message: ServerMessage | ScheduleReply) -> None:
        self.progress = True
        match message:
            case Results():
                self._end_all(message.outcomes)
            case Accepted():
                self._accept(now_ns, message)
            case Welcome():
                self._welcome(now_ns, message)
                return
            case ProgressNote():
                record = self.records.get(message.id)
                if record is not None:
                    record._note = message
                    record._tell()
            case Changes():
                for following in self._followings:
                    following.hear(message)
            case Missing():
                self._miss(message.ids)
            case Inspected() | Advice() | Entries() | Resolved():
                self._answer(message)
            case ScheduleAnswer() | Schedules():
                self._answer(message)
            case Refused():
                self._refuse(message.reason, message.protocol)
        self._not_silent(now_ns)

    def _answer(self, message: Inspected | Advice | Entries | Resolved | ScheduleReply) -> None:
        inspection = self._inspections.get(message.request)
        match inspection, message:
            case Question(), ScheduleAnswer() | Schedules() | Resolved():
                inspection.answer = message
            case Inspection(), Advice():
                inspection.workers = message.workers
            case Inspection(), Entries():
                inspection.entries = message
            case Inspection(), Inspected():
                inspection.view = message.view
            case _:  # nobody waits for it, or not for this
                return
        del self._inspections[message.request]
        inspection.answered = True

    def _welcome(self, now_ns: int, message: Welcome) -> None:
        if message.protocol != PROTOCOL:
            self._refuse("it welcomed us in a protocol that we do not speak", message.protocol)
            return
        stranger = not self.ready or message.epoch != self.epoch
        self.refusal = ""
        self.ready = True
        self.epoch = message.epoch
        self._hello_ns = now_ns + HELLO_PERIOD_NS
        if stranger:
            self._not_silent(now_ns)
            self._ask_again(now_ns, before_ns=now_ns)

    def _refuse(self, reason: str, protocol: int) -> None:
        self.ready = False
        self.refusal = f"{reason} (it speaks protocol {protocol}, this client {PROTOCOL})"

    def _ask_again(self, now_ns: int, before_ns: int) -> None:
        """Repeat everything without an answer, except requests sent after `before_ns`."""
        self._refresh_ns = now_ns + REFRESH_NS
        if self._followings:
            self.outbox.append(encode(Follow()))
            for following in self._followings:
                following.doubt()
        for number, request in list(self._requests.items()):
            if request.sent_ns <= before_ns:
                self._send(now_ns, number, request)
        self._watch_all(record for record in self.records.values() if record._acknowledged)
        if self._cancels:
            for ids in _chunks(list(self._cancels)):
                self.outbox.append(encode(Cancel(ids)))
        for number, inspection in self._inspections.items():
            self._ask(number, inspection)

    def _send(self, now_ns: int, number: int, request: SubmitRequest) -> None:
        tasks = [record._spec for record in request.records if record._spec is not None]
        if not tasks:  # all tasks have ended meanwhile
            self._forget(number)
            return
        if request.sent_ns >= 0:
            request.resent = True
        request.sent_ns = now_ns
        self._not_silent(now_ns)
        self.outbox.append(encode(Submit(number, tasks, request.resent)))

    def _forget(self, number: int) -> SubmitRequest | None:
        request = self._requests.pop(number, None)
        if request is not None:
            self.unacked_tasks -= len(request.records)
            self.unacked_bytes -= request.size
        return request

    def _watch_all(self, records: Iterable[TaskRecord]) -> None:
        for ids in _chunks([record.id for record in records]):
            self.outbox.append(encode(Watch(ids)))

    def _accept(self, now_ns: int, message: Accepted) -> None:
        request = self._forget(message.request)
        if request is None:
            return  # answered before: the request was sent twice
        rejections = {rejection.id: rejection for rejection in message.rejected}
        for record in request.records:
            if record._ending is not None:
                continue
            rejection = rejections.get(record.id) if rejections else None
            if rejection is not None:
                self._reject(now_ns, record, rejection)
                continue
            record._acknowledged = True
            record._spec = None
            if record._listeners is not None:
                record._tell()
        if request.resent:
            # A task that ended between the two sends had its outcome sent to nobody.
            self._watch_all(record for record in request.records if record._ending is None)

    def _reject(self, now_ns: int, record: TaskRecord, rejection: Rejection) -> None:
        if record._patient and rejection.code == QUEUE_FULL:
            if record.id in self._cancels:  # cancelled while it was refused: no further try
                self._end(record, Outcome(record.id, CANCELLED))
                return
            due_ns = now_ns + (rejection.retry_after_ns or FULL_RETRY_NS)
            heappush(self._retries, (due_ns, next(self._retry_order), record))
            self.unacked_tasks += 1
            self.unacked_bytes += record._size
            return
        self.unknown_tasks += rejection.code == UNKNOWN_TASK
        self.unreported_count += 1
        self.unreported[record.id] = record
        if len(self.unreported) > UNREPORTED_MAX:
            del self.unreported[next(iter(self.unreported))]
        self._end(record, rejection)

    def _miss(self, ids: list[str]) -> None:
        for task_id in ids:
            record = self.records.get(task_id)
            # An unacknowledged task is not missing but on its way.
            if record is not None and record._acknowledged:
                text = "the supervisor knows no task of this id: never accepted, or trimmed"
                self._end(record, Rejection(task_id, TASK_MISSING, text))

    def _end_all(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            record = self.records.get(outcome.id)
            if record is not None:
                self._end(record, outcome)

    def _end(self, record: TaskRecord, ending: Outcome | Rejection) -> None:
        del self.records[record.id]
        self._cancels.pop(record.id, None)
        record._acknowledged = record._acknowledged or isinstance(ending, Outcome)
        record._spec = None
        record._ending = ending
        if record._listeners is not None:
            record._tell()
            record._listeners = None

    # -- rejections that nobody has seen ------------------------------------------------------

    def report(self, record: TaskRecord) -> None:
        """Note that the user has been told about this rejection."""
        if self.unreported.pop(record.id, None) is not None:
            self.unreported_count -= 1

    def take_unreported(self) -> tuple[list[Rejection], int]:
        """Return the latest unreported rejections and the number of all."""
        endings = [record._ending for record in self.unreported.values()]
        total, self.unreported_count = self.unreported_count, 0
        self.unreported.clear()
        return [ending for ending in endings if isinstance(ending, Rejection)], total


def _chunks(ids: list[str]) -> Iterable[list[str]]:
    for start in range(0, len(ids), BATCH_TASKS_MAX):
        yield ids[start : start + BATCH_TASKS_MAX]
