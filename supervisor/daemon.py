"""The loop: poll, turn what happened into events, have the actions of the core carried out.

One thread. Nothing here decides anything, and nothing here blocks: the disk is written and read by
the store's threads, processes are made by nurseries, temporary directories are removed by the
spawner's janitor. A turn of the loop longer than SLOW_TURN_NS is counted and logged.
"""

import gc
import os
import secrets
import signal
import socket
import time
from collections import deque
from random import Random
from typing import Any

import msgspec
import zmq

from musterd import __version__
from musterd.ipc.messages import TaskView
from musterd.supervisor import journal, overview, paths
from musterd.supervisor.client_port import ClientPort, Inspection
from musterd.supervisor.commands import Commands
from musterd.supervisor.config_schema import Config
from musterd.supervisor.control import ControlServer
from musterd.supervisor.control_socket import group_id_of
from musterd.supervisor.core import actions, events
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.deeds import Deeds
from musterd.supervisor.notify import Notifier
from musterd.supervisor.policies import fleet_policy
from musterd.supervisor.questions import Questions
from musterd.supervisor.spawner import Spawner
from musterd.supervisor.status import FleetStatus
from musterd.supervisor.store import Store, StoredTask, open_store
from musterd.supervisor.targets import Targets
from musterd.supervisor.worker_port import WorkerPort

SLOW_TURN_NS = 50_000_000
HOUSEKEEPING_NS = 1_000_000_000
TRIM_INTERVAL_NS = 60_000_000_000
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Collecting garbage often costs more than it finds here: the hot path makes no cycles.
GC_THRESHOLDS = (50_000, 20, 50)


class Daemon:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._started_ns = time.monotonic_ns()
        runtime = paths.runtime_dir(config.supervisor.runtime_dir)
        state = paths.state_dir(config.supervisor.state_dir)
        self._store: Store = open_store(
            paths.store_file(state), config.store.durability, config.store.keep_results_ns
        )
        self.fleet = Fleet(fleet_policy(config), Random(), self._store.last_seq())
        self._context: zmq.Context[Any] = zmq.Context()
        self._spawner = Spawner(
            str(paths.workers_socket(runtime)), state / "tmp", config.supervisor.containment
        )
        epoch = secrets.token_hex(8)
        gid = group_id_of(config.supervisor.tasks_group)
        self._workers = WorkerPort(
            self._context, paths.workers_socket(runtime), self._spawner.worker_of
        )
        self._clients = ClientPort(
            self._context, paths.tasks_socket(runtime), epoch, -1 if gid is None else gid
        )
        self._commands = Commands(self)
        self._control = ControlServer(
            paths.control_socket(runtime), config.supervisor.control_group, self._commands
        )
        self._notifier = Notifier()
        self._targets = Targets()
        self._signals, self._signal_wake = socket.socketpair()
        self._inbox: deque[object] = deque()
        self._feeding = False
        self._over = False
        self._ready = False
        self._questions = Questions(self._store)
        self._deeds = Deeds(
            self,
            config,
            store=self._store,
            spawner=self._spawner,
            workers=self._workers,
            clients=self._clients,
            commands=self._commands,
            control=self._control,
        )
        self._housekeeping_ns = self._started_ns + HOUSEKEEPING_NS
        self._trim_at_ns = self._started_ns + TRIM_INTERVAL_NS
        self._store_problem: str | None = None
        self.slow_turns = 0
        self._poller = zmq.Poller()

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Until a shutdown has gone through all its phases."""
        try:
            self._open()
            while not self._over:
                self._turn()
        finally:
            self._close()

    def _open(self) -> None:
        self._signals.setblocking(False)
        self._signal_wake.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, _only_wake)
        signal.set_wakeup_fd(self._signal_wake.fileno(), warn_on_full_buffer=False)
        for source in (
            self._workers.socket,
            self._clients.socket,
            self._store.fileno(),
            self._spawner.fileno(),
            self._control.fileno(),
            self._signals.fileno(),
        ):
            self._poller.register(source, zmq.POLLIN)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        now_ns = self.now_ns()
        recovered = self._store.recover(now_ns, self.wall_ns())
        journal.note("daemon.starting", version=__version__, pid=os.getpid(), tasks=len(recovered))
        self.feed(events.TasksRecovered(recovered))
        self.feed(events.Started())

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._sleep_ms()))
        began_ns = time.monotonic_ns()
        if self._signals.fileno() in ready:
            self._hear_signals()
        if self._store.fileno() in ready:
            self._hear_store()
        if self._workers.socket in ready:
            self._hear_workers()
        if self._spawner.fileno() in ready:
            self._hear_spawner()
        if self._clients.socket in ready:
            self._hear_clients()
        if self._control.fileno() in ready:
            self._control.serve(self.now_ns())
        self._hear_clock()
        self._commands.settle()
        self._tell_systemd()
        turn_ns = time.monotonic_ns() - began_ns
        if turn_ns > SLOW_TURN_NS:
            self.slow_turns += 1
            journal.note("loop.slow", "warning", seconds=f"{turn_ns / 1e9:.3f}")

    def _sleep_ms(self) -> int:
        deadlines = [
            self.fleet.next_deadline(),
            self._control.next_deadline(),
            self._deeds.next_deadline(),
            self._housekeeping_ns,
        ]
        due_ns = min(each for each in deadlines if each is not None)
        return max(0, -(-(due_ns - time.monotonic_ns()) // 1_000_000))

    def feed(self, event: object) -> None:
        """Hand an event to the core and do what it says; what that brings up comes after."""
        self._inbox.append(event)
        if self._feeding:
            return
        self._feeding = True
        do = self._deeds.do
        try:
            while self._inbox:
                for action in self.fleet.handle(time.monotonic_ns(), self._inbox.popleft()):
                    do(action)
        finally:
            self._feeding = False

    # -- what happened ------------------------------------------------------------------------

    def _hear_signals(self) -> None:
        try:
            numbers = self._signals.recv(64)
        except BlockingIOError:
            return
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT):
                self.feed(events.ShutdownRequested(signal.Signals(number).name))
            elif number == signal.SIGUSR1:
                self._dump()
            elif number == signal.SIGHUP:
                journal.note("daemon.reload", "warning")

    def _hear_store(self) -> None:
        ticket = self._store.completed()
        if ticket is not None:
            self.feed(events.Persisted(ticket))
        self._questions.answer()

    def _hear_workers(self) -> None:
        for event in self._workers.receive():
            self.feed(event)

    def _hear_spawner(self) -> None:
        for event in self._spawner.events():
            if type(event) is events.NurseryReady:
                self._targets.declare(event.pool, event.declarations)
            elif type(event) is events.WorkerExited:
                self._hear_workers()  # its last results count before its end does
                self._workers.forget(event.worker)
            self.feed(event)

    def _hear_clients(self) -> None:
        for event in self._clients.receive(self.wall_ns()):
            if type(event) is events.TasksSubmitted:
                self.submit(event)
            elif type(event) is Inspection:
                self._inspect(event)
            else:
                self.feed(event)

    def submit(self, event: events.TasksSubmitted) -> None:
        """Feed new tasks, each with its target."""
        tasks = self._targets.fill_in(event.tasks)
        if tasks is not event.tasks:
            event = msgspec.structs.replace(event, tasks=tasks)
        self.feed(event)

    def _inspect(self, inspection: Inspection) -> None:
        view = self._live_view(inspection.id)
        if view is not None:
            self._clients.inspected(inspection, view)
            return

        def found(stored: list[StoredTask]) -> None:
            # A repeated submit right before it waited for an answer too: it may be live by now.
            view = overview.stored_view(stored[0]) if stored else self._live_view(inspection.id)
            self._clients.inspected(inspection, view)

        self._questions.find([inspection.id], found)

    def _live_view(self, id_: str) -> TaskView | None:
        task = self.fleet.tasks.get(id_)
        return None if task is None else overview.live_view(task, self.now_ns())

    def _hear_clock(self) -> None:
        now_ns = time.monotonic_ns()
        due_ns = self.fleet.next_deadline()
        if due_ns is not None and due_ns <= now_ns:
            self.feed(events.Ticked())
        control_ns = self._control.next_deadline()
        if control_ns is not None and control_ns <= now_ns:
            self._control.tick(now_ns)
        self._deeds.tick(now_ns)
        if now_ns >= self._housekeeping_ns:
            self._housekeeping_ns = now_ns + HOUSEKEEPING_NS
            self._keep_house(now_ns)

    def _keep_house(self, now_ns: int) -> None:
        """Once a second: what is not urgent."""
        self._hear_spawner()  # orphans are reaped there, and nothing announces them
        self._deeds.close_account(now_ns)
        self._questions.repeat()
        problem = self._store.problem()
        if problem != self._store_problem:
            self._store_problem = problem
            self._deeds.report(
                actions.Report("store.failing", "error", reason=problem)
                if problem
                else actions.Report("store.recovered")
            )
        if now_ns >= self._trim_at_ns:
            self._trim_at_ns = now_ns + TRIM_INTERVAL_NS
            self._store.trim(self._config.store.keep_results_ns)

    # -- for the commands ---------------------------------------------------------------------

    def leave(self) -> None:
        """The core has nothing left to do."""
        self._over = True

    def status(self) -> FleetStatus:
        return overview.fleet_status(
            self.fleet,
            self.now_ns(),
            pid=os.getpid(),
            started_ns=self._started_ns,
            containment=self._spawner.containment(),
            problem=self._store_problem or "",
        )

    def signal_worker(self, worker: int, number: int) -> None:
        self._spawner.signal(worker, number)

    @property
    def questions(self) -> Questions:
        return self._questions

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()

    # -- for the operator ---------------------------------------------------------------------

    def _tell_systemd(self) -> None:
        if not self._ready and overview.settled(self.fleet):
            self._ready = True
            self._notifier.tell("READY=1")
            seconds = (self.now_ns() - self._started_ns) / 1e9
            journal.note("daemon.ready", seconds=f"{seconds:.3f}")
        if self.fleet.phase != Phase.UP:
            self._notifier.status(f"shutdown: {self.fleet.phase.name.lower()}")

    def _dump(self) -> None:
        journal.note("daemon.state", state=msgspec.json.encode(self.status()).decode())

    def _close(self) -> None:
        self._notifier.tell("STOPPING=1")
        self._deeds.close_account(2**62)
        self._commands.ending()
        self._control.serve(self.now_ns())  # the last answers go out
        signal.set_wakeup_fd(-1)
        self._spawner.close()
        self._control.close()
        self._clients.close()
        self._workers.close()
        self._context.term()
        self._store.close()
        for end in (self._signals, self._signal_wake):
            end.close()
        self._notifier.close()
        runtime = paths.runtime_dir(self._config.supervisor.runtime_dir)
        for path in (paths.tasks_socket(runtime), paths.workers_socket(runtime)):
            path.unlink(missing_ok=True)
        journal.note("daemon.stopped")


def _only_wake(_number: int, _frame: object) -> None:
    """Python needs a handler to write to the wake-up descriptor; the loop does the rest."""
