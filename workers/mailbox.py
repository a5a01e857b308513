"""A worker's side of workers.sock: leases and commands come in, results go out in batches."""

import sys
from collections import deque
from collections.abc import Callable

import zmq

from musterd.ipc import codec
from musterd.ipc.errors import ProtocolError
from musterd.ipc.messages import (
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
    WorkerHello,
)
from musterd.ipc.scoreboard import Scoreboard
from musterd.workers import outcome
from musterd.workers.metrics import metrics

LINGER_MS = 1000  # the last results reach a living supervisor in far less; a dead one never reads
COMPLETIONS_MAX = 64  # results per message: a quarter of what a worker holds at most
FLUSH_NS = 1_000_000  # a finished result waits no longer than this for company
PROGRESS_GAP_NS = 50_000_000  # between two words of progress: as fast as an eye can follow

Answer = StateAnswer | LockAnswer


class Mailbox:
    """Not safe to be entered twice: the runtime sees to that."""

    def __init__(self, path: str, board: Scoreboard) -> None:
        self._board = board
        self.queue: deque[Lease] = deque()  # not begun yet
        self.running = 0  # the lease that has begun, 0 for none
        self.cancelled = False  # the running lease is to be interrupted
        # Where several run: interrupts this one; whether it runs.
        self.interrupt: Callable[[int], bool] = _nothing
        self.stopping = False
        self.close_ns = 0  # how long close() and the clean-ups may take; 0: not said
        self.done: list[Completion] = []  # not sent yet
        self.done_ns = 0  # when the first of them ended
        self.asked: dict[int, Callable[[Answer], object]] = {}  # who waits for which answer
        self.progress: Progress | None = None  # the newest, not sent yet
        self.progress_ns = 0  # when the next may be sent
        self._done_bytes = 0
        self._malformed = 0
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(f"ipc://{path}")

    def hello(self, token: str, width: int = 1) -> None:
        """From here on, leases may come, to be run one at a time or `width` at once."""
        self.socket.send(codec.encode(WorkerHello(PROTOCOL, token, width)))

    def close(self) -> None:
        """Waits until what was sent has left, within LINGER_MS."""
        self.socket.close()
        self._context.term()

    def receive(self) -> bool:
        """Takes one message, if there is one, and does what it says."""
        try:
            frame = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            message = codec.decode_command(frame)
        except ProtocolError as error:
            self._malformed += 1
            if self._malformed == 1:
                print(f"musterd: dropped, and will drop in silence: {error}", file=sys.stderr)
            return True
        if type(message) is Assign:
            self.queue.extend(message.leases)
            if self.stopping:
                self._give_back()
        elif type(message) is Recall:
            self._give_back()
        elif type(message) is CancelLease:
            self._cancel(message.lease)
        elif isinstance(message, StateAnswer | LockAnswer):
            asker = self.asked.pop(message.request, None)
            if asker is not None:  # else nobody waits for it any more
                asker(message)
        elif isinstance(message, Stop):
            self.close_ns = message.close_ns
            self.stop()
        return True

    def stop(self) -> None:
        """Nothing begins any more."""
        self.stopping = True
        if self.queue:
            self._give_back()

    def complete(self, completion: Completion, ended_ns: int) -> None:
        """Notes a result, to be sent with the next flush()."""
        size = len(completion.value)
        # Results are small or rare, but 64 of the largest are more than a message may hold.
        if self._done_bytes + size > BATCH_BYTES_MAX:
            self.flush()
        if not self.done:
            self.done_ns = ended_ns
        self.done.append(completion)
        self._done_bytes += size

    def flush(self) -> None:
        """Sends the results that wait."""
        if self.done:
            self.socket.send(codec.encode(Done(self.done, metrics.take())))
            self._board.sent()
            self.done.clear()
            self._done_bytes = 0

    def send_progress(self, now_ns: int) -> None:
        """Sends the newest word of progress, if there is one."""
        if self.progress is not None:
            self.socket.send(codec.encode(self.progress))
            self.progress = None
            self.progress_ns = now_ns + PROGRESS_GAP_NS

    def _give_back(self) -> None:
        leases = [lease.lease for lease in self.queue]
        self.queue.clear()
        self.socket.send(codec.encode(Returned(leases)))

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


def _nothing(_lease: int) -> bool:
    return False
