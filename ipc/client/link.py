"""A Session on a real connection: never blocking, driven by its owner.

Nothing is queued for an absent supervisor: the session hears of a connection when the handshake is
complete, and of its end; after the next Welcome the session repeats its unanswered requests. pump()
replaces a lost connection, at once if it had lasted, else after a growing pause. The descriptor to
poll stays the same over connections: an epoll around the present socket, level-triggered, so
unread data wakes the next pump.

A fork has copies of both descriptors and shares the epoll with its parent. So a socket is removed
from the epoll only where a connection ends, and close() touches nothing but the copies.
"""

import logging
import math
import os
import secrets
import select
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from musterd.ipc.client.session import Session
from musterd.ipc.errors import NotConnected, ProtocolError
from musterd.ipc.wire.codec import decode_server
from musterd.ipc.wire.direct import is_url
from musterd.ipc.wire.messages import Fault
from musterd.ipc.wire.paths import find_tasks_socket, fitting
from musterd.ipc.wire.zmtp import Connection, Message

if TYPE_CHECKING:
    from musterd.ipc.client.direct import DirectGateway

MILLISECOND_NS = 1_000_000
RECONNECT_NS = 20 * MILLISECOND_NS  # finds a restarted supervisor at once
RECONNECT_NS_MAX = 200 * MILLISECOND_NS  # an absent supervisor costs five connect() a second
# A listener may be silent for this long: one that systemd holds waits for its daemon to start.
HANDSHAKE_NS_MAX = 30_000 * MILLISECOND_NS
CHUNKS_MAX = 64  # per pump, 4 MiB: more waits in the kernel, then on the supervisor's side
LOOK_UP_NS = 100 * MILLISECOND_NS  # longest poll: another thread can close the client
# A new connection may still bring the Welcome after the connect timeout.
WELCOME_SECONDS = 1.0

log = logging.getLogger("musterd.client")


def give_up_at(timeout: float | None) -> float:
    """Return when a wait of this many seconds is over; None waits forever."""
    try:
        return math.inf if timeout is None else time.monotonic() + timeout
    except TypeError:
        raise TypeError(
            f"timeout must be a number of seconds or None, not {timeout!r:.80}"
        ) from None


class Link:
    """Connection with its session. Not thread-safe: one caller at a time."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """`path` is that of tasks.sock, or the URL of a cluster's database."""
        self._direct: DirectGateway | None = None  # to a cluster, without a daemon here
        if is_url(path):
            from musterd.ipc.client.direct import gateway_to  # few programs need it

            self._direct = gateway_to(str(path))
            self.path = self._direct.place
        else:
            self.path = str(find_tasks_socket() if path is None else fitting(Path(path), "socket"))
        self.session = Session(secrets.token_hex(16))
        self.pid = os.getpid()  # of the process that may use it
        self.malformed = 0  # messages of the supervisor that were dropped
        self.connection: Connection | None = None
        self._ready = False  # the handshake of the present connection is complete
        self._problem = ""  # why the last connection failed; "" if nobody listened
        self._tried_ns = 0  # when the last connection was begun
        self._gap_ns = RECONNECT_NS
        self._due_ns = 0  # when the next may be begun
        self._writing = False  # the epoll also waits for room to write
        self._wanted: float | None = None  # since when a caller waits for the first Welcome
        try:
            self._epoll = select.epoll()
        except OSError as error:
            raise NotConnected(f"cannot connect to {self.path!r}: {error}") from error
        self.fd = self._epoll.fileno()
        self.pump()

    def pump(self) -> None:
        """Receive what has arrived and send what is due."""
        now_ns = time.monotonic_ns()
        session = self.session
        try:
            if self.connection is None and now_ns >= self._due_ns:
                self._connect(now_ns)
            if self.connection is not None:
                self._receive(now_ns, self.connection)
            if self._direct is not None and not self._ready:
                self._ask_gateway(self._direct)
            session.tick(now_ns)
            session.seal(now_ns)
            if self._ready and (session.outbox or self._writing):
                self._send()
        except (OSError, ProtocolError) as error:
            self._lose(now_ns, error)
        except BaseException:
            # Most likely Ctrl-C: part of a message may be gone, so everything is asked for again.
            self._lose(now_ns, None)
            raise

    def hurry(self) -> bool:
        """Skip the pause before the next connection, because a caller begins to wait."""
        if self.connection is not None:
            return False
        self._due_ns = 0
        return True

    def _ask_gateway(self, direct: "DirectGateway") -> None:
        """Learn whether the database refuses this program: then no handshake comes."""
        found = direct.state()
        refusal = found.reason if found.state == "refused" else ""
        if refusal and not self.session.refusal:
            self.session.progress = True
        self.session.refusal = refusal

    def _connect(self, now_ns: int) -> None:
        self._tried_ns = now_ns
        self._due_ns = now_ns + self._gap_ns
        self._gap_ns = min(2 * self._gap_ns, RECONNECT_NS_MAX)
        try:
            to = self.path if self._direct is None else self._direct.connect()
            connection = Connection(to)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            self._problem = ""  # nobody listens, or the backlog is full
            return
        except OSError as error:
            self._problem = str(error)
            return
        self.connection = connection
        self._epoll.register(connection, select.EPOLLIN)

    def _lose(self, now_ns: int, error: Exception | None) -> None:
        connection, self.connection = self.connection, None
        self._ready = self._writing = False
        if connection is not None:
            with suppress(OSError):  # the socket was never in the epoll
                self._epoll.unregister(connection)
            connection.close()
        self.session.disconnected()
        if isinstance(error, ProtocolError):
            if not self._problem:  # log the first failure only
                log.warning("the connection to %s was closed: %s", self.path, error)
            self._problem = str(error)
        if now_ns - self._tried_ns > RECONNECT_NS_MAX:  # the connection had lasted
            self._gap_ns = RECONNECT_NS
            self._connect(now_ns)

    def _receive(self, now_ns: int, connection: Connection) -> None:
        for _ in range(CHUNKS_MAX):
            for message in connection.receive():
                self._hear(now_ns, message)
            if connection.drained:
                break
        if self._ready:
            return
        if connection.ready:
            self._ready, self._problem = True, ""
            self.session.connected(now_ns)
        elif self._direct is None and now_ns - self._tried_ns > HANDSHAKE_NS_MAX:
            raise ProtocolError(f"no handshake within {HANDSHAKE_NS_MAX / 1e9:g} s")

    def _hear(self, now_ns: int, message: Message) -> None:
        try:
            if message is None:
                raise ProtocolError("a message of several frames instead of one")
            decoded = decode_server(message)
        except ProtocolError as error:
            if self.malformed == 0:  # log the first only; the count tells the rest
                log.warning("a message of the supervisor at %s was dropped: %s", self.path, error)
            self.malformed += 1
            return
        if type(decoded) is Fault:
            log.warning("the supervisor at %s says: %s", self.path, decoded.reason)
        self.session.receive(now_ns, decoded)

    def _send(self) -> None:
        connection, outbox = self.connection, self.session.outbox
        assert connection is not None
        while outbox:
            connection.put(outbox.popleft())
        full = not connection.flush()
        if full != self._writing:
            self._writing = full
            events = select.EPOLLIN | select.EPOLLOUT if full else select.EPOLLIN
            self._epoll.modify(connection, events)

    def wait_ns(self, now_ns: int) -> int:
        """Return how long to wait for the descriptor before the next pump."""
        wait_ns = LOOK_UP_NS
        deadline_ns = self.session.next_deadline()
        if deadline_ns is not None:
            wait_ns = min(wait_ns, max(deadline_ns - now_ns, 0))
        if self.connection is None:
            wait_ns = min(wait_ns, max(self._due_ns - now_ns, 0))
        return wait_ns

    def check_process(self) -> None:
        """Raise in a fork: the connection belongs to its parent."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this client was made in process {self.pid} and cannot be used in its fork "
                f"{os.getpid()}: make a new one there"
            )

    def patience(self, connect_timeout: float, seconds: float) -> float:
        """Return how many of these seconds a caller may wait; raise if no answer can come.

        The connect timeout counts from the first call that waits, not anew in each.
        """
        session = self.session
        if session.refusal:
            raise self.unreachable(connect_timeout)
        if session.epoch:
            return seconds
        now = time.monotonic()
        if self._wanted is None:
            self._wanted = now
        left = self._wanted + connect_timeout - now
        if left <= 0 and self.connection is not None:
            left = self._tried_ns / 1e9 + WELCOME_SECONDS - now
        if left <= 0:
            raise self.unreachable(connect_timeout)
        return min(seconds, left)

    def unreachable(self, seconds: float) -> NotConnected:
        """Return the error for a supervisor that did not answer."""
        return NotConnected(self._trouble(f" within {seconds:g} s"))

    def late(self, what: str, seconds: float, connect_timeout: float) -> Exception:
        """Return the error for something that did not come in time, with the reason if it is that
        nobody is there to send it."""
        if self.session.ready:
            return TimeoutError(f"{what} did not come within {seconds:g} s")
        if not self.session.epoch and seconds >= connect_timeout:
            return self.unreachable(seconds)
        return TimeoutError(f"{what} did not come within {seconds:g} s: {self._trouble()}")

    def _trouble(self, within: str = "") -> str:
        """Say who does not answer, and why."""
        refusal, direct = self.session.refusal, self._direct
        if direct is not None:
            if refusal:
                return f"the cluster at {self.path} cannot be used: {refusal}"
            why = self._problem or direct.state().reason
            return f"no answer of the cluster at {self.path}{within}: {why}"
        if refusal:
            return f"the supervisor at {self.path} refused: {refusal}"
        return f"no supervisor at {self.path}{within}: {self._why_unreachable()}"

    def _why_unreachable(self) -> str:
        try:
            os.stat(self.path)
        except PermissionError:
            return f"user {os.geteuid()} may not enter its directory; join the daemon's tasks_group"
        except OSError:
            return (
                "there is no such socket; start musterd, run this in the folder of `musterd dev`, "
                "or set MUSTERD_TASKS or Client(socket=...)"
            )
        if not os.access(self.path, os.W_OK, effective_ids=True):
            return (
                f"permission denied: user {os.geteuid()} may not write to the socket; join the "
                "daemon's tasks_group"
            )
        if self._problem:
            return f"{self._problem}; check that this is musterd's socket"
        if self.connection is not None:
            return "it has not answered yet; check that musterd runs"
        return "the socket exists but nobody answers; check that musterd runs"

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self._epoll.close()
