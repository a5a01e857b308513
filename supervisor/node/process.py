"""The loop of the cluster sidecar: poll, turn what happened into events, perform the actions.

    tasks.sock ── RelayPort ───► Splitter ──► Gateway ──┐
                                     │                  ├── Engines (threads) ──► PostgreSQL
    node.sock ─── Connection ────────┼──────► Claimer ──┤
                                     │       Scheduler ─┘
                                     └──► Pairs ──► local.sock

Nothing is decided here. Errors of PostgreSQL are told without the URL, which may hold a password.
"""

import hashlib
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from musterd import __version__
from musterd.ipc.errors import ConfigurationError, ProtocolError
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import TaskSpec
from musterd.ipc.wire.node_codec import decode_node
from musterd.ipc.wire.node_messages import (
    NODE_PROTOCOL,
    Figures,
    FindTasks,
    FoundTasks,
    NewsTold,
    Notice,
    Pools,
    SidecarHello,
)
from musterd.ipc.wire.zmtp import Connection
from musterd.supervisor.cluster.checks import KIND_BITS, LIFE_BITS
from musterd.supervisor.cluster.claimer import Claimer
from musterd.supervisor.cluster.engine import EngineAway, EngineError, EngineRefused, NodeCard
from musterd.supervisor.cluster.gateway import Gateway
from musterd.supervisor.cluster.migrate import SCHEMA
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.cluster.reports import Repeats, figures, notice
from musterd.supervisor.cluster.scheduler import Scheduler
from musterd.supervisor.cluster.sidecar_events import (
    AskLocal,
    Call,
    EndLocal,
    EngineAnswered,
    GiveAdvice,
    Leave,
    Left,
    NameInUse,
    NodeNotified,
    Notified,
    PassOn,
    PoolsNotified,
    PoolsTold,
    SchedulesAsked,
    ShowView,
    Standing,
    Tell,
    ToldOfSchedules,
)
from musterd.supervisor.cluster.splitter import Splitter
from musterd.supervisor.config.redact import Redaction, refuse
from musterd.supervisor.config.timezones import time_zone
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.node.admission import session_problems
from musterd.supervisor.node.engines import Engines, Job, Listener
from musterd.supervisor.node.finds import find_tasks
from musterd.supervisor.node.pairs import Pairs
from musterd.supervisor.node.relay_port import RelayPort
from musterd.supervisor.node.schedule_desk import ScheduleDesk
from musterd.supervisor.node.serving import ClientServer
from musterd.supervisor.settings.cluster_url import cluster_url
from musterd.supervisor.settings.node import NodeSettings
from musterd.supervisor.sockets.declarations import Declarations
from musterd.supervisor.system import descriptors

EXIT_FAILED, EXIT_NAME_TAKEN, EXIT_CONFIGURATION = 1, 69, 78
BEAT_NS = 5_000_000_000  # a fraction of what the daemon waits for (core/workers/sidecar.py)
SECOND_NS = 1_000_000_000
LEAVE_NS = 2 * SECOND_NS  # for the last ends, when the daemon ends
# Clients wait until the node has joined, so that its tasks are known; but not for a database that
# is away.
SERVE_NS = 5 * SECOND_NS
IDENTITY_FILE = "node.id"  # in state_dir
MACHINE_FILE = Path("/etc/machine-id")
NODE_MASK = (1 << 39) - 1  # of the number under which sessions are known (cluster/checks.py)
MENTION_UNSENT_BYTES = 1024 * 1024  # to a daemon that does not read: then nothing is mentioned


class Ended(Exception):
    """The daemon has stopped this process, or has ended."""


class Trouble(Exception):
    """The process cannot work; `code` says whether another start may help."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.code = code


def identity_of(state_dir: Path) -> tuple[str, str]:
    """Return what this node is known by, in all its lives; and what that was, if it is another's.

    Two nodes of one identity would end each other's tenures. So it is made anew in a copy of the
    folder: the file says on which machine and in which folder it was made.
    """
    path, origin, former = state_dir / IDENTITY_FILE, _origin_of(state_dir), ""
    try:
        known, _, made_at = path.read_text().strip().partition("\n")
    except FileNotFoundError:
        known = made_at = ""
    if known and made_at == origin:
        return known, ""
    if not known or made_at:
        known, former = secrets.token_hex(16), known
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{known}\n{origin}\n")
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    return known, former


def _origin_of(state_dir: Path) -> str:
    """Return what a copy of a folder has not, on this machine or another."""
    try:
        machine = MACHINE_FILE.read_text().strip()
    except OSError:  # a container may have none
        machine = ""
    place = f"{machine} {state_dir.stat().st_ino}"
    return hashlib.blake2b(place.encode(), digest_size=8).hexdigest()


def waiter_of(identity: str) -> int:
    """Return the number under which this node waits for ends: never 0."""
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2 or 1


class Sidecar:
    def __init__(
        self, settings: NodeSettings, beat_fd: int, url: str, found: Sequence[actions.Report] = ()
    ) -> None:
        """`found` is what the check of the database has to tell."""
        self._beat_fd = beat_fd
        identity, former = identity_of(Path(settings.state_dir))
        waiter = waiter_of(identity)
        self._waiter_channel = f"{SCHEMA}_waiter_{waiter}"
        self._pool_channel = f"{SCHEMA}_pool"
        rng = Random(secrets.randbits(64))
        self._gateway = Gateway(waiter, rng)
        self._gateway.held = True
        self._splitter = Splitter(self._gateway, self._prepare)
        redact = settings.redact
        card = NodeCard(identity, settings.node, settings.lease_ns, __version__, redact=redact)
        self._redaction = Redaction(redact)
        self._sessions = settings.sessions
        self._claimer = Claimer(card, rng, settings.keep_ns, problems=self._problems)
        self._scheduler = Scheduler(rng, time_zone)
        self._standing: Standing | None = None  # as the scheduler knows it
        process = ((waiter & NODE_MASK) << LIFE_BITS) | secrets.randbits(LIFE_BITS)
        self._engines = Engines(url, process << KIND_BITS)
        handed = socket.socket(fileno=settings.tasks_fd)
        self._clients = RelayPort(
            Path(settings.tasks_socket), secrets.token_hex(8), None, handed=handed
        )
        self._desk = ScheduleDesk(self._engines, self._clients, rng, self._ask_about_schedules)
        self._server = ClientServer(
            self._splitter, self._clients, self._engines, self._desk, self._do_with_local
        )
        self._pairs = Pairs(settings.local_socket, self._clients, self._server.feed)
        self._declarations = Declarations()
        self._node = Connection(settings.node_socket)
        self._node.put(encode(SidecarHello(NODE_PROTOCOL, settings.token)))
        self._counted = Figures()
        self._repeats = Repeats()
        for report in found:
            self._report(report)
        if former:
            why = f"{settings.state_dir} was made on another machine, or in another folder, "
            why += f"by node {former}: this is another node"
            self._report(actions.Report("cluster.copied", "warning", reason=why))
        self._tenure = -1
        self._listener = Listener(url, self._heard_notifications)
        self._poll = select.poll()
        self._poll.register(self._engines.fileno(), select.POLLIN)
        self._poll.register(self._pairs.fileno(), select.POLLIN)
        self._serve_ns = time.monotonic_ns() + SERVE_NS
        self._serving = False
        self._beat_ns = self._tidy_ns = 0
        self._leaving_ns = 0
        self.stopping = False

    def run(self) -> NoReturn:
        """Work until Ended or Trouble is raised."""
        self._server.feed(events.Started())
        self._beat(b"ready\n")
        while True:
            self._wait()
            self._engines.hear()
            self._hear_node()
            self._pairs.receive()
            self._hear_clients()
            self._hear_clock()
            self._pairs.settle()
            self._server.settle()

    def _wait(self) -> None:
        now_ns = time.monotonic_ns()
        due = [self._beat_ns, self._tidy_ns]  # the latter comes before SERVE_NS is over
        cores = (self._splitter, self._claimer, self._scheduler)
        due += [each for core in cores if (each := core.next_deadline()) is not None]
        wait_ns = 0 if self._server.behind else max(0, min(due) - now_ns)
        writing = select.POLLOUT if self._node.unsent else 0
        self._poll.register(self._node.fileno(), select.POLLIN | writing)
        self._poll.poll(-(-wait_ns // 1_000_000))

    # -- what happens -------------------------------------------------------------------------

    def _hear_clients(self) -> None:
        if self._gateway.held and (self._claimer.tenure or time.monotonic_ns() >= self._serve_ns):
            self._gateway.held = False
            self._server.feed(events.Ticked())
        if not self._serving:
            if self._gateway.held and not self._splitter.has_local:
                return
            self._serving = True
            self._poll.register(self._server.fileno(), select.POLLIN)
        self._server.hear()

    def _problems(self, specs: list[TaskSpec]) -> dict[str, str]:
        problems = self._redaction.problems(specs)
        return problems | session_problems(specs, self._sessions)

    def _prepare(self, event: events.TasksSubmitted) -> events.TasksSubmitted:
        """Refuse what gives a secret away, and complete the rest by what `@task` declares."""
        checked = refuse(event, self._problems(event.tasks))
        tasks = self._declarations.fill_in(checked.tasks)
        return msgspec.structs.replace(checked, tasks=tasks)

    def _hear_node(self) -> None:
        try:
            self._node.flush()
            for frame in self._node.receive():
                if frame is None:
                    raise ProtocolError("a message of several frames instead of one")
                message = decode_node(frame)
                if isinstance(message, Pools):
                    for card in message.cards:
                        self._declarations.declare(card.name, card.tasks)
                    self._desk.local_pools = frozenset(message.local)
                    self._server.feed(PoolsTold(message.local))
                if isinstance(message, NewsTold):
                    self._feed_scheduler(message)
                elif isinstance(message, FindTasks):
                    find_tasks(self._engines, message, self._tell_found)
                else:
                    self._feed_claimer(message)
        except OSError:
            raise Ended from None  # the daemon has ended, or another sidecar takes our place
        except ProtocolError as error:
            raise Trouble(f"the supervisor sent what cannot be understood: {error}") from None

    def _heard_notifications(self, found: list[tuple[str, str]]) -> None:
        """Called in the thread of the listener."""

        def tell(_event: object) -> None:
            pools = {payload for channel, payload in found if channel == self._pool_channel}
            channels = {channel for channel, _ in found}
            if self._waiter_channel in channels:
                self._server.feed(Notified())
            if pools:
                self._feed_claimer(PoolsNotified(tuple(pools)))
            if channels - {self._waiter_channel, self._pool_channel}:
                self._feed_claimer(NodeNotified())

        self._engines.tell(tell, EngineAnswered(0, None))

    def _hear_clock(self) -> None:
        now_ns = time.monotonic_ns()
        for core, feed in (
            (self._splitter, self._server.feed),
            (self._claimer, self._feed_claimer),
            (self._scheduler, self._feed_scheduler),
        ):
            due_ns = core.next_deadline()
            if due_ns is not None and due_ns <= now_ns:
                feed(events.Ticked())
        if self.stopping and not self._leaving_ns:
            self._leaving_ns = now_ns + LEAVE_NS
            self._feed_scheduler(Leave())
            self._feed_claimer(Leave())
        if self._leaving_ns and now_ns >= self._leaving_ns:
            raise Ended
        if now_ns >= self._tidy_ns:
            self._tidy_ns = now_ns + (SECOND_NS if not self._leaving_ns else SECOND_NS // 10)
            self._server.tidy_up(self._pairs.awaited_bytes)
            self._tell_figures()
        if now_ns >= self._beat_ns:
            self._beat(b"\n")
        standing = self._claimer.standing
        if standing is not None and standing != self._standing:
            self._standing = standing
            self._feed_scheduler(standing)
        if self._tenure != self._claimer.tenure:
            self._tenure = self._claimer.tenure
            node = f"{SCHEMA}_node_{self._tenure}"
            self._listener.listen(self._waiter_channel, self._pool_channel, node)

    def _beat(self, line: bytes) -> None:
        self._beat_ns = time.monotonic_ns() + BEAT_NS
        try:
            os.write(self._beat_fd, line)
        except BlockingIOError:
            return  # the pipe of a stopped daemon is full of heartbeats
        except BrokenPipeError:
            raise Ended from None

    # -- what is done -------------------------------------------------------------------------

    def _do_with_local(self, action: object) -> None:
        """Perform what the splitter wants of the supervisor, beside what clients are told."""
        clients = self._clients
        match action:
            case AskLocal(name, message):
                self._pairs.ask(name, message)
            case EndLocal(name):
                self._pairs.end(name)
            case PassOn(name, frame):
                clients.pass_on(name, bytes(frame))
            case ShowView(request, id_, view):
                clients.answer_view(request, id_, view)
            case GiveAdvice(request, workers):
                clients.answer_advice(request, workers)
            case ToldOfSchedules(request, answer):
                self._desk.told(request, answer)
            case actions.Report():
                self._report(action)

    def _ask_about_schedules(self, asked: SchedulesAsked) -> None:
        self._server.feed(asked)

    def _feed_scheduler(self, event: object) -> None:
        for action in self._scheduler.handle(time.monotonic_ns(), event):
            match action:
                case Call():
                    self._call(action, self._feed_scheduler)
                case Tell(message):
                    self._node.put(encode(message))
                case actions.Report():
                    self._report(action)

    def _feed_claimer(self, event: object) -> None:
        for action in self._claimer.handle(time.monotonic_ns(), event):
            match action:
                case Call():
                    self._call(action, self._feed_claimer)
                case Tell(message):
                    self._node.put(encode(message))
                case Left():
                    raise Ended
                case NameInUse(reason):
                    raise Trouble(reason, EXIT_NAME_TAKEN)
                case actions.Report():
                    self._report(action)

    def _call(self, call: Call, feed: Callable[[object], None]) -> None:
        self._engines.call(Job(call.ticket, call.method, call.arguments, call.options, feed))

    def _report(self, report: actions.Report) -> None:
        """Have the daemon log something."""
        if self._repeats.is_news(time.monotonic_ns(), report):
            self._mention(notice(report))

    def _tell_figures(self) -> None:
        gateway = self._gateway
        counted = figures(
            self._claimer.figures,
            gateway.figures,
            refusing=gateway.refusing,
            policy=self._claimer.policy or 0,
        )
        if counted != self._counted:
            self._counted = counted
            self._mention(counted)

    def _tell_found(self, found: FoundTasks) -> None:
        """Answer people, who wait for it: the supervisor asks for a few at a time."""
        self._node.put(encode(found))

    def _mention(self, message: Notice | Figures) -> None:
        """Tell the daemon what nothing depends on, unless the daemon does not read."""
        if self._node.unsent_bytes < MENTION_UNSENT_BYTES:
            self._node.put(encode(message))


def check(url: str) -> list[actions.Report]:
    """Refuse a database that cannot be used; return warnings. One that is away is waited for."""
    engine = PostgresEngine(url)
    try:
        warnings = engine.check()
    except EngineRefused as error:
        raise Trouble(str(error), EXIT_CONFIGURATION) from None
    except EngineAway as error:
        return [actions.Report("cluster.away", "warning", reason=str(error))]
    except EngineError as error:
        raise Trouble(f"the cluster's database cannot be checked: {error}") from None
    finally:
        engine.close()
    return [actions.Report("cluster.warning", "warning", reason=each) for each in warnings]


def run(settings: NodeSettings, beat_fd: int) -> int:
    """Work until SIGTERM and return the exit code; print errors on standard error."""
    setproctitle("musterd: cluster")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptors.double()
    try:
        try:
            url = cluster_url(settings.url, settings.url_file, settings.url_secret)
        except ConfigurationError as error:
            raise Trouble(str(error), EXIT_CONFIGURATION) from None
        sidecar = Sidecar(settings, beat_fd, url, check(url))

        def stop(_number: int, _frame: object) -> None:
            sidecar.stopping = True

        signal.signal(signal.SIGTERM, stop)
        sidecar.run()
    except Ended:
        return 0
    except Trouble as error:
        print(error, file=sys.stderr, flush=True)
        return error.code
