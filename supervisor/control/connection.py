"""One caller of control.sock: its buffers, how slow it may be, and what it waits for."""

import socket
from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Struct

from musterd.supervisor.api.rpc import ANSWER_BYTES_MAX, BATCH_BYTES_MAX, LINE_BYTES_MAX
from musterd.supervisor.control.access import Admitted
from musterd.supervisor.control.answers import Dialogue, Pending

OUTPUT_PAUSE_BYTES = 64 * 1024  # a caller with more than this unread is not read any more
OUTPUT_BYTES_MAX = 2 * ANSWER_BYTES_MAX  # two of the longest answers; beyond, a caller is dropped
# Of all callers together; beyond, the caller with most unread is dropped.
OUTPUT_BYTES_MAX_OF_ALL = 64 * 1024 * 1024
SLOW_NS = 30 * 1_000_000_000  # time for a line to be completed or an answer to be read


class Batch:
    """Requests of one line, whose answers are sent together.

    A connection has one batch at a time: no other line is read until the batch is answered, so that
    what is kept for a caller stays bounded.
    """

    def __init__(self, members: list[bytes]) -> None:
        self.waiting = deque(members)  # not taken up yet
        self.unanswered = len(members)
        self.answers: list[bytes] = []
        self.size = 0

    def answer(self, line: bytes) -> None:
        """Note the answer to one member; an empty line is no answer."""
        self.unanswered -= 1
        if line:
            self.answers.append(line)
            self.size += len(line)

    def fits(self, line: bytes) -> bool:
        return self.size + len(line) <= BATCH_BYTES_MAX


class Connection:
    """One caller: its buffers and what it waits for."""

    def __init__(self, sock: socket.socket, admitted: Admitted) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.admitted = admitted
        self.input = bytearray()
        self.searched = 0  # no newline before this position: each byte is searched once
        self.output = bytearray()
        self.pending: dict[Pending, None] = {}
        self.dialogue: Dialogue | None = None  # one of `pending`
        self.batch: Batch | None = None  # the batch that is being answered
        self.half_since_ns: int | None = None  # when an incomplete line was first seen
        self.stuck_since_ns: int | None = None  # when the caller last stopped taking output
        self.mask = 0
        self.stream: Callable[[Struct], bool] | None = None  # which events a follower wants
        self.dropped = 0  # events the caller was too slow for; it has not been told of them
        self.ended = False  # the caller sends no more
        self.hung_up = False  # the caller reads no more either
        self.closing = False  # close once the output is written
        self.closed = False

    def has_line(self) -> bool:
        """Whether the input has a whole line, or one that is too long."""
        if self.searched < len(self.input):
            end = self.input.find(b"\n", self.searched)
            self.searched = len(self.input) if end < 0 else end
        return self.searched < len(self.input) or len(self.input) > LINE_BYTES_MAX

    def next_line(self) -> bytes | None:
        """Take the first line out of the input; return None if the line is too long."""
        end = self.searched
        if end > LINE_BYTES_MAX:
            return None
        line = bytes(self.input[:end])
        del self.input[: end + 1]
        self.searched = 0
        return line.strip()

    def may_work(self) -> bool:
        if self.closing or len(self.output) > OUTPUT_PAUSE_BYTES:
            return False
        return self.has_line() if self.batch is None else bool(self.batch.waiting)

    @property
    def kept(self) -> int:
        """Bytes of answers that the caller has not taken, or not been given yet."""
        return len(self.output) + (0 if self.batch is None else self.batch.size)

    def deadline(self) -> int | None:
        """Return when the caller is too slow; 0: the next turn has to note a time first."""
        found: list[int] = []
        if self.half_since_ns is not None:
            found.append(self.half_since_ns + SLOW_NS)
        if self.output and (self.closing or self.stream is None):
            found.append(0 if self.stuck_since_ns is None else self.stuck_since_ns + SLOW_NS)
        return min(found, default=None)


def greediest(connections: Iterable[Connection]) -> Connection | None:
    """Return the connection with most to read, if all together have too much."""
    found = list(connections)
    if sum(each.kept for each in found) <= OUTPUT_BYTES_MAX_OF_ALL:
        return None
    return max(found, key=lambda each: each.kept)
