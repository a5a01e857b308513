"""Makes worker processes, watches them, ends them. The supervisor's only place that does.

Each pool has a nursery (nursery.py) that forks its workers under an init (init.py). The spawner
tells what happened as events of the core, and never blocks: everything it waits for is in one
epoll, whose descriptor the daemon polls.

    spawn() ── ForkRequest ──► nursery ── forks ──► init
               ◄── Forked ────                        the init is now our child: pidfd, GO
               ◄── WorkerPid ──────────── worker      WorkerForked
               pidfd of the init readable             WorkerExited: nothing of it is left

A worker whose fork was not reported yet has run nothing: ending it means never saying GO. Its
init sees the pipe close, ends by itself and is reaped as an orphan. A nursery is asked for a few
workers at a time, the others wait their turn; and before a slot gets a new worker, the census
(census.py) looks for what is left of the old one.

The supervisor is child subreaper, so it also inherits processes it never made. Those are told
from the daemon's own children by their session: a child the daemon starts elsewhere must stay in
the daemon's session, or its exit status may be taken here.

All methods are for the main thread: the kernel ends nurseries and inits with the *thread* that is
their parent.
"""

import functools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from musterd.ipc.errors import SpawnError
from musterd.ipc.scoreboard import Pulse, Reading
from musterd.supervisor import journal
from musterd.supervisor.births import Midwife
from musterd.supervisor.census import NURSERY, Census
from musterd.supervisor.containment import AUTO, CONTAINMENTS
from musterd.supervisor.core.events import (
    LeftoversEnded,
    NurseryExited,
    NurseryFailed,
    NurseryReady,
    SpawnFailed,
    WorkerExited,
    WorkerForked,
)
from musterd.supervisor.init import FORWARDED, PIDNS
from musterd.supervisor.janitor import Janitor
from musterd.supervisor.leftovers import Estate
from musterd.supervisor.linux import become_subreaper, kill_inherited, reap_inherited
from musterd.supervisor.nursery_messages import (
    RUNTIME,
    Forked,
    ForkFailed,
    Habits,
    NurseryDown,
    NurseryMessage,
    NurseryUp,
    WorkerPid,
)
from musterd.supervisor.oom import OomWatch
from musterd.supervisor.outputs import Outputs
from musterd.supervisor.processes import (
    Containment,
    Event,
    NurseryProcess,
    WorkerProcess,
    how_it_ended,
    send_signal,
)
from musterd.supervisor.watch import Watch

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)  # of a worker that has not begun
CLOSE_SECONDS_MAX = 10.0  # what is not dead so long after SIGKILL is stuck in the kernel
# Asked of one nursery and not reported yet. Its channel holds less than 300 requests, and a
# nursery forks one after the other: more of them on their way would gain nothing.
BIRTHS_AT_ONCE_MAX = 32

HABITS = Habits()


class Spawner:
    """Nurseries and workers of one supervisor."""

    def __init__(
        self,
        workers_socket: str,
        temp_root: Path,
        containment: str = AUTO,
        *,
        runtime: str = RUNTIME,
        oom: OomWatch | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        if containment not in CONTAINMENTS:
            raise SpawnError(
                f"containment = {containment!r} is unknown: use one of {', '.join(CONTAINMENTS)}"
            )
        become_subreaper()
        self._oom = oom or OomWatch()
        self._janitor = Janitor()
        self._watch = Watch()
        self._nurseries: dict[tuple[str, str], NurseryProcess] = {}  # that serve, or are loading
        self._living: set[NurseryProcess] = set()  # the same and those that were stopped
        self._workers: dict[int, WorkerProcess] = {}
        self._tokens: dict[str, int] = {}
        self._happened: list[Event] = []
        self._strays_due = False
        self._estate = Estate(temp_root.with_name(temp_root.name + ".run"))
        directories = self._janitor.empty(temp_root)
        if self._estate.former.processes or directories:
            self._found("", NURSERY, self._estate.former.processes, directories)
        self._midwife = Midwife(
            workers_socket,
            containment,
            runtime,
            temp_root=temp_root,
            estate=self._estate,
            janitor=self._janitor,
            outputs=outputs or Outputs(),
        )
        self._census = Census(self._estate.run, self._watch, self._janitor, temp_root, self._found)

    def fileno(self) -> int:
        """Readable when events() has something to tell."""
        return self._watch.fileno()

    # -- nurseries ----------------------------------------------------------------------------

    def start_nursery(
        self,
        pool: str,
        worker: str,
        options: bytes = b"",
        env: Mapping[str, str] | None = None,
        habits: Habits = HABITS,
        *,
        build: str = "",
    ) -> None:
        """Begins to load the worker class; NurseryReady, NurseryFailed or NurseryExited follows."""
        assert (pool, build) not in self._nurseries, f"pool {pool!r} has a nursery"
        try:
            nursery = self._midwife.open_nursery(pool, worker, options, env or {}, habits)
        except OSError as error:
            self._tell(NurseryExited(pool, f"the nursery cannot be started: {error}", build))
            return
        nursery.build = build
        self._nurseries[nursery.key] = nursery
        self._living.add(nursery)
        self._watch.add(nursery.channel.fileno(), functools.partial(self._channel_ready, nursery))
        self._watch.add(nursery.pidfd, functools.partial(self._nursery_ended, nursery))

    def stop_nursery(self, pool: str, build: str = "") -> None:
        """Ends it at once; its workers live on and no event follows."""
        nursery = self._nurseries.pop((pool, build), None)
        if nursery is not None:
            send_signal(nursery.pidfd, signal.SIGKILL)

    def containment(self) -> dict[str, Containment]:
        """What is in force, for each pool whose nursery is up."""
        nurseries = self._nurseries.values()
        return {each.pool: each.containment for each in nurseries if each.containment is not None}

    # -- workers ------------------------------------------------------------------------------

    def spawn(self, worker: int, pool: str, index: int, build: str = "") -> None:
        """Asks the pool's nursery for a worker; WorkerForked or SpawnFailed follows."""
        nursery = self._nurseries.get((pool, build))
        if nursery is None:
            self._tell(SpawnFailed(worker, f"pool {pool!r} has no nursery"))
            return
        nursery.wanted[worker] = index
        self._watch.wake()

    def terminate(self, worker: int) -> None:
        """SIGTERM to the worker alone."""
        self.signal(worker, signal.SIGTERM)

    def signal(self, worker: int, signum: int) -> bool:
        """Sends it to the worker alone; False if there is no such process any more or not yet."""
        record = self._workers.get(worker)
        if record is None:
            return signum in ENDS and self._call_off(worker, signum)
        record.ended |= signum == signal.SIGKILL
        if record.pidfd >= 0:
            return send_signal(record.pidfd, signum)
        if record.init_fd >= 0:  # on its way; the init forwards what a process is ended with
            return signum in FORWARDED and send_signal(record.init_fd, signum)
        if signum in ENDS:
            self._give_up(record, WorkerExited(worker, -signum, 0))
            return True
        return False

    def kill(self, worker: int) -> None:
        """SIGKILL to the worker and everything it started."""
        record = self._workers.get(worker)
        if record is None:
            self._call_off(worker, signal.SIGKILL)
            return
        record.ended = True
        if record.init_fd < 0:
            self._give_up(record, WorkerExited(worker, -signal.SIGKILL, 0))
        else:
            record.kill()

    def board(self, worker: int) -> Reading | None:
        """A look at its scoreboard; None when it is gone."""
        return self._workers[worker].board.read() if worker in self._workers else None

    def pulse(self, worker: int) -> Pulse | None:
        """A short look at the same."""
        return self._workers[worker].board.pulse() if worker in self._workers else None

    def inits(self) -> dict[int, int]:
        """The pid of the process that each worker and all it started are below."""
        return {number: record.init_pid for number, record in self._workers.items() if record.pid}

    def pid(self, worker: int) -> int:
        """The worker's pid as the host sees it; 0 when it is gone or not known yet."""
        return self._workers[worker].pid if worker in self._workers else 0

    def worker_of(self, token: str) -> int | None:
        """Whose token this is. Answers once: after that the token is worth nothing."""
        return self._tokens.pop(token, None)

    # -- what happened ------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """What happened since the last call. To be called now and then also when not readable,
        because orphans are reaped here."""
        self._watch.turn()
        self._ask_for_wanted()
        if not any(nursery.awaited for nursery in self._living):
            # Else an orphan may be an init that is about to be reported.
            reap_inherited(self._known())
            if self._strays_due:
                self._strays_due = kill_inherited(self._known())
        happened, self._happened = self._happened, []
        return happened

    def close(self) -> None:
        """Kills and reaps everything that is left and removes the temporary directories."""
        for key in list(self._nurseries):
            self.stop_nursery(*key)
        for worker in list(self._workers):
            self.kill(worker)
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        while self._anyone_left() and (left := deadline - time.monotonic()) > 0:
            self._watch.wait(left)
            self.events()
        while kill_inherited(self._known()) and time.monotonic() < deadline:
            reap_inherited(self._known())
            time.sleep(0.005)  # there is no descriptor to wait on for processes we never made
        for record in list(self._workers.values()):
            journal.note("worker.resists", "error", pid=record.pid)
            self._forget(record)
        for nursery in list(self._living):
            self._close_channel(nursery)
        self._census.close()
        self._estate.close()
        self._midwife.close()
        self._watch.close()
        self._janitor.close()

    # -- births -------------------------------------------------------------------------------

    def _ask_for_wanted(self) -> None:
        """Passes on what was asked of us, as far as nurseries and the census let it."""
        ready = [
            nursery
            for nursery in self._nurseries.values()
            if nursery.wanted and len(nursery.awaited) < BIRTHS_AT_ONCE_MAX
        ]
        due = self._census.due()
        if any((each.pool, index) in due for each in ready for index in each.wanted.values()):
            self._look_around()
        for nursery in ready:
            for worker, index in list(nursery.wanted.items()):
                if len(nursery.awaited) == BIRTHS_AT_ONCE_MAX:
                    break
                if not self._census.ending(nursery.pool, index):
                    del nursery.wanted[worker]
                    self._ask(nursery, worker, index)

    def _look_around(self) -> None:
        self._census.look({record.temp_dir.name for record in self._workers.values()})

    def _ask(self, nursery: NurseryProcess, worker: int, index: int) -> None:
        try:
            record = self._midwife.ask(nursery, worker, index)
        except OSError as error:
            self._tell(SpawnFailed(worker, f"the worker cannot be prepared: {error}"))
            return
        nursery.awaited.add(worker)
        self._workers[worker] = record
        self._tokens[record.token] = worker

    def _call_off(self, worker: int, signum: int) -> bool:
        """Ends a worker that was not even asked for; False if it is none of those."""
        for nursery in self._living:
            if nursery.wanted.pop(worker, None) is not None:
                self._tell(WorkerExited(worker, -signum, 0))
                return True
        return False

    # -- handlers of descriptors --------------------------------------------------------------

    def _found(self, pool: str, index: int, processes: int, directories: int) -> None:
        self._tell(LeftoversEnded(pool, index, processes, directories))

    def _tell(self, event: Event) -> None:
        self._happened.append(event)
        self._watch.wake()

    def _channel_ready(self, nursery: NurseryProcess) -> None:
        messages, closed = nursery.hear()
        for message, sender in messages:
            self._heard(nursery, message, sender)
        if closed:
            self._close_channel(nursery)

    def _heard(self, nursery: NurseryProcess, message: NurseryMessage, sender: int) -> None:
        match message:
            case NurseryUp():
                nursery.containment = Containment(message.containment, message.why)
                if self._nurseries.get(nursery.key) is nursery:  # else stopped meanwhile
                    if message.threads:
                        names = ", ".join(message.threads)
                        journal.note("nursery.threads", "warning", pool=nursery.pool, threads=names)
                    self._tell(NurseryReady(nursery.pool, message.declarations, nursery.build))
            case NurseryDown(reason):
                if self._nurseries.get(nursery.key) is nursery:
                    self.stop_nursery(*nursery.key)
                    self._tell(NurseryFailed(nursery.pool, reason, nursery.build))
            case Forked(worker, init_pid):
                nursery.awaited.discard(worker)
                if worker in self._workers:
                    self._forked(self._workers[worker], init_pid)
            case ForkFailed(worker, reason):
                nursery.awaited.discard(worker)
                if worker in self._workers:
                    self._give_up(self._workers[worker], SpawnFailed(worker, reason))
            case WorkerPid(worker):
                if worker in self._workers:
                    self._named(self._workers[worker], sender)

    def _forked(self, record: WorkerProcess, init_pid: int) -> None:
        """The init is our child by now: watch it, then let it go on."""
        try:
            record.init_fd = os.pidfd_open(init_pid)
        except OSError as error:
            self._give_up(
                record, SpawnFailed(record.number, f"its init cannot be watched: {error}")
            )
            return
        record.init_pid = init_pid
        self._watch.add(record.init_fd, functools.partial(self._init_ended, record))
        record.go()

    def _named(self, record: WorkerProcess, pid: int) -> None:
        record.name(pid)
        self._tell(WorkerForked(record.number, pid))

    def _nursery_ended(self, nursery: NurseryProcess) -> None:
        self._drain(nursery)
        self._watch.remove(nursery.pidfd)
        code = nursery.reap()
        if nursery.channel.fileno() < 0:
            self._living.discard(nursery)
        reason = f"the nursery {how_it_ended(code)}"
        if nursery.containment is None:
            reason += " while it loaded the worker class"
        if self._nurseries.get(nursery.key) is nursery:
            del self._nurseries[nursery.key]
            self._tell(NurseryExited(nursery.pool, reason, nursery.build))  # first: all ends here
        for worker in sorted(nursery.awaited & self._workers.keys()):
            self._give_up(self._workers[worker], SpawnFailed(worker, reason))
        nursery.awaited.clear()
        for worker in nursery.wanted:
            self._tell(SpawnFailed(worker, reason))
        nursery.wanted.clear()
        self._census.departed(nursery.mark, nursery.pool, NURSERY)
        self._look_around()

    def _init_ended(self, record: WorkerProcess) -> None:
        if not record.pid:
            self._drain(record.nursery)  # the worker may have told its pid and ended since
        code = record.reap()
        reading = record.board.read()
        if reading.exit_status is not None:
            code = reading.exit_status
        self._forget(record)
        if record.mode != PIDNS and reading.exit_status is None:
            self._strays_due = True  # the init was killed: what it kept together is ours now
            self._look_around()
        if record.pid or record.ended:
            lease = reading.lease or reading.unsent  # it may have died of sending its result
            oom = ""
            if code == -signal.SIGKILL and not record.ended:
                oom = self._oom.verdict(time.monotonic_ns())
            words, unhealthy = reading.last_words, reading.unhealthy
            beside = tuple(each for each, _ in reading.beside)
            self._tell(WorkerExited(record.number, code, lease, words, oom, unhealthy, beside))
        else:
            reason = (
                reading.last_words or f"its init {how_it_ended(code)} before there was a worker"
            )
            self._tell(SpawnFailed(record.number, reason))

    # -- endings ------------------------------------------------------------------------------

    def _drain(self, nursery: NurseryProcess) -> None:
        if nursery.channel.fileno() >= 0:
            self._channel_ready(nursery)

    def _close_channel(self, nursery: NurseryProcess) -> None:
        if nursery.channel.fileno() >= 0:
            self._watch.remove(nursery.channel.fileno())
            nursery.channel.close()
        if nursery.pidfd < 0:
            self._living.discard(nursery)

    def _give_up(self, record: WorkerProcess, event: Event) -> None:
        """Ends a worker that has not begun: its init never sees GO."""
        self._forget(record)
        self._tell(event)

    def _forget(self, record: WorkerProcess) -> None:
        del self._workers[record.number]
        self._tokens.pop(record.token, None)
        if record.init_fd >= 0:
            self._census.departed(record.mark, record.nursery.pool, record.index)
            self._watch.remove(record.init_fd)
        record.close()
        self._janitor.remove(record.temp_dir)
        if record.group is not None:
            self._census.remove_group(record.group)

    def _anyone_left(self) -> bool:
        return bool(self._workers) or any(nursery.pidfd >= 0 for nursery in self._living)

    def _known(self) -> set[int]:
        """The children that we made."""
        known = {nursery.process.pid for nursery in self._living if nursery.pidfd >= 0}
        known.update(record.init_pid for record in self._workers.values())
        return known
