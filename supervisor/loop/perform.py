"""The action runner: one method for each action of the core, and no decision in any of them.

What the store or a process answers goes back to the core as an event, whatever it is: which tasks
are missing, late, taken or refused is decided there. Two things are left to the runner, because
they concern the carrying out alone:

limits   What the store has no room to look up for a handler is refused (`StoreRequests.full`).
dump     KillWorker(dump=True) asks for the worker's stacks and kills DUMP_PAUSE_NS later, whatever
         happens in between. The core has given the worker up already.
"""

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from musterd.ipc.wire.messages import Change
from musterd.ipc.wire.paths import TASKS_VARIABLE
from musterd.ipc.wire.signals import DUMP_SIGNAL, INTERRUPT_SIGNAL
from musterd.supervisor.api.convert import no_such_task
from musterd.supervisor.api.rpc import FAILED, RpcError
from musterd.supervisor.config.schema import Config
from musterd.supervisor.control.answers import LaterAnswers
from musterd.supervisor.control.commands.debug import DebugCommands
from musterd.supervisor.control.server import ControlServer
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.events import ALERTS, CLUSTER, EVENTS, WEB
from musterd.supervisor.core.model.watching import HISTORY, history_key
from musterd.supervisor.core.tasks.refusals import UNREADABLE
from musterd.supervisor.log import log
from musterd.supervisor.loop.dead_events import EVENT as DEAD
from musterd.supervisor.loop.dead_events import DeadTasks
from musterd.supervisor.loop.task_log import TaskLines
from musterd.supervisor.processes.cleanup import CleanedUp, Cleanups
from musterd.supervisor.processes.sidecars import SidecarProcesses
from musterd.supervisor.processes.spawner import Spawner
from musterd.supervisor.service.reload import Reloading
from musterd.supervisor.settings import worker_environment
from musterd.supervisor.settings.artefacts import with_artefacts
from musterd.supervisor.settings.node import node_settings
from musterd.supervisor.settings.policy import worker_settings_of
from musterd.supervisor.settings.sessions import session_access, with_sessions
from musterd.supervisor.settings.sidecars import alert_settings, publisher_settings, web_settings
from musterd.supervisor.shell import Shell
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.declarations import Declarations
from musterd.supervisor.sockets.lookups import tell_unfinished
from musterd.supervisor.sockets.resend_checks import ResendChecks
from musterd.supervisor.sockets.workers import WorkerPort
from musterd.supervisor.store.interface import (
    FindFact,
    FindFacts,
    FindStranded,
    FindTasks,
    Page,
    ReadQueued,
    Store,
    StoredTask,
    StrandedTasks,
    Withdraw,
)
from musterd.supervisor.store.requests import BUSY
from musterd.supervisor.system.background_calls import BackgroundCalls
from musterd.supervisor.views.history import entries_of, with_content

if TYPE_CHECKING:  # nobody without a cluster pays for it
    from musterd.supervisor.sockets.node import ClusterAction, NodePort

DUMP_PAUSE_NS = 100_000_000  # between the request for a worker's stacks and its SIGKILL
LOSSES = ("worker.crashed", "worker.fatal")  # reports that tell what the worker said last
CHANGED = "task.changed"
RETURNS = ("task.retry", "task.crashed", "task.interrupted")  # the task will run once more


class ActionRunner:
    def __init__(
        self,
        shell: Shell,
        *,
        store: Store,
        spawner: Spawner,
        workers: WorkerPort,
        clients: ClientPort,
        answers: LaterAnswers,
        debug: DebugCommands,
        control: ControlServer,
        sidecars: SidecarProcesses,
        calls: BackgroundCalls,
        declarations: Declarations,
        reloading: Reloading,
        leave: Callable[[int], None],
        log_tasks: int,
        tasks_socket: str,
        node: "NodePort | None" = None,
    ) -> None:
        """`leave` ends the loop; workers' own clients use `tasks_socket`, the sidecar `node`."""
        self._shell = shell
        self._store, self._spawner = store, spawner
        self._workers, self._clients = workers, clients
        self._answers, self._control = answers, control
        self._sidecars, self._calls = sidecars, calls
        self._reloading = reloading
        self._node = node
        self.task_lines = TaskLines(shell.fleet, log_tasks)
        self._kills: list[tuple[int, int]] = []  # (when, worker): after their stacks were asked for
        self._tasks_socket = tasks_socket
        self.cleanups = Cleanups()
        self.resend_checks = ResendChecks(shell)
        self._dead = DeadTasks(control.publish)
        self._debug, self._declarations = debug, declarations
        self._leave = leave
        self._table = self._make_table()

    def _make_table(self) -> dict[type, Callable[[Any], None]]:
        clients, spawner, debug = self._clients, self._spawner, self._debug
        return {
            actions.Persist: self._persist,
            actions.CheckResent: lambda action: self.resend_checks.check(action.submitted),
            actions.Withdraw: self._withdraw,
            actions.FindEnded: self._find_ended,
            actions.ReadDiskTasks: self._read_disk_tasks,
            actions.FindStranded: self._find_stranded,
            actions.LookUp: self._look_up,
            actions.Acknowledge: self._acknowledge,
            actions.DropRequest: lambda a: clients.drop(a.request, a.reason),
            actions.Deliver: self._deliver,
            actions.TellMissing: self._tell_missing,
            actions.TellChanges: lambda a: clients.newest_changes(a.peer, a.changes),
            actions.ForgetPicture: lambda a: self._shell.artefacts.forget_attached(a.task),
            actions.TellProgress: lambda a: clients.progress(a.peers, a.note),
            actions.FindState: self._find_state,
            actions.AnswerState: self._answer_state,
            actions.AnswerLock: self._answer_lock,
            actions.AnswerWait: self._answer_wait,
            actions.StartForkServer: self._start_fork_server,
            actions.StopForkServer: lambda a: spawner.stop_fork_server(a.pool, a.build),
            actions.Declare: lambda a: self._declarations.declare(a.pool, a.declarations),
            actions.KeepSpares: lambda a: spawner.keep_spares(frozenset(a.kept)),
            actions.SpawnWorker: lambda a: spawner.spawn(a.worker, a.pool, a.index, a.build),
            actions.AssignLeases: self._assign,
            actions.RecallLeases: self._recall,
            actions.CancelRunning: self._cancel,
            actions.StopWorker: self._stop_worker,
            actions.TerminateWorker: lambda a: spawner.terminate(a.worker),
            actions.KillWorker: self._kill,
            actions.AnswerDebugger: self._answer_debugger,
            actions.BreakIntoHandler: self._break_in,
            actions.ShowDebugger: lambda a: debug.show(a.worker, a.text, a.prompt),
            actions.CloseDebugger: lambda a: debug.close(a.worker, a.reason),
            actions.ReadBoard: self._read_board,
            actions.ReadBoards: self._read_boards,
            actions.StartSidecar: self._start_sidecar,
            actions.StopSidecar: lambda a: self._sidecars.signal(a.name, a.number, signal.SIGTERM),
            actions.KillSidecar: lambda a: self._sidecars.signal(a.name, a.number, signal.SIGKILL),
            actions.GreetCluster: self._tell_sidecar,
            actions.ShowPools: self._tell_sidecar,
            actions.WantAttempts: self._tell_sidecar,
            actions.TellCluster: self._tell_sidecar,
            actions.AskStates: self._tell_sidecar,
            actions.AskLocks: self._tell_sidecar,
            actions.NewsTold: self._tell_sidecar,
            actions.ServeClients: lambda a: clients.serve(a.serve),
            actions.Report: self.report,
            actions.RunCleanup: self._clean_up,
            actions.Exit: lambda action: self._leave(action.code),
        }

    def do(self, action: actions.Action) -> None:
        self._table[type(action)](action)

    # -- what comes later ---------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        """When tick() is due, or None."""
        return self._kills[0][0] if self._kills else None

    def tick(self, now_ns: int) -> None:
        while self._kills and self._kills[0][0] <= now_ns:
            self._spawner.kill(self._kills.pop(0)[1])

    def close_account(self, now_ns: int | None = None) -> None:
        """Log how much got no line of its own and, given `now_ns`, why tasks wait."""
        self.task_lines.count()
        self._dead.count()
        if now_ns is not None:
            self.task_lines.look(now_ns)
        log.tell_left_out()

    # -- one for each action ------------------------------------------------------------------

    def _persist(self, action: actions.Persist) -> None:
        self._store.write(action)
        if action.finished or action.added or action.bulk:
            self.task_lines.persisted(time.monotonic_ns(), action)
        if action.finished:
            self._dead.take(action.finished)
        if self._store.immediate:
            self._shell.feed(events.Persisted(action.ticket))

    def _answer_state(self, a: actions.AnswerState) -> None:
        self._workers.answer_state(a.worker, a.request, a.value, a.error)

    def _answer_lock(self, a: actions.AnswerLock) -> None:
        self._workers.answer_lock(a.worker, a.request, a.taken, a.holder, a.error)

    def _tell_sidecar(self, action: "ClusterAction") -> None:
        assert self._node is not None, "nobody has said hello"
        if type(action) is actions.TellCluster:
            self.task_lines.ended(action.ends)
        self._node.perform(action)

    def _withdraw(self, action: actions.Withdraw) -> None:
        def withdrawn(seqs: list[int]) -> None:
            self.task_lines.withdrawn(seqs)
            self._shell.feed(events.TasksWithdrawn(seqs))

        self._shell.store_requests.ask(Withdraw(action.seqs), withdrawn)

    def _find_ended(self, action: actions.FindEnded) -> None:
        def unknown() -> None:
            self._shell.feed(events.EndedUnknown(action.requested, action.ids, action.rejected))

        def found(stored: list[StoredTask]) -> None:
            ended = [
                events.EndedTask(each.seq, each.spec, each.outcome.state)
                for each in stored
                if each.outcome is not None
            ]
            self._shell.feed(
                events.EndedFound(action.requested, action.ids, ended, action.rejected)
            )

        self._shell.store_requests.ask(FindTasks(action.ids), found, unknown)

    def _read_disk_tasks(self, action: actions.ReadDiskTasks) -> None:
        def read(page: Page) -> None:
            self._shell.feed(events.DiskTasksRead(action.ticket, page.tasks, page.unread))

        self._shell.store_requests.ask(ReadQueued(action.ids), read)

    def _find_stranded(self, action: actions.FindStranded) -> None:
        def found(page: StrandedTasks) -> None:
            self._shell.feed(
                events.StrandedFound(action.pool, action.request, page.tasks, page.after_seq)
            )

        self._shell.store_requests.ask(FindStranded(action.pool, action.after_seq), found)

    def _look_up(self, action: actions.LookUp) -> None:
        peer, ids = action.peer, action.ids
        if peer not in self._answers:
            self._clients.look_up(peer, ids)
            return

        def found(stored: list[StoredTask]) -> None:
            outcomes = [each.outcome for each in stored if each.outcome is not None]
            if outcomes and peer in self._answers:
                self._answers.deliver(peer, outcomes)
            tell_unfinished(self._shell, peer, ids, stored)

        def unknown() -> None:
            self._answers.fail(peer, RpcError(FAILED, UNREADABLE))

        self._shell.store_requests.ask(FindTasks(ids), found, unknown)

    def _acknowledge(self, action: actions.Acknowledge) -> None:
        if action.peer in self._answers:
            self._answers.acknowledge(action.peer, action.rejected)
        else:
            self._clients.acknowledge(action.request, action.rejected)

    def _deliver(self, action: actions.Deliver) -> None:
        if action.peer in self._answers:
            self._answers.deliver(action.peer, action.outcomes)
        else:
            self._clients.deliver(action.peer, action.outcomes)

    def _tell_missing(self, action: actions.TellMissing) -> None:
        if action.peer in self._answers:
            self._answers.fail(action.peer, no_such_task(action.ids[0]))
        else:
            self._clients.missing(action.peer, action.ids)

    def _find_state(self, action: actions.FindState) -> None:
        def found(value: bytes | None) -> None:
            self._workers.answer_state(action.worker, action.request, value)

        def unknown() -> None:
            self._workers.answer_state(action.worker, action.request, None, UNREADABLE)

        if self._shell.store_requests.full:
            self._workers.answer_state(action.worker, action.request, None, BUSY)
            return
        self._shell.store_requests.ask(FindFact(action.kind, action.key), found, unknown)

    def _answer_wait(self, action: actions.AnswerWait) -> None:
        self._workers.answer_wait(action.worker, action.request, action.ids, action.reason)
        self._spawner.signal(action.worker, INTERRUPT_SIGNAL)

    def _answer_debugger(self, action: actions.AnswerDebugger) -> None:
        self._workers.answer_debugger(action.worker, action.request, action.line)

    def _break_in(self, action: actions.BreakIntoHandler) -> None:
        self._workers.break_in(action.worker, action.lease, action.leave)
        self._spawner.signal(action.worker, INTERRUPT_SIGNAL)

    def _start_fork_server(self, action: actions.StartForkServer) -> None:
        pool = self._reloading.pool_config(action.pool, action.build)
        config, settings = self._reloading.config, worker_settings_of(pool)
        env = worker_environment.given(action.pool, pool, config)
        env = {TASKS_VARIABLE: self._tasks_socket, **env}
        access = session_access(action.pool, pool, config)
        if access.problem:
            self.report(
                actions.Report("session.no_key", "error", pool=action.pool, reason=access.problem)
            )
        self._spawner.start_fork_server(
            action.pool,
            pool.worker,
            msgspec.msgpack.encode(pool.options),
            env,
            with_artefacts(with_sessions(settings, access), config),
            build=action.build,
        )

    def _start_sidecar(self, action: actions.StartSidecar) -> None:
        if action.name == CLUSTER:
            self._start_cluster(action.number)
            return
        settings = _SIDECAR_SETTINGS[action.name](self._reloading.config)
        self._sidecars.start(action.name, action.number, settings)

    def _start_cluster(self, number: int) -> None:
        """Start the sidecar that serves tasks.sock in our place."""
        if self._node is None:  # a reload has just asked for it, and it needs a restart
            return
        listener = self._clients.router.listener_fd
        settings = msgspec.structs.replace(
            node_settings(self._reloading.config),
            token=self._node.new_token(),
            tasks_fd=listener,
        )
        self._sidecars.start(CLUSTER, number, settings, [listener])

    def _assign(self, action: actions.AssignLeases) -> None:
        self.task_lines.assigned(time.monotonic_ns(), action.leases)
        if self._node is not None:
            self.task_lines.claimed(time.monotonic_ns(), action.worker, action.leases)
        self._workers.assign(action.worker, action.leases)

    def _recall(self, action: actions.RecallLeases) -> None:
        self._workers.recall(action.worker)
        self._spawner.signal(action.worker, INTERRUPT_SIGNAL)

    def _cancel(self, action: actions.CancelRunning) -> None:
        self._workers.cancel(action.worker, action.lease)
        self._spawner.signal(action.worker, INTERRUPT_SIGNAL)

    def _stop_worker(self, action: actions.StopWorker) -> None:
        self._workers.stop(action.worker, self._shell.fleet.policy.stop_timeout_ns)
        self._spawner.signal(action.worker, INTERRUPT_SIGNAL)

    def _kill(self, action: actions.KillWorker) -> None:
        if action.dump:
            self._spawner.signal(action.worker, DUMP_SIGNAL)
            self._spawner.signal(action.worker, signal.SIGCONT)  # a stopped worker dumps nothing
            self._kills.append((time.monotonic_ns() + DUMP_PAUSE_NS, action.worker))
        else:
            self._spawner.kill(action.worker)

    def _read_board(self, action: actions.ReadBoard) -> None:
        reading = self._spawner.board(action.worker)
        if reading is None:
            return  # the worker is gone: its exit is on its way
        self._shell.feed(
            events.BoardRead(action.worker, reading.lease, reading.since_ns, beside=reading.beside)
        )

    def _clean_up(self, action: actions.RunCleanup) -> None:
        if not action.names:
            self._shell.feed(events.CleanupFinished())
            return

        def cleaned_up(done: list[CleanedUp]) -> None:
            for each in done:
                event = "cleanup.failed" if each.problem else "cleanup.done"
                level = "error" if each.problem else "info"
                reason = f"{each.name}: {each.problem}" if each.problem else each.name
                self.report(actions.Report(event, level, reason=reason, seconds=each.seconds))
            failed = [each.name for each in done if each.problem]
            self._shell.feed(
                events.CleanupFinished(f"clean-up failed: {', '.join(failed)}" if failed else "")
            )

        self._calls.run(
            "cleanup", lambda: self.cleanups.run(action.names, action.within_ns), cleaned_up
        )

    def _read_boards(self, action: actions.ReadBoards) -> None:
        pulses = [(worker, self._spawner.pulse(worker)) for worker in action.workers]
        boards = [events.BoardRead(worker, *pulse) for worker, pulse in pulses if pulse is not None]
        self._shell.feed(events.BoardsRead(boards))

    def report(self, action: actions.Report) -> None:
        if action.event in LOSSES:
            words = self._shell.outputs.last_words(action.worker)
            action = msgspec.structs.replace(action, output=words)
        told = bool(action.task) and self.task_lines.tells(action.task)
        if told and action.event in RETURNS:
            self.task_lines.back(action.task, time.monotonic_ns())
        logged = action
        if action.traceback:  # in the log; those who follow events ask for the task
            action = msgspec.structs.replace(action, traceback="")
        if action.event == DEAD:  # of the cluster: the others are told by the store's records
            log.write(msgspec.structs.replace(logged, event="task.failed", level="warning"))
            self._dead.tell(action)
            return
        if action.event != CHANGED:
            log.write(logged, always=told)
            self._control.publish(action)
        elif action.number and not action.summary:
            self._find_change(action)
        else:  # of the cluster, with its content; or of a version that kept no history
            self._tell_change(action)

    def _find_change(self, report: actions.Report) -> None:
        """Tell of a change with its content, which is on disk."""

        def found(values: list[bytes | None]) -> None:
            self._tell_change(with_content(report, *entries_of(values)))

        numbers = (report.number_before, report.number)
        keys = [history_key(report.schedule, number) for number in numbers]
        self._shell.store_requests.ask_slow(
            FindFacts(HISTORY, keys), found, lambda: self._tell_change(report)
        )

    def _tell_change(self, report: actions.Report) -> None:
        log.write(report, always=self.task_lines.tells(report.task))
        self._control.publish(report)
        self._clients.changed(
            Change(
                report.schedule,
                report.task,
                report.digest,
                int(report.changed_at * 1e9),
                report.number,
                report.number_before,
                report.again,
            )
        )
        self._shell.feed(events.ChangeTold(report.schedule, report.task, report.number))


_SIDECAR_SETTINGS: dict[str, Callable[[Config], msgspec.Struct]] = {
    WEB: web_settings,
    ALERTS: alert_settings,
    EVENTS: publisher_settings,
}
