"""The loop of a program's private gateway: `Client("postgresql://…")`.

    program ── handed sockets ── ClientPort ──► Gateway ── Engines (threads) ──► PostgreSQL

It is the part of a node's sidecar that serves clients, and claims nothing. It serves nobody before
the database is found usable, and says meanwhile why it is not. What tasks.sock refuses is refused
here by what nodes publish, once more by the functions of the schema, and at last by the node that
claims.
"""

import os
import secrets
import select
import socket
import time
from array import array
from pathlib import Path
from random import Random
from typing import NoReturn

from musterd.ipc.wire.direct import REASON_CHARS_MAX, Start, State, encode, place
from musterd.supervisor.cluster.checks import KIND_BITS, LIFE_BITS, is_barred
from musterd.supervisor.cluster.engine import Cards
from musterd.supervisor.cluster.gateway import Gateway
from musterd.supervisor.cluster.migrate import SCHEMA
from musterd.supervisor.cluster.sidecar_events import EngineAnswered, EngineFailed, Notified
from musterd.supervisor.core.model import events
from musterd.supervisor.node.admission import Admission
from musterd.supervisor.node.direct import Ended
from musterd.supervisor.node.engines import Engines, Job, Listener
from musterd.supervisor.node.schedule_desk import ScheduleDesk
from musterd.supervisor.node.serving import AdmittingServer
from musterd.supervisor.sockets.clients import ClientPort

SECOND_NS = 1_000_000_000
PROGRAM_MASK = (1 << 39) - 1  # of the number under which sessions are known (cluster/checks.py)
LINGER_NS = 30 * SECOND_NS  # without a connection; a program may soon make another client
CHECK_NS, CHECK_NS_MAX = SECOND_NS // 10, 5 * SECOND_NS  # between two looks at the database
# Submits wait for another look at what nodes declare if the last one is older than this, or if none
# had declared the task. They wait for HOLD_NS at most.
CARDS_NS, HOLD_NS = 5 * SECOND_NS, 2 * SECOND_NS


class HandedSockets(socket.socket):
    """Accepts the sockets that the program hands over, as if they were connections to a path."""

    def accept(self) -> tuple[socket.socket, object]:
        message, rights, _, _ = self.recvmsg(16, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        fds = array("i")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not message or not fds:
            raise BlockingIOError("nothing was handed over")
        return socket.socket(fileno=fds[0]), ""


class Direct:
    def __init__(self, control: socket.socket, watch: int, start: Start) -> None:
        """`watch` is a descriptor that is readable when the program has ended, or -1."""
        self._start = start
        self._watch = watch
        self._control = HandedSockets(fileno=control.detach())
        process = ((start.waiter & PROGRAM_MASK) << LIFE_BITS) | secrets.randbits(LIFE_BITS)
        self._engines = Engines(start.url, process << KIND_BITS)
        self._admission = Admission()
        path = Path(place(start.url))  # shown, and not used
        clients = ClientPort(path, secrets.token_hex(8), None, handed=self._control)
        rng = Random(secrets.randbits(64))
        desk = ScheduleDesk(self._engines, clients, rng)
        gateway = Gateway(start.waiter, rng)
        self._server = AdmittingServer(gateway, clients, self._engines, desk, self._admit)
        self._poll = select.poll()
        self._poll.register(self._engines.fileno(), select.POLLIN)
        self._poll.register(self._control, 0)  # its end is told in any case
        if watch >= 0:
            self._poll.register(watch, select.POLLIN)
        now_ns = time.monotonic_ns()
        self._serving = False
        self._usable = False  # the database was checked
        self._check_at_ns, self._gap_ns = now_ns, CHECK_NS
        self._stamp = ""
        self._cards_ns = 0  # when the last look was asked for that was answered
        self._hold_ns = 0  # until when submits wait for one; 0: none do
        self._called_ns = 0  # when the call under way was made; 0: none is
        self._tidy_ns = now_ns
        self._used_ns = now_ns  # when somebody was connected last

    def run(self) -> NoReturn:
        """Work until Ended is raised."""
        while True:
            self._wait()
            self._engines.hear()
            if self._serving:
                self._server.hear()
            self._hear_clock()
            self._server.settle()

    def _wait(self) -> None:
        now_ns = time.monotonic_ns()
        due = [self._tidy_ns]
        if not self._usable and not self._called_ns:
            due.append(self._check_at_ns)
        if self._hold_ns:
            due.append(self._hold_ns)
        if self._serving and (at_ns := self._server.next_deadline()) is not None:
            due.append(at_ns)
        wait_ns = 0 if self._server.behind else max(0, min(due) - now_ns)
        for fd, what in self._poll.poll(-(-wait_ns // 1_000_000)):
            hung_up = what & (select.POLLHUP | select.POLLERR)
            if fd == self._watch or (fd == self._control.fileno() and hung_up):
                raise Ended

    def _hear_clock(self) -> None:
        now_ns = time.monotonic_ns()
        due_ns = self._server.next_deadline() if self._serving else None
        if due_ns is not None and due_ns <= now_ns:
            self._server.feed(events.Ticked())
        if not self._usable and not self._called_ns and now_ns >= self._check_at_ns:
            self._call("check", ("submit_1", "submit"))
        if self._hold_ns and now_ns >= self._hold_ns:
            self._go_on(now_ns)
        if now_ns >= self._tidy_ns:
            self._tidy_ns = now_ns + SECOND_NS
            self._server.tidy_up()
            if self._server.connections:
                self._used_ns = now_ns
            elif now_ns - self._used_ns >= LINGER_NS:
                raise Ended

    # -- the database -------------------------------------------------------------------------

    def _call(self, method: str, arguments: tuple[object, ...]) -> None:
        self._called_ns = time.monotonic_ns()
        self._engines.call(Job(0, method, arguments, {}, self._answered))

    def _look(self) -> None:
        """Ask what nodes declare, unless that is being asked."""
        if not self._called_ns:
            self._call("cards", (self._stamp,))

    def _answered(self, event: EngineAnswered | EngineFailed) -> None:
        called_ns, self._called_ns = self._called_ns, 0
        now_ns = time.monotonic_ns()
        if isinstance(event, EngineFailed):
            self._fail(event, now_ns)
        elif not self._usable:
            self._usable = True
            self._look()
        else:
            self._cards_ns = called_ns
            if isinstance(event.result, Cards):
                self._stamp = event.result.stamp
                self._admission.learn(event.result.cards)
            if not self._serving:
                self._serve()
            self._go_on(now_ns)

    def _fail(self, event: EngineFailed, now_ns: int) -> None:
        if self._serving:
            self._go_on(now_ns)
            return
        self._usable = False
        self._check_at_ns = now_ns + self._gap_ns
        self._gap_ns = min(2 * self._gap_ns, CHECK_NS_MAX)
        refused = event.refused or is_barred(event.reason)
        self._tell("refused" if refused else "away", event.reason)

    def _serve(self) -> None:
        self._serving = True
        self._poll.register(self._server.fileno(), select.POLLIN)
        Listener(self._start.url, self._notified).listen(f"{SCHEMA}_waiter_{self._start.waiter}")
        self._tell("ready", "")
        self._server.feed(events.Started())

    def _notified(self, _found: object) -> None:
        """Called in the thread of the listener."""
        self._engines.tell(lambda _: self._server.feed(Notified()), EngineAnswered(0, None))

    def _tell(self, state: str, reason: str) -> None:
        message = State(state, reason[:REASON_CHARS_MAX], os.getpid())  # type: ignore[arg-type]
        try:
            self._control.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return  # the program does not ask
        except OSError:
            raise Ended from None

    # -- submits ------------------------------------------------------------------------------

    def _admit(self, event: events.TasksSubmitted) -> events.TasksSubmitted | None:
        """Check and complete tasks, by what nodes declare now."""
        now_ns = time.monotonic_ns()
        fresh = now_ns - self._cards_ns < CARDS_NS and self._admission.knows(event.tasks)
        if fresh or (self._hold_ns and now_ns >= self._hold_ns):
            return self._admission.admit(event)
        self._hold_ns = self._hold_ns or now_ns + HOLD_NS
        self._look()
        return None

    def _go_on(self, now_ns: int) -> None:
        """Go on with the submits that wait, whether the engine has answered or not."""
        if self._hold_ns:
            self._hold_ns = min(self._hold_ns, now_ns)
            self._server.go_on()
            self._hold_ns = 0
