"""A worker's side of workers.sock: leases and commands come in, results go out in batches.

A send does not wait for the supervisor. What the kernel does not take at once (it has room for some
200 KB) is kept, and `full` is called: it waits a little for the supervisor to read, or has an event
loop call push(). What is left even then goes out with the next look.

A worker has one connection in its life. When the connection ends, the supervisor is gone, whose
workers die with it; or a handler has closed a descriptor that is not its own. Either way nothing
can be sent any more: what runs is interrupted, and the worker ends as if it were killed.
"""

import select
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire import codec
from musterd.ipc.wire.debugger_messages import BreakIn, DebuggerLine
from musterd.ipc.wire.messages import (
    BATCH_BYTES_MAX,
    PROTOCOL,
    Assign,
    CancelLease,
    Completion,
    Done,
    Lease,
    LockAnswer,
    Progress,
    Recall,
    Returned,
    StateAnswer,
    Stop,
    WaitAnswer,
    WorkerHello,
)
from musterd.ipc.wire.scoreboard import Scoreboard
from musterd.ipc.wire.zmtp import Connection, Message
from musterd.workers.authoring import outcome
from musterd.workers.metrics import metrics

CONNECT_SECONDS = 30.0  # the supervisor is there, but it may be busy with hundreds of workers
CONNECT_GAP_SECONDS = 0.02  # between two tries, when the backlog is full
FULL_MS = 100  # wait for a supervisor that does not read: longer, and the heartbeat would suffer
# For the last results, which may be large, to a supervisor that is busy or stopped: to a dead one
# nothing is sent, and one that waits for the end of this worker has its own limit.
LINGER_MS = 10_000
COMPLETIONS_MAX = 64  # results per message: a quarter of what a worker holds at most
FLUSH_NS = 1_000_000  # a finished result waits no longer than this for company
PROGRESS_GAP_NS = 50_000_000  # between two progress reports: as fast as an eye can follow


class Wire(Protocol):
    """What carries the messages: a Connection, or its stand-in in tests of workers."""

    @property
    def drained(self) -> bool:
        """Whether the last receive() has left nothing behind."""

    def fileno(self) -> int: ...
    def put(self, message: bytes) -> None: ...
    def flush(self) -> bool: ...
    def receive(self) -> list[Message]: ...
    def close(self) -> None: ...


class Mailbox:
    """Connection with its queues. Not reentrant: the runtime sees to that."""

    def __init__(self, connection: Wire, board: Scoreboard) -> None:
        self._connection = connection
        self._board = board
        self.queue: deque[Lease] = deque()  # not begun yet
        self.running = 0  # the lease that has begun, 0 for none
        self.cancelled = False  # the running lease is to be interrupted
        # Where several run: interrupts a lease; returns whether it runs.
        self.interrupt: Callable[[int], bool] = _nothing
        self.break_in: BreakIn | None = None  # somebody wants to stop the code that is debugged
        self.stopping = False
        self.close_ns = 0  # how long close() and the clean-ups may take; 0: not said
        self.done: list[Completion] = []  # not sent yet
        self.done_ns = 0  # when the first of them ended
        # request -> called with the answer
        self.asked: dict[int, Callable[[Any], object]] = {}
        self.progress: Progress | None = None  # the newest, not sent yet
        self.progress_ns = 0  # when the next may be sent
        self.unsent = False  # something waits for push()
        self.lost = False  # the connection is over
        self.full: Callable[[], object] = self.wait_for_room
        self._done_bytes = 0
        self._malformed = 0
        self.fd = self._connection.fileno()
        self._readable, self._usable = select.poll(), select.poll()
        self._readable.register(self.fd, select.POLLIN)
        self._usable.register(self.fd, select.POLLIN | select.POLLOUT)

    def hello(self, token: str, width: int = 1) -> None:
        """Say hello; from here on leases may come, to be run one at a time or `width` at once."""
        self.send(codec.encode(WorkerHello(PROTOCOL, token, width)))

    def sever(self) -> None:
        """Let go of the connection in a fork: it belongs to the worker."""
        self.lost, self.unsent = True, False
        self.done.clear()

    def close(self) -> None:
        """Close after the unsent data have left, within LINGER_MS."""
        end = time.monotonic() + LINGER_MS / 1000
        while self.unsent and time.monotonic() < end:
            self.wait_for_room()
        with suppress(OSError):  # a handler has closed the descriptor
            self._connection.close()

    # -- the connection -----------------------------------------------------------------------

    def poll(self, milliseconds: int) -> bool:
        """Wait for something to receive() or for room to push(); -1 waits without limit."""
        return bool((self._usable if self.unsent else self._readable).poll(milliseconds))

    def send(self, frame: bytes) -> None:
        if self.lost:
            return
        self._connection.put(frame)
        if not self.push():
            self.full()

    def push(self) -> bool:
        """Send what the kernel takes; return whether that is all."""
        if self.lost:
            return True
        late = self.unsent
        try:
            self.unsent = not self._connection.flush()
        except OSError as error:
            self._lose(error)
        except BaseException as error:
            self._lose(error)
            raise
        if late and not self.unsent and not self.lost and not self.done:
            self._board.sent()
        return not self.unsent

    def wait_for_room(self) -> None:
        """Wait until all is sent, or the supervisor has not read for FULL_MS."""
        room = select.poll()
        room.register(self.fd, select.POLLOUT)
        while room.poll(FULL_MS) and not self.push():
            pass

    def receive(self) -> None:
        """Read what has arrived and act on it; send what waits, if there is room."""
        if self.unsent:
            self.push()
        while not self.lost:
            try:
                messages = self._connection.receive()
            except (OSError, ProtocolError) as error:
                self._lose(error)
                return
            except BaseException as error:
                self._lose(error)
                raise
            for message in messages:
                self._obey(message)
            if self._connection.drained:
                return

    def _lose(self, error: BaseException) -> None:
        self.lost, self.unsent = True, False
        self.cancelled = True
        self.stop()
        self._board.say(f"the connection to the supervisor is lost: {error}")

    # -- what the supervisor says -------------------------------------------------------------

    def _obey(self, frame: Message) -> None:
        try:
            if frame is None:
                raise ProtocolError("malformed message of several frames")
            message = codec.decode_command(frame)
        except ProtocolError as error:
            self._malformed += 1
            if self._malformed == 1:
                print(f"musterd: dropped, and further ones silently: {error}", file=sys.stderr)
            return
        if type(message) is Assign:
            self.queue.extend(message.leases)
            if self.stopping:
                self._give_back()
        elif type(message) is Recall:
            self._give_back()
        elif type(message) is CancelLease:
            self._cancel(message.lease)
        elif isinstance(message, StateAnswer | LockAnswer | WaitAnswer | DebuggerLine):
            asker = self.asked.pop(message.request, None)
            if asker is not None:  # else nobody waits for the answer any more
                asker(message)
        elif isinstance(message, BreakIn):
            self.break_in = message
        elif isinstance(message, Stop):
            self.close_ns = message.close_ns
            self.stop()

    def stop(self) -> None:
        """Begin nothing any more."""
        self.stopping = True
        if self.queue:
            self._give_back()

    # -- what the worker says -----------------------------------------------------------------

    def complete(self, completion: Completion, ended_ns: int) -> None:
        """Note a result, to be sent with the next flush()."""
        size = len(completion.value)
        # Results are small or rare, but 64 of the largest are more than a message may hold.
        if self._done_bytes + size > BATCH_BYTES_MAX:
            self.flush()
        if not self.done:
            self.done_ns = ended_ns
        self.done.append(completion)
        self._done_bytes += size

    def flush(self) -> None:
        """Send the results that wait."""
        if self.done:
            self.send(self._packed())
            self.done.clear()
            self._done_bytes = 0
            if not self.unsent and not self.lost:
                self._board.sent()

    def _packed(self) -> bytes:
        try:
            return codec.encode(Done(self.done, metrics.take()))
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the results
            print(f"musterd: metrics and some results are lost: {error}", file=sys.stderr)
            return codec.encode(Done([_sendable(completion) for completion in self.done]))

    def send_progress(self, now_ns: int) -> None:
        """Send the newest progress report, if there is one."""
        if self.progress is not None:
            self.send(codec.encode(self.progress))
            self.progress = None
            self.progress_ns = now_ns + PROGRESS_GAP_NS

    def _give_back(self) -> None:
        leases = [lease.lease for lease in self.queue]
        self.queue.clear()
        self.send(codec.encode(Returned(leases)))

    def _cancel(self, number: int) -> None:
        if self.running and number == self.running:
            self.cancelled = True
            return
        if self.interrupt(number):
            return
        for lease in self.queue:
            if lease.lease == number:
                self.queue.remove(lease)
                failure = outcome.cancelled("the task was cancelled before its handler began")
                self.complete(Completion(number, 0, b"", failure), self.done_ns)
                return
        # Neither: its completion is on its way already, and is the answer.


def connect(path: str) -> Connection:
    """Return a connection after its handshake; OSError or ProtocolError without a supervisor."""
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = Connection(path)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(CONNECT_GAP_SECONDS)
    try:
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        while not connection.ready:
            if not readable.poll(max(0, (end - time.monotonic()) * 1000)):
                raise TimeoutError(f"no answer at {path} within {CONNECT_SECONDS:g} s")
            connection.receive()
    except BaseException:
        connection.close()
        raise
    return connection


def _sendable(completion: Completion) -> Completion:
    """Return the completion, or a failure in its place if it cannot be encoded."""
    try:
        codec.encode(completion)
    except Exception as error:  # noqa: BLE001 - as above
        return Completion(completion.lease, completion.run_ns, b"", outcome.unsendable(error))
    return completion


def _nothing(_lease: int) -> bool:
    return False
