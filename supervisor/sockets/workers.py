"""workers.sock: workers' messages become events, actions become messages to workers.

Nobody can pose as a worker: a hello carries the one-time token that the process was given at its
fork, and other messages are accepted only on a connection that has sent such a hello.
"""

from collections.abc import Callable
from pathlib import Path

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.codec import decode_worker, encode
from musterd.ipc.wire.debugger_messages import (
    BreakIn,
    Breakpoint,
    DebuggerLeft,
    DebuggerLine,
    DebuggerMessage,
    DebuggerPrompt,
)
from musterd.ipc.wire.messages import (
    PROTOCOL,
    Assign,
    CancelLease,
    Done,
    Lease,
    LoadState,
    LockAnswer,
    LockState,
    Progress,
    Recall,
    Returned,
    SaveState,
    StateAnswer,
    Stop,
    WaitAnswer,
    Waiting,
    WorkerHello,
    WorkerMessage,
)
from musterd.ipc.wire.router import Router
from musterd.ipc.wire.zmtp import Message
from musterd.supervisor.core.model import debug_events, events
from musterd.supervisor.log import log
from musterd.supervisor.sockets.listen import listen

BACKLOG = 1024  # workers that connect at the same time
COMPLAINED_MAX = (
    1000  # connections whose first malformed message was logged; then all are forgotten
)


class WorkerPort:
    def __init__(self, path: Path, worker_of: Callable[[str], int | None]) -> None:
        self._router = Router(listen(str(path), None, 0o600, BACKLOG), self._complain)
        self.fileno = self._router.fileno
        self.tidy_up = self._router.tidy_up
        self.close = self._router.close
        self.malformed = 0
        self._worker_of = worker_of
        self._peers: dict[int, int] = {}  # of workers
        self._workers: dict[int, int] = {}  # of peers
        self._complained: set[int] = set()

    def receive(self) -> list[object]:
        """Return what came in, as events."""
        found: list[object] = []
        for peer, frame in self._router.receive():
            self._hear(peer, frame, found)
        return found

    def last_words(self, worker: int) -> list[object]:
        """Return what a worker sent before its end, as events: results count before the exit."""
        peer = self._peers.pop(worker, None)
        if peer is None:
            return []
        found: list[object] = []
        for frame in self._router.receive_all(peer):
            self._hear(peer, frame, found)
        del self._workers[peer]
        self._complained.discard(peer)
        return found

    def _hear(self, peer: int, frame: Message, found: list[object]) -> None:
        try:
            event = self._understand(peer, frame)
        except ProtocolError as error:
            self._complain(peer, str(error))
        else:
            if event is not None:
                found.append(event)

    def _understand(self, peer: int, frame: Message) -> object | None:
        if frame is None:
            raise ProtocolError("a message of several frames instead of one")
        message = decode_worker(frame)
        if type(message) is WorkerHello:
            return self._greet(peer, message)
        worker = self._workers.get(peer)
        if worker is None:
            raise ProtocolError("a message before the hello")
        return event_of(worker, message)

    def _greet(self, peer: int, hello: WorkerHello) -> events.WorkerReady | None:
        if hello.protocol != PROTOCOL:
            raise ProtocolError(f"a worker speaks protocol {hello.protocol}, we {PROTOCOL}")
        worker = self._worker_of(hello.token)
        if worker is None:
            raise ProtocolError("a hello with a token that was never given, or used already")
        if not worker:
            return None  # the worker was killed after its hello, and its exit was read first
        self._peers[worker] = peer
        self._workers[peer] = worker
        return events.WorkerReady(worker, hello.width)

    def _complain(self, peer: int, what: str) -> None:
        if not peer:
            log.note("workers.waiting", "warning", reason=what)
            return
        self.malformed += 1
        if peer not in self._complained:
            if len(self._complained) >= COMPLAINED_MAX:
                self._complained.clear()
            self._complained.add(peer)
            log.note("worker.malformed", "warning", reason=what, peer=peer)

    # -- to workers ---------------------------------------------------------------------------

    def assign(self, worker: int, leases: list[Lease]) -> None:
        self._send(worker, encode(Assign(leases)))

    def recall(self, worker: int) -> None:
        self._send(worker, encode(Recall()))

    def cancel(self, worker: int, lease: int) -> None:
        self._send(worker, encode(CancelLease(lease)))

    def stop(self, worker: int, close_ns: int) -> None:
        self._send(worker, encode(Stop(close_ns)))

    def answer_state(self, worker: int, request: int, value: bytes | None, error: str = "") -> None:
        self._send(worker, encode(StateAnswer(request, value, error)))

    def answer_lock(self, worker: int, request: int, taken: bool, holder: str, error: str) -> None:
        self._send(worker, encode(LockAnswer(request, taken, holder, error)))

    def answer_wait(self, worker: int, request: int, ids: list[str], reason: str) -> None:
        self._send(worker, encode(WaitAnswer(request, ids, reason)))

    def answer_debugger(self, worker: int, request: int, line: str | None) -> None:
        self._send(worker, encode(DebuggerLine(request, line)))

    def break_in(self, worker: int, lease: int, leave: bool) -> None:
        self._send(worker, encode(BreakIn(lease, leave)))

    def _send(self, worker: int, frame: bytes) -> None:
        # If the worker is gone, its exit is on its way and others will get its leases. The queue
        # cannot be full: a worker's leases are bounded far below that.
        if (peer := self._peers.get(worker)) is not None:
            self._router.send(peer, frame)


def event_of(  # noqa: PLR0911  # a table
    worker: int, message: WorkerMessage | DebuggerMessage
) -> object:
    """Return the event that a worker's message means."""
    match message:
        case Done():
            return events.LeasesCompleted(worker, message.completions, message.samples)
        case Waiting(ids=[]):
            return events.WaitEnded(worker, message.lease, message.request)
        case Waiting():
            return events.WaitBegun(worker, message.lease, message.request, message.ids)
        case Returned():
            return events.LeasesReturned(worker, message.leases)
        case Progress():
            return events.ProgressMade(worker, message.lease, message.fraction, message.text)
        case LoadState():
            return events.StateWanted(worker, message.request, message.key, message.lease)
        case SaveState():
            return events.StateGiven(
                worker, message.request, message.key, message.value, message.ttl_ns, message.lease
            )
        case LockState(take=True):
            return events.LockWanted(
                worker, message.lease, message.request, message.name, message.timeout_ns
            )
        case LockState():
            return events.LockReturned(worker, message.lease, message.name)
        case Breakpoint() | DebuggerPrompt() | DebuggerLeft():
            return _debugged(worker, message)
        case _:
            raise ProtocolError(f"a worker sent a {type(message).__name__}")


def _debugged(worker: int, message: DebuggerMessage) -> object:
    match message:
        case Breakpoint():
            lease, request, where = message.lease, message.request, message.where
            return debug_events.BreakpointHit(worker, lease, request, where)
        case DebuggerPrompt():
            lease, request, text = message.lease, message.request, message.text
            return debug_events.DebuggerAsked(worker, lease, request, text, message.prompt)
        case DebuggerLeft():
            return debug_events.DebuggerEnded(worker, message.lease, message.text)
