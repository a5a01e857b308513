"""workers.sock: workers' messages become events, actions become messages to workers.

Nobody else can pose as a worker: a hello carries the one-time token that the process was given at
its fork, and every other message is accepted only on a connection that said such a hello.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from musterd.ipc.codec import decode_worker, encode
from musterd.ipc.errors import ProtocolError
from musterd.ipc.messages import (
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
    WorkerHello,
    WorkerMessage,
)
from musterd.ipc.sockets import bind, make_router, receive, send
from musterd.supervisor import journal
from musterd.supervisor.core import events

RECEIVE_MAX = 200  # messages taken per turn of the loop
LAST_LOOKS, LAST_LOOK_SECONDS = 20, 0.001  # for what a worker has sent that has ended


class WorkerPort:
    def __init__(
        self, context: zmq.Context[Any], path: Path, worker_of: Callable[[str], int | None]
    ) -> None:
        self.socket = make_router(context)
        bind(self.socket, path, 0o600)
        self.malformed = 0
        self._worker_of = worker_of
        self._identities: dict[int, bytes] = {}
        self._workers: dict[bytes, int] = {}
        self._complained: set[bytes] = set()

    def receive(self) -> list[object]:
        """What came in, as core events."""
        found: list[object] = []
        for identity, frame in receive(self.socket, RECEIVE_MAX):
            try:
                event = self._understand(identity, frame)
            except ProtocolError as error:
                self._complain(identity, str(error))
                continue
            if event is not None:
                found.append(event)
        return found

    def last_words(
        self,
        exited: events.WorkerExited,
        feed: Callable[[object], None],
        owes: Callable[[events.WorkerExited], bool],
    ) -> None:
        """What a worker that has ended said before: its last results count before its end does.

        They may still be with libzmq's thread, which knows nothing of that end: so one that `owes`
        a word is waited for, a moment.
        """
        for _ in range(LAST_LOOKS):
            for event in self.receive():
                feed(event)
            if not owes(exited):
                break
            time.sleep(LAST_LOOK_SECONDS)
        self.forget(exited.worker)

    def _understand(self, identity: bytes, frame: bytes | None) -> object | None:
        if frame is None:
            raise ProtocolError("a message of several frames instead of one")
        message = decode_worker(frame)
        if type(message) is WorkerHello:
            return self._greet(identity, message)
        worker = self._workers.get(identity)
        if worker is None:
            raise ProtocolError("a message before the hello")
        if type(message) is Done:
            return events.LeasesCompleted(worker, message.completions, message.samples)
        return _event_of(worker, message)

    def _greet(self, identity: bytes, hello: WorkerHello) -> events.WorkerReady:
        if hello.protocol != PROTOCOL:
            raise ProtocolError(f"a worker speaks protocol {hello.protocol}, we {PROTOCOL}")
        worker = self._worker_of(hello.token)
        if worker is None:
            raise ProtocolError("a hello with a token that was never given, or used already")
        self._identities[worker] = identity
        self._workers[identity] = worker
        return events.WorkerReady(worker, hello.width)

    def _complain(self, identity: bytes, what: str) -> None:
        self.malformed += 1
        if identity not in self._complained:
            if len(self._complained) > 1000:
                self._complained.clear()
            self._complained.add(identity)
            journal.note("worker.malformed", "warning", reason=what, peer=identity.hex())

    # -- to workers ---------------------------------------------------------------------------

    def assign(self, worker: int, leases: list[Lease]) -> None:
        self._send(worker, encode(Assign(leases)))

    def recall(self, worker: int) -> None:
        self._send(worker, encode(Recall()))

    def cancel(self, worker: int, lease: int) -> None:
        self._send(worker, encode(CancelLease(lease)))

    def stop(self, worker: int, close_ns: int) -> None:
        self._send(worker, encode(Stop(close_ns)))

    def answer_state(self, worker: int, request: int, value: bytes | None) -> None:
        self._send(worker, encode(StateAnswer(request, value)))

    def answer_lock(self, worker: int, request: int, taken: bool, holder: str, error: str) -> None:
        self._send(worker, encode(LockAnswer(request, taken, holder, error)))

    def _send(self, worker: int, frame: bytes) -> None:
        identity = self._identities.get(worker)
        if identity is None:
            return
        try:
            send(self.socket, identity, frame)
        except zmq.ZMQError as error:
            # Gone: its exit is on its way and its leases will be given to others. Full cannot
            # happen: a worker's leases are bounded far below the high-water mark.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def forget(self, worker: int) -> None:
        identity = self._identities.pop(worker, None)
        if identity is not None:
            del self._workers[identity]
            self._complained.discard(identity)

    def close(self) -> None:
        self.socket.close()


def _event_of(worker: int, message: WorkerMessage) -> object:
    """What a worker's message means to the core."""
    match message:
        case Returned():
            return events.LeasesReturned(worker, message.leases)
        case Progress():
            return events.ProgressMade(worker, message.lease, message.fraction, message.text)
        case LoadState():
            return events.StateWanted(worker, message.request, message.key)
        case SaveState():
            return events.StateGiven(
                worker, message.request, message.key, message.value, message.ttl_ns
            )
        case LockState(take=True):
            return events.LockWanted(
                worker, message.lease, message.request, message.name, message.timeout_ns
            )
        case LockState():
            return events.LockReturned(worker, message.lease, message.name)
        case _:
            raise ProtocolError(f"a message of a kind not for us: {type(message).__name__}")
