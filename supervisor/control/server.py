"""The server of control.sock: many callers, one thread, and no caller can hold up the loop.

The daemon polls one descriptor (`fileno`, an epoll of its own), calls `serve` when that is readable
and `tick` when `next_deadline` has passed. Neither ever blocks, and each does a bounded amount of
work per connection, so a caller that floods or stalls costs the others nothing:

    input   at most READ_BYTES and REQUESTS_PER_TURN per turn; the rest is due in the next turn
    output  answers wait in the connection's own buffer; while that is long, nothing more is read
    time    half a line, or an answer nobody reads, ends the connection after SLOW_NS

The ControlHandler carries out requests. It answers at once, or returns a Pending that it resolves
later; `events` is answered here.
"""

import errno
import logging
import os
import select
import socket
from typing import Protocol

import msgspec
from msgspec import Struct, UnsetType

from musterd.supervisor.api import envelope, rpc
from musterd.supervisor.api.rpc import LINE_BYTES_MAX, Params, RequestId, RpcError
from musterd.supervisor.control.access import Access, Rank
from musterd.supervisor.control.answers import Dialogue, Pending
from musterd.supervisor.control.connection import (
    OUTPUT_BYTES_MAX,
    OUTPUT_PAUSE_BYTES,
    SLOW_NS,
    Batch,
    Connection,
    greediest,
)
from musterd.supervisor.control.streams import RecentReports, event_line, wants_events, wants_output
from musterd.supervisor.sockets.listen import Caller, Spares, adopt, inode, listen, say_and_close

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 128  # people and their scripts, not a fleet of clients
# Places of them that a rank leaves to higher ranks: callers with fewer rights lock no one out.
CONNECTIONS_RESERVED = {Rank.OWN: 0, Rank.CONTROL: 8, Rank.VIEW: 64}
PENDING_MAX = 64  # unanswered requests of one connection
READ_BYTES = 64 * 1024  # per connection and turn
WRITE_BYTES = 256 * 1024  # per connection and turn: about what a socket takes at once
REQUESTS_PER_TURN = 16  # per connection: the status of a large fleet takes a millisecond
ACCEPTS_PER_TURN = 16  # each costs a few system calls
READY_PER_TURN = 64  # connections served in one turn; the others come in the next
STREAM_BYTES_MAX = 256 * 1024  # unread events of one follower; more are counted and dropped
ACCEPT_PAUSE_NS = 1_000_000_000  # before the next try when descriptors ran out
WARNING_GAP_NS = 60 * 1_000_000_000  # one warning about callers per minute, with a count

_encode = msgspec.json.Encoder().encode


class ControlHandler(Protocol):
    """Carries out the requests of callers."""

    def call(self, method: str, params: Params, caller: Caller) -> object:
        """Return a result that JSON can hold, a Pending, or return or raise an RpcError."""


class ControlServer:
    """Listens on `path` and serves its callers; access.py has their rights.

    The socket file of a dead daemon is replaced. That is safe because the daemon holds the lock of
    the runtime directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: str,
        handler: ControlHandler,
        view_group: str = "",
        handed: socket.socket | None = None,
    ) -> None:
        """`handed` is a socket that listens on `path` already; its file stays at the end."""
        self.path = os.fspath(path)
        self._handler = handler
        self._access = Access(group, view_group)
        if handed is not None:
            self._listener = adopt(handed, self.path, self._access.group_id, self._access.mode)
            self._inode = None
        else:
            self._listener = listen(self.path, self._access.group_id, self._access.mode)
            self._inode = inode(self.path)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._accept_again_ns: int | None = None
        self._spares = Spares()
        self._connections: dict[int, Connection] = {}
        self._recent = RecentReports()
        self._warned_ns: int | None = None
        self._unwarned = 0
        self._closed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    # -- the loop's side ----------------------------------------------------------------------

    def serve(self, now_ns: int) -> None:
        """Accept, read, answer and write what is ready, in bounded amounts."""
        callers_wait = False
        for fd, mask in self._epoll.poll(0, READY_PER_TURN):
            connection = self._connections.get(fd)
            if connection is not None:
                self._attend(connection, mask)
            elif fd == self._listener.fileno():
                callers_wait = True
        if callers_wait:  # last: a new connection must not reuse a descriptor closed above
            self._accept(now_ns)
        self.tick(now_ns)

    def tick(self, now_ns: int) -> None:
        """Work on what the last turn left over, and end connections that are too slow."""
        self._spares.refill()
        if self._accept_again_ns is not None and now_ns >= self._accept_again_ns:
            self._accept_again_ns = None
            self._epoll.modify(self._listener, select.EPOLLIN)
        for connection in list(self._connections.values()):
            self._work(connection)
            if not connection.closed:
                self._check_pace(connection, now_ns)

    def next_deadline(self) -> int | None:
        """When `tick` is due, 0 for at once, None for no need."""
        deadlines = [] if self._accept_again_ns is None else [self._accept_again_ns]
        for connection in self._connections.values():
            if connection.may_work():
                return 0
            deadline = connection.deadline()
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines, default=None)

    def publish(self, event: Struct) -> None:
        """Keep the event for `musterctl events` and send it to followers."""
        self.pass_on(event, self._recent.keep(event))

    def pass_on(self, event: Struct, at: float) -> None:
        """Send the event to those who follow such events."""
        line = b""
        for connection in list(self._connections.values()):
            wants = connection.stream
            if wants is not None and not connection.closing and wants(event):
                line = line or event_line(at, event)
                if connection.dropped or len(connection.output) + len(line) > STREAM_BYTES_MAX:
                    connection.dropped += 1
                else:
                    self._send(connection, line)

    def answer_all(self) -> None:
        """Give every waiting caller its last answer: the daemon ends."""
        for connection in list(self._connections.values()):
            for pending in list(connection.pending):
                pending.end()

    def close(self) -> None:
        """Answer waiting callers, close every connection, and remove the socket if it is ours."""
        if self._closed:
            return
        self._closed = True
        self.answer_all()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()
        self._epoll.close()
        self._spares.close()
        if self._inode is not None and inode(self.path) == self._inode:
            os.unlink(self.path)

    # -- connections --------------------------------------------------------------------------

    def _accept(self, now_ns: int) -> None:
        for number in range(ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                if error.errno == errno.EMFILE:
                    if self._spares.give() or (number == 0 and self._make_room()):
                        continue
                    if number or any(each.may_work() for each in self._connections.values()):
                        return  # once their requests are answered, they can give way
                # Out of descriptors or memory: the listener stays readable, so pause it.
                self._accept_again_ns = now_ns + ACCEPT_PAUSE_NS
                self._epoll.modify(self._listener, 0)
                self._warn(now_ns, f"control: cannot accept a caller: {error}")
                return
            refusal = self._admit(sock)
            if refusal is not None:
                self._warn(now_ns, f"control: refused a caller: {refusal.message}")
                say_and_close(sock, envelope.encode_error(None, refusal))

    def _admit(self, sock: socket.socket) -> RpcError | None:
        sock.setblocking(False)
        admitted = self._access.of(sock)
        if admitted.rank == Rank.NONE:
            return self._access.refusal(admitted.caller)
        room = CONNECTIONS_MAX - CONNECTIONS_RESERVED[admitted.rank]
        if len(self._connections) >= room and not self._make_room(admitted.rank):
            return RpcError(
                rpc.LIMIT_REACHED,
                f"too many connections: {room} are open: close some and try again",
            )
        connection = Connection(sock, admitted)
        self._connections[connection.fd] = connection
        connection.mask = select.EPOLLIN
        self._epoll.register(sock, connection.mask)
        return None

    def _make_room(self, rank: Rank = Rank.OWN) -> bool:
        """End the longest silent connection that waits for nothing, of this rank at most."""
        for connection in self._connections.values():  # the longest silent first
            waits = connection.pending or connection.stream or connection.output
            if not waits and not connection.may_work() and connection.admitted.rank <= rank:
                self._drop(connection)
                return True
        return False

    def _attend(self, connection: Connection, mask: int) -> None:
        if mask & (select.EPOLLHUP | select.EPOLLERR):
            connection.hung_up = True
            connection.output.clear()
        elif mask & select.EPOLLOUT:
            self._flush(connection)
        if not connection.closed and (mask & select.EPOLLIN or connection.hung_up):
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            received = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # reset by the caller
            self._drop(connection)
            return
        if received:
            connection.input += received
            # The dict is in the order of the last input: see _make_room().
            self._connections[connection.fd] = self._connections.pop(connection.fd)
            return
        connection.ended = True
        if connection.input and not connection.input.endswith(b"\n"):
            connection.input += b"\n"  # the last line may lack one: JSON that is cut off is invalid

    def _work(self, connection: Connection) -> None:
        """Answer a few of the lines that are there, then set what to poll for."""
        for _ in range(REQUESTS_PER_TURN):
            if not connection.may_work():
                break
            if connection.batch is not None:
                self._request(connection, connection.batch.waiting.popleft(), connection.batch)
                continue
            line = connection.next_line()
            connection.half_since_ns = None
            if line is None:
                self._refuse(connection, f"the line is longer than {LINE_BYTES_MAX} bytes")
            elif line.startswith(b"["):
                self._begin_batch(connection, line)
            elif line:
                self._request(connection, line)
        if not connection.closed:
            self._settle(connection)

    def _settle(self, connection: Connection) -> None:
        more = connection.may_work()
        done = connection.closing or (connection.ended and not more)
        waits = connection.output or (
            not connection.closing
            and (connection.pending or connection.batch or connection.stream is not None)
        )
        if done and (connection.hung_up or not waits):
            self._drop(connection)
            return
        readable = not (more or connection.ended or connection.closing or connection.batch)
        if readable and len(connection.output) <= OUTPUT_PAUSE_BYTES:
            self._arm(connection, connection.mask | select.EPOLLIN)
        else:
            self._arm(connection, connection.mask & ~select.EPOLLIN)

    def _check_pace(self, connection: Connection, now_ns: int) -> None:
        whole_lines_only = not connection.input or connection.has_line()
        if whole_lines_only or connection.closing:
            connection.half_since_ns = None
        elif connection.half_since_ns is None:
            connection.half_since_ns = now_ns
        if connection.output and connection.stuck_since_ns is None:
            connection.stuck_since_ns = now_ns
        deadline = connection.deadline()
        if deadline is None or now_ns < deadline:
            return
        if connection.half_since_ns is None or connection.output:
            self._drop(connection)  # the caller does not read, so it cannot be told
        else:
            seconds = SLOW_NS // 1_000_000_000
            self._refuse(connection, f"the line was not completed within {seconds} seconds")
            self._settle(connection)

    def _refuse(self, connection: Connection, why: str) -> None:
        """Answer with an error that belongs to no request, and close."""
        self._send(connection, envelope.encode_error(None, RpcError(rpc.INVALID_REQUEST, why)))
        connection.closing = True
        connection.half_since_ns = None
        connection.input.clear()
        connection.searched = 0

    def _drop(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        connection.closing = True
        del self._connections[connection.fd]
        self._epoll.unregister(connection.fd)
        connection.sock.close()
        for pending in list(connection.pending):
            pending.abandon()
        connection.pending.clear()

    # -- requests -----------------------------------------------------------------------------

    def _begin_batch(self, connection: Connection, line: bytes) -> None:
        try:
            connection.batch = Batch(envelope.decode_batch(line))
        except RpcError as error:
            self._answer(connection, None, error)

    def _request(self, connection: Connection, line: bytes, batch: Batch | None = None) -> None:
        request_id: RequestId | UnsetType = None
        method = ""
        try:
            request = envelope.decode_request(line)
            request_id, method = request.id, request.method
            self._check_room(connection)
            self._access.check(connection.admitted, method)
            params = envelope.decode_params(method, request.params)
            if batch is not None:
                _check_member(method, params)
            if isinstance(params, rpc.DebugLine | rpc.DebugInterrupt):
                self._answer(connection, request_id, _heard(connection, params), batch)
                return
            if isinstance(params, rpc.Events):
                if params.names:
                    # Raises if there are no such names.
                    self._handler.call(method, params, connection.admitted.caller)
                self._answer(connection, request_id, self._recent.found(params), batch)
                connection.stream = wants_events(params) if params.follow else None
                return
            reply = self._handler.call(method, params, connection.admitted.caller)
            if isinstance(params, rpc.Tail) and params.follow and not isinstance(reply, RpcError):
                connection.stream = wants_output(params)
        except RpcError as error:
            reply = error
            request_id = error.request_id if request_id is None else request_id
        except Exception:  # a bug in one command must not end the daemon
            log.exception("control: %s failed", method)
            reply = rpc.internal_error()
        if isinstance(reply, Pending):
            self._await(connection, request_id, reply, batch)
            if isinstance(reply, Dialogue) and reply in connection.pending:
                self._talk(connection, reply)
        else:
            self._answer(connection, request_id, reply, batch)

    def _check_room(self, connection: Connection) -> None:
        if connection.stream is not None:
            raise RpcError(
                rpc.INVALID_REQUEST, "this connection is a stream of events: ask on another one"
            )
        if len(connection.pending) >= PENDING_MAX:
            raise RpcError(
                rpc.LIMIT_REACHED,
                f"{PENDING_MAX} requests of this connection are not answered yet: wait for one",
            )

    def _await(
        self,
        connection: Connection,
        request_id: RequestId | UnsetType,
        pending: Pending,
        batch: Batch | None,
    ) -> None:
        connection.pending[pending] = None

        def deliver(outcome: object) -> None:
            connection.pending.pop(pending, None)
            if connection.dialogue is pending:
                connection.dialogue = None
            self._answer(connection, request_id, outcome, batch)
            if not connection.closed:
                self._settle(connection)  # a half-closed caller may wait for nothing else

        pending.bind(deliver)

    def _talk(self, connection: Connection, dialogue: Dialogue) -> None:
        connection.dialogue = dialogue
        dialogue.begin(lambda what: self._send(connection, _encode(what) + b"\n"))

    def _answer(
        self,
        connection: Connection,
        request_id: RequestId | UnsetType,
        outcome: object,
        batch: Batch | None = None,
    ) -> None:
        line = b"" if isinstance(request_id, UnsetType) else _line(request_id, outcome)
        if batch is None:
            if line:
                self._send(connection, line)
            return
        if line and not batch.fits(line):
            assert not isinstance(request_id, UnsetType)
            why = "the answers to this batch are too long together: ask for this one alone"
            line = envelope.encode_error(request_id, RpcError(rpc.LIMIT_REACHED, why))
        batch.answer(line)
        if batch.unanswered == 0:
            connection.batch = None
            if batch.answers:
                self._send(connection, envelope.join_answers(batch.answers))
        elif batch.size > OUTPUT_PAUSE_BYTES:
            self._keep_bounded()

    # -- output -------------------------------------------------------------------------------

    def _send(self, connection: Connection, line: bytes) -> None:
        if connection.closed or connection.hung_up:
            return
        if len(connection.output) + len(line) > OUTPUT_BYTES_MAX:
            self._drop(connection)
            return
        connection.output += line
        if len(connection.output) == len(line):  # else the socket was full a moment ago
            self._flush(connection)
        if len(connection.output) > OUTPUT_PAUSE_BYTES:
            self._keep_bounded()

    def _keep_bounded(self) -> None:
        most = greediest(self._connections.values())
        if most is not None:
            self._drop(most)

    def _flush(self, connection: Connection) -> None:
        try:
            sent = connection.sock.send(connection.output[:WRITE_BYTES])
        except BlockingIOError:
            sent = 0
        except OSError:  # the caller is gone
            self._drop(connection)
            return
        if sent:
            connection.stuck_since_ns = None
            del connection.output[:sent]
        if not connection.output and connection.dropped:
            connection.output += _encode({"dropped": connection.dropped}) + b"\n"
            connection.dropped = 0
        if connection.output:
            self._arm(connection, connection.mask | select.EPOLLOUT)
        else:
            self._arm(connection, connection.mask & ~select.EPOLLOUT)

    def _arm(self, connection: Connection, mask: int) -> None:
        if mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.fd, mask)

    def _warn(self, now_ns: int, message: str) -> None:
        """Log at most one warning per WARNING_GAP_NS: callers must not fill the log."""
        if self._warned_ns is not None and now_ns - self._warned_ns < WARNING_GAP_NS:
            self._unwarned += 1
            return
        log.warning("%s (%d more since the last warning)", message, self._unwarned)
        self._warned_ns, self._unwarned = now_ns, 0


def _check_member(method: str, params: Params) -> None:
    """Raise RpcError for a member of a batch that needs a connection for itself."""
    stream = isinstance(params, rpc.Events | rpc.Tail) and params.follow
    if stream or isinstance(params, rpc.Debug):
        what = "stream" if stream else "dialogue"
        raise RpcError(
            rpc.INVALID_REQUEST,
            f"{method} makes the connection a {what}: ask for it outside of a batch",
        )


def _heard(connection: Connection, params: Params) -> object:
    """Tell the dialogue of this connection what its caller says."""
    if connection.dialogue is None:
        return RpcError(rpc.INVALID_REQUEST, "nothing is debugged on this connection: send debug")
    connection.dialogue.heard(params)
    return True


def _line(request_id: RequestId, outcome: object) -> bytes:
    """Return the answer to one request; an error where the outcome cannot be encoded."""
    try:
        if isinstance(outcome, RpcError):
            return envelope.encode_error(request_id, outcome)
        return envelope.encode_result(request_id, outcome)
    except RpcError as error:
        return envelope.encode_error(request_id, error)
    except (TypeError, ValueError, RecursionError):
        log.exception("control: an answer cannot be written as JSON: %s", type(outcome))
        return envelope.encode_error(request_id, rpc.internal_error())
