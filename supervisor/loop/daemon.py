"""The loop: poll, turn what happened into events, have the core's actions performed.

One thread. Nothing here decides anything, and nothing here blocks: the store's threads write and
read the disk, fork servers make processes, the spawner's janitor removes temporary directories. A
turn of the loop longer than views.metrics.SLOW_TURN_NS is counted and logged.
"""

import contextlib
import gc
import os
import secrets
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from musterd import __version__
from musterd.ipc.errors import MusterdError
from musterd.ipc.wire.node_messages import FindTasks, FoundTasks
from musterd.ipc.wire.schedule_messages import (
    SCHEDULES_SHOWN_MAX,
)
from musterd.supervisor.api.memory import MemoryStatus
from musterd.supervisor.api.status import FleetStatus
from musterd.supervisor.config.load import Loaded
from musterd.supervisor.config.redact import Redaction
from musterd.supervisor.config.schema import Config
from musterd.supervisor.control.commands.dispatch import Commands
from musterd.supervisor.control.server import ControlServer
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import events, schedule_events
from musterd.supervisor.core.tasks.added_schedules import ADDED
from musterd.supervisor.log import log
from musterd.supervisor.log.worker_output import Outputs
from musterd.supervisor.loop.perform import ActionRunner
from musterd.supervisor.loop.signals import Signals
from musterd.supervisor.memory.watch import MemoryWatch
from musterd.supervisor.processes.oom import OomWatch
from musterd.supervisor.processes.sidecars import SidecarProcesses
from musterd.supervisor.processes.spawner import Spawner
from musterd.supervisor.service.notify import Notifier
from musterd.supervisor.service.problems import OFTEN_NS, Problem, Problems
from musterd.supervisor.service.reload import Reloading, Reread
from musterd.supervisor.service.systemd_status import SystemdStatus
from musterd.supervisor.service.wall_clock import WallClock
from musterd.supervisor.settings.added_schedules import read_added, read_puts
from musterd.supervisor.settings.artefacts import keep_of
from musterd.supervisor.settings.policy import fleet_policy
from musterd.supervisor.sockets import activation, peers
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.declarations import Declarations
from musterd.supervisor.sockets.files import SocketFiles, binding
from musterd.supervisor.sockets.listen import group_id_of
from musterd.supervisor.sockets.lookups import ClientLookups
from musterd.supervisor.sockets.recall import recall
from musterd.supervisor.sockets.schedule_requests import PutWanted
from musterd.supervisor.sockets.workers import WorkerPort
from musterd.supervisor.store.artefacts import ArtefactFiles
from musterd.supervisor.store.engines import open_store
from musterd.supervisor.store.interface import Store
from musterd.supervisor.store.requests import StoreRequests
from musterd.supervisor.store.retention import Trimming
from musterd.supervisor.system import directories
from musterd.supervisor.system.background_calls import BackgroundCalls
from musterd.supervisor.system.threads import ThreadWatch
from musterd.supervisor.views import fleet as fleet_view
from musterd.supervisor.views.metrics import Figures
from musterd.supervisor.views.schedules import find_schedule, list_schedules

if TYPE_CHECKING:
    from musterd.supervisor.sockets.node import NodePort

HOUSEKEEPING_NS = 1_000_000_000
# The store's threads and the loop share the interpreter. At Python's default of 5 ms the loop may
# wait for the threads at each message it sends; below 1 ms they interrupt each other too often.
# Measured: 66,000 tasks/s with 0.2 ms, 86,000 with 1 ms; 52,000 and 63,000 with 100,000 queued.
SWITCH_SECONDS = 0.001
# Frequent collections cost more than they free: the hot path makes no cycles.
GC_THRESHOLDS = (50_000, 20, 50)


class Daemon:
    def __init__(self, loaded: Loaded, reread: Reread, handed: activation.Handed) -> None:
        """`handed` has the sockets that systemd listens on already, by path."""
        config = loaded.config
        self._handed = handed
        self._config = config
        self._started_ns = time.monotonic_ns()
        self._runtime = directories.runtime_dir(config.supervisor.runtime_dir)
        self._state_dir = directories.state_dir(config.supervisor.state_dir)
        self._clock = WallClock()
        self._threads = ThreadWatch()
        self._threads.open()
        with contextlib.ExitStack() as undo:  # a part that fails leaves nothing of the others
            undo.callback(self._threads.close)
            self._make_parts(undo, loaded, reread)
            undo.pop_all()
        self._declarations = Declarations()
        self._redaction = Redaction(config.supervisor.redact)
        # What the actions of the event in hand have brought up: one event each at most.
        self._inbox: deque[object] = deque()
        self._feeding = False
        self._over = False
        self.exit_code = 0
        self._lookups: ClientLookups = ClientLookups(self, self._clients)
        self._runner = ActionRunner(
            self,
            store=self._store,
            spawner=self._spawner,
            workers=self._workers,
            clients=self._clients,
            answers=self._commands.answers,
            debug=self._commands.debug,
            control=self._control,
            sidecars=self._sidecars,
            calls=self._calls,
            declarations=self._declarations,
            reloading=self._reloading,
            leave=self._leave,
            log_tasks=config.supervisor.log_tasks,
            tasks_socket=str(directories.tasks_socket(self._runtime)),
            node=self._node,
        )
        self._due_ns = 0  # when _hear_clock() has something to do
        self._housekeeping_ns = self._started_ns + HOUSEKEEPING_NS
        self._trimming = Trimming(self._store, self._started_ns)
        self._write_problem = ""
        self._problems = Problems(
            Problem(self._threads.problem, "daemon.thread", ""),
            Problem(self._store.problem, "store.failing", "store.recovered"),
            Problem(self._clock.problem, "clock.doubted", "clock.trusted", gap_ns=OFTEN_NS),
            Problem(self._socket_files.problem, "sockets.lost", ""),  # only a restart helps
            Problem(self._clients.problem, "door.shut", "door.open", "warning", OFTEN_NS),
        )

    def _make_parts(self, undo: contextlib.ExitStack, loaded: Loaded, reread: Reread) -> None:
        """Make every part that holds threads, descriptors or files."""
        settings, runtime = self._config.supervisor, self._runtime
        gid = group_id_of(settings.tasks_group, "supervisor.tasks_group")
        store = self._config.store
        self._store: Store = open_store(
            directories.store_file(self._state_dir),
            store.durability,
            store.on_corrupt,
            self._clock.now_ns,
        )
        undo.callback(self._store.close)
        self._clock.open(self._store)
        self.store_requests = StoreRequests(self._store)
        self.artefacts = ArtefactFiles(keep_of(self._config))
        undo.callback(self.artefacts.close)
        policy = fleet_policy(self._config, origins=loaded.origins)
        self.fleet = Fleet(policy, Random(), self._store.last_seq())
        ours = (directories.workers_socket, directories.tasks_socket, directories.control_socket)
        sockets = [where(runtime) for where in ours]
        activation.check(self._handed, sockets[1:])
        tasks, control = (activation.pick(self._handed, path) for path in sockets[1:])
        self._sockets_survive = tasks is not None
        self._oom = OomWatch()
        self.outputs = Outputs()
        self._spawner = Spawner(
            str(sockets[0]),
            self._state_dir / "tmp",
            settings.containment,
            oom=self._oom,
            outputs=self.outputs,
        )
        undo.callback(self._spawner.close)
        self._memory = MemoryWatch(
            self._config.memory, self._config.monitor, self._spawner, self._state_dir
        )
        undo.callback(self._memory.close)
        self._workers = WorkerPort(sockets[0], self._spawner.worker_of)
        undo.callback(self._workers.close)
        undo.callback(sockets[0].unlink, missing_ok=True)
        with binding(sockets[1]):
            self._clients = ClientPort(sockets[1], secrets.token_hex(8), gid, tasks)
        undo.callback(self._clients.close)
        if tasks is None:
            undo.callback(sockets[1].unlink, missing_ok=True)
        self._node = self._open_node(undo, sockets)
        self._systemd_status = SystemdStatus(Notifier(), self._started_ns)
        self._calls = BackgroundCalls()
        undo.callback(self._calls.close)
        self._reloading: Reloading = Reloading(
            self,
            loaded,
            reread,
            adopt=self._adopt,
            calls=self._calls,
            systemd_status=self._systemd_status,
            code_of=self._spawner.code,
        )
        self._figures = Figures(self, self._store)
        self._commands: Commands = Commands(self, self._reloading, self._figures, self._clock)
        self._control: ControlServer = ControlServer(
            sockets[2], settings.control_group, self._commands, settings.view_group, control
        )
        self.outputs.publish = self._control.pass_on
        self._commands.publish_with(self._control.pass_on)
        undo.callback(self._control.close)
        self._socket_files: SocketFiles = SocketFiles(sockets, held=self._handed)
        self._signals = Signals()
        undo.callback(self._signals.close)
        self._epoll = select.epoll()
        undo.callback(self._epoll.close)
        self._sidecars: SidecarProcesses = SidecarProcesses(self.outputs)
        undo.callback(self._sidecars.close)

    def _open_node(self, undo: contextlib.ExitStack, sockets: list[Path]) -> "NodePort | None":
        """Listen for the cluster sidecar, if there is a cluster: it serves tasks.sock."""
        if not self.fleet.policy.cluster:
            return None
        from musterd.supervisor.sockets.node import NodePort

        path, local = (
            where(self._runtime) for where in (directories.node_socket, directories.local_socket)
        )
        sockets += [path, local]
        node = NodePort(path)
        undo.callback(node.close)
        undo.callback(path.unlink, missing_ok=True)
        self._clients.serve_apart(local)
        undo.callback(local.unlink, missing_ok=True)
        return node

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> bool:
        """Run until a shutdown has gone through all its phases; whether it ended cleanly."""
        try:
            self._open()
            while not self._over:
                self._turn()
        except BaseException:
            self._close()
            raise
        return self._close()

    def _open(self) -> None:
        self._signals.open()
        parts = (self._workers, self._store, self._spawner, self._control, self._signals)
        others = (self._calls, self.outputs, self._memory, self._sidecars, self.artefacts)
        if self._node is not None:
            self._epoll.register(self._node.fileno(), select.EPOLLIN)
        for part in (self._clients, *parts, *others):
            self._epoll.register(part.fileno(), select.EPOLLIN)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        sys.setswitchinterval(SWITCH_SECONDS)
        now_ns = self.now_ns()
        log.note(
            "daemon.starting",
            version=__version__,
            pid=os.getpid(),
            tasks=self._store.unfinished(),
            runtime_dir=self._runtime,
            state_dir=self._state_dir,
        )
        added = [read_added(self._config, *each) for each in self._store.facts(ADDED)]
        self.feed(schedule_events.AddedRecovered(added))
        facts = [(kind, self._store.facts(kind)) for kind in self.fleet.fact_kinds]
        for kind, found in facts:
            self.feed(events.FactsRecovered(kind, found, self.wall_ns()))
        for page in self._store.recover(now_ns, self.wall_ns()):
            self._runner.task_lines.recovered(now_ns, page)
            self.feed(events.TasksRecovered(page, more=True))
            self._systemd_status.begun(self.now_ns(), f"{len(self.fleet.tasks)} tasks read back")
        self.feed(events.TasksRecovered([]))
        if (sample := self._memory.open(now_ns)) is not None:
            self.feed(sample)
        self.feed(events.Started())
        self._read_clock()
        self._figures.begun()

    def _read_clock(self) -> None:
        anchor = self._clock.read()
        self.feed(events.ClockRead(self.wall_ns(), anchor))

    def _turn(self) -> None:
        ready = [fd for fd, _ in self._epoll.poll(self._sleep_ms() / 1000)]
        began_ns = time.monotonic_ns()
        if self._signals.fileno() in ready:
            self._hear_signals()
        if self._store.fileno() in ready:
            self._hear_store()
        if self._workers.fileno() in ready:
            self._hear_workers()
        if self._spawner.fileno() in ready:
            self._hear_spawner()
        if self._clients.fileno() in ready or self._clients.behind:
            self._hear_clients()
        self._clients.router.flush()
        if self._control.fileno() in ready:
            self._control.serve(self.now_ns())
        if self.outputs.fileno() in ready:
            self.outputs.serve(self.now_ns())
        if self._calls.fileno() in ready:
            self._calls.settle()
        self._hear_the_rest(ready)
        self._hear_clock()
        self._lookups.pump()
        for lost in self._clients.settle():
            self._runner.resend_checks.give_up(lost.peer)
            self.feed(lost)
        self._commands.answers.settle()
        self._threads.check()  # before systemd is told that all is well
        now_ns = time.monotonic_ns()
        self._systemd_status.turn(now_ns, self.fleet, self._problems)
        self._figures.turned(now_ns - began_ns)

    def _sleep_ms(self) -> int:
        if self._clients.behind:
            self._due_ns = 0
            return 0
        deadlines = [
            self.fleet.next_deadline(),
            self._control.next_deadline(),
            self._runner.next_deadline(),
            self.outputs.next_deadline(),
            self._spawner.next_deadline(),
            self._housekeeping_ns,
        ]
        self._due_ns = due_ns = min([each for each in deadlines if each is not None])
        return max(0, -(-(due_ns - time.monotonic_ns()) // 1_000_000))

    def feed(self, event: object) -> None:
        """Hand an event to the core and perform its actions.

        Events that those actions bring up are handed over after them.
        """
        self._inbox.append(event)
        if self._feeding:
            return
        self._feeding = True
        do = self._runner.do
        try:
            while self._inbox:
                for action in self.fleet.handle(time.monotonic_ns(), self._inbox.popleft()):
                    do(action)
        finally:
            self._feeding = False

    # -- what happened ------------------------------------------------------------------------

    def _hear_signals(self) -> None:
        for number in self._signals.hear():
            if number in (signal.SIGTERM, signal.SIGINT):
                self.shut_down(signal.Signals(number).name)
            elif number == signal.SIGUSR1:
                self._dump()
            elif number == signal.SIGHUP:
                self._reloading.reload(lambda _: None)  # the log tells the outcome

    def _hear_store(self) -> None:
        # The store answers a withdrawal before the commit that leaves the task out. The core is
        # told in that order, or it would take a withdrawn task for a stored one.
        ticket = self._store.completed()
        self.store_requests.answer()
        if ticket is not None:
            self.feed(events.Persisted(ticket))
        self._note_store_problem()

    def _note_store_problem(self) -> None:
        """Tell the core whether anything can be written."""
        problem = self._store.write_problem() or ""
        if problem != self._write_problem:
            self._write_problem = problem
            self.feed(events.StoreFailing(problem) if problem else events.StoreRecovered())

    def _hear_workers(self) -> None:
        for event in self._workers.receive():
            self.feed(event)

    def _hear_spawner(self) -> None:
        for event in self._spawner.events():
            if type(event) is events.WorkerExited:
                for word in self._workers.last_words(event.worker):  # sent before its end
                    self.feed(word)
            self.feed(event)

    def _hear_clients(self) -> None:
        for event in self._clients.receive(self.wall_ns()):
            if type(event) is events.TasksSubmitted:
                self.submit(event)
            elif type(event) is peers.AdviceWanted:
                self._clients.advise(event, fleet_view.recommended_workers(self.fleet))
            elif type(event) is peers.ResolutionWanted:
                self._clients.resolve(event, fleet_view.tasks_at(self.fleet, event.place))
            elif type(event) is PutWanted:
                puts = [(each.name, each.section) for each in event.schedules]
                self.put_schedules(puts, event.peer, event.request)
            elif type(event) is peers.SchedulesWanted:
                self._show_schedules(event)
            elif type(event) is peers.HistoryWanted:
                recall(self, self._clients, event)
            else:
                self.feed(event)

    def submit(self, event: events.TasksSubmitted) -> None:
        """Feed new tasks: complete what `@task` declares, refuse what gives a secret away."""
        event = self._redaction.refuse(event)
        tasks = self._declarations.fill_in(event.tasks)
        if tasks is not event.tasks:
            event = msgspec.structs.replace(event, tasks=tasks)
        self.feed(event)

    def put_schedules(
        self,
        puts: list[tuple[str, bytes]],
        peer: bytes,
        request: int = 0,
        *,
        paused: frozenset[str] = frozenset(),
        replace: bool = True,
        dry_run: bool = False,
    ) -> None:
        """Feed schedules that are added at run time: refuse those that a file could not have."""
        usable, rejected = read_puts(self._config, puts)
        said = (usable, rejected, peer, request, paused, replace, dry_run)
        self.feed(schedule_events.SchedulePutRequested(*said))

    def _show_schedules(self, wanted: peers.SchedulesWanted) -> None:
        asked, now_ns, more = wanted.message, self.now_ns(), False
        if asked.name:
            found = find_schedule(self.fleet, asked.name, now_ns)
            views = [found] if found is not None else []
        else:
            views, more = list_schedules(
                self.fleet, now_ns, after=asked.after, limit=SCHEDULES_SHOWN_MAX
            )
        self._clients.show_schedules(wanted, views, more)

    def _hear_the_rest(self, ready: list[int]) -> None:
        """Hear the parts whose news nobody waits for, and the cluster where there is one."""
        if self._node is not None:
            for event in self._node.receive():
                self.feed(event)
        if self._memory.fileno() in ready and (sample := self._memory.hear()) is not None:
            self.feed(sample)
        if self.artefacts.fileno() in ready:
            self.artefacts.settle()
        if self._sidecars.fileno() in ready:
            for event in self._sidecars.events():
                self.feed(event)

    def _hear_clock(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._due_ns:
            return  # a deadline that passed in this turn is for the next, which does not sleep
        due_ns = self.fleet.next_deadline()
        if due_ns is not None and due_ns <= now_ns:
            self.feed(events.Ticked())
        if (control_ns := self._control.next_deadline()) is not None and control_ns <= now_ns:
            self._control.tick(now_ns)
        self._runner.tick(now_ns)
        self.outputs.tick(now_ns)
        if self._spawner.is_due(now_ns):
            self._hear_spawner()
        if now_ns >= self._housekeeping_ns:
            self._housekeeping_ns = now_ns + HOUSEKEEPING_NS
            self._keep_house(now_ns)

    def _keep_house(self, now_ns: int) -> None:
        """Do what is not urgent, once a second."""
        self._read_clock()
        self._oom.sample(now_ns)
        self._hear_spawner()  # orphans are reaped there, and nothing announces them
        self._runner.close_account(now_ns)
        self._memory.account(self.fleet, now_ns)
        self.store_requests.repeat()
        self._calls.begin()
        slots = {slot.name for pool in self.fleet.pools.values() for slot in pool.slots}
        self.outputs.keep_house(slots | self.fleet.pools.keys())
        for report in self._problems.look(now_ns):
            self._runner.report(report)
        self._clients.tidy_up(self._lookups.awaited_bytes)
        self._workers.tidy_up()
        if self._node is not None:
            self._node.tidy_up()
        self._trimming.look(now_ns, self._config.store, self._clock.forgets())

    # -- the shell, as its parts see it (shell.py) ----------------------------------------------

    def shut_down(self, reason: str) -> None:
        self.feed(events.ShutdownRequested(reason, sockets_survive=self._sockets_survive))

    def status(self) -> FleetStatus:
        return fleet_view.fleet_status(
            self.fleet,
            self.now_ns(),
            pid=os.getpid(),
            started_ns=self._started_ns,
            containment=self._spawner.containment(),
            problem=self.problem,
            ready=self.ready,
            last_words=self.outputs.last_words,
        )

    def find_in_cluster(self, wanted: FindTasks, found: Callable[[FoundTasks], None]) -> None:
        if self._node is None:
            found(FoundTasks(0, reason="this machine is no node of a cluster"))
        else:
            self._node.find(wanted, found)

    def memory_status(self) -> MemoryStatus:
        return self._memory.status(self.fleet, self.now_ns())

    @property
    def ready(self) -> bool:
        return self._systemd_status.ready

    @property
    def problem(self) -> str:
        return self._problems.text

    def signal_worker(self, worker: int, number: int) -> None:
        self._spawner.signal(worker, number)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return self._clock.now_ns()

    # -- a reload, a signal, the end ------------------------------------------------------------

    def _adopt(self, config: Config) -> None:
        """Use another configuration; the core is told its part by an event."""
        self._config = config
        self._redaction = Redaction(config.supervisor.redact)
        self._memory.follow(config.memory, config.monitor)
        log.set_level(config.supervisor.log_level)
        self._runner.task_lines.allow(config.supervisor.log_tasks)

    def _dump(self) -> None:
        log.note("daemon.state", state=msgspec.json.encode(self.status()).decode())

    def _leave(self, code: int) -> None:
        """End the loop: the core has nothing left to do."""
        self._over, self.exit_code = True, code

    def _close(self) -> bool:
        """Do the last steps, even after a failure; return whether all succeeded."""
        steps: tuple[Callable[[], object], ...] = (
            self._systemd_status.stopping,
            self._runner.close_account,
            self._control.answer_all,
            lambda: self._control.serve(self.now_ns()),  # sends the last answers
            self._signals.ignore,
            self._sidecars.close,
            self._runner.cleanups.kill,
            self._calls.close,
            self._memory.close,
            self._spawner.close,
            self._socket_files.remove,
            self._control.close,
            self._clients.close,
            self._workers.close,
            self._node.close if self._node is not None else _nothing,
            self.artefacts.close,
            self._store.close,
            self._signals.close,
            self._epoll.close,
            self._systemd_status.close,
            self._threads.close,
        )
        clean = _do_all(steps)
        log.note("daemon.stopped")
        return clean


def _nothing() -> None: ...


def _do_all(steps: Iterable[Callable[[], object]]) -> bool:
    """Do each step, even after a failure; log failures; return whether all succeeded."""
    clean = True
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the other steps must be done too
            clean = False
            kind = "" if isinstance(error, MusterdError) else f"{type(error).__name__}: "
            log.note("daemon.unclean", "error", reason=f"{kind}{error}")
    return clean
